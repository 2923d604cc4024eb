"""The Responses API: `/v1/responses`.

Typed events. A stream ends with `response.completed` or `response.incomplete`, and never with `[DONE]`; usage comes
only there. Each event has a sequence number, so that no two have the same shape.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.core.dialects.base import NOTHING, ONE, UNREADABLE, Count, Dialect, Reading, clean, name_of, part
from gateway.core.sse import Event


class _Details(msgspec.Struct, gc=False):
    cached_tokens: Count | None = None


class _Usage(msgspec.Struct, gc=False):
    input_tokens: Count | None = None
    output_tokens: Count | None = None
    input_tokens_details: _Details | None = None


class _Reason(msgspec.Struct, gc=False):
    reason: str | None = None


class _Response(msgspec.Struct, gc=False):
    status: str | None = None
    incomplete_details: _Reason | None = None
    usage: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: Any = None


class _Typed(msgspec.Struct, gc=False):
    type: str = ""
    delta: Any = None
    response: msgspec.Raw = msgspec.Raw()
    error: Any = None
    code: Any = None


_event = msgspec.json.Decoder(_Typed)
_response = msgspec.json.Decoder(_Response)
_usage = msgspec.json.Decoder(_Usage | None)

_NO_USAGE = _Usage()
# What a terminal event says that cannot be understood further: it still ends its stream.
_ENDED = Reading(terminal=True, finish_reason="completed")

_TERMINAL = ("response.completed", "response.incomplete")
_ERRORS = ("error", "response.failed")


class Responses(Dialect):
    __slots__ = ()

    name = "responses"

    def read(self, event: Event) -> Reading:
        try:
            said = _event.decode(event.data)
        except UNREADABLE:
            return Reading(error="error") if event.type == b"error" else NOTHING
        kind = said.type or event.type.decode("utf-8", "replace")
        if kind.endswith(".delta"):
            if not said.delta:
                return NOTHING
            return Reading(output=True, visible="reasoning" not in kind, choices=ONE)
        if kind in _TERMINAL:
            whole = self.read_whole(bytes(said.response))
            return whole if whole.terminal else _ENDED
        if said.error or kind in _ERRORS:
            whole = self.read_whole(bytes(said.response))
            error = said.error or {"code": said.code}
            return msgspec.structs.replace(whole, terminal=False, error=whole.error or name_of(error))
        return NOTHING

    def read_whole(self, body: bytes) -> Reading:
        try:
            answer = _response.decode(body)
        except UNREADABLE:
            return NOTHING
        usage = part(_usage, answer.usage, _NO_USAGE)
        error = name_of(answer.error) if answer.error else None
        if answer.status in ("failed", "cancelled"):
            error = error or answer.status
        cut = answer.incomplete_details
        return Reading(
            choices=ONE,
            finish_reason=(cut.reason if cut else None) or answer.status or "completed",
            terminal=True,
            error=error,
            prompt_tokens=usage.input_tokens,
            cached_tokens=usage.input_tokens_details.cached_tokens if usage.input_tokens_details else None,
            output_tokens=usage.output_tokens,
        )

    def error_event(self, code: str, message: str) -> bytes:
        error = {"type": "error", "code": code, "message": clean(message), "param": None}
        return b"event: error\ndata: %b\n\n" % msgspec.json.encode(error)
