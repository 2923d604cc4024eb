"""prompt_logprobs: merge. P computes them with the prompt; D is not asked for them, and its whole answer gets P's.

They stand beside the choices in a chat's answer, and in each choice elsewhere; they are passed on octet for octet.
"""

from __future__ import annotations

from typing import Final

import msgspec

from gateway.core.disagg.asked import Asked
from gateway.core.disagg.body import Body
from gateway.errors import Refusal

_NAME: Final = "prompt_logprobs"
_CHAT: Final = b"/v1/chat/completions"


def found(said: Body) -> bytes:
    """In P's answer; b"" where there are none."""
    if b"prompt_logprobs" not in said.octets:
        return b""
    choices = _choices(said)
    return said.raw(_NAME) or (Body(choices[0]).raw(_NAME) if choices else None) or b""


def merged(asked: Asked, answer: bytes, logprobs: bytes) -> bytes:
    """D's whole answer with them. As it was, where they are not asked for, or it is an error."""
    if asked.prompt_logprobs is None or not logprobs:
        return answer
    try:
        said = Body(answer)
        choices = [Body(choice) for choice in _choices(said)]
    except Refusal:
        return answer
    if not choices:
        return answer
    if asked.path == _CHAT:
        return said.edited({_NAME: logprobs})
    return said.edited({"choices": b"[%b]" % b", ".join([choice.edited({_NAME: logprobs}) for choice in choices])})


def _choices(said: Body) -> list[bytes]:
    raw = said.raw("choices")
    try:
        choices = msgspec.json.decode(raw, type=list[msgspec.Raw]) if raw is not None else []
    except (msgspec.MsgspecError, RecursionError):
        return []
    return [bytes(choice) for choice in choices]
