"""Policies: every backend gets its share, whatever the order of the list and the length of requests."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest

from gateway.core.backend import Backend, HealthSettings, Lease
from gateway.core.balancing import POLICIES
from gateway.core.balancing.power_of_two import _sums, _two
from gateway.core.breaker import BreakerSettings
from gateway.core.load import EngineLoad
from gateway.core.pool import Pool

TURNS = ["least_loaded", "round_robin", "affinity"]  # whose equals take turns


def backends(*weights: float) -> list[Backend]:
    return [Backend(f"b{i}", f"http://b{i}", weight=weight) for i, weight in enumerate(weights)]


class Picks:
    """Picks of a pool, a second after each other."""

    def __init__(self, pool: Pool, seed: int = 1):
        self.pool, self.chance, self.now = pool, random.Random(seed), 0.0

    def pick(self, **options: Any) -> Lease:
        self.now += 1
        lease = self.pool.pick(self.now, chance=self.chance.random(), **options)
        assert lease
        if not options.get("tokens"):
            lease.prompt_read(self.now)  # answered at once: nobody is silent here
        return lease

    def short(self, count: int, **options: Any) -> list[str]:
        """Who takes so many requests, one after the other."""
        names = []
        for _ in range(count):
            lease = self.pick(**options)
            names.append(lease.backend.name)
            lease.release()
        return names


@pytest.mark.parametrize("balance", POLICIES)
@pytest.mark.parametrize("count", [2, 4, 20])
def test_short_sequential_requests_are_spread_evenly(balance: str, count: int) -> None:
    """100 short requests for each backend, one after the other: 100 each, or, where chance has a part in it, nearly."""
    shares = Counter(Picks(Pool(backends(*[1] * count), balance)).short(100 * count))
    margin = 20 if balance == "power_of_two" else 0
    assert len(shares) == count
    assert all(abs(share - 100) <= margin for share in shares.values()), shares


@pytest.mark.parametrize("balance", TURNS)
@pytest.mark.parametrize("count", [3, 20])
def test_no_backend_twice_in_a_row(balance: str, count: int) -> None:
    """Equal backends take turns: the same one comes again after all the others."""
    order = Picks(Pool(backends(*[1] * count), balance)).short(3 * count)
    assert order == order[:count] * 3
    assert len(set(order[:count])) == count


@pytest.mark.parametrize("balance", POLICIES)
def test_weights(balance: str) -> None:
    """While requests stay in flight, each backend holds its share by weight."""
    picks = Picks(Pool(backends(1, 2, 5), balance))
    for _ in range(800):
        picks.pick()
    found = [b.in_flight for b in picks.pool.backends]
    margin = 8 if balance == "power_of_two" else 0
    assert all(abs(held - share) <= margin for held, share in zip(found, [100, 200, 500], strict=True)), found


@pytest.mark.parametrize("weights", [(3, 1), (1, 2, 5), (100, 1, 1), (0.5, 0.25)])
@pytest.mark.parametrize("balance", POLICIES)
def test_weights_of_idle_backends(balance: str, weights: tuple[float, ...]) -> None:
    """Where nothing is in flight, nobody is less loaded, and shares go by weight all the same."""
    fleet = backends(*weights)
    counts = Counter(Picks(Pool(fleet, balance)).short(2000))
    for backend in fleet:
        assert abs(counts[backend.name] / 2000 - backend.weight / sum(weights)) < 0.05, counts


def test_least_loaded_of_a_large_uneven_fleet() -> None:
    """Each is looked at as often as any other, wherever the heavy ones stand."""
    fleet = backends(*[3, 1, 1, 1] * 6)
    counts = Counter(Picks(Pool(fleet, "least_loaded")).short(3600))
    assert all(counts[b.name] == 100 * b.weight for b in fleet), counts


@pytest.mark.parametrize("weights", [(1, 1, 1, 1), (2, 1, 1, 2)])
def test_a_second_try_is_a_turn(weights: tuple[int, ...]) -> None:
    """In turn: one of them fails all that it is given, and the others serve what they would without it, by their weights."""
    found, served = backends(*weights), Counter[str]()
    picks = Picks(Pool(found, "round_robin"))
    for _ in range(600):
        lease = picks.pick()
        lease.release()
        if lease.backend is found[0]:
            lease = picks.pick(tried=found[:1])
            lease.release()
        served[lease.backend.name] += 1
    share = 600 / sum(weights[1:])
    assert all(abs(served[one.name] - share * one.weight) <= 0.1 * share for one in found[1:]), served


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
        lease = pool.pick(turn / 1000)
        assert lease
        assert lease.backend.in_flight == fewest + 1
        out.append(lease)


@pytest.mark.parametrize("balance", POLICIES)
def test_a_backend_that_comes_back_is_not_flooded(balance: str) -> None:
    """Absent for a thousand turns, it then gets its share and not a thousand requests on end."""
    picks = Picks(Pool(backends(1, 1, 1), balance))
    absent, present = picks.pool.backends[0], picks.pool.backends[1:]
    picks.pool.apply(present, balance)
    picks.short(1000)
    picks.pool.apply([absent, *present], balance)
    assert max(Counter(picks.short(30)).values()) <= (17 if balance == "power_of_two" else 10)


@pytest.mark.parametrize("balance", POLICIES)
def test_memberships_that_follow_each_other_favour_nobody(balance: str) -> None:
    """A policy that is made anew goes on where the last one was: also where each lives for a single request."""
    picks = Picks(Pool(backends(1, 1, 1, 1), balance))
    shares = Counter[str]()
    for _ in range(200):
        picks.pool.apply(picks.pool.backends, balance)
        shares.update(picks.short(1))
    assert all(40 <= share <= 60 for share in shares.values()), shares


@pytest.mark.parametrize("balance", ["least_loaded", "power_of_two", "affinity"])
def test_a_backend_that_fails_at_once_draws_no_load_on_itself(balance: str) -> None:
    """The other three's exchanges stay in flight, ten each: by those alone it would be picked every time."""
    patient = BreakerSettings(failures=1000)
    fleet = [Backend(f"b{i}", f"http://b{i}", breaker=patient) for i in range(4)]
    picks, held, lost = Picks(Pool(fleet, balance)), list[Lease](), 0
    for _ in range(600):
        picks.now -= 0.9  # ten a second
        lease = picks.pick()
        if lease.backend is fleet[0]:
            lost += 1
            fleet[0].failed(picks.now)
            lease.release()
        else:
            held.append(lease)
            if len(held) > 30:
                held.pop(0).release()
    assert 3 <= lost <= 30
    fleet[0].penalty.value = 0.0
    picks.now += 100
    assert picks.pick().backend is fleet[0] or balance == "power_of_two"


def test_penalties_do_not_outlast_success() -> None:
    """Tried once more when it is due, and found well, it soon has its share again."""
    picks = Picks(Pool(backends(1, 1)))
    ill = picks.pool.backends[0]
    for _ in range(3):
        ill.failed(0.0)
    held = [picks.pick() for _ in range(7)]  # a second each
    assert [lease.backend.name for lease in held[:3]] == ["b1"] * 3
    assert "b0" in {lease.backend.name for lease in held}
    for _ in range(4):
        ill.answered(200, picks.now)
    for lease in held:
        lease.release()
    assert Counter(picks.short(10)) == {"b0": 5, "b1": 5}


class TestLeastLoaded:
    def test_tokens_count(self) -> None:
        """A prompt of 10,000 tokens is as ten requests more: short ones go elsewhere until it has been read."""
        picks = Picks(Pool(backends(1, 1)))
        long = picks.pick(tokens=10_000)
        assert [picks.pick().backend.name for _ in range(9)] == ["b1"] * 9
        long.prompt_read(0.0)
        assert [picks.pick().backend.name for _ in range(8)] == ["b0"] * 8

    def test_an_engines_own_figures_count(self) -> None:
        """Others' requests, those that wait, and a cache that is nearly full."""
        for said in (EngineLoad(9, 0), EngineLoad(0, 5)):
            picks = Picks(Pool(backends(1, 1)))
            picks.pool.backends[0].scraped(said)
            assert [picks.pick().backend.name for _ in range(9)] == ["b1"] * 9
        picks = Picks(Pool(backends(1, 1)))
        picks.pool.backends[0].scraped(EngineLoad(0, 0, 1.0))
        for _ in range(30):
            picks.pick()
        assert [b.in_flight for b in picks.pool.backends] == [10, 20]

    def test_what_was_sent_since_the_last_scrape_counts(self) -> None:
        """Nobody is sent everything because of a figure that is a second old."""
        picks = Picks(Pool(backends(1, 1, 1, 1)))
        for backend, running in zip(picks.pool.backends, (0, 6, 6, 6), strict=True):
            backend.scraped(EngineLoad(running, 0))
        names = Counter(picks.pick().backend.name for _ in range(14))
        assert names == {"b0": 8, "b1": 2, "b2": 2, "b3": 2}

    @pytest.mark.parametrize("count", [9, 64, 200])
    def test_of_many_some_are_looked_at(self, count: int) -> None:
        """Random arrivals and ends: no backend ever has much more than the mean, and none is forgotten."""
        chance, pool, out = random.Random(3), Pool(backends(*[1] * count)), list[Lease]()
        for turn in range(count * 60):
            if len(out) >= count * 6:
                out.pop(chance.randrange(len(out))).release()
            lease = pool.pick(turn / 1000)
            assert lease
            out.append(lease)
            if turn > count * 30:
                assert lease.backend.in_flight <= 8
        assert min(b.in_flight for b in pool.backends) >= 3

    def test_whoever_is_left_of_many_is_found(self) -> None:
        """With all but two of 64 down, those two share evenly, wherever they stand."""
        picks = Picks(Pool(backends(*[1] * 64)))
        for place, backend in enumerate(picks.pool.backends):
            if place not in (3, 5):
                backend.probed(False, HealthSettings(fail=1))
        held = Counter(picks.pick().backend.name for _ in range(100))
        assert held == {"b3": 50, "b5": 50}


class TestPowerOfTwo:
    @pytest.mark.parametrize("count", [2, 3, 8, 64])
    def test_any_two_are_drawn(self, count: int) -> None:
        """Each pair about as often as any other, and always two different ones."""
        fleet, chance = backends(*[1] * count), random.Random(5)
        sums = _sums(fleet)
        rounds = 40 * count * (count - 1)
        drawn = Counter(tuple(b.name for b in _two(fleet, sums, chance.random())) for _ in range(rounds))
        assert all(one != other for one, other in drawn)
        assert len(drawn) == count * (count - 1)
        assert max(drawn.values()) < 90

    @pytest.mark.parametrize("weights", [(1, 1), (1, 2, 5), (65535, 1, 1), (0.1,) * 7])
    def test_numbers_at_the_edges(self, weights: tuple[float, ...]) -> None:
        """Whatever chance says, also where rounding puts it beside a share."""
        fleet = backends(*weights)
        sums, edge = _sums(fleet), 1 - 2**-53
        shares = [0.0] + [sum_ / sums[-1] for sum_ in sums]
        for chance in [edge, *(min(max(share + d, 0.0), edge) for share in shares for d in (-1e-16, 0, 1e-16, 1e-9, -1e-9))]:
            one, other = _two(fleet, sums, chance)
            assert one is not other

    def test_the_less_loaded_of_the_two(self) -> None:
        """The fullest of the fleet is never picked."""
        picks = Picks(Pool(backends(*[1] * 6), "power_of_two"))
        held = [picks.pool.backends[2].lease() for _ in range(3)]
        assert held
        assert "b2" not in picks.short(200)

    def test_those_that_are_left(self) -> None:
        """Of six, two can be picked: both are, and evenly; then one; then none."""
        picks = Picks(Pool(backends(*[1] * 6), "power_of_two"))
        down = HealthSettings(fail=1)
        for place in (0, 1, 3, 4):
            picks.pool.backends[place].probed(False, down)
        assert abs(Counter(picks.short(200))["b2"] - 100) <= 2
        picks.pool.backends[2].probed(False, down)
        assert set(picks.short(20)) == {"b5"}
        picks.pool.backends[5].probed(False, down)
        assert picks.pool.pick(0.0) is None


KEYS = [place / 4000 for place in range(4000)]


class TestAffinity:
    @staticmethod
    def homes(pool: Pool, keys: list[float]) -> list[str]:
        """Where each key goes while nothing is in flight."""
        picks = Picks(pool)
        return [picks.short(1, key=key)[0] for key in keys]

    def test_a_key_stays(self) -> None:
        """Time after time the same backend, and each backend has its share of the keys."""
        pool = Pool(backends(1, 1, 1, 1), "affinity")
        homes = self.homes(pool, KEYS)
        assert homes == self.homes(pool, KEYS)
        assert all(0.75 < share / 1000 < 1.25 for share in Counter(homes).values()), Counter(homes)

    def test_every_gateway_finds_the_same(self) -> None:
        """It goes by the backends' names: not by their order, not by the process, not by what else was there before."""
        straight = Pool(backends(1, 1, 1, 1), "affinity")
        other = Pool(backends(1, 1, 1, 1, 1, 1)[::-1], "affinity")
        other.apply(other.backends[2:], "affinity")
        assert self.homes(straight, KEYS) == self.homes(other, KEYS)
        homes = self.homes(straight, [0.1, 0.3, 0.5, 0.7, 0.9])
        assert homes == ["b1", "b0", "b3", "b0", "b0"]  # as of the first version

    def test_a_new_backend_takes_keys_and_moves_none(self) -> None:
        """About its share of them come to it; all others stay where they were; when it goes, all is as before."""
        fleet = backends(1, 1, 1, 1, 1)
        pool = Pool(fleet[:4], "affinity")
        before = self.homes(pool, KEYS)
        pool.apply(fleet, "affinity")
        after = self.homes(pool, KEYS)
        moved = [new for old, new in zip(before, after, strict=True) if old != new]
        assert set(moved) == {"b4"}
        assert 0.15 < len(moved) / 4000 < 0.25
        pool.apply(fleet[:4], "affinity")
        assert self.homes(pool, KEYS) == before

    def test_weights_share_the_keys(self) -> None:
        shares = Counter(self.homes(Pool(backends(1, 2, 5), "affinity"), KEYS))
        for name, weight in (("b0", 1), ("b1", 2), ("b2", 5)):
            assert 0.7 < shares[name] / (500 * weight) < 1.3, shares

    def test_one_that_is_down_lends_its_keys(self) -> None:
        """They spread over the others, and come home with it."""
        pool = Pool(backends(1, 1, 1, 1), "affinity")
        before = self.homes(pool, KEYS)
        pool.backends[1].probed(False, HealthSettings(fail=1))
        during = self.homes(pool, KEYS)
        assert all(new == old for old, new in zip(before, during, strict=True) if old != "b1")
        lent = Counter(new for old, new in zip(before, during, strict=True) if old == "b1")
        assert set(lent) == {"b0", "b2", "b3"}
        pool.backends[1].probed(True, HealthSettings(pass_=1))
        assert self.homes(pool, KEYS) == before

    @pytest.mark.parametrize("factor", [1.0, 1.25, 2.0])
    @pytest.mark.parametrize("weights", [(1, 1, 1, 1), (1, 2, 5)])
    def test_no_backend_is_too_full(self, factor: float, weights: tuple[int, ...]) -> None:
        """All requests have one key: none ever holds more than the factor times its share, and the key's own holds that."""
        picks = Picks(Pool(backends(*weights), "affinity", factor))
        (home,) = set(self.homes(picks.pool, [0.4] * 10))
        for count in range(1, 200):
            picks.pick(key=0.4)
            for backend in picks.pool.backends:
                assert backend.in_flight <= max(4, math.ceil(factor * count * backend.weight / sum(weights)))
        (at_home,) = [b for b in picks.pool.backends if b.name == home]
        assert at_home.in_flight >= math.floor(min(factor * at_home.weight / sum(weights), 1) * 199)

    def test_what_is_too_much_goes_to_the_next_always_the_same(self) -> None:
        """It has the prefix soon as well."""
        picks = Picks(Pool(backends(1, 1, 1, 1), "affinity"))
        elsewhere = [b.lease() for b in picks.pool.backends for _ in range(20)]
        assert elsewhere
        names = [picks.pick(key=0.4).backend.name for _ in range(12)]
        assert names[:5] == [names[0]] * 5
        assert len(set(names)) == 2

    def test_what_has_no_key_goes_to_the_least_loaded(self) -> None:
        picks = Picks(Pool(backends(1, 1, 1), "affinity"))
        held = [picks.pool.backends[0].lease(), picks.pool.backends[2].lease()]
        assert held
        assert picks.pick().backend.name == "b1"

    def test_second_attempts_go_on_along_the_ring(self) -> None:
        picks = Picks(Pool(backends(1, 1, 1), "affinity"))
        tried: list[Backend] = []
        for _ in range(3):
            tried.append(picks.pick(key=0.4, tried=tried).backend)
        assert len(set(tried)) == 3
        assert picks.pool.pick(0.0, tried, key=0.4) is None

    def test_a_large_fleet_is_bounded_too(self) -> None:
        """The mean is not counted anew for each pick there: no backend holds more than the factor and one allow."""
        picks, chance, held = Picks(Pool(backends(*[1] * 64), "affinity")), random.Random(2), list[Lease]()
        hot = [chance.random() for _ in range(40)]
        for _ in range(4000):
            held.append(picks.pick(key=chance.choice(hot)))
            if len(held) > 640:
                held.pop(chance.randrange(len(held))).release()
        assert max(b.in_flight for b in picks.pool.backends) <= 1.25 * 641 / 64 + 1
