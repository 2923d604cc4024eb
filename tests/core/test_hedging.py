"""Whose word counts, of two backends."""

from __future__ import annotations

import itertools

import pytest

from gateway.core.hedging import Hedge, better
from gateway.core.retry import RESERVE, Retries, RetrySettings
from gateway.errors import EngineRefused, UpstreamFailed

ORDER = [
    EngineRefused(400, b""),
    EngineRefused(503, b""),
    UpstreamFailed("upstream_reset", "gone"),
    UpstreamFailed("stale_connection", "stale"),
]


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations(ORDER, 2)))
def test_the_better_failure(one: UpstreamFailed | EngineRefused, other: UpstreamFailed | EngineRefused) -> None:
    assert better(one, other) is better(other, one) is one


def test_of_equals_the_first() -> None:
    one, other = UpstreamFailed("upstream_reset", "one"), UpstreamFailed("upstream_connect", "other")
    assert better(one, other) is one


def test_when() -> None:
    assert Hedge(2).delay(True) == 2
    assert Hedge(2).delay(False) is None
    assert Hedge(2, 60).delay(None) == 60


def test_hedges_are_of_the_budget_of_second_attempts() -> None:
    retries = Retries(RetrySettings(budget=0.5))
    assert sum(retries.afford() for _ in range(int(RESERVE) + 10)) == RESERVE
    retries.request()
    assert not retries.afford()
    retries.request()
    assert retries.afford()
    assert not retries.afford()
