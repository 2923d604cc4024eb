"""Gateways in front of model engines: the very pools that serve requests, on a clock that a loop of events moves.

Clients hold conversations of several turns, each with all that was said before; what they do depends on the seed alone, so
that all policies are asked the same.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import random
from collections.abc import Callable, Sequence

from gateway.core.backend import Backend, Lease
from gateway.core.balancing.base import Fit, Policy
from gateway.core.pool import Pool
from tests.support.engines import Engine, Request

SYSTEM = 512  # tokens that all conversations begin with
LOOK = 0.05  # seconds between looks at all engines
HOP = 0.001  # seconds from a gateway to an engine


@dataclasses.dataclass(frozen=True)
class Workload:
    """Conversations that begin at random, of several turns, each with all that was said before."""

    rate: float = 6.0  # conversations a second
    turns: tuple[int, int] = (2, 10)
    first: tuple[int, int] = (60, 1200)  # tokens of the first message: some bring a document along
    later: tuple[int, int] = (20, 120)
    output: tuple[int, int] = (20, 220)
    think: float = 6.0  # seconds from an answer to the next turn, on average
    seconds: float = 45.0  # in which conversations begin
    steady: float = 15.0  # from when on it is looked at


@dataclasses.dataclass
class Result:
    """What came of it, from when the fleet was filled."""

    ttft: list[float]  # seconds
    tpot: list[float]
    hit_rate: float  # prompt tokens found in a cache, of all
    shares: list[float]  # of requests, by engine
    fullest: list[float]  # requests in the fullest engine for those of the mean one, time after time
    in_engines: list[tuple[float, list[int]]]  # how many each engine had then

    @property
    def skew(self) -> float:
        """The largest share, for an equal one."""
        return max(self.shares) * len(self.shares)


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


class Simulation:
    """`gateways` of them, each with a pool of its own over the same engines, which it looks at once in `scrape` seconds (None:
    never). `elsewhere`: requests a second that others send to the first half of the engines. `prepare` is given each pool."""

    def __init__(
        self, engines: Sequence[Engine], balance: str, *, seed: int = 1, gateways: int = 1, scrape: float | None = 1.0,
        elsewhere: float = 0.0, workload: Workload = Workload(), prepare: Callable[[Pool], None] | None = None,
    ):  # fmt: skip
        self.engines, self.workload, self.scrape = engines, workload, scrape
        self._clients, self._chance = random.Random(seed), random.Random(seed + 1)
        self.pools = [
            Pool([Backend(f"engine-{i}", f"http://engine-{i}") for i in range(len(engines))], balance) for _ in range(gateways)
        ]
        for pool in self.pools:
            if prepare is not None:
                prepare(pool)
        self._elsewhere = elsewhere
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._turns: dict[int, list[tuple[float, int, int]]] = {}  # to come: thought, message, output
        self._keys: dict[int, float] = {}
        self._leases: dict[Request, Lease] = {}
        self._counts = [0] * len(engines)
        self.now, self._look_at = 0.0, workload.steady
        self.result = Result([], [], 0.0, [], [], [])

    def run(self) -> Result:
        begin = 0.0
        for conversation in itertools.count():
            begin += self._clients.expovariate(self.workload.rate)
            if begin > self.workload.seconds:
                break
            self._plan(conversation)
            self._at(begin, lambda c=conversation: self._arrive(c, SYSTEM))  # type: ignore[misc]
        self._send_from_elsewhere()
        if self.scrape is not None:
            for pool in self.pools:
                for place in range(len(self.engines)):
                    self._at(self._chance.random() * self.scrape, lambda p=pool, i=place: self._scrape(p, i))  # type: ignore[misc]
        counted = False
        while self._events and self.now < self.workload.seconds:
            self.now, _, event = heapq.heappop(self._events)
            if not counted and self.now > self.workload.steady:
                counted = True
                before = [(e.prompt_tokens, e.cached_tokens) for e in self.engines]
                self._counts = [0] * len(self.engines)
            event()
        asked = sum(e.prompt_tokens - b[0] for e, b in zip(self.engines, before, strict=True))
        cached = sum(e.cached_tokens - b[1] for e, b in zip(self.engines, before, strict=True))
        self.result.hit_rate = cached / asked
        self.result.shares = [count / sum(self._counts) for count in self._counts]
        return self.result

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _plan(self, conversation: int) -> None:
        chance, load = self._clients, self.workload
        turns = []
        for turn in range(chance.randint(*load.turns)):
            message = chance.randint(*(load.later if turn or chance.random() < 0.5 else load.first))
            turns.append((chance.expovariate(1 / load.think), message, chance.randint(*load.output)))
        self._turns[conversation], self._keys[conversation] = turns, chance.random()

    def _send_from_elsewhere(self) -> None:
        chance, now = self._clients, 0.0
        number = -1
        while self._elsewhere and (now := now + chance.expovariate(self._elsewhere)) < self.workload.seconds:
            number -= 1
            engine = chance.choice(self.engines[: len(self.engines) // 2])
            request = Request(number, chance.randint(200, 1500), 0, chance.randint(50, 400), now)
            self._at(now, lambda e=engine, r=request: self._enqueue(e, r))  # type: ignore[misc]

    def _arrive(self, conversation: int, history: int) -> None:
        _, message, output = self._turns[conversation].pop(0)
        prompt = history + message
        request = Request(conversation, prompt, SYSTEM, output, self.now)
        pool = self._chance.choice(self.pools)
        lease = pool.pick(self.now, key=self._keys[conversation], tokens=prompt, chance=self._chance.random())
        assert lease is not None
        self._leases[request] = lease
        place = int(lease.backend.name.removeprefix("engine-"))
        self._counts[place] += 1
        engine = self.engines[place]
        if self.now > self._look_at:
            self._look_at = self.now + LOOK
            held = [engine.requests for engine in self.engines]
            self.result.in_engines.append((self.now, held))
            self.result.fullest.append(max(held) * len(held) / max(sum(held), 1))
        self._at(self.now + HOP, lambda: self._enqueue(engine, request))

    def _enqueue(self, engine: Engine, request: Request) -> None:
        engine.waiting.append(request)
        if not engine.stepping:
            self._step(engine)

    def _step(self, engine: Engine) -> None:
        engine.stepping = bool(engine.requests)
        if engine.stepping:
            end, begun, ended = engine.step(self.now)
            self._at(end, lambda: self._stepped(engine, begun, ended))

    def _stepped(self, engine: Engine, begun: list[Request], ended: list[Request]) -> None:
        for request in begun:
            request.first_token = self.now
            if request in self._leases:  # else it came from elsewhere
                self._leases[request].prompt_read(self.now)
        for request in ended:
            engine.finish(request)
            if request in self._leases:
                self._done(request)
        self._step(engine)

    def _done(self, request: Request) -> None:
        self._leases.pop(request).release()
        if request.arrived > self.workload.steady:
            self.result.ttft.append(request.first_token - request.arrived)
            self.result.tpot.append((self.now - request.first_token) / max(request.output - 1, 1))
        turns = self._turns[request.conversation]
        if turns:
            history = request.prompt + request.output
            self._at(self.now + turns[0][0], lambda: self._arrive(request.conversation, history))

    def _scrape(self, pool: Pool, place: int) -> None:
        backend = pool.backends[place]
        backend.scraped(self.engines[place].says(), backend.in_flight)
        assert self.scrape is not None
        self._at(self.now + self.scrape, lambda: self._scrape(pool, place))


class _ByLastScrape(Policy):
    """What many routers do: whoever had the least at the last look."""

    __slots__ = ()

    def choose(self, fit: Fit, now: float, chance: float, key: float | None) -> Backend | None:
        return min(self.backends, key=lambda b: b.engine.running + b.engine.waiting if b.engine else 0.0)


def by_last_scrape_alone(pool: Pool) -> None:
    pool._policy = _ByLastScrape(pool.backends)


@functools.cache
def by_factor(factor: float) -> Callable[[Pool], None]:
    return lambda pool: pool.apply(pool.backends, "affinity", factor)
