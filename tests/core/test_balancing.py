"""Policies: every backend gets its share, whatever the order of the list and the length of requests."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from gateway.core.backend import Backend
from gateway.core.balancing import POLICIES
from gateway.core.breaker import BreakerSettings
from gateway.core.pool import Pool


def backends(*weights: float) -> list[Backend]:
    return [Backend(f"b{i}", f"http://b{i}", weight=weight) for i, weight in enumerate(weights)]


@pytest.mark.parametrize("balance", POLICIES)
def test_short_sequential_requests_are_spread_evenly(balance: str) -> None:
    """400 short requests, one after the other, on 4 backends: 100 each."""
    pool, count = Pool(backends(1, 1, 1, 1), balance), Counter[str]()
    for turn in range(400):
        lease = pool.pick(float(turn))
        assert lease
        count[lease.backend.name] += 1
        lease.release()
    assert set(count.values()) == {100}


@pytest.mark.parametrize("balance", POLICIES)
def test_no_backend_twice_in_a_row(balance: str) -> None:
    """Equal backends take turns: the same one comes again after all the others."""
    pool, order = Pool(backends(1, 1, 1), balance), list[str]()
    for turn in range(9):
        lease = pool.pick(float(turn))
        assert lease
        order.append(lease.backend.name)
        lease.release()
    assert order == order[:3] * 3
    assert len(set(order[:3])) == 3


@pytest.mark.parametrize("balance", POLICIES)
def test_weights(balance: str) -> None:
    """While requests stay in flight, each backend holds its share by weight."""
    pool = Pool(backends(1, 2, 5), balance)
    for turn in range(800):
        assert pool.pick(float(turn))
    assert [b.in_flight for b in pool.backends] == [100, 200, 500]


def test_round_robin_by_weight_is_evenly_spread() -> None:
    """nginx's order for weights 5, 1, 1: the heavy one is never picked seven times on end."""
    pool = Pool(backends(5, 1, 1), "round_robin")
    order = "".join(pool.pick(0.0).backend.name[1] for _ in range(7))  # type: ignore[union-attr]
    assert order == "0010200"


def test_least_loaded_takes_the_least_loaded() -> None:
    """With leases out on all the others, the free one is picked, and the others once they are free."""
    pool = Pool(backends(1, 1, 1))
    held = [b.lease() for b in pool.backends[:2] for _ in range(2)]
    assert [pool.pick(0.0).backend.name for _ in range(2)] == ["b2", "b2"]  # type: ignore[union-attr]
    for lease in held:
        lease.release()
    assert {pool.pick(0.0).backend.name for _ in range(4)} == {"b0", "b1"}  # type: ignore[union-attr]


def test_least_loaded_is_never_uneven_by_more_than_one() -> None:
    """Random arrivals and ends: at each pick the chosen one had the fewest in flight."""
    chance, pool, out = random.Random(3), Pool(backends(1, 1, 1, 1)), []
    for turn in range(3000):
        if out and chance.random() < 0.48:
            out.pop(chance.randrange(len(out))).release()
            continue
        fewest = min(b.in_flight for b in pool.backends)
        lease = pool.pick(float(turn))
        assert lease
        assert lease.backend.in_flight == fewest + 1
        out.append(lease)


@pytest.mark.parametrize("balance", POLICIES)
def test_a_backend_that_comes_back_is_not_flooded(balance: str) -> None:
    """Absent for a thousand turns, it then gets its share and not a thousand requests on end."""
    pool = Pool(backends(1, 1, 1), balance)
    absent, present = pool.backends[0], pool.backends[1:]
    pool.apply(present, balance)
    for turn in range(1000):
        lease = pool.pick(float(turn))
        assert lease
        lease.release()
    pool.apply([absent, *present], balance)
    count = Counter[str]()
    for turn in range(30):
        lease = pool.pick(float(turn))
        assert lease
        count[lease.backend.name] += 1
        lease.release()
    assert max(count.values()) <= 12


def test_a_backend_that_fails_at_once_draws_no_load_on_itself() -> None:
    """The other one's exchanges stay in flight: by those alone the failing one would be picked nearly every time."""
    patient = BreakerSettings(failures=100)
    good, bad = (Backend(name, f"http://{name}", breaker=patient) for name in ("good", "bad"))
    pool, picked = Pool([good, bad]), Counter[str]()
    for turn in range(12):
        lease = pool.pick(0.001 * turn)
        assert lease
        picked[lease.backend.name] += 1
        if lease.backend is bad:
            bad.breaker.failed(0.001 * turn)
            lease.release()
    assert picked == {"good": 6, "bad": 6}
    bad.breaker.succeeded()
    assert bad.breaker.doubt == 0


def test_a_failure_is_forgotten_after_the_window() -> None:
    good, bad = backends(1, 1)
    pool = Pool([good, bad])
    bad.breaker.failed(0.0)
    for now, expected in ((1.0, {good.name: 4}), (31.0, {good.name: 2, bad.name: 2})):
        picked = Counter[str]()
        for _ in range(4):
            lease = pool.pick(now)
            assert lease
            picked[lease.backend.name] += 1
            lease.release()
        assert picked == expected
