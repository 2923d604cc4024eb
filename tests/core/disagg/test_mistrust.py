"""Pairs between which KV does not get across."""

from __future__ import annotations

from gateway.core.breaker import BreakerSettings
from gateway.core.disagg import mistrust
from gateway.core.disagg.mistrust import Mistrust

SETTINGS = BreakerSettings(failures=2, window=30.0, open=10.0)


def test_a_pair_is_avoided_and_tried_again() -> None:
    of = Mistrust()
    of.failed("p", "d", SETTINGS, 0.0)
    assert not of.avoided("p", 0.0)
    of.failed("p", "d", SETTINGS, 1.0)
    assert of.avoided("p", 1.0) == {"d"}
    assert not of.avoided("other", 1.0)
    assert not of.avoided("p", 11.0)
    of.failed("p", "d", SETTINGS, 12.0)  # the first one that was tried
    assert of.avoided("p", 12.0) == {"d"}
    of.succeeded("p", "d")
    of.failed("p", "d", SETTINGS, 13.0)
    assert not of.avoided("p", 13.0)


def test_failures_are_forgotten_with_their_window() -> None:
    of = Mistrust()
    for now in (0.0, 31.0, 62.0):
        of.failed("p", "d", SETTINGS, now)
    assert not of.avoided("p", 62.0)


def test_it_is_bounded() -> None:
    of = Mistrust()
    for i in range(mistrust.PAIRS_MOST + 10):
        of.failed("p", f"d{i}", SETTINGS._replace(failures=1), 0.0)
    assert len(of.avoided("p", 0.0)) == mistrust.PAIRS_MOST
