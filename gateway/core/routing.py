"""Which paths are served, in the very form in which they are sent on.

A path is matched as it came, octet for octet, and sent on as it came; nothing is decoded on the way, so there is no form
that the rules do not see and the backend does. Whatever a backend might normalise into another path (dot segments,
coded slashes, empty segments, backslashes, path parameters on dots) is refused instead.

`paths.allow` adds to the table, `paths.deny` takes from it and wins. An entry that ends in `/` stands for all below it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

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

_CODED = re.compile(rb"%([0-9A-Fa-f]{2})?")
_LOOPBACK_PREFIX = b"/loadtest/"


def split_target(target: bytes) -> tuple[bytes, bytes]:
    """The target in origin form, and its path. Raises Refusal.

    An absolute form is what a client sends to a proxy; the backend is chosen from the configuration all the same (RFC
    9112 section 3.2.2). A fragment is no part of a target.
    """
    if not target.startswith(b"/"):
        scheme, colon, rest = target.partition(b"://")
        if not colon or scheme.lower() not in (b"http", b"https"):
            raise Refusal("bad_request", "the request target is neither a path nor an http URL")
        _, slash, path = rest.partition(b"/")
        if b"?" in rest.partition(b"/")[0]:
            raise Refusal("bad_request", "the request target has a query but no path")
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
    if b"%" not in path and b"/." not in path:
        return
    for match in _CODED.finditer(path):
        digits = match[1]
        if digits is None:
            raise Refusal("bad_request", "the path has a % that no two hexadecimal digits follow")
        octet = int(digits, 16)
        if octet < 0x20 or octet == 0x7F or octet in b"/\\":
            raise Refusal("bad_request", "the path has a coded slash, backslash or control octet")
    for segment in path.split(b"/"):
        plain = _CODED.sub(lambda m: bytes([int(m[1], 16)]), segment.partition(b";")[0])
        if plain.partition(b";")[0] in (b".", b".."):
            raise Refusal("bad_request", "the path has a dot segment")


class Paths:
    """The table of paths."""

    def __init__(self, allow: Iterable[str] = (), deny: Iterable[str] = ()):
        allowed, denied = (*INFERENCE, *allow), (*MANAGEMENT, *deny)
        self._exact = frozenset(p.encode() for p in allowed if not p.endswith("/"))
        self._below = tuple(p.encode() for p in allowed if p.endswith("/"))
        explicitly = frozenset(p.encode() for p in allow)
        self._denied = frozenset(p.encode() for p in denied if not p.endswith("/")) - explicitly | frozenset(
            p.encode() for p in deny if not p.endswith("/")
        )
        self._denied_below = tuple(p.encode() for p in deny if p.endswith("/"))
        self._known: set[bytes] = set()  # exact paths found to be served; bounded by being taken from the table alone

    def served(self, path: bytes) -> bool:
        if path in self._denied or path.startswith(self._denied_below):
            return False
        return path in self._exact or path.startswith(self._below)
