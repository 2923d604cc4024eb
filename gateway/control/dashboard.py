"""The live page's files: one HTML page, its style and its script, which are all that it loads.

Whatever the page shows comes from `/-/events`. The policy lets it load nothing from elsewhere, and run nothing that does
not stand in its script: paths, models and request ids are strangers' text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from aiohttp import web

PAGE: Final = "/-/dashboard"
EVENTS: Final = "/-/events"

_FILES: Final = {
    PAGE: ("dashboard.html", "text/html"),
    PAGE + ".css": ("dashboard.css", "text/css"),
    PAGE + ".js": ("dashboard.js", "text/javascript"),
}
PATHS: Final = frozenset({*_FILES, EVENTS})
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}
_ASKS = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>tokenpipe: the token, please</title>
<h1>The admin token is asked for</h1>
<p>Load this page again, and give the token of <code>admin.token_file</code> as the password. Any user name will do, or none.
<p><a href="dashboard">Load it again</a>
</html>
"""


def routes() -> list[web.RouteDef]:
    """One for each file, as it was when the gateway started."""
    return [_route(path, Path(__file__).with_name(name), kind) for path, (name, kind) in _FILES.items()]


def _route(path: str, file: Path, kind: str) -> web.RouteDef:
    content = file.read_bytes()

    async def serve(request: web.Request) -> web.Response:
        return web.Response(body=content, content_type=kind, charset="utf-8", headers=_HEADERS)

    return web.get(path, serve)


def ask_for_token() -> web.Response:
    """What a browser understands: it asks for name and password, and sends them along with all that the page asks for."""
    challenge = {"WWW-Authenticate": 'Basic realm="tokenpipe: the admin token as the password", charset="UTF-8"'}
    return web.Response(status=401, text=_ASKS, content_type="text/html", headers={**_HEADERS, **challenge})
