from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.exchange import Exchange
from gateway.core.outcome import Outcome, Phase
from gateway.telemetry.accesslog import MAX_TEXT, TOGETHER, AccessLog, fields, rfc3339, to_json, to_text, usual_text
from tests.telemetry.fakes import FakeMeter, ended, refused, stream

NOW = 1_783_000_000.123456

# interface.md section 7
FIELDS = [
    "time", "request_id", "trace_id", "client", "key", "method", "path", "model", "stream", "backend",
    "prefill_backend", "status", "outcome", "code", "phase", "bytes_in", "bytes_out", "queue_s", "connect_s", "ttfb_s",
    "ttft_s", "tpot_s", "duration_s", "prompt_tokens", "output_tokens", "attempts", "migrated_from",
]  # fmt: skip

HOSTILE = [
    '/v1/x\n{"outcome": "complete"}',
    "/v1/x outcome=complete",
    '/v1/x" outcome="complete',
    "/v1/x\\",
    "/v1/x\r\nX: y",
    "/v1/\u2028\u2029\x85",
    "/v1/\x1b[2J\x7f\x9b",
    "/v1/\udcff\ud800",
    "/v1/\U0001f600=é",
    "",
    "null",
    "=",
]


def line(exchange: Exchange, form: str) -> str:
    lines: list[str] = []
    AccessLog(lines.extend, wall=lambda: NOW, form=form).ended(exchange)
    assert len(lines) == 1
    return lines[0]


def log(later: Callable[[Callable[[], None]], object]) -> tuple[AccessLog, list[list[str]]]:
    """And what it has written, call by call."""
    written: list[list[str]] = []
    return AccessLog(written.append, wall=lambda: NOW, later=later), written


def test_lines_are_written_together_a_little_later() -> None:
    scheduled: list[Callable[[], None]] = []
    access, written = log(scheduled.append)
    access.ended(ended(stream()))
    access.ended(refused())
    assert (written, len(scheduled)) == ([], 1)
    scheduled.pop()()
    assert ["status=200" in text for text in written[0]] == [True, False]
    access.ended(refused())
    assert len(scheduled) == 1
    access.flush()
    scheduled.pop()()  # finds nothing left
    assert [len(lines) for lines in written] == [2, 1]


def test_a_line_says_when_its_exchange_ended() -> None:
    written: list[list[str]] = []
    times = iter([NOW, NOW + 1])
    access = AccessLog(written.append, wall=lambda: next(times), later=lambda flush: None)
    access.ended(refused())
    access.ended(refused())
    access.flush()
    assert [parse(text)["time"] for text in written[0]] == [rfc3339(NOW), rfc3339(NOW + 1)]


def test_what_waits_is_bounded() -> None:
    scheduled: list[Callable[[], None]] = []
    access, written = log(scheduled.append)
    for _ in range(TOGETHER * 2 + 1):
        access.ended(refused())
    assert [len(lines) for lines in written] == [TOGETHER] * 2
    assert len(scheduled) == 1
    scheduled.pop()()
    assert len(written[-1]) == 1
    access.ended(refused())
    assert len(scheduled) == 1


def parse(text: str) -> dict[str, str]:
    """Read the text form back, as its grammar says: names, and either plain words or JSON strings."""
    found = re.findall(r'([a-z_]+)=("(?:[^"\\]|\\.)*"|[^ "=\\]+)(?: |$)', text)
    assert " ".join(f"{name}={value}" for name, value in found) == text
    return {name: json.loads(value) if value.startswith('"') else value for name, value in found}


def test_json_has_exactly_the_fields() -> None:
    record = json.loads(line(ended(stream(FakeMeter(tpot=0.0251234567, output_tokens=3))), "json"))
    assert list(record) == FIELDS
    assert record == {
        "time": "2026-07-02T13:46:40.123Z",
        "request_id": "req-1",
        "trace_id": None,
        "client": "10.1.2.3:4567",
        "key": None,
        "method": "POST",
        "path": "/v1/chat/completions",
        "model": "llama",
        "stream": True,
        "backend": "b1",
        "prefill_backend": None,
        "status": 200,
        "outcome": "complete",
        "code": None,
        "phase": "stream",
        "bytes_in": 120,
        "bytes_out": 900,
        "queue_s": 0.02,
        "connect_s": 0.002,
        "ttfb_s": 0.31,
        "ttft_s": 0.5,
        "tpot_s": 0.025123,
        "duration_s": 2.0,
        "prompt_tokens": 7,
        "output_tokens": 3,
        "attempts": 1, "migrated_from": None,
    }


def test_text_has_the_same_fields_but_the_absent_ones() -> None:
    exchange = ended(stream(FakeMeter(tpot=0.00001)))
    text = parse(line(exchange, "text"))
    record = {name: value for name, value in json.loads(line(exchange, "json")).items() if value is not None}
    assert list(text) == list(record)
    assert text["stream"] == "true"
    assert text["tpot_s"] == "0.000010"
    assert {name: float(value) for name, value in text.items() if name.endswith("_s")} == {
        name: value for name, value in record.items() if name.endswith("_s")
    }
    assert {name: str(record[name]) for name in ("status", "outcome", "bytes_in")} == {
        name: text[name] for name in ("status", "outcome", "bytes_in")
    }


def test_a_refusal() -> None:
    assert line(refused(), "text") == (
        "time=2026-07-02T13:46:40.123Z request_id=req-2 client=10.1.2.3:4567 method=POST path=/v1/chat/completions "
        "status=404 outcome=refused code=unknown_model phase=read bytes_in=0 bytes_out=0 duration_s=2.000000 attempts=0"
    )


def test_no_query_no_tpot_of_what_broke_off() -> None:
    exchange = ended(stream(FakeMeter(tpot=0.1), path="/v1/models?api_key=secret", phase=Phase.STREAM), Outcome.CLIENT_GONE)
    record = fields(exchange, NOW)
    assert record["path"] == "/v1/models"
    assert record["tpot_s"] is None
    assert "secret" not in line(exchange, "json") + line(exchange, "text")


@pytest.mark.parametrize("form", ["json", "text"])
@pytest.mark.parametrize("evil", HOSTILE)
@pytest.mark.parametrize("field", ["request_id", "path", "model", "method", "client", "key", "trace_id"])
def test_nobody_forges_a_line(field: str, evil: str, form: str) -> None:
    exchange = ended(stream(), Outcome.CLIENT_GONE)
    setattr(exchange, field, evil)
    text = line(exchange, form)
    assert text.isascii()
    assert text.isprintable()
    read: dict[str, Any] = json.loads(text) if form == "json" else parse(text)
    assert read[field] == evil
    assert read["outcome"] == "client_gone"


PIECES = st.none() | st.sampled_from(["plain", *HOSTILE]) | st.text(max_size=8)


@given(st.text(max_size=20), PIECES, PIECES, PIECES, st.booleans(), st.sampled_from([True, False, None]))
def test_the_usual_line_is_the_careful_one(
    path: str, model: str | None, key: str | None, code: str | None, metered: bool, streamed: bool | None
) -> None:
    """There are two ways to a line, and nobody can tell which one it came."""
    meter = FakeMeter(tpot=0.0123456, output_tokens=3, prompt_tokens=None)
    exchange = stream(meter, path=path, model=model, key=key, code=code, stream=streamed)
    for one in (ended(exchange), ended(stream(first_byte=None, connected=None)), refused()):
        if not metered:
            one.meter = None
        usual = usual_text(one, NOW)
        assert usual is None or usual == to_text(fields(one, NOW))
    assert usual_text(refused(), NOW) is not None


@given(st.text(), st.text(alphabet=st.characters(codec=None)))
def test_what_is_written_can_be_read(path: str, model: str) -> None:
    exchange = ended(stream(path=path, model=model))
    record = fields(exchange, NOW)
    for text in (to_text(record), to_json(record)):
        assert text.isascii()
        assert text.isprintable()
    assert json.loads(to_json(record))["model"] == model
    assert parse(to_text(record))["path"] == path.partition("?")[0]


def test_plain_text_needs_no_shell_quoting() -> None:
    assert len(shlex.split(line(ended(stream()), "text"))) == len(parse(line(ended(stream()), "text")))


def test_values_are_bounded() -> None:
    exchange = ended(stream(path="/" + "a" * 100_000, model="m" * 100_000))
    assert len(line(exchange, "json")) < 3 * MAX_TEXT


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "1970-01-01T00:00:00.000Z"), (NOW, "2026-07-02T13:46:40.123Z"), (1.9999, "1970-01-01T00:00:01.999Z")],
)
def test_time(seconds: float, text: str) -> None:
    assert rfc3339(seconds) == text
