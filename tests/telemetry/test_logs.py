from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from io import StringIO

import pytest

from gateway.telemetry.logs import LineWriter, configure

log = logging.getLogger("gateway.test")


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, raises = list(root.handlers), root.level, logging.raiseExceptions
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.raiseExceptions = raises
    logging.captureWarnings(False)


def test_text() -> None:
    stream = StringIO()
    configure("info", "text", stream)
    log.info("backend %s is up", "b1")
    log.debug("not this")
    time, rest = stream.getvalue().split(" ", 1)
    assert rest == "INFO gateway.test: backend b1 is up\n"
    assert time.endswith("Z")


def test_json() -> None:
    stream = StringIO()
    configure("debug", "json", stream)
    log.debug("a %s", "b")
    record = json.loads(stream.getvalue())
    assert list(record) == ["time", "level", "logger", "message"]
    assert (record["level"], record["logger"], record["message"]) == ("debug", "gateway.test", "a b")


@pytest.mark.parametrize("form", ["text", "json"])
def test_nobody_forges_a_record(form: str) -> None:
    stream = StringIO()
    configure("info", form, stream)
    evil = "x\n2026-01-01T00:00:00Z ERROR gateway: forged\r\x1b[2J\u2028\udcff"
    log.warning("model %s", evil)
    try:
        raise ValueError(evil)
    except ValueError:
        log.exception("failed")
    text = stream.getvalue()
    records = [line for line in text.splitlines() if not line.startswith("    ")]
    assert len(records) == 2
    assert not any(character in text for character in "\r\x1b\u2028\udcff")


def test_a_traceback_is_indented_or_a_field() -> None:
    for form in ("text", "json"):
        stream = StringIO()
        configure("info", form, stream)
        try:
            raise ValueError("why")
        except ValueError:
            log.exception("failed")
        if form == "json":
            assert "ValueError: why" in json.loads(stream.getvalue())["trace"]
        else:
            assert stream.getvalue().endswith("\n    ValueError: why\n")


def test_configuring_again_replaces() -> None:
    first, second = StringIO(), StringIO()
    configure("info", "text", first)
    configure("warning", "text", second)
    log.info("no")
    log.warning("yes")
    assert first.getvalue() == ""
    assert second.getvalue().count("\n") == 1


def test_standard_error_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info", "text")
    log.info("here")
    assert "here" in capsys.readouterr().err


def test_warnings_are_logged() -> None:
    stream = StringIO()
    configure("info", "text", stream)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    assert "WARNING py.warnings: " in stream.getvalue()


def test_lines_are_joined() -> None:
    stream = StringIO()
    LineWriter(stream)(["a", "b"])
    assert stream.getvalue() == "a\nb\n"


def test_a_broken_stream_loses_lines_and_nothing_else() -> None:
    class Full(StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    closed = StringIO()
    closed.close()
    for stream in (Full(), closed):
        write = LineWriter(stream)
        write(["a", "b"])
        assert write.lost == 2
