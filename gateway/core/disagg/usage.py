"""cached_tokens: true (opt-in). D counts as cached what was transferred; the truth is in P's usage.

The number is P's where P said one. Where it did not, D's is taken out: none is better than a wrong one. Of a stream only the
last usage event is changed, the one without choices; all others pass octet for octet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from gateway.core.disagg.body import NULL, Body, as_json
from gateway.core.edits import EventEditor
from gateway.errors import Refusal

_DETAILS: Final = ("prompt_tokens_details", "input_tokens_details")  # /v1/responses has the second


class CachedTokens(EventEditor):
    """`cached`: as P's usage has it (`Handoff.cached_tokens`); asked when it is needed, for P may answer beside the stream."""

    def __init__(self, cached: Callable[[], int | None]):
        super().__init__()
        self.cached = cached

    def edit(self, event: bytes) -> bytes:
        if b'"usage"' not in event or not event.startswith(b"data:"):
            return event
        begin = 5 + len(event[5:]) - len(event[5:].lstrip(b" "))
        end = len(event.rstrip(b"\r\n"))
        try:
            said = Body(event[begin:end])
        except Refusal:  # of several lines, or no JSON
            return event
        if said.value("choices") != []:
            return event
        return event[:begin] + corrected(said, self.cached()) + event[end:]


def corrected(said: Body, cached: int | None) -> bytes:
    """An event's JSON, or a whole unstreamed answer, with the right number in its usage; else as it was."""
    usage = said.inner("usage")
    if usage is None:
        return said.octets
    name = next(
        (name for name in _DETAILS if name in usage), "input_tokens_details" if "input_tokens" in usage else _DETAILS[0]
    )
    details = usage.inner(name)
    if cached is not None:
        value = (details or Body(b"{}")).edited({"cached_tokens": as_json(cached)})
    elif details is not None and "cached_tokens" in details:
        value = details.edited(drop={"cached_tokens"}) if len(details.names) > 1 else NULL
    else:
        return said.octets
    return said.edited({"usage": usage.edited({name: value})})
