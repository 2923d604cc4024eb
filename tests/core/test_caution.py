"""Less for a backend that has come back, is full, or says nothing; and never so much less that nobody is asked."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from gateway.core.backend import Backend, HealthSettings, Lease
from gateway.core.balancing import POLICIES
from gateway.core.breaker import BreakerSettings
from gateway.core.caution import BUSY_MOST, LEAST, TRIAL, CautionSettings
from gateway.core.pool import Pool
from gateway.core.retry import PAUSE, PAUSE_MOST, pause

ONCE = HealthSettings(fail=1, pass_=1)


def backends(count: int, **settings: object) -> list[Backend]:
    caution = CautionSettings(**settings)  # type: ignore[arg-type]
    return [Backend(f"b{i}", f"http://b{i}", caution=caution, breaker=BreakerSettings(1, 30, 5)) for i in range(count)]


def take(pool: Pool, now: float, **options: object) -> Lease:
    lease = pool.pick(now, chance=(now * 7.3) % 1, key=(now * 3.7) % 1, **options)  # type: ignore[arg-type]
    assert lease is not None
    return lease


def short(pool: Pool, begin: float, seconds: float, each: float = 0.01) -> Counter[str]:
    """Who takes requests that come each `each` seconds, and are answered at once."""
    found: Counter[str] = Counter()
    for number in range(round(seconds / each)):
        lease = take(pool, begin + number * each)
        found[lease.backend.name] += 1
        lease.prompt_read(begin + number * each)
        lease.release()
    return found


def back(backend: Backend, how: str, now: float) -> None:
    """It was away, and returns at `now`."""
    if how == "health":
        backend.probed(False, ONCE, now - 1)
        backend.probed(True, ONCE, now)
    elif how == "breaker":
        backend.failed(now - 6)
        assert backend.breaker.allows(now)
        backend.answered(200, now)
    elif how == "sleep":
        backend.fell_asleep(True, now - 1)
        backend.fell_asleep(False, now)
    else:
        backend.caution.doubted()
        backend.probed(True, ONCE, now)


@pytest.mark.parametrize("balance", POLICIES)
@pytest.mark.parametrize("how", ["health", "breaker", "sleep", "new"])
def test_slow_start(balance: str, how: str) -> None:
    """Of four, one comes back: about a tenth of its share at first, all of it in the end, and never a burst."""
    pool = Pool(backends(4, slow_start=10.0), balance)
    back(pool.backends[0], how, 100.0)
    assert pool.backends[0].state_at(100.0) == "warming"
    shares = [short(pool, 100.0 + 2 * step, 2.0)["b0"] for step in range(7)]  # of 200 each: 50 when all is as ever
    assert shares[0] <= 15
    assert all(one <= other + 12 for one, other in itertools.pairwise(shares)), shares
    assert sum(shares[:5]) <= 0.7 * 250 + 10
    margin = 20 if balance in ("power_of_two", "affinity") else 2
    assert abs(shares[-1] - 50) <= margin, shares
    assert pool.backends[0].state_at(120.0) in ("up", "unknown")


def test_those_that_come_back_together_share_alike() -> None:
    """Nobody is spared, and the one that stayed is not given all of it: it has ten times their weight at first."""
    pool = Pool(backends(4, slow_start=10.0), "round_robin")
    for backend in pool.backends[1:]:
        back(backend, "health", 100.0)
    found = short(pool, 100.0, 0.9)
    assert min(found.values()) >= 4
    assert found["b0"] >= 60


@pytest.mark.parametrize("balance", POLICIES)
def test_alone_it_takes_all(balance: str) -> None:
    """One backend, or one that is left, is given everything, whatever there is against it."""
    for count in (1, 2):
        pool = Pool(backends(count), balance)
        for backend in pool.backends[1:]:
            backend.probed(False, ONCE, 99.0)
        back(pool.backends[0], "health", 100.0)
        pool.backends[0].caution.busy(20, 100.0)
        assert short(pool, 100.0, 1.0) == {"b0": 100}


def test_off() -> None:
    """`slow_start: 0`: its share at once."""
    pool = Pool(backends(2, slow_start=0.0), "round_robin")
    back(pool.backends[0], "health", 100.0)
    assert short(pool, 100.0, 1.0) == {"b0": 50, "b1": 50}


def test_share_is_a_function_of_time() -> None:
    found = backends(1, slow_start=10.0)[0].caution
    assert found.share(0.0) == 1.0
    found.returned(100.0)
    assert [found.share(100.0 + t) for t in (0, 0.5, 1, 5, 9, 10, 11)] == [LEAST, LEAST, LEAST, 0.5, 0.9, 1.0, 1.0]


@pytest.mark.parametrize("balance", POLICIES)
def test_busy(balance: str) -> None:
    """For its time it gets nothing, and no second attempt; then everything is as before."""
    pool = Pool(backends(2), balance)
    pool.backends[0].caution.busy(500, 100.0)
    assert short(pool, 100.0, BUSY_MOST - 1, 0.1)["b0"] == 0
    assert pool.pick(101.0, [pool.backends[1]]) is None
    assert short(pool, 100.0 + BUSY_MOST, 2.0)["b0"] > 0
    assert pool.pick(140.0, [pool.backends[1]]) is not None


@pytest.mark.parametrize("balance", POLICIES)
def test_silent(balance: str) -> None:
    """One accepts and never answers: it is given what came before that is known, then one request in `TRIAL` seconds at
    most; with its first answer it is back at once."""
    pool = Pool(backends(4, silence=5.0), balance)
    frozen, stuck = pool.backends[0], list[Lease]()
    for number in range(6000):  # a hundred a second
        now = 100.0 + number / 100
        lease = take(pool, now, stream=True)
        if lease.backend is frozen:
            stuck.append(lease)
        else:
            lease.prompt_read(now)
            lease.release()
        if number == 1000:
            known = len(stuck)
    assert len(stuck) == known <= 220
    assert frozen.state_at(160.0) == "silent"
    assert frozen.routable
    for lease in stuck[1:]:  # their clients leave
        lease.release()
    stuck[0].prompt_read(160.0)
    stuck[0].release()
    assert frozen.state_at(160.0) == "unknown"
    assert short(pool, 160.0, 2.0)["b0"] >= 20


def test_silent_and_nobody_waits() -> None:
    """Clients that give up are no answer: one request in `TRIAL` seconds is sent, to see."""
    pool = Pool(backends(2, silence=5.0), "round_robin")
    tries = 0
    for number in range(12_000):
        now = 100.0 + number / 100
        lease = take(pool, now, stream=True)
        if lease.backend is pool.backends[1]:
            lease.prompt_read(now)
        elif pool.backends[0].caution.streams.silent:
            tries += 1
        else:
            held = lease
            continue
        lease.release()
        if number == 600:
            while pool.backends[0].in_flight > 1:
                pool.backends[0].in_flight -= 1  # what became of them does not matter here
                pool.backends[0].caution.streams.waiting -= 1
            held.release()
    assert 5 <= tries <= 120 / TRIAL


def test_what_is_usual_is_not_silence() -> None:
    """Where first events take 4 s, 5 s are nothing; and whole answers are waited for longer."""
    (found,) = backends(1, silence=5.0)
    for number in range(10):
        lease = found.lease(0, number * 10.0, True)
        lease.prompt_read(number * 10.0 + 4)
        lease.release()
    waits = found.lease(0, 200.0, True)
    assert found.caution.reason(215.0) is None
    assert found.caution.reason(217.0) == "silent"
    waits.release()
    (other,) = backends(1, silence=5.0)
    other.lease(0, 200.0, False)
    assert other.caution.reason(229.0) is None
    assert other.caution.reason(231.0) == "silent"


def test_whoever_is_answered_speaks_for_all() -> None:
    """One that was silent for whole answers, of which none are asked for any more, is back with the first stream."""
    (found,) = backends(1, silence=5.0, slow_start=0.0)
    found.lease(0, 200.0, False).release()
    waits = found.lease(0, 200.0, False)
    assert found.state_at(231.0) == "silent"
    waits.release()
    assert found.state_at(232.0) == "silent"
    lease = found.lease(0, 232.0, True)
    lease.prompt_read(233.0)
    lease.release()
    assert found.state_at(233.0) == "unknown"


def test_one_that_is_never_answered_speaks_for_nobody() -> None:
    """It was sent before the last answer: whoever comes after it, however seldom, is what counts."""
    pool = Pool(backends(2, silence=5.0), "round_robin")
    lost = take(pool, 100.0, stream=True)
    found = short(pool, 100.1, 0.2, 0.1)
    for number in range(1, 20):  # more than `silence` apart
        now = 100.0 + 8 * number
        lease = take(pool, now - 0.1, stream=True)
        lease.prompt_read(now)
        lease.release()
        found[lease.backend.name] += 1
        assert lost.backend.state_at(now + 7) == "unknown"
    assert abs(found["b0"] - found["b1"]) <= 1, found
    waits = lost.backend.lease(0, 300.0, True)
    assert lost.backend.state_at(304.0) == "unknown"
    assert lost.backend.state_at(305.0) == "silent"
    waits.release()
    assert lost.backend.state_at(306.0) == "silent"


@pytest.mark.parametrize("how", ["health", "sleep"])
def test_those_who_wait_since_before_it_was_away(how: str) -> None:
    """As where its line was cut: it is back, though their requests never came there, nor ever will."""
    pool = Pool(backends(2, silence=5.0, slow_start=0.0), "round_robin")
    frozen = pool.backends[0]
    waits = [frozen.lease(0, 100.0, True), frozen.lease(0, 100.0, False)]
    assert frozen.state_at(110.0) == "silent"
    assert short(pool, 110.0, 1.0)["b0"] == 0
    back(frozen, how, 120.0)
    assert short(pool, 120.0, 1.0)["b0"] == 50
    assert short(pool, 140.0, 1.0)["b0"] == 50
    assert frozen.in_flight == len(waits)


def test_all_are_silent() -> None:
    """Then all are asked as ever."""
    pool = Pool(backends(2, silence=1.0, slow_start=0.0), "round_robin")
    held = [take(pool, 100.0, stream=True) for _ in range(2)]
    more = [take(pool, 110.0, stream=True).backend.name for _ in range(4)]
    assert Counter(more) == {"b0": 2, "b1": 2}
    assert len(held) == 2


def test_unproven() -> None:
    """Unknown, and its first probe was ill: whoever is known to be well is asked."""
    pool = Pool(backends(2), "round_robin")
    pool.backends[0].probed(False, HealthSettings(fail=3), 1.0)
    assert short(pool, 2.0, 1.0) == {"b1": 100}
    pool.backends[0].probed(True, HealthSettings(fail=3), 3.0)
    assert short(pool, 100.0, 1.0) == {"b0": 50, "b1": 50}


@pytest.mark.parametrize("balance", [b for b in POLICIES if b != "affinity"])
def test_400_short_requests_on_four(balance: str) -> None:
    """A quarter each, within five points."""
    found = short(Pool(backends(4), balance), 0.0, 400, 1.0)
    assert all(80 <= found[f"b{i}"] <= 120 for i in range(4)), found


def test_pause() -> None:
    """At once where a connection was refused; else by chance, and longer each time."""
    assert pause("upstream_connect", 1, 0.9) == pause("timeout_connect", 3, 0.9) == 0.0
    assert pause("status_429", 1, 0.0) == PAUSE / 2
    assert pause("status_429", 1, 1.0) == PAUSE * 1.5
    assert pause("stream_error", 2, 0.5) == PAUSE * 2
    assert pause("status_503", 90, 0.5) == PAUSE_MOST
