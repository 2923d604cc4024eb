"""One stream out of the answers of two backends, and what must be known of the first for the second to go on.

`Seam` reads a body as `framing.ChunkedReader` does, event by event: what it hands on is whole events, so that a backend may die
anywhere and the client stands between two events. It keeps the text that has passed (bounded), and how many tokens that was,
where the stream says so exactly: by usage on every event, or by token ids. What ends a stream that has not come to its end (an
error of the engine's, `finish_reason` "abort" or "error", `[DONE]` without a reason: what vLLM sends when it is shut down) is
held back, until it is known whether another backend goes on.

Of the second answer, each event gets the first one's `id`, `created` and `model`; the role that the first one has given is
taken out, and usage is added up.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from gateway.core.continuation import CHAT, Continuation
from gateway.core.dialects.base import failed, status_of
from gateway.core.edits import EVENT_END, HELD_MOST
from gateway.core.framing import LAST_CHUNK, ChunkedReader, frame
from gateway.core.head import Malformed
from gateway.core.inspection import Edit, splice
from gateway.core.jsonbody import Member, Members, NotAnObject
from gateway.core.outcome import Outcome

TEXT_MOST: Final = 1 << 18  # characters that are kept of one answer; a longer one is not gone on with
_SAME: Final = ("id", "created", "model")


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Delta(msgspec.Struct, gc=False):
    role: Any = None
    content: str | None = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None
    function_call: Any = None
    refusal: Any = None
    audio: Any = None


class _Choice(msgspec.Struct, gc=False):
    index: int = 0
    delta: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: msgspec.Raw = msgspec.Raw(b"")  # of a completion, on its first event


class Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None
    object: Any = None


read = msgspec.json.Decoder(Chunk).decode  # raises ValueError, RecursionError
_NO_DELTA: Final = Delta()


class Seam:
    """A chunked body's reader (`framing.BodyReader`), over as many bodies as it takes (`go_on`).

    `broke`: the answer has ended, or is about to, in a way that another backend may mend. `ended`: its body is whole.
    """

    def __init__(self, continuation: Continuation) -> None:
        self._continuation, self._chat = continuation, continuation.path == CHAT
        self._reader = ChunkedReader()
        self.out = b""
        self.done = False
        self.broke: Outcome | None = None
        self.lost = False  # it cannot be gone on with any more
        self._raw = False  # nor need it be changed: all passes as it comes
        self._half = b""  # of an event
        self._held: list[bytes] = []  # events that tell of the end
        # what has passed
        self._text: list[str] = []
        self._size = 0
        self._tokens: int | None = 0  # that the text stands for; None: not known
        self._here: int | None = 0  # of the answer being read, also those whose text is still to come
        self._prompt: int | None = None
        self._prompt_ids = b""  # of a completion's prompt, as within a JSON array
        self._ids: bytearray | None = bytearray()  # that a completion has had generated; None: not all are known
        self._ids_end = 0  # those whose text is with the client; 0: not known which these are
        self._same: dict[str, bytes] = {}  # the members that all events have in common, as the first one has them
        self._role = False
        self._finished = self._terminal = False
        # of the answer that goes on
        self._second = False
        self._again = False  # nothing had been said before it: it is the whole answer
        self._before = 0  # tokens of all answers before
        self._counted = True  # that is exact
        self._known: tuple[bytes, bytes] = (b"", b"")  # how its events begin, and how they are to begin

    # -- as a body's reader --------------------------------------------------------------------------------------------

    @property
    def failure(self) -> Malformed | None:
        return self._reader.failure

    @property
    def extra(self) -> bytes:
        return self._reader.extra

    @extra.setter
    def extra(self, octets: bytes) -> None:
        self._reader.extra = octets

    @property
    def at_boundary(self) -> bool:
        return True  # all that passes is framed here

    @property
    def ended(self) -> bool:
        return self._reader.done

    @property
    def mendable(self) -> bool:
        """Whether another answer may go on, should this one's connection end here."""
        return not self.lost

    def feed(self, data: bytes) -> list[bytes]:
        whole, before = self._reader.between, self.done
        pieces = self._reader.feed(data)
        passed = pieces if self._raw else self._whole(pieces)
        if self._reader.done and self.broke is None and not self.lost and not self._terminal:
            self.broke = Outcome.UPSTREAM_TRUNCATED
        self.done = self._reader.done and self.broke is None
        if self.done and self._half:  # behind the terminal event
            passed, self._half = [*passed, self._half], b""
        if whole and self._reader.between and passed == pieces:
            self.out = self._reader.out  # as it came
        else:
            self.out = b"".join([frame(piece) for piece in passed if piece])
            if self.done and not before:
                self.out += LAST_CHUNK
        return passed

    # -- from one answer to the next -----------------------------------------------------------------------------------

    def body(self) -> bytes | None:
        """The request for what is still to come; None where it may not be asked for."""
        if self.lost or self._finished:
            return None
        text = "".join(self._text)
        if text and self._continuation.usage and self._prompt is None:
            return None
        ids = b"" if self._ids is None else bytes(self._ids[1 : self._ids_end])
        if ids:
            self._tokens = ids.count(b",") + 1
        return self._continuation.after(text, self._tokens, self._prompt_ids, ids)

    def go_on(self) -> None:
        """What is fed from now on is another backend's answer to `body()`."""
        self._reader = ChunkedReader()
        self._half, self._held, self.broke = b"", [], None
        self._second, self._again = True, not self._text
        self._before, self._here, self._counted = self._tokens or 0, 0, self._tokens is not None
        if self._ids is not None and (self._ids_end or self._again):
            del self._ids[self._ids_end :]  # the others are generated anew
        else:
            self._ids = None
        self._known = (b"", b"")

    def give_up(self) -> list[bytes]:
        """It is not gone on with. Returns what was held back, which may pass as it came."""
        held, self._held = self._held, []
        if self._reader.done:
            held, self._half = [*held, self._half], b""
        self.lost = self._raw = True
        self.done, self._text = self._reader.done, []
        return held

    # -- inside --------------------------------------------------------------------------------------------------------

    def _whole(self, pieces: list[bytes]) -> list[bytes]:
        """The events that are whole by now, and may pass."""
        if len(pieces) == 1 and not self._half and self.broke is None and _is_one(pieces[0]):  # nearly always
            return self._judge(pieces[0])
        data = self._half + b"".join(pieces)
        passed: list[bytes] = []
        at = 0
        for match in EVENT_END.finditer(data):
            event, at = data[at : match.end()], match.end()
            if self._raw:
                passed.append(event)
            elif self.broke is not None:
                self._hold(event)
            else:
                passed += self._judge(event)
        self._half = data[at:]
        if len(self._half) > HELD_MOST:
            self._surrender(raw=True)
        if self._raw:
            passed, self._half, self._held = [*passed, *self._held, self._half], b"", []
        return passed

    def _surrender(self, raw: bool = False) -> None:
        self.lost, self._text = True, []
        self._raw = self._raw or raw or not self._second

    def _judge(self, event: bytes) -> list[bytes]:
        """Take in what an event says. It passes, or another one in its place, or it is held back."""
        data = payload(event)
        if data == b"[DONE]":
            if not self._finished:
                return self._break(event)
            self._terminal = True
            return [event]
        if not data and (event.startswith(b":") or not event.strip()):
            return [event]
        try:
            chunk = read(data)
        except (ValueError, RecursionError):
            return self._surrender_to(event)
        choices = chunk.choices
        if chunk.error or chunk.object == "error":  # one below 500 is the client's own fault
            return self._break(event) if status_of(chunk.error) >= 500 else self._surrender_to(event)
        if choices:
            if len(choices) > 1 or choices[0].index:
                return self._surrender_to(event)
            if choices[0].finish_reason is not None and failed(choices[0].finish_reason):
                return self._break(event)
        rewritten = self._rewritten(event, data, chunk) if self._second else event
        self._note(chunk, data)
        return [rewritten] if rewritten else []

    def _break(self, event: bytes) -> list[bytes]:
        if self.lost:
            return [event]
        self.broke = Outcome.STREAM_ERROR
        self._held.append(event)
        return []

    def _hold(self, event: bytes) -> None:
        """What comes behind the event that broke it off."""
        self._held.append(event)

    def _surrender_to(self, event: bytes) -> list[bytes]:
        self._surrender()
        return [event]

    def _note(self, chunk: Chunk, data: bytes) -> None:
        usage = chunk.usage
        if usage is not None and usage.prompt_tokens is not None and (self._again or not self._second):
            self._prompt = usage.prompt_tokens
        if not chunk.choices:
            return
        if not self._same:
            self._same = {m.key: data[m.value_begin : m.end] for m in _members(data) if m.key in _SAME}
        choice = chunk.choices[0]
        delta = choice.delta or _NO_DELTA
        self._role = self._role or delta.role is not None
        if more_than_text(delta):
            self.lost = True
            self._text = []
            return
        text = delta.content if self._chat else choice.text
        if not self._chat:
            self._note_ids(choice, text)
        if usage is not None and usage.completion_tokens is not None:
            self._here = usage.completion_tokens
        elif choice.token_ids is not None and self._here is not None:
            self._here += len(choice.token_ids)
        elif text:
            self._here = None
        if choice.finish_reason:
            self._finished = True
        if text:
            self._tokens = None if self._here is None or self._tokens is None else self._before + self._here
            self._text.append(text)
            self._size += len(text)
            if self._size > TEXT_MOST:
                self._surrender()

    def _note_ids(self, choice: _Choice, text: str | None) -> None:
        if not self._prompt_ids and (self._again or not self._second):
            self._prompt_ids = _inside(choice.prompt_token_ids)
        if self._ids is None:
            return
        if choice.token_ids:
            for one in choice.token_ids:
                self._ids += b",%d" % one
        elif text:
            self._ids = None
            return
        if text:  # the last of several may be half of a character, which comes with the next one
            self._ids_end = len(self._ids) if len(choice.token_ids or ()) == 1 else 0

    def _rewritten(self, event: bytes, data: bytes, chunk: Chunk) -> bytes:
        """An event of an answer that goes on, as one of the first one's; empty where it has no place there."""
        if chunk.choices:
            choice = chunk.choices[0]
            delta = choice.delta or _NO_DELTA
            if self._role and delta.role is not None:
                if not delta.content and not choice.finish_reason and not choice.token_ids:
                    return b""
                return self._anew(data, chunk)
        if chunk.usage is not None:
            unknown = not chunk.choices and not self._continuation.usage and self._usage({}, chunk.usage) is None
            return b"" if unknown else self._anew(data, chunk)
        if self._prompt_ids and chunk.choices and _inside(chunk.choices[0].prompt_token_ids):
            return self._anew(data, chunk)
        begin, instead = self._known
        if begin and event.startswith(begin):
            return instead + event[len(begin) :]
        found = [m for m in _members(data) if m.key in self._same]
        edits = [Edit(m.value_begin, m.end, self._same[m.key]) for m in found]
        if not edits:
            return event
        last = max(m.end for m in found)
        at = event.index(data)
        rewritten = event[:at] + splice(data[:last], edits)
        self._known = event[: at + last], rewritten
        return rewritten + event[at + last :]

    def _anew(self, data: bytes, chunk: Chunk) -> bytes:
        """The event written anew, without the role, and with usage of the whole."""
        said: dict[str, Any] = msgspec.json.decode(data)
        said |= {key: msgspec.Raw(value) for key, value in self._same.items() if key in said}
        if self._role and chunk.choices and said["choices"][0].get("delta"):
            said["choices"][0]["delta"].pop("role", None)
        if self._prompt_ids and chunk.choices and said["choices"][0].get("prompt_token_ids"):
            said["choices"][0]["prompt_token_ids"] = None  # told already, and this prompt is a longer one
        if chunk.usage is not None:
            said["usage"] = self._usage(said["usage"], chunk.usage)
        return b"data: %b\n\n" % msgspec.json.encode(said)

    def _usage(self, said: dict[str, Any], usage: _Usage) -> dict[str, Any] | None:
        if self._again:
            return said
        if self._prompt is None or not self._counted or usage.completion_tokens is None:
            return None
        both = self._before + usage.completion_tokens
        said.pop("prompt_tokens_details", None)  # of the second prompt, which is no business of the client's
        return said | {
            "prompt_tokens": self._prompt,
            "completion_tokens": both,
            "total_tokens": self._prompt + both,
        }


def payload(event: bytes) -> bytes:
    """What one event says; nothing where it has other lines before that."""
    return event[5:].strip() if event.startswith(b"data:") else b""


def _inside(array: msgspec.Raw) -> bytes:
    """What stands in a JSON array; nothing where it is none."""
    octets = bytes(array)
    return octets[1:-1].strip() if octets.startswith(b"[") else b""


def _is_one(piece: bytes) -> bool:
    """Whether it is one whole event, with LF line ends."""
    return piece.endswith(b"\n\n") and piece.find(b"\n\n") == len(piece) - 2 and b"\r" not in piece


def more_than_text(delta: Delta) -> bool:
    called = delta.tool_calls or delta.function_call
    return bool(called or delta.reasoning or delta.reasoning_content or delta.refusal or delta.audio)


def _members(data: bytes) -> list[Member]:
    members = Members()
    try:
        members.feed(data)
    except NotAnObject:
        return []
    return members.found
