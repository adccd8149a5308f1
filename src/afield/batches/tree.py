"""Tree form of a batch: one node per trained turn, sharing prefixes.

1. The sequence of a node is its parent's sequence, its `context_ids` and its `token_ids`. Parents come first.
2. With `share`, common prefixes of a group's prompts become nodes that no rollout owns.
3. `TreeBatch.to_rows` restores the linear batch exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, structs

from afield import trajectories
from afield.batches.rows import (
    Batch,
    OwnedTurn,
    RolloutRecord,
    Row,
    check_ids,
    check_logprobs,
    check_rewards,
    records_by_id,
    shift_spans,
    usage_errors,
)
from afield.turn_tree import TurnTree
from afield.types import FinishReason, Image, Trajectory, Turn, TurnStatus, VersionSpan, check_cover

ROOT = -1


class Node(Struct, frozen=True, kw_only=True):
    """Trained turn, or prompt prefix that rollouts of a group share."""

    group_id: str
    """Group id."""
    rollout_id: str = ""
    """Rollout id; empty for a shared prompt, which has no turn and no sampled tokens."""
    parent: int = ROOT
    """Index of the parent node; -1 for a root."""
    context_ids: tuple[int, ...] = ()
    """Ids between the parent's sequence and the sampled tokens."""
    token_ids: tuple[int, ...] = ()
    """Sampled ids."""
    logprobs: tuple[float, ...] = ()
    """Log-probability of each sampled id when sampled."""
    versions: tuple[VersionSpan, ...] = ()
    """Version spans, counted from the first sampled token."""
    turn: OwnedTurn | None = None
    """Turn with offsets from the first sampled token; None for a shared prompt."""

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
    """A batch as a table of nodes, and a record of every rollout."""

    nodes: tuple[Node, ...]
    """Nodes, parents first."""
    rollouts: tuple[RolloutRecord, ...]
    """Record of every rollout, including those without nodes."""

    def __post_init__(self) -> None:
        records = records_by_id(self.rollouts)
        seen: dict[str, set[str]] = {}
        for n, node in enumerate(self.nodes):
            self._check_place(n, node)
            if node.turn is None:
                continue
            record = records.get(node.rollout_id)
            if record is None or record.rollout.group_id != node.group_id or not record.trains:
                raise ValueError(f"{node.where}: no rollout of group {node.group_id} that trains has this id")
            mine = seen.setdefault(node.rollout_id, set())
            if node.turn.id in mine:
                raise ValueError(f"{node.where}: it is in the tree more than once")
            mine.add(node.turn.id)
        for rollout_id, record in records.items():
            check_rewards(record, seen.get(rollout_id, set()))

    def _check_place(self, n: int, node: Node) -> None:
        if not ROOT <= node.parent < n:
            raise ValueError(f"{node.where}: node {n} has the parent {node.parent}, which is not above it")
        above = self.nodes[node.parent] if node.parent != ROOT else None
        if above and (above.group_id != node.group_id or above.rollout_id not in ("", node.rollout_id)):
            raise ValueError(f"{node.where}: its parent is of another group or rollout")
        parent = above.turn.id if above and above.turn else ""
        if node.turn and parent != node.turn.parent:
            raise ValueError(
                f"{node.where}: its node is below {parent!r}, its parent is {node.turn.parent!r}"
            )

    @property
    def tokens(self) -> int:
        """Number of tokens that a forward pass computes."""
        return sum(len(node.context_ids) + len(node.token_ids) for node in self.nodes)

    def to_rows(self) -> Batch:
        """Convert to the linear batch of the same rollouts."""
        prompts: list[tuple[int, ...]] = []  # whole prompt of each node without a turn above it
        nodes: dict[str, list[Node]] = {}
        for node in self.nodes:
            above = self.nodes[node.parent] if node.parent != ROOT else None
            if above is None or above.turn is None:
                prompts.append((prompts[node.parent] if above else ()) + node.context_ids)
                node = structs.replace(node, context_ids=prompts[-1])
            else:
                prompts.append(())
            if node.turn is not None:
                nodes.setdefault(node.rollout_id, []).append(node)
        with usage_errors("this tree has no rows"):
            rows = [
                row
                for record in self.rollouts
                for row in linear_rows(record, nodes.get(record.rollout.id, []))
            ]
            return Batch(form="linear", rows=tuple(rows), rollouts=self.rollouts)


def to_tree(batch: Batch, *, share: bool = True) -> TreeBatch:
    """Convert a batch to a tree; with `share`, common prompt prefixes of a group become nodes."""
    groups: dict[str, list[list[Node]]] = {}
    rows: dict[str, list[Row]] = {}
    for row in batch.rows:
        rows.setdefault(row.rollout_id, []).append(row)
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


Part = tuple[int, tuple[int, ...]]  # index of the parent, and the ids that follow it


def shared(prompts: Sequence[tuple[int, ...]], first: int) -> tuple[list[Part], list[Part]]:
    """Prefixes that prompts share, as nodes from index `first` on, and the rest of each prompt."""
    nodes: list[Part] = []
    left: list[Part] = [(ROOT, prompt) for prompt in prompts]
    waiting = [(ROOT, 0, list(range(len(prompts))))]
    while waiting:
        above, offset, members = waiting.pop()
        branches: dict[int, list[int]] = {}
        for member in members:
            left[member] = (above, prompts[member][offset:])
            if offset < len(prompts[member]):
                branches.setdefault(prompts[member][offset], []).append(member)
        for same in branches.values():
            if len(same) > 1:
                end = offset + common([prompts[member][offset:] for member in same])
                nodes.append((above, prompts[same[0]][offset:end]))
                waiting.append((first + len(nodes) - 1, end, same))
    return nodes, left


def common(sequences: Sequence[tuple[int, ...]]) -> int:
    """Length of the common prefix."""
    low, high = min(sequences), max(sequences)
    return next(
        (n for n, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high))
    )


# --- rows to nodes and back, rollout by rollout --------------------------------------------------


def nodes_of(rows: Sequence[Row]) -> list[Node]:
    """Nodes, one per owned turn, in commit order; `parent` is an index into this list."""
    owned = sorted(((turn, row) for row in rows for turn in row.turns), key=lambda pair: pair[0].order)
    index = {turn.id: n for n, (turn, _) in enumerate(owned)}
    ends = {turn.id: turn.end for turn, _ in owned}
    nodes: list[Node] = []
    for turn, row in owned:
        if turn.parent and index.get(turn.parent, len(nodes)) >= len(nodes):
            raise ValueError(
                f"rollout {row.rollout_id}, turn {turn.id}: its parent {turn.parent} does not come before it"
            )
        if row.turns[-1].end != len(row.token_ids):
            raise ValueError(f"{row.where}: it has token ids after its last sampled token; remove them")
        nodes.append(
            Node(
                group_id=row.group_id,
                rollout_id=row.rollout_id,
                parent=index[turn.parent] if turn.parent else ROOT,
                context_ids=row.token_ids[ends.get(turn.parent, 0) : turn.start],
                token_ids=row.token_ids[turn.start : turn.end],
                logprobs=row.trajectory.logprobs[turn.start : turn.end],
                versions=shift_spans(row.trajectory.versions, turn.start, turn.end),
                turn=structs.replace(turn, start=0, end=turn.end - turn.start),
            )
        )
    return nodes


def turns_of(nodes: Sequence[Node]) -> list[Turn]:
    """The turns of one rollout, without messages, digests, tags and times, which nodes do not keep."""
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
                constraint=turn.constraint,
            )
        )
    return turns


def linear_rows(record: RolloutRecord, nodes: Sequence[Node]) -> list[Row]:
    """The linear rows of one rollout."""
    ordered = sorted(nodes, key=lambda node: node.turn.order if node.turn else 0)
    turns = {node.turn.id: node.turn for node in ordered if node.turn}
    linear = trajectories.linear(TurnTree(turns_of(ordered))).trajectories
    return [row_of(record, index, trajectory, turns) for index, trajectory in enumerate(linear)]


def row_of(
    record: RolloutRecord,
    index: int,
    trajectory: Trajectory,
    turns: dict[str, OwnedTurn],
    images: tuple[Image, ...] = (),
) -> Row:
    """Build a row whose turns have parent and order, taken from `turns`."""
    where = f"rollout {record.rollout.id}"
    if not trajectory.turns:
        raise ValueError(f"{where}: a row of it owns no sampled token")
    owned = tuple(
        structs.replace(turns[turn.id], start=turn.start, end=turn.end) for turn in trajectory.turns
    )
    return Row(
        rollout_id=record.rollout.id,
        group_id=record.rollout.group_id,
        index=index,
        trajectory=structs.replace(trajectory, turns=owned),
        images=images,
    )
