"""models.NAME.rewrite_response: an answer names the model as its client did, by the alias, and not as its backend does.

What changes is the value of `model`: of the answer's top level, and of the object within the events that begin and end a stream
of /v1/responses (`response`) and /v1/messages (`message`). Every other octet passes as it came. What is no JSON object, or has
no `model` that is a text, passes whole.
"""

from __future__ import annotations

import re
from typing import ClassVar

import msgspec

from gateway.core.edits import EventEditor
from gateway.core.inspection import Edit, members, splice
from gateway.errors import Refusal

INNER = {"/v1/responses": "response", "/v1/messages": "message"}  # what the model is named in once more, by path
KEPT = 1024  # octets of how an event begins
_NAMED = b'"model"'
_DATA = re.compile(rb"(?:\A(?:\xef\xbb\xbf)?|(?<=[\r\n]))data:[ ]?([^\r\n]*)")


class Renaming:
    """Of one answer: `name` is what it is to say; `path`: the request's."""

    def __init__(self, name: str, path: str):
        self.name, self._inner = msgspec.json.encode(name), INNER.get(path)

    def renamed(self, answer: bytes) -> bytes:
        """A JSON text, whole."""
        return splice(answer, self.edits(answer))

    def edits(self, answer: bytes) -> list[Edit]:
        return self._edits(answer, 0, self._inner) if _NAMED in answer else []

    def _edits(self, text: bytes, offset: int, inner: str | None) -> list[Edit]:
        """`offset`: of the text, in the answer."""
        try:
            found = members(text)
        except Refusal:
            return []
        edits = []
        for member in found:
            begin, end = member.value_begin, member.end
            if member.key == "model" and text.startswith(b'"', begin):
                edits.append(Edit(offset + begin, offset + end, self.name))
            elif member.key == inner and text.startswith(b"{", begin):
                edits += self._edits(text[begin:end], offset + begin, None)
        return edits


class EventRenamer(EventEditor):
    """The same of a stream, event by event. The first and the last one of /v1/responses hold all that was asked and said.

    Events mostly begin as the one before did, up to their model and including it, and need not be read once more.
    """

    held_most: ClassVar[int] = 1 << 20

    def __init__(self, renaming: Renaming):
        super().__init__()
        self._renaming = renaming
        self._begin, self._becomes = b"\n", b""  # of the last one that named its model once; no event begins so

    def edit(self, event: bytes) -> bytes:
        if _NAMED not in event:
            return event
        begin = self._begin
        if event.startswith(begin) and event.find(_NAMED, len(begin)) < 0:
            return self._becomes + event[len(begin) :]
        lines = _DATA.finditer(event)
        line, more = next(lines, None), next(lines, None)
        if line is None or more is not None:  # JSON that is spread over lines: no engine writes it so
            return event
        at, edits = line.start(1), self._renaming.edits(line[1])
        if len(edits) == 1 and edits[0].end <= KEPT:
            self._begin = event[: at + edits[0].end]
            self._becomes = event[: at + edits[0].begin] + self._renaming.name
        return splice(event, [Edit(at + begin, at + end, name) for begin, end, name in edits])
