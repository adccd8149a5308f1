"""The operations page names metrics that gateway and relay serve."""

from __future__ import annotations

import re

from support.pages import DOCS, SOURCE, names


def test_alerts_name_metrics_that_exist() -> None:
    served = set(names(DOCS / "how-to" / "gateway.md", "Metrics"))  # checked against a running gateway
    relay = (SOURCE / "relay" / "server.py").read_text()
    served |= {f"afield_relay_{name}" for name in re.findall(r'^\s+\("(\w+)", ', relay, re.M)}
    named = set(re.findall(r"\bafield_\w+", (DOCS / "deploy" / "operate.md").read_text()))
    assert len(named) >= 9 and named <= served, named - served
