"""Which paths are served, in the very form in which they are sent on.

A path is matched as it came, octet for octet, and sent on as it came; nothing is decoded on the way, so there is no form
that the rules do not see and the backend does. Whatever a backend might normalise into another path (dot segments,
coded slashes, empty segments, backslashes, path parameters on dots) is refused instead.

`paths.allow` adds to the table, `paths.deny` takes from it and wins. An entry that ends in `/` stands for all below it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from gateway.core.dialects import Dialect, for_path
from gateway.core.head import HOST
from gateway.errors import Refusal

# vLLM 0.32's inference routes (vllm/entrypoints: openai, pooling, sagemaker, serve/tokenize), not its management routes.
INFERENCE = (
    "/v1/",
    "/tokenize",
    "/detokenize",
    "/pooling",
    "/classify",
    "/score",
    "/rerank",
    "/v2/rerank",
    "/v2/embed",
    "/invocations",
    "/generative_scoring",
    "/inference/v1/generate",
    "/ping",
    "/version",
)
# Served below /v1/, yet management: adapters are the operator's to load (vllm/entrypoints/serve/lora).
MANAGEMENT = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")

# Where those who look for them here are to ask. vLLM Ascend's proxy has /instances and /healthcheck on its one port.
ADMIN = frozenset(("/metrics", "/livez", "/readyz", "/healthcheck", "/instances/add", "/instances/remove"))

# Routes whose body an engine reads as JSON, whatever its Content-Type says. All others are looked into only where they
# call themselves JSON: an upload of audio, say, is nobody's business here.
JSON_PATHS = frozenset(
    b"/v1/chat/completions /v1/completions /v1/responses /v1/messages /v1/messages/count_tokens /v1/embeddings /v1/score "
    b"/v1/rerank /v2/rerank /v2/embed /tokenize /detokenize /pooling /classify /score /rerank /invocations "
    b"/generative_scoring /inference/v1/generate".split()
)

_CODED = re.compile(rb"%([0-9A-Fa-f]{2})?")
_PARAMETERS = re.compile(rb";[^/]*")
_UNRESERVED = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_~")  # but for the dot: see below
_LOOPBACK = b"/loadtest/"


def split_target(target: bytes) -> tuple[bytes, bytes]:
    """The target in origin form, and its path. Raises Refusal.

    An absolute form is what a client sends to a proxy; the backend is chosen from the configuration all the same (RFC
    9112 section 3.2.2). A fragment is no part of a target.
    """
    if not target.startswith(b"/"):
        scheme, colon, rest = target.partition(b"://")
        if not colon or scheme.lower() not in (b"http", b"https"):
            raise Refusal("bad_request", "the request target is neither a path nor an http URL")
        host, slash, path = rest.partition(b"/")
        if not host or not HOST.fullmatch(host):
            raise Refusal("bad_request", "the request target's authority is no host and port")
        target = slash + path if slash else b"/"
    if b"#" in target:
        raise Refusal("bad_request", "a fragment is no part of a request target")
    return target, target.partition(b"?")[0]


def authority(target: bytes) -> bytes | None:
    """The authority of an absolute-form target, which outranks Host."""
    if target.startswith(b"/"):
        return None
    return target.partition(b"://")[2].partition(b"/")[0]


def check_path(path: bytes) -> None:
    """Raises Refusal for a path that a backend might read as another one."""
    if b"//" in path or b"\\" in path:
        raise Refusal("bad_request", "the path has an empty segment or a backslash")
    if b"%" not in path and b"/." not in path and b";" not in path:
        return
    for match in _CODED.finditer(path):
        digits = match[1]
        if digits is None:
            raise Refusal("bad_request", "the path has a % that no two hexadecimal digits follow")
        octet = int(digits, 16)
        if octet < 0x20 or octet == 0x7F or octet in b"/\\":
            raise Refusal("bad_request", "the path has a coded slash, backslash or control octet")
        if octet in _UNRESERVED:
            raise Refusal("bad_request", "the path codes a character that needs no coding (RFC 3986 section 2.3)")
    for segment in path.split(b"/"):
        plain = _CODED.sub(lambda m: bytes([int(m[1], 16)]), segment.partition(b";")[0])
        name = plain.partition(b";")[0]
        if segment and not name:
            raise Refusal("bad_request", "the path has a segment of nothing but parameters")
        if name in (b".", b".."):
            raise Refusal("bad_request", "the path has a dot segment")


class Route(NamedTuple):
    """What a request target means."""

    target: bytes  # as it is sent on
    path: bytes
    text: str  # the path, for people
    dialect: Dialect | None
    json: bool  # an engine reads a body sent there as JSON, whatever its Content-Type
    authority: bytes | None = None  # of an absolute-form target, which outranks Host
    loopback: bool = False  # to the synthetic upstream, by /loadtest


class Paths:
    """The table of paths."""

    def __init__(self, allow: Iterable[str] = (), deny: Iterable[str] = (), loadtest: bool = False):
        self._loadtest = loadtest
        allow, deny = tuple(allow), tuple(deny)
        allowed = (*INFERENCE, *allow)
        denied = (*(p for p in MANAGEMENT if p not in allow), *deny)
        self._exact = frozenset(p.encode() for p in allowed if not p.endswith("/"))
        self._below = tuple(p.encode() for p in allowed if p.endswith("/"))
        self._denied = frozenset(p.encode() for p in denied if not p.endswith("/"))
        self._denied_below = tuple(p.encode() for p in denied if p.endswith("/"))
        # the routes that nearly every request takes
        self._known = {path: self._judge(path) for path in JSON_PATHS if self.served(path)}

    def served(self, path: bytes) -> bool:
        bare = _PARAMETERS.sub(b"", path) if b";" in path else path  # a backend may route without them
        if bare in self._denied or bare.rstrip(b"/") in self._denied or bare.startswith(self._denied_below):
            return False
        return path in self._exact or path.startswith(self._below)

    def route(self, target: bytes) -> Route:
        """Raises Refusal: 400 or 404."""
        return self._known.get(target) or self._judge(target)

    def _judge(self, given: bytes) -> Route:
        target, path = split_target(given)
        loopback = self._loadtest and path.startswith(_LOOPBACK)
        if loopback:
            cut = len(_LOOPBACK) - 1
            target, path = target[cut:], path[cut:]
        check_path(path)
        text = path.decode("latin-1")
        if not self.served(path):
            admin = text in ADMIN or text.startswith("/-/")
            where = ": it is on the admin listener (admin.listen, --admin-port)" if admin else " (paths.allow)"
            raise Refusal("unknown_path", f"{text[:200]} is not served here{where}")
        return Route(target, path, text, for_path(text), path in JSON_PATHS, authority(given), loopback)
