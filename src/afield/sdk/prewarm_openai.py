"""Prewarm module: runs the OpenAI SDK's lazy imports before workers are forked."""

import contextlib

import openai
from openai.types.chat import ChatCompletion

with openai.OpenAI(base_url="http://127.0.0.1:9", api_key="-", max_retries=0, timeout=1) as client:
    with contextlib.suppress(openai.OpenAIError):
        client.chat.completions.create(model="-", messages=[])
    ChatCompletion.model_validate(
        {"id": "-", "object": "chat.completion", "created": 0, "model": "-", "choices": []}
    )
