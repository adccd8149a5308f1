"""Demo tasks: questions about a shop, answered from its database.

1. A task row has the question, the contents of the shop and the correct answer.
2. Prices and stock are sampled per task, so answers cannot be memorised.
3. All numbers of a shop differ and none is a multiple of 10, so that wrong lookups and guesses score 0.
"""

from __future__ import annotations

import random
import re
import sqlite3
from typing import Any

ITEMS = tuple(
    f"{colour} {thing}" for thing in ("mug", "lamp", "chair", "clock") for colour in ("red", "teal")
)
QUESTIONS = {"price": "How much is the {item}?", "stock": "How many {item}s are left?"}
NUMBERS = tuple(number for number in range(11, 50) if number % 10)


def tasks(seed: int, n: int) -> list[dict[str, Any]]:
    """Generate `n` task rows. Every 8 rows ask about each item once, half of them about prices; every 16 rows
    ask both questions about each item."""
    rng = random.Random(f"shop {seed}")
    rows: list[dict[str, Any]] = []
    while len(rows) < n:
        order = rng.sample(ITEMS, len(ITEMS))
        for turn in (0, 1):
            for place, item in enumerate(order):
                rows.append(_task(rng, seed, len(rows), item, ("price", "stock")[(place + turn) % 2]))
    return rows[:n]


def _task(rng: random.Random, seed: int, number: int, item: str, field: str) -> dict[str, Any]:
    values = rng.sample(NUMBERS, 2 * len(ITEMS))
    shelves = [
        {"item": name, "price": price, "stock": stock}
        for name, price, stock in zip(ITEMS, values[::2], values[1::2], strict=True)
    ]
    return {
        "id": f"shop-{seed}-{number:04d}",
        "question": QUESTIONS[field].format(item=item),
        "shop": shelves,
        "answer": next(shelf[field] for shelf in shelves if shelf["item"] == item),
    }


class Shop:
    """Shop of one task as an in-memory SQLite database, usable from any thread."""

    def __init__(self, task: dict[str, Any]) -> None:
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        self._database.execute("CREATE TABLE shop (item TEXT PRIMARY KEY, price INTEGER, stock INTEGER)")
        self._database.executemany("INSERT INTO shop VALUES (:item, :price, :stock)", task["shop"])
        self.lookups = 0
        """Number of queries."""

    def __enter__(self) -> Shop:
        return self

    def __exit__(self, *exc: object) -> None:
        self._database.close()

    def price(self, item: str) -> str:
        return self._look_up("SELECT price FROM shop WHERE item = ?", item)

    def stock(self, item: str) -> str:
        return self._look_up("SELECT stock FROM shop WHERE item = ?", item)

    def _look_up(self, query: str, item: str) -> str:
        self.lookups += 1
        row = self._database.execute(query, (item,)).fetchone()
        return str(row[0]) if row else f"There is no {item} in this shop."


def grade(task: dict[str, Any], answer: str) -> float:
    """Reward: 1.0 if the last number in the answer is correct, otherwise 0.0."""
    numbers = re.findall(r"\d+", answer)
    return float(bool(numbers) and int(numbers[-1]) == task["answer"])
