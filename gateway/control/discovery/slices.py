"""What the EndpointSlices of a Kubernetes service say, as members. Pure: no API, no clock.

The API's reference (discovery.k8s.io/v1) is the source of the rules: `ready` that is not said counts as true; addresses
of one endpoint are interchangeable, so the first one is taken; an endpoint may be in two slices at once; a service of two
address families has slices of each, of which a pod is taken once, its IPv4 address first. A pod that terminates is not
ready, and leaves; the streams that it has go on.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from gateway.configvalues import NAME_LENGTH, NOT_IN_NAME
from gateway.control.discovery import Common, Snapshot, SourceFailed
from gateway.core.members import Member, Place

Slice: TypeAlias = Mapping[str, Any]  # as JSON

_FAMILIES = ("IPv4", "IPv6")  # FQDN slices are deprecated, and no controller writes them


def members_of(slices: Iterable[Slice], port: int | str | None, common: Common) -> Snapshot:
    """Raises SourceFailed where a slice has no such port, or is none."""
    members: dict[str, Member] = {}
    try:
        for family in _FAMILIES:
            for one in sorted((s for s in slices if s["addressType"] == family), key=_name):
                for member in _of_slice(one, port, common):
                    members.setdefault(member.name, member)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise SourceFailed(f"found an EndpointSlice that is none ({error!r})") from None
    by_place = {member.place: member for member in reversed(members.values())}
    return tuple(sorted(by_place.values()))


def _name(one: Slice) -> str:
    return str(one["metadata"]["name"])


def _of_slice(one: Slice, port: int | str | None, common: Common) -> Iterable[Member]:
    ready = [endpoint for endpoint in one.get("endpoints") or () if _is_ready(endpoint)]
    if not ready:
        return
    number = _port(one, port)
    for endpoint in ready:
        address = str(ipaddress.ip_address(endpoint["addresses"][0]))
        place = f"[{address}]:{number}" if ":" in address else f"{address}:{number}"
        pod = endpoint.get("targetRef") or {}
        name = place
        if pod.get("kind") == "Pod":
            name = NOT_IN_NAME.sub("_", f"{pod['name']}.{pod.get('namespace') or one['metadata']['namespace']}:{number}")
        yield Member(
            name if len(name) <= NAME_LENGTH else place,
            Place(f"{common.scheme}://{place}"),
            role=common.role,
            max_in_flight=common.max_in_flight,
            credential=common.credential,
            tls=common.tls,
        )


def _is_ready(endpoint: Mapping[str, Any]) -> bool:
    conditions = endpoint.get("conditions") or {}
    return conditions.get("ready") is not False and conditions.get("terminating") is not True


def _port(one: Slice, wanted: int | str | None) -> int:
    """The port's number. A slice without ports is of a service that names none: then only a number will do."""
    ports = [port for port in one.get("ports") or () if port.get("port") is not None and port.get("protocol", "TCP") == "TCP"]
    fitting = [port for port in ports if wanted in (None, port["port"], port.get("name"))]
    if len({port["port"] for port in fitting}) == 1:
        return int(fitting[0]["port"])
    if not ports and isinstance(wanted, int):
        return wanted
    shown = ", ".join(f"{port.get('name') or 'unnamed'} {port['port']}" for port in ports) or "none"
    asked = "no port" if wanted is None else f"the port {wanted}"
    raise SourceFailed(
        f"found {asked} in discovery.kubernetes, and the ports {shown} in the EndpointSlice {_name(one)}; expected port to "
        "be one of these, which are the pods' own, not the service's"
    )
