"""Gateway metrics in the Prometheus text format.

Plain integers rather than prometheus_client: its labelled counters lock and look up on each call, and its
multi-process mode needs files. Snapshots of several processes are added up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct, field

from afield.types import Turn

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of histogram buckets, in seconds."""


class Histogram(Struct):
    """Histogram of seconds, with the bounds `SECONDS`."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    """Observations per bucket; the last bucket has no upper bound."""
    total: float = 0.0
    """Sum of the observations, in seconds."""

    def observe(self, value: float) -> None:
        self.counts[bisect_left(SECONDS, value)] += 1
        self.total += value

    def add(self, other: Histogram) -> None:
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.total += other.total


Counts = dict[str, int]


def count(counts: Counts, key: str, by: int = 1) -> None:
    counts[key] = counts.get(key, 0) + by


def _add_counts(counts: Counts, others: Counts) -> None:
    for key, value in others.items():
        count(counts, key, value)


class Metrics(Struct):
    """Metrics of one process. Keys of the counters are label values."""

    calls: dict[str, Counts] = field(default_factory=dict)
    """Ended calls by dialect and finish reason."""
    tiers: Counts = field(default_factory=dict)
    """Prompts by rendering tier."""
    links: Counts = field(default_factory=dict)
    """Links by type."""
    side: Counts = field(default_factory=dict)
    """Side calls by tag."""
    excluded: Counts = field(default_factory=dict)
    """Excluded tokens by reason."""
    refusals: Counts = field(default_factory=dict)
    """Error responses by HTTP status."""
    prompt_tokens: int = 0
    """Tokens sent to engines."""
    sampled_tokens: int = 0
    """Sampled tokens."""
    retries: int = 0
    """Requests answered with a recorded turn."""
    in_flight: int = 0
    """Running calls."""
    drift: int = 0
    """Turns whose text encodes to other ids than were sampled."""
    call_s: Histogram = field(default_factory=Histogram)
    """Duration of calls, in seconds."""
    first_token_s: Histogram = field(default_factory=Histogram)
    """Time to the first token, in seconds."""
    loop_lag_s: Histogram = field(default_factory=Histogram)
    """Delay of the event loop, in seconds."""

    def call_started(self, intent: Turn) -> None:
        self.in_flight += 1
        count(self.tiers, intent.tier)
        for link in intent.links:
            count(self.links, link.type)
        for tag in intent.tags:
            if tag.startswith("side:"):
                count(self.side, tag)

    def call_ended(self, turn: Turn, prompt: int) -> None:
        self.in_flight -= 1
        count(self.calls.setdefault(turn.dialect, {}), str(turn.finish_reason))
        self.prompt_tokens += prompt
        self.sampled_tokens += len(turn.token_ids)
        if turn.ended is not None:
            self.call_s.observe(turn.ended - turn.started)
        if turn.first_token is not None:
            self.first_token_s.observe(turn.first_token - turn.started)

    def excluded_from(self, tokens: Mapping[str, int]) -> None:
        """Counts excluded tokens of a finalized session by reason."""
        for reason, number in tokens.items():
            count(self.excluded, reason, number)

    def request_rejected(self, status: int) -> None:
        count(self.refusals, str(status))

    def add(self, other: Metrics) -> None:
        for dialect, counts in other.calls.items():
            _add_counts(self.calls.setdefault(dialect, {}), counts)
        for name in self.__struct_fields__:
            own_value, theirs_value = getattr(self, name), getattr(other, name)
            if name == "calls":
                continue
            if isinstance(own_value, dict):
                _add_counts(own_value, theirs_value)
            elif isinstance(own_value, Histogram):
                own_value.add(theirs_value)
            else:
                setattr(self, name, own_value + theirs_value)


class Snapshot(Struct):
    """Metrics and gauges of one process."""

    metrics: Metrics
    """Counters and histograms."""
    gauges: dict[str, float]
    """Gauges by name."""


def exposition(snapshots: Sequence[Snapshot]) -> str:
    """Returns the `/metrics` page: the sum over all processes."""
    metrics = Metrics()
    gauges: Counter[str] = Counter()
    for snapshot in snapshots:
        metrics.add(snapshot.metrics)
        gauges.update(snapshot.gauges)
    lines: list[str] = []
    calls = [
        ((("dialect", dialect), ("finish", finish)), n)
        for dialect, counts in sorted(metrics.calls.items())
        for finish, n in sorted(counts.items())
    ]
    _family(lines, "calls_total", "counter", "Model calls that ended.", calls)
    for name, label, about, counter in (
        ("tier_total", "tier", "Prompts by rendering tier.", metrics.tiers),
        ("links_total", "type", "Branches by where they come from.", metrics.links),
        ("side_calls_total", "kind", "Side calls.", metrics.side),
        ("excluded_tokens_total", "reason", "Tokens kept out of the loss.", metrics.excluded),
        ("refusals_total", "status", "Requests turned down.", metrics.refusals),
    ):
        _family(lines, name, "counter", about, [(((label, k),), n) for k, n in sorted(counter.items())])
    for name, kind, about, value in (
        ("prompt_tokens_total", "counter", "Tokens sent to the engine.", metrics.prompt_tokens),
        ("sampled_tokens_total", "counter", "Tokens sampled.", metrics.sampled_tokens),
        ("retries_total", "counter", "Requests answered with a turn already sampled.", metrics.retries),
        ("drift_total", "counter", "Sampled turns whose text encodes to other ids.", metrics.drift),
        ("calls_in_flight", "gauge", "Model calls running.", metrics.in_flight),
    ):
        _family(lines, name, kind, about, [((), value)])
    for name, about, histogram in (
        ("call_seconds", "How long calls took.", metrics.call_s),
        ("first_token_seconds", "How long the first token took.", metrics.first_token_s),
        ("event_loop_lag_seconds", "How late the event loop wakes up.", metrics.loop_lag_s),
    ):
        _histogram(lines, name, about, histogram)
    for name, value in sorted(gauges.items()):
        _family(lines, name, "gauge", name.replace("_", " ").capitalize() + ".", [((), value)])
    return "\n".join(lines) + "\n"


Labels = tuple[tuple[str, str], ...]


def _family(
    lines: list[str], name: str, kind: str, about: str, values: Iterable[tuple[Labels, float]]
) -> None:
    lines += [f"# HELP afield_{name} {about}", f"# TYPE afield_{name} {kind}"]
    lines += [f"afield_{name}{_labels(labels)} {value}" for labels, value in values]


def _labels(labels: Labels) -> str:
    inside = ",".join(f'{key}="{_escaped(value)}"' for key, value in labels)
    return f"{{{inside}}}" if inside else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _histogram(lines: list[str], name: str, about: str, histogram: Histogram) -> None:
    lines += [f"# HELP afield_{name} {about}", f"# TYPE afield_{name} histogram"]
    seen = 0
    for bound, count in zip((*map(str, SECONDS), "+Inf"), histogram.counts, strict=True):
        seen += count
        lines.append(f'afield_{name}_bucket{{le="{bound}"}} {seen}')
    lines += [f"afield_{name}_sum {histogram.total}", f"afield_{name}_count {seen}"]
