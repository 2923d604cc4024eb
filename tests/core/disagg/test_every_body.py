"""Whatever a client sends, through every connector: JSON on both legs, one token on P, nothing owned twice, else as it was."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.disagg import CONNECTORS, connector
from gateway.core.disagg.asked import OWNED, Asked
from gateway.core.disagg.base import Handoff, Leg, Order
from tests.core.disagg.support import CHAT, COMPLETIONS, GENERATE, MESSAGES, PAIR, RESPONSES

ENGINES = PAIR._replace(
    prefill=PAIR.prefill._replace(handshake_port=1, notify_port=2), decode=PAIR.decode._replace(handshake_port=3, notify_port=4)
)
NUMBERS = ["max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens", "min_completion_tokens", "n", "best_of"]
OTHERS = [
    "stream_options",
    "logprobs",
    "stop",
    "response_format",
    "guided_json",
    "store",
    "messages",
    "tools",
    "seed",
    'é\\"',
    "metadata",
]
EMBEDDED = ["vllm_xargs", "sampling_params"]

small = st.integers(0, 2**70) | st.none()
odd = st.sampled_from([1e-5, "x", [], {"a": 1.0}, None, True, 2**64])
members = st.lists(
    st.tuples(st.sampled_from(NUMBERS), small)
    | st.tuples(st.sampled_from(OTHERS), odd)
    | st.tuples(st.sampled_from(sorted(OWNED)), odd)
    | st.tuples(st.sampled_from(["stream"]), st.sampled_from([True, False, None, "true", 0]))
    | st.tuples(
        st.sampled_from(EMBEDDED), st.dictionaries(st.sampled_from([*NUMBERS, "kv_transfer_params", "extra_args"]), small)
    ),
    max_size=8,
)


def pairs_of(leg: Leg) -> list[tuple[str, Any]]:
    found = json.loads(leg.body, object_pairs_hook=lambda pairs: pairs)
    return [(key, value) for key, value in found]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(CONNECTORS)), st.sampled_from([CHAT, COMPLETIONS, RESPONSES, MESSAGES, GENERATE]), members)
def test_bodies(name: str, path: bytes, pairs: list[tuple[str, Any]]) -> None:
    octets = ("{" + " ,".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in pairs) + "}").encode()
    asked, of = Asked(path, octets), connector(name)
    decode = pairs_of(of.decode(asked, ENGINES, Handoff(b"{}")))
    own = [(key, value) for key, value in json.loads(octets, object_pairs_hook=lambda p: p) if key not in OWNED]
    embedded = frozenset(EMBEDDED)
    assert [pair for pair in decode if pair[0] not in OWNED | embedded | {"bootstrap_host"}] == [
        pair for pair in own if pair[0] not in embedded
    ]
    owned = [key for key, _ in decode if key in OWNED]
    assert len(owned) == len(set(owned))
    if of.order is Order.SIDECAR:
        return
    prefill = pairs_of(of.prefill(asked, ENGINES, b"{}"))
    keys = [key for key, _ in prefill]
    assert len([key for key in keys if key in OWNED]) == len({key for key in keys if key in OWNED})
    if not of.shapes:
        return
    last = dict(prefill)
    assert last["stream"] is False and keys.count("stream") == 1
    assert not {"stream_options", "best_of", "store", "guided_json"} & set(keys)
    for key in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n"):
        assert keys.count(key) <= 1 and last.get(key, 1) == 1
    if path == CHAT:
        assert last["max_tokens"] == last["max_completion_tokens"] == 1
    if path == GENERATE:
        assert dict(last["sampling_params"])["max_tokens"] == 1
    assert last.get("seed") == dict(own).get("seed")
