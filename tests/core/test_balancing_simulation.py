"""What policies do to engines: prefix hits, times to first token, skew and herds, on a model of engines and of clients.

Everything is decided by seeds, so a figure here is the same on every machine. `python -m tests.bench.balancing` draws them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest

from gateway.core import backend
from gateway.core.balancing import POLICIES
from tests.support.engines import BASE, BLOCK, BUDGET, EACH_TOKEN, RUNNING_MOST, Engine, Request
from tests.support.simulation import Result, Simulation, Workload, by_factor, by_last_scrape_alone, quantile

SEEDS = (1, 2)
BUSY = Workload(rate=9.0)  # four engines, some 15 requests in each, four fifths of what they can do


@functools.cache
def run(balance: str, seed: int = 1, engines: int = 4, speeds: Sequence[float] = (), **options: object) -> Result:
    fleet = [Engine(speed=speeds[i] if speeds else 1.0) for i in range(engines)]
    options.setdefault("workload", BUSY)
    return Simulation(fleet, balance, seed=seed, **options).run()  # type: ignore[arg-type]


class TestTheModel:
    """An engine must be slow where real ones are, or nothing that it shows is worth a thing."""

    @staticmethod
    def serve(engine: Engine, *requests: Request, begin: float = 0.0) -> float:
        """All of them to their end; returns when that was."""
        now = begin
        engine.waiting.extend(requests)
        while engine.requests:
            now, begun, ended = engine.step(now)
            for request in begun:
                request.first_token = now
            for request in ended:
                engine.finish(request)
        return now

    def test_a_prompt_takes_time_for_its_tokens(self) -> None:
        alone = Request(1, 1600, 0, 1, 0.0)
        self.serve(Engine(), alone)
        assert alone.first_token == pytest.approx(BASE + 1600 * EACH_TOKEN)
        long = Request(1, 10 * BUDGET, 0, 1, 0.0)
        self.serve(Engine(), long)
        assert long.first_token == pytest.approx(10 * (BASE + BUDGET * EACH_TOKEN))

    def test_the_next_turn_pays_for_what_is_new(self) -> None:
        engine = Engine()
        now = self.serve(engine, Request(1, 1600, 0, 100, 0.0))
        turn = Request(1, 1800, 0, 1, now)
        self.serve(engine, turn, begin=now)
        assert turn.cached == 1700 // BLOCK * BLOCK
        assert turn.first_token - now == pytest.approx(BASE + (1800 - turn.cached) * EACH_TOKEN)
        stranger = Request(2, 1800, 0, 1, now)
        self.serve(engine, stranger, begin=now)
        assert stranger.cached == 0

    def test_what_all_share_is_found_by_strangers(self) -> None:
        engine = Engine()
        self.serve(engine, Request(1, 1600, 512, 1, 0.0))
        stranger = Request(2, 1600, 512, 1, 0.0)
        self.serve(engine, stranger)
        assert stranger.cached == 512

    def test_the_least_recently_used_makes_room(self) -> None:
        engine = Engine(blocks=100)
        for conversation in (1, 2, 1, 3):  # some 40 blocks each
            self.serve(engine, Request(conversation, 40 * BLOCK, 0, 1, 0.0))
        first, second = Request(1, 40 * BLOCK, 0, 1, 0.0), Request(2, 40 * BLOCK, 0, 1, 0.0)
        self.serve(engine, first)
        self.serve(engine, second)
        assert first.cached >= 38 * BLOCK
        assert second.cached < 25 * BLOCK

    def test_a_batch_slows_down_and_a_full_one_queues(self) -> None:
        times = []
        for count in (1, 16, 64):
            engine = Engine(blocks=100_000)
            times.append(self.serve(engine, *(Request(i, 32, 0, 100, 0.0) for i in range(count))))
        assert times[0] < times[1] < times[2] < 2 * times[0]
        engine = Engine(blocks=100_000)
        engine.waiting.extend(Request(i, 8, 0, 100, 0.0) for i in range(100))
        engine.step(0.0)
        assert engine.says()[:2] == (RUNNING_MOST, 100 - RUNNING_MOST)

    def test_a_full_cache_queues(self) -> None:
        engine = Engine(blocks=100)
        engine.waiting.extend(Request(i, 40 * BLOCK, 0, 10, 0.0) for i in range(5))
        for _ in range(9):
            engine.step(0.0)
        said = engine.says()
        assert said[:2] == (2, 3)
        assert said.kv_usage > 0.8


@pytest.mark.parametrize("seed", SEEDS)
class TestConversations:
    """Four engines whose caches together hold all conversations, but none of them alone."""

    def test_affinity_finds_the_prefix(self, seed: int) -> None:
        """By far more often than any other, which shows in the time to the first token and in the pace of all the others."""
        kept = run("affinity", seed)
        for balance in POLICIES.keys() - {"affinity"}:
            other = run(balance, seed)
            assert kept.hit_rate > other.hit_rate + 0.15
            assert quantile(kept.ttft, 0.5) < 0.75 * quantile(other.ttft, 0.5)
            assert quantile(kept.ttft, 0.99) < 1.1 * quantile(other.ttft, 0.99)
            assert quantile(kept.tpot, 0.5) < 0.9 * quantile(other.tpot, 0.5)

    @pytest.mark.parametrize(
        ("balance", "skew", "fullest"),
        [("round_robin", 1.01, 1.6), ("least_loaded", 1.1, 1.35), ("power_of_two", 1.1, 1.5), ("affinity", 1.15, 1.5)],
    )
    def test_skew_is_bounded(self, seed: int, balance: str, skew: float, fullest: float) -> None:
        """The largest share of requests, and how full the fullest engine is, each for the mean."""
        found = run(balance, seed)
        assert found.skew <= skew
        assert quantile(found.fullest, 0.99) <= fullest

    def test_the_factor_weighs_hits_against_skew(self, seed: int) -> None:
        tight, usual, loose = (run("affinity", seed, prepare=by_factor(factor)) for factor in (1.0, 1.25, 2.0))
        assert tight.hit_rate + 0.1 < usual.hit_rate < loose.hit_rate - 0.05
        spread = [quantile(found.fullest, 0.99) for found in (tight, usual, loose)]
        assert spread == sorted(spread)

    def test_prompts_count_while_they_are_read(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Where some are long, the slowest first tokens come sooner than by the number of requests alone."""
        load = Workload(rate=3.2, first=(1000, 6000), turns=(3, 10), seconds=75.0)
        counted = run("least_loaded", seed, workload=load)
        monkeypatch.setattr(backend, "REQUEST", 1e12)
        fleet = [Engine() for _ in range(4)]
        uncounted = Simulation(fleet, "least_loaded", seed=seed, workload=load).run()
        assert quantile(counted.ttft, 0.99) < 0.9 * quantile(uncounted.ttft, 0.99)


@pytest.mark.parametrize("seed", SEEDS)
class TestNoHerd:
    """Engines are looked at once a second, in which dozens of requests come."""

    EIGHT = Workload(rate=18.0, seconds=32.0)

    def test_by_the_last_scrape_alone_there_is_one(self, seed: int) -> None:
        """What all this is measured against: a policy that trusts the last figures sends everybody to the same engine."""
        found = run("least_loaded", seed, 8, workload=self.EIGHT, prepare=by_last_scrape_alone)
        assert quantile(found.fullest, 0.99) > 3.5
        assert quantile(found.ttft, 0.99) > 1.0

    @pytest.mark.parametrize(("balance", "fullest"), [("least_loaded", 1.3), ("power_of_two", 1.45), ("affinity", 1.5)])
    def test_what_was_sent_since_counts(self, seed: int, balance: str, fullest: float) -> None:
        found = run(balance, seed, 8, workload=self.EIGHT)
        assert quantile(found.fullest, 0.99) < fullest
        assert quantile(found.ttft, 0.99) < 0.2

    @pytest.mark.parametrize(("balance", "fullest"), [("least_loaded", 1.55), ("power_of_two", 1.75), ("affinity", 1.8)])
    def test_nor_among_gateways_that_know_nothing_of_each_other(self, seed: int, balance: str, fullest: float) -> None:
        found = run(balance, seed, 8, workload=self.EIGHT, gateways=3)
        assert quantile(found.fullest, 0.99) < fullest
        assert quantile(found.ttft, 0.99) < 0.25


class TestUnequalEngines:
    SPEEDS = (1.0, 1.0, 1.0, 0.5)

    def test_a_slow_one_gets_less(self) -> None:
        """It has no more in flight than the others; in turn it would have twice as much, and be slower still."""
        load = Workload(rate=7.0)
        turns = run("round_robin", 1, 4, self.SPEEDS, workload=load)
        for balance in ("least_loaded", "power_of_two", "affinity"):
            found = run(balance, 1, 4, self.SPEEDS, workload=load)
            assert found.shares[3] < 0.9 / 4
            assert quantile(found.fullest, 0.5) < 1.4 < 1.7 < quantile(turns.fullest, 0.5)
            assert quantile(found.tpot, 0.99) < 0.75 * quantile(turns.tpot, 0.99)

    @pytest.mark.parametrize("balance", ["least_loaded", "affinity"])
    def test_what_others_send_is_seen(self, balance: str) -> None:
        """Two of four engines are busy with requests that do not come by here: the engines' own figures tell."""
        load = Workload(rate=5.0)
        seen = run(balance, elsewhere=10.0, workload=load)
        unseen = run(balance, elsewhere=10.0, workload=load, scrape=None)
        assert sum(seen.shares[:2]) < 0.3 < 0.4 < sum(unseen.shares[:2])
        assert quantile(seen.fullest, 0.5) < 0.9 * quantile(unseen.fullest, 0.5)
        assert quantile(seen.tpot, 0.99) < quantile(unseen.tpot, 0.99)


@pytest.mark.parametrize(("balance", "fullest"), [("least_loaded", 1.65), ("power_of_two", 1.9), ("affinity", 1.65)])
def test_a_large_fleet(balance: str, fullest: float) -> None:
    """Of 64 engines a few are looked at each time: none is ever much fuller than the mean."""
    found = run(balance, 1, 64, workload=Workload(rate=144.0, seconds=14.0, steady=8.0))
    assert quantile(found.fullest, 0.99) < fullest


def test_the_same_seed_gives_the_same() -> None:
    first, second = (Simulation([Engine() for _ in range(3)], "power_of_two", seed=7).run() for _ in range(2))
    assert first == second
