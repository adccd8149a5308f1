"""Discrete-event simulation of a training loop: agents, gateway, engines, trainer.

1. `AgentLoad`, `EngineTimes`, `GatewayTimes` and `LoopTimes` describe the loop by times; they hold no
   knowledge of hardware.
2. An engine replica samples one token per decode step for each of its calls. Between two changes of its batch
   the steps are summed in closed form, so the events do not grow with the tokens.
3. Groups begin and are trained by the rules of the group scheduler: `StalenessWindow` itself decides.
4. Three accounts of the measured steps each add up to the wall time: trainer, agents and engines.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any, Literal

from msgspec import Struct

from afield.orchestrator.groups import Mode, StalenessWindow
from afield.orchestrator.state import PendingGroup

NEARLY = 1e-9
"""Seconds of a pass below which a remainder is rounding."""
NEARLY_STEP = 1e-6
"""Decode steps below which a remainder is rounding."""
LOOKAHEAD = 4
"""Steps beyond the measured ones whose groups may begin, so that a run's end does not shape the result."""
AgentState = Literal["launch", "gateway", "queue", "sampling", "tools", "idle"]
Bottleneck = Literal["engines", "trainer", "weights", "gateway", "tools", "launch"]


class Spread(Struct, frozen=True):
    """Log-normal distribution of a time or a number of tokens."""

    mean: float
    """Mean."""
    sigma: float = 0.0
    """Standard deviation of the logarithm; 0 makes all values equal."""

    def __post_init__(self) -> None:
        if not (0 <= self.mean < math.inf and 0 <= self.sigma <= 5):
            raise ValueError(
                f"mean = {self.mean:g} must be 0 or positive, sigma = {self.sigma:g} from 0 to 5"
            )

    def draw(self, rng: random.Random) -> float:
        if not self.sigma or not self.mean:
            return self.mean
        return self.mean * math.exp(rng.gauss(0.0, self.sigma) - self.sigma**2 / 2)

    def count(self, rng: random.Random, at_least: int = 1) -> int:
        """A whole number with this mean, as long as `at_least` is far below it."""
        value = self.draw(rng)
        return max(at_least, math.floor(value + (rng.random() if self.sigma else 0.5)))


class AgentLoad(Struct, frozen=True, kw_only=True):
    """Work of agents: turns, tokens, times between turns, and groups of a step."""

    agents: int
    """Rollouts at once (`concurrency`)."""
    tasks_per_step: int
    """Groups of a step (`tasks_per_step`)."""
    rollouts: int
    """Rollouts of a group (`rollouts`)."""
    turns: Spread = Spread(20.0)
    """Model calls of a rollout."""
    prompt: Spread = Spread(2000.0)
    """Tokens of the first prompt."""
    reply: Spread = Spread(300.0)
    """Tokens sampled in a call."""
    added: Spread = Spread(500.0)
    """Tokens that a tool result adds to the next prompt."""
    tool_s: Spread = Spread(4.7, 1.3)
    """Seconds from a reply to the next call."""
    launch_s: Spread = Spread(0.0)
    """Seconds from the start of a rollout to its first call."""
    finish_s: Spread = Spread(0.0)
    """Seconds from the last reply to the recorded result; the slot is taken until then."""
    launch_work_s: float = 0.0
    """Seconds of a machine's launches per rollout; launches of a machine follow each other."""
    stream: bool = True
    """Whether replies are streamed."""


class EngineTimes(Struct, frozen=True, kw_only=True):
    """Times and limits of each engine replica."""

    replicas: int
    """Engine replicas."""
    step_s: float
    """Seconds of a decode step without sequences."""
    sequence_s: float = 0.0
    """Seconds of a decode step per sequence."""
    kv_token_s: float = 0.0
    """Seconds of a decode step per cached token of its sequences."""
    prefill_s: float = 0.0
    """Seconds of a prefill pass without tokens."""
    prefill_token_s: float = 0.0
    """Seconds of a prefill pass per token."""
    prefill_tokens: int = 8192
    """Tokens of a prefill pass; a decode step runs beside each."""
    max_sequences: int = 1024
    """Calls at once; more wait."""
    kv_tokens: int = 1 << 60
    """Tokens that the KV cache holds, of running calls and of sessions between two calls."""
    own_gateway: bool = False
    """Whether each replica has a gateway process of its own, as embedded engines have."""

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.step_s < 0 or self.step_s + self.sequence_s <= 0:
            raise ValueError(
                f"replicas = {self.replicas} must be at least 1, and step_s = {self.step_s:g} and"
                f" sequence_s = {self.sequence_s:g} together positive"
            )

    def step(self, sequences: int, kv: float) -> float:
        """Seconds of one decode step."""
        return self.step_s + self.sequence_s * sequences + self.kv_token_s * kv


class GatewayTimes(Struct, frozen=True, kw_only=True):
    """Times of gateway processes; each serves one call after the other."""

    processes: int = 1
    """Gateway processes; each session stays on one."""
    call_s: float = 0.0
    """Seconds of the event loop per call, half before and half after the engine."""
    token_s: float = 0.0
    """Seconds of the event loop per streamed token."""
    history_s: float = 0.0
    """Seconds of the event loop per token of the prompt."""
    delay_s: float = 0.0
    """Seconds per call in which the event loop does not work: threads and network."""


class LoopTimes(Struct, frozen=True, kw_only=True):
    """A loop to simulate."""

    load: AgentLoad
    """Work of the agents."""
    engine: EngineTimes
    """Engine replicas."""
    gateway: GatewayTimes = GatewayTimes()
    """Gateway processes."""
    train_s: float
    """Seconds of a training step without tokens."""
    train_token_s: float
    """Seconds of a training step per token of its rollouts."""
    publish_s: float = 0.0
    """Seconds from a trained step until all engines sample with its weights; engines wait meanwhile."""
    poll_s: float = 0.0
    """Seconds until group scheduler or training loop sees a change of the run state."""
    mode: Mode = "sync"
    """Order of collecting and training (`mode`)."""
    staleness: int = 0
    """Largest age of a group in policy versions (`max_staleness`)."""
    warmup: int = 0
    """Steps before the measured ones."""
    steps: int = 2
    """Measured steps."""
    seed: int = 0
    """Seed of all draws; a rollout's turns depend on it and on the rollout's number only."""


class LoopForecast(Struct, frozen=True, kw_only=True):
    """Result of a simulation, of the measured steps."""

    step_s: float
    """Mean seconds of a step."""
    sampled_per_s: float
    """Tokens per second that trained rollouts sampled; in a steady state, what the engines sample."""
    produced_per_s: float
    """Tokens per second that the engines sampled; another rate than `sampled_per_s` while groups pile up or a
    pile is trained."""
    trained_per_s: float
    """Tokens of trained rollouts, prompts included, per second."""
    trainer: dict[str, float]
    """Mean seconds of a step in which the trainer is `training`, `weights` (publishing) or `idle`."""
    agents: dict[AgentState, float]
    """Mean seconds of a step per agent in each state."""
    engines: dict[str, float]
    """Mean seconds of a step per replica in `prefill`, `decode`, `weights` or `idle`."""
    calls: int
    """Model calls."""
    batch: float
    """Mean number of sequences in a decode step."""
    reused: float
    """Share of prompt tokens found in the KV cache."""
    gateway_load: float
    """Gateway processes that would be busy all the time; above `processes` is impossible."""
    staleness: float
    """Mean age of trained groups in policy versions."""
    stalest: int
    """Largest age of a trained group in policy versions."""
    bottleneck: Bottleneck
    """Part that takes the largest share of the trainer's time."""
    shares: dict[Bottleneck, float]
    """Share of the trainer's time of each part; they add up to 1."""
    processes: int
    """Gateway processes that were simulated."""
    events: int
    """Events of the simulation."""


def lasting_rate(forecast: LoopForecast) -> float:
    """Tokens per second that neither trainer nor engines exceed for long."""
    return min(forecast.sampled_per_s, forecast.produced_per_s)


class StateClock:
    """Time that members of a population spend in each state, exact at any moment."""

    def __init__(self) -> None:
        self._offset: dict[str, float] = {}
        self._count: dict[str, int] = {}

    def enter(self, state: str, at: float) -> None:
        self._offset[state] = self._offset.get(state, 0.0) - at
        self._count[state] = self._count.get(state, 0) + 1

    def leave(self, state: str, at: float) -> None:
        self._offset[state] += at
        self._count[state] -= 1

    def move(self, before: str, after: str, at: float) -> None:
        self.leave(before, at)
        self.enter(after, at)

    def totals(self, at: float) -> dict[str, float]:
        return {state: offset + self._count[state] * at for state, offset in self._offset.items()}


class SimulatedRollout:
    """A rollout's turns and its present context."""

    __slots__ = (
        *("added", "context", "finish_s", "group", "launch_s", "left", "pending", "process", "replies"),
        *("replica", "sampling", "tool_s", "turn"),
    )

    def __init__(self, load: AgentLoad, group: int, number: int, seed: int) -> None:
        rng = random.Random(f"{seed}/{group}/{number}")
        turns = load.turns.count(rng)
        self.group, self.turn, self.context = group, 0, 0
        self.added = [load.prompt.count(rng)]
        self.replies: list[int] = []
        self.tool_s: list[float] = []
        for turn in range(turns):
            self.replies.append(load.reply.count(rng))
            if turn < turns - 1:
                self.added.append(load.added.count(rng, at_least=0))
                self.tool_s.append(load.tool_s.draw(rng))
        self.launch_s, self.finish_s = load.launch_s.draw(rng), load.finish_s.draw(rng)
        self.process = rng.getrandbits(30)
        self.replica: SimulatedReplica | None = None
        self.left = 0.0  # tokens of the running call that are not sampled yet
        self.pending = 0  # tokens to prefill
        self.sampling = False

    @property
    def tokens(self) -> int:
        return sum(self.added) + sum(self.replies)


class SimulatedReplica:
    """Engine replica: calls wait, are prefilled in passes, and decode together."""

    __slots__ = (
        *("at", "batch_time", "cached", "cached_tokens", "decode_s", "due", "idle_s"),
        *("joining", "kv", "kv_reserved", "level", "number", "order", "pass_calls", "pass_left"),
        *("pass_share", "pass_steps", "prefill_s", "prompt_tokens", "reused_tokens", "running"),
        *("sampling", "stalled_until", "times", "waiting", "weights_s"),
    )

    def __init__(self, times: EngineTimes, number: int) -> None:
        self.times, self.number = times, number
        self.at = 0.0
        self.due = math.inf  # time of the event that ends the pass or the shortest call
        self.order = 0
        self.stalled_until = 0.0  # weights are loading
        self.waiting: deque[SimulatedRollout] = deque()
        self.joining: deque[SimulatedRollout] = deque()
        self.sampling: list[tuple[float, int, SimulatedRollout]] = []
        self.level = 0.0  # decode steps since the start
        self.kv = 0.0
        self.kv_reserved = 0
        self.running = 0
        self.cached: OrderedDict[SimulatedRollout, int] = OrderedDict()  # sessions between two calls
        self.cached_tokens = 0
        self.idle_s = self.prefill_s = self.decode_s = self.weights_s = self.batch_time = 0.0
        self.pass_calls: list[SimulatedRollout] = []
        self.pass_left = self.pass_share = 0.0
        self.pass_steps = 0
        self.prompt_tokens = self.reused_tokens = 0

    def advance(self, now: float) -> None:
        """Bring the replica to `now`; its batch does not change before."""
        left = now - self.at
        if left <= 0:
            return
        if self.stalled_until > self.at:
            stall = min(now, self.stalled_until) - self.at
            self.weights_s += stall
            left -= stall
        self.at = now
        if left <= 0:
            return
        if self.pass_calls:
            self.pass_left -= left
            self.prefill_s += left * (1 - self.pass_share)
            self.decode_s += left * self.pass_share
            self.batch_time += left * self.pass_share * len(self.sampling)
        elif self.sampling:
            count = len(self.sampling)
            step, growth = self.times.step(count, self.kv), self.times.kv_token_s * count
            # The root of left = step * steps + growth * steps**2 / 2, in the form that loses no digits.
            steps = 2 * left / (step + math.sqrt(step * step + 2 * growth * left))
            self.level += steps
            self.kv += steps * count
            self.decode_s += left
            self.batch_time += left * count
        else:
            self.idle_s += left

    def next_change(self) -> float:
        """When the pass or the shortest call ends; infinity without work."""
        if self.pass_calls:
            seconds = max(0.0, self.pass_left)
        elif self.sampling:
            steps = max(0.0, self.sampling[0][0] - self.level)
            count = len(self.sampling)
            seconds = steps * self.times.step(count, self.kv) + self.times.kv_token_s * count * steps**2 / 2
        else:
            return math.inf
        return max(self.at, self.stalled_until) + seconds

    def ended(self) -> list[SimulatedRollout]:
        """End the pass if it is over, and return the calls that are complete."""
        if self.pass_calls and self.pass_left <= NEARLY:
            self._end_pass()
        complete: list[SimulatedRollout] = []
        while self.sampling and self.sampling[0][0] <= self.level + NEARLY_STEP:
            end, _, call = heapq.heappop(self.sampling)
            self.kv -= call.context + call.replies[call.turn] + (self.level - end)
            if not self.sampling:
                self.kv = 0.0
            self._release(call)
            complete.append(call)
        return complete

    def _end_pass(self) -> None:
        self.level += self.pass_steps if self.sampling else 0
        self.kv += self.pass_steps * len(self.sampling)
        for call in self.pass_calls:
            self._decode(call, call.left - 1)  # the pass samples the first token
        self.pass_calls = []

    def _decode(self, call: SimulatedRollout, steps: float) -> None:
        self.order += 1
        heapq.heappush(self.sampling, (self.level + max(0.0, steps), self.order, call))
        self.kv += call.context + call.replies[call.turn] - max(0.0, steps)

    def _release(self, call: SimulatedRollout) -> None:
        self.running -= 1
        size = call.context + call.replies[call.turn]
        self.kv_reserved -= size
        if call.turn < len(call.replies) - 1:
            self.cached[call] = size
            self.cached_tokens += size

    def admit(self) -> None:
        """Let waiting calls begin while there is room."""
        times = self.times
        while self.waiting and self.running < times.max_sequences:
            call = self.waiting[0]
            size = call.context + call.replies[call.turn]
            if self.running and self.kv_reserved + size > times.kv_tokens:
                return
            self.waiting.popleft()
            found = self.cached.pop(call, 0)
            self.cached_tokens -= found
            self.running += 1
            self.kv_reserved += size
            while self.cached and self.cached_tokens + self.kv_reserved > times.kv_tokens:
                self.cached_tokens -= self.cached.popitem(last=False)[1]
            call.pending = call.context - found
            call.left = call.replies[call.turn]
            self.prompt_tokens += call.context
            self.reused_tokens += found
            self.joining.append(call)

    def begin_pass(self) -> list[SimulatedRollout]:
        """Begin a prefill pass if calls have joined; returns its calls."""
        if self.pass_calls or not self.joining:
            return []
        times, tokens = self.times, 0
        while self.joining and (
            not self.pass_calls or tokens + self.joining[0].pending <= times.prefill_tokens
        ):
            call = self.joining.popleft()
            tokens += call.pending
            self.pass_calls.append(call)
        self.pass_steps = max(1, -(-tokens // times.prefill_tokens))
        prefill = self.pass_steps * times.prefill_s + tokens * times.prefill_token_s
        count = len(self.sampling)
        decode = self.pass_steps * times.step(count, self.kv) if count else 0.0
        self.pass_left = max(prefill + decode, self.pass_steps * times.step_s)  # one step at least
        self.pass_share = decode / self.pass_left if self.pass_left else 0.0
        return self.pass_calls

    def swap(self) -> None:
        """New weights: cached keys and values are void, and running calls compute theirs again."""
        self.cached.clear()
        self.cached_tokens = 0
        again = list(self.pass_calls)
        for call in again:
            call.pending = call.context + call.replies[call.turn] - math.ceil(call.left)
        for end, _, call in sorted(self.sampling, key=lambda entry: entry[:2]):
            call.left = max(1.0, end - self.level)
            call.pending = call.context + call.replies[call.turn] - math.ceil(call.left)
            again.append(call)
        for call in self.joining:
            call.pending = call.context + call.replies[call.turn] - math.ceil(call.left)
        self.sampling, self.pass_calls, self.kv = [], [], 0.0
        self.joining.extendleft(reversed(again))


class LoopSimulation:
    """Event loop of one simulation; `run` returns its forecast."""

    def __init__(self, times: LoopTimes) -> None:
        load = times.load
        self.times = times
        self.window = StalenessWindow(
            mode=times.mode,
            groups=(times.warmup + times.steps + times.staleness + LOOKAHEAD) * load.tasks_per_step,
            batch=load.tasks_per_step,
            staleness=times.staleness,
        )
        self.replicas = [SimulatedReplica(times.engine, number) for number in range(times.engine.replicas)]
        self.sampled = self.trained = self.calls = self.finished = self.begun = 0
        self.trained_sampled = 0
        self.version = 0
        self.gateway_s = 0.0
        self.clock, self.trainer = StateClock(), StateClock()
        self._sessions = [0] * times.engine.replicas
        self._free = [0.0] * times.gateway.processes
        self._launch_free = 0.0
        self._events: list[tuple[float, int, Callable[[float, Any], None], Any]] = []
        self._number = 0
        self._waiting: deque[SimulatedRollout] = deque()
        self._running = 0
        self._position = 0
        self._groups: dict[int, tuple[int, int]] = {}  # begun after step, rollouts left
        self._tokens: dict[int, list[int]] = {}  # tokens and sampled tokens of a group
        self._ready = 0
        self._training = False
        self._ages: list[int] = []
        self._marks: list[dict[str, Any]] = []

    # --- running -----------------------------------------------------------------------------------

    def run(self) -> LoopForecast:
        times, last = self.times, self.times.warmup + self.times.steps
        for _ in range(times.load.agents):
            self.clock.enter("idle", 0.0)
        self.trainer.enter("idle", 0.0)
        if not times.warmup:
            self._mark(0.0)
        self._begin_groups(0.0, None)
        now = 0.0
        while self.version < last:
            now, _, handle, argument = heapq.heappop(self._events)
            handle(now, argument)
        return self._forecast()

    def _at(self, time: float, handle: Callable[[float, Any], None], argument: Any) -> None:
        self._number += 1
        heapq.heappush(self._events, (time, self._number, handle, argument))

    # --- groups ------------------------------------------------------------------------------------

    def _begin_groups(self, now: float, _: Any) -> None:
        load = self.times.load
        while (
            not self._waiting
            and self._running < load.agents
            and self.window.admits(self._position, self.version)
        ):
            group = self._position
            self._position += 1
            self._groups[group] = (self.version, load.rollouts)
            self._tokens[group] = [0, 0]
            self._waiting += [
                SimulatedRollout(load, group, number, self.times.seed) for number in range(load.rollouts)
            ]
            self._start_rollouts(now)

    def _start_rollouts(self, now: float) -> None:
        load = self.times.load
        while self._waiting and self._running < load.agents:
            rollout = self._waiting.popleft()
            self._running += 1
            self.begun += 1
            index = self._sessions.index(min(self._sessions))
            self._sessions[index] += 1
            rollout.replica = self.replicas[index]
            key = index if self.times.engine.own_gateway else rollout.process
            rollout.process = key % self.times.gateway.processes
            self.clock.move("idle", "launch", now)
            self._launch_free = max(now, self._launch_free) + load.launch_work_s
            self._at(self._launch_free + rollout.launch_s, self._first_call, rollout)

    def _finish(self, now: float, rollout: SimulatedRollout) -> None:
        self.clock.move("launch", "idle", now)
        assert rollout.replica is not None
        self._sessions[rollout.replica.number] -= 1
        self._running -= 1
        self.finished += 1
        tokens = self._tokens[rollout.group]
        tokens[0] += rollout.tokens
        tokens[1] += sum(rollout.replies)
        begun, left = self._groups[rollout.group]
        self._groups[rollout.group] = (begun, left - 1)
        if left == 1:
            self._ready += 1
            if not self._training and self._ready >= self.window.batch:
                self._at(now + self.times.poll_s, self._train, None)
        self._start_rollouts(now)
        self._begin_groups(now, None)

    # --- calls -------------------------------------------------------------------------------------

    def _first_call(self, now: float, rollout: SimulatedRollout) -> None:
        self._call(now, rollout, "launch")

    def _next_call(self, now: float, rollout: SimulatedRollout) -> None:
        self._call(now, rollout, "tools")

    def _call(self, now: float, rollout: SimulatedRollout, before: AgentState) -> None:
        gateway = self.times.gateway
        rollout.context += rollout.added[rollout.turn]
        self.clock.move(before, "gateway", now)
        end = self._serve(now, rollout, gateway.call_s / 2 + gateway.history_s * rollout.context)
        self._at(end + gateway.delay_s / 2, self._arrive, rollout)

    def _serve(self, now: float, rollout: SimulatedRollout, work: float) -> float:
        """Put work into the queue of the session's gateway process; returns when it is done."""
        end = max(now, self._free[rollout.process]) + work
        self._free[rollout.process] = end
        self.gateway_s += work
        return end

    def _arrive(self, now: float, rollout: SimulatedRollout) -> None:
        self.clock.move("gateway", "queue", now)
        replica = rollout.replica
        assert replica is not None
        replica.waiting.append(rollout)
        self._settle(now, replica)

    def _wake(self, now: float, replica: SimulatedReplica) -> None:
        if replica.due == now:
            self._settle(now, replica)

    def _settle(self, now: float, replica: SimulatedReplica) -> None:
        """Advance a replica, answer its complete calls, begin others, and find its next change."""
        replica.advance(now)
        for rollout in replica.ended():
            self._reply(now, rollout)
        replica.admit()
        if replica.stalled_until <= now:
            for rollout in replica.begin_pass():
                if not rollout.sampling:
                    rollout.sampling = True
                    self.clock.move("queue", "sampling", now)
            due = replica.next_change()
        else:
            due = replica.stalled_until
        if due != replica.due:
            replica.due = due
            if due < math.inf:
                self._at(due, self._wake, replica)

    def _reply(self, now: float, rollout: SimulatedRollout) -> None:
        gateway, load = self.times.gateway, self.times.load
        reply = rollout.replies[rollout.turn]
        rollout.context += reply
        rollout.sampling = False
        rollout.turn += 1
        self.calls += 1
        self.sampled += reply
        self.clock.move("sampling", "gateway", now)
        end = self._serve(now, rollout, gateway.call_s / 2 + gateway.token_s * reply * load.stream)
        end += gateway.delay_s / 2
        # Counted from `end` on: until then both clocks are off by as much, and their sum is right.
        if rollout.turn < len(rollout.replies):
            self.clock.move("gateway", "tools", end)
            self._at(end + rollout.tool_s[rollout.turn - 1], self._next_call, rollout)
        else:
            self.clock.move("gateway", "launch", end)
            self._at(end + rollout.finish_s, self._finish, rollout)

    # --- training ----------------------------------------------------------------------------------

    def _train(self, now: float, _: Any) -> None:
        if self._training or self._ready < self.window.batch:
            return
        pending = [
            PendingGroup(f"g{group}", group, begun, not left, None)
            for group, (begun, left) in self._groups.items()
        ]
        chosen = self.window.choose(self.version + 1, pending)
        if chosen is None:
            return
        self._training = True
        tokens = 0
        for group in chosen:
            size, sampled = self._tokens.pop(group.position)
            begun, _ = self._groups.pop(group.position)
            tokens += size
            self.trained_sampled += sampled
            if self.version >= self.times.warmup:
                self._ages.append(self.version - begun)
        self._ready -= len(chosen)
        self.trained += tokens
        self.trainer.move("idle", "training", now)
        self._at(now + self.times.train_s + self.times.train_token_s * tokens, self._publish, None)

    def _publish(self, now: float, _: Any) -> None:
        self.trainer.move("training", "weights", now)
        for replica in self.replicas:
            replica.advance(now)
            replica.stalled_until = now + self.times.publish_s
            replica.due = -1.0  # the next change is found after the transfer
        self._at(now + self.times.publish_s, self._published, None)

    def _published(self, now: float, _: Any) -> None:
        self.trainer.move("weights", "idle", now)
        self.version += 1
        self._training = False
        for replica in self.replicas:
            replica.advance(now)
            replica.swap()
            self._settle(now, replica)
        if self.version in (self.times.warmup, self.times.warmup + self.times.steps):
            self._mark(now)
        self._at(now + self.times.poll_s, self._begin_groups, None)
        self._at(now + self.times.poll_s, self._train, None)

    # --- result ------------------------------------------------------------------------------------

    def _mark(self, now: float) -> None:
        """Keep all totals at a moment."""
        replicas = self.replicas
        for replica in replicas:
            replica.advance(now)
        self._marks.append(
            {
                "now": now,
                "sampled": self.sampled,
                "trained_sampled": self.trained_sampled,
                "trained": self.trained,
                "calls": self.calls,
                "gateway_s": self.gateway_s,
                "prompt": sum(replica.prompt_tokens for replica in replicas),
                "reused": sum(replica.reused_tokens for replica in replicas),
                "batch": sum(replica.batch_time for replica in replicas),
                "trainer": self.trainer.totals(now),
                "agents": self.clock.totals(now),
                "engines": {
                    "prefill": sum(replica.prefill_s for replica in replicas),
                    "decode": sum(replica.decode_s for replica in replicas),
                    "weights": sum(replica.weights_s for replica in replicas),
                    "idle": sum(replica.idle_s for replica in replicas),
                },
            }
        )

    def _forecast(self) -> LoopForecast:
        first, last = self._marks
        times, steps = self.times, self.times.steps
        wall = last["now"] - first["now"]

        def spent(account: str, members: int) -> dict[Any, float]:
            return {
                state: (value - first[account].get(state, 0.0)) / steps / members
                for state, value in last[account].items()
            }

        agents = spent("agents", times.load.agents)
        trainer, engines = spent("trainer", 1), spent("engines", times.engine.replicas)
        busy = last["batch"] - first["batch"]
        decode = engines["decode"] * steps * times.engine.replicas
        shares = loop_shares(trainer, agents)
        prompt = last["prompt"] - first["prompt"]
        return LoopForecast(
            step_s=wall / steps,
            sampled_per_s=(last["trained_sampled"] - first["trained_sampled"]) / wall,
            produced_per_s=(last["sampled"] - first["sampled"]) / wall,
            trained_per_s=(last["trained"] - first["trained"]) / wall,
            trainer={state: trainer.get(state, 0.0) for state in ("training", "weights", "idle")},
            agents=agents,
            engines=engines,
            calls=last["calls"] - first["calls"],
            batch=busy / decode if decode else 0.0,
            reused=(last["reused"] - first["reused"]) / prompt if prompt else 0.0,
            gateway_load=(last["gateway_s"] - first["gateway_s"]) / wall,
            staleness=sum(self._ages) / len(self._ages),
            stalest=max(self._ages),
            bottleneck=max(shares, key=lambda part: shares[part]),
            shares=shares,
            processes=times.gateway.processes,
            events=self._number,
        )


def loop_shares(trainer: dict[str, float], agents: dict[Any, float]) -> dict[Bottleneck, float]:
    """Share of the trainer's time of each part.

    The time in which the trainer waits for groups is divided as the agents with a rollout spend theirs.
    """
    wall = sum(trainer.values())
    waiting = trainer.get("idle", 0.0)
    working = {state: seconds for state, seconds in agents.items() if state != "idle"}
    total = sum(working.values())
    parts: dict[Bottleneck, float] = {
        "trainer": trainer.get("training", 0.0) / wall,
        "weights": trainer.get("weights", 0.0) / wall,
    }
    names: dict[str, Bottleneck] = {
        "queue": "engines",
        "sampling": "engines",
        "gateway": "gateway",
        "tools": "tools",
        "launch": "launch",
    }
    for state, part in names.items():
        share = working.get(state, 0.0) / total if total else 0.0
        parts[part] = parts.get(part, 0.0) + waiting / wall * share
    return parts


def simulate(times: LoopTimes) -> LoopForecast:
    """Simulate a loop; equal times and seed give an equal forecast."""
    return LoopSimulation(times).run()
