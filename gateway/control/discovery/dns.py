"""Backends from DNS: every address of a name (A, AAAA), or every target of a service (SRV, RFC 2782).

Each address is a backend of its own, so that connections follow the name: one to an address that has gone is not used
again. The name goes into Host, and is the one that a certificate must have. Where several names, or targets, lead to one
address and port, that is one engine, and one backend: known by whichever it was known by before, else by the first. But over
TLS, where who answers depends on the name that is asked for (RFC 6066 section 3), each name is one.

A and AAAA are one or the other, never both: an engine with two addresses would be counted twice. For the same reason a
target of SRV records is asked for its A records, and for AAAA only where it has none. Of SRV records only those of the
best priority count, and their weights in proportion. That a name is not there (NXDOMAIN), or has no such record, is an
answer: there are no backends. No answer, or one of SERVFAIL or REFUSED, is a failure.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Container, Iterable, Mapping
from typing import NamedTuple, cast

import dns.asyncresolver
import dns.exception
import dns.nameserver
import dns.rdtypes.IN.SRV
import dns.resolver

from gateway.control.discovery import Common, Snapshot, SourceFailed
from gateway.core.members import Member, Place

PATIENCE = 5.0  # seconds for one look-up, with all its tries
MEMBERS_MOST = 1000  # addresses of one name
RARELY = 0.01  # the weight of a record of weight 0 among others: "a very small chance of being selected" (RFC 2782)


class DnsSettings(NamedTuple):
    names: tuple[str, ...]
    type: str = "A"  # A, AAAA or SRV
    port: int | None = None  # None: SRV says it
    servers: tuple[tuple[str, int], ...] = ()  # IP address and port; none: those of /etc/resolv.conf
    interval: float = 5.0
    common: Common = Common()


class Target(NamedTuple):
    """What one record says."""

    host: str
    port: int
    weight: int
    addresses: tuple[str, ...]


class DnsSource:
    def __init__(self, settings: DnsSettings):
        self.settings = settings
        self._names: dict[Place, str] = {}  # of those that were found last

    @property
    def name(self) -> str:
        port = "" if self.settings.port is None else f":{self.settings.port}"
        return f"dns {self.settings.type} {' '.join(self.settings.names)}{port}"

    @property
    def longest_pause(self) -> float:
        return self.settings.interval

    async def snapshots(self) -> AsyncGenerator[Snapshot, None]:
        while True:
            yield await self._look()
            await asyncio.sleep(self.settings.interval)

    async def _look(self) -> Snapshot:
        settings, resolver = self.settings, self._resolver()
        members: list[Member] = []
        for name in settings.names:
            if settings.type == "SRV":
                members += members_of_targets(await _service(resolver, name), settings.common, self._names)
            else:
                assert settings.port is not None
                found = await _addresses(resolver, name, settings.type)
                members += members_of_name(name, settings.port, found, settings.common)
        members = one_an_engine(members, self._names)
        if len(members) > MEMBERS_MOST:
            raise SourceFailed(f"found {len(members)} backends; expected at most {MEMBERS_MOST}")
        self._names = {member.place: member.name for member in members}
        return tuple(members)

    def _resolver(self) -> dns.asyncresolver.Resolver:
        """Made for each look: /etc/resolv.conf may have changed."""
        servers = self.settings.servers
        try:
            resolver = dns.asyncresolver.Resolver(configure=not servers)
        except dns.resolver.NoResolverConfiguration as error:
            raise SourceFailed(f"{error}; expected a nameserver in /etc/resolv.conf, or discovery.dns.servers") from None
        if servers:
            resolver.nameservers = [dns.nameserver.Do53Nameserver(address, port) for address, port in servers]
        resolver.lifetime = PATIENCE
        return resolver


async def _service(resolver: dns.asyncresolver.Resolver, name: str) -> list[Target]:
    """The targets of a service, those of the best priority, with their addresses."""
    records = [cast(dns.rdtypes.IN.SRV.SRV, record) for record in await _records(resolver, name, "SRV")]
    records = [record for record in records if record.target.to_text() != "."]  # RFC 2782: "." is no service at all
    best = min((record.priority for record in records), default=0)
    targets = []
    for record in records:
        if record.priority == best:
            host = record.target.to_text(omit_final_dot=True).lower()
            absolute = f"{host}."
            found = await _addresses(resolver, absolute, "A") or await _addresses(resolver, absolute, "AAAA")
            targets.append(Target(host, record.port, record.weight, found))
    return targets


async def _addresses(resolver: dns.asyncresolver.Resolver, name: str, kind: str) -> tuple[str, ...]:
    return tuple(sorted({record.to_text() for record in await _records(resolver, name, kind)}))


async def _records(resolver: dns.asyncresolver.Resolver, name: str, kind: str) -> Iterable[dns.rdata.Rdata]:
    try:
        answer = await resolver.resolve(name, kind, search=True)
    except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
        return ()
    except dns.exception.Timeout:
        raise SourceFailed(f"no DNS server answered for {name} ({kind}) within {PATIENCE:g} s") from None
    except (dns.exception.DNSException, OSError) as error:
        raise SourceFailed(f"{name} ({kind}) could not be looked up: {str(error) or type(error).__name__}") from None
    return answer


# what that means ------------------------------------------------------------------------------------------------------


def members_of_name(name: str, port: int, addresses: Iterable[str], common: Common) -> list[Member]:
    url = f"{common.scheme}://{name.removesuffix('.')}:{port}"
    return [_member(_host_port(address, port), url, address, 1, common) for address in addresses]


def members_of_targets(targets: Iterable[Target], common: Common, before: Mapping[Place, str] = {}) -> list[Member]:
    """Called TARGET:PORT, with @ADDRESS behind it where a target has several. `before`: names that were given; whoever has one
    keeps it, so that an address which its target has still is the same backend, whatever joins it or goes."""
    targets = sorted(targets)
    weighted = any(target.weight for target in targets)
    share = math.gcd(*(target.weight for target in targets)) or 1
    members = []
    for target in targets:
        shown = f"{target.host}:{target.port}"
        url = f"{common.scheme}://{shown}"
        kept = {address: before.get(Place(url, address)) for address in target.addresses}
        alone = len(target.addresses) == 1
        weight = target.weight // share or (RARELY if weighted else 1)
        for address in target.addresses:
            name = kept[address] or (shown if alone else f"{shown}@{address}")
            members.append(_member(name, url, address, weight, common))
    return members


def one_an_engine(members: Iterable[Member], before: Container[Place]) -> list[Member]:
    """Without those that lead where another one does. `before`: places that were known, and stay."""
    found: dict[tuple[str | None, str], Member] = {}
    for member in members:
        place = member.place
        led_to = place.address, place.url if place.url.startswith("https:") else place.url.rpartition(":")[2]
        holder = found.setdefault(led_to, member)
        if place in before and holder.place not in before:
            found[led_to] = member
    return list(found.values())


def _member(name: str, url: str, address: str, weight: float, common: Common) -> Member:
    return Member(
        name,
        Place(url, address),
        weight=weight,
        role=common.role,
        max_in_flight=common.max_in_flight,
        credential=common.credential,
        tls=common.tls,
    )


def _host_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
