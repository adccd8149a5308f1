"""A transport from one line of text, as a person writes it into a command or a configuration.

memory                                           within this process
files    files:///DIR                            a directory of this machine, SQLite beside it
s3://BUCKET?sqs=URL                              S3, one SQS queue
s3://BUCKET?queues=PREFIX                        S3, an SQS queue per experiment, made when it is missing
...?notify=nats://HOST:4222                      any store, hints through NATS
...?notify=redis://HOST:6379/0                   any store, hints through Redis
"""

from __future__ import annotations

import difflib
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from afield.errors import UsageError
from afield.transports.notifiers.base import Notifier
from afield.transports.stores.memory import MemoryNotifier, MemoryTransport
from afield.transports.transport import StoreTransport

FORMS = "memory, files, files:///DIR, s3://BUCKET?sqs=URL, s3://BUCKET?queues=PREFIX"
FILES_OPTIONS = ("notify",)
S3_OPTIONS = ("sqs", "queues", "dead", "endpoint", "sqs_endpoint", "region", "notify", "threads")
S3_ONLY_OPTIONS = ("sqs", "queues", "dead")


def from_spec(spec: str, root: Path) -> StoreTransport:
    """`root` is where plain `files` lie. Nothing is connected or made before the transport is entered."""
    parts = urlsplit(spec)
    if spec == "memory":
        return MemoryTransport()
    if spec == "files" or parts.scheme == "files":
        return _files(spec, root)
    if parts.scheme == "s3":
        return _s3(spec)
    raise UsageError(f"unknown transport {spec!r}; choose one of: {FORMS}")


def _files(spec: str, root: Path) -> StoreTransport:
    from afield.transports.stores.files import FilesStore, SqliteNotifier

    parts = urlsplit(spec)
    if parts.scheme and (parts.netloc or not parts.path.startswith("/")):
        raise UsageError(f"transport {spec!r} must name a directory: files:///absolute/path")
    folder = Path(unquote(parts.path)) if parts.scheme else root
    options = _options(spec, FILES_OPTIONS)
    notifier = _notifier(options["notify"], spec) if "notify" in options else SqliteNotifier(folder)
    return StoreTransport(FilesStore(folder), notifier)


def _s3(spec: str) -> StoreTransport:
    from afield.transports.notifiers.sqs import SqsNotifier
    from afield.transports.stores.s3 import THREADS, S3Outcomes

    parts = urlsplit(spec)
    if not parts.netloc or parts.path.strip("/"):
        raise UsageError(
            f"transport {spec!r} must name a bucket and nothing below it: s3://BUCKET?sqs=URL;"
            " objects lie under the experiment's id"
        )
    options = _options(spec, S3_OPTIONS)
    endpoint, region = options.get("endpoint"), options.get("region")
    store = S3Outcomes(
        parts.netloc, endpoint=endpoint, region=region, threads=_count(spec, options, "threads", THREADS)
    )
    if "notify" in options:
        if clash := [name for name in S3_ONLY_OPTIONS if name in options]:
            raise UsageError(f"transport {spec!r} has both notify= and {clash[0]}=; choose one queue")
        return StoreTransport(store, _notifier(options["notify"], spec))
    if "sqs" not in options and "queues" not in options:
        return StoreTransport(store, MemoryNotifier())
    queue = SqsNotifier(
        options.get("sqs"),
        queue_prefix=options.get("queues"),
        dead_url=options.get("dead"),
        endpoint=options.get("sqs_endpoint", endpoint),
        region=region,
    )
    return StoreTransport(store, queue)


def _notifier(url: str, spec: str) -> Notifier:
    scheme = urlsplit(url).scheme
    if scheme in {"nats", "tls"}:
        from afield.transports.notifiers.nats import NatsNotifier

        return NatsNotifier(url)
    if scheme in {"redis", "rediss"}:
        from afield.transports.notifiers.redis import RedisNotifier

        return RedisNotifier(url)
    raise UsageError(f"notify={url} of transport {spec!r} must be nats://HOST:PORT or redis://HOST:PORT/DB")


def _options(spec: str, known: tuple[str, ...]) -> dict[str, str]:
    given = dict(parse_qsl(urlsplit(spec).query, keep_blank_values=True))
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise UsageError(f"unknown option {name!r} in {spec!r}{hint}; it takes: {', '.join(known)}")
        if not value:
            raise UsageError(f"option {name!r} in {spec!r} is empty")
    return given


def _count(spec: str, options: dict[str, str], name: str, default: int) -> int:
    value = options.get(name, str(default))
    if not value.isdecimal() or int(value) < 1:
        raise UsageError(f"{name}={value} in {spec!r} must be a whole number from 1 on")
    return int(value)
