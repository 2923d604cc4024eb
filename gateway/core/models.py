"""Models: which backends serve each, and what the operator made of its name.

What a backend serves is what its /v1/models says, or what the operator says of it:

    None    nothing has been heard of it yet: it gets any model, but where the others' lists differ only such as nobody is known
            to serve
    ()      it has been asked, and cannot tell: it gets any model
    names   it gets these

A name under `models` may be an alias: it stands for other models, of which each request takes one, by weight; the others, and
then those that are marked as fallback, follow in the order in which they are written, where nobody who serves the first can be
reached. Targets are models as backends call them, so aliases do not lead to aliases, and a name may be a target of its own.

All of it is made anew when the backends, a list of theirs or the configuration changes: a request pays one look into a table.
Models that the same backends serve share one pool.
"""

from __future__ import annotations

import difflib
import heapq
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gateway.core.admission import Line, Quota, Quotas
from gateway.core.backend import Backend
from gateway.core.pool import Pool
from gateway.errors import Refusal

NEAREST = 3  # names that an unknown model's refusal offers
COMPARED_MOST = 64  # known names that an unknown one is compared with: those with the most pairs of letters in common
LOOKED_AT_MOST = 4096  # known names of which that is counted
SHOWN_MOST = 128  # characters of an unknown name that are compared and repeated


class Target(NamedTuple):
    """Where an alias leads. A fallback has no weight: it is for when no other can be reached."""

    model: str
    weight: int = 1
    fallback: bool = False


class Rule(NamedTuple):
    """What the operator says of one name. `rank`: of its class of priority."""

    route_to: tuple[Target, ...] = ()
    in_flight: int | None = None
    rank: int | None = None


class Way(Line):
    """A line, and the pool that it leads to; `rewritten`: the model to be asked for there, where the client named another."""

    __slots__ = ("backends", "rewritten")

    def __init__(self, pool: Pool, model: str | None = None, rewritten: str | None = None):
        super().__init__(pool, model)
        self.backends, self.rewritten = pool, rewritten

    def lead(self, pool: Pool, quotas: Quotas = (), rank: int | None = None) -> None:
        self.pool = self.backends = pool
        self.quotas, self.rank = quotas, rank


class Alias:
    """A name that stands for others."""

    __slots__ = ("_targets", "_weighted")

    def __init__(self, targets: Iterable[tuple[Target, Way]]):
        targets = sorted(targets, key=lambda one: one[0].fallback)
        self._weighted = [(target.weight, way) for target, way in targets if not target.fallback]
        self._targets = [way for _, way in targets]

    def order(self, chance: float, now: float) -> list[Way]:
        """The ways of one request, the first to be tried first. `chance`: a random number from 0 to 1.

        Those that lead to nobody just now (down, or ejected) come last, and have no share; nor have, while others lead to
        somebody, those all of whose backends rest, are silent or not proven.
        """
        usable = {way for way in self._targets if way.backends.usable(now)}
        well = {way for way in usable if way.backends.inviting(now)} or usable
        weighted = [(weight, way) for weight, way in self._weighted if way in well] or self._weighted
        at = chance * sum(weight for weight, _ in weighted)
        first = weighted[-1][1]
        for weight, way in weighted:
            at -= weight
            if at < 0:
                first = way
                break
        ways = [first, *(way for way in self._targets if way is not first)]
        return sorted(ways, key=lambda way: (way not in well, way not in usable))


class Models:
    """`whole`: all backends. `anywhere`: the way of requests that name no model. `needed`: where a request goes depends on
    its model. `merged`: the list of models is made here, not by the one backend. `lone`: where there is one backend it judges
    by itself, as it is the only one of the fleet that could."""

    lone = True

    def __init__(self, balance: str = "least_loaded", load_factor: float = 1.25):
        self._balance, self._load_factor = balance, load_factor
        self.whole = Pool([], balance, load_factor)
        self.anywhere = Way(self.whole)
        self.rules: Mapping[str, Rule] = {}
        self.names: frozenset[str] = frozenset()  # all that are known: bounded by the operator and the backends
        self._pairs: dict[str, frozenset[str]] = {}  # of letters in each of them, once they have been asked for
        self.needed = self.merged = False
        self._ways: dict[str, Way | Alias] = {}
        self._otherwise: Way | None = self.anywhere  # of names that nobody knows
        self._doubtful = Way(self.whole)
        self._kept: dict[tuple[str, str], Way] = {}  # by the name that the client gave, and the model asked for
        self._quotas: dict[str, Quota] = {}
        self._pools: dict[int, Pool] = {}  # by the backends' places, as bits

    # what changes -----------------------------------------------------------------------------------------------------

    def apply(
        self, backends: Sequence[Backend], balance: str, load_factor: float = 1.25, rules: Mapping[str, Rule] | None = None
    ) -> None:
        """New backends, or new rules (None: as before)."""
        self._balance, self._load_factor = balance, load_factor
        self.rules = self.rules if rules is None else rules
        self.whole.apply(backends, balance, load_factor)
        self._pools = {}
        self.learn()

    def learn(self) -> None:
        """Some backend's list has changed."""
        backends, rules = self.whole.backends, self.rules
        full = (1 << len(backends)) - 1
        serving, unheard, silent = _places(backends)
        self._pools[full] = self.whole
        self.names, self._pairs = frozenset([*serving, *rules]), {}
        alone = self.lone and len(backends) == 1 and not rules and not backends[0].told
        self.merged = bool(backends) and not alone
        self.needed = self.merged and (bool(rules) or any(places | silent != full for places in serving.values()))
        self._doubtful.lead(self._pool(unheard | silent))
        if alone or not backends:  # the one engine judges itself; and where there is none, that is what is to be told
            self._otherwise, self._ways = self.anywhere, {}
            self._keep({})
            return
        self._otherwise = self._doubtful if unheard | silent else None
        self._quotas = {name: self._quota(name, rule) for name, rule in rules.items() if rule.in_flight is not None}
        kept: dict[tuple[str, str], Way] = {}

        def way(name: str, model: str) -> Way:
            made = self._kept.get((name, model)) or Way(self.whole, name, None if model == name else model)
            places = serving.get(model, 0)
            names = dict.fromkeys((name, model))
            ranks = [rules[n].rank for n in names if n in rules]
            made.lead(
                self._pool(places | silent if places else unheard | silent),
                tuple(self._quotas[n] for n in names if n in self._quotas),
                next((rank for rank in ranks if rank is not None), None),
            )
            kept[name, model] = made
            return made

        self._ways = {
            name: Alias((target, way(name, target.model)) for target in rules[name].route_to)
            if name in rules and rules[name].route_to
            else way(name, name)
            for name in self.names
        }
        self._keep(kept)

    def _quota(self, name: str, rule: Rule) -> Quota:
        quota = self._quotas.get(name) or Quota(name)
        quota.limit = rule.in_flight
        return quota

    def _pool(self, places: int) -> Pool:
        pool = self._pools.get(places)
        if pool is None:
            backends = [backend for place, backend in enumerate(self.whole.backends) if places >> place & 1]
            pool = self._pools[places] = Pool(backends, self._balance, self._load_factor)
        return pool

    def _keep(self, kept: dict[tuple[str, str], Way]) -> None:
        """Whoever waits for a model that is no more is told so when its turn comes, which is at once."""
        for key, way in self._kept.items():
            if key not in kept and way.waiting:
                way.lead((self._otherwise or self._doubtful).backends)
                kept[key] = way
        self._kept = kept

    # what a request asks ----------------------------------------------------------------------------------------------

    def find(self, name: str | None) -> Way | Alias:
        """Where a request goes that names this model. Raises Refusal."""
        if not name:
            return self.anywhere
        found = self._ways.get(name) or self._otherwise
        if found is None:
            raise self.unknown(name)
        return found

    def unknown(self, name: str) -> Refusal:
        shown = name[:SHOWN_MOST]
        near = self._nearest(shown.casefold())
        if near:
            offered = f"the nearest that are served: {', '.join(near)}"
        else:
            more = len(self.names) - NEAREST
            offered = f"served are {', '.join(heapq.nsmallest(NEAREST, self.names))}"
            offered += f" and {more} more (GET /v1/models)" if more > 0 else ""
        return Refusal("unknown_model", f"the model {shown!r} does not exist; {offered}", param="model")

    def _nearest(self, asked: str) -> list[str]:
        """Names that are nearly this one, in whatever case, the nearest first."""
        if not self._pairs:
            self._pairs = {name: _pairs(name.casefold()) for name in sorted(self.names)[:LOOKED_AT_MOST]}
        pairs = _pairs(asked)
        alike = {name: len(pairs & own) / (len(pairs) + len(own) or 1) for name, own in self._pairs.items()}
        likely = heapq.nlargest(COMPARED_MOST, alike, key=alike.__getitem__)
        by_folded: dict[str, list[str]] = {}
        for name in likely:
            by_folded.setdefault(name.casefold(), []).append(name)
        near = difflib.get_close_matches(asked, list(by_folded), NEAREST, 0.5)
        return [name for folded in near for name in by_folded[folded]][:NEAREST]

    @property
    def usual(self) -> Way:
        """The way of most requests, where they do not depend on their models."""
        one = next(iter(self._ways.values())) if len(self._ways) == 1 else self.anywhere
        return one if isinstance(one, Way) else self.anywhere

    def unserved(self) -> list[tuple[str, str]]:
        """Names of the configuration, each with the model that it asks for, which no backend serves as far as all have said."""
        serving, unheard, silent = _places(self.whole.backends)
        if unheard | silent or not self.whole.backends:
            return []
        asked = [(name, t.model) for name, rule in self.rules.items() for t in rule.route_to or (Target(name),)]
        return [(name, model) for name, model in asked if model not in serving]


def _pairs(name: str) -> frozenset[str]:
    return frozenset(a + b for a, b in itertools.pairwise(name[:SHOWN_MOST]))


def _places(backends: Sequence[Backend]) -> tuple[dict[str, int], int, int]:
    """Who serves each model; who has not been heard; who cannot tell. As bits, by the backends' places."""
    serving: dict[str, int] = {}
    lists = {frozenset(backend.models) for backend in backends if backend.models}
    unheard = silent = 0
    for place, backend in enumerate(backends):
        bit = 1 << place
        if backend.models is None:
            unheard |= bit
        elif not backend.models:
            silent |= bit
        else:
            for name in backend.models:
                serving[name] = serving.get(name, 0) | bit
    if len(lists) < 2:
        unheard, silent = 0, unheard | silent
    return serving, unheard, silent
