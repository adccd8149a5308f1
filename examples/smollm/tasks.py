"""The help desk: its tools' answers, and tasks from a seed: `python tasks.py DIRECTORY`.

A task asks for one field of one order of a customer who has several orders. Customers of the held-out tasks
never appear in training tasks. The orders are part of the task, where the tools read them.
"""

import argparse
import itertools
import json
import random
from pathlib import Path
from typing import Any

FIRST = "Ada Ben Cleo Dan Eva Finn Gina Hugo Ida Jan Kim Leo Mia Nils Olga Paul Rosa Sven Tina Uwe Vera Zoe"
LAST = "Adler Berg Cole Dorn Ellis Falk Grant Hale Irwin Jung Kent Lang Moor Noll Otto Park Quinn Reed Stone"
STATES = ("open", "paid", "returned", "cancelled")
FIELDS = {
    "item": ["lamp", "chair", "table", "clock", "plate", "spoon", "shirt", "rope", "bell", "mirror"],
    "price": [str(price) for price in range(11, 99)],
    "carrier": ["Nordex", "Velox", "Pronto", "Castor", "Delta", "Comet", "Falcon", "Orion"],
    "city": ["Oslo", "Paris", "Rome", "Berlin", "Madrid", "Vienna", "Lisbon", "Dublin", "Prague", "Athens"],
    "day": ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"],
}
QUESTIONS = {
    "item": ("What is in the {} order of {}?", "What did {1} buy with the {0} order?"),
    "price": ("How much is the {} order of {}?", "What does {1} pay for the {0} order?"),
    "carrier": ("Who delivers the {} order of {}?", "Which company brings the {} order to {}?"),
    "city": ("Where does the {} order of {} go?", "To which place do we send the {} order of {}?"),
    "day": ("When does the {} order of {} arrive?", "On which date will {1} get the {0} order?"),
}
SYSTEM = "You work at a help desk. Find the order with the tools, then answer with its line alone."
Task = dict[str, Any]


# --- the world ------------------------------------------------------------------------------------


def find_orders(task: Task, customer: str) -> str:
    """What the tool of this name returns: the customer's orders with their states."""
    if customer.strip().lower() != task["customer"].lower():
        return "no such customer"
    return "\n".join(f"order {order['id']}: {order['state']}" for order in task["orders"])


def get_order(task: Task, order_id: str) -> str:
    """What the tool of this name returns: the fields of an order."""
    order = next((order for order in task["orders"] if order["id"] == order_id.strip()), None)
    return "\n".join(f"{name}: {order[name]}" for name in FIELDS) if order else "no such order"


def grade(task: Task, answer: str) -> float:
    """1 for exactly the right answer, else 0."""
    return float(answer.strip() == task["answer"])


# --- tasks ----------------------------------------------------------------------------------------


def make_order(rng: random.Random, state: str, taken: list[dict[str, str]]) -> dict[str, str]:
    """An order that differs from the customer's others in every field."""
    ids = {other["id"] for other in taken}
    order = {"id": rng.choice([str(n) for n in range(1000, 10000) if str(n) not in ids]), "state": state}
    for name, values in FIELDS.items():
        order[name] = rng.choice([value for value in values if all(value != other[name] for other in taken)])
    return order


def make_task(rng: random.Random, task_id: str, customer: str, orders: int) -> Task:
    placed: list[dict[str, str]] = []
    for state in rng.sample(STATES, orders):
        placed.append(make_order(rng, state, placed))
    wanted, field = rng.choice(placed), rng.choice(list(FIELDS))
    return {
        "id": task_id,
        "question": rng.choice(QUESTIONS[field]).format(wanted["state"], customer),
        "customer": customer,
        "orders": placed,
        "order": wanted["id"],
        "field": field,
        "answer": f"{field}: {wanted[field]}",
    }


def make_tasks(seed: int, train: int, held_out: int, orders: int = 2) -> tuple[list[Task], list[Task]]:
    """Training and held-out tasks, of disjoint customers."""
    rng = random.Random(seed)
    customers = [" ".join(name) for name in itertools.product(FIRST.split(), LAST.split())]
    rng.shuffle(customers)
    cut = len(customers) // 4
    parts = (("train", train, customers[cut:]), ("held-out", held_out, customers[:cut]))
    first, second = (
        [make_task(rng, f"{name}-{n:04}", rng.choice(people), orders) for n in range(count)]
        for name, count, people in parts
    )
    return first, second


def write_tasks(path: Path, tasks: list[Task]) -> None:
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, help="directory for train.jsonl and held-out.jsonl")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=int, default=1024, help="number of training tasks")
    parser.add_argument("--held-out", type=int, default=200, help="number of held-out tasks")
    parser.add_argument("--orders", type=int, default=2, choices=(2, 3, 4), help="orders of each customer")
    chosen = parser.parse_args()
    chosen.directory.mkdir(parents=True, exist_ok=True)
    train, held_out = make_tasks(chosen.seed, chosen.train, chosen.held_out, chosen.orders)
    write_tasks(chosen.directory / "train.jsonl", train)
    write_tasks(chosen.directory / "held-out.jsonl", held_out)


if __name__ == "__main__":
    main()
