"""Addresses of shared limiters: what is accepted, and that no error has the password."""

from __future__ import annotations

import pytest

from afield.errors import UsageError
from afield.ratelimit import RateLimits, RedisLimiter

pytest.importorskip("redis")

WRONG = {
    "unix:///run/redis.sock": "must be like redis://HOST:PORT/DB",
    "redis://": "must be like redis://HOST:PORT/DB",
    "redis://:6379/0": "has no valid host or port",
    "redis://h:abc/0": "has no valid host or port",
    "redis://h:99999/0": "has no valid host or port",
    "redis://h/launches": "'launches' must be the number of a database",
    "redis://h/1/2": "'1/2' must be the number of a database",
    "redis://h/0?name=": "name is empty",
    "redis://h/0?timeout=3": "must be like redis://HOST:PORT/DB",
    "redis://:top#secret@h:1/0": "write / . and # in the password as",
    "redis://:top/secret@h:1/0": "write / . and # in the password as",
    "redis://:top?secret@h:1/0": "write / . and # in the password as",
    "redis://user:top-secret@h:x/0": "'redis://h:x/0' has no valid host or port",
}


@pytest.mark.parametrize("url", WRONG)
def test_wrong_address_is_named_without_its_password(url: str) -> None:
    with pytest.raises(UsageError, match=WRONG[url]) as caught:
        RedisLimiter(RateLimits(rate_per_s=1), url)
    assert "top" not in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["redis://h", "redis://h/", "redis://[::1]:6379/3?name=a:b", "rediss://user:p%40%2Fw@h:6380/0"]
)
def test_address_is_accepted(url: str) -> None:
    RedisLimiter(RateLimits(rate_per_s=1), url).close()
