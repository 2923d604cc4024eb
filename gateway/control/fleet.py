"""The part of the admin listener that changes who the backends are: /-/backends, and /instances of vLLM Ascend's proxy.

What it adds and takes out is rule 3 and 4 of `core.members`. DELETE and drain do the same, as nothing is ever cut: no new
request, its exchanges go on to their end, and with the last of them the backend is gone. Undrain brings back what is still
listed by a source (`GET /-/backends/out` has those), or what only drains; anything else is added anew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence, Sized
from typing import Any

from aiohttp import web

from gateway.control.membership import Entry, Membership, Taken, described, described_as_out
from gateway.control.replies import error, reply
from gateway.core.members import ADMIN_API, Member
from gateway.errors import ConfigError

ROLES = {"prefill": ("both", "prefill"), "decode": ("both", "decode")}  # an instance's type -> roles of backends
ADDED_MOST = 1000  # instances of one request
_LOOPBACK = re.compile(r"//(localhost|127\.0\.0\.1|0\.0\.0\.0)(?=[:/]|$)")  # one instance to that proxy


def fleet_routes(
    membership: Membership,
    read: Callable[[object], Member],
    check: Callable[[Member], None],
    under_way: Sized,
    credential: bytes | None = None,
) -> list[web.RouteDef]:
    """`read`: a backend out of a request's JSON; `check`: whether it can be used, where nobody else describes it; both raise
    ConfigError. `under_way`: the exchanges; `credential`: what added instances are shown."""
    fleet = _Fleet(membership, read, check, under_way, credential)
    return [
        web.post("/-/backends", fleet.add),
        web.delete("/-/backends/{name}", fleet.remove),
        web.post("/-/backends/{name}/drain", fleet.drain),
        web.post("/-/backends/{name}/undrain", fleet.undrain),
        web.get("/-/backends/out", fleet.out),
        web.post("/instances/add", fleet.add_instances),
        web.post("/instances/remove", fleet.remove_instances),
        web.get("/healthcheck", fleet.healthcheck),
    ]


class _Fleet:
    def __init__(
        self,
        membership: Membership,
        read: Callable[[object], Member],
        check: Callable[[Member], None],
        under_way: Sized,
        credential: bytes | None,
    ):
        self._membership, self._read, self._check, self._credential = membership, read, check, credential
        self._under_way = under_way

    async def add(self, request: web.Request) -> web.Response:
        try:
            member = self._read(await _content(request))
            ((entry, new),) = self._membership.add([member], self._check)
        except ConfigError as wrong:
            return error(400, "bad_request", str(wrong))
        except Taken as taken:
            return error(409, "conflict", str(taken))
        return reply(described(entry), 201 if new else 200)

    async def remove(self, request: web.Request) -> web.Response:
        gone, answer = self._take_out(request.match_info["name"])
        return web.Response(status=204) if gone else answer

    async def drain(self, request: web.Request) -> web.Response:
        _, answer = self._take_out(request.match_info["name"])
        return answer

    async def undrain(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        try:
            entry = self._membership.bring_back(name)
        except ConfigError as wrong:
            return error(400, "bad_request", str(wrong))
        except Taken as taken:
            return error(409, "conflict", str(taken))
        if entry is None:
            why = f"no backend {name} was taken out that a source still lists; POST /-/backends adds one by its URL"
            return error(404, "unknown_backend", why)
        return reply(described(entry))

    async def out(self, request: web.Request) -> web.Response:
        return reply([described_as_out(name, place) for name, place in self._membership.taken_out.items()])

    def _take_out(self, name: str) -> tuple[bool, web.Response]:
        """Whether it is gone already, and what to answer."""
        found = self._membership.take_out([name])
        if not found:
            return False, error(404, "unknown_backend", f"there is no backend {name}; GET /-/backends names them")
        entry = next((entry for entry in self._membership.leaving if entry in found), None)
        if entry is None:
            return True, reply(described(found[0]) | {"state": "gone"})
        return False, reply(described(entry), 202)

    # as vLLM Ascend's example proxy has them --------------------------------------------------------------------------

    async def add_instances(self, request: web.Request) -> web.Response:
        try:
            role, urls = _instances(await _content(request))
            members = [self._read({"url": url, "role": role})._replace(credential=self._credential) for url in urls]
            there = {_alike(entry.member): entry.member.name for entry in self._of_role(role)}
            new = [one for one in members if there.get(_alike(one), one.name) == one.name]
            self._membership.add([self._as_it_serves(one) for one in new], self._check)
        except ConfigError as wrong:
            return error(400, "bad_request", str(wrong))
        except Taken as taken:
            return error(409, "conflict", str(taken))
        return self._adjusted("add", role, members)

    def _as_it_serves(self, member: Member) -> Member:
        """One that this API has added already serves both roles still, or one: to change that is to take it out first.
        Raises Taken."""
        entry = self._membership.entries.get(member.name)
        if entry is None or entry.source != ADMIN_API:
            return member
        if entry.member.role not in ROLES[member.role]:
            raise Taken(f"{member.name} is a {entry.member.role} backend: remove it first")
        return member._replace(role=entry.member.role)

    async def remove_instances(self, request: web.Request) -> web.Response:
        try:
            role, urls = _instances(await _content(request))
            members = [self._read({"url": url}) for url in urls]
        except ConfigError as wrong:
            return error(400, "bad_request", str(wrong))
        # http://a is a:80 by name, and http://a:80 may have another name
        names, places = {member.name for member in members}, {_alike(member) for member in members}
        found = [e for e in self._of_role(role) if e.member.name in names or _alike(e.member) in places]
        if not found:
            return error(404, "unknown_backend", f"none of these is a {role} instance; GET /-/backends names all")
        self._membership.take_out([entry.member.name for entry in found])
        return self._adjusted("remove", role, [entry.member for entry in found])

    def _adjusted(self, what: str, role: str, members: Sequence[Member]) -> web.Response:
        return _compact(
            {
                "message": f"{what} {role} instances: {[_shown(member) for member in members]}.",
                "current_prefill_instances": [_shown(entry.member) for entry in self._of_role("prefill")],
                "current_decode_instances": [_shown(entry.member) for entry in self._of_role("decode")],
            }
        )

    async def healthcheck(self, request: web.Request) -> web.Response:
        return _compact(
            {
                "status": "ok",
                "prefill_instances": len(self._of_role("prefill")),
                "decode_instances": len(self._of_role("decode")),
                "request_num": len(self._under_way),
            }
        )

    def _of_role(self, role: str) -> list[Entry]:
        return [entry for entry in self._membership.entries.values() if entry.member.role in ROLES[role]]


def _compact(content: object) -> web.Response:
    """As that proxy writes it, for shell scripts look for words such as "status":"ok" in it."""
    return web.Response(text=json.dumps(content, separators=(",", ":"), ensure_ascii=False), content_type="application/json")


def _alike(member: Member) -> str:
    """Where it is, with one name for this machine, which that proxy knows by three."""
    return _LOOPBACK.sub("//localhost", member.place.url)


def _shown(member: Member) -> str:
    return member.place.url.removeprefix("http://")


async def _content(request: web.Request) -> Any:
    """Raises ConfigError where the body is no JSON object."""
    try:
        content = json.loads(await request.read())
    except (ValueError, RecursionError) as wrong:
        raise ConfigError(f"the body: not valid JSON: {wrong}; expected an object") from None
    if not isinstance(content, dict):
        raise ConfigError("the body: found no JSON object; expected one")
    return content


def _instances(content: dict[str, Any]) -> tuple[str, list[str]]:
    """The type, and the URLs. Raises ConfigError."""
    role, instances = content.get("type"), content.get("instances")
    if not isinstance(role, str) or role not in ROLES:
        found = "nothing" if role is None else repr(str(role)[:80])
        raise ConfigError(f"the body: type: found {found}; expected prefill or decode")
    listed = [instances] if isinstance(instances, str) else instances
    if not isinstance(listed, list) or not 0 < len(listed) <= ADDED_MOST or not all(isinstance(one, str) for one in listed):
        raise ConfigError(f"the body: instances: expected HOST:PORT, or a list of 1 to {ADDED_MOST} of them")
    for one in listed:
        if "://" not in one and not re.search(r":[^:\]]*$", one):
            raise ConfigError(f"the body: instances: found {one[:80]!r}; expected HOST:PORT, an IPv6 address in brackets")
    return role, [one if "://" in one else f"http://{one}" for one in dict.fromkeys(listed)]
