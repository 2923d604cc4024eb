"""What is changed in a decode engine's answer, or kept of it, where an option asks for that."""

from __future__ import annotations

import time
from typing import Final

from gateway.core.disagg.body import Body
from gateway.core.disagg.usage import CachedTokens, corrected
from gateway.core.edits import EVENT_END, Listener, WholeEditor
from gateway.errors import Refusal
from gateway.net.paired import Paired
from gateway.net.relay import Edit

# Whose usage says cached_tokens
_COUNTED: Final = frozenset((b"/v1/chat/completions", b"/v1/completions", b"/v1/responses"))


def edit(paired: Paired, streamed: bool) -> Edit | None:
    """Of an answer with a status of 2xx."""
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
