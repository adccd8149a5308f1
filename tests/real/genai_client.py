"""Asks a gateway through google-genai, in whichever line is installed; prints what came back as JSON.

usage: genai_client.py BASE_URL API_KEY
"""

from __future__ import annotations

import json
import sys

from google import genai
from google.genai import types

SCHEMA = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}


def get_weight(item: str, pieces: int = 1) -> str:
    """The weight of an item."""
    return f"{item} {pieces}"


def main(base_url: str, api_key: str) -> None:
    off = types.AutomaticFunctionCallingConfig(disable=True)
    declared = types.FunctionDeclaration(
        name="get_price", description="The price of an item.", parameters_json_schema=SCHEMA
    )
    config = types.GenerateContentConfig(
        tools=[types.Tool(function_declarations=[declared]), get_weight],
        automatic_function_calling=off,
        system_instruction="Be brief.",
        temperature=0.5,
        top_p=0.5,
        top_k=7,
        presence_penalty=0.25,
        frequency_penalty=0.75,
        max_output_tokens=64,
        stop_sequences=["END"],
        seed=3,
    )
    client = genai.Client(api_key=api_key, http_options=types.HttpOptions(base_url=base_url))
    chat = client.chats.create(model="m", config=config)
    first = chat.send_message("How much is x?")
    call = first.function_calls[0]
    second = chat.send_message(types.Part.from_function_response(name=call.name, response={"result": "4"}))
    listed = {}
    for version in ("v1", "v1beta"):
        options = types.HttpOptions(base_url=base_url, api_version=version)
        with genai.Client(api_key=api_key, http_options=options) as other:
            listed[version] = [model.name for model in other.models.list()]
    client.close()
    told = {
        "version": genai.__version__,
        "call": [call.name, call.args],
        "answer": second.text,
        "models": listed,
    }
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
