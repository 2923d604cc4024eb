"""Ascend's layerwise connector: what D calls back with, and the one request to P that comes of it (pd.md 5.6, case 57)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.disagg.layerwise import Layerwise, Rendezvous, posted
from gateway.errors import Refusal
from tests.core.disagg.support import ATTEMPT, COMPLETIONS, PAIR, ask, said


def callback(name: str, **members: Any) -> bytes:
    return json.dumps(
        {
            "request_id": name,
            "token_ids": [],
            "do_remote_prefill": False,
            "do_remote_decode": True,
            "remote_block_ids": [[3, 4]],
            "remote_block_size": 128,
            "remote_engine_id": "e",
            "remote_host": "10.0.0.9",
            "remote_port": 30100,
            "remote_tp_size": 8,
            "remote_pcp_size": 1,
            "remote_dcp_size": 1,
            "remote_cached_tokens": 0,
        }
        | members
    ).encode()


def test_chat() -> None:
    asked = ask(stream=True, max_tokens=50)
    decode = Layerwise().decode(asked, PAIR)
    assert said(decode)["kv_transfer_params"] == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "metaserver": "http://10.0.0.9:8000/v1/metaserver",
    }
    meeting = Rendezvous(asked, PAIR)
    given = posted(callback(f"chatcmpl-{ATTEMPT}"))
    assert given.attempt == ATTEMPT
    assert meeting.take(given)
    assert not meeting.take(given), "D repeats itself: P is asked once"
    assert meeting.params() == given.octets
    leg = Layerwise().prefill(asked, PAIR, meeting.params())
    body = said(leg)
    assert body["kv_transfer_params"] == json.loads(given.octets)
    assert (body["min_tokens"], body["max_tokens"], body["stream"]) == (1, 1, False)
    assert leg.request_id == decode.request_id == ATTEMPT.encode()


def test_several_prompts() -> None:
    """One request to P when all have called back, in whatever order."""
    asked = ask(COMPLETIONS, prompt=["a", "b", "c"])
    meeting = Rendezvous(asked, PAIR)
    names = [f"cmpl-{ATTEMPT}-{i}" for i in range(3)]
    assert [meeting.take(posted(callback(names[i], remote_port=1000 + i))) for i in (2, 0, 2, 1, 1)] == [False] * 3 + [
        True,
        False,
    ]
    found = json.loads(meeting.params())
    batch = found.pop("batch_kv_transfer_params")
    assert found == json.loads(callback(names[0], remote_port=1000))
    assert list(batch) == names
    assert [batch[name]["remote_port"] for name in names] == [1000, 1001, 1002]


def test_one_prompt() -> None:
    for prompt in ("a", [1, 2], ["a"]):
        meeting = Rendezvous(ask(COMPLETIONS, prompt=prompt), PAIR)
        assert meeting.take(posted(callback(f"cmpl-{ATTEMPT}-0-9b43b403"))), "vLLM's random suffix is no part of the name"
        assert "batch_kv_transfer_params" not in json.loads(meeting.params())


@pytest.mark.parametrize(
    "name",
    [
        "",
        "chatcmpl-",
        "chatcmpl-client",
        ATTEMPT,
        f"embd-{ATTEMPT}",
        f"cmpl-{ATTEMPT}",
        f"chatcmpl-{ATTEMPT}x",
        f"cmpl-{ATTEMPT}-0-zz",
    ],
)
def test_unknown_names(name: str) -> None:
    with pytest.raises(Refusal) as refused:
        posted(callback(name))
    assert refused.value.ruling.status == 404


def test_unknown_children() -> None:
    meeting = Rendezvous(ask(COMPLETIONS, prompt=["a", "b"]), PAIR)
    for name in (f"cmpl-{ATTEMPT}-2", f"chatcmpl-{ATTEMPT}"):
        with pytest.raises(Refusal) as refused:
            meeting.take(posted(callback(name)))
        assert refused.value.ruling.status == 404


@pytest.mark.parametrize(
    "members",
    [
        {"request_id": 7},
        {"do_remote_decode": False},
        {"remote_block_ids": None},
        {"remote_host": ""},
        {"remote_host": 5},
        {"remote_port": 0},
        {"remote_port": "30100"},
        {"remote_port": 70000},
        {"remote_port": True},
    ],
)
def test_malformed(members: dict[str, Any]) -> None:
    with pytest.raises(Refusal) as refused:
        posted(callback(f"chatcmpl-{ATTEMPT}", **members))
    assert refused.value.ruling.status == 400


@pytest.mark.parametrize("octets", [b"", b"[]", b"{", b"null"])
def test_no_object(octets: bytes) -> None:
    with pytest.raises(Refusal) as refused:
        posted(octets)
    assert refused.value.ruling.status == 400
