"""vLLM's ways of saying no, word for word, since clients and gateways match on them.

Three families: FastAPI's own `{"detail": ...}`, the validation of the body ("1 validation error", type "Bad Request"),
and what the serving layer finds ("BadRequestError", "NotFoundError"). Only the last takes another shape on Anthropic's
paths.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from gateway.synthetic.text import json_text

_UNSET: Any = object()
_KINDS: Final = {
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    429: "RateLimitError",
    503: "ServiceUnavailableError",
}


class VllmRefusal(Exception):
    """An answer with a status of 400 or more. `anthropic`: whether Anthropic's paths word it their own way."""

    def __init__(self, status: int, body: dict[str, Any], *, anthropic: bool = False, headers: Mapping[str, str] | None = None):
        super().__init__(str(body))
        self.status, self._body, self._anthropic = status, body, anthropic
        self.headers = dict(headers or {})

    def render(self, path: str) -> str:
        if self._anthropic and path.startswith("/v1/messages"):
            error = self._body["error"]
            return json_text({"type": "error", "error": {"type": error["type"], "message": error["message"]}})
        return json_text(self._body)


def detail(status: int, text: str) -> VllmRefusal:
    return VllmRefusal(status, {"detail": text})


def failed(status: int, message: str, headers: Mapping[str, str] | None = None) -> VllmRefusal:
    """What the engine found, or a fault that was asked for."""
    kind = _KINDS.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return VllmRefusal(status, body, anthropic=True, headers=headers)


def unknown_model(name: str, served: str) -> VllmRefusal:
    return _serving(404, "NotFoundError", f"The model `{name}` does not exist. Valid aliases: {served}.", "model")


def bad_request(message: str, param: str | None = None, value: Any = _UNSET) -> VllmRefusal:
    """`param` and `value` are repeated at the end of the text, as vLLM does."""
    if param is not None:
        message += f" (parameter={param})" if value is _UNSET else f" (parameter={param}, value={value})"
    return _serving(400, "BadRequestError", message, param)


def invalid(kind: str, where: str, message: str, given: Any, context: dict[str, str] | None = None) -> VllmRefusal:
    """The body does not have the shape it must have: one entry of pydantic's list of complaints."""
    complaint: dict[str, Any] = {"type": kind, "loc": where, "msg": message, "input": _shown(given)}
    if context is not None:
        complaint["ctx"] = context
    return _validation(str(complaint), where)


def unsupported_media_type() -> VllmRefusal:
    return _validation("Unsupported Media Type: Only 'application/json' is allowed", None)


def _validation(complaint: str, param: str | None) -> VllmRefusal:
    message = f"1 validation error:\n  {complaint}"
    return VllmRefusal(400, {"error": {"message": message, "type": "Bad Request", "param": param, "code": 400}})


def _serving(status: int, kind: str, message: str, param: str | None) -> VllmRefusal:
    body = {"error": {"message": message, "type": kind, "param": param, "code": status}}
    return VllmRefusal(status, body, anthropic=True)


def _shown(given: Any) -> str:
    if isinstance(given, dict | list):
        return f"<{type(given).__name__} of {len(given)} items>"
    return str(given)
