"""What is wrong with a prefill engine's 200: an error inside it, an answer that a failure ended, or no answer at all.

Nobody reads that answer but the gateway, so that nobody else would notice: D would compute the prompt anew, fetch the KV of
half a prompt, or wait for KV that does not come, until a deadline and with some engines for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from gateway.core.dialects import DEFAULT, Reading, failed, for_path
from gateway.core.disagg.body import from_json
from gateway.core.sse import Scanner

_GENERATE: Final = b"/generate"  # SGLang's own: its finish reason is an object, in meta_info


class Fault(NamedTuple):
    words: str  # what P's answer is
    error: bytes = b""  # as the engine worded it, as JSON


def fault(path: bytes, answer: bytes) -> Fault | None:
    """Of what P answered to what the client asked for. None: nothing is wrong."""
    begin = answer.lstrip(b" \t\r\n\xef\xbb\xbf")[:1]
    if begin == b"{":
        return fault_of(read_whole(path, answer), answer)
    if begin == b"[" and answer.rstrip().endswith(b"]"):  # SGLang: a batch
        return None
    scanner, seen = Scanner(), False
    for data, reading in _read(path, scanner, answer):
        seen = True
        if (found := fault_of(reading, data)) is not None:
            return found
    return None if seen or scanner.overflowed else Fault("is neither JSON nor an event stream")


def read_whole(path: bytes, answer: bytes) -> Reading:
    """One JSON object."""
    if path == _GENERATE and b'"abort"' in answer:
        said = from_json(answer)
        meta = said.get("meta_info") if isinstance(said, dict) else None
        reason = meta.get("finish_reason") if isinstance(meta, dict) else None
        if isinstance(reason, dict) and reason.get("type") == "abort":
            return Reading(finish_reason="abort")
    return (for_path(path.decode("latin-1")) or DEFAULT).read_whole(answer)


def _read(path: bytes, scanner: Scanner, answer: bytes) -> Iterator[tuple[bytes, Reading]]:
    dialect = for_path(path.decode("latin-1"))
    for event in (*scanner.feed(answer), *scanner.end()):
        yield event.data, read_whole(path, event.data) if dialect is None else dialect.read(event)


def fault_of(reading: Reading, data: bytes) -> Fault | None:
    """`data`: what was read."""
    if reading.error is not None:
        return Fault(f"is an error ({reading.error})", data)
    if failed(reading.finish_reason):
        return Fault(f"was ended by a failure (finish_reason {reading.finish_reason})")
    return None
