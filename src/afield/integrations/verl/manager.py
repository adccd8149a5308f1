"""veRL's agent loop manager: its batches become rollouts, and what came of them its rows.

    +actor_rollout_ref.rollout.agent.agent_loop_manager_class=afield.integrations.verl.Manager

`generate_sequences` returns at once; agents run in places of their own, through one client for all of them.
A group is written when all its rollouts have ended: its rows, then `finished`; or, with too few rewards,
no row and `failure`. What breaks collecting ends training: veRL finds the reason in place of a status.
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
from afield.integrations.verl import baselines, rows, settings
from afield.integrations.verl.dataset import task_of
from afield.orchestrator.groups import greedy
from afield.orchestrator.state import RolloutStore
from afield.token_account import ExclusionWatch, TokenAccount, listed
from afield.types import Rollout, Sampling, Split

if TYPE_CHECKING:
    from afield.integrations.verl.clients import GatewayConnection

log = logging.getLogger("afield.verl")


class TransferQueue:
    """What this needs of TransferQueue."""

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
    """One call of `generate_sequences`."""

    step: int
    split: Split
    version: int  # of the weights when it was asked
    groups: int


class StepCounts:
    """What came of an `GenerateCall`, for the log, and to know when nothing came of it."""

    def __init__(self, asked: GenerateCall) -> None:
        self.asked = asked
        self.counts: Counter[str] = Counter()
        self.tokens = TokenAccount()

    def add(self, judged: rows.GroupRows, tokens: TokenAccount) -> bool:
        """True with the last group of it."""
        self.tokens += tokens
        self.counts["groups"] += 1
        self.counts["dropped"] += judged.dropped is not None
        self.counts["sessions"] += len(judged.sessions)
        self.counts["rows"] += sum(len(one.rows) for one in judged.sessions)
        self.counts.update(f"left out: {why.partition(':')[0]}" for why in judged.left_out.values())
        return self.counts["groups"] == self.asked.groups

    def __str__(self) -> str:
        told = ", ".join(f"{count} {name}" for name, count in self.counts.items() if count)
        excluded = f" ({listed(self.tokens.excluded)})" if self.tokens.excluded else ""
        share = f"{self.tokens.sampled} tokens, {self.tokens.excluded_share:.1%} excluded{excluded}"
        return f"step {self.asked.step} ({self.asked.split}): {told}; {share}"

    def line(self) -> dict[str, Any]:
        """As it is written to metrics.jsonl of the run's folder."""
        return {
            "step": self.asked.step,
            "split": str(self.asked.split),
            **{name: self.counts[name] for name in ("groups", "dropped", "sessions", "rows")},
            "sampled_tokens": self.tokens.sampled,
            "trained_tokens": self.tokens.trained,
            "excluded_tokens": dict(self.tokens.excluded),
            "excluded_share": round(self.tokens.excluded_share, 6),
            "untrained_tokens": dict(self.tokens.untrained),
        }


class PromptGroup:
    """The rollouts of one prompt, until the last of them has ended; with `greedy`, that is a baseline."""

    def __init__(
        self,
        prompt: dict[str, Any],
        tally: StepCounts,
        futures: Sequence[RolloutFuture],
        greedy: RolloutFuture | None = None,
    ) -> None:
        self.prompt, self.tally, self.futures, self.greedy = prompt, tally, futures, greedy
        self._all = [*futures, *([greedy] if greedy else [])]
        self._missing = len(self._all)
        self._lock = threading.Lock()

    @property
    def uid(self) -> str:
        return str(self.prompt["uid"])

    def when_ended(self, call: Callable[[PromptGroup], object]) -> None:
        def one_more(_: RolloutFuture) -> None:
            with self._lock:
                self._missing -= 1
                last = self._missing == 0
            if last:
                call(self)

        for future in self._all:
            future.add_done_callback(one_more)
        if not self._all:  # a prompt may ask for none, and veRL waits for its end all the same
            call(self)


class Manager:
    def __init__(
        self, given: settings.Given, client: RolloutClient, queue: TransferQueue, door: GatewayConnection
    ) -> None:
        """Where the gateway does not know versions, they are those that veRL tells with its batches."""
        self._given = given
        self._client = client
        self._queue = queue
        self._door = door
        self._spool = RolloutStore(client.rundir.rollout_store)
        self._writer = ThreadPoolExecutor(1, "afield-verl")  # in order, and veRL's queue has one loop anyway
        self._lock = threading.Lock()
        self._open: dict[str, str] = {}  # uids veRL waits for, and their partition
        self._broken: BaseException | None = None
        self._fruitless = 0
        self._excluded = ExclusionWatch()
        self._version = 0
        self._baselines = baselines.Baselines()
        self._vision = rows.vision_of(given.trainer.model)

    @classmethod
    def create(
        cls,
        config: Any,
        llm_client: Any = None,
        teacher_client: Any = None,
        reward_loop_worker_handles: Any = None,
    ) -> Self:
        """What veRL calls, once its rollout servers are there."""
        given = settings.read(config)
        if teacher_client is not None:
            raise UsageError("rows of agents have no teacher's log-probabilities; switch distillation off")
        if reward_loop_worker_handles is None:
            raise UsageError(
                "veRL's reward model would overwrite what agents are rewarded with:"
                " set reward.reward_model.enable=False"
            )
        from afield.integrations.verl import clients

        door = clients.connect_gateway(given, llm_client)
        made = cls(given, clients.client(given, door), TransferQueue(), door)
        if given.trainer.estimator == baselines.REMAX:
            baselines.register(made._baselines)
        atexit.register(made.close)
        door.when_gone(lambda error: made._then(made._give_up, error))
        return made

    def close(self) -> None:
        """End all that still runs. Repeating is harmless."""
        atexit.unregister(self.close)
        self._broken = self._broken or UsageError("the manager is closed")
        self._writer.shutdown(wait=True, cancel_futures=True)
        self._client.close()

    # --- what veRL asks for -----------------------------------------------------------------------

    def generate_sequences(self, prompts: Any) -> None:
        """Begin every prompt's rollouts, and return."""
        if self._broken is not None:
            raise self._broken
        split = Split.VAL if _flag(prompts, "validate") else Split.TRAIN
        asked = [_row(prompts, i) for i in range(len(prompts))]
        if not asked:
            return
        step = int(asked[0]["global_steps"])
        # veRL counts a step's number up before it asks, and after the weights of the one before are there.
        version = step if split is Split.VAL else max(0, step - 1)
        self._version = max(self._version, version)
        tally = StepCounts(GenerateCall(step=step, split=split, version=version, groups=len(asked)))
        with self._lock:
            self._open |= {str(prompt["uid"]): str(split) for prompt in asked}
        self._then(self._begin, asked, tally)

    def _begin(self, asked: Sequence[dict[str, Any]], tally: StepCounts) -> None:
        for prompt in asked:
            self._queue.mark(str(prompt["uid"]), str(tally.asked.split), "running")
            rollouts = self._rollouts(prompt, tally.asked.split)
            compared = bool(rollouts) and tally.asked.split is Split.TRAIN
            greedy_one = None
            if compared and self._given.trainer.estimator == baselines.REMAX:
                greedy_one = self._client.begin(_greedy(rollouts[0]))
            futures = [self._client.begin(rollout) for rollout in rollouts]
            group = PromptGroup(prompt, tally, futures, greedy_one)
            group.when_ended(lambda group: self._then(self._write, group))

    def _rollouts(self, prompt: dict[str, Any], split: Split) -> list[Rollout]:
        uid = str(prompt["uid"])
        if "_" in uid:
            raise UsageError(f"uid {uid!r} has a '_', which separates the parts of veRL's row keys")
        trainer, task = self._given.trainer, task_of(prompt)
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
        trainer = self._given.trainer
        if split is Split.VAL:
            return trainer.val_sampling
        return trainer.sampling if prompt.get("__do_sample__", True) else greedy(trainer.sampling)

    # --- what came of it, in the writer's thread ---------------------------------------------------

    def _write(self, group: PromptGroup) -> None:
        """Rows first: veRL takes a group as soon as its status says that it has ended."""
        if self._broken is not None:
            return
        asked = group.tally.asked
        finished = [future.finished() for future in group.futures]
        train = asked.split is Split.TRAIN
        number = min(len(finished), self._given.quorum) if train else 1
        credit = self._given.credit
        judged = rows.group_rows(
            finished,
            quorum=number,
            floor=self._given.settings.floor,
            branches=self._given.branches,
            image_id=self._vision.image_id if self._vision else None,
            credit=credit if train else structs.replace(credit, turns=False),  # validation shows the reward
        )
        if group.greedy is not None and judged.dropped is None:
            judged = self._compared(group, judged)
        if not self._door.versioned:
            judged = _stamped(judged, asked.version, self._version)
        entries = [
            entry
            for one in judged.sessions
            for entry in rows.queue_entries(
                group.prompt, one, weighted=self._given.weighted, vision=self._vision
            )
        ]
        self._account(group, judged, rows.token_account(finished, judged))
        if entries:
            self._queue.put(entries, str(asked.split))
        self._queue.mark(group.uid, str(asked.split), "failure" if judged.dropped else "finished")
        with self._lock:
            self._open.pop(group.uid, None)
        for future in (*group.futures, *([group.greedy] if group.greedy else [])):
            self._spool.remove(future.finished().rollout.id)

    def _compared(self, group: PromptGroup, judged: rows.GroupRows) -> rows.GroupRows:
        """Keep the reward of the greedy rollout; a group without one has nothing to be compared with."""
        assert group.greedy is not None
        greedy_one = group.greedy.finished()
        outcome = greedy_one.outcome
        reward = rows.baseline(greedy_one, floor=self._given.settings.floor, credit=self._given.credit)
        if reward is None:
            assert outcome.failure is not None
            told = f"its greedy baseline has no reward: {outcome.failure.kind}/{outcome.failure.reason}"
            return rows.GroupRows(sessions=(), left_out=judged.left_out, dropped=told)
        self._baselines.put(group.uid, reward)
        return judged

    def _account(self, group: PromptGroup, judged: rows.GroupRows, tokens: TokenAccount) -> None:
        asked = group.tally.asked
        if asked.split is Split.TRAIN and (warning := self._excluded.add(tokens)):
            log.warning("%s", warning)
        for rollout_id, why in judged.left_out.items():
            log.warning("rollout %s is left out: %s", rollout_id, why)
        if judged.dropped:
            replaced = "another takes its place" if self._given.trainer.refills else "its step has fewer rows"
            log.warning("group %s is dropped: %s (%s)", group.uid, judged.dropped, replaced)
        if group.tally.add(judged, tokens):
            log.info("%s", group.tally)
            self._client.rundir.append_metrics(group.tally.line())
            if asked.split is Split.VAL and not group.tally.counts["rows"]:
                raise NoRewards(f"a validation of {asked.groups} tasks without any result: {judged.dropped}")
        if asked.split is Split.TRAIN:
            self._fruitless = self._fruitless + 1 if judged.dropped else 0
            if self._fruitless >= self._given.settings.fruitless:
                told = (
                    f"{self._fruitless} groups in a row could not be trained; the last one: {judged.dropped}"
                )
                raise NoRewards(told)

    # --- when something breaks ---------------------------------------------------------------------

    def _then(self, work: Callable[..., None], *arguments: Any) -> None:
        """In the writer's thread; what it raises ends training."""
        try:
            future = self._writer.submit(work, *arguments)
        except RuntimeError:  # the writer was closed, and with it everything that ran
            return
        future.add_done_callback(self._done)

    def _done(self, future: Future[None]) -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            self._break(error)

    def _give_up(self, error: Unavailable) -> None:
        raise error

    def _break(self, error: BaseException) -> None:
        """veRL looks at the status of its groups every few seconds, and refuses one it does not know."""
        if self._broken is not None:
            return
        self._broken = error
        log.error("collecting ends: %s", error, exc_info=error)
        with self._lock:
            waiting, self._open = dict(self._open), {}
        told = f"{type(error).__name__}: {error}"
        for uid, partition in list(waiting.items())[:1]:
            self._queue.mark(uid, partition, f"afield has stopped collecting: {told}")


def _greedy(rollout: Rollout) -> Rollout:
    sampling = greedy(rollout.sampling or Sampling())
    return structs.replace(rollout, id=f"{rollout.group_id}-greedy", sampling=sampling)


def _stamped(judged: rows.GroupRows, low: int, high: int) -> rows.GroupRows:
    sessions = tuple(rows.with_versions(one, low, max(low, high)) for one in judged.sessions)
    return structs.replace(judged, sessions=sessions)


def _flag(prompts: Any, name: str) -> bool:
    return bool(prompts[name]) if name in prompts.keys() else False  # noqa: SIM118 (a TensorDict)


def _row(prompts: Any, i: int) -> dict[str, Any]:
    """A row of veRL's batch, where what is the same for all is there once."""
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
            told = f"column {name!r} of veRL's batch is a {type(value).__name__}"
            raise UsageError(f"{told}; expected a tensor or data beside tensors")
    return row
