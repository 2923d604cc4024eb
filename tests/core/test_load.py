"""A backend's load: what of it is its own, what its engine says, and how long a failure weighs."""

from __future__ import annotations

import pytest

from gateway.core.backend import Backend
from gateway.core.breaker import BreakerSettings, State
from gateway.core.load import EngineLoad, prompt_tokens


def backend(**options: object) -> Backend:
    return Backend("b", "http://b", **options)  # type: ignore[arg-type]


def test_requests_and_prompts() -> None:
    """A request is one, and one more for each 1,024 tokens of a prompt that is being read; all of it comes back, exactly."""
    found = backend()
    leases = [found.lease(tokens) for tokens in (0, 2048, 8192, 1, 3)]
    assert found.load(0.0) == 5 + (2048 + 8192 + 4) / 1024
    leases[2].prompt_read(0.0)
    assert found.load(0.0) == 5 + (2048 + 4) / 1024
    leases[2].prompt_read(0.0)
    assert found.load(0.0) == 5 + (2048 + 4) / 1024
    for lease in leases:
        lease.release()
    assert (found.load(0.0), found.tokens, found.in_flight, found.taken) == (0.0, 0, 0, 5)
    leases[1].prompt_read(0.0)
    assert (found.load(0.0), found.tokens) == (0.0, 0)


@pytest.mark.parametrize(("octets", "tokens"), [(0, 0), (3, 0), (400, 100), (262_144, 65_536), (50_000_000, 65_536)])
def test_prompt_tokens(octets: int, tokens: int) -> None:
    """Four octets a token; a picture of megabytes is no prompt of a million."""
    assert prompt_tokens(octets) == tokens


@pytest.mark.parametrize(
    ("said", "ours", "load"),
    [
        (EngineLoad(0, 0), 0, 2.0),
        (EngineLoad(2, 0), 2, 2.0),  # all of them ours
        (EngineLoad(7, 0), 2, 7.0),  # five are others'
        (EngineLoad(1, 0), 2, 2.0),  # one of ours has not begun there, or has ended: it counts all the same
        (EngineLoad(5, 3), 2, 2.0 + 6 + 3),  # six are others', and three of the eight wait
        (EngineLoad(1, 1), 2, 3.0),
        (EngineLoad(0, 0, 0.8), 0, 2.0),
        (EngineLoad(0, 0, 0.9), 0, 3.0),
        (EngineLoad(0, 0, 1.0), 0, 4.0),
        (EngineLoad(0, 0, 7.0), 0, 4.0),  # in percent, or a slip: no more than full
        (EngineLoad(4, 0, 0.9), 2, 6.0),
    ],
)
def test_what_the_engine_says(said: EngineLoad, ours: int, load: float) -> None:
    found = backend()
    for _ in range(2):
        found.lease()
    found.scraped(said, ours)
    assert found.engine == said
    assert found.load(0.0) == pytest.approx(load)
    found.lease()  # since then: it counts at once, whatever was said
    assert found.load(0.0) == pytest.approx(load + said.pressure)
    found.scraped(None)
    assert (found.engine, found.load(0.0)) == (None, 3.0)


def test_figures_are_followed_by_and_by() -> None:
    """A quarter of the way each time, so that nobody runs after each second's news; what is in flight here counts at once."""
    found = backend()
    loads = []
    for running in (8, 0, 0, 0, 8):
        found.scraped(EngineLoad(running, 0))
        loads.append(found.load(0.0))
    assert loads == [8.0, 6.0, 4.5, 3.375, 4.53125]
    found.scraped(None)
    found.scraped(EngineLoad(1, 0))
    assert found.load(0.0) == 1.0


class TestPenalty:
    def test_doubles_with_each_failure_and_halves_with_time(self) -> None:
        found = backend(breaker=BreakerSettings(failures=100))
        for penalty in (1, 3, 7, 15):
            found.failed(10.0)
            assert found.load(10.0) == penalty
        assert found.load(15.0) == pytest.approx(7.5)
        assert found.load(20.0) == pytest.approx(3.75)
        assert found.load(60.0) == 0.0

    def test_a_busy_fleet_is_no_reason_to_ask_it(self) -> None:
        """It grows past any load, and not without end."""
        found = backend(breaker=BreakerSettings(failures=1000))
        for _ in range(100):
            found.failed(0.0)
        assert found.load(0.0) == 1024
        assert found.load(70.0) == 0.0

    def test_success_halves_it(self) -> None:
        found = backend(breaker=BreakerSettings(failures=100))
        for _ in range(3):
            found.failed(0.0)
        found.answered(200, 0.0)
        assert found.load(0.0) == 3.5
        for _ in range(4):
            found.answered(200, 0.0)
        assert found.load(0.0) == 0.0

    def test_an_error_of_its_own_weighs_and_ejects_nobody(self) -> None:
        """A 429 or a 5xx: it answered, so the breaker stays closed, but quick refusals are no sign of idleness."""
        found = backend(breaker=BreakerSettings(failures=1))
        found.answered(429, 0.0)
        found.answered(500, 0.0)
        assert found.breaker.state is State.CLOSED
        assert found.load(0.0) == 3

    def test_once_ejected_it_weighs_no_more(self) -> None:
        """The breaker has it then: its one trial comes when that says so."""
        found = backend(breaker=BreakerSettings(failures=3, open=10.0))
        for _ in range(3):
            found.failed(0.0)
        assert found.breaker.state is State.OPEN
        assert found.load(0.0) == 0.0
