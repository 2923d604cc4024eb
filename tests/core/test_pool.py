"""A pool: who may be picked, over every combination of what a backend can be, and what the queue may promise of it."""

from __future__ import annotations

import functools
import itertools
import random

import pytest

from gateway.core.backend import Backend, Health, HealthSettings, Lease
from gateway.core.balancing import POLICIES
from gateway.core.breaker import BreakerSettings, State
from gateway.core.pool import Pool

NOW = 50.0
HEALTH = HealthSettings(fail=1, pass_=1)


def made(name: str, kind: str) -> Backend:
    """`kind`: any of down, open, full in one word."""
    backend = Backend(name, f"http://{name}", max_in_flight=1, breaker=BreakerSettings(failures=1, open=10.0))
    if "down" in kind:
        backend.probed(False, HEALTH)
    if "full" in kind:
        backend.lease(now=NOW)
    if "open" in kind:
        backend.breaker.failed(NOW)
    return backend


KINDS = ["well", "down", "open", "full", "open full", "down open"]
PAIRS = list(itertools.product(KINDS, repeat=2))


@pytest.mark.parametrize("kinds", PAIRS, ids=lambda kinds: " + ".join(kinds))
def test_pick_table(kinds: tuple[str, str]) -> None:
    """A well one with room first; one that is full is waited for; an ejected one rather than none; never a full one, never one
    that is down."""
    pool = Pool([made(f"b{i}", kind) for i, kind in enumerate(kinds)])
    lease = pool.pick(NOW)
    usable = [k for k in kinds if "down" not in k and "full" not in k]
    if "full" in kinds:
        usable = [k for k in usable if k == "well"]
    if not usable or lease is None:
        assert lease is None
        assert not (pool.has_room(lambda: NOW) and pool.routable)
        return
    chosen = kinds[int(lease.backend.name[1])]
    assert chosen == ("well" if "well" in usable else "open")


@pytest.mark.parametrize("kinds", PAIRS, ids=lambda kinds: " + ".join(kinds))
def test_what_has_room_can_be_picked(kinds: tuple[str, str]) -> None:
    """The queue lets in whom the pool has room for: the pool then has a backend, or says that none is reachable."""
    pool = Pool([made(f"b{i}", kind) for i, kind in enumerate(kinds)])
    if pool.has_room(lambda: NOW) and pool.routable:
        assert pool.pick(NOW) is not None


@pytest.mark.parametrize("kinds", PAIRS, ids=lambda kinds: " + ".join(kinds))
def test_why_nobody(kinds: tuple[str, str]) -> None:
    """no_backend where none is routable, overloaded where all are full; each says when to come again."""
    pool = Pool([made(f"b{i}", kind) for i, kind in enumerate(kinds)])
    if pool.pick(NOW) is None:
        refusal = pool.nobody()
        assert refusal.code == ("overloaded" if pool.routable else "no_backend")
        assert refusal.ruling.status == 503
        assert refusal.retry_after


DOUBTS = ["busy", "silent", "unproven", "ejected"]


def in_doubt(kind: str, limit: int | None = 9) -> Backend:
    backend = Backend("doubtful", "http://doubtful", max_in_flight=limit, breaker=BreakerSettings(failures=1, open=10.0))
    if kind == "busy":
        backend.caution.busy(5, NOW)
    elif kind == "silent":
        backend.lease(0, NOW - 100, stream=True)
    elif kind == "unproven":
        backend.probed(False, HealthSettings())
    elif kind == "ejected":
        backend.failed(NOW)
    elif kind == "warming":
        backend.caution.returned(NOW)
    return backend


@pytest.mark.parametrize("tries", [0, 1])
@pytest.mark.parametrize("limit", [None, 9])
@pytest.mark.parametrize("kind", DOUBTS)
def test_a_doubtful_one_is_no_better_than_waiting(kind: str, limit: int | None, tries: int) -> None:
    """Where a fit one is only full, nobody is sent to one that is ejected, rests, is silent or not proven, nor tries again
    there; where the fit one has gone, they are; and when the doubt is over, there is room."""
    doubtful, full = in_doubt(kind, limit), made("full", "full")
    pool = Pool([doubtful, full, made("tried", "well")][: 2 + tries])
    tried = pool.backends[2:]
    assert pool.pick(NOW, tried) is None
    assert pool.held_up(tried, NOW)
    if not tries:
        assert not pool.has_room(lambda: NOW)
        full.probed(False, HEALTH)
        assert pool.has_room(lambda: NOW)
        assert pool.pick(NOW).backend is doubtful  # type: ignore[union-attr]


def test_room_comes_with_time() -> None:
    """A breaker half opens, a rest is over."""
    for kind, seconds in (("ejected", 10), ("busy", 5)):
        pool = Pool([in_doubt(kind), made("full", "full")])
        assert not pool.has_room(lambda: NOW + seconds - 0.1)  # noqa: B023
        assert pool.has_room(lambda: NOW + seconds)  # noqa: B023
        assert pool.pick(NOW + seconds)


def test_one_that_is_warming_is_not_waited_with() -> None:
    """Its share is spent, the others are full: it is asked all the same."""
    pool = Pool([in_doubt("warming"), made("full", "full"), in_doubt("silent")])
    for _ in range(5):
        assert pool.has_room(lambda: NOW)
        assert pool.pick(NOW).backend is pool.backends[0]  # type: ignore[union-attr]


def test_the_last_backend_is_never_ejected() -> None:
    """With every breaker open, requests still go somewhere, and to all of them."""
    pool = Pool([made("a", "open"), made("b", "open")])
    names = set()
    for _ in range(4):
        lease = pool.pick(NOW)
        assert lease
        names.add(lease.backend.name)
        lease.release()
    assert names == {"a", "b"}


def test_a_second_attempt_obeys_breakers_and_avoids_what_was_tried() -> None:
    """What failed a moment ago is not asked again, nor is a doubtful backend asked in its stead."""
    first, second = made("a", "well"), made("b", "open")
    pool = Pool([first, second])
    assert pool.pick(NOW, [first]) is None
    assert pool.pick(NOW, [second]).backend is first  # type: ignore[union-attr]


def test_one_trial_of_a_half_open_backend() -> None:
    """When its time has come, one request goes there, and the others go elsewhere until that one has ended."""
    pool = Pool([made("a", "open"), Backend("b", "http://b")])
    later = NOW + 10
    picked = [pool.pick(later) for _ in range(6)]
    assert sum(lease.backend.name == "a" for lease in picked if lease) == 1
    assert pool.backends[0].breaker.state is State.HALF_OPEN


def test_asking_of_room_is_no_trial() -> None:
    """Looking at the pool, as the queue, readyz and a scrape do, does not use up the trial."""
    pool = Pool([made("a", "open")])
    for _ in range(3):
        assert pool.routable
        assert pool.has_room(lambda: NOW)
    lease = pool.pick(NOW + 10)
    assert lease
    assert pool.backends[0].breaker.state is State.HALF_OPEN


def test_a_backend_not_probed_yet_is_routable() -> None:
    """A gateway that has just started serves at once."""
    pool = Pool([Backend("a", "http://a")])
    assert pool.backends[0].health is Health.UNKNOWN
    assert pool.pick(NOW)


def test_an_empty_pool() -> None:
    """Nothing to pick, and waiting would be in vain."""
    pool = Pool([])
    assert pool.pick(NOW) is None
    assert pool.has_room(lambda: NOW)
    assert pool.nobody().code == "no_backend"


def test_leases_outlive_membership() -> None:
    """A stream on a backend that a reload takes away gives its lease back to it all the same."""
    backend = Backend("a", "http://a")
    pool = Pool([backend])
    lease = pool.pick(NOW)
    assert lease
    pool.apply([Backend("b", "http://b")], "round_robin")
    lease.release()
    assert backend.in_flight == 0


@pytest.mark.parametrize("balance", POLICIES)
@pytest.mark.parametrize("seed", range(5))
def test_random_operations(balance: str, seed: int) -> None:
    """Picks, ends, failures, probes and time: no limit passed, nothing down picked, some backend while one is fit."""
    chance = random.Random(seed)
    pool = Pool(
        [Backend(f"b{i}", f"http://b{i}", max_in_flight=3, breaker=BreakerSettings(2, 5.0, 2.0)) for i in range(3)],
        balance,
    )
    out: list[Lease] = []
    now = 0.0
    for _ in range(600):
        now += chance.random() / 4
        step = chance.random()
        if step < 0.45:
            fit = [b for b in pool.backends if b.routable and not b.full]
            promised = pool.has_room(functools.partial(float, now)) and pool.routable
            lease = pool.pick(now, key=chance.choice([None, chance.random()]), chance=chance.random())
            assert bool(lease) == promised, f"fit: {fit}"
            if lease:
                assert lease.backend in fit
                out.append(lease)
        elif step < 0.85 and out:
            lease = out.pop(chance.randrange(len(out)))
            backend = lease.backend
            well, refused = (functools.partial(backend.answered, status, now) for status in (200, 503))
            failed, over = functools.partial(backend.failed, now), functools.partial(backend.breaker.over, 1)
            chance.choice([well, refused, failed, over])()
            lease.release()
        else:
            chance.choice(pool.backends).probed(chance.random() < 0.6, HealthSettings(2, 2))
        for backend in pool.backends:
            assert 0 <= backend.in_flight <= 3
            assert backend.in_flight == sum(lease.backend is backend for lease in out)


# health.panic -------------------------------------------------------------------------------------------------------------

PANIC = HealthSettings(fail=1, pass_=1, panic=True)
DOUBTED = ["well", "down", "spared", "spared full", "spared open", "spared drained", "spared asleep"]


def doubted(name: str, kind: str) -> Backend:
    backend = made(name, kind)
    if "spared" in kind:
        backend.probed(False, PANIC, connected=True)
    elif kind == "down":
        backend.probed(False, PANIC, connected=False)
    backend.draining, backend.asleep = "drained" in kind, "asleep" in kind
    return backend


@pytest.mark.parametrize("kinds", list(itertools.product(DOUBTED, repeat=2)), ids=lambda kinds: " + ".join(kinds))
def test_a_last_resort_is_for_when_nobody_is_in_service(kinds: tuple[str, str]) -> None:
    """Down, but it takes connections: asked where no other can be, and has room; a second time only where no breaker keeps it
    out. What the pool says of its room, and of its lack, holds for it, too."""
    pool = Pool([doubted(f"b{i}", kind) for i, kind in enumerate(kinds)])
    asked = [k for k in kinds if k == "well"] or [k for k in kinds if k in ("spared", "spared full", "spared open")]
    assert [b.name for b in pool.asked] == [f"b{i}" for i, k in enumerate(kinds) if k in asked]
    assert pool.routable is ("well" in kinds)
    free = [k for k in asked if "full" not in k]
    assert pool.has_room(lambda: NOW) is (bool(free) or not asked)
    lease = pool.pick(NOW)
    assert (lease is not None) is bool(free)
    if lease is None:
        assert pool.nobody().code == ("overloaded" if asked else "no_backend")
        return
    assert kinds[int(lease.backend.name[1])] in free
    others = [k for i, k in enumerate(kinds) if f"b{i}" != lease.backend.name and k in asked]
    second = pool.pick(NOW, [lease.backend])
    assert (second is not None) is any(k in ("well", "spared") for k in others)


def test_a_last_resort_is_none_any_more() -> None:
    """Once it is well, or takes no connection, or the operator takes back his word; and each of that is a change."""
    backend = Backend("a", "http://a")
    assert backend.probed(False, PANIC, connected=True)
    assert backend.last_resort
    assert not backend.probed(False, PANIC, connected=True)
    for settings, well, connected in ((PANIC, True, True), (PANIC, False, False), (HEALTH, False, True)):
        backend.probed(False, PANIC, connected=True)
        assert backend.last_resort
        assert backend.probed(well, settings, connected=connected)
        assert not backend.last_resort
