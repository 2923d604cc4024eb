"""What every dialect has: how it reads an event and an answer, and how it words an error.

A dialect is the shape of one API. It is stateless: one event's octets go in, one `Reading` comes out, and the meter
adds the readings up. Only the fields that matter are decoded, into typed structs; what does not decode says nothing,
and an odd usage (numbers as strings, say) must not hide the event that it comes with. Nothing here raises.
"""

from __future__ import annotations

import abc
import http
from typing import Annotated, Any, Final, TypeVar

import msgspec

from gateway.core.outcome import RULINGS
from gateway.core.sse import Event

T = TypeVar("T")

UNREADABLE: Final = (ValueError, RecursionError)  # msgspec's own errors are ValueErrors
ONE: Final = (0,)  # the choices of an event in which there is only one

# What may be counted. A number beyond it is a mistake, and would not survive as a float.
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class Reading(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """What one event, or one whole answer, says."""

    output: bool = False  # an output event: it carries what a token brought
    visible: bool = False  # and what it carries is shown to people: no reasoning, no token without text
    choices: tuple[int, ...] = ()  # the indexes that it names
    tokens: int | None = None  # of choices[0], so far: usage that goes along with the choice
    token_ids: int = 0  # how many ids of generated tokens it carries
    finish_reason: str | None = None
    recomputed: bool = False  # the engine has dropped it under pressure, for somebody to ask again (vLLM Ascend)
    terminal: bool = False  # the stream says that it is complete
    error: str | None = None  # the error's type or code, never its message: that may quote a prompt
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None  # of the whole answer
    usage_only: bool = False  # it exists for its usage alone
    # Where the event says nothing beyond "one more output like this": the key of the one string that makes it so, the
    # string, and how short it may become without changing what the event says (`Meter.shape`).
    key: bytes = b""
    text: str = ""
    least: int = 1


NOTHING: Final = Reading()


class _Error(msgspec.Struct, gc=False):
    code: Any = None
    type: Any = None


class _Errors(msgspec.Struct, gc=False):
    error: _Error | None = None
    object: Any = None  # "error": vLLM's, some time ago, which is the error itself
    code: Any = None
    type: Any = None


_errors = msgspec.json.Decoder(_Errors)
_NO_ERRORS: Final = _Errors()
_STATUSES: Final = frozenset(status.value for status in http.HTTPStatus if status.value >= 400)
# docs.anthropic.com, API, Errors; 529 is of no registry, and 503 says the same
_STATUS_OF: Final = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "overloaded_error": 503,
}


class Dialect(abc.ABC):
    __slots__ = ()

    name: str

    @abc.abstractmethod
    def read(self, event: Event) -> Reading:
        """What one event of a stream says."""

    @abc.abstractmethod
    def read_whole(self, body: bytes) -> Reading:
        """What an unstreamed answer says."""

    def as_status(self, error: bytes) -> tuple[int, bytes]:
        """The status that an error event stands for, and the body that goes with it: the event's own JSON, if it is one.

        vLLM gives the status as the error's code, Anthropic a type that stands for one; else it is 500.
        """
        try:
            found = _errors.decode(error)
        except UNREADABLE:
            found = _NO_ERRORS
        said = found if found.object == "error" and found.error is None else found.error
        if said is None:
            return 500, self.error_body("stream_error", "the engine's stream began with an error")
        if type(said.code) is int and said.code in _STATUSES:
            return said.code, error
        return _STATUS_OF.get(said.type, 500) if isinstance(said.type, str) else 500, error

    def error_event(self, code: str, message: str) -> bytes:
        """An error in the middle of a stream, as one event."""
        return b"data: %b\n\n" % self.error_body(code, message)

    def error_body(self, code: str, message: str, type: str | None = None, param: str | None = None) -> bytes:
        """The JSON of a refusal. Its type, if not given, is the code's own."""
        error = {"message": clean(message), "type": type or type_of(code), "param": param, "code": code}
        return msgspec.json.encode({"error": error})


def type_of(code: str) -> str:
    ruling = RULINGS.get(code)
    return ruling.type if ruling else "api_error"


def clean(text: str) -> str:
    """Text that can be encoded: a lone surrogate, from a path or a header, cannot."""
    return text.encode("utf-8", "replace").decode()


def name_of(error: Any) -> str:
    """A short word for an error, whatever shape it has."""
    if isinstance(error, dict):
        for word in (error.get("type"), error.get("code")):
            if isinstance(word, str) and word:
                return word[:64]
            if isinstance(word, int) and -999_999 <= word <= 999_999:
                return str(word)
    return "error"


def status_of(error: Any) -> int:
    """The status that an OpenAI error's code stands for; 500 where it says none."""
    code = error.get("code") if isinstance(error, dict) else None
    return code if type(code) is int and code in _STATUSES else 500


def failed(reason: str | None) -> bool:
    """Whether a finish reason is a failure: vLLM ends what it aborts at shutdown with "abort"."""
    return reason in ("abort", "error")


def part(decoder: msgspec.json.Decoder[T | None], raw: msgspec.Raw | msgspec.UnsetType, default: T) -> T:
    """A part that is decoded apart, so that an odd one does not hide what it comes with."""
    if raw is msgspec.UNSET:
        return default
    try:
        return decoder.decode(raw) or default
    except UNREADABLE:
        return default
