"""Who the backends are, and the one place that puts a new list of them in force.

What each source says is kept as it said it; how that combines is `core.members`. A change of any of it is a new list,
which is built whole before anything is touched: what cannot be built (a certificate that cannot be read) is refused, and
the list in force goes on. Then, in one step:

    the same name at the same place    the same Backend, with all that is known of it; its settings are the new ones
    ... and spoken to in the same way  the same connections, too
    a new name, or another place       a new Backend
    a name that is no more             draining: nobody picks it, kept connections are closed, its streams go on; with
                                       the last of them it is gone
    one that drains, listed again      in service again, with all that is known of it
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gateway import tlscontexts
from gateway.configvalues import split_url
from gateway.control.probes import Target
from gateway.core.backend import Backend
from gateway.core.breaker import BreakerSettings
from gateway.core.caution import CautionSettings
from gateway.core.members import ADMIN_API, CONFIGURATION, Listed, Member, Merged, Place, Tls, merge, repeated
from gateway.errors import ConfigError, GatewayError
from gateway.net.upstream import ConnectionPool, Origin, PoolSettings

log = logging.getLogger(__name__)

NAMED_MOST = 8  # backends that one log line names
Members = Sequence[Member]
_DEFAULT_PORTS = {"http": 80, "https": 443}


class Taken(GatewayError):
    """A backend cannot be added: its name, or its place, is another's."""


class Settings(NamedTuple):
    """What all backends have alike."""

    connections: PoolSettings = PoolSettings()
    breaker: BreakerSettings = BreakerSettings()
    caution: CautionSettings = CautionSettings()


class Entry(NamedTuple):
    """One backend in force, or draining."""

    member: Member
    source: str
    backend: Backend
    connections: ConnectionPool
    target: Target  # for probes: connections of their own


class _Inputs(NamedTuple):
    """All that the list is made of."""

    static: Members = ()
    fallback: Member | None = None  # stands in where nobody else is listed
    discovered: Mapping[str, Members] = {}  # by source, the highest rank first
    added: Mapping[str, Member] = {}  # by the admin API
    taken_out: Mapping[str, Place] = {}  # by the admin API
    settings: Settings = Settings()
    contexts: Mapping[Tls, ssl.SSLContext] = {}  # made once for each reload, or no connection would outlive a snapshot


class Membership:
    """`entries`: the backends in force, by name. `leaving`: those that drain. `put` is called with each new list."""

    def __init__(self, put: Callable[[Collection[Entry]], None]):
        self.entries: dict[str, Entry] = {}
        self.leaving: list[Entry] = []
        self._put = put
        self._inputs = _Inputs()
        self._clashes: frozenset[str] = frozenset()
        self._real = False  # the admin API has added a backend: no more playing

    @property
    def everyone(self) -> list[Entry]:
        return [*self.entries.values(), *self.leaving]

    # what changes -----------------------------------------------------------------------------------------------------

    def configure(
        self, static: Members, settings: Settings, discovered: Mapping[str, Members], fallback: Member | None = None
    ) -> None:
        """A new configuration: certificates are read anew. Raises ConfigError, and then nothing has changed."""
        fallback = None if self._real else fallback
        inputs = self._inputs._replace(static=tuple(static), settings=settings, discovered=dict(discovered))
        self._change(inputs._replace(fallback=fallback, contexts={}))

    def snapshot(self, source: str, members: Members) -> None:
        """What a source says now, whole. Raises ConfigError, and then nothing has changed."""
        self._change(self._inputs._replace(discovered={**self._inputs.discovered, source: tuple(members)}))

    def add(self, members: Members, check: Callable[[Member], None] = lambda member: None) -> list[tuple[Entry, bool]]:
        """By the admin API: all of them or none. Returns their entries, and whether each is newly in force. Raises Taken,
        ConfigError. `check`: raises ConfigError for one that cannot be used as it is described here.

        One that a source lists, and that was taken out, comes back as its source describes it.
        """
        added, taken_out = dict(self._inputs.added), dict(self._inputs.taken_out)
        for member in members:
            held = self._holder(member)
            if held is not None and (held.name, held.place) != (member.name, member.place):
                raise Taken(f"{held.name} is at {held.place.url}: remove it first, or add another name and another URL")
            listed = held is not None and member.name not in added
            if held is not None and listed and "both" != member.role != held.role != "both":
                raise Taken(f"{held.name} is listed as a {held.role} backend: change its role there, and reload")
            if held is None or member.name in added:
                check(member)
                added[member.name] = member
            taken_out.pop(member.name, None)
        before = self.entries
        self._change(self._inputs._replace(added=added, taken_out=taken_out, fallback=None))
        self._real = True
        return [(self.entries[member.name], member.name not in before) for member in members]

    def take_out(self, names: Iterable[str]) -> list[Entry]:
        """By the admin API: these drain, and are gone. Returns those that were there; some may be draining still."""
        wanted = set(names)
        found = [entry for entry in self.everyone if entry.member.name in wanted]
        marked = {name: entry.member.place for name, entry in self.entries.items() if name in wanted}
        added = {name: member for name, member in self._inputs.added.items() if name not in marked}
        self._change(self._inputs._replace(added=added, taken_out={**self._inputs.taken_out, **marked}))
        return found

    def bring_back(self, name: str) -> Entry | None:
        """By the admin API: in service again, as its source describes it, or, where it only drains still, as it was. None
        where nobody of this name was taken out. Raises Taken, ConfigError."""
        if name in self.entries:
            return self.entries[name]
        if name in self._inputs.taken_out:
            left = {taken: place for taken, place in self._inputs.taken_out.items() if taken != name}
            self._change(self._inputs._replace(taken_out=left))
            return self.entries.get(name)
        leaving = next((entry for entry in self.leaving if entry.member.name == name and entry.source == ADMIN_API), None)
        return None if leaving is None else self.add([leaving.member])[0][0]

    @property
    def taken_out(self) -> Mapping[str, Place]:
        """What the admin API took out, and a source still lists."""
        return self._inputs.taken_out

    def _holder(self, member: Member) -> Member | None:
        """Whoever has this name, or this place: in force, or taken out and still listed by a source."""
        listed = [one.member for one in _merged(self._inputs._replace(taken_out={})).listed]
        if self._inputs.fallback is not None:
            listed = [one for one in listed if one is not self._inputs.fallback]
        named = [one for one in listed if one.name == member.name]
        placed = [one for one in listed if one.place == member.place]
        return next(iter(named or placed), None)

    # putting it in force ----------------------------------------------------------------------------------------------

    def _change(self, inputs: _Inputs) -> None:
        merged, contexts = _merged(inputs), dict(inputs.contexts)
        known = {(entry.member.name, entry.member.place): entry for entry in self.everyone}
        entries = {
            one.member.name: _entry(one, known.get((one.member.name, one.member.place)), inputs.settings, contexts)
            for one in merged.listed
        }
        self._inputs = inputs._replace(taken_out=merged.taken_out, contexts=contexts)
        before, self.entries = self.entries, entries
        for entry in entries.values():
            _describe(entry, inputs.settings)
        kept = {id(entry.backend) for entry in entries.values()}
        used = {id(pool) for entry in entries.values() for pool in (entry.connections, entry.target.connections)}
        gone = [entry for entry in before.values() if id(entry.backend) not in kept]
        self.leaving = [entry for entry in self.leaving if id(entry.backend) not in kept]
        had = {id(entry.backend) for entry in before.values()}
        new = [entry for entry in entries.values() if id(entry.backend) not in had]
        for entry in gone:
            self._drain(entry)
        for entry in new:
            if before and not entry.backend.taken:
                entry.backend.caution.doubted()  # others serve: it may prove itself first
        self._put(entries.values())
        for entry in before.values():
            for pool in (entry.connections, entry.target.connections):
                if id(pool) not in used:
                    pool.close()
        self._tell(merged, new, gone)

    def _drain(self, entry: Entry) -> None:
        backend = entry.backend
        backend.draining = True
        if backend.busy:
            self.leaving.append(entry)
            backend.emptied = lambda: self._gone(entry)

    def _gone(self, entry: Entry) -> None:
        entry.backend.emptied = None
        self.leaving.remove(entry)
        log.info("the backend %s is gone: its last exchange has ended", entry.member.name)

    def _tell(self, merged: Merged, new: list[Entry], gone: list[Entry]) -> None:
        """One line a change, and one for each clash when it begins."""
        for clash in merged.clashes:
            if clash not in self._clashes:
                log.warning("a backend is left out: %s", clash)
        self._clashes = frozenset(merged.clashes)
        if new or gone:
            streams = sum(entry.backend.in_flight for entry in gone)
            words = [
                f"new: {_names(new)}" if new else "",
                f"leaving: {_names(gone)} ({streams} exchanges to end)" if gone else "",
                f"{len(self.entries)} in all",
            ]
            log.info("backends: %s", "; ".join(word for word in words if word))


def _merged(inputs: _Inputs) -> Merged:
    sources = [(CONFIGURATION, inputs.static), *inputs.discovered.items(), (ADMIN_API, tuple(inputs.added.values()))]
    for source, members in sources:
        name = repeated(members)
        if name is not None:
            raise ConfigError(f"{source}: two backends are named {name}; expected a name of its own for each")
    if inputs.fallback is not None and not any(members for _, members in sources):
        sources = [(CONFIGURATION, (inputs.fallback,))]
    return merge(sources, inputs.taken_out)


def _entry(listed: Listed, known: Entry | None, settings: Settings, contexts: dict[Tls, ssl.SSLContext]) -> Entry:
    """The entry of a member; `known`: what there is of it already. Nothing is changed. Raises ConfigError, where its TLS cannot
    be set up."""
    member, loop = listed.member, asyncio.get_running_loop()
    origin = _origin(member, contexts)
    if known is None:
        backend = Backend(member.name, member.place.url, breaker=settings.breaker, caution=settings.caution)
    else:
        backend, old = known.backend, known.connections
        if old.origin == origin and old.settings == settings.connections and not old.closed:
            return Entry(member, listed.source, backend, old, known.target)
    target = Target(backend, ConnectionPool(origin, settings.connections, loop))
    return Entry(member, listed.source, backend, ConnectionPool(origin, settings.connections, loop), target)


def described(entry: Entry) -> dict[str, Any]:
    """For people: /-/backends, and the live page."""
    b, now = entry.backend, time.monotonic()
    return {
        "name": b.name,
        "url": b.url,
        "address": entry.member.place.address,
        "source": entry.source,
        "role": b.role,
        "state": b.state_at(now),
        "health": b.health.value,
        "breaker": b.breaker.state_at(now).value,
        "penalty": round(b.penalty.at(now), 2),
        "in_flight": b.in_flight,
        "max_in_flight": b.max_in_flight,
        "unread_tokens": b.tokens,
        "held_tokens": b.held,
        "weight": b.weight,
        "connections": entry.connections.size,
        "models": list(b.models or ()),
        "models_known": bool(b.models),
        "engine": b.engine and {"running": b.engine.running, "waiting": b.engine.waiting, "kv_usage": b.engine.kv_usage},
    }


def described_as_out(name: str, place: Place) -> dict[str, Any]:
    """One that was taken out and has ended all it had: it can be brought back."""
    return {"name": name, "url": place.url, "address": place.address, "state": "out", "in_flight": 0}


def _describe(entry: Entry, settings: Settings) -> None:
    """The backend, in service, as its source describes it now."""
    member, backend = entry.member, entry.backend
    backend.weight, backend.max_in_flight, backend.role = member.weight, member.max_in_flight, member.role
    backend.breaker.settings = settings.breaker
    if backend.caution.settings != settings.caution:
        backend.caution.apply(settings.caution)
    if backend.draining:
        backend.caution.returned(time.monotonic())
    if member.models is not None:
        backend.models = member.models
    elif backend.told:
        backend.models = None  # until it says so itself
    backend.told = member.models is not None
    backend.draining, backend.emptied = False, None


def _names(entries: Sequence[Entry]) -> str:
    named = ", ".join(f"{e.member.name} ({e.source})" for e in entries[:NAMED_MOST])
    return named if len(entries) <= NAMED_MOST else f"{named} and {len(entries) - NAMED_MOST} more"


# how a member is spoken to --------------------------------------------------------------------------------------------


def _origin(member: Member, contexts: dict[Tls, ssl.SSLContext]) -> Origin:
    scheme, address = split_url(member.place.url)
    if address.path is not None:
        return Origin(member.name, address.path, None, None, b"localhost", member.credential)
    context = None
    if scheme == "https":
        context = contexts.get(member.tls)
        if context is None:
            context = contexts[member.tls] = _context(member)
    host = f"[{address.host}]" if ":" in address.host else address.host
    field = host if address.port == _DEFAULT_PORTS[scheme] else f"{host}:{address.port}"
    found = member.place.address or address.host
    return Origin(member.name, found, address.port, context, field.encode(), member.credential, address.host)


def origin_of(member: Member) -> Origin:
    """Of a member that no other shares anything with. Raises ConfigError, where its TLS cannot be set up."""
    return _origin(member, {})


def _context(member: Member) -> ssl.SSLContext:
    tls = member.tls
    where = f"the backend {member.name}: tls"
    return tlscontexts.for_backend(where, tls.ca, tls.certificate, tls.key, verify=tls.verify)
