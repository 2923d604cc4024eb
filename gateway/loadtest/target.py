"""Where the load goes: a URL, taken apart."""

from __future__ import annotations

import dataclasses
import ssl
from urllib.parse import urlsplit

from gateway.errors import ConfigError
from gateway.loadtest.endpoints import Kind
from gateway.net.upstream import Origin

_EXPECTED = "expected http://HOST[:PORT][/PATH], https://HOST[:PORT][/PATH] or unix:/PATH"


@dataclasses.dataclass(frozen=True)
class Target:
    url: str  # as it is shown
    origin: Origin
    path: str  # of requests
    models: str  # the path that lists the models


def parse(flag: str, url: str, path: str, *, insecure: bool = False) -> Target:
    """`path`: of the requests, from /v1 on; a URL that ends in it, or in /v1, is understood. Raises ConfigError."""
    if url.startswith("unix:/"):
        return Target(url, Origin(url, url.removeprefix("unix:"), None, None, b"localhost"), path, "/v1/models")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{flag}: found {url!r} ({error}); {_EXPECTED}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(f"{flag}: found {url!r}; {_EXPECTED}")
    if parts.username is not None or parts.password is not None:
        raise ConfigError(f"{flag}: a key does not belong into the URL; set OPENAI_API_KEY, or use --api-key-file")
    if not (url.isascii() and url.isprintable() and " " not in url):
        raise ConfigError(f"{flag}: the URL holds a character that must be percent-encoded; {_EXPECTED}")
    default = 443 if parts.scheme == "https" else 80
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    shown = host if port in (None, default) else f"{host}:{port}"
    base = parts.path.rstrip("/")
    for ending in (path, *(kind.path for kind in Kind), "/v1"):
        if base.endswith(ending):
            base = base.removesuffix(ending)
            break
    tls = _context(insecure) if parts.scheme == "https" else None
    name = f"{host}:{port or default}"
    origin = Origin(name, parts.hostname, port or default, tls, shown.encode())
    return Target(f"{parts.scheme}://{shown}{base}", origin, base + path, f"{base}/v1/models")


def _context(insecure: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if insecure:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["http/1.1"])
    return context
