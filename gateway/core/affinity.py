"""What ties a request to those before it, so that it goes where they went: a session's name in a header field, a user's in
the body, or how the prompt begins.

An engine reuses what it has computed for the same beginning of a prompt. Turns of one conversation share all that was said
before; what they have in common, and with nobody else, is everything up to the first thing that the user says. So that is
taken, and not some number of octets from the start: behind a long system prompt all conversations would be the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, Final

import msgspec

from gateway.core.head import Field

# Octets of a raw prompt, or of a user's first words. What differs only behind them (a question about one long document) is
# kept together.
PREFIX = 1024


class _Body(msgspec.Struct):
    """The members that may say it, in any dialect."""

    user: Any = None
    prompt_cache_key: Any = None
    metadata: msgspec.Raw = msgspec.Raw(b"")
    system: msgspec.Raw = msgspec.Raw(b"")
    instructions: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")


class _Metadata(msgspec.Struct):
    user_id: Any = None


class _Message(msgspec.Struct):
    role: Any = None
    content: msgspec.Raw = msgspec.Raw(b"")


_body = msgspec.json.Decoder(_Body)
_metadata = msgspec.json.Decoder(_Metadata)
_messages = msgspec.json.Decoder(list[_Message])
_UNREADABLE: Final = (ValueError, RecursionError)  # msgspec's own errors are ValueErrors


class Keys:
    """Finds a request's key: the first of `by` (header, user, prefix) that it has. `header`: the field's name."""

    def __init__(self, by: Sequence[str], header: str):
        self._by, self._header = tuple(by), header.lower().encode("latin-1")
        self._in_body = not {"user", "prefix"}.isdisjoint(by)

    def asks_for_body(self, fields: Iterable[Field]) -> bool:
        """Whether the body has to be seen, for what the head does not say."""
        return self._in_body and not (self._by[0] == "header" and self._session(fields))

    def find(self, fields: Iterable[Field], path: bytes, body: bytes) -> float | None:
        """A number from 0 to 1, the same for the same key in every process; None where the request has none.

        `body`: JSON, whole; empty where it is not at hand.
        """
        said: _Body | None = None
        for source in self._by:
            if source == "header":
                found = self._session(fields)
            else:
                if said is None:
                    said = _read(body)
                found = _user(path, said) if source == "user" else _beginning(path, said)
            if found:
                return int.from_bytes(blake2b(found, digest_size=8).digest()) / 2**64
        return None

    def _session(self, fields: Iterable[Field]) -> bytes:
        for name, _, value, _ in fields:
            if name == self._header:
                return value
        return b""


def _read(body: bytes) -> _Body:
    try:
        return _body.decode(body) if body else _Body()
    except _UNREADABLE:
        return _Body()  # for the engine to judge: without a key it goes to the least loaded


def _user(path: bytes, said: _Body) -> bytes:
    """OpenAI's `prompt_cache_key`, which is there for this, and its older `user`; Anthropic's `metadata.user_id`."""
    names = [said.prompt_cache_key, said.user]
    if path == b"/v1/messages" and said.metadata:
        try:
            names = [_metadata.decode(said.metadata).user_id]
        except _UNREADABLE:
            return b""
    return next((name.encode("utf-8", "replace") for name in names if isinstance(name, str) and name), b"")


def _beginning(path: bytes, said: _Body) -> bytes:
    match path:
        case b"/v1/chat/completions":
            return _first_words(said.messages)
        case b"/v1/completions":
            return bytes(said.prompt)[:PREFIX]
        case b"/v1/messages":
            words = _first_words(said.messages)
            return bytes(said.system) + words if words else b""
        case b"/v1/responses":
            given = bytes(said.input)
            words = given[:PREFIX] if given.startswith(b'"') else _first_words(said.input)
            return bytes(said.instructions) + words if words else b""
    return b""  # no engine generates here, so it keeps nothing of a prompt


def _first_words(messages: msgspec.Raw) -> bytes:
    """All that stands before what the user first says, and how that begins. As octets: a client writes alike each time."""
    try:
        spoken = _messages.decode(messages) if messages else []
    except _UNREADABLE:
        return b""
    words = []
    for message in spoken:
        content = bytes(message.content)
        if message.role == "user":
            words.append(content[:PREFIX])
            break
        words.append(content)
    return b"\n".join(words)
