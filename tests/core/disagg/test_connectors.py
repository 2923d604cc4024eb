"""Each connector's two bodies, ids and fields, as pd.md section 5 shows them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from gateway.core.disagg import CONNECTORS, REFUSED, connector
from gateway.core.disagg.asked import OWNED, Asked
from gateway.core.disagg.base import OWNED_FIELDS, Handoff, HandoffMissing, Leg, Order, Pair, Release, Rules, missing
from gateway.core.disagg.nixl_bidirectional import TTL, Conversations, NixlBidirectional
from gateway.core.disagg.sglang import ROOMS, rooms
from gateway.core.disagg.sidecar import prefillers
from gateway.core.disagg.signs import Sign, sign, silent
from gateway.errors import Refusal
from tests.core.disagg.support import ATTEMPT, CHAT, COMPLETIONS, PAIR, P, ask, said

UUID = "01234567-89ab-cdef-0123-456789abcdef"
MORIIO = PAIR._replace(
    prefill=PAIR.prefill._replace(handshake_port=6301, notify_port=61005),
    decode=PAIR.decode._replace(handshake_port=6302, notify_port=61006),
)
MORIIO_ID = (
    f"___prefill_addr_host:10.0.0.1,handshake:6301,notify:61005___decode_addr_host:10.0.0.2,handshake:6302,notify:61006_{ATTEMPT}"
).encode()


def kv(leg: Leg) -> Any:
    return said(leg)["kv_transfer_params"]


def answered(**params: Any) -> bytes:
    return json.dumps(
        {"choices": [{"finish_reason": "length"}], "usage": {"prompt_tokens": 9}, "kv_transfer_params": params}
    ).encode()


def rank(leg: Leg) -> bytes | None:
    return {name.lower(): value for name, value in leg.fields}.get(b"x-data-parallel-rank")


# order, hold, release: what the legs are sent by
TABLE = {
    "nixl": (Order.SERIAL, 30, Release.ALWAYS),
    "nixl_push": (Order.SERIAL, 30, Release.ALWAYS),
    "nixl_bidirectional": (Order.SERIAL, 30, Release.ALWAYS),
    "mooncake": (Order.CONCURRENT, 480, Release.ALWAYS),
    "mooncake_ascend": (Order.SERIAL, 480, Release.ALWAYS),
    "layerwise": (Order.DECODE_FIRST, 0, Release.NEVER),
    "p2p_nccl": (Order.SERIAL, 480, Release.ALWAYS),
    "moriio_read": (Order.SERIAL, 30, Release.ALWAYS),
    "moriio_write": (Order.CONCURRENT, 30, Release.NEVER),
    "lmcache": (Order.SERIAL, 0, Release.NEVER),
    "shared_storage": (Order.PROBE, 0, Release.NEVER),
    "offloading_p2p": (Order.SERIAL, 0, Release.NEVER),
    "sglang": (Order.CONCURRENT, 300, Release.NEVER),
    "sidecar": (Order.SIDECAR, 0, Release.NEVER),
}


def test_the_table() -> None:
    assert {name: (each.order, each.hold, each.release_policy) for name, each in CONNECTORS.items()} == TABLE
    assert not REFUSED.keys() & CONNECTORS.keys()


@pytest.mark.parametrize("name", CONNECTORS)
def test_what_is_to_be_refused(name: str) -> None:
    """The same params under the same id, in a request that no serving layer takes, whichever of its checks are off."""
    pair = MORIIO._replace(prefill=MORIIO.prefill._replace(engine_ids={MORIIO.rank: "engine"}))
    handoff = Handoff(b'{"do_remote_prefill":true,"remote_port":1}')
    leg = connector(name).reject(ask(max_tokens=9, stream=True), pair, handoff)
    assert (leg is not None) is (name in ("nixl", "nixl_push", "nixl_bidirectional", "mooncake"))
    if leg is not None:
        body, released = said(leg), connector(name).release(ask(max_tokens=9), pair, handoff)
        assert released is not None and released.request_id == leg.request_id
        assert body["kv_transfer_params"] == said(released)["kv_transfer_params"]
        assert (leg.path, body["stream"], body["use_beam_search"]) == (b"/v1/completions", True, True)
        assert body["model"] not in ("m", "") and pair.attempt in body["model"]


@pytest.mark.parametrize("name", CONNECTORS)
def test_a_release_leg_is_there_where_the_policy_wants_one(name: str) -> None:
    handoff = Handoff(b'{"remote_dp_rank":1}')
    leg = connector(name).release(ask(max_tokens=9, stream=True), MORIIO, handoff)
    assert (leg is not None) is (CONNECTORS[name].release_policy is not Release.NEVER)
    if leg is not None:
        body = said(leg)
        assert (body["stream"], body["max_tokens"], body["max_completion_tokens"], body["n"]) == (False, 1, 1, 1)
        assert ("kv_transfer_params" in body) is (name != "p2p_nccl") and "min_tokens" not in body


@pytest.mark.parametrize("name", CONNECTORS)
def test_nothing_of_a_clients_own_passes(name: str) -> None:
    """Case 10: whatever the connector, engines see its members' values, never the client's."""
    evil = dict.fromkeys(OWNED, "EVIL")
    asked = ask(**evil, vllm_xargs={"kv_transfer_params": "EVIL", "mine": 1})
    of = connector(name)
    for leg in legs(name, asked):
        assert b"EVIL" not in leg.body
        assert said(leg)["vllm_xargs"] == {"mine": 1}
    assert b"EVIL" not in of.alone(asked, MORIIO).body


def legs(name: str, asked: Any) -> list[Leg]:
    of = connector(name)
    handoff = Handoff(b'{"remote_dp_rank":1}' if of.order is Order.SERIAL else b"")
    found = [of.decode(asked, MORIIO, handoff)]
    if of.order is Order.PROBE:
        found.append(of.probe(asked, MORIIO))
    if of.order is not Order.SIDECAR:
        found.append(of.prefill(asked, MORIIO, b'{"do_remote_decode": true}'))
    return found


@pytest.mark.parametrize("name", CONNECTORS)
def test_one_id_an_attempt(name: str) -> None:
    """Equal on both legs, and another attempt's is another (6.10). A client's own never is one."""
    asked = ask(request_id="client")
    ids = {leg.request_id for leg in legs(name, asked)}
    assert len(ids) == 1
    assert ATTEMPT.encode() in ids.pop()
    for leg in legs(name, asked):
        assert all(field.lower() in OWNED_FIELDS for field, _ in leg.fields)


@pytest.mark.parametrize("name", [name for name in CONNECTORS if name != "sidecar"])
def test_another_decode_takes_over_only_where_prefill_was_told_of_none(name: str) -> None:
    """One that takes no connection may be replaced after prefill was asked: not where that has sent KV to its address."""
    of, asked = connector(name), ask(max_tokens=9)
    other = MORIIO._replace(decode=MORIIO.decode._replace(name="d2", host="10.0.0.9", kv_host=None))
    assert of.reusable is (of.prefill(asked, MORIIO, b"{}") == of.prefill(asked, other, b"{}"))


@pytest.mark.parametrize("name", [name for name in CONNECTORS if name not in ("sglang", "sidecar")])
@pytest.mark.parametrize(("given", "least"), [({"max_tokens": 500, "min_tokens": 20}, True), ({}, False)])
def test_limits(name: str, given: dict[str, int], least: bool) -> None:
    """Cases 1 and 3: P gets 1, and a min_tokens of 1 or none; D keeps the client's, or its absence."""
    asked = ask(**given)
    of = connector(name)
    prefill = said(of.prefill(asked, MORIIO, b"{}"))
    assert (prefill["max_tokens"], prefill["max_completion_tokens"], prefill["stream"]) == (1, 1, False)
    assert prefill.get("min_tokens") == (1 if name in ("mooncake", "mooncake_ascend", "layerwise") else None)
    decode = said(of.decode(asked, MORIIO, Handoff(b'{"x":1}')))
    assert {key: decode[key] for key in decode if "tokens" in key} == given


def test_nixl_push() -> None:
    """P's coordinates and no more."""
    of = connector("nixl_push")
    full = {
        "do_remote_prefill": True,
        "remote_block_ids": [[1]],
        "remote_engine_id": "e",
        "remote_request_id": "r",
        "remote_host": "10.0.0.7",
        "remote_port": 5600,
        "tp_size": 4,
        "transfer_mode": "push",
    }
    handoff = of.take(ask(), PAIR, answered(**full))
    expected = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "e",
        "remote_request_id": "r",
        "remote_host": "10.0.0.7",
        "remote_port": 5600,
        "tp_size": 4,
    }
    assert kv(of.decode(ask(), PAIR, handoff)) == expected
    del full["remote_engine_id"]
    with pytest.raises(HandoffMissing, match="remote_engine_id"):
        of.take(ask(), PAIR, answered(**full))


def test_mooncake() -> None:
    of, asked = connector("mooncake"), ask(stop=["x"], stream=True)
    prefill, decode = of.prefill(asked, PAIR), of.decode(asked, PAIR)
    assert kv(prefill) == {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": f"xfer-{ATTEMPT}"}
    assert (said(prefill)["min_tokens"], "stop" in said(prefill), rank(prefill)) == (1, False, b"1")
    assert kv(decode) == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_id": f"xfer-{ATTEMPT}",
        "remote_bootstrap_addr": "http://10.0.0.1:8998",
        "remote_engine_id": "e-1",
    }
    assert said(decode)["stop"] == ["x"] and rank(decode) is None
    with pytest.raises(LookupError, match="rank 7"):
        of.decode(asked, PAIR._replace(rank=7))


def test_mooncake_learns() -> None:
    of = connector("mooncake")
    assert of.ask(P) == "http://10.0.0.1:8998/query"
    assert of.ask(P._replace(host="fd00::1")) == "http://[fd00::1]:8998/query"
    assert of.learn(b'{"0":{"engine_id":"a","worker_addr":{}},"1":{"engine_id":"b"}}') == {0: "a", 1: "b"}
    for wrong in (b"{}", b"[]", b"", b'{"0":{}}', b'{"x":{"engine_id":"a"}}', b'{"0":{"engine_id":""}}'):
        with pytest.raises(ValueError, match="engine_id"):
            of.learn(wrong)


def test_mooncake_ascend_hands_over_all() -> None:
    of = connector("mooncake_ascend")
    given = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [1],
        "remote_engine_id": "e",
        "remote_request_id": "r",
        "remote_host": "h",
        "remote_port": 1,
        "remote_pcp_size": 1,
        "remote_dcp_size": 1,
        "remote_ptp_size": 2,
        "last_token_id": 5,
        "remote_multi_nodes_meta_mapping": {},
        "num_prompt_blocks": 3,
    }
    assert kv(of.decode(ask(), PAIR, of.take(ask(), PAIR, answered(**given)))) == given


def test_p2p_nccl() -> None:
    """Case 59."""
    of, asked = connector("p2p_nccl"), ask(max_completion_tokens=20)
    prefill, decode = of.prefill(asked, PAIR), of.decode(asked, PAIR)
    assert (
        prefill.request_id
        == decode.request_id
        == (b"___prefill_addr_10.0.0.1:14579___decode_addr_10.0.0.2:14580_" + ATTEMPT.encode())
    )
    assert re.search(rb"___prefill_addr_(.*):(\d+)___", prefill.request_id) and re.search(
        rb"___decode_addr_(.*):(\d+)", prefill.request_id
    )
    assert "kv_transfer_params" not in said(prefill) | said(decode)
    assert said(prefill)["max_completion_tokens"] == said(prefill)["max_tokens"] == 1
    assert decode.body == asked.body.octets
    with pytest.raises(LookupError, match="d1: kv_port"):
        of.decode(asked, PAIR._replace(decode=PAIR.decode._replace(kv_port=None)))
    assert missing(P._replace(kv_port=None), CONNECTORS["p2p_nccl"], "prefill") == ["kv_port"]
    assert not missing(P, CONNECTORS["p2p_nccl"], "prefill")


def test_moriio_read() -> None:
    """Case 60: one rank, D's params are P's own with its place."""
    of, asked = connector("moriio_read"), ask(max_tokens=7)
    prefill = of.prefill(asked, MORIIO)
    assert kv(prefill) == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "transfer_id": f"tx-{ATTEMPT}",
        "remote_host": "10.0.0.2",
        "remote_port": 14580,
        "remote_handshake_port": 6302,
        "remote_notify_port": 61006,
        "remote_dp_size": 2,
        "remote_tp_size": 4,
    }
    assert (prefill.request_id, rank(prefill)) == (MORIIO_ID, b"1")
    handoff = of.take(
        asked, MORIIO, answered(remote_engine_id="e", remote_block_ids=[3], transfer_id="tx-z", remote_dp_rank=0)
    )
    decode = of.decode(asked, MORIIO, handoff)
    assert kv(decode) == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": "e",
        "remote_block_ids": [3],
        "transfer_id": "tx-z",
        "remote_dp_rank": 0,
        "remote_host": "10.0.0.1",
        "remote_port": 14579,
        "remote_handshake_port": 6301,
        "remote_notify_port": 61005,
        "remote_dp_size": 2,
        "remote_tp_size": 4,
    }
    assert (decode.request_id, rank(decode), said(decode)["max_tokens"]) == (MORIIO_ID, b"0", 7)


@pytest.mark.parametrize("bad", [2, -1, "0", 0.0, True])
@pytest.mark.parametrize("name", ["moriio_read", "moriio_write"])
def test_moriio_rank_is_checked(name: str, bad: object) -> None:
    answer = answered(remote_engine_id="e", remote_block_ids=[3], transfer_id="tx-z", remote_dp_rank=bad)
    with pytest.raises(HandoffMissing, match="remote_dp_rank"):
        connector(name).take(ask(), MORIIO, answer)


def test_moriio_write() -> None:
    of, asked = connector("moriio_write"), ask(max_tokens=7)
    prefill, decode = of.prefill(asked, MORIIO), of.decode(asked, MORIIO)
    rest = {
        "remote_dp_rank": 1,
        "remote_dp_rank_override": True,
        "transfer_id": f"tx-{ATTEMPT}",
        "tp_size": 4,
        "remote_dp_size": 2,
        "remote_tp_size": 4,
    }
    assert kv(prefill) == rest | {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": "10.0.0.2",
        "remote_port": 14580,
        "remote_handshake_port": 6302,
        "remote_notify_port": 61006,
    }
    assert kv(decode) == rest | {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": "10.0.0.1:6301",
        "remote_block_ids": [],
        "remote_host": "10.0.0.1",
        "remote_port": 14579,
        "remote_handshake_port": 6301,
        "remote_notify_port": 61005,
    }
    assert rank(prefill) == rank(decode) == b"1"
    assert said(decode)["max_tokens"] == 7
    assert of.take(asked, MORIIO, answered(remote_dp_rank=1)) == Handoff()
    assert of.take(asked, MORIIO, b'{"choices": []}') == Handoff()
    with pytest.raises(HandoffMissing, match="rank 0, and not on 1"):
        of.take(asked, MORIIO, answered(remote_dp_rank=0))


def test_lmcache() -> None:
    of, asked = connector("lmcache"), ask(stream=True, max_tokens=5)
    assert "kv_transfer_params" not in said(of.prefill(asked, PAIR))
    assert of.take(asked, PAIR, b'{"choices": []}') == Handoff()
    assert of.decode(asked, PAIR).body == asked.body.octets


def test_shared_storage() -> None:
    of, asked = connector("shared_storage", Rules(cache_threshold=0.5)), ask(stream=True, max_tokens=5)
    assert said(of.probe(asked, PAIR)) == said(of.alone(asked, PAIR)) | {"cache_hit_threshold": 0.5}
    assert said(of.prefill(asked, PAIR))["cache_hit_threshold"] == said(of.decode(asked, PAIR))["cache_hit_threshold"] == 0
    assert of.sign(b'{"choices":[{"index":0,"delta":{},"finish_reason":"cache_threshold"}]}', 200, asked) is Sign.MISSED


def test_offloading_p2p() -> None:
    of, asked = connector("offloading_p2p"), ask()
    assert kv(of.prefill(asked, PAIR)) == {"remote_decoder": {"kv_request_id": UUID}}
    assert kv(of.decode(asked, PAIR)) == {
        "remote_prefiller": {"kv_request_id": UUID, "remote_host": "10.0.0.1", "remote_port": 14579}
    }


def test_sglang() -> None:
    """The same body to both, and integers to 2^63-1 whole."""
    pair = PAIR._replace(prefill=P._replace(dp_size=1), rank=0)
    of, asked = connector("sglang"), ask(stream=True, max_tokens=50)
    prefill, decode = of.prefill(asked, pair), of.decode(asked, pair)
    assert prefill.body == decode.body
    assert prefill.body == asked.body.octets[:-1] + (
        b', "bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": %d}' % (2**63 - 5)
    )
    none = pair._replace(prefill=pair.prefill._replace(bootstrap_port=None))
    assert said(of.prefill(asked, none))["bootstrap_port"] is None


@pytest.mark.parametrize(
    ("members", "count"),
    [
        ({"prompt": ["a", "b", "c"]}, 3),
        ({"prompt": ["a"]}, 1),
        ({"prompt": [[1], [2]], "n": 2}, 4),
        ({"prompt": "a", "n": 3}, 3),
    ],
)
def test_sglang_batches(members: dict[str, Any], count: int) -> None:
    """Case 55: arrays of equal length, every room another."""
    body = said(connector("sglang").prefill(ask(COMPLETIONS, **members), PAIR))
    assert body["bootstrap_host"] == ["10.0.0.1"] * count and body["bootstrap_port"] == [8998] * count
    assert len(set(body["bootstrap_room"])) == count == len(body["bootstrap_room"])


def test_sglang_batches_are_bounded() -> None:
    """A number in a request makes no list of its length here."""
    for members in ({"prompt": "a", "n": 2**62}, {"prompt": ["a"] * 100, "n": 100}):
        with pytest.raises(Refusal, match="at most 4096"):
            connector("sglang").judge(ask(COMPLETIONS, **members))
        assert len(said(connector("sglang").prefill(ask(COMPLETIONS, **members), PAIR))["bootstrap_room"]) == 4096
    assert said(connector("sglang").prefill(ask(n=-3), PAIR))["bootstrap_host"] == "10.0.0.1"


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("room", [0, 1, 12345, 2**62, 2**63 - 1, 2**63 - 2])
def test_rooms(ranks: int, room: int) -> None:
    """Whatever the random bits: in range, all different, all on the pair's rank."""
    pair = PAIR._replace(prefill=P._replace(dp_size=ranks), rank=ranks - 1, room=room)
    found = rooms(pair, 5)
    assert len(set(found)) == 5
    assert all(0 <= each < ROOMS and each % ranks == ranks - 1 for each in found)


def test_sglang_rank() -> None:
    body = said(connector("sglang").decode(ask(), PAIR))
    assert body["disagg_prefill_dp_rank"] == 1 and body["bootstrap_room"] % 2 == 1


def test_sidecar() -> None:
    of, asked = connector("sidecar"), ask(stream=True)
    leg = of.decode(asked, PAIR)
    assert (leg.body, leg.fields) == (asked.body.octets, ((b"x-prefiller-host-port", b"10.0.0.1:8000"),))
    v6 = PAIR._replace(prefill=P._replace(host="fd00::1"))
    assert of.decode(asked, v6).fields == ((b"x-prefiller-host-port", b"[fd00::1]:8000"),)


ALLOWED = {("10.0.0.1", 8000), ("pod.svc", 80), ("fd00::1", 8000)}


@pytest.mark.parametrize(
    ("field", "found"),
    [
        (b"10.0.0.1:8000", [("10.0.0.1", 8000)]),
        (b" POD.svc:80 ,http://10.0.0.1:8000", [("pod.svc", 80), ("10.0.0.1", 8000)]),
        (b"[fd00:0::1]:8000", [("fd00::1", 8000)]),
        (b"10.0.0.2:8000", 403),
        (b"10.0.0.1:8001", 403),
        (b"169.254.169.254:80", 403),
        (b"10.0.0.1:8000,evil:80", 403),
        (b"", 400),
        (b"10.0.0.1", 400),
        (b"10.0.0.1:0", 400),
        (b"10.0.0.1:99999", 400),
        (b"fd00::1:8000", 400),
        (b"[10.0.0.1]:8000", 400),
        (b"user@10.0.0.1:8000", 400),
        (b"10.0.0.1:8000/path", 400),
        (b",".join([b"10.0.0.1:8000"] * 65), 400),
    ],
)
def test_a_sidecars_field(field: bytes, found: object) -> None:
    """Only prefill backends that the operator named may be asked."""
    if isinstance(found, list):
        assert prefillers(field, ALLOWED) == found
    else:
        with pytest.raises(Refusal) as refused:
            prefillers(field, ALLOWED)
        assert refused.value.ruling.status == found


# nixl_bidirectional ---------------------------------------------------------------------------------------------------

D_PARAMS = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "d",
    "remote_request_id": "r",
    "remote_host": "10.0.0.2",
    "remote_port": 5601,
    "remote_block_ids": [[9]],
}


def test_the_next_turn_fetches_from_decode() -> None:
    of = NixlBidirectional()
    asked = ask(conversation_id="c1")
    pair = PAIR._replace(conversation=of.conversation(asked), now=100.0)
    assert pair.conversation == "c1"
    first = said(of.prefill(asked, pair))
    assert first["kv_transfer_params"]["remote_engine_id"] is None
    assert of.answered(pair, answered(**D_PARAMS), 110.0)
    for leg in (of.decode(asked, pair, Handoff(b"{}")), of.alone(asked, pair)):
        assert "conversation_id" not in said(leg)
    turn = of.prefill(asked, pair._replace(now=110.0 + TTL))
    assert kv(turn) == D_PARAMS | {"do_remote_decode": True, "do_remote_prefill": False}
    assert "conversation_id" not in said(turn) | first
    again = of.prefill(asked, pair._replace(now=111.0))  # one use only
    assert kv(again)["remote_engine_id"] is None


def test_what_is_kept_ends() -> None:
    of = NixlBidirectional()
    asked, pair = ask(), PAIR._replace(conversation="c", now=0.0)
    assert of.answered(pair, answered(**D_PARAMS), 0.0)
    assert kv(of.prefill(asked, pair._replace(now=TTL + 0.1)))["remote_engine_id"] is None
    for nothing in (b'{"kv_transfer_params": null}', b"not json", answered(remote_host="h"), b'{"choices":[]}'):
        assert not of.answered(pair, nothing, 0.0)
    assert not of.answered(PAIR, answered(**D_PARAMS), 0.0)  # no conversation


def test_the_store_is_bounded() -> None:
    kept = Conversations(ttl=10, most=3)
    for i in range(5):
        kept.put(str(i), b"%d" % i, float(i))
    assert len(kept) == 3 and kept.take("1", 5.0) is None and kept.take("2", 5.0) == b"2"
    kept.put("9", b"9", 100.0)
    assert len(kept) == 1  # the stale ones went with it


def test_the_store_is_bounded_in_octets() -> None:
    """Block ids and conversations' names are as long as engines and clients like."""
    kept = Conversations(octets=100)
    for i in range(5):
        kept.put(str(i), b"x" * 39, 0.0)
    assert len(kept) == 2 and kept.take("2", 0.0) is None and kept.take("3", 0.0) is not None
    kept.put("4", b"x" * 59, 0.0)  # in place of the other one
    kept.put("5", b"x" * 39, 0.0)
    assert len(kept) == 2
    kept.put("n" * 100, b"x", 0.0)
    assert not len(kept)
    kept.put("5", b"x" * 99, 0.0)
    assert kept.take("5", 0.0) is not None


def test_what_decode_says_of_its_blocks_and_cannot_be_changed_is_not_kept() -> None:
    """The next turn would be refused for it, as if its client had sent it."""
    of = NixlBidirectional()
    asked, pair = ask(), PAIR._replace(conversation="c", now=0.0)
    assert not of.answered(pair, answered(**D_PARAMS, **{f"m{i}": 1 for i in range(20_000)}), 0.0)
    assert kv(of.prefill(asked, pair))["remote_engine_id"] is None


# what D's answer begins with ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "status", "found"),
    [
        (b'{"choices":[{"delta":{"content":"a"},"finish_reason":null}]}', 200, Sign.NOTHING),
        (b'{"choices":[{"delta":{"content":"\\"error\\" recomputed"}}]}', 200, Sign.NOTHING),
        (b'{"error":{"message":"Internal server error","type":"InternalServerError","code":500}}', 200, Sign.FAILED),
        (b'{"error":{"message":"Internal server error","type":"InternalServerError","code":500}}', 500, Sign.FAILED),
        (b'{"error":{"message":"too long","type":"BadRequestError","code":400}}', 200, Sign.NOTHING),
        (b'{"error":{"message":"too long","type":"BadRequestError","code":400}}', 400, Sign.NOTHING),
        (b'{"choices":[{"text":"","finish_reason":"error"}]}', 200, Sign.FAILED),
        (b'{"type":"error","error":{"type":"api_error","message":"Internal server error"}}', 200, Sign.FAILED),
        (b'{"type":"response.failed","response":{"status":"failed","error":{"code":"server_error"}}}', 200, Sign.FAILED),
        (b'{"choices":[{"index":0,"delta":{},"finish_reason":"stop","stop_reason":"recomputed"}]}', 200, Sign.RECOMPUTED),
        (b'{"error": "text"}', 200, Sign.NOTHING),
        (b'{"object":"error","message":"x","type":"InternalServerError","param":null,"code":500}', 200, Sign.FAILED),
        (b'{"object":"error","message":"x","type":"BadRequestError","param":null,"code":400}', 200, Sign.NOTHING),
        (b"[DONE]", 200, Sign.NOTHING),
        (b'"error"', 200, Sign.NOTHING),
        (b"", 502, Sign.NOTHING),
    ],
)
def test_signs(data: bytes, status: int, found: Sign) -> None:
    assert sign(data, status) is found


# encoders -------------------------------------------------------------------------------------------------------------

IMAGE = {"type": "image_url", "image_url": {"url": "http://x/a.png"}}
SOUND = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
TALK = [{"role": "user", "content": [{"type": "text", "text": "what?"}, IMAGE, SOUND, IMAGE]}, {"role": "user", "content": "b"}]


def test_encoders() -> None:
    of = connector("nixl")
    asked = ask(CHAT, messages=TALK, stream=True, mm_processor_kwargs={"x": 1}, temperature=0)
    pair: Pair = PAIR._replace(encoders=(P,))
    found = of.encode(asked, pair)
    assert [said(leg)["messages"] for leg in found] == [[{"role": "user", "content": [each]}] for each in (IMAGE, SOUND)]
    assert said(found[0]).keys() == {
        "model",
        "messages",
        "stream",
        "max_tokens",
        "max_completion_tokens",
        "mm_processor_kwargs",
    }
    assert [leg.request_id for leg in found] == [f"{ATTEMPT}:{i}:012345".encode() for i in range(2)]
    asked = of.gathered(
        asked, [b'{"ec_transfer_params": {"h1": {"n": 12345678901234567890}}}', b'{"ec_transfer_params": {"h2": 2}}']
    )
    assert said(of.prefill(asked, pair))["ec_transfer_params"] == {"h1": {"n": 12345678901234567890}, "h2": 2}
    assert said(of.alone(asked, pair))["ec_transfer_params"] == {"h1": {"n": 12345678901234567890}, "h2": 2}
    assert "ec_transfer_params" not in said(of.decode(asked, pair, Handoff(b"{}")))
    released = of.release(asked, pair, Handoff(b"{}"))  # of D, which did not get it either
    assert released is not None and "ec_transfer_params" not in said(released)
    of = connector("shared_storage")
    assert "ec_transfer_params" in said(of.probe(asked, pair))  # D may go ahead, and read what is left of the prompt
    assert "ec_transfer_params" not in said(of.decode(asked, pair))
    for name in ("sglang", "mooncake", "lmcache"):
        assert "ec_transfer_params" in said(connector(name).prefill(asked, pair))


def test_encoders_have_nothing_to_do() -> None:
    of = connector("nixl")
    assert not of.encode(ask(messages=TALK), PAIR)  # there are none
    assert not of.encode(ask(), PAIR._replace(encoders=(P,)))
    assert not of.encode(ask(COMPLETIONS), PAIR._replace(encoders=(P,)))
    asked = of.gathered(ask(), [b"{}", b'{"ec_transfer_params": null}'])
    assert "ec_transfer_params" not in said(of.prefill(asked, PAIR))
    with pytest.raises(HandoffMissing, match="encoder"):
        of.encoded("e", b"oops")


# what P's answer is, whose status is 200 ------------------------------------------------------------------------------

ERROR = {"message": "boom", "type": "InternalServerError", "code": 500}
FAULTS: list[tuple[bytes, Any, str]] = [
    (b"/v1/chat/completions", {"error": ERROR}, "is an error (InternalServerError)"),
    (b"/v1/completions", {"object": "error", **ERROR}, "is an error"),
    (b"/v1/completions", {"choices": [{"finish_reason": "length"}, {"finish_reason": "abort"}]}, "was ended by a failure"),
    (b"/v1/responses", {"object": "response", "status": "failed", "error": {"code": "server_error"}}, "is an error"),
    (b"/v1/messages", {"type": "error", "error": {"type": "api_error", "message": "x"}}, "is an error (api_error)"),
    (b"/v1/messages", {"type": "message", "content": [], "stop_reason": None}, "was ended by a failure"),
    (b"/inference/v1/generate", {"choices": [{"finish_reason": "error"}]}, "was ended by a failure (finish_reason error)"),
]


@pytest.mark.parametrize(("path", "answer", "words"), FAULTS)
@pytest.mark.parametrize("name", ["nixl", "lmcache", "p2p_nccl", "mooncake", "sglang"])
def test_an_answer_that_is_none(name: str, path: bytes, answer: Any, words: str) -> None:
    with pytest.raises(HandoffMissing, match=re.escape(words)) as caught:
        connector(name).take(Asked(path, b'{"prompt": "x"}'), PAIR, json.dumps(answer).encode())
    assert not caught.value.holds
    assert bool(caught.value.error) is words.startswith("is an error")


def test_an_answer_of_an_engine_that_was_asked_for_a_stream() -> None:
    """SGLang's, which is read for its failures alone."""
    of, chat, own = connector("sglang"), ask(), Asked(b"/generate", b'{"text": ["a", "b"]}')
    streamed, nothing = b"data: %b\n\ndata: [DONE]", (b"", b"<html>", b": only\n\n")
    good = json.dumps({"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "length"}]}).encode()
    for answer in (streamed % good, good, b": a comment\n\n" + streamed % good, b'[{"text": "a"}, {"text": "b"}]'):
        assert of.take(chat, PAIR, answer) == of.take(own, PAIR, answer) == Handoff()
    aborted = b'{"text": "", "meta_info": {"finish_reason": {"type": "abort", "message": "x", "status_code": 500}}}'
    for answer in (streamed % json.dumps({"error": ERROR}).encode(), aborted, streamed % aborted, *nothing):
        with pytest.raises(HandoffMissing):
            of.take(own, PAIR, answer)


@pytest.mark.parametrize("name", ["nixl", "nixl_push", "mooncake_ascend"])
@pytest.mark.parametrize(
    ("answer", "holds"),
    [
        (answered(remote_host="h"), True),
        (b'{"choices":[{"finish_reason":"abort"}],"kv_transfer_params":{"remote_host":"h"}}', True),
        (b'{"x": NaN, "kv_transfer_params": {"a"}}', True),
        (b'{"kv_transfer_params": { }}', False),
        (b'{"kv_transfer_params": "words"}', False),
        (b'{"kv_transfer_params": null}', False),
        (b"no json", False),
    ],
)
def test_whether_kv_is_kept_by_what_is_of_no_use(name: str, answer: bytes, holds: bool) -> None:
    with pytest.raises(HandoffMissing) as caught:
        connector(name).take(ask(), PAIR, answer)
    assert caught.value.holds is holds


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ({"index": 0, "text": "", "finish_reason": None}, True),
        ({"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}, True),
        ({"index": 0, "delta": {"content": ""}, "finish_reason": "cache_threshold"}, False),
        ({"index": 0, "text": "a"}, False),
        ({"index": 0, "delta": {"reasoning": "a"}}, False),
        ({"index": 0, "delta": {"content": ""}, "token_ids": [1]}, False),
        ("oops", False),
    ],
)
def test_what_brings_nothing(choice: object, wanted: bool) -> None:
    assert silent(json.dumps({"id": "x", "choices": [choice]}).encode()) is wanted
    assert not silent(b"[DONE]")
    assert not silent(b'{"error": {}}')
