"""Outcomes of attacks: blocked, succeeded, or not promised."""

from __future__ import annotations

import json
from typing import Any


class Report:
    """Tells every attack when it is over, and the numbers at the end."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self.tried: list[str] = []
        self.broke: list[str] = []

    def add(self, who: str, name: str, *, blocked: bool, detail: str = "") -> None:
        named = f"{who}: {name.replace('_', ' ')}"
        if named in self.tried:
            raise ValueError(f"two attacks are called {named!r}")
        self.tried.append(named)
        if not blocked:
            self.broke.append(named)
        self._tell({"who": who, "attack": name, "blocked": blocked, "detail": detail[:200]})

    def not_promised(self, who: str, name: str, reason: str, seen: str) -> None:
        """Not counted: nobody said that it would be blocked."""
        self._tell({"who": who, "attack": name, "not_promised": reason, "seen": seen})

    def not_tried(self, who: str, reason: str) -> None:
        self._tell({"who": who, "not_tried": reason})

    def end(self) -> int:
        blocked = len(self.tried) - len(self.broke)
        print(json.dumps({"tried": len(self.tried), "blocked": blocked, "broke": self.broke}), flush=True)
        return 1 if self.broke or not self.tried else 0

    def _tell(self, line: dict[str, Any]) -> None:
        if self._as_json:
            print(json.dumps(line), flush=True)
            return
        reason = line.get("not_promised") or line.get("not_tried")
        how = f"not promised ({reason})" if reason else "blocked" if line["blocked"] else "BROKE"
        print(f"{line['who']:22} {line.get('attack', '-'):58} {how}", flush=True)
