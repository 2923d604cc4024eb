"""TLS contexts, made of PEM files. What cannot be used is named by its key: all is read before anything is served."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator

from gateway.errors import ConfigError


def for_clients(certificate: str, key: str | None, client_ca: str | None) -> ssl.SSLContext:
    """What the public listener speaks. Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with _named("tls", f"certificate {certificate}, key {key}", "a certificate and the key that belongs to it, both in PEM"):
        context.load_cert_chain(certificate, key)
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        with _named("tls.client_ca", client_ca, "certificates in PEM"):
            context.load_verify_locations(client_ca)
    context.set_alpn_protocols(["http/1.1"])
    return context


def for_backend(where: str, ca: str | None, certificate: str | None, key: str | None, *, verify: bool) -> ssl.SSLContext:
    """What a backend is spoken to with. `where`: its key path. Raises ConfigError."""
    with _named(f"{where}.ca", str(ca), "certificates in PEM"):
        context = ssl.create_default_context(cafile=ca)
    if not verify:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if certificate is not None:
        with _named(where, f"certificate {certificate}, key {key}", "a certificate and its key, both in PEM"):
            context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["http/1.1"])
    return context


@contextlib.contextmanager
def _named(path: str, found: str, expected: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # of which ssl.SSLError is one
        raise ConfigError(f"{path}: found {found} ({error.strerror or error}); expected {expected}") from None
