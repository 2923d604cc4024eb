"""vLLM Ascend's MooncakeLayerwiseConnector: D is asked first, and asks back for its prefill (pd.md 5.6).

D posts to the metaserver, an address of this gateway that it was given, once for each of its engine requests; it ignores
what it is answered. When all of an attempt's have come there is exactly one request to P, which pushes layer by layer into
D's blocks. P holds nothing; D waits, and goes on waiting unless it is closed: so it must be where P fails.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from gateway.core.disagg.asked import Asked
from gateway.core.disagg.base import Connector, Handoff, Leg, Order, Pair, Release, params
from gateway.core.disagg.body import Body, as_json
from gateway.core.disagg.shape import Shape
from gateway.errors import Refusal

# What D calls a request: the API's prefix, our id, for completions the prompt's number; perhaps vLLM's own random suffix.
_ID: Final = re.compile(r"(chatcmpl-([0-9a-f]{32})|cmpl-([0-9a-f]{32})-\d{1,5})(?:-[0-9a-f]{8})?")
_CHAT: Final = b"/v1/chat/completions"


class Posted(NamedTuple):
    """One callback."""

    attempt: str  # Pair.attempt
    child: str  # which of its engine requests
    octets: bytes  # the object, verbatim: kv_transfer_params for P


class Layerwise(Connector):
    name = "layerwise"
    order = Order.DECODE_FIRST
    hold = 0.0
    release_policy = Release.NEVER
    paths = frozenset((_CHAT, b"/v1/completions"))
    lists = True
    shape = Shape(min_tokens=True)

    def decode(self, asked: Asked, pair: Pair, handoff: Handoff = Handoff()) -> Leg:
        given = params(do_remote_decode=False, do_remote_prefill=True, metaserver=pair.callback)
        return Leg(asked.path, self.with_params(asked, given), pair.attempt.encode())

    def prefill(self, asked: Asked, pair: Pair, posted: bytes = b"") -> Leg:
        return Leg(asked.path, self.shaped(asked, {"kv_transfer_params": posted}), pair.attempt.encode())


class Rendezvous:
    """The callbacks of one attempt. Register it by its attempt's id before D is asked; forget it when the attempt ends."""

    def __init__(self, asked: Asked, pair: Pair):
        if asked.path == _CHAT:
            self.children = [f"chatcmpl-{pair.attempt}"]
        else:
            self.children = [f"cmpl-{pair.attempt}-{i}" for i in range(max(asked.prompts, 1))]
        self._posted: dict[str, bytes] = {}
        self._complete = False

    def take(self, posted: Posted) -> bool:
        """Whether this was the last one, so that P is to be asked now: once. D repeats a callback whose answer it missed.
        Raises Refusal, 404, for a child that the attempt does not have."""
        if posted.child not in self.children:
            raise unknown(posted.child)
        if self._complete:
            return False
        self._posted[posted.child] = posted.octets
        self._complete = len(self._posted) == len(self.children)
        return self._complete

    def params(self) -> bytes:
        """P's kv_transfer_params, of all that was posted."""
        first = self._posted[self.children[0]]
        if len(self.children) == 1:
            return first
        batch = b", ".join(b"%b: %b" % (as_json(child), self._posted[child]) for child in self.children)
        return Body(first).edited({"batch_kv_transfer_params": b"{%b}" % batch})


def posted(octets: bytes) -> Posted:
    """A callback's body. Raises Refusal: 400 for what is none, 404 for an id that cannot be of ours."""
    body = Body(octets)
    name = body.value("request_id")
    if not isinstance(name, str):
        raise _bad("request_id", "a string")
    if body.value("do_remote_decode") is not True:
        raise _bad("do_remote_decode", "true")
    if not isinstance(body.value("remote_block_ids"), list):
        raise _bad("remote_block_ids", "a list")
    host, port = body.value("remote_host"), body.value("remote_port")
    if not isinstance(host, str) or not host:
        raise _bad("remote_host", "a host")
    if type(port) is not int or not 0 < port < 65536:
        raise _bad("remote_port", "a port")
    found = _ID.fullmatch(name)
    if found is None:
        raise unknown(name)
    return Posted(found[2] or found[3], found[1], octets)


def unknown(name: str) -> Refusal:
    return Refusal("unknown_path", f"request_id: no request {name[:80]!r} waits for its prefill here", param="request_id")


def _bad(name: str, expected: str) -> Refusal:
    return Refusal("bad_request", f"{name}: expected {expected}", param=name)
