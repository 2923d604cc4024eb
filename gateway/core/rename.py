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
_NAMED = b'"model"'
_DATA = re.compile(rb"(?:\A(?:\xef\xbb\xbf)?|(?<=[\r\n]))data:[ ]?([^\r\n]*)")


class Renaming:
    """Of one answer: `name` is what it is to say; `path`: the request's."""

    def __init__(self, name: str, path: str):
        self._name, self._inner = msgspec.json.encode(name), INNER.get(path)

    def renamed(self, answer: bytes) -> bytes:
        """A JSON text, whole."""
        if _NAMED not in answer:
            return answer
        edits = self._edits(answer, 0, self._inner)
        return splice(answer, edits) if edits else answer

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
                edits.append(Edit(offset + begin, offset + end, self._name))
            elif member.key == inner and text.startswith(b"{", begin):
                edits += self._edits(text[begin:end], offset + begin, None)
        return edits


class EventRenamer(EventEditor):
    """The same of a stream, event by event. The first and the last one of /v1/responses hold all that was asked and said."""

    held_most: ClassVar[int] = 1 << 20

    def __init__(self, renaming: Renaming):
        super().__init__()
        self._renaming = renaming

    def edit(self, event: bytes) -> bytes:
        if _NAMED not in event:
            return event
        lines = _DATA.finditer(event)
        line, more = next(lines, None), next(lines, None)
        if line is None or more is not None:  # JSON that is spread over lines: no engine writes it so
            return event
        renamed = self._renaming.renamed(line[1])
        return event if renamed is line[1] else event[: line.start(1)] + renamed + event[line.end(1) :]
