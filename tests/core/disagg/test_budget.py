"""What time a hand-off has, and what is worth a release leg; and what a prefill backend is charged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.backend import Backend
from gateway.core.disagg.base import Release
from gateway.core.disagg.budget import Budget, releases
from gateway.core.disagg.loads import PrefillLoad


def test_a_hold_of_thirty_seconds() -> None:
    budget = Budget(30.0, 100.0)
    assert (budget.late(103.0), budget.late(103.1)) == (False, True)
    assert (budget.dead(124.0), budget.dead(124.1)) == (False, True)
    assert budget.gap(99.0) == 0
    assert [budget.for_release(now) for now in (100.0, 120.0, 130.0, 200.0)] == [30.0, 10.0, 0.0, 0.0]


def test_a_long_hold_and_none() -> None:
    long = Budget(480.0, 0.0)
    assert [long.for_release(now) for now in (0.0, 449.0, 460.0)] == [30.0, 30.0, 20.0]
    assert long.for_release(0.0, most=5.0) == 5.0
    none = Budget(0.0, 0.0)
    assert not none.dead(1e9) and not none.late(1e9) and none.for_release(0.0) == 0


@pytest.mark.parametrize(
    ("policy", "usage", "wanted"),
    [
        (Release.ALWAYS, None, True),
        (Release.ALWAYS, 0.1, True),
        (Release.NEVER, 1.0, False),
        (Release.PRESSURE, None, False),
        (Release.PRESSURE, 0.79, False),
        (Release.PRESSURE, 0.8, True),
    ],
)
def test_releases(policy: Release, usage: float | None, wanted: bool) -> None:
    assert releases(policy, usage) is wanted


def test_a_prompt_is_charged_twice() -> None:
    """As it is read, and as it is held: the second outlasts P's answer."""
    backend = Backend("p", "http://p")
    load = PrefillLoad(backend, 1000)
    assert backend.tokens == 1300
    load.answered()
    assert backend.tokens == 300
    load.fetched()
    assert backend.tokens == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["answered", "fetched", "release"])), max_size=30))
def test_whatever_happens_in_whatever_order(steps: list[tuple[int, str]]) -> None:
    backend = Backend("p", "http://p")
    loads = [PrefillLoad(backend, tokens) for tokens in (0, 1, 777, 10**6)]
    for which, step in steps:
        getattr(loads[which], step)()
        assert backend.tokens >= 0
    for load in loads:
        load.release()
    assert backend.tokens == 0
