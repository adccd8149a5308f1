"""Frozen trainer: checks and metrics of a step, without weight updates.

Serves as the control of an experiment: a reward that rises under it does not rise because of training.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from afield.advantages import compute_advantages
from afield.batches.verification import check_against_turns
from afield.errors import DamagedFile, UsageError
from afield.interfaces.trainer import StepReport
from afield.trainers.batch import check_rows, to_batch, token_account
from afield.trainers.model_directory import replaced
from afield.types import Group


class Frozen:
    """Trainer without updates; exports the model directory unchanged.

    `truncated` accepts turns that were sampled with top_p or top_k, which no trainer could train.
    """

    def __init__(self, model_path: str | Path, *, floor: float = 0.0, truncated: bool = False) -> None:
        self.model_path = Path(model_path)
        self.floor = floor
        self.truncated = truncated
        self.steps = 0
        config = self.model_path / "config.json"
        if not config.is_file():
            raise UsageError(f"{model_path} is not a model directory: it has no config.json")
        values = json.loads(config.read_text())
        self._config = values.get("text_config") or values
        self.context: int | None = self._config.get("max_position_embeddings")

    def step(self, groups: Sequence[Group]) -> StepReport:
        check_against_turns(groups)
        batch = to_batch(groups, compute_advantages(groups, floor=self.floor), self.context)
        check_rows(
            batch.rows,
            vocabulary=self._config["vocab_size"],
            context=self.context,
            no_images="",
            truncated=self.truncated,
        )
        self.steps += 1
        account = token_account(groups, batch)
        metrics = {"tokens": float(batch.tokens), **account.metrics()}
        return StepReport(
            rollouts=len(batch.rollout_ids),
            tokens=batch.tokens,
            too_long=len(batch.too_long),
            metrics=metrics,
            account=account,
            advantages=batch.advantages,
        )

    def export(self, directory: Path) -> None:
        with replaced(directory) as fresh:
            shutil.copytree(self.model_path, fresh, dirs_exist_ok=True)

    def save(self, directory: Path) -> None:
        with replaced(directory) as fresh:
            (fresh / "trainer.json").write_text(json.dumps({"steps": self.steps}))

    def restore(self, directory: Path) -> None:
        path = Path(directory) / "trainer.json"
        if not path.is_file():
            raise DamagedFile(
                f"{directory} holds no trainer.json; restore from a directory that save() wrote"
            )
        try:
            self.steps = int(json.loads(path.read_text())["steps"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedFile(f"{path} cannot be read: {error}") from error
