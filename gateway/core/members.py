"""Who the backends are: what the sources say, combined into one list.

A *source* is the configuration, each entry of `discovery`, or the admin API. Each says all that it knows at once, in a
snapshot. These are the rules by which snapshots combine:

 1. Sources rank: the configuration first, then those of `discovery` in the order file, dns, kubernetes, the admin API
    last.
 2. A name is one backend's, and so is a place (URL and address). Where two sources claim one, the one of higher rank has
    it, and the other's member is left out, and told of, until the name or the place is free.
 3. What the admin API took out (DELETE, drain) stays out, whichever source lists it, until it is added again (POST of the
    same name and URL), or no source lists it under this name at this place any more: whoever comes back then is new.
 4. What the admin API added stays until it takes it out. Both outlive a reload, and neither a restart.
 5. A source that fails, or says what cannot be used, goes on with what it said last. An empty snapshot is one: it has no
    backends.
 6. The synthetic engine stands in only where the configuration names no backend and no discovery, and leaves for good
    with the first backend that the admin API adds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

CONFIGURATION = "configuration"
ADMIN_API = "admin API"


class Tls(NamedTuple):
    """How TLS is spoken with a backend: names of PEM files, and whether its certificate is verified."""

    ca: str | None = None  # None: the system's
    certificate: str | None = None
    key: str | None = None
    verify: bool = True


class Kv(NamedTuple):
    """Where an engine's KV connector is, as far as the operator must say so (`core.disagg.base.Engine`)."""

    kv_host: str | None = None
    kv_port: int | None = None
    bootstrap_port: int | None = 8998
    handshake_port: int | None = None
    notify_port: int | None = None
    dp_size: int = 1
    tp_size: int = 1


class Place(NamedTuple):
    """Where a backend is. A member that moves is another backend, with nothing known of it."""

    url: str  # http://HOST[:PORT], https://HOST[:PORT] or unix:/PATH, as configvalues writes them
    address: str | None = None  # IP address of HOST, where its source has looked it up; None: looked up when connecting


class Member(NamedTuple):
    """One backend as a source describes it."""

    name: str
    place: Place
    role: str = "both"  # both, prefill or decode
    weight: float = 1
    max_in_flight: int | None = None
    credential: bytes | None = None  # sent upstream instead of the client's own
    tls: Tls = Tls()
    models: tuple[str, ...] | None = None  # that it serves; None: as it says itself
    kv: Kv = Kv()


class Listed(NamedTuple):
    member: Member
    source: str


class Merged(NamedTuple):
    listed: tuple[Listed, ...]
    clashes: tuple[str, ...]  # a line for each member that was left out by rule 2
    taken_out: Mapping[str, Place]  # what is left of it, by rule 3


def merge(sources: Iterable[tuple[str, Sequence[Member]]], taken_out: Mapping[str, Place]) -> Merged:
    """The members of all sources, the highest rank first. Within one source, names are unique; places need not be: an
    operator may list one twice."""
    by_name: dict[str, Listed] = {}
    by_place: dict[Place, Listed] = {}
    clashes: list[str] = []
    for source, members in sources:
        accepted = []
        for member in members:
            holder = by_name.get(member.name) or by_place.get(member.place)
            if holder is None:
                accepted.append(Listed(member, source))
            elif holder.member.name == member.name:
                clashes.append(f"{source}: the name {member.name} is taken by a backend of {holder.source}")
            else:
                clashes.append(
                    f"{source}: {member.name} is at {member.place.url}, as {holder.member.name} of {holder.source} is"
                )
        by_name.update((one.member.name, one) for one in accepted)
        by_place.update((one.member.place, one) for one in accepted)
    still = {name: place for name, place in taken_out.items() if name in by_name and by_name[name].member.place == place}
    listed = tuple(one for name, one in by_name.items() if name not in still)
    return Merged(listed, tuple(clashes), still)


def repeated(members: Iterable[Member]) -> str | None:
    """A name that two of them have, if there is one."""
    seen: set[str] = set()
    for member in members:
        if member.name in seen:
            return member.name
        seen.add(member.name)
    return None
