"""The admin listener: what operators, Prometheus and kubelets ask, never the public.

It decides nothing: everything is asked of a `Control`. Its own care is who may ask. With a token, whoever has it.
Without one, whoever can connect, and that includes the browser of somebody who can: so what changes state is refused to
pages of other origins (CSRF), and to pages that reached us under a name not known to be ours (DNS rebinding).

The token is a bearer's. A browser cannot be told to send one, so that the live page, its feed, and the end of a stream
take it as the password of HTTP's Basic scheme too (RFC 7617), and the page asks for it so.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import ipaddress
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator
from typing import Any, Protocol
from urllib.parse import urlsplit

from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError

from gateway.control import dashboard
from gateway.control.dashboard_feed import Feed, Source
from gateway.control.listener import QUOTED
from gateway.control.replies import error, reply
from gateway.errors import ConfigError

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/livez", "/readyz"})  # kubelets have no token
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Control(Source, Protocol):
    """What the admin listener may ask of the gateway, beside what its live page does."""

    def render_metrics(self, accept: str | None) -> tuple[Iterator[bytes], str]:
        """The exposition, in pieces that are made one after the other, and its content type."""

    def ready(self) -> str | None:
        """None when requests can be served, else why not, in a few words."""

    def streams(self) -> list[dict[str, Any]]:
        """What is in flight: request_id, client, method, path, model, backend, prefill_backend, phase, age_s, output_events,
        bytes_out, paused."""

    def abort(self, request_id: str) -> bool:
        """Whether there was such an exchange."""

    async def reload(self) -> None:
        """Raises ConfigError, and then nothing has changed."""

    def config(self) -> dict[str, Any]:
        """The effective configuration, secrets redacted."""


def admin_app(
    control: Control, *, token: str | None = None, names: Collection[str] = (), more: Iterable[web.RouteDef] = ()
) -> web.Application:
    """The application. `names`: of this host, beside `localhost`, under which a browser may change state. `more`: routes
    of others (control.fleet)."""
    if token == "":
        raise ValueError("an empty admin token would be no token at all")
    feed = Feed(control)
    admin = _Admin(control, feed)
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
            web.get(dashboard.EVENTS, admin.events, allow_head=False),
            *dashboard.routes(),
            *more,
        ]
    )
    app.on_shutdown.append(lambda _: feed.stop())
    return app


class _Admin:
    """The handlers: each one asks one question of the control, and writes the answer down."""

    def __init__(self, control: Control, feed: Feed):
        self._control, self._feed = control, feed

    async def metrics(self, request: web.Request) -> web.Response:
        accept = ", ".join(request.headers.getall(hdrs.ACCEPT, [])) or None
        pieces, content_type = self._control.render_metrics(accept)
        return web.Response(body=_in_turn(pieces), headers={hdrs.CONTENT_TYPE: content_type})

    async def livez(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(self, request: web.Request) -> web.Response:
        reason = self._control.ready()
        if reason is None:
            return web.Response(text="ok\n")
        return web.Response(status=503, text=reason + "\n")

    async def backends(self, request: web.Request) -> web.Response:
        return reply(self._control.backends())

    async def streams(self, request: web.Request) -> web.Response:
        return reply(self._control.streams())

    async def abort(self, request: web.Request) -> web.Response:
        if self._control.abort(request.match_info["request_id"]):
            return web.Response(status=204)
        return error(404, "unknown_request", "no exchange with this request id is in flight")

    async def reload(self, request: web.Request) -> web.Response:
        try:
            await self._control.reload()
        except ConfigError as wrong:
            return error(400, "bad_request", str(wrong))
        return reply({"status": "reloaded"})

    async def config(self, request: web.Request) -> web.Response:
        return reply(self._control.config())

    async def events(self, request: web.Request) -> web.StreamResponse:
        if self._feed.full:
            message = "as many as may watch at a time are watching: close a page, or ask /-/streams and /-/backends"
            return error(503, "overloaded", message, {"Retry-After": "10"})
        return await self._feed.serve(request)


async def _in_turn(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """The pieces, each made in a turn of the event loop's of its own: whatever has come for a stream meanwhile goes first."""
    for piece in pieces:
        if piece:
            yield piece
        await asyncio.sleep(0)


@web.middleware
async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every answer, aiohttp's own and our mistakes included, in one shape, and never stored."""
    try:
        response = await handler(request)
    except web.HTTPMethodNotAllowed as refusal:
        allow = ", ".join(sorted(refusal.allowed_methods))
        response = error(405, "method_not_allowed", f"{request.path} allows {allow}", {"Allow": allow})
    except web.HTTPNotFound:
        response = error(404, "unknown_path", f"there is nothing at {request.path}")
    except web.HTTPException as refusal:
        response = error(refusal.status, "bad_request", refusal.reason)
    except ConnectionError:
        raise  # the caller has left
    except (web.RequestPayloadError, HttpProcessingError) as wrong:
        response = error(400, "bad_request", f"the body cannot be read: {' '.join(str(wrong).split())[:QUOTED]}")
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        response = error(500, "internal", "the gateway failed to answer; its log says why")
    response.headers.setdefault(hdrs.CACHE_CONTROL, "no-store")
    response.headers.setdefault("X-Content-Type-Options", "nosniff")
    return response


def _guard(token: str | None, names: Collection[str]) -> Any:
    """The middleware that lets in whom the module's docstring says."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if token is not None and request.path not in OPEN_PATHS and not _has_token(request, token):
            if request.path == dashboard.PAGE:
                return dashboard.ask_for_token()
            challenge = {"WWW-Authenticate": 'Bearer realm="tokenpipe admin"'}
            return error(401, "unauthenticated", "give the admin token: Authorization: Bearer TOKEN", challenge)
        why = None
        if request.method not in SAFE_METHODS:
            why = _foreign(request, names, trusted=token is not None)
        elif token is None and request.path in dashboard.PATHS:
            why = _unknown_name(request, names)
        return await handler(request) if why is None else error(403, "forbidden", why)

    return guard


def _has_token(request: web.Request, token: str) -> bool:
    scheme, _, given = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    # As bytes: compare_digest takes no text beyond ASCII, and a header field may hold any octet.
    shown = given.strip().encode("utf-8", "surrogateescape")
    if scheme.lower() == "basic" and _is_of_the_page(request):
        shown = _password(shown)
    elif scheme.lower() != "bearer":
        return False
    return hmac.compare_digest(shown, token.encode())


def _is_of_the_page(request: web.Request) -> bool:
    """A browser sends a password with whatever any page asks of us: only this much may be had with one."""
    return request.path in dashboard.PATHS or (request.method == "DELETE" and request.path.startswith("/-/streams/"))


def _password(credentials: bytes) -> bytes:
    """Of Basic credentials; empty, which no token is, where they are none."""
    try:
        return base64.b64decode(credentials, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


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
    return None if trusted else _unknown_name(request, names)


def _unknown_name(request: web.Request, names: Collection[str]) -> str | None:
    """Why the name that we were reached under may be another's, or None."""
    host = request.headers.get(hdrs.HOST, "")
    if _is_ours(host, names):
        return None
    return f"{host} is not known to be this gateway: use its address, or set admin.token_file"


def _is_ours(host: str, names: Collection[str]) -> bool:
    """An address cannot be rebound, and `localhost` is nobody else's name."""
    name = ""
    try:
        name = urlsplit("//" + host).hostname or ""
        ipaddress.ip_address(name)
    except ValueError:  # no address, or not even a host
        return name == "localhost" or name in names
    return True
