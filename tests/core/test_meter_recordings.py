"""The meter on recordings of a real vLLM, its failures among them."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gateway.core import dialects
from gateway.core.dialects import chat
from gateway.core.meter import Meter
from gateway.core.outcome import Outcome
from tests.support.metering import (
    EDGES,
    Blind,
    metered,
    totals,
    unstreamed,
)

RECORDINGS = Path(__file__).parents[1] / "vllm" / "recordings"


class Recording(NamedTuple):
    path: str
    chunked: bool
    pieces: list[bytes]  # the body as its framing cuts it
    complete: bool


def load(name: str) -> Recording | None:
    """A 200 on a path with a dialect."""
    file = RECORDINGS / f"{name}.resp"
    octets = file.read_bytes() if file.exists() else lzma.decompress(Path(f"{file}.xz").read_bytes())
    path = (RECORDINGS / f"{name}.req").read_bytes().split(b" ", 2)[1].decode()
    while octets.startswith(b"HTTP/1.1 100"):
        octets = octets.partition(b"\r\n\r\n")[2]
    head, _, body = octets.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200") or dialects.for_path(path) is None:
        return None
    if b"transfer-encoding: chunked" in head:
        return Recording(path, True, *dechunked(body))
    length = int(head.lower().partition(b"content-length: ")[2].split()[0])
    return Recording(path, False, [body[:length]], len(body) >= length)


def dechunked(body: bytes) -> tuple[list[bytes], bool]:
    pieces: list[bytes] = []
    while body:
        size, _, body = body.partition(b"\r\n")
        if size == b"0":
            return pieces, True
        pieces.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]
    return pieces, False


NAMES = sorted(str(file.relative_to(RECORDINGS)).removesuffix(".req") for file in RECORDINGS.glob("*/*.req"))
RECORDED = {name: recording for name in NAMES if (recording := load(name))}


def naive(path: str, stream: bytes) -> dict[str, Any]:
    """What a stream says, by the plainest of means: vLLM's streams, read event by event into dictionaries."""
    said: dict[str, Any] = {
        "events": 0,
        "tokens": None,
        "finish": None,
        "terminal": False,
        "error": False,
        "prompt": None,
    }
    for text in stream.decode().split("\n\n"):
        data = "".join(line[6:] for line in text.split("\n") if line.startswith("data: "))
        if not data:
            continue
        if data == "[DONE]":
            said["terminal"] = True
            continue
        try:
            event = json.loads(data)
        except ValueError:
            continue
        if event.get("error"):
            said["error"] = True
        elif "choices" in event:
            openai_says(path, event, said)
        else:
            typed_says(event, said)
    return said


def openai_says(path: str, event: dict[str, Any], said: dict[str, Any]) -> None:
    usage = event.get("usage")
    if usage:
        said["prompt"] = usage["prompt_tokens"]
    if usage and not event["choices"]:
        said["tokens"] = usage["completion_tokens"]
    brought = path == "/v1/completions" and bool(event["choices"])
    for choice in event["choices"]:
        said["finish"] = choice["finish_reason"] or said["finish"]
        delta = choice.get("delta", {})
        brought |= any(delta.get(key) for key in ("content", "reasoning", "tool_calls"))
        brought |= delta.get("content") == "" and "role" not in delta
    said["events"] += brought


def typed_says(event: dict[str, Any], said: dict[str, Any]) -> None:
    kind, delta = event["type"], event.get("delta") or {}
    if kind.startswith("response."):
        said["events"] += bool(kind.endswith(".delta") and delta)
        if kind == "response.completed":
            usage, cut = event["response"]["usage"], event["response"]["incomplete_details"]
            said |= {"terminal": True, "tokens": usage["output_tokens"], "prompt": usage["input_tokens"]}
            said["finish"] = cut["reason"] if cut else "completed"
    elif kind == "content_block_delta":
        said["events"] += any(delta.get(key) for key in ("text", "thinking", "partial_json"))
    elif kind == "message_delta":
        usage = event["usage"]
        said |= {"finish": delta["stop_reason"], "tokens": usage["output_tokens"]}
        said["prompt"] = usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
    elif kind == "message_start":
        said["prompt"] = event["message"]["usage"]["input_tokens"]
    elif kind == "message_stop":
        said["terminal"] = True


@pytest.mark.parametrize("name", [name for name, recording in RECORDED.items() if recording.chunked])
def test_recorded_stream(name: str) -> None:
    path, _, pieces, complete = RECORDED[name]
    dialect = dialects.for_path(path)
    assert dialect is not None
    stream = b"".join(pieces)
    meter = metered(dialect, enumerate(pieces))
    said = naive(path, stream)
    assert (meter.events, meter.finish_reason, meter.terminal) == (said["events"], said["finish"], said["terminal"])
    assert (meter.prompt_tokens, meter.error is not None) == (said["prompt"], said["error"])
    if said["tokens"] is not None:
        assert (meter.output_tokens, meter.token_source) == (said["tokens"], "usage")
    if said["error"] or (said["terminal"] and said["finish"] in (None, "abort")):
        expected = Outcome.STREAM_ERROR
    elif not said["terminal"]:
        expected = Outcome.UPSTREAM_TRUNCATED
    else:
        expected = Outcome.COMPLETE if said["events"] else Outcome.EMPTY
    assert meter.verdict(complete) is expected
    assert not meter.opaque
    if meter.choices == 1 and meter.events:
        assert meter.itl_n == meter.events - 1
        assert meter.first_output is not None and meter.last_output is not None
        assert meter.itl_sum == meter.last_output - meter.first_output
    for other in ([(1, stream)], [(1, stream[at : at + 1460]) for at in range(0, len(stream), 1460)]):
        assert totals(metered(dialect, other)) == totals(meter) == totals(metered(dialect, other, Blind))


@pytest.mark.parametrize("name", [name for name, recording in RECORDED.items() if not recording.chunked])
def test_recorded_answer(name: str) -> None:
    path, _, pieces, complete = RECORDED[name]
    dialect = dialects.for_path(path)
    assert dialect is not None
    answer = json.loads(pieces[0])
    usage = answer["usage"]
    meter = unstreamed(dialect, pieces[0], 1000)
    assert meter.output_tokens == usage.get("completion_tokens", usage.get("output_tokens"))
    cached = usage.get("cache_read_input_tokens") or 0
    assert meter.prompt_tokens == usage.get("prompt_tokens", usage.get("input_tokens", 0) + cached)
    reason = answer.get("stop_reason") or (answer["choices"][-1]["finish_reason"] if "choices" in answer else None)
    assert reason is None or meter.finish_reason == reason
    assert meter.verdict(complete) is (Outcome.STREAM_ERROR if reason == "abort" else Outcome.COMPLETE)


# What became of requests whose server was killed, stopped or told to end; by hand.
FAILED = {
    "api_kill9_completions_stream": Outcome.UPSTREAM_TRUNCATED,
    "api_kill9_messages_stream": Outcome.COMPLETE,  # it had just ended
    "api_kill9_responses_stream": Outcome.UPSTREAM_TRUNCATED,
    "api_kill9_stream": Outcome.UPSTREAM_TRUNCATED,
    "engine_kill9_completions_stream": Outcome.STREAM_ERROR,
    "engine_kill9_messages_stream": Outcome.COMPLETE,
    "engine_kill9_responses_stream": Outcome.UPSTREAM_TRUNCATED,
    "engine_kill9_stream": Outcome.STREAM_ERROR,
    "engine_stop_messages_stream": Outcome.COMPLETE,
    "engine_stop_nonstream": Outcome.COMPLETE,
    "engine_stop_stream": Outcome.COMPLETE,
    "sigterm_completions_stream": Outcome.UPSTREAM_TRUNCATED,
    "sigterm_default_nonstream": Outcome.STREAM_ERROR,
    "sigterm_default_responses_stream": Outcome.COMPLETE,  # nothing in it tells that it was cut
    "sigterm_default_stream": Outcome.STREAM_ERROR,
    "sigterm_drain_stream": Outcome.COMPLETE,
    "sigterm_messages_stream": Outcome.UPSTREAM_TRUNCATED,
    "sigterm_queued_completions_stream": Outcome.STREAM_ERROR,
    "sigterm_queued_messages_stream": Outcome.STREAM_ERROR,
    "sigterm_queued_nonstream": Outcome.STREAM_ERROR,
    "sigterm_queued_responses_stream": Outcome.EMPTY,
    "sigterm_queued_stream": Outcome.STREAM_ERROR,
    "sigterm_responses_stream": Outcome.UPSTREAM_TRUNCATED,
    "sigterm_stream": Outcome.UPSTREAM_TRUNCATED,
}


def test_failures_recorded() -> None:
    seen = {}
    for name, recording in RECORDED.items():
        dialect = dialects.for_path(recording.path)
        if name.startswith("fail/") and dialect is not None:
            meter = Meter(dialect, EDGES, streamed=recording.chunked)
            for at, piece in enumerate(recording.pieces):
                meter.feed(piece, at)
            meter.end()
            seen[name.removeprefix("fail/")] = meter.verdict(recording.complete)
    assert seen == FAILED


def test_a_slow_reader_gets_long_events() -> None:
    path, _, pieces, _ = RECORDED["slow/slow_reader_logprobs_40s"]
    assert path == "/v1/chat/completions" and max(map(len, pieces)) > 400_000
    meter = metered(chat, enumerate(pieces))
    assert not meter.opaque and meter.verdict(True) is Outcome.COMPLETE and meter.output_tokens > meter.events
