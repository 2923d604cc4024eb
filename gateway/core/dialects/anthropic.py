"""Anthropic's Messages API: `/v1/messages`.

Typed events: `message_start`, blocks of content each with its deltas, `message_delta` with the reason of the end and
the usage, `message_stop`; no `[DONE]`. Deltas of one block have one shape, and empty ones are not sent.
"""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.core.dialects.base import NOTHING, ONE, UNREADABLE, Count, Dialect, Reading, clean, name_of, part, type_of
from gateway.core.sse import Event


class _Usage(msgspec.Struct, gc=False):
    input_tokens: Count | None = None
    output_tokens: Count | None = None
    cache_read_input_tokens: Count | None = None
    cache_creation_input_tokens: Count | None = None


class _Delta(msgspec.Struct, gc=False):
    text: Any = None
    thinking: Any = None
    partial_json: Any = None
    stop_reason: str | None = None


class _Message(msgspec.Struct, gc=False):
    type: str = ""
    stop_reason: str | None = None
    usage: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: Any = None


class _Typed(msgspec.Struct, gc=False):
    type: str = ""
    delta: _Delta | None = None
    message: _Message | None = None
    usage: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: Any = None


_event = msgspec.json.Decoder(_Typed)
_message = msgspec.json.Decoder(_Message)
_usage = msgspec.json.Decoder(_Usage | None)

_STOP = Reading(terminal=True)
_NO_USAGE = _Usage()


class Messages(Dialect):
    __slots__ = ()

    name = "messages"

    def read(self, event: Event) -> Reading:
        try:
            said = _event.decode(event.data)
        except UNREADABLE:
            return Reading(error="error") if event.type == b"error" else NOTHING
        kind = said.type or event.type.decode("utf-8", "replace")
        if kind == "content_block_delta":
            return _block(said.delta or _Delta())
        if kind == "message_delta":
            usage = part(_usage, said.usage, _NO_USAGE)
            return _counted(usage, said.delta.stop_reason if said.delta else None, usage.output_tokens)
        if kind == "message_stop":
            return _STOP
        if said.error or kind == "error":
            return Reading(error=name_of(said.error))
        if kind == "message_start" and said.message is not None:  # its output_tokens are no count of anything yet
            return _counted(part(_usage, said.message.usage, _NO_USAGE))
        return NOTHING

    def read_whole(self, body: bytes) -> Reading:
        try:
            answer = _message.decode(body)
        except UNREADABLE:
            return NOTHING
        if answer.error or answer.type == "error":
            return Reading(error=name_of(answer.error))
        usage, reason = part(_usage, answer.usage, _NO_USAGE), answer.stop_reason
        if answer.type == "message" and reason is None:
            reason = "abort"  # only in a stream may it be missing: vLLM has no other word for what it aborted
        return msgspec.structs.replace(_counted(usage, reason, usage.output_tokens), terminal=True)

    def error_event(self, code: str, message: str) -> bytes:
        return b"event: error\ndata: %b\n\n" % self.error_body(code, message)

    def error_body(self, code: str, message: str, type: str | None = None, param: str | None = None) -> bytes:
        error = {"type": type or type_of(code), "message": clean(message)}
        return msgspec.json.encode({"type": "error", "error": error})


def _block(delta: _Delta) -> Reading:
    strings = ((b"text", delta.text), (b"thinking", delta.thinking), (b"partial_json", delta.partial_json))
    said = [(key, string) for key, string in strings if string]
    if not said:  # a signature, or nothing
        return NOTHING
    visible = bool(delta.text or delta.partial_json)
    key, text = said[0]
    if len(said) > 1 or not isinstance(text, str):
        return Reading(output=True, visible=visible, choices=ONE)
    return Reading(output=True, visible=visible, choices=ONE, key=key, text=text)


def _counted(usage: _Usage, reason: str | None = None, output: int | None = None) -> Reading:
    """Tokens read from a cache, or written to one, are the prompt's too: `input_tokens` counts neither."""
    cached, prompt = usage.cache_read_input_tokens, usage.input_tokens
    if prompt is not None:
        prompt += (cached or 0) + (usage.cache_creation_input_tokens or 0)
    return Reading(choices=ONE, finish_reason=reason, prompt_tokens=prompt, cached_tokens=cached, output_tokens=output)
