"""Agents that do anything real harnesses were seen to do, at random, and an engine that samples badly.

Everything follows from a seed but the moment at which a leaving client is noticed. An agent writes down
what it did (`Made`), in terms of its own: who said what, what it changed in a way that matters, what it
saw the end of. `book` judges the gateway by that.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from msgspec import Struct, structs

from afield.engines.scripted import ScriptedReply
from afield.interfaces import GenerateRequest
from afield.types import FinishReason, Message
from support.dialect_clients import LAST, Answer, Ask, Heard, read, write
from support.invariants import CONTROL, STOP, TOKENIZER
from support.tree_oracle import Key, Made, identity, said_in

WORDS = [
    "red",
    "mug",
    "price",
    "of",
    "it is",
    "naïve",
    "🦊",
    "漢字",
    "—",
    "4.50",
    "\n",
    "ok",
    "</x>",
    "  two",
]
MARKERS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
TITLE = "You write a title for a conversation."
Knock = Callable[..., Awaitable[Answer]]


def tool(name: str, described: str) -> dict[str, Any]:
    properties = {"item": {"type": "string"}, "n": {"type": "integer"}}
    function = {
        "name": name,
        "description": described,
        "parameters": {"type": "object", "properties": properties},
    }
    return {"type": "function", "function": function}


TOOLSETS: tuple[tuple[dict[str, Any], ...], ...] = (
    (),
    (tool("get_price", "Prices."), tool("bash", "A shell.")),
    (tool("get_price", "Other prices."), tool("bash", "A shell.")),
)


# --- an engine that samples badly -----------------------------------------------------------------


class Plan(Struct, frozen=True, kw_only=True):
    text: str
    fail: bool = False
    hang: bool = False
    gives_up: bool = False


class Wild:
    """The script of all sessions: what the agent planned for its next calls, split as no tokenizer would."""

    def __init__(self) -> None:
        self.plans: dict[str, list[Plan]] = {}
        self.began: dict[str, list[str]] = {}
        self.rngs: dict[str, random.Random] = {}

    def __call__(self, call: GenerateRequest) -> ScriptedReply:
        self.began[call.session_id].append(call.id.rpartition("/")[2])
        plan = self.plans[call.session_id].pop(0)
        rng = self.rngs[call.session_id]
        ids = spelled(plan.text, rng)
        cut = rng.randrange(1, len(ids) + 1)
        if plan.fail or plan.hang or plan.gives_up:
            fail = None if plan.gives_up else "hang" if plan.hang else "unavailable"
            finish = FinishReason.ABORTED if plan.gives_up else None
            return ScriptedReply(token_ids=tuple(ids[:cut]), fail=fail, finish=finish, chunks=(1, 2))
        return ScriptedReply(
            token_ids=(*ids, STOP),
            chunks=tuple(rng.choice([1, 1, 2, 5]) for _ in range(3)),
            bump_after=cut if rng.random() < 0.15 else None,
        )


def spelled(text: str, rng: random.Random) -> list[int]:
    return [token for piece in _pieces(text) for token in _split(piece, rng)]


def _pieces(text: str) -> list[str]:
    out = [text]
    for marker in MARKERS:
        out = [part for piece in out for part in _around(piece, marker)]
    return out


def _around(piece: str, marker: str) -> list[str]:
    if piece in MARKERS:
        return [piece]
    parts = piece.split(marker)
    return [p for n, part in enumerate(parts) for p in ([marker] if n else []) + ([part] if part else [])]


def _split(piece: str, rng: random.Random) -> list[int]:
    """Ids that spell this piece, hardly ever those that a tokenizer would choose."""
    if piece in MARKERS:
        return [CONTROL[piece]]
    ids: list[int] = []
    at = 0
    while at < len(piece):
        end = at + rng.choice([1, 1, 2, 3, 8])
        ids.extend(TOKENIZER.encode(piece[at:end], add_special_tokens=False).ids)
        at = end
    return ids


# --- agents ---------------------------------------------------------------------------------------


class Thread(Struct, frozen=True, kw_only=True):
    """A conversation as its client holds it, and what each message is."""

    messages: tuple[Message, ...]
    keys: tuple[Key, ...]
    toolset: int = 0

    def plus(self, *said: tuple[Message, Key]) -> Thread:
        new, keys = zip(*said, strict=True)
        return structs.replace(self, messages=(*self.messages, *new), keys=(*self.keys, *keys))

    def upto(self, n: int) -> Thread:
        return structs.replace(self, messages=self.messages[:n], keys=self.keys[:n])


class Agent:
    """One session's agent. `knock` is how it asks; `book` is what it writes down."""

    def __init__(
        self, seed: int, session_id: str, dialect: str, wild: Wild, knock: Knock, *, leaves: bool = True
    ) -> None:
        self.rng = random.Random(seed)
        self.session_id = session_id
        self.dialect = dialect
        self.made: list[Made] = []
        self._knock = knock
        self._wild = wild
        self._threads: list[Thread] = []
        self._nonce = 0
        self._weights = [
            w if leaves or a is not Agent.leave else 0 for a, w in zip(ACTIONS, WEIGHTS, strict=True)
        ]
        self._styles: dict[Key, int] = {}
        wild.plans[session_id], wild.began[session_id] = [], []
        wild.rngs[session_id] = random.Random(seed + 1)

    async def live(self, steps: int) -> None:
        self._threads.append(self._begin())
        await self.go_on(self._threads[0])
        for _ in range(steps):
            action = self.rng.choices(ACTIONS, self._weights)[0]
            await action(self, self.rng.choice(self._threads[-3:]))

    def left(self, row: dict[str, Any], parents: Sequence[dict[str, Any]] | None) -> int:
        """The tools of a request that was left before the engine was asked.

        Several may have had all that the turn was newly asked, which may be next to nothing. Then it is
        the one with the tools of the turn it continues; if it begins a conversation, the one that says least.
        """
        left = [m for m in self.made if m.turn_id is None and said_in(row, m)]
        found = {m.request[0] for m in left}
        if len(found) > 1 and parents is not None:
            found = {n for n in found if list(TOOLSETS[n]) == list(parents)}
        elif len(found) > 1:
            shortest = min(len(m.texts) for m in left)
            found = {m.request[0] for m in left if len(m.texts) == shortest}
        assert len(found) == 1, f"{row['id']}: asked with tools {found}?"
        return found.pop()

    # --- what it can do ---------------------------------------------------------------------------

    async def go_on(self, thread: Thread) -> None:
        await self._say(self._next(thread))

    async def branch(self, thread: Thread) -> None:
        await self._say(self._next(thread.upto(self._cut(thread))))

    async def edit(self, thread: Thread) -> None:
        """Another assistant message in the place of one that was sampled, and on from there."""
        at = self._cut(thread)
        if thread.messages[at - 1].role != "assistant":
            return
        nonce = self._fresh()
        changed = Message(role="assistant", content=f"Edited {nonce}.")
        new = thread.upto(at - 1).plus((changed, identity(changed)), self._user())
        await self._say(new)

    async def ask_again(self, thread: Thread) -> None:
        """The same again: by a library that says so, or by one that does not."""
        await self._say(self._asked(thread), retry=self.rng.random() < 0.5)

    async def leave(self, thread: Thread) -> None:
        """Drop the stream, then ask the same again, perhaps twice."""
        new = self._next(thread)
        hang = self.rng.random() < 0.3
        stream = hang or self.rng.random() < 0.7
        at = self.rng.choice([0, 1] if hang else [0, 1, 2, 4, 6, LAST, LAST, LAST])
        at = 0 if self.dialect == "gemini" and hang else at
        await self._say(new, leaves_at=at, stream=stream, plan=self._plan(new, hang=hang))
        for _ in range(self.rng.randrange(3)):
            await self._say(new, stream=stream, limit=self.made[-1].limit if self.made else 200)

    async def fail(self, thread: Thread) -> None:
        new = self._next(thread)
        broken = {"fail": True} if self.rng.random() < 0.6 else {"gives_up": True}
        await self._say(new, plan=self._plan(new, **broken))
        await self._say(new, retry=self.rng.random() < 0.5)

    async def compact(self, thread: Thread) -> None:
        quotes = [m for m in thread.messages if m.role == "assistant" and len(m.content.strip()) >= 24]
        if quotes:
            nonce = self._fresh()
            text = f"Summary {nonce}: {self.rng.choice(quotes).content} And so on."
            self._threads.append(self._begin(text, thread.toolset))
            await self.go_on(self._threads[-1])

    async def sub_agent(self, thread: Thread) -> None:
        started = self._begin(toolset=self.rng.randrange(2), system=f"You are helper {self._fresh()}.")
        await self._say(started)

    async def in_parallel(self, thread: Thread) -> None:
        """Threads with nothing to tell them apart ask the same at once."""
        new = self._next(thread) if thread.messages[-1].role == "assistant" else self._begin()
        stream, same = self.rng.random() < 0.5, self._plan(new)
        plans = [
            same if self.rng.random() < 0.3 else self._plan(new) for _ in range(self.rng.choice([2, 2, 3]))
        ]
        self._wild.plans[self.session_id] = list(plans)
        body = self._ask(new, 200, stream)
        asks = (self._send(body, self._style(new)) for _ in plans)
        known, at = len(self.made), len(self._wild.began[self.session_id])
        for answer in await asyncio.gather(*asks):
            heard = read(self.dialect, stream, answer.body)
            made = self._written(new, 200, heard, known=known)
            self.made.append(structs.replace(made, together=True))
            self._threads.append(new.plus((heard.reply, identity(heard.reply))))
        assert len(self._wild.began[self.session_id]) == at + len(plans), (
            "a twin that was connected was replayed"
        )

    async def change_tools(self, thread: Thread) -> None:
        other = structs.replace(thread, toolset=(thread.toolset + 1) % len(TOOLSETS))
        await self._say(self._next(other))

    async def more_room(self, thread: Thread) -> None:
        new, same = self._next(thread), self.rng.randrange(2, 12)
        await self._say(new, limit=same)
        if self.rng.random() < 0.8:
            await self._say(self._asked(self._threads[-1]), limit=same + self.rng.choice([0, 4, 90]))

    async def ask_aside(self, thread: Thread) -> None:
        """A call that the agent declares to be none of its work; or one that only looks like that."""
        how = self.rng.randrange(4)
        started = self._begin(system=TITLE if how == 0 else None)
        limit, model = (1 if how == 1 else 200), ("claude-haiku-9" if how == 2 else "m")
        await self._say(started, limit=limit, model=model, declared=self.rng.random() < 0.5)

    # --- how it does it ---------------------------------------------------------------------------

    def _fresh(self) -> int:
        self._nonce += 1
        return self._nonce

    def _begin(
        self, text: str | None = None, toolset: int | None = None, system: str | None = None
    ) -> Thread:
        toolset = self.rng.randrange(2) if toolset is None and system != TITLE else toolset or 0
        thread = Thread(messages=(), keys=(), toolset=toolset)
        if system or self.rng.random() < 0.5:
            head = Message(role="system", content=system or "You are an agent.")
            thread = thread.plus((head, ("system", head.content)))
        if self.rng.random() < 0.1 and system is None:
            message = Message(role="assistant", content=f"An example {self._fresh()}.")
            thread = thread.plus(self._user(), (message, identity(message)))
        return thread.plus(self._user(text))

    def _user(self, text: str | None = None) -> tuple[Message, Key]:
        nonce = self._fresh()
        said = text or f"Question {nonce}: {self._words()}?"
        return Message(role="user", content=said), ("user", said)

    def _words(self) -> str:
        return " ".join(self.rng.choices(WORDS, k=self.rng.randrange(1, 8)))

    def _cut(self, thread: Thread) -> int:
        ends = [n + 1 for n, m in enumerate(thread.messages) if m.role == "assistant"]
        return self.rng.choice(ends) if ends else len(thread.messages)

    def _next(self, thread: Thread) -> Thread:
        """What a harness adds: results, a question, or both."""
        if not thread.messages or thread.messages[-1].role != "assistant":
            return thread
        calls = list(thread.messages[-1].tool_calls)
        if self.rng.random() < 0.4:
            thread = self._meddled(thread)
        results = []
        for n, call in enumerate(calls):
            text = f"Result {self._fresh()}: {self._words()}" if self.rng.random() < 0.9 else ""
            message = Message(role="tool", content=text, tool_call_id=call.id)
            results.append((message, ("tool", n, text)))
        if self.rng.random() < 0.3:
            results.reverse()
        thread = thread.plus(*results) if results else thread
        keys = sorted(thread.keys[len(thread.keys) - len(results) :], key=lambda key: key[1])
        thread = structs.replace(thread, keys=(*thread.keys[: len(thread.keys) - len(results)], *keys))
        return thread.plus(self._user()) if not calls or self.rng.random() < 0.2 else thread

    def _meddled(self, thread: Thread) -> Thread:
        """What clients do to a turn with calls without meaning anything by it: its text goes."""
        *before, last = thread.messages
        if not last.tool_calls:
            return thread
        return structs.replace(thread, messages=(*before, structs.replace(last, content="")))

    def _asked(self, thread: Thread) -> Thread:
        """The thread as it was when its last reply was asked for."""
        last = thread.messages[-1]
        return thread.upto(len(thread.messages) - 1) if last.role == "assistant" else thread

    def _plan(self, thread: Thread, **broken: bool) -> Plan:
        nonce = self._fresh()
        text = f"Answer {nonce}: {self._words()}." if self.rng.random() < 0.8 else self._words()
        if self.rng.random() < 0.25:
            text = f"<think>\nHm {self._words()}\n</think>\n\n{text}"
        if thread.toolset and self.rng.random() < 0.5:
            for n in range(self.rng.choice([1, 1, 2, 3])):
                arguments = {"item": self._words().strip(), "n": nonce * 10 + n}
                spelled = json.dumps(arguments, ensure_ascii=self.rng.random() < 0.5)
                spelled = spelled if self.rng.random() < 0.93 else spelled[:-3]
                name = self.rng.choice(["get_price", "bash"])
                text += f'\n<tool_call>\n{{"name": "{name}", "arguments": {spelled}}}\n</tool_call>'
        return Plan(text=text, **broken)

    def _ask(self, thread: Thread, limit: int, stream: bool, model: str = "m") -> Ask:
        tools = TOOLSETS[thread.toolset]
        return Ask(messages=thread.messages, tools=tools, max_tokens=limit, stream=stream, model=model)

    def _style(self, thread: Thread) -> int:
        """How a request is spelled; the same one again is spelled the same."""
        return self._styles.setdefault((thread.toolset, *thread.keys), self.rng.getrandbits(32))

    async def _send(self, ask: Ask, seed: int, **how: Any) -> Answer:
        path, body = write(self.dialect, ask, random.Random(seed))
        return await self._knock("POST", path, body, **how)

    async def _say(
        self,
        thread: Thread,
        *,
        limit: int = 200,
        stream: bool | None = None,
        retry: bool = False,
        leaves_at: int | None = None,
        plan: Plan | None = None,
        model: str = "m",
        declared: bool = False,
    ) -> None:
        """One request; what came of it is written down."""
        if not thread.messages or thread.messages[-1].role == "assistant":
            return
        stream = self.rng.random() < 0.5 if stream is None else stream
        plan = plan or self._plan(thread)
        self._wild.plans[self.session_id] = [plan]
        began = self._wild.began[self.session_id]
        known, at = len(self.made), len(began)
        headers = {"x-stainless-retry-count": "1"} if retry else {}
        headers |= {"x-afield-side-call": "1"} if declared else {}
        answer = await self._send(
            self._ask(thread, limit, stream, model), self._style(thread), headers=headers, leaves_at=leaves_at
        )
        assert len(began) <= at + 1, "one request, several calls"
        asked = began[-1] if len(began) > at else None
        broke = asked is not None and (plan.fail or plan.gives_up)
        heard = read(self.dialect, stream, answer.body) if answer.whole and not broke else None
        if heard:
            assert answer.status == 200, answer
            self._threads.append(thread.plus((heard.reply, identity(heard.reply))))
        made = self._written(thread, limit, heard, known=known, declared=declared)
        replayed = heard is not None and asked is None
        if heard and asked:
            assert heard.turn_id == asked, f"the answer says {heard.turn_id}, the engine {asked}"
        turn_id = heard.turn_id if heard else asked
        self.made.append(structs.replace(made, turn_id=turn_id, replayed=replayed, retry=retry, failed=broke))

    def _written(
        self, thread: Thread, limit: int, heard: Heard | None, known: int, declared: bool = False
    ) -> Made:
        calls: dict[str, str] = {}
        for m in thread.messages:
            calls |= {call.id: call.id.split("_")[1] for call in m.tool_calls if "_" in call.id}
        return Made(
            turn_id=heard.turn_id if heard else None,
            request=(thread.toolset, *thread.keys),
            roles=tuple(m.role for m in thread.messages),
            texts=tuple(m.content for m in thread.messages if m.role != "system"),
            limit=limit,
            heard=identity(heard.reply) if heard else None,
            reply=heard.reply if heard else None,
            known=known,
            side="side:declared" if declared else "",
            named=frozenset(calls.values()),
        )


ACTIONS = (
    Agent.go_on,
    Agent.branch,
    Agent.edit,
    Agent.ask_again,
    Agent.leave,
    Agent.fail,
    Agent.compact,
    Agent.sub_agent,
    Agent.in_parallel,
    Agent.change_tools,
    Agent.more_room,
    Agent.ask_aside,
)
WEIGHTS = (8, 2, 2, 2, 2, 1, 1, 1, 1, 1, 2, 1)
