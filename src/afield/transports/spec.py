"""Transport specs: registry of stores and notifiers.

memory                                           within this process
files    files:///DIR                            a directory of this machine, with SQLite for hints
s3://BUCKET?sqs=URL                              S3 and one SQS queue
s3://BUCKET?queues=PREFIX                        S3 and an SQS queue per experiment, created if missing
...?notify=nats://HOST:4222                      any store, hints through NATS
...?notify=redis://HOST:6379/0                   any store, hints through Redis

A store module has `FORMS`, `OPTIONS` and `from_spec(spec, root)`, which returns the store and its default
notifier. A notifier is created from its URL. Adding either is one module and one line of a table.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from afield.errors import UsageError
from afield.transports.notifiers.base import Notifier
from afield.transports.notifiers.nats import NatsNotifier
from afield.transports.notifiers.redis import RedisNotifier
from afield.transports.stores import files, memory, s3
from afield.transports.stores.base import CollectorStore, TransportSpec
from afield.transports.transport import StoreTransport


class StoreModule(Protocol):
    """Interface of a store module."""

    FORMS: tuple[str, ...]
    """Accepted specs, for error messages."""
    OPTIONS: tuple[str, ...]
    """Accepted query options besides `notify`."""

    @staticmethod
    def from_spec(spec: TransportSpec, root: Path) -> tuple[CollectorStore, Notifier]: ...


STORES: dict[str, StoreModule] = {"memory": memory, "files": files, "s3": s3}
NOTIFIERS: dict[str, Callable[[str], Notifier]] = {
    "nats": NatsNotifier,
    "tls": NatsNotifier,
    "redis": RedisNotifier,
    "rediss": RedisNotifier,
}


def from_spec(text: str, root: Path) -> StoreTransport:
    """Build the transport that `text` describes, without connecting.

    `root` is the directory of the spec `files`.
    """
    spec = TransportSpec.parse(text)
    module = STORES.get(spec.scheme)
    if module is None:
        forms = ", ".join(form for module in STORES.values() for form in module.FORMS)
        raise UsageError(f"unknown transport {text!r}; choose one of: {forms}")
    spec.check_options((*module.OPTIONS, "notify"))
    store, notifier = module.from_spec(spec, root)
    if url := spec.options.get("notify"):
        notifier = _notifier(url, text)
    return StoreTransport(store, notifier)


def _notifier(url: str, text: str) -> Notifier:
    build = NOTIFIERS.get(urlsplit(url).scheme)
    if build is None:
        raise UsageError(
            f"notify={url} of transport {text!r} must be nats://HOST:PORT or redis://HOST:PORT/DB"
        )
    return build(url)
