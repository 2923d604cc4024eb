"""What is changed in an answer, or kept of it, where an option asks for that."""

from __future__ import annotations

import time
from typing import Final

from gateway.core import headers
from gateway.core.disagg.body import Body
from gateway.core.disagg.usage import CachedTokens, corrected
from gateway.core.edits import EVENT_END, Both, Editor, Listener, UsageStripper, WholeEditor
from gateway.core.head import NONE, ResponseHead
from gateway.core.meter import Meter
from gateway.core.rename import EventRenamer, Renaming
from gateway.errors import Refusal
from gateway.net.call import Call
from gateway.net.paired import Paired

# Whose usage says cached_tokens
_COUNTED: Final = frozenset((b"/v1/chat/completions", b"/v1/completions", b"/v1/responses"))


def edit(call: Call, response: ResponseHead, kind: bytes, meter: Meter | None) -> Editor | None:
    """Of any answer: `kind` is its media type."""
    edit: Editor | None = None
    if meter is not None:
        if call.usage_asked and meter.streamed:
            edit = UsageStripper()
        elif call.paired is not None:
            edit = _of_pair(call.paired, meter.streamed)
    renaming = _renaming(call, response)
    if renaming is None:
        return edit
    if kind == b"text/event-stream":
        renamer: Editor = EventRenamer(renaming)
    elif kind == b"application/json":
        renamer = WholeEditor(renaming.renamed)
    else:
        return edit
    return renamer if edit is None else Both(edit, renamer)


def _renaming(call: Call, response: ResponseHead) -> Renaming | None:
    """Where the client asked by an alias, and it is to be answered by the same (models.NAME.rewrite_response)."""
    exchange = call.exchange
    if call.aim is None or exchange.model is None or exchange.model not in call.policy.renamed:
        return None
    if not 200 <= response.status < 300 or response.framing is NONE or headers.is_coded(response):
        return None
    return Renaming(exchange.model, exchange.path)


def _of_pair(paired: Paired, streamed: bool) -> Editor | None:
    """Of a decode engine's answer with a status of 2xx."""
    if not paired.edits or not paired.transferred:
        return None
    asked, settings = paired.asked, paired.settings
    counted = settings.cached_tokens and asked.path in _COUNTED
    if streamed and counted:
        return CachedTokens(lambda: paired.said.cached_tokens)
    if counted or (asked.prompt_logprobs is not None and not streamed):
        return WholeEditor(lambda answer: _changed(paired, counted, answer))
    return Listener(streamed, lambda answer: _heard(paired, streamed, answer)) if paired.conversation else None


def _changed(paired: Paired, counted: bool, answer: bytes) -> bytes:
    """A whole answer."""
    _heard(paired, False, answer)
    if counted:
        try:
            answer = corrected(Body(answer), paired.said.cached_tokens)
        except Refusal:  # it is no JSON object
            return answer
    return paired.settings.connector.merged(paired.asked, paired.said, answer)


def _heard(paired: Paired, streamed: bool, answer: bytes) -> None:
    """The engine may say where it keeps what it has computed of a conversation."""
    if not paired.conversation or paired.pair is None:
        return
    connector, now = paired.settings.connector, time.monotonic()
    if not streamed:
        connector.answered(paired.pair, answer, now)
        return
    for event in reversed(EVENT_END.split(answer)):
        if b'"kv_transfer_params"' in event:
            connector.answered(paired.pair, event.partition(b"data:")[2].strip(), now)
            return
