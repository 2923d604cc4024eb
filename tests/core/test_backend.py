"""A backend's health over every sequence of probes, and leases, which come back exactly once."""

from __future__ import annotations

import itertools
import random

import pytest

from gateway.core.backend import Backend, Health, HealthSettings
from gateway.core.breaker import State

SETTINGS = HealthSettings(fail=3, pass_=2)
U, UP, D = Health.UNKNOWN, Health.UP, Health.DOWN


def backend(**options: object) -> Backend:
    return Backend("b", "http://b", **options)  # type: ignore[arg-type]


def run(probes: str, settings: HealthSettings = SETTINGS) -> Backend:
    found = backend()
    for probe in probes:
        found.probed(probe == "+", settings)
    return found


@pytest.mark.parametrize(
    ("probes", "health"),
    [("", U), ("+", UP), ("-", U), ("--", U), ("---", D), ("--+", UP), ("---+", D), ("---++", UP), ("---+-+", D),
     ("---+-++", UP), ("+--", UP), ("+---", D), ("+--+--", UP), ("+--+---", D), ("---++--", UP), ("---++---", D)],
)  # fmt: skip
def test_table(probes: str, health: Health) -> None:
    """Consecutive probes alone decide, `fail` of them down and `pass` of them up."""
    assert run(probes).health is health


def test_every_sequence_against_the_rule() -> None:
    """All sequences of nine probes: down after three ill ones in a row, up after two well ones (one, where unknown)."""
    for probes in itertools.product("+-", repeat=9):
        health, tail = U, ""
        for probe in probes:
            tail = tail + probe if tail.endswith(probe) else probe
            if tail.startswith("-") and len(tail) >= 3:
                health = D
            elif tail.startswith("+") and (len(tail) >= 2 or health is U):
                health = UP
        assert run("".join(probes)).health is health, "".join(probes)


def test_says_when_its_health_changes() -> None:
    """Once for each change, which is when those in the queue are woken."""
    found = backend()
    said = [found.probed(probe == "+", SETTINGS) for probe in "+----++"]
    assert said == [True, False, False, True, False, False, True]


def test_thresholds_of_a_reload_hold_from_the_next_probe() -> None:
    """The settings come with each probe."""
    found = run("--")
    found.probed(False, HealthSettings(fail=1, pass_=1))
    assert found.health is D
    found.probed(True, HealthSettings(fail=1, pass_=1))
    assert found.health is UP


def test_state_is_one_word() -> None:
    """Down outranks ejected, and ejected outranks up. That its breaker would let a trial through is seen by time alone."""
    found = run("+")
    assert found.state_at(0.0) == "up"
    for _ in range(5):
        found.breaker.failed(0.0)
    assert found.state_at(0.0) == found.state_at(9.9) == "ejected"
    assert found.state_at(10.0) == "trial"
    assert found.breaker.state is State.OPEN  # who looks changes nothing
    for _ in range(3):
        found.probed(False, SETTINGS)
    assert found.state_at(10.0) == found.standing == "down"
    assert not found.routable


def test_a_lease_comes_back_once() -> None:
    """The second time raises, and counts nothing."""
    found = backend()
    lease, other = found.lease(), found.lease()
    lease.release()
    with pytest.raises(AssertionError):
        lease.release()
    assert found.in_flight == 1
    other.release()
    assert found.in_flight == 0


def test_a_counter_below_zero_raises() -> None:
    """It is never clamped."""
    found = backend()
    lease = found.lease()
    found.in_flight = 0
    with pytest.raises(AssertionError):
        lease.release()


def test_full() -> None:
    """At its limit, and not below it; without a limit never."""
    limited, free = backend(max_in_flight=2), backend()
    held = [limited.lease(), free.lease()]
    assert not limited.full
    held.append(limited.lease())
    assert limited.full
    assert not free.full
    held[0].release()
    assert not limited.full


def test_random_leases() -> None:
    """The count is the number of leases that are out."""
    chance, found, out = random.Random(7), backend(), []
    for _ in range(2000):
        if out and chance.random() < 0.5:
            out.pop(chance.randrange(len(out))).release()
        else:
            out.append(found.lease())
        assert found.in_flight == len(out)
