"""The OpenAI shapes: `/v1/chat/completions` and `/v1/completions`, as vLLM, SGLang and others send them.

A stream is `data:` events of JSON with `choices`, then `data: [DONE]`, which also follows an error event. Usage comes
in an event without choices at the end, or along with choices, then cumulative and each choice's own.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from gateway.core.dialects.base import NOTHING, ONE, UNREADABLE, Count, Dialect, Reading, failed, name_of, part
from gateway.core.sse import Event


class _Details(msgspec.Struct, gc=False):
    cached_tokens: Count | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    prompt_tokens_details: _Details | None = None


_RECOMPUTED = "recomputed"  # vLLM Ascend, as a stop_reason: the engine has dropped the request, and it is not complete


class _Delta(msgspec.Struct, gc=False):
    role: Any = msgspec.UNSET
    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None
    function_call: Any = None
    refusal: Any = None
    audio: Any = None


class _ChatChoice(msgspec.Struct, gc=False):
    index: int = 0
    delta: _Delta | None = None
    finish_reason: str | None = None
    stop_reason: Any = None
    token_ids: Any = None


class _TextChoice(msgspec.Struct, gc=False):
    index: int = 0
    text: Any = None
    finish_reason: str | None = None
    stop_reason: Any = None
    token_ids: Any = None


class _ChatChunk(msgspec.Struct, gc=False):
    choices: list[_ChatChoice] | None = None
    usage: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: Any = None
    object: Any = None


class _TextChunk(msgspec.Struct, gc=False):
    choices: list[_TextChoice] | None = None
    usage: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    error: Any = None
    object: Any = None


_Choice = _ChatChoice | _TextChoice
_Chunk = _ChatChunk | _TextChunk

_DONE: Final = Reading(terminal=True)
_NO_DELTA: Final = _Delta()
_NO_USAGE: Final = _Usage()
_usage = msgspec.json.Decoder(_Usage | None)


class OpenAI(Dialect):
    """What chat and completions share. They differ in what a choice is, and in when it is output."""

    __slots__ = ("_decoder",)

    _decoder: msgspec.json.Decoder[_ChatChunk] | msgspec.json.Decoder[_TextChunk]

    def read(self, event: Event) -> Reading:
        data = event.data
        if data.startswith(b"[DONE]") and not data[6:].strip():
            return _DONE
        try:
            chunk = self._decoder.decode(data)
        except UNREADABLE:
            return Reading(error="error") if event.type == b"error" else NOTHING
        if chunk.error or event.type == b"error" or chunk.object == "error":  # the last: vLLM's, some time ago
            return Reading(error=name_of(chunk.error))
        usage = part(_usage, chunk.usage, _NO_USAGE)
        choices = chunk.choices
        if not choices:
            counted = usage.completion_tokens is not None or usage.prompt_tokens is not None
            return Reading(
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=_cached(usage),
                output_tokens=usage.completion_tokens,
                usage_only=choices is not None and counted,
            )
        if len(choices) == 1 and usage is _NO_USAGE and choices[0].finish_reason is None:
            plain = self._plain(choices[0])
            if plain is not None:
                return plain
        return self._full(choices, usage)

    def read_whole(self, body: bytes) -> Reading:
        try:
            chunk = self._decoder.decode(body)
        except UNREADABLE:
            return NOTHING
        usage, choices = part(_usage, chunk.usage, _NO_USAGE), chunk.choices or ()
        return Reading(
            choices=tuple([choice.index for choice in choices]),
            finish_reason=_finish(choices),
            recomputed=_RECOMPUTED in [choice.stop_reason for choice in choices],
            terminal=True,
            error=name_of(chunk.error) if chunk.error or chunk.object == "error" else None,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=_cached(usage),
            output_tokens=usage.completion_tokens,
        )

    def _full(self, choices: list[_ChatChoice] | list[_TextChoice], usage: _Usage) -> Reading:
        if len(choices) == 1:
            (choice,) = choices
            output, visible = self._output(choice)
            return Reading(
                output=output,
                visible=visible,
                choices=ONE if choice.index == 0 else (choice.index,),
                tokens=usage.completion_tokens,
                token_ids=len(choice.token_ids) if isinstance(choice.token_ids, list) else 0,
                finish_reason=choice.finish_reason or None,
                recomputed=choice.stop_reason == _RECOMPUTED,
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=_cached(usage),
            )
        output = visible = False
        ids = 0
        for choice in choices:
            brought, seen = self._output(choice)
            output, visible = output or brought, visible or seen
            if isinstance(choice.token_ids, list):
                ids += len(choice.token_ids)
        return Reading(
            output=output,
            visible=visible,
            choices=tuple(choice.index for choice in choices),
            tokens=usage.completion_tokens,
            token_ids=ids,
            finish_reason=_finish(choices),
            recomputed=any(choice.stop_reason == _RECOMPUTED for choice in choices),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=_cached(usage),
        )

    def _plain(self, choice: Any) -> Reading | None:
        """An event of one choice and one string, if it is one: nearly all are, and their shape can be learnt."""
        raise NotImplementedError

    def _output(self, choice: Any) -> tuple[bool, bool]:
        """Whether a choice makes its event an output event, and a visible one."""
        raise NotImplementedError


class Chat(OpenAI):
    __slots__ = ()

    name = "chat"

    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder(_ChatChunk)

    def _plain(self, choice: _ChatChoice) -> Reading | None:
        delta = choice.delta or _NO_DELTA
        if choice.token_ids or delta.function_call or delta.refusal or delta.audio:
            return None
        content, tools = delta.content, delta.tool_calls
        reasoning = delta.reasoning or delta.reasoning_content
        if content and not reasoning and not tools and isinstance(content, str):
            # Emptied, it still is a token without text; not so beside a role, where it is how a stream begins.
            least = 0 if delta.role is msgspec.UNSET else 1
            where = ONE if choice.index == 0 else (choice.index,)
            return Reading(output=True, visible=True, choices=where, key=b"content", text=content, least=least)
        if reasoning and not content and not tools and isinstance(reasoning, str):
            key = b"reasoning" if delta.reasoning else b"reasoning_content"
            return Reading(output=True, choices=(choice.index,), key=key, text=reasoning)
        if tools and not content and not reasoning:
            text = _arguments(tools)
            if text:
                return Reading(output=True, visible=True, choices=(choice.index,), key=b"arguments", text=text, least=0)
        return None

    def _output(self, choice: _ChatChoice) -> tuple[bool, bool]:
        delta = choice.delta or _NO_DELTA
        called = delta.tool_calls or delta.function_call
        if delta.content or called or delta.refusal or delta.audio:
            return True, True
        if delta.reasoning or delta.reasoning_content:
            return True, False
        # A token that completed no character, or that ended the answer. Beside a role it is how a stream begins.
        return delta.content == "" and delta.role is msgspec.UNSET, False


class Completions(OpenAI):
    __slots__ = ()

    name = "completions"

    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder(_TextChunk)

    def _plain(self, choice: _TextChoice) -> Reading | None:
        text = choice.text
        if choice.token_ids or not text or not isinstance(text, str):
            return None
        where = ONE if choice.index == 0 else (choice.index,)
        return Reading(output=True, visible=True, choices=where, key=b"text", text=text, least=0)

    def _output(self, choice: _TextChoice) -> tuple[bool, bool]:
        return True, bool(choice.text)


def _arguments(tools: Any) -> str:
    """The one string of a tool call that goes on; empty if it is anything else."""
    try:
        (call,) = tools
        text = call["function"]["arguments"]
    except (TypeError, ValueError, LookupError):
        return ""
    return text if isinstance(text, str) else ""


def _finish(choices: Any) -> str | None:
    """Why it ended: a failure of one choice counts before how the others ended."""
    reasons: list[str] = [choice.finish_reason for choice in choices if choice.finish_reason]
    if len(reasons) > 1:
        return next(filter(failed, reasons), reasons[-1])
    return reasons[0] if reasons else None


def _cached(usage: _Usage) -> int | None:
    return usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None
