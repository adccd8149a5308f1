"""veRL agent loop manager: batches become rollouts, rollouts become rows.

    +actor_rollout_ref.rollout.agent.agent_loop_manager_class=afield.integrations.verl.Manager

`generate_sequences` returns at once; one client runs all agents. A group is written when all its rollouts
have ended: its rows, then the status `finished`; or, with too few rewards, no rows and `failure`. An error
while collecting is written as a status, which ends training.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

from msgspec import Struct, structs

from afield.client import RolloutClient, RolloutFuture
from afield.errors import NoRewards, Unavailable, UsageError
from afield.integrations.step_recorder import StepRecorder
from afield.integrations.verl import baselines, rows, settings
from afield.integrations.verl.dataset import task_of
from afield.orchestrator.groups import greedy
from afield.orchestrator.state import RolloutStore
from afield.runs.token_account import ExclusionWatch, TokenAccount, listed
from afield.types import Group, Rollout, RolloutResult, Sampling, Split

if TYPE_CHECKING:
    from afield.integrations.verl.clients import GatewayConnection

log = logging.getLogger(__name__)
MAX_ROLLOUT_BYTES = 50 * 10**9
"""Size of rollouts/ above which files of the oldest steps are removed."""
KEPT_STEPS = 3
"""Newest steps whose rollouts are kept in any case."""


class TransferQueue:
    """The operations of TransferQueue that the manager uses."""

    def put(self, entries: Sequence[rows.QueueEntry], partition: str) -> None:
        import transfer_queue  # pyright: ignore[reportMissingImports]
        from verl.utils.tensordict_utils import (  # pyright: ignore[reportMissingImports]
            list_of_dict_to_tensordict,
        )

        transfer_queue.kv_batch_put(
            keys=[entry.key for entry in entries],
            fields=list_of_dict_to_tensordict([entry.fields for entry in entries]),
            tags=[entry.tag for entry in entries],
            partition_id=partition,
        )

    def mark(self, uid: str, partition: str, status: str) -> None:
        import transfer_queue  # pyright: ignore[reportMissingImports]

        transfer_queue.kv_put(key=uid, partition_id=partition, tag={"status": status})


class GenerateCall(Struct, frozen=True, kw_only=True):
    """Parameters of a `generate_sequences` call."""

    step: int
    """veRL's global step."""
    split: Split
    """Training or validation."""
    version: int
    """Version of the weights at the time of the call."""
    groups: int
    """Number of prompts."""


class StepCounts:
    """Counts of one `GenerateCall`, for the log."""

    def __init__(self, call: GenerateCall) -> None:
        self.call = call
        self.counts: Counter[str] = Counter()
        self.tokens = TokenAccount()

    def add(self, group: rows.GroupRows, tokens: TokenAccount) -> bool:
        """Add a group; True for the last group of the call."""
        self.tokens += tokens
        self.counts["groups"] += 1
        self.counts["dropped"] += group.dropped is not None
        self.counts["sessions"] += len(group.sessions)
        self.counts["rows"] += sum(len(session.rows) for session in group.sessions)
        self.counts.update(f"left out: {reason.partition(':')[0]}" for reason in group.left_out.values())
        return self.counts["groups"] == self.call.groups

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in self.counts.items() if count)
        excluded = f" ({listed(self.tokens.excluded)})" if self.tokens.excluded else ""
        share = f"{self.tokens.sampled} tokens, {self.tokens.excluded_share:.1%} excluded{excluded}"
        return f"step {self.call.step} ({self.call.split}): {counts}; {share}"

    @property
    def fields(self) -> dict[str, int]:
        """Fields of the line of metrics.jsonl that only veRL has."""
        return {name: self.counts[name] for name in ("groups", "dropped", "sessions", "rows")}


class PromptGroup:
    """The rollouts of one prompt, and its greedy baseline if it has one."""

    def __init__(
        self,
        prompt: dict[str, Any],
        counts: StepCounts,
        futures: Sequence[RolloutFuture],
        greedy: RolloutFuture | None = None,
    ) -> None:
        self.prompt, self.counts, self.futures, self.greedy = prompt, counts, futures, greedy
        self._all = [*futures, *([greedy] if greedy else [])]
        self._missing = len(self._all)
        self._lock = threading.Lock()

    @property
    def uid(self) -> str:
        return str(self.prompt["uid"])

    def when_ended(self, callback: Callable[[PromptGroup], object]) -> None:
        def one_more(_: RolloutFuture) -> None:
            with self._lock:
                self._missing -= 1
                last = self._missing == 0
            if last:
                callback(self)

        for future in self._all:
            future.add_done_callback(one_more)
        if not self._all:  # veRL also waits for prompts without rollouts
            callback(self)


class Manager:
    """Agent loop manager of veRL: starts rollouts for its batches and writes their rows to TransferQueue."""

    def __init__(
        self, run: settings.VerlRun, client: RolloutClient, queue: TransferQueue, gateway: GatewayConnection
    ) -> None:
        self._run = run
        self._client = client
        self._queue = queue
        self._gateway = gateway
        self._rollout_store = RolloutStore(client.rundir.rollout_store, index=client.rundir.index)
        self._writer = ThreadPoolExecutor(1, "afield-verl")  # one thread keeps writes in order
        self._lock = threading.Lock()
        self._open: dict[str, str] = {}  # partition by uid of the prompts that veRL waits for
        self._broken: BaseException | None = None
        self._groups_dropped = 0
        self._excluded = ExclusionWatch()
        self._version = 0
        self._steps = StepRecorder(client.rundir)
        self._waiting: list[int] = []  # training steps that the trainer has not ended yet
        self._baselines = baselines.Baselines()
        self._vision = rows.vision_of(run.trainer.model)

    @classmethod
    def create(
        cls,
        config: Any,
        llm_client: Any = None,
        teacher_client: Any = None,
        reward_loop_worker_handles: Any = None,
    ) -> Self:
        """Called by veRL once its rollout servers run."""
        run = settings.read(config)
        if teacher_client is not None:
            raise UsageError("rows of agents have no teacher's log-probabilities; switch distillation off")
        if reward_loop_worker_handles is None:
            raise UsageError(
                "veRL's reward model would overwrite what agents are rewarded with:"
                " set reward.reward_model.enable=False"
            )
        from afield.integrations.verl import clients

        gateway = clients.connect_gateway(run, llm_client)
        manager = cls(run, clients.client(run, gateway).start(), TransferQueue(), gateway)
        if run.trainer.estimator == baselines.REMAX:
            baselines.register(manager._baselines)
        atexit.register(manager.close)
        gateway.when_gone(lambda error: manager._submit(manager._give_up, error))
        return manager

    def close(self) -> None:
        """End all rollouts; idempotent."""
        atexit.unregister(self.close)
        self._broken = self._broken or UsageError("the manager is closed")
        self._writer.shutdown(wait=True, cancel_futures=True)
        self._client.close()

    # --- called by veRL --------------------------------------------------------------------------------

    def generate_sequences(self, prompts: Any) -> None:
        """Start the rollouts of every prompt without waiting for them."""
        if self._broken is not None:
            raise self._broken
        split = Split.VAL if _flag(prompts, "validate") else Split.TRAIN
        batch = [_row(prompts, i) for i in range(len(prompts))]
        if not batch:
            return
        step = int(batch[0]["global_steps"])
        # veRL increments the step before this call, after the weights of the previous step are loaded.
        version = step if split is Split.VAL else max(0, step - 1)
        self._version = max(self._version, version)
        counts = StepCounts(GenerateCall(step=step, split=split, version=version, groups=len(batch)))
        with self._lock:
            self._open |= {str(prompt["uid"]): str(split) for prompt in batch}
        self._submit(self._begin, batch, counts)

    def _begin(self, batch: Sequence[dict[str, Any]], counts: StepCounts) -> None:
        self._trained(counts.call)
        for prompt in batch:
            self._queue.mark(str(prompt["uid"]), str(counts.call.split), "running")
            rollouts = self._rollouts(prompt, counts.call.split)
            compared = bool(rollouts) and counts.call.split is Split.TRAIN
            greedy_one = None
            if compared and self._run.trainer.estimator == baselines.REMAX:
                greedy_one = self._client.begin(_greedy(rollouts[0]))
            futures = [self._client.begin(rollout) for rollout in rollouts]
            group = PromptGroup(prompt, counts, futures, greedy_one)
            group.when_ended(lambda group: self._submit(self._write, group))

    def _trained(self, call: GenerateCall) -> None:
        """Record the steps before a call: it comes once their weights are loaded."""
        for step in [step for step in self._waiting if step <= call.version]:
            self._waiting.remove(step)
            self._steps.trained(step)
        self._steps.published(call.version)
        self._steps.begin(call.step, call.split)
        if call.split is Split.TRAIN and call.step not in self._waiting:
            self._waiting.append(call.step)

    def _rollouts(self, prompt: dict[str, Any], split: Split) -> list[Rollout]:
        uid = str(prompt["uid"])
        if "_" in uid:
            raise UsageError(f"uid {uid!r} has a '_', which separates the parts of veRL's row keys")
        trainer, task = self._run.trainer, task_of(prompt)
        usual = trainer.val_rollouts if split is Split.VAL else trainer.rollouts
        number = int(prompt.get("__rollout_n__", usual))
        return [
            Rollout(
                id=f"{uid}-{k}",
                exp_id=self._client.config.exp_id,
                group_id=uid,
                task=task,
                split=split,
                sampling=self._sampling(prompt, split),
            )
            for k in range(number)
        ]

    def _sampling(self, prompt: dict[str, Any], split: Split) -> Sampling:
        trainer = self._run.trainer
        if split is Split.VAL:
            return trainer.val_sampling
        return trainer.sampling if prompt.get("__do_sample__", True) else greedy(trainer.sampling)

    # --- in the writer thread --------------------------------------------------------------------------

    def _write(self, group: PromptGroup) -> None:
        """Write the rows of a group, then its status: veRL reads the rows once the status is final."""
        if self._broken is not None:
            return
        call = group.counts.call
        finished = [future.finished() for future in group.futures]
        train = call.split is Split.TRAIN
        number = min(len(finished), self._run.quorum) if train else 1
        credit = self._run.credit
        result = rows.group_rows(
            finished,
            quorum=number,
            floor=self._run.settings.floor,
            branches=self._run.branches,
            image_id=self._vision.image_id if self._vision else None,
            # Validation reports the reward of the outcome.
            credit=credit if train else structs.replace(credit, turns=False),
        )
        if group.greedy is not None and result.dropped is None:
            result = self._with_baseline(group, result)
        if not self._gateway.versioned:
            versions = (call.version, max(call.version, self._version))
            sessions = tuple(structs.replace(one, versions=versions) for one in result.sessions)
            result = structs.replace(result, sessions=sessions)
        entries = [
            entry
            for one in result.sessions
            for entry in rows.queue_entries(
                group.prompt, one, weighted=self._run.weighted, vision=self._vision
            )
        ]
        tokens = rows.token_account(finished, result)
        self._steps.add(
            call.step,
            Group(id=group.uid, task_id=group.uid, epoch=0, split=call.split, finished=tuple(finished)),
            version=call.version if self._gateway.versioned else None,
            account=tokens,
            trained=len(result.sessions),
            dropped=result.dropped,
        )
        self._account(group, result, tokens)
        if entries:
            self._queue.put(entries, str(call.split))
        self._queue.mark(group.uid, str(call.split), "failure" if result.dropped else "finished")
        with self._lock:
            self._open.pop(group.uid, None)
        self._keep(call, [*finished, *([group.greedy.finished()] if group.greedy else [])])

    def _keep(self, call: GenerateCall, results: Sequence[RolloutResult]) -> None:
        """Move rollouts from the rollout store to the file of their step."""
        self._client.rundir.append_rollouts(call.step, results)
        for result in results:
            self._rollout_store.remove(result.rollout.id)

    def _with_baseline(self, group: PromptGroup, result: rows.GroupRows) -> rows.GroupRows:
        """Keep the reward of the greedy rollout; a group without one is dropped."""
        assert group.greedy is not None
        greedy_one = group.greedy.finished()
        outcome = greedy_one.outcome
        reward = rows.baseline(greedy_one, floor=self._run.settings.floor, credit=self._run.credit)
        if reward is None:
            assert outcome.failure is not None
            reason = f"its greedy baseline has no reward: {outcome.failure.kind}/{outcome.failure.reason}"
            return rows.GroupRows(sessions=(), left_out=result.left_out, dropped=reason)
        self._baselines.put(group.uid, reward)
        return result

    def _account(self, group: PromptGroup, result: rows.GroupRows, tokens: TokenAccount) -> None:
        call = group.counts.call
        train = call.split is Split.TRAIN
        if train and (warning := self._excluded.add(tokens)):
            log.warning("%s", warning)
        for rollout_id, reason in result.left_out.items():
            log.warning("rollout %s is left out: %s", rollout_id, reason)
        if result.dropped:
            replaced = "another takes its place" if self._run.trainer.refills else "its step has fewer rows"
            log.warning("group %s is dropped: %s (%s)", group.uid, result.dropped, replaced)
        if group.counts.add(result, tokens):
            log.info("%s", group.counts)
            self._steps.collected(call.step, call.split, **(group.counts.fields if train else {}))
            self._client.rundir.prune_rollouts(MAX_ROLLOUT_BYTES, keep_steps=KEPT_STEPS)
            if call.split is Split.VAL and not group.counts.counts["rows"]:
                raise NoRewards(f"a validation of {call.groups} tasks without any result: {result.dropped}")
        if train:
            self._groups_dropped = self._groups_dropped + 1 if result.dropped else 0
            if self._groups_dropped >= self._run.settings.fruitless:
                raise NoRewards(
                    f"{self._groups_dropped} groups in a row could not be trained; last: {result.dropped}"
                )

    # --- errors ----------------------------------------------------------------------------------------

    def _submit(self, work: Callable[..., None], *arguments: Any) -> None:
        """Run in the writer thread; an error ends training."""
        try:
            future = self._writer.submit(work, *arguments)
        except RuntimeError:  # the writer is closed
            return
        future.add_done_callback(self._done)

    def _done(self, future: Future[None]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            self._break(error)

    def _give_up(self, error: Unavailable) -> None:
        raise error

    def _break(self, error: BaseException) -> None:
        """Write the error as a group's status, which veRL polls and refuses."""
        if self._broken is not None:
            return
        self._broken = error
        log.error("collection ended: %s", error, exc_info=error)
        with self._lock:
            waiting, self._open = dict(self._open), {}
        reason = f"{type(error).__name__}: {error}"
        for uid, partition in list(waiting.items())[:1]:
            self._queue.mark(uid, partition, f"afield has stopped collecting: {reason}")


def _greedy(rollout: Rollout) -> Rollout:
    sampling = greedy(rollout.sampling or Sampling())
    return structs.replace(rollout, id=f"{rollout.group_id}-greedy", sampling=sampling)


def _flag(prompts: Any, name: str) -> bool:
    return bool(prompts[name]) if name in prompts.keys() else False  # noqa: SIM118 (a TensorDict)


def _row(prompts: Any, i: int) -> dict[str, Any]:
    """A row of veRL's batch; values common to all rows are stored once."""
    import torch
    from tensordict import NonTensorData, NonTensorStack

    row: dict[str, Any] = {}
    for name, value in prompts.items():
        if isinstance(value, torch.Tensor):
            row[name] = value[i]
        elif isinstance(value, NonTensorStack):
            row[name] = value[i].data
        elif isinstance(value, NonTensorData):
            row[name] = value.data
        else:
            column = f"column {name!r} of veRL's batch is a {type(value).__name__}"
            raise UsageError(f"{column}; expected a tensor or non-tensor data")
    return row
