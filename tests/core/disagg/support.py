"""Requests and engines for the connectors' tests."""

from __future__ import annotations

import json
from typing import Any

from gateway.core.disagg.asked import Asked
from gateway.core.disagg.base import Engine, Leg, Pair

CHAT, COMPLETIONS = b"/v1/chat/completions", b"/v1/completions"
RESPONSES, MESSAGES, GENERATE = b"/v1/responses", b"/v1/messages", b"/inference/v1/generate"
ATTEMPT = "0123456789abcdef0123456789abcdef"
P = Engine("p1", "10.0.0.1", 8000, kv_port=14579, engine_ids={0: "e-0", 1: "e-1"}, dp_size=2, tp_size=4)
D = Engine("d1", "10.0.0.2", 8000, kv_port=14580, dp_size=2, tp_size=4)
PAIR = Pair(ATTEMPT, P, D, room=2**63 - 5, rank=1, callback="http://10.0.0.9:8000/v1/metaserver")
MESSAGE = {"role": "user", "content": "Hello, who are you?"}


def ask(path: bytes = CHAT, body: bytes | None = None, **members: Any) -> Asked:
    """A request on `path`: these octets, or a usual one with these members."""
    if body is None:
        prompt: dict[str, Any]
        if path in (CHAT, MESSAGES):
            prompt = {"messages": [MESSAGE]}
        elif path == RESPONSES:
            prompt = {"input": "Hello"}
        elif path == GENERATE:
            prompt = {"token_ids": [1, 2, 3]}
        else:
            prompt = {"prompt": "Hello"}
        body = json.dumps({"model": "m", **prompt, **members}).encode()
    return Asked(path, body)


def said(leg: Leg | None) -> dict[str, Any]:
    """A leg's body. No member of it is there twice."""
    assert leg is not None

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({key for key, _ in pairs}) == len(pairs), pairs
        return dict(pairs)

    found = json.loads(leg.body, object_pairs_hook=once)
    assert isinstance(found, dict)
    return found
