"""Agent loop on LiteLLM: streaming, parallel tool calls, sub-agent, continuation.

The suite runs it in the client's own environment:
litellm_agent.py API_BASE KEY MODEL TASK GO_ON (keys | plain)
With keys, every request has an idempotency key, which its retries repeat.
"""

# pyright: reportMissingImports=false
import json
import sys
import uuid
from typing import Any

PLACE = {"thread": {"type": "string"}, "step": {"type": "integer"}}
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Where the thread is after a step.",
        "parameters": {"type": "object", "properties": PLACE, "required": ["thread", "step"]},
    },
}
ASK = {
    "type": "function",
    "function": {
        "name": "ask",
        "description": "Ask a helper, who works on the question alone.",
        "parameters": {
            "type": "object",
            "properties": {"question": {"type": "string"}},
            "required": ["question"],
        },
    },
}


def main(api_base: str, key: str, model: str, task: str, go_on: str, keys: str) -> None:
    import httpx
    import litellm
    import openai

    litellm.suppress_debug_info = True

    def reply(messages: list[Any], tools: list[Any]) -> Any:
        """Stream a reply; retries after any connection error."""
        headers = {"Idempotency-Key": str(uuid.uuid4())} if keys == "keys" else {}
        for attempt in range(4):
            try:
                chunks = list(
                    litellm.completion(
                        model=model,
                        api_base=api_base,
                        api_key=key,
                        messages=messages,
                        tools=tools,
                        stream=True,
                        extra_headers=headers,
                    )
                )
                return litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message
            except (openai.APIError, httpx.HTTPError) as error:
                sys.stderr.write(f"attempt {attempt}: {error!r}\n")
        raise SystemExit("the model does not answer")

    def run(call: Any) -> str:
        arguments = json.loads(call.function.arguments)
        if call.function.name == "ask":
            start = [{"role": "system", "content": "You help."}]
            return walk([*start, {"role": "user", "content": arguments["question"]}], [LOOK])[-1].content
        return f"You are at [at {arguments['thread']}-{arguments['step']}]."

    def walk(messages: list[Any], tools: list[Any]) -> list[Any]:
        while True:
            message = reply(messages, tools)
            messages.append(message)
            if not message.tool_calls:
                return messages
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": run(call)} for call in message.tool_calls
            ]

    start = [{"role": "system", "content": "You go step by step."}, {"role": "user", "content": task}]
    history = walk(start, [LOOK, ASK])
    sys.stdout.write(walk([*history, {"role": "user", "content": go_on}], [LOOK, ASK])[-1].content)


if __name__ == "__main__":
    main(*sys.argv[1:])
