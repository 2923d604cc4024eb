"""vLLM Ascend's `recomputed`: seen wherever it comes in a stream, and in a whole answer; the meter tells of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.dialects import chat, completions
from gateway.core.meter import Meter


def event(said: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % json.dumps(said, separators=(",", ":")).encode()


def delta(text: str, **more: Any) -> bytes:
    return event({"id": "c", "choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None, **more}]})


MARKER = delta("", finish_reason="stop", stop_reason="recomputed")


@pytest.mark.parametrize("whole", [True, False], ids=["merged", "apart"])
@pytest.mark.parametrize("marker", [MARKER, delta("", finish_reason="stop"), delta("", finish_reason="stop", stop_reason=128)])
def test_a_stream(whole: bool, marker: bytes) -> None:
    """Two events in one read are two events (the example proxy takes a read for an event, and misses the marker)."""
    pieces = [*(delta(f"{i} recomputed") for i in range(20)), marker, b"data: [DONE]\n\n"]
    meter = Meter(chat, (), True)
    for piece in [b"".join(pieces)] if whole else pieces:
        meter.feed(piece, 1.0)
    meter.end()
    assert meter.recomputed is (marker is MARKER)
    assert meter.finish_reason == "stop" and meter.events == 21


@pytest.mark.parametrize("stop_reason", ["recomputed", None, 5])
def test_a_whole_answer(stop_reason: object) -> None:
    choices = [
        {"index": 0, "text": "a", "finish_reason": "stop"},
        {"index": 1, "text": "", "finish_reason": "stop", "stop_reason": stop_reason},
    ]
    meter = Meter(completions, (), False)
    meter.feed(json.dumps({"choices": choices}).encode(), 1.0)
    meter.end()
    assert meter.recomputed is (stop_reason == "recomputed")
