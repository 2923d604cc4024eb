"""NIXL, pull: the two bodies as pd.md 5.1 shows them, what P must answer with, and the release leg."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.core.disagg.base import HandoffMissing, Order, Release, Rules
from gateway.core.disagg.nixl import NAMES, Nixl
from gateway.core.disagg.signs import Sign
from tests.core.disagg.support import ATTEMPT, CHAT, COMPLETIONS, PAIR, RESPONSES, ask, said

NULLS = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
         "remote_host": None, "remote_port": None}  # fmt: skip
PARAMS = (
    b'{"do_remote_prefill":true,"do_remote_decode":false, "remote_block_ids":[[17,18]],"remote_engine_id":"e-1",'
    b'"remote_request_id":"chatcmpl-x-9b43b403","remote_host":"10.0.0.7","remote_port":5600,"tp_size":4,'
    b'"new_key": 12345678901234567890123}'
)
ANSWER = (
    b'{"id":"chatcmpl-x","choices":[{"finish_reason":"length"}],"usage":{"prompt_tokens":812,"completion_tokens":1,'
    b'"prompt_tokens_details":{"cached_tokens":768}},"kv_transfer_params":%b}'
)


def test_what_it_is() -> None:
    nixl = Nixl()
    assert (nixl.name, nixl.order, nixl.hold, nixl.release_policy) == ("nixl", Order.SERIAL, 30.0, Release.ALWAYS)


def test_prefill_body() -> None:
    leg = Nixl().prefill(ask(stream=True, stream_options={"include_usage": True}, max_tokens=500, min_tokens=20, n=4), PAIR)
    assert said(leg) == {
        "model": "m",
        "messages": [{"role": "user", "content": "Hello, who are you?"}],
        "stream": False,
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "n": 1,
        "kv_transfer_params": NULLS,
    }
    assert (leg.path, leg.request_id, leg.fields) == (CHAT, ATTEMPT.encode(), ())


def test_handoff_is_verbatim() -> None:
    """The object goes to D octet for octet, unknown keys and big numbers included."""
    nixl, asked = Nixl(), ask(stream=True)
    handoff = nixl.take(asked, PAIR, ANSWER % PARAMS)
    assert handoff.params == PARAMS
    assert handoff[1:] == (768, b"")
    leg = nixl.decode(asked, PAIR, handoff)
    own = asked.body.octets
    assert leg.body == own[:-1] + b', "kv_transfer_params": ' + PARAMS + b"}"
    assert leg.request_id == ATTEMPT.encode()


@pytest.mark.parametrize("name", [*NAMES, "do_remote_prefill"])
@pytest.mark.parametrize("how", ["missing", "null"])
def test_partial_params(name: str, how: str) -> None:
    params = json.loads(PARAMS)
    if how == "null":
        params[name] = None
    else:
        del params[name]
    with pytest.raises(HandoffMissing, match=name) as refused:
        Nixl().take(ask(), PAIR, ANSWER % json.dumps(params).encode())
    assert refused.value.code == "pd_handoff_missing" and refused.value.ruling.status == 502


@pytest.mark.parametrize("answer", [b'{"choices":[]}', ANSWER % b"null", ANSWER % b"[1]", b"not json", b""])
def test_no_params(answer: bytes) -> None:
    with pytest.raises(HandoffMissing, match="prefill engine"):
        Nixl().take(ask(), PAIR, answer)


def test_stopped_at_once() -> None:
    """P's first token was the end: it is handed over all the same, and D does it again."""
    answer = (ANSWER % PARAMS).replace(b'"length"', b'"stop"')
    assert Nixl().take(ask(), PAIR, answer).params == PARAMS


def test_remote_host_override() -> None:
    handoff = Nixl(Rules(remote_host=True)).take(ask(), PAIR, ANSWER % PARAMS)
    assert json.loads(handoff.params) == json.loads(PARAMS) | {"remote_host": "10.0.0.1"}


def test_release_leg() -> None:
    """The same id, prompt and params; one token."""
    nixl, asked = Nixl(), ask(stream=True, max_tokens=500, min_tokens=3, tool_choice="required", tools=[{"type": "function"}])
    handoff = nixl.take(asked, PAIR, ANSWER % PARAMS)
    leg = nixl.release(asked, PAIR, handoff)
    body = said(leg)
    assert body.pop("kv_transfer_params") == json.loads(PARAMS)
    assert body == {"model": "m", "messages": [{"role": "user", "content": "Hello, who are you?"}], "max_tokens": 1,
                    "max_completion_tokens": 1, "n": 1, "stream": False, "tool_choice": "auto",
                    "tools": [{"type": "function"}]}  # fmt: skip
    assert leg is not None and leg.request_id == ATTEMPT.encode()


RECORDINGS = Path(__file__).resolve().parents[2] / "vllm" / "recordings"


def recorded(name: str) -> bytes:
    """A recorded answer's body, its chunks joined."""
    head, _, body = (RECORDINGS / f"{name}.resp").read_bytes().partition(b"\r\n\r\n")
    if b"chunked" not in head:
        return body
    out = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        out, body = out + body[: int(size, 16)], body[int(size, 16) + 2 :]
    return out


@pytest.mark.parametrize("name", ["chat_stream_1prefill", "comp_stream_1prefill", "responses_stream_1prefill",
                                  "chat_n2_1prefill", "short_prompt_1prefill", "prefill_minimal",
                                  "anthropic_prefill"])  # fmt: skip
def test_what_vllm_answered(name: str) -> None:
    answer = recorded(f"pd-nixl/{name}")
    handoff = Nixl().take(ask(), PAIR, answer)
    assert json.loads(handoff.params) == json.loads(answer)["kv_transfer_params"]
    assert handoff.params in answer


@pytest.mark.parametrize("name", ["prefill_no_params", "prefill_stream"])
def test_what_vllm_answered_without(name: str) -> None:
    with pytest.raises(HandoffMissing):
        Nixl().take(ask(), PAIR, recorded(f"pd-nixl/{name}"))


def test_a_failed_load() -> None:
    """vLLM's answer where it could not fetch the KV: a stream whose first event is an error with code 500."""
    events = recorded("pd-nixl-fail/badport_2decode").split(b"\n\n")
    assert Nixl().sign(events[0].removeprefix(b"data: "), 200, ask()) is Sign.FAILED
    assert Nixl().sign(recorded("pd-nixl-fail/reject_2decode"), 400, ask()) is Sign.NOTHING
    for event in recorded("pd-nixl/chat_stream_2decode").split(b"\n\n"):
        assert Nixl().sign(event.removeprefix(b"data: "), 200, ask()) is Sign.NOTHING


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
def test_alone(path: bytes) -> None:
    """A bypass or a fallback gets the client's own octets, less what is no client's to send."""
    asked = ask(path, seed=9007199254740993)
    assert Nixl().alone(asked, PAIR).body == asked.body.octets
    smuggled: dict[str, Any] = {"kv_transfer_params": {"do_remote_prefill": True}, "bootstrap_room": 7}
    assert Nixl().alone(ask(path, **smuggled), PAIR).body == ask(path).body.octets


def test_a_prefill_that_ended_at_its_first_token() -> None:
    """Engines that stage KV only at the limit (vLLM Ascend's, older NIXL) show it so, and are asked with min_tokens then."""
    nixl, asked = Nixl(), ask(stop=["x"], min_tokens=9)
    with pytest.raises(HandoffMissing) as caught:
        nixl.take(asked, PAIR, b'{"choices":[{"finish_reason":"stop"}],"kv_transfer_params":null}')
    assert caught.value.early
    capped = PAIR._replace(capped=True)
    body = said(nixl.prefill(asked, capped))
    assert body["min_tokens"] == 1 and "stop" not in body
    for pair, reason in ((PAIR, b"length"), (capped, b"stop")):
        with pytest.raises(HandoffMissing) as caught:
            nixl.take(asked, pair, b'{"choices":[{"finish_reason":"%b"}]}' % reason)
        assert not caught.value.early
