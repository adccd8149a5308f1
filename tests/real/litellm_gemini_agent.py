"""A conversation with tools by LiteLLM over Gemini's API: `URL KEY MODEL STREAM HISTORY`.

HISTORY is how the agent keeps answers: LiteLLM's own objects, or dicts with or without the reasoning.
"""

import sys

import litellm

litellm.suppress_debug_info = True
KEPT = {
    "openai": ("role", "content", "tool_calls"),
    "reasoning": ("role", "content", "tool_calls", "reasoning_content"),
}


def tool(name: str) -> dict:
    parameters = {"type": "object", "properties": {"item": {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


def main(url: str, key: str, model: str, stream: str, history: str) -> None:
    messages: list = [{"role": "user", "content": "Hi"}]
    tools = [tool("get_price"), tool("now")]
    for n in range(6):
        answer = litellm.completion(
            model=f"gemini/{model}",
            api_key=key,
            api_base=url,
            messages=messages,
            tools=tools,
            stream=stream == "stream",
        )
        if stream == "stream":
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        message = answer.choices[0].message
        said = message.model_dump()
        kept = {name: said[name] for name in KEPT.get(history, ()) if said.get(name)}
        messages.append(kept or message)
        results = [{"role": "tool", "tool_call_id": c.id, "content": "4"} for c in message.tool_calls or ()]
        messages += results or [{"role": "user", "content": f"More {n}?"}]


main(*sys.argv[1:])
