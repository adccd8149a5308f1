"""ATIF, Harbor's Agent Trajectory Interchange Format, with token ids.

1. `write_atif` writes one file per rollout. Each path of the turn tree is a trajectory: the first is the
   document, the others are its `subagent_trajectories`. Steps that an earlier path has are copied context.
2. Every sampled turn is an agent step with `prompt_token_ids`, `completion_token_ids` and `logprobs`. Fields
   that ATIF does not have are in `extra.afield`.
3. `read_atif` reads files of afield, Harbor and others. Files of afield give back the batch exactly. In
   other files a turn continues the longest earlier one that its prompt begins with.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from afield import wire
from afield.batches.groups import from_groups, owned_turns, record_of, refuse_images, rows_in_form
from afield.batches.rows import Batch, OwnedTurn, RolloutRecord, usage_errors
from afield.batches.tree import ROOT, Node, TreeBatch, nodes_of, turns_of
from afield.errors import UsageError
from afield.turn_tree import TurnTree
from afield.types import Group, Message, Outcome, Rollout, RolloutResult, Task, ToolCall, Turn, VersionSpan

SCHEMA = "ATIF-v1.7"
OWN = "afield"
"""Key of afield's fields in `extra` objects."""
SOURCES = {"system": "system", "developer": "system", "user": "user", "assistant": "agent", "tool": "user"}
RESULT_FILE = "result.json"
"""Result of a Harbor trial, two levels above its `agent/trajectory.json`."""


class AtifStep(Struct, frozen=True, kw_only=True):
    """Fields of an agent step that training needs."""

    where: str
    """File and step, for error messages."""
    prompt_ids: tuple[int, ...]
    """Whole prompt of the call."""
    token_ids: tuple[int, ...]
    """Sampled ids."""
    logprobs: tuple[float, ...]
    """Log-probability of each sampled id."""
    own: dict[str, Any]
    """Fields of afield; empty in files of others."""


class AtifBatch(Struct, frozen=True, kw_only=True):
    """Rows read from ATIF files, and what cannot be trained."""

    batch: Batch
    """Rollouts with their rows."""
    left_out: tuple[str, ...]
    """Files and steps without rows, each with its reason."""


# --- writing -------------------------------------------------------------------------------------


def write_atif(
    directory: Path, groups: Iterable[Group], *, agent: str = "afield", version: str = "", model: str = ""
) -> int:
    """Write ROLLOUT_ID.json for every rollout; returns their number. Existing files are replaced."""
    groups = list(groups)
    from_groups(groups)  # checks rows against turns
    head = {"name": agent or "afield", "version": version or str(wire.VERSION)}
    head |= {"model_name": model} if model else {}
    directory.mkdir(parents=True, exist_ok=True)
    number = 0
    for group in groups:
        for finished in (*group.finished, *([group.baseline] if group.baseline else [])):
            refuse_images(finished)
            document = to_atif(finished, record_of(finished, group), head, number)
            partial = directory / f".{finished.rollout.id}.partial"
            partial.write_bytes(msgspec.json.encode(document))
            partial.replace(directory / f"{finished.rollout.id}.json")
            number += 1
    return number


def to_atif(
    finished: RolloutResult, record: RolloutRecord, agent: dict[str, Any], number: int = 0
) -> dict[str, Any]:
    """Rollout as an ATIF document."""
    owned = owned_turns(finished)
    turns = finished.turns
    if not turns and record.trains:  # the rollout was read from rows
        turns = tuple(turns_of(nodes_of(rows_in_form(record, finished, "linear"))))
    tree = TurnTree(turns)
    reasons = {exclusion.turn: exclusion.reason for exclusion in finished.excluded}
    inner = {turn.parent for turn in turns}
    written: set[str] = set()
    paths: list[dict[str, Any]] = []
    for turn in turns:
        if turn.id not in inner:
            steps = _steps(tree, tree.path(turn.id), owned if record.trains else {}, reasons, written)
            paths.append(_document(record.rollout.id, len(paths), agent, steps))
    failure = record.outcome.failure
    document, *others = paths or [
        _document(record.rollout.id, 0, agent, [_step("system", failure.message if failure else "no calls")])
    ]
    if others:
        document["subagent_trajectories"] = others
        document["notes"] = "subagent_trajectories are the other branches of the rollout's turn tree"
    document["final_metrics"] = {
        "total_prompt_tokens": sum(len(tree.ids(turn.id)) - len(turn.token_ids) for turn in turns),
        "total_completion_tokens": sum(len(turn.token_ids) for turn in turns),
        "total_steps": sum(len(path["steps"]) for path in (document, *others)),
    }
    document["extra"] = {OWN: {"number": number, "record": msgspec.to_builtins(record)}}
    return document


def _document(
    rollout_id: str, path: int, agent: dict[str, Any], steps: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA,
        "session_id": rollout_id,
        "trajectory_id": f"{rollout_id}/{path}",
        "agent": agent,
        "steps": [{"step_id": n, **step} for n, step in enumerate(steps, 1)],
    }


def _steps(
    tree: TurnTree,
    path: Sequence[Turn],
    owned: dict[str, OwnedTurn],
    reasons: dict[str, str],
    written: set[str],
) -> list[dict[str, Any]]:
    """Steps of one path; marks turns of earlier paths as copied context."""
    steps: list[dict[str, Any]] = []
    for turn in path:
        copied = turn.id in written
        written.add(turn.id)
        request, reply = turn.messages[:-1], turn.messages[-1] if turn.messages else Message(role="assistant")
        for message in request:
            _add_message(steps, message, copied=copied)
        step = _agent_step(reply)
        if turn.started:
            step["timestamp"] = datetime.fromtimestamp(turn.started, UTC).isoformat()
        if copied:
            step["is_copied_context"] = True
        else:
            step["llm_call_count"] = 1
            step["metrics"] = _metrics(tree, turn)
            step["extra"] = {OWN: _own(turn, owned.get(turn.id), reasons.get(turn.id, ""))}
        steps.append(step)
    return steps


def _metrics(tree: TurnTree, turn: Turn) -> dict[str, Any]:
    prompt = (tree.ids(turn.parent) if turn.parent else ()) + turn.delta_ids
    return {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(turn.token_ids),
        "prompt_token_ids": prompt,
        "completion_token_ids": turn.token_ids,
        "logprobs": turn.logprobs,
    }


def _own(turn: Turn, owned: OwnedTurn | None, reason: str) -> dict[str, Any]:
    if owned is None:
        return {"id": turn.id, "excluded": reason or "not trained"}
    return {"turn": msgspec.to_builtins(owned), "versions": msgspec.to_builtins(turn.versions)}


def _add_message(steps: list[dict[str, Any]], message: Message, *, copied: bool) -> None:
    """Add a message of a request; a tool result joins the step that called the tool."""
    if message.role == "tool" and steps and steps[-1]["source"] == "agent":
        calls = {call["tool_call_id"] for call in steps[-1].get("tool_calls", ())}
        result: dict[str, Any] = {"content": message.content}
        if message.tool_call_id in calls:
            result["source_call_id"] = message.tool_call_id
        steps[-1].setdefault("observation", {"results": []})["results"].append(result)
        return
    step = _agent_step(message) if message.role == "assistant" else _step(message.role, message.content)
    if copied or message.role == "assistant":  # not sampled in this rollout
        step["is_copied_context"] = True
    steps.append(step)


def _step(role: str, text: str) -> dict[str, Any]:
    return {"source": SOURCES[role], "message": text}


def _agent_step(message: Message) -> dict[str, Any]:
    step = _step("assistant", message.content)
    if message.reasoning:
        step["reasoning_content"] = message.reasoning
    if message.tool_calls:
        step["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return step


def _tool_call(call: ToolCall) -> dict[str, Any]:
    arguments: Any = None
    with suppress(ValueError):
        arguments = json.loads(call.arguments)
    written: dict[str, Any] = {"tool_call_id": call.id, "function_name": call.name}
    if isinstance(arguments, dict):
        return {**written, "arguments": arguments}
    return {**written, "arguments": {}, "extra": {OWN: {"arguments": call.arguments}}}


# --- reading -------------------------------------------------------------------------------------


def is_atif(path: Path) -> bool:
    """Whether the path is an ATIF file, or a directory of such files or of Harbor trials."""
    return any(True for _ in _files(path))


def read_atif(path: Path, *, reward: float | None = None) -> AtifBatch:
    """Read a file, a directory of files, or a directory of Harbor trials.

    The reward of a file that afield did not write is that of its Harbor trial, else `reward`. Files without a
    reward, and steps without token ids and log-probabilities, are left out with the reason.
    """
    nodes: dict[str, list[Node]] = {}
    records: list[tuple[int, RolloutRecord]] = []
    left_out: list[str] = []
    for file in _files(path):
        document = _load(file)
        with usage_errors(str(file)):
            steps = list(_agent_steps(file, document, left_out))
            own = (document.get("extra") or {}).get(OWN)
            if own:
                record = msgspec.convert(own["record"], RolloutRecord)
                records.append((own["number"], record))
            elif not steps:
                left_out.append(f"{file}: no step has token ids and log-probabilities")
                continue
            elif (record := _foreign_record(file, document, reward)) is None:
                left_out.append(f"{file}: it has no reward; give one for demonstrations")
                continue
            else:
                records.append((len(records), record))
            nodes[record.rollout.id] = _nodes(record, steps)
    if not records and not left_out:
        raise UsageError(f"{path} has no ATIF files")
    ordered = tuple(record for _, record in sorted(records, key=lambda pair: pair[0]))
    with usage_errors(f"the trajectories of {path} are no batch"):
        return AtifBatch(batch=_batch(ordered, nodes), left_out=tuple(left_out))


def _batch(records: Sequence[RolloutRecord], nodes: dict[str, list[Node]]) -> Batch:
    table: list[Node] = []
    for record in records:
        first = len(table)
        for node in nodes[record.rollout.id]:
            parent = node.parent if node.parent == ROOT else node.parent + first
            table.append(msgspec.structs.replace(node, parent=parent))
    return TreeBatch(nodes=tuple(table), rollouts=tuple(records)).to_rows()


def _files(path: Path) -> Iterator[Path]:
    """ATIF files, without those that another file refers to."""
    if path.is_file():
        if path.suffix == ".json" and _schema(path):
            yield path
        return
    for file in sorted(path.rglob("*.json")):
        if not re.search(r"\.(cont|summarization)-\d+", file.name) and _schema(file):
            yield file


def _schema(file: Path) -> bool:
    with file.open("rb") as opened:
        return re.search(rb'"schema_version":\s*"ATIF-v', opened.read(4096)) is not None


def _load(file: Path) -> dict[str, Any]:
    try:
        document = msgspec.json.decode(file.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"{file} cannot be read as ATIF: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("steps"), list):
        raise UsageError(f"{file} is not an ATIF trajectory: it has no list 'steps'")
    return document


def _agent_steps(file: Path, document: dict[str, Any], left_out: list[str]) -> Iterator[AtifStep]:
    """Sampled steps of a document, its branches, and the files that it refers to."""
    for step in document["steps"]:
        if not isinstance(step, dict):
            raise UsageError(f"{file}: a step is not an object")
        yield from _sampled(file, step, left_out)
        for result in (step.get("observation") or {}).get("results", ()):
            for reference in result.get("subagent_trajectory_ref") or ():
                yield from _referenced(file, reference.get("trajectory_path"), left_out)
    for branch in document.get("subagent_trajectories") or ():
        yield from _agent_steps(file, branch, left_out)
    yield from _referenced(file, document.get("continued_trajectory_ref"), left_out)


def _referenced(file: Path, name: str | None, left_out: list[str]) -> Iterator[AtifStep]:
    if name and "://" not in name:
        part = file.parent / Path(name).name
        if part.is_file():
            yield from _agent_steps(part, _load(part), left_out)
        else:
            left_out.append(f"{file}: {name}, which it refers to, is missing")


def _sampled(file: Path, step: dict[str, Any], left_out: list[str]) -> Iterator[AtifStep]:
    if step.get("source") != "agent" or step.get("is_copied_context") or step.get("llm_call_count") == 0:
        return
    own = (step.get("extra") or {}).get(OWN, {})
    if "excluded" in own:
        return
    where = f"{file}: step {step.get('step_id')}"
    metrics = step.get("metrics") or {}
    columns = [metrics.get(name) for name in ("prompt_token_ids", "completion_token_ids", "logprobs")]
    if not all(columns):
        left_out.append(f"{where}: no token ids and log-probabilities")
        return
    prompt, tokens, logprobs = (tuple(column) for column in columns if column)
    yield AtifStep(where=where, prompt_ids=prompt, token_ids=tokens, logprobs=logprobs, own=own)


def _nodes(record: RolloutRecord, steps: Sequence[AtifStep]) -> list[Node]:
    turns = [msgspec.convert(step.own["turn"], OwnedTurn) if step.own else None for step in steps]
    pairs = sorted(zip(steps, turns, strict=True), key=lambda pair: pair[1].order if pair[1] else 0)
    rows: dict[str, tuple[int, tuple[int, ...]]] = {}  # position and sequence of each turn
    nodes: list[Node] = []
    for n, (step, turn) in enumerate(pairs):
        if turn is None:
            parent = _longest_prefix(step.prompt_ids, rows)
            turn = OwnedTurn(
                id=f"t{n + 1}",
                order=n,
                start=0,
                end=len(step.token_ids),
                temperature=1.0,
                parent=parent,
                finish_reason="stop",
            )
        position, above = rows.get(turn.parent, (ROOT, ()))
        if step.prompt_ids[: len(above)] != above:
            raise ValueError(f"{step.where}: its prompt does not begin with its parent {turn.parent}")
        versions = msgspec.convert(step.own.get("versions"), tuple[VersionSpan, ...]) if step.own else ()
        nodes.append(
            Node(
                group_id=record.rollout.group_id,
                rollout_id=record.rollout.id,
                parent=position,
                context_ids=step.prompt_ids[len(above) :],
                token_ids=step.token_ids,
                logprobs=step.logprobs,
                versions=versions or (VersionSpan(0, len(step.token_ids), 0, 0),),
                turn=msgspec.structs.replace(turn, start=0, end=len(step.token_ids)),
            )
        )
        rows[turn.id] = (n, step.prompt_ids + step.token_ids)
    return nodes


def _longest_prefix(prompt: tuple[int, ...], rows: dict[str, tuple[int, tuple[int, ...]]]) -> str:
    matches = [
        (len(ids), turn_id)
        for turn_id, (_, ids) in rows.items()
        if len(ids) < len(prompt) and prompt[: len(ids)] == ids
    ]
    return max(matches)[1] if matches else ""


def _foreign_record(file: Path, document: dict[str, Any], reward: float | None) -> RolloutRecord | None:
    """Record of a file that afield did not write; None without a reward."""
    trial = file.parent.parent / RESULT_FILE
    result = msgspec.json.decode(trial.read_bytes()) if trial.is_file() else {}
    rewards = {
        str(k): float(v) for k, v in ((result.get("verifier_result") or {}).get("rewards") or {}).items()
    }
    if rewards:
        reward = rewards.get("reward", next(iter(rewards.values())) if len(rewards) == 1 else reward)
    if reward is None:
        return None
    task_id = str(result.get("task_name") or document.get("session_id") or file.stem)
    # Several trials of a task are one group; ids are made of the characters that afield allows.
    rollout_id = _identifier(
        str(result.get("trial_name") or document.get("trajectory_id") or file.stem), file
    )
    text = next((step.get("message") for step in document["steps"] if step.get("source") == "user"), "")
    return RolloutRecord(
        rollout=Rollout(
            id=rollout_id,
            exp_id="atif",
            group_id=_identifier(task_id, None),
            task=Task(task_id, {"instruction": text if isinstance(text, str) else ""}),
        ),
        outcome=Outcome(rollout_id=rollout_id, attempt=1, reward=reward, rewards=rewards),
        epoch=0,
        score=reward,
    )


def _identifier(name: str, file: Path | None) -> str:
    """The name in allowed characters; with a digest of the file, which makes it unique."""
    suffix = f"-{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:8]}" if file else ""
    return re.sub(r"[^A-Za-z0-9._-]", "-", name)[:96].strip(".") + suffix
