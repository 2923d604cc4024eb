"""What the gateway reads in a request's JSON body, and the few values that it may splice into it.

Nearly every body is settled by one typed decode in C, which looks for a handful of members and skips the rest. Where
that decoder is stricter than the engines' (lone surrogates, NaN, a byte order mark), or where places must be known,
`jsonbody.Members` finds the members instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from gateway.core.jsonbody import Member, Members, NotAnObject, truth, whole
from gateway.errors import Refusal

# The members that bound the answer's length; the first is the one that is put in where none is given. In Anthropic's
# dialect it is mandatory, and on /v1/completions its absence means 16 tokens (OpenAI's reference, and vLLM).
LENGTH_MEMBERS: dict[bytes, tuple[str, ...]] = {
    b"/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    b"/v1/completions": ("max_tokens",),
    b"/v1/responses": ("max_output_tokens",),
    b"/v1/messages": ("max_tokens",),
}
ABSENT_COMPLETIONS = 16
NOT_JSON = "the request body is not a JSON object: "


class Facts(NamedTuple):
    model: str | None
    stream: bool | None


class Rewritten(NamedTuple):
    facts: Facts
    body: bytes
    usage_asked: bool  # by the gateway, where the client itself had not


class Edit(NamedTuple):
    begin: int
    end: int
    octets: bytes


class _Seen(msgspec.Struct, frozen=True):
    model: Any = None
    stream: Any = None


class TokenRules(NamedTuple):
    """limits.max_tokens: what is put in where the client says nothing, and what a client may ask for at most."""

    default: int | None = None
    cap: int | None = None
    reject: bool = False


class Inspector:
    """Looks into bodies by the operator's rules. `fields`: member -> reject or strip (what is passed is left out)."""

    def __init__(self, fields: Mapping[str, str], tokens: TokenRules = TokenRules(), inject_usage: bool = False):
        self.fields = dict(fields)
        self.tokens = tokens
        self.inject_usage = inject_usage
        watched: list[Any] = [
            (f"watched_{i}", msgspec.Raw, msgspec.field(default=msgspec.Raw(b""), name=name))
            for i, name in enumerate(self.fields)
            if name not in ("model", "stream")
        ]
        self._decoder = msgspec.json.Decoder(msgspec.defstruct("Watched", watched, bases=(_Seen,), frozen=True))
        self._watched = [name for name, _, _ in watched]
        self._strips = "strip" in self.fields.values()
        self._splices = tokens.cap is not None or tokens.default is not None or inject_usage
        self._decoded = {"model", "stream"}.isdisjoint(self.fields)  # else the members are always looked for one by one

    def edits(self, path: bytes) -> bool:
        """Whether a body for `path` may have to be changed, and so must be held whole."""
        return self._strips or (self._splices and path in LENGTH_MEMBERS)

    def read(self, body: bytes) -> Facts:
        """A whole body that needs no change. Raises Refusal where it is no JSON object, or holds a refused member."""
        if not self._decoded:
            return self.facts(members(body))
        try:
            seen: Any = self._decoder.decode(body)
        except (msgspec.MsgspecError, RecursionError):
            return self.facts(members(body))
        for attribute in self._watched:
            if getattr(seen, attribute):
                return self.facts(members(body))
        return Facts(_model(seen.model), truth(seen.stream))

    def facts(self, found: list[Member]) -> Facts:
        """By the members of a body. Raises Refusal where one of them is refused."""
        model: str | None = None
        stream: bool | None = None
        for member in found:
            rule = self.fields.get(member.key)
            if rule == "reject" and member.value != b"null":
                raise Refusal(
                    "bad_request",
                    f"{member.key!r} is not taken from clients: it belongs to the serving system (fields.{member.key})",
                    param=member.key,
                )
            if member.key == "model":
                model = _model(_decoded(member.value))
            elif member.key == "stream":
                stream = truth(_decoded(member.value))
        return Facts(model, stream)

    def rewrite(self, path: bytes, body: bytes) -> Rewritten:
        """A whole body, with whatever the rules splice into it. Raises Refusal."""
        found = members(body)
        facts = self.facts(found)
        stripped = self._strip(found)
        if stripped:
            body = splice(body, stripped)
            found = members(body)
        edits: list[Edit] = []
        asked = False
        if path in LENGTH_MEMBERS and found:
            edits += self._length(path, found)
            if self.inject_usage and facts.stream and path in (b"/v1/chat/completions", b"/v1/completions"):
                asking = _ask_for_usage(found)
                edits, asked = edits + asking, bool(asking)
        return Rewritten(facts, splice(body, edits), asked)

    def _strip(self, found: list[Member]) -> list[Edit]:
        edits, kept_end = [], None
        for i, member in enumerate(found):
            if self.fields.get(member.key) != "strip":
                kept_end = member.end
            elif i + 1 < len(found) and any(self.fields.get(m.key) != "strip" for m in found[i + 1 :]):
                edits.append(Edit(member.begin, found[i + 1].begin, b""))
            else:  # nothing kept follows: with it goes the comma before it
                begin = member.begin if kept_end is None else kept_end
                edits.append(Edit(begin, found[-1].end, b""))
                break
        return edits

    def _length(self, path: bytes, found: list[Member]) -> list[Edit]:
        names, cap, edits, given = LENGTH_MEMBERS[path], self.tokens.cap, [], False
        nulls = []
        if cap is None and self.tokens.default is None:
            return []
        # of a name that is there twice, the last one holds for every parser that engines use
        for member in {member.key: member for member in found if member.key in names}.values():
            asked = _number(member)
            if asked is None:
                nulls.append(member)
                continue
            given = True
            if cap is not None and not asked <= cap:  # nan too
                if self.tokens.reject:
                    raise Refusal(
                        "bad_request",
                        f"{member.key} is {asked:g}; at most {cap} is allowed here (limits.max_tokens.cap)",
                        param=member.key,
                    )
                edits.append(Edit(member.value_begin, member.end, b"%d" % cap))
        if given:
            return edits
        put_in = self._for_absent(path)
        if put_in is None:
            return edits
        if nulls:
            return [*edits, Edit(nulls[-1].value_begin, nulls[-1].end, b"%d" % put_in)]
        return [*edits, Edit(found[0].begin, found[0].begin, b'"%b": %d, ' % (names[0].encode(), put_in))]

    def _for_absent(self, path: bytes) -> int | None:
        default, cap = self.tokens.default, self.tokens.cap
        if default is not None:
            return default if cap is None else min(default, cap)
        if cap is None or path == b"/v1/messages" or (path == b"/v1/completions" and cap >= ABSENT_COMPLETIONS):
            return None
        return cap


def members(body: bytes) -> list[Member]:
    """The top-level members of a whole body. Raises Refusal where it is no JSON object."""
    quickly = whole(body)
    if quickly is not None:
        return quickly
    found = Members()
    try:
        found.feed(body)
    except NotAnObject as error:
        raise not_json(str(error)) from None
    if not found.complete:
        raise not_json("it ends before the object does")
    return found.found


def not_json(why: str) -> Refusal:
    return Refusal("bad_request", NOT_JSON + why)


def splice(body: bytes, edits: list[Edit]) -> bytes:
    """`body` with each edit's octets in place of its range."""
    for begin, end, octets in sorted(edits, reverse=True):
        body = body[:begin] + octets + body[end:]
    return body


def _ask_for_usage(found: list[Member]) -> list[Edit]:
    """stream_options.include_usage, where the client does not ask for it itself."""
    given = [member for member in found if member.key == "stream_options"]
    if not given:
        return [Edit(found[0].begin, found[0].begin, b'"stream_options": {"include_usage": true}, ')]
    last = given[-1]  # of several, the one that holds
    if last.value == b"null":
        return [Edit(last.value_begin, last.end, b'{"include_usage": true}')]
    if last.value is None or not last.value.startswith(b"{"):
        return []  # too long to be told, or nothing that could be asked in: the engine's to refuse
    inner = members(last.value)
    asked = [member for member in inner if member.key == "include_usage"]
    at = last.value_begin
    if asked:
        if truth(_decoded(asked[-1].value)):
            return []
        return [Edit(at + asked[-1].value_begin, at + asked[-1].end, b"true")]
    return [Edit(at + 1, at + 1, b'"include_usage": true' + (b", " if inner else b""))]


def _decoded(value: bytes | None) -> object:
    if value is None:
        return None
    try:
        return msgspec.json.decode(value)
    except (msgspec.MsgspecError, RecursionError):
        return None


def _number(member: Member) -> float | None:
    """A number, also one in a string: engines (pydantic) take both. None for null; Refusal for anything else."""
    found = _decoded(member.value)
    if found is None and member.value is not None:
        if member.value == b"null":
            return None
        found = member.value.decode("latin-1")  # perhaps 1e400, which is too large for the decoder
    if isinstance(found, (int, float, str)) and not isinstance(found, bool):
        try:
            return float(found)
        except (ValueError, OverflowError):
            pass
    raise Refusal("bad_request", f"{member.key} is no number", param=member.key)


def _model(found: object) -> str | None:
    return found if isinstance(found, str) else None
