"""Certificates for tests: an authority, a server of 127.0.0.1 and localhost, a client. Made by the openssl command."""

from __future__ import annotations

import dataclasses
import shutil
import ssl
import subprocess
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Certificates:
    ca: Path
    certificate: Path
    key: Path
    client_certificate: Path
    client_key: Path

    def server_context(self, *, client_ca: bool = False) -> ssl.SSLContext:
        """`client_ca`: ask the client for a certificate, and insist."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        if client_ca:
            context.load_verify_locations(self.ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client_context(self, *, certificate: bool = False) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.ca))
        if certificate:
            context.load_cert_chain(self.client_certificate, self.client_key)
        return context


def available() -> bool:
    return shutil.which("openssl") is not None


def make(folder: Path) -> Certificates:
    ca, ca_key = folder / "ca.pem", folder / "ca.key"
    _openssl(*_request(ca_key, "tokenpipe test authority"), "-x509", "-days", "2", "-out", ca,
             "-addext", "basicConstraints=critical,CA:TRUE",
             "-addext", "keyUsage=critical,keyCertSign,cRLSign")  # fmt: skip
    pairs = []
    for name, extension in (("localhost", "subjectAltName=DNS:localhost,IP:127.0.0.1,IP:::1"),
                            ("client", "extendedKeyUsage=clientAuth")):  # fmt: skip
        certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
        request, extensions = folder / f"{name}.csr", folder / f"{name}.ext"
        extensions.write_text(f"{extension}\nsubjectKeyIdentifier=hash\nauthorityKeyIdentifier=keyid\n")
        _openssl(*_request(key, name), "-out", request)
        _openssl("x509", "-req", "-in", request, "-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-days", "2",
                 "-extfile", extensions, "-out", certificate)  # fmt: skip
        pairs += [certificate, key]
    return Certificates(ca, *pairs)


def _request(key: Path, name: str) -> list[str | Path]:
    return ["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", key,
            "-subj", f"/CN={name}"]  # fmt: skip


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)
