import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from afield.demo import shop

POLICY = Path(shop.__file__).parent / "policy"
SYSTEM = {"role": "system", "content": "You work in a shop."}
ASK = {"role": "user", "content": "How much is the red mug?"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_price",
            "description": "The price of an item.",
            "parameters": {
                "type": "object",
                "properties": {"item": {"type": "string"}},
                "required": ["item"],
            },
        },
    }
]


def calling(*items: str) -> dict[str, Any]:
    functions = [{"name": "get_price", "arguments": json.dumps({"item": item})} for item in items]
    calls = [{"id": f"c{n}", "type": "function", "function": f} for n, f in enumerate(functions)]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c0", "content": text}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(POLICY)


def render(tokenizer: Any, messages: list[dict[str, Any]], *, ask: bool = False, tools: Any = TOOLS) -> str:
    return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=ask)


def test_tasks_are_the_same_for_a_seed_and_differ_between_seeds():
    assert shop.tasks(3, 20) == shop.tasks(3, 20)
    assert shop.tasks(3, 20)[:8] == shop.tasks(3, 8)
    assert shop.tasks(3, 20) != shop.tasks(4, 20)
    assert len({row["id"] for seed in (0, 1) for row in shop.tasks(seed, 40)}) == 80


@pytest.mark.parametrize("seed", range(5))
def test_every_eight_tasks_ask_about_every_item_and_for_as_many_prices_as_stocks(seed):
    rows = shop.tasks(seed, 160)
    for start in range(0, 160, 8):
        questions = [row["question"] for row in rows[start : start + 8]]
        assert all(sum(item in question for question in questions) == 1 for item in shop.ITEMS)
        assert sum(question.startswith("How much") for question in questions) == 4


def test_only_the_right_look_up_finds_the_answer():
    for row in shop.tasks(0, 32):
        with shop.Shop(row) as opened:
            found = {(kind, item): look(item) for item in shop.ITEMS for kind, look in looks(opened)}
            assert opened.lookups == 16
        right = [key for key, value in found.items() if shop.grade(row, f"It is {value}.")]
        kind = "price" if "much" in row["question"] else "stock"
        assert [(kind, item) for item in shop.ITEMS if item in row["question"]] == right


def looks(opened: shop.Shop) -> list[tuple[str, Any]]:
    return [("price", opened.price), ("stock", opened.stock)]


def test_an_item_the_shop_does_not_have_is_named():
    with shop.Shop(shop.tasks(0, 1)[0]) as opened:
        assert opened.price("pink piano") == "There is no pink piano in this shop."


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("It costs $47.", 1.0),
        ("Of 90 I asked, 47", 1.0),
        ("It costs $4.", 0.0),
        ("147", 0.0),
        ("no idea", 0.0),
        ("", 0.0),
    ],
)
def test_an_answer_is_graded_by_its_last_number(answer, reward):
    assert shop.grade({"answer": 47}, answer) == reward


def test_any_text_can_be_encoded_and_read_back(tokenizer):
    for text in (
        "How much is the red mug?",
        "Größe: 12 345 €\t\n\n  日本語 🫖\x00\x7f",
        '{"item": "a \\"b\\""}',
        "007",
    ):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_markers_are_single_tokens(tokenizer):
    for marker in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"):
        assert len(tokenizer.encode(marker, add_special_tokens=False)) == 1
    for marker in ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"):
        assert len(tokenizer.encode(marker, add_special_tokens=False)) == 1
    assert tokenizer.eos_token == "<|im_end|>"


def test_a_conversation_reads_as_chatml_with_hermes_tool_calls(tokenizer):
    text = render(tokenizer, [SYSTEM, ASK, calling("red mug"), result("47"), result("48")], ask=True)
    assert text == (
        "<|im_start|>system\nYou work in a shop.\n\n# Tools\n"
        "To use one, write a tool call with its name and arguments as JSON.\n"
        f"{json.dumps(TOOLS[0]['function'])}<|im_end|>\n"
        "<|im_start|>user\nHow much is the red mug?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "get_price", "arguments": {"item": "red mug"}}\n'
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n47\n</tool_response>\n"
        "<tool_response>\n48\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


def test_content_in_parts_and_arguments_as_objects_read_the_same(tokenizer):
    parts = {"role": "user", "content": [{"type": "text", "text": ASK["content"]}]}
    call = calling("red mug")
    call["tool_calls"][0]["function"]["arguments"] = {"item": "red mug"}
    plain = render(tokenizer, [SYSTEM, ASK, calling("red mug")])
    assert render(tokenizer, [SYSTEM, parts, call]) == plain


@pytest.mark.parametrize(
    "added",
    [
        [result("47")],
        [result("47"), result("48")],
        [result("")],
        [result("47"), ASK],
        [ASK],
        [ASK, ASK],
        [{"role": "system", "content": "Be brief."}, ASK],
    ],
    ids=["tool", "two tools", "empty tool", "tool and user", "user", "two users", "system"],
)
@pytest.mark.parametrize(
    "turn",
    [
        calling("red mug"),
        calling("red mug", "teal lamp"),
        {"role": "assistant", "content": "It costs $47."},
        {"role": "assistant", "content": "Let me see.", "reasoning_content": "Hm, 47?"},
    ],
    ids=["call", "two calls", "answer", "reasoning"],
)
def test_appending_messages_keeps_what_was_rendered_before(tokenizer, turn, added):
    before = render(tokenizer, [SYSTEM, ASK, turn])
    after = render(tokenizer, [SYSTEM, ASK, turn, *added], ask=True)
    assert after.startswith(before)
    assert before.startswith(render(tokenizer, [SYSTEM, ASK], ask=True))
    ids = tokenizer.encode(before, add_special_tokens=False)
    assert tokenizer.encode(after, add_special_tokens=False)[: len(ids)] == ids


def test_prompt_and_sampled_text_are_encoded_separately(tokenizer):
    prompt = render(tokenizer, [SYSTEM, ASK], ask=True)
    for sampled in ("It costs $47.<|im_end|>", "<tool_call>\n{}", "\n\nwell", '"item": "x"', "47"):
        apart = [*tokenizer.encode(prompt), *tokenizer.encode(sampled)]
        assert apart == tokenizer.encode(prompt + sampled)


def test_the_policy_is_small_and_loads():
    model = transformers.AutoModelForCausalLM.from_pretrained(POLICY, dtype="float32")
    assert sum(path.stat().st_size for path in POLICY.iterdir()) < 2_000_000
    assert not model.config.tie_word_embeddings
    assert model.config.max_position_embeddings == 2048
    assert model.generation_config.eos_token_id == model.config.eos_token_id
    with torch.no_grad():
        assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()
