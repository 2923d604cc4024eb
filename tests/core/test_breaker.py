"""The breaker: its whole table, and random operations against a model that keeps the history."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.breaker import Breaker, BreakerSettings, State

SETTINGS = BreakerSettings(failures=3, window=10.0, open=5.0)
NOW = 100.0


def closed() -> Breaker:
    return Breaker(SETTINGS)


def nearly() -> Breaker:
    breaker = Breaker(SETTINGS)
    breaker.failed(NOW - 1)
    breaker.failed(NOW - 1)
    return breaker


def opened() -> Breaker:
    breaker = Breaker(SETTINGS)
    for _ in range(3):
        breaker.failed(NOW - 1)
    return breaker


def due() -> Breaker:
    breaker = Breaker(SETTINGS)
    for _ in range(3):
        breaker.failed(NOW - 5)
    return breaker


def half() -> Breaker:
    breaker = due()
    assert breaker.allows(NOW)
    return breaker


def trying() -> Breaker:
    breaker = half()
    breaker.sent()
    return breaker


MAKE = {"closed": closed, "nearly": nearly, "opened": opened, "due": due, "half": half, "trying": trying}
INPUTS = {
    "sent": lambda b: b.sent(),
    "succeeded": lambda b: b.succeeded(),
    "failed": lambda b: b.failed(NOW),
    "over": lambda b: b.over(1),
    "time": lambda b: b.allows(NOW),
}
C, O, H = State.CLOSED, State.OPEN, State.HALF_OPEN  # noqa: E741  # a table reads by its letters
# the state after the input, and whether another request may then be sent at once
TABLE = {
    "closed": {"sent": (C, 1), "succeeded": (C, 1), "failed": (C, 1), "over": (C, 1), "time": (C, 1)},
    "nearly": {"sent": (C, 1), "succeeded": (C, 1), "failed": (O, 0), "over": (C, 1), "time": (C, 1)},
    "opened": {"sent": (O, 0), "succeeded": (O, 0), "failed": (O, 0), "over": (O, 0), "time": (O, 0)},
    "due": {"sent": (O, 1), "succeeded": (O, 1), "failed": (O, 1), "over": (O, 1), "time": (H, 1)},
    "half": {"sent": (H, 0), "succeeded": (C, 1), "failed": (O, 0), "over": (H, 1), "time": (H, 1)},
    "trying": {"sent": (H, 0), "succeeded": (C, 1), "failed": (O, 0), "over": (H, 1), "time": (H, 0)},
}


@pytest.mark.parametrize("given_", TABLE)
@pytest.mark.parametrize("what", INPUTS)
def test_table(given_: str, what: str) -> None:
    """Every state with every input."""
    breaker = MAKE[given_]()
    INPUTS[what](breaker)
    state, allows = TABLE[given_][what]
    assert breaker.state is state
    assert breaker.allows(NOW) is bool(allows)


@pytest.mark.parametrize("given_", MAKE)
def test_who_looks_changes_nothing(given_: str) -> None:
    """`state_at` says what state it would be found in, and leaves it as it was."""
    breaker = MAKE[given_]()
    before, shown = breaker.state, breaker.state_at(NOW)
    assert breaker.state is before
    breaker.allows(NOW)
    assert breaker.state is shown
    assert (before is shown) is (given_ != "due")


def test_failures_must_fall_within_the_window() -> None:
    """Three failures open it only if the first is at most `window` seconds old."""
    breaker = closed()
    breaker.failed(0.0)
    breaker.failed(5.0)
    breaker.failed(10.1)
    assert breaker.state is State.CLOSED
    breaker.failed(15.0)  # 5.0, 10.1, 15.0
    assert breaker.state is State.OPEN


def test_success_forgets_failures() -> None:
    """A backend that answers in between is not failing."""
    breaker = nearly()
    breaker.succeeded()
    breaker.failed(NOW)
    breaker.failed(NOW)
    assert breaker.state is State.CLOSED
    breaker.failed(NOW)
    assert breaker.state is State.OPEN


def test_one_failure_is_enough_where_so_configured() -> None:
    """`failures: 1` opens at once."""
    breaker = Breaker(BreakerSettings(failures=1))
    breaker.failed(NOW)
    assert breaker.state is State.OPEN


def test_opens_anew_for_the_whole_time() -> None:
    """A trial that fails starts the time of `open` again."""
    breaker = trying()
    breaker.failed(NOW)
    assert not breaker.allows(NOW + 4.9)
    assert breaker.allows(NOW + 5)


@pytest.mark.parametrize("before", [0, 2, 4])
@pytest.mark.parametrize("failures", [1, 3, 8])
def test_settings_of_a_reload_hold_from_then_on(before: int, failures: int) -> None:
    """After a reload it opens at the new count, whatever had been counted under the old one."""
    breaker = Breaker(BreakerSettings(failures=5))
    for _ in range(before):
        breaker.failed(NOW)
    breaker.settings = BreakerSettings(failures=failures)
    for _ in range(failures):
        breaker.failed(NOW)
    assert breaker.state is State.OPEN


class Model:
    """The documented table, kept by its whole history."""

    def __init__(self) -> None:
        self.state, self.failures, self.opened, self.trial, self.trials = State.CLOSED, list[float](), 0.0, 0, 0

    def allows(self, now: float) -> bool:
        if self.state is State.OPEN and now - self.opened >= SETTINGS.open:
            self.state, self.trial = State.HALF_OPEN, 0
        return self.state is State.CLOSED or (self.state is State.HALF_OPEN and not self.trial)

    def sent(self) -> int:
        if self.state is not State.HALF_OPEN or self.trial:
            return 0
        self.trials += 1
        self.trial = self.trials
        return self.trial

    def over(self, trial: int) -> None:
        if trial == self.trial:
            self.trial = 0

    def succeeded(self) -> None:
        if self.state is not State.OPEN:
            self.state, self.trial, self.failures = State.CLOSED, 0, []

    def failed(self, now: float) -> None:
        if self.state is State.OPEN:
            return
        self.failures.append(now)
        recent = [t for t in self.failures if now - t <= SETTINGS.window]
        if self.state is State.HALF_OPEN or len(recent) >= SETTINGS.failures:
            self.state, self.opened, self.trial, self.failures = State.OPEN, now, 0, []


OPERATIONS = st.sampled_from(["allows", "sent", "succeeded", "failed", "over", "over an old one"])


@given(st.lists(st.tuples(OPERATIONS, st.floats(0, 6)), max_size=60))
def test_random_operations(steps: list[tuple[str, float]]) -> None:
    """Whatever happens in whatever order, it is as the table says."""
    breaker, model, now, trials = closed(), Model(), 0.0, [0]
    for what, passed in steps:
        now += passed
        if what in ("allows", "failed"):
            assert getattr(breaker, what)(now) == getattr(model, what)(now)
        elif what == "sent":
            trials.append(breaker.sent())
            assert trials[-1] == model.sent()
        elif what.startswith("over"):
            for each in (breaker, model):
                each.over(trials[0] if what.endswith("one") else trials[-1])
        else:
            getattr(breaker, what)()
            getattr(model, what)()
        assert breaker.state is model.state
