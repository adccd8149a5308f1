"""The compose file: commands, variables, volumes and the documentation of them."""

from __future__ import annotations

import re

import yaml

from afield.cli.main import parser
from support.pages import DOCS, SOURCE, table
from support.paths import ROOT

FILE = ROOT / "deploy" / "compose.yaml"
VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


def services() -> dict[str, dict[str, object]]:
    text = VARIABLE.sub(lambda match: match[3] if match[2] == "-" else "value", FILE.read_text())
    return yaml.safe_load(text)["services"]


def test_commands_of_gateway_and_relay_parse() -> None:
    gateway = parser().parse_args(services()["gateway"]["command"])
    relay = parser().parse_args(services()["relay"]["command"])
    assert (gateway.command, relay.command) == ("gateway", "relay")
    assert relay.cluster == [gateway.relay_cluster]
    assert gateway.relay == f"http://relay:{8500}"
    assert gateway.model == "/models/policy" and gateway.host == relay.host == "0.0.0.0"


def test_services_are_confined_and_secrets_come_from_the_environment() -> None:
    read = set(re.findall(r"AFIELD_\w+", (SOURCE / "settings" / "environment.py").read_text()))
    for name in ("gateway", "relay"):
        service = services()[name]
        assert service["read_only"] is True and service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert {*service["environment"]} <= read
        assert {*service["environment"].values()} == {"value"}
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_page_lists_every_variable_with_its_default() -> None:
    variables = {
        name: "required" if sign == "?" else default
        for name, sign, default in VARIABLE.findall(FILE.read_text())
    }
    page = DOCS / "deploy" / "compose.md"
    rows = table(page, "Run gateway and relay with compose")
    listed = {name: row[1] for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    assert {*listed} == {*variables}
    for name, default in variables.items():
        assert default in listed[name], name
