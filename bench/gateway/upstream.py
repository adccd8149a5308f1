"""Upstream engine of the gateway benchmark: one canned answer, at minimal cost.

It serves vLLM's chat completions with ids and log-probabilities (for the peers) and vLLM's token endpoint
and completions with ids (for afield), streamed one event per token or whole. Log-probabilities come from
two-token distributions, so temperature changes them. `POST /pace?ms=N` sets the pause between streamed
tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from pathlib import Path
from typing import Any, cast

import httptools
import msgspec
import uvloop

CONTEXT = 131_072


class Sampling(msgspec.Struct):
    max_tokens: int | None = 16
    temperature: float = 1.0
    top_k: int = 0
    logprobs: int | None = None
    stop_token_ids: list[int] | None = None


class Generate(msgspec.Struct):
    """A call of the token endpoint; the prompt is looked at only where it is asked back."""

    token_ids: msgspec.Raw
    sampling_params: Sampling
    stream: bool | None = False
    return_token_ids: bool | None = False


class Completion(msgspec.Struct):
    prompt: msgspec.Raw
    max_tokens: int | None = 16
    temperature: float = 1.0
    top_k: int = 0
    logprobs: int | None = None
    stop_token_ids: list[int] | None = None
    stream: bool | None = False
    return_token_ids: bool | None = False


class Chat(msgspec.Struct):
    stream: bool | None = False
    logprobs: bool | None = False
    return_token_ids: bool | None = False


GENERATE = msgspec.json.Decoder(Generate)
COMPLETION = msgspec.json.Decoder(Completion)
CHAT = msgspec.json.Decoder(Chat)


class Answer:
    """The canned answer in every shape that is asked for; each shape is made once."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.ids: list[int] = answer["ids"]
        self.pieces: list[str] = answer["pieces"]
        self.message: dict[str, Any] = answer["message"]
        self.text: int = answer["text"]  # how many of the pieces are text; the rest is the call
        self._made: dict[Any, Any] = {}
        self._prompt = ",".join(str(300 + n % 700) for n in range(CONTEXT)).encode()

    def logprob(self, n: int, temperature: float, top_k: int = 0) -> float:
        """Of a token that has probability p against one other, at this temperature."""
        if top_k == 1 and temperature:
            return 0.0
        p = 0.5 + 0.49 * ((self.ids[n] * 31 + n * 7) % 97) / 97
        if temperature in (0.0, 1.0):
            return math.log(p)
        hot, cold = p ** (1 / temperature), (1 - p) ** (1 / temperature)
        return math.log(hot / (hot + cold))

    def cut(self, limit: int | None, stops: list[int] | None) -> tuple[int, str]:
        for n, token in enumerate(self.ids[:limit], 1):
            if token in (stops or ()) or n == len(self.ids):
                return n, "stop"
        return limit or 0, "length"

    # --- the token endpoint ----------------------------------------------------------------------

    def generate(self, request: Generate) -> bytes | list[bytes]:
        s = request.sampling_params
        length, finish = self.cut(s.max_tokens, s.stop_token_ids)
        key = ("generate", length, finish, s.temperature, s.top_k, s.logprobs is None, bool(request.stream))
        if key not in self._made:
            self._made[key] = self._generate(length, finish, s, bool(request.stream))
        reply = self._made[key]
        if not request.return_token_ids:
            return reply
        echo = b'"prompt_token_ids":' + bytes(request.token_ids) + b","
        if isinstance(reply, list):
            return [reply[0].replace(b"data: {", b"data: {" + echo, 1), *reply[1:]]
        return b"{" + echo + reply[1:]

    def _generate(self, length: int, finish: str, s: Sampling, stream: bool) -> bytes | list[bytes]:
        def choice(start: int, end: int) -> dict[str, Any]:
            last = end == length
            content = [self._candidate(n, s) for n in range(start, end)]
            return {
                "index": 0,
                "logprobs": None if s.logprobs is None else {"content": content},
                "finish_reason": finish if last else None,
                "stop_reason": self.ids[end - 1] if last and finish == "stop" else None,
                "token_ids": self.ids[start:end],
                "routed_experts": None,
                "sampling_mask": None,
                "weight_versions": [{"version": "0", "start": 0, "end": length}] if last else None,
            }

        head = {"request_id": "bench", "created": 1, "model": "policy", "usage": None}
        if not stream:
            return dump({**head, "choices": [choice(0, length)], "usage": usage(length)})
        return events([{"request_id": "bench", "choices": [choice(n, n + 1)]} for n in range(length)])

    def _candidate(self, n: int, s: Sampling) -> dict[str, Any]:
        sampled = {"token_id": self.ids[n], "logprob": self.logprob(n, s.temperature, s.top_k), "rank": 1}
        return {**sampled, "top_logprobs": [sampled]}

    # --- completions with ids --------------------------------------------------------------------

    def completion(self, request: Completion) -> bytes | list[bytes]:
        length, finish = self.cut(request.max_tokens, request.stop_token_ids)
        prompt = bytes(request.prompt) if request.return_token_ids else None

        def choice(start: int, end: int) -> dict[str, Any]:
            logprobs = [self.logprob(n, request.temperature, request.top_k) for n in range(start, end)]
            tokens = self.pieces[start:end]
            token_logprobs = {"token_logprobs": logprobs, "tokens": tokens}
            return {
                "index": 0,
                "text": "".join(tokens),
                "logprobs": None if request.logprobs is None else token_logprobs,
                "finish_reason": finish if end == length else None,
                "stop_reason": None,
                "token_ids": self.ids[start:end],
                "prompt_token_ids": msgspec.Raw(prompt) if prompt and start == 0 else None,
            }

        head = {"id": "cmpl-bench", "object": "text_completion", "created": 1, "model": "policy"}
        if not request.stream:
            return dump({**head, "choices": [choice(0, length)], "usage": usage(length)})
        return events([{**head, "choices": [choice(n, n + 1)]} for n in range(length)])

    # --- chat --------------------------------------------------------------------------------------

    def chat(self, request: Chat, size: int) -> bytes | list[bytes]:
        """`size` of the request says how many ids its prompt has: about four bytes make a token."""
        key = ("chat", bool(request.stream), bool(request.logprobs), bool(request.return_token_ids))
        if key not in self._made:
            self._made[key] = self._chat(request)
        reply = self._made[key]
        if not request.return_token_ids:
            return reply
        echo = b'"prompt_token_ids":[' + self._prompt[: 4 * max(1, size // 4) - 1] + b"],"
        if isinstance(reply, list):
            return [reply[0].replace(b"data: {", b"data: {" + echo, 1), *reply[1:]]
        return b"{" + echo + reply[1:]

    def _chat(self, request: Chat) -> bytes | list[bytes]:
        head = {"id": "chatcmpl-bench", "created": 1, "model": "policy"}
        length = len(self.ids)
        if not request.stream:
            choice = {"index": 0, "message": self.message, "finish_reason": "tool_calls", "stop_reason": None}
            choice |= self._marks(request, 0, length)
            answer = {**head, "object": "chat.completion", "choices": [choice], "usage": usage(length)}
            return dump(answer)
        chunks = []
        for n in range(length):
            finish = "tool_calls" if n == length - 1 else None
            choice = {"index": 0, "delta": self._delta(n), "finish_reason": finish}
            choice |= self._marks(request, n, n + 1)
            chunks.append({**head, "object": "chat.completion.chunk", "choices": [choice]})
        last = {**head, "object": "chat.completion.chunk", "choices": [], "usage": usage(length)}
        return events([*chunks, last])

    def _delta(self, n: int) -> dict[str, Any]:
        if n == 0:
            return {"role": "assistant", "content": self.pieces[0]}
        if n < self.text:
            return {"content": self.pieces[n]}
        call = self.message["tool_calls"][0]
        if n == self.text:
            named = {"name": call["function"]["name"], "arguments": ""}
            return {"tool_calls": [{"index": 0, "id": call["id"], "type": "function", "function": named}]}
        arguments = call["function"]["arguments"]
        at, step = n - self.text - 1, math.ceil(len(arguments) / (len(self.ids) - self.text - 1))
        return {"tool_calls": [{"index": 0, "function": {"arguments": arguments[at * step :][:step]}}]}

    def _marks(self, request: Chat, start: int, end: int) -> dict[str, Any]:
        marks: dict[str, Any] = {"logprobs": None}
        if request.logprobs:
            marks["logprobs"] = {"content": [self._spelled(n) for n in range(start, end)]}
        if request.return_token_ids:
            marks["token_ids"] = self.ids[start:end]
        return marks

    def _spelled(self, n: int) -> dict[str, Any]:
        text = self.pieces[n]
        return {
            "token": text,
            "logprob": self.logprob(n, 1.0),
            "bytes": list(text.encode()),
            "top_logprobs": [],
        }


def usage(sampled: int) -> dict[str, int]:
    return {"prompt_tokens": 600, "completion_tokens": sampled, "total_tokens": 600 + sampled}


def dump(value: Any) -> bytes:
    return msgspec.json.encode(value)


def events(values: list[dict[str, Any]]) -> list[bytes]:
    return [*(b"data: " + dump(value) + b"\n\n" for value in values), b"data: [DONE]\n\n"]


MODEL = {"id": "policy", "object": "model", "created": 1, "owned_by": "bench", "max_model_len": CONTEXT}
FIXED = {
    b"/v1/models": dump({"object": "list", "data": [MODEL]}),
    b"/health": b"",
    b"/version": dump({"version": "0.32.0"}),
    b"/ping": b"",
}


class Connection(asyncio.Protocol):
    """One client connection; requests on it are answered one after another."""

    pace = 0.0

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._parser = httptools.HttpRequestParser(self)
        self._url, self._body = b"", []
        self._left: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own is no subclass
        self._loop = asyncio.get_running_loop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._left = []

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._url, self._body = url, []

    def on_body(self, data: bytes) -> None:
        self._body.append(data)

    def on_message_complete(self) -> None:
        path, _, query = self._url.partition(b"?")
        if path == b"/pace":
            Connection.pace = float(query.partition(b"=")[2]) / 1000
            return self._whole(b"{}")
        if path in FIXED:
            return self._whole(FIXED[path])
        try:
            reply = self._reply(path, b"".join(self._body))
        except msgspec.MsgspecError as error:
            return self._whole(dump({"error": {"message": str(error)}}), b"400 Bad Request")
        if reply is None:
            return self._whole(b'{"detail":"Not Found"}', b"404 Not Found")
        return self._whole(reply) if isinstance(reply, bytes) else self._stream(reply)

    def _reply(self, path: bytes, body: bytes) -> bytes | list[bytes] | None:
        if path == b"/inference/v1/generate":
            return self._answer.generate(GENERATE.decode(body))
        if path == b"/v1/chat/completions":
            return self._answer.chat(CHAT.decode(body), len(body))
        if path == b"/v1/completions":
            return self._answer.completion(COMPLETION.decode(body))
        return None

    def _whole(self, body: bytes, status: bytes = b"200 OK") -> None:
        head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self._transport.write(head % (status, len(body)) + body)

    def _stream(self, parts: list[bytes]) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        self._transport.write(head)
        self._left = parts[::-1]
        self._next()

    def _next(self) -> None:
        if not self._left:
            return
        part = self._left.pop()
        chunk = b"%x\r\n%b\r\n" % (len(part), part)
        if not self._left:
            self._transport.write(chunk + b"0\r\n\r\n")
            return
        self._transport.write(chunk)
        if Connection.pace:
            self._loop.call_later(Connection.pace, self._next)
        else:
            self._loop.call_soon(self._next)


async def serve(port: int, answer: Answer) -> None:
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(answer), "127.0.0.1", port, backlog=2048
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answer", type=Path)
    parser.add_argument("--port", type=int, default=0)
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(args.port, Answer(json.loads(args.answer.read_text()))))


if __name__ == "__main__":
    main()
