"""The admin listener: what operators, Prometheus and kubelets ask, never the public.

It decides nothing: everything is asked of a `Control`. Its own care is who may ask. With a token, whoever has it.
Without one, whoever can connect, and that includes the browser of somebody who can: so what changes state is refused to
pages of other origins (CSRF), and to pages that reached us under a name not known to be ours (DNS rebinding).
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Any, Protocol
from urllib.parse import urlsplit

from aiohttp import hdrs, web

from gateway.errors import ConfigError

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/livez", "/readyz"})  # kubelets have no token
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Control(Protocol):
    """What the admin listener may ask of the gateway."""

    def render_metrics(self, accept: str | None) -> tuple[bytes, str]:
        """The exposition, and its content type."""

    def ready(self) -> str | None:
        """None when requests can be served, else why not, in a few words."""

    def backends(self) -> list[dict[str, Any]]: ...

    def streams(self) -> list[dict[str, Any]]:
        """What is in flight: request_id, client, method, path, model, backend, phase, age_s, output_events, bytes_out,
        paused."""

    def abort(self, request_id: str) -> bool:
        """Whether there was such an exchange."""

    async def reload(self) -> None:
        """Raises ConfigError, and then nothing has changed."""

    def config(self) -> dict[str, Any]:
        """The effective configuration, secrets redacted."""


def admin_app(control: Control, *, token: str | None = None, names: Collection[str] = ()) -> web.Application:
    """The application. `names`: of this host, beside `localhost`, under which a browser may change state."""
    if token == "":
        raise ValueError("an empty admin token would be no token at all")
    admin = _Admin(control)
    app = web.Application(middlewares=[_answer, _guard(token, frozenset(name.lower() for name in names))])
    app.add_routes(
        [
            web.get("/metrics", admin.metrics),
            web.get("/livez", admin.livez),
            web.get("/readyz", admin.readyz),
            web.get("/-/backends", admin.backends),
            web.get("/-/streams", admin.streams),
            web.delete("/-/streams/{request_id}", admin.abort),
            web.post("/-/reload", admin.reload),
            web.get("/-/config", admin.config),
        ]
    )
    return app


class _Admin:
    """The handlers: each one asks one question of the control, and writes the answer down."""

    def __init__(self, control: Control):
        self._control = control

    async def metrics(self, request: web.Request) -> web.Response:
        accept = ", ".join(request.headers.getall(hdrs.ACCEPT, [])) or None
        body, content_type = self._control.render_metrics(accept)
        return web.Response(body=body, headers={hdrs.CONTENT_TYPE: content_type})

    async def livez(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(self, request: web.Request) -> web.Response:
        reason = self._control.ready()
        if reason is None:
            return web.Response(text="ok\n")
        return web.Response(status=503, text=reason + "\n")

    async def backends(self, request: web.Request) -> web.Response:
        return _json(self._control.backends())

    async def streams(self, request: web.Request) -> web.Response:
        return _json(self._control.streams())

    async def abort(self, request: web.Request) -> web.Response:
        if self._control.abort(request.match_info["request_id"]):
            return web.Response(status=204)
        return _error(404, "unknown_request", "no exchange with this request id is in flight")

    async def reload(self, request: web.Request) -> web.Response:
        try:
            await self._control.reload()
        except ConfigError as error:
            return _error(400, "bad_request", str(error))
        return _json({"status": "reloaded"})

    async def config(self, request: web.Request) -> web.Response:
        return _json(self._control.config())


@web.middleware
async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every answer, aiohttp's own and our mistakes included, in one shape, and never stored."""
    try:
        response = await handler(request)
    except web.HTTPMethodNotAllowed as refusal:
        allow = ", ".join(sorted(refusal.allowed_methods))
        response = _error(405, "method_not_allowed", f"{request.path} allows {allow}", {"Allow": allow})
    except web.HTTPNotFound:
        response = _error(404, "unknown_path", f"there is nothing at {request.path}")
    except web.HTTPException as refusal:
        response = _error(refusal.status, "bad_request", refusal.reason)
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        response = _error(500, "internal", "the gateway failed to answer; its log says why")
    response.headers.setdefault(hdrs.CACHE_CONTROL, "no-store")
    response.headers.setdefault("X-Content-Type-Options", "nosniff")
    return response


def _guard(token: str | None, names: Collection[str]) -> Any:
    """The middleware that lets in whom the module's docstring says."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if token is not None and request.path not in OPEN_PATHS and not _has_token(request, token):
            challenge = {"WWW-Authenticate": 'Bearer realm="tokenpipe admin"'}
            return _error(401, "unauthenticated", "give the admin token: Authorization: Bearer TOKEN", challenge)
        if request.method not in SAFE_METHODS:
            why = _foreign(request, names, trusted=token is not None)
            if why is not None:
                return _error(403, "forbidden", why)
        return await handler(request)

    return guard


def _has_token(request: web.Request, token: str) -> bool:
    scheme, _, given = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    # As bytes: compare_digest takes no text beyond ASCII, and a header field may hold any octet.
    same = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), token.encode())
    return same and scheme.lower() == "bearer"


def _foreign(request: web.Request, names: Collection[str], *, trusted: bool) -> str | None:
    """Why this comes from a page that is not ours, or None. Only browsers send the fields that are looked at.

    `trusted`: a token was shown, which no browser adds by itself.
    """
    if request.headers.get("Sec-Fetch-Site", "none") not in {"none", "same-origin"}:
        return "a page of another site may not change the gateway"
    origins = request.headers.getall(hdrs.ORIGIN, [])
    if not origins:
        return None
    host = request.headers.get(hdrs.HOST, "")
    if not host or any(origin.lower().partition("://")[2] != host.lower() for origin in origins):
        return "a page of another origin may not change the gateway"
    if not trusted and not _is_ours(host, names):
        return f"{host} is not known to be this gateway: use its address, or set admin.token_file"
    return None


def _is_ours(host: str, names: Collection[str]) -> bool:
    """An address cannot be rebound, and `localhost` is nobody else's name."""
    name = ""
    try:
        name = urlsplit("//" + host).hostname or ""
        ipaddress.ip_address(name)
    except ValueError:  # no address, or not even a host
        return name == "localhost" or name in names
    return True


def _json(content: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    body = json.dumps(content, default=str) + "\n"
    return web.Response(status=status, text=body, content_type="application/json", headers=headers)


def _error(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> web.Response:
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 500: "api_error"}
    error = {"message": message, "type": kinds.get(status, "invalid_request_error"), "param": None, "code": code}
    return _json({"error": error}, status, headers)
