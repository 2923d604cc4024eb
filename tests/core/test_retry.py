"""When another attempt may be made: the whole table, and the budget."""

from __future__ import annotations

import itertools

import pytest

from gateway.core.retry import RESERVE, Retries, RetrySettings
from gateway.errors import UpstreamFailed

CODES = ["upstream_connect", "timeout_connect", "stale_connection", "upstream_reset", "upstream_malformed",
         "timeout_first_byte"]  # fmt: skip
METHODS = [b"GET", b"HEAD", b"OPTIONS", b"POST", b"PUT", b"PATCH", b"DELETE"]


def failed(code: str) -> UpstreamFailed:
    return UpstreamFailed(code, "x", unsent=code in ("upstream_connect", "timeout_connect"))


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("method", METHODS)
def test_table(code: str, method: bytes) -> None:
    """Unsent: always. Stale: what harms nobody, and POST only if told so. Anything else: never."""
    for attempts, kept, replay in itertools.product((1, 2), (True, False), (True, False)):
        retries = Retries(RetrySettings(2, 0.2, replay))
        unsent = code in ("upstream_connect", "timeout_connect")
        stale = code == "stale_connection" and (method in (b"GET", b"HEAD", b"OPTIONS") or replay)
        expected = kept and attempts < 2 and (unsent or stale)
        assert retries.again(failed(code), method, attempts, body_kept=kept) is expected


@pytest.mark.parametrize("attempts", [1, 2, 3, 5])
def test_attempts_are_counted(attempts: int) -> None:
    """`attempts` in all, the first one among them; a stale GET has its second one in any case."""
    retries = Retries(RetrySettings(attempts=attempts))
    made = 1
    while retries.again(failed("upstream_connect"), b"POST", made, body_kept=True):
        made += 1
    assert made == attempts
    assert retries.again(failed("stale_connection"), b"GET", 1, body_kept=True)
    assert not retries.again(failed("stale_connection"), b"GET", max(attempts, 2), body_kept=True)


def test_budget() -> None:
    """When everything fails, second attempts are a fifth of the requests, and a reserve."""
    retries, second = Retries(RetrySettings(budget=0.2)), 0
    for _ in range(1000):
        retries.request()
        second += retries.again(failed("upstream_connect"), b"POST", 1, body_kept=True) and retries.afford()
    assert 200 <= second <= 200 + RESERVE


def test_budget_is_not_saved_up_without_end() -> None:
    """A million good requests do not buy a storm of second attempts."""
    retries = Retries(RetrySettings(budget=1.0))
    for _ in range(100_000):
        retries.request()
    second = 0
    while retries.again(failed("upstream_connect"), b"POST", 1, body_kept=True):
        retries.spend()
        second += 1
    assert second == RESERVE
    with pytest.raises(AssertionError):
        retries.spend()


def test_questions_take_nothing() -> None:
    """Only what is done is paid for."""
    retries = Retries(RetrySettings(budget=0.0))
    for _ in range(100):
        assert not retries.again(failed("upstream_reset"), b"POST", 1, body_kept=True)
        assert not retries.again(failed("upstream_connect"), b"POST", 1, body_kept=False)
        assert retries.again(failed("upstream_connect"), b"POST", 1, body_kept=True)
        assert retries.turned_away(429, None, 1, body_kept=True)
        assert retries.another(1)
    assert sum(retries.afford() for _ in range(100)) == RESERVE
    assert not retries.again(failed("upstream_connect"), b"POST", 1, body_kept=True)
