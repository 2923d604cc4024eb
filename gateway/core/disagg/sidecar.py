"""llm-d's routing sidecar: it stands before D, and is told by a header field which P to use (pd.md 5.14, 3.L).

Both directions: `Sidecar` drives sidecars; `named` reads that field for a gateway which is itself the sidecar.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable
from typing import Final

from gateway.core.disagg.asked import Asked
from gateway.core.disagg.base import GENERATING, Bypass, Connector, Engine, Handoff, Leg, Order, Pair, Release, bracketed
from gateway.core.head import Field
from gateway.errors import Refusal

PREFILLER: Final = b"x-prefiller-host-port"
PREFILLER_NEW: Final = b"x-llm-d-prefiller-host-port"  # the same, as it is called since; either is taken
MOST: Final = 64  # prefillers that a field may name
_PLACE: Final = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]{2,45})\]|(?P<host>[A-Za-z0-9._-]{1,253})):(?P<port>[0-9]{1,5})")


class Sidecar(Connector):
    """One leg, to the sidecar, with the client's own body: the transfer is the sidecar's business altogether."""

    name = "sidecar"
    order = Order.SIDECAR
    hold = 0.0
    release_policy = Release.NEVER

    def judge(self, asked: Asked) -> Bypass | None:
        if asked.path not in GENERATING:
            return Bypass.PATH
        return Bypass.SHORT if asked.tokens < self.rules.min_prompt_tokens else None

    def prefill(self, asked: Asked, pair: Pair, posted: bytes = b"") -> Leg:
        raise NotImplementedError("a sidecar asks its prefill engine itself")

    def decode(self, asked: Asked, pair: Pair, handoff: Handoff = Handoff()) -> Leg:
        return self.alone(asked, pair)._replace(fields=((PREFILLER, place(pair.prefill)),))


def place(engine: Engine) -> bytes:
    return f"{bracketed(engine.host)}:{engine.port}".encode()


def named(fields: Iterable[Field], engines: Iterable[Engine]) -> frozenset[str] | None:
    """Which of these prefill engines a request's header fields name; None where they name none. Raises Refusal, 400 or 403."""
    values = [value for name, _, value, _ in fields if name in (PREFILLER, PREFILLER_NEW)]
    if not values:
        return None
    known: dict[tuple[str, int], str] = {(_plain(engine.host), engine.port): engine.name for engine in engines}
    return frozenset(known[place] for place in prefillers(b",".join(values), known.keys()))


def _plain(host: str) -> str:
    return str(ipaddress.IPv6Address(host)) if _is_v6(host) else host.lower()


def prefillers(field: bytes, allowed: Collection[tuple[str, int]]) -> list[tuple[str, int]]:
    """The hosts and ports that a field names, in its order. Only those that `allowed` has (host in lower case, port) may be
    asked: whoever may send this field would else make the gateway send requests anywhere. Raises Refusal, 400 or 403."""
    found = []
    parts = field.split(b",")
    if len(parts) > MOST:
        raise Refusal("bad_request", f"{PREFILLER.decode()}: found {len(parts)} prefillers; at most {MOST} are taken")
    for part in parts:
        text = part.strip(b" \t").decode("latin-1")
        match = _PLACE.fullmatch(text.removeprefix("http://"))
        port = int(match["port"]) if match else 0
        if match is None or not 0 < port < 65536 or (match["v6"] and not _is_v6(match["v6"])):
            raise Refusal("bad_request", f"{PREFILLER.decode()}: found {text[:80]!r}; expected HOST:PORT, IPv6 in brackets")
        host = str(ipaddress.IPv6Address(match["v6"])) if match["v6"] else match["host"].lower()
        if (host, port) not in allowed:
            raise Refusal("forbidden", f"{PREFILLER.decode()}: {text[:80]} is no prefill backend of this gateway")
        found.append((host, port))
    return found


def _is_v6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True
