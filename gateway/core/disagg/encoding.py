"""A stage before prefill: an encoder engine (E) for each image, sound and film of a conversation (EPD, pd.md 5.13).

It stands before any connector. Each encoder must answer with 200 before P is asked. What they say of where the embeddings are
(ec_transfer_params) goes to P, and to a D that serves alone; nothing else is changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from gateway.core.disagg.asked import Asked
from gateway.core.disagg.body import FALSE, ONE, Body
from gateway.errors import Refusal

PATH: Final = b"/v1/chat/completions"
ITEMS_MOST: Final = 256  # of one request
_TYPES: Final = frozenset(("image_url", "audio_url", "video_url", "input_audio"))
_KEPT: Final = ("model", "mm_processor_kwargs", "media_io_kwargs", "priority", "cache_salt")


class _Part(msgspec.Struct):
    type: str = ""


class _Message(msgspec.Struct):
    content: msgspec.Raw = msgspec.Raw(b"")


_messages = msgspec.json.Decoder(list[_Message])
_parts = msgspec.json.Decoder(list[msgspec.Raw])
_part = msgspec.json.Decoder(_Part)


def media(asked: Asked) -> list[bytes]:
    """The content parts that an encoder is for, octet for octet, in order; the same one once."""
    raw = asked.body.raw("messages")
    if asked.path != PATH or raw is None:
        return []
    found: dict[bytes, None] = {}
    try:
        for message in _messages.decode(raw):
            content = bytes(message.content)
            if content.lstrip().startswith(b"["):
                found |= dict.fromkeys(
                    octets for part in _parts.decode(content) if _part.decode(octets := bytes(part)).type in _TYPES
                )
    except (msgspec.MsgspecError, RecursionError):
        raise Refusal(
            "bad_request", "messages: they cannot be read, and so their media cannot be found", param="messages"
        ) from None
    if len(found) > ITEMS_MOST:
        raise Refusal("bad_request", f"messages: found {len(found)} media; at most {ITEMS_MOST} are taken", param="messages")
    return list(found)


def bodies(asked: Asked) -> list[bytes]:
    """One request a medium: without text, of one token."""
    kept = {name: raw for name in _KEPT if (raw := asked.body.raw(name)) is not None}
    return [
        Body(b"{}").edited(
            kept
            | {
                "messages": b'[{"role": "user", "content": [%b]}]' % item,
                "stream": FALSE,
                "max_tokens": ONE,
                "max_completion_tokens": ONE,
            }
        )
        for item in media(asked)
    ]


def merged(answers: Sequence[bytes]) -> bytes:
    """ec_transfer_params of all the answers as one object, octet for octet; of a key that two say, the later one's. b"" where
    none says any: encoders that share a store do not. Raises Refusal for an answer that is no JSON object."""
    found: dict[str, bytes] = {}
    for answer in answers:
        given = Body(answer).inner("ec_transfer_params")
        if given is not None:
            found |= {key: raw for key in given.names if (raw := given.raw(key)) is not None}
    return Body(b"{}").edited(found) if found else b""
