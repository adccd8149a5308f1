"""The same tokens as a table of nodes: each trained turn once, with what it adds to the node above it.

A node's sequence is that of its parent followed by its `context_ids` and `token_ids`. With `share`, what the
prompts of a group's roots have in common becomes nodes of its own, which no rollout owns. Nodes stand
behind their parents. `Tree.to_rows` gives the linear batch back, exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct, structs

from afield import trajectories
from afield.batches.sample import (
    Batch,
    OwnedTurn,
    RolloutRecord,
    Sample,
    by_id,
    check_ids,
    check_logprobs,
    check_rewards,
    usage_errors,
)
from afield.turn_tree import TurnTree
from afield.types import FinishReason, Trajectory, Turn, TurnStatus, VersionSpan, check_cover

ROOT = -1


class Node(Struct, frozen=True, kw_only=True):
    """`parent` is a place in the table, -1 for none. `turn` and `versions` count from the first sampled
    token. A prompt that rollouts share has no rollout, no turn and no sampled tokens.
    """

    group_id: str
    rollout_id: str = ""
    parent: int = ROOT
    context_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[VersionSpan, ...] = ()
    turn: OwnedTurn | None = None

    def __post_init__(self) -> None:
        where = self.where
        if (self.turn is None) != (not self.rollout_id):
            raise ValueError(f"{where}: a node has a rollout and its turn, or is a shared prompt")
        if self.turn is not None and (self.turn.start, self.turn.end) != (0, len(self.token_ids)):
            raise ValueError(f"{where}: the turn is not the {len(self.token_ids)} sampled tokens of its node")
        if bool(self.turn) != bool(self.token_ids):
            raise ValueError(f"{where}: sampled tokens without a turn, or a turn without any")
        if len(self.token_ids) != len(self.logprobs):
            raise ValueError(
                f"{where}: {len(self.token_ids)} sampled ids, {len(self.logprobs)} log-probabilities"
            )
        check_ids((*self.context_ids, *self.token_ids), where)
        check_logprobs(self.logprobs, where)
        check_cover(self.versions, [(0, len(self.token_ids))], where)

    @property
    def where(self) -> str:
        return f"rollout {self.rollout_id or '(shared)'}, turn {self.turn.id if self.turn else '(prompt)'}"


class TreeBatch(Struct, frozen=True, kw_only=True):
    nodes: tuple[Node, ...]
    rollouts: tuple[RolloutRecord, ...]

    def __post_init__(self) -> None:
        known = by_id(self.rollouts)
        seen: dict[str, set[str]] = {}
        for n, node in enumerate(self.nodes):
            self._check_place(n, node)
            if node.turn is None:
                continue
            record = known.get(node.rollout_id)
            if record is None or record.rollout.group_id != node.group_id or not record.trains:
                raise ValueError(f"{node.where}: no rollout of group {node.group_id} that trains has this id")
            mine = seen.setdefault(node.rollout_id, set())
            if node.turn.id in mine:
                raise ValueError(f"{node.where}: it is in the tree more than once")
            mine.add(node.turn.id)
        for rollout_id, record in known.items():
            check_rewards(record, seen.get(rollout_id, set()))

    def _check_place(self, n: int, node: Node) -> None:
        if not ROOT <= node.parent < n:
            raise ValueError(f"{node.where}: node {n} has the parent {node.parent}, which is not above it")
        above = self.nodes[node.parent] if node.parent != ROOT else None
        if above and (above.group_id != node.group_id or above.rollout_id not in ("", node.rollout_id)):
            raise ValueError(f"{node.where}: its parent is of another group or rollout")
        parent = above.turn.id if above and above.turn else ""
        if node.turn and parent != node.turn.parent:
            raise ValueError(f"{node.where}: it stands under {parent!r} and names {node.turn.parent!r}")

    @property
    def tokens(self) -> int:
        """How many there are to compute."""
        return sum(len(node.context_ids) + len(node.token_ids) for node in self.nodes)

    def to_rows(self) -> Batch:
        """The linear batch of the same rollouts."""
        prompts: list[tuple[int, ...]] = []  # of each node that stands under no turn
        nodes: dict[str, list[Node]] = {}
        for node in self.nodes:
            above = self.nodes[node.parent] if node.parent != ROOT else None
            if above is None or above.turn is None:
                # What is shared is put back in front of the roots.
                prompts.append((prompts[node.parent] if above else ()) + node.context_ids)
                node = structs.replace(node, context_ids=prompts[-1])
            else:
                prompts.append(())
            if node.turn is not None:
                nodes.setdefault(node.rollout_id, []).append(node)
        with usage_errors("this tree has no rows"):
            samples = [
                s for record in self.rollouts for s in rows_of(record, nodes.get(record.rollout.id, []))
            ]
            return Batch(form="linear", samples=tuple(samples), rollouts=self.rollouts)


def to_tree(batch: Batch, *, share: bool = True) -> TreeBatch:
    groups: dict[str, list[list[Node]]] = {}
    rows: dict[str, list[Sample]] = {}
    for sample in batch.samples:
        rows.setdefault(sample.rollout_id, []).append(sample)
    with usage_errors("this batch has no tree"):
        for mine in rows.values():
            groups.setdefault(mine[0].group_id, []).append(nodes_of(mine))
        table: list[Node] = []
        for group_id, members in groups.items():
            _add_group(table, group_id, members, share=share)
        return TreeBatch(nodes=tuple(table), rollouts=batch.rollouts)


def _add_group(table: list[Node], group_id: str, members: list[list[Node]], *, share: bool) -> None:
    roots = [node for nodes in members for node in nodes if node.parent == ROOT]
    begins = [(ROOT, node.context_ids) for node in roots]
    if share:
        prompts, begins = shared([node.context_ids for node in roots], len(table))
        table.extend(Node(group_id=group_id, parent=parent, context_ids=ids) for parent, ids in prompts)
    places = iter(begins)
    for nodes in members:
        first = len(table)
        for node in nodes:
            parent, context = (first + node.parent, node.context_ids) if node.parent != ROOT else next(places)
            table.append(structs.replace(node, parent=parent, context_ids=context))


Part = tuple[int, tuple[int, ...]]  # the place of what stands above, and the ids that come behind it


def shared(prompts: Sequence[tuple[int, ...]], first: int) -> tuple[list[Part], list[Part]]:
    """What at least two prompts begin with, as nodes from place `first` on; and what each has left."""
    nodes: list[Part] = []
    left: list[Part] = [(ROOT, prompt) for prompt in prompts]
    waiting = [(ROOT, 0, list(range(len(prompts))))]
    while waiting:
        above, at, members = waiting.pop()
        branches: dict[int, list[int]] = {}
        for member in members:
            left[member] = (above, prompts[member][at:])
            if at < len(prompts[member]):
                branches.setdefault(prompts[member][at], []).append(member)
        for same in branches.values():
            if len(same) > 1:
                end = at + common([prompts[member][at:] for member in same])
                nodes.append((above, prompts[same[0]][at:end]))
                waiting.append((first + len(nodes) - 1, end, same))
    return nodes, left


def common(sequences: Sequence[tuple[int, ...]]) -> int:
    """How many ids all of them begin with."""
    low, high = min(sequences), max(sequences)
    return next(
        (n for n, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high))
    )


# --- rows to nodes and back, rollout by rollout --------------------------------------------------


def nodes_of(rows: Sequence[Sample]) -> list[Node]:
    """One per owned turn, in the order they were committed; `parent` counts within this list."""
    owned = sorted(((turn, row) for row in rows for turn in row.turns), key=lambda pair: pair[0].order)
    places = {turn.id: n for n, (turn, _) in enumerate(owned)}
    ends = {turn.id: len(row.prompt_ids) + turn.end for turn, row in owned}
    ids = {row.row: row.token_ids for row in rows}
    nodes: list[Node] = []
    for turn, row in owned:
        if turn.parent and places.get(turn.parent, len(nodes)) >= len(nodes):
            raise ValueError(
                f"rollout {row.rollout_id}, turn {turn.id}: its parent {turn.parent} is not before it"
            )
        begins, before = ends.get(turn.parent, 0), len(row.prompt_ids)
        if row.turns[-1].end != len(row.response_ids):
            raise ValueError(f"{row.where}: ids behind its last sampled token have no place in a tree")
        nodes.append(
            Node(
                group_id=row.group_id,
                rollout_id=row.rollout_id,
                parent=places[turn.parent] if turn.parent else ROOT,
                context_ids=ids[row.row][begins : before + turn.start],
                token_ids=row.response_ids[turn.start : turn.end],
                logprobs=row.logprobs[turn.start : turn.end],
                versions=moved(row.versions, turn.start, turn.end),
                turn=structs.replace(turn, start=0, end=turn.end - turn.start),
            )
        )
    return nodes


def moved(spans: Iterable[VersionSpan], start: int, end: int) -> tuple[VersionSpan, ...]:
    """The spans of tokens [start, end), counted from `start`."""
    inside = ((max(s.start, start), min(s.end, end), s) for s in spans)
    return tuple(VersionSpan(a - start, b - start, s.low, s.high) for a, b, s in inside if a < b)


def turns_of(nodes: Sequence[Node]) -> list[Turn]:
    """The turns of one rollout as far as nodes keep them: no messages, digests, tags or times."""
    turns: list[Turn] = []
    roots: dict[str, str] = {}
    for node in nodes:
        turn = node.turn
        assert turn is not None
        roots[turn.id] = roots[turn.parent] if turn.parent else turn.id
        turns.append(
            Turn(
                id=turn.id,
                root=roots[turn.id],
                parent=turn.parent or None,
                delta_ids=node.context_ids,
                token_ids=node.token_ids,
                logprobs=node.logprobs,
                versions=node.versions,
                finish_reason=FinishReason(turn.finish_reason or "stop"),
                status=TurnStatus.COMMITTED,
                sampling=turn.sampling,
                tier=turn.tier,
            )
        )
    return turns


def rows_of(record: RolloutRecord, nodes: Sequence[Node]) -> list[Sample]:
    """The linear rows of one rollout."""
    ordered = sorted(nodes, key=lambda node: node.turn.order if node.turn else 0)
    known = {node.turn.id: node.turn for node in ordered if node.turn}
    linear = trajectories.linear(TurnTree(turns_of(ordered))).trajectories
    return [sample_of(record, row, trajectory, known) for row, trajectory in enumerate(linear)]


def sample_of(record: RolloutRecord, row: int, trajectory: Trajectory, known: dict[str, OwnedTurn]) -> Sample:
    """A row as a sample. `known` has the turns it owns; where they lie is taken from the row."""
    where = f"rollout {record.rollout.id}"
    if not trajectory.turns:
        raise ValueError(f"{where}: a row of it owns no sampled token")
    before = trajectory.turns[0].start
    turns = (
        structs.replace(known[turn.id], start=turn.start - before, end=turn.end - before)
        for turn in trajectory.turns
    )
    if record.score is None:
        raise ValueError(f"{where}: a rollout that does not train has rows")
    return Sample(
        rollout_id=record.rollout.id,
        group_id=record.rollout.group_id,
        row=row,
        prompt_ids=trajectory.token_ids[:before],
        response_ids=trajectory.token_ids[before:],
        response_mask=trajectory.loss_mask[before:],
        logprobs=trajectory.logprobs[before:],
        versions=moved(trajectory.versions, before, len(trajectory.token_ids)),
        turns=tuple(turns),
        weight=trajectory.weight,
        score=record.score,
        rewards=record.outcome.rewards,
        failure=str(record.outcome.failure.kind) if record.outcome.failure else "",
        attempts=record.attempts,
    )
