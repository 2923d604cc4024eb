from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from gateway.core.exchange import Exchange, Observer
from gateway.telemetry.observer import Observers, Silent
from tests.telemetry.fakes import House, ended, stream

EVERY: list[Callable[[Observer], None]] = [
    lambda observer: observer.ended(ended(stream())),
    lambda observer: observer.paused(stream()),
    lambda observer: observer.resumed(stream(), 0.5),
    lambda observer: observer.aborted(stream(), 0.5),
    lambda observer: observer.retried(stream(), "reason"),
    lambda observer: observer.hedged(stream(), "won"),
    lambda observer: observer.migrated(stream(), "reason"),
    lambda observer: observer.failed(stream(), "reason"),
    lambda observer: observer.connection("b1", reused=True),
]


class Recorder:
    def __init__(self) -> None:
        self.heard: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: self.heard.append(name)


class Broken(Silent):
    def __init__(self, error: Exception):
        self._error = error

    def ended(self, exchange: Exchange) -> None:
        raise self._error

    def failed(self, exchange: Exchange, reason: str) -> None:
        raise self._error


def test_each_part_hears_everything() -> None:
    parts = Recorder(), Recorder()
    observers = Observers(*parts)
    for tell in EVERY:
        tell(observers)
    names = ["ended", "paused", "resumed", "aborted", "retried", "hedged", "migrated", "failed", "connection"]
    assert [part.heard for part in parts] == [names, names]


def test_metrics_and_silence_are_observers() -> None:
    for tell in EVERY:
        tell(House().metrics())
        tell(Silent())


def test_a_broken_part_is_logged_once_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    good = Recorder()
    observers = Observers(Broken(ValueError("a")), Broken(KeyError("b")), good)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            observers.ended(stream())
            observers.failed(stream(), "reason")
    assert good.heard == ["ended", "failed"] * 3
    assert len(caplog.records) == 2
    assert "Broken failed" in caplog.text


def test_who_hears_nothing_is_not_asked() -> None:
    class Counting(Silent):
        heard = 0

        def retried(self, exchange: Exchange, reason: str) -> None:
            self.heard += 1

    part = Counting()
    observers = Observers(part)
    for tell in EVERY:
        tell(observers)
    assert part.heard == 1
    assert (len(observers._ended), len(observers._retried)) == (0, 1)
