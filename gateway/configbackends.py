"""Backends as they are written: in the configuration, in files that are watched, and in what the admin API is sent.

The structs are sections of `config.Config`, and what is read elsewhere is held to the same rules by the same reader. A
file may also be one of Prometheus's file_sd, of which the targets are taken, and of the labels `__scheme__` and `role`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from gateway.configfile import Complaints, Node, OneOrMany, Reader, compose_any, describe, join, tree_of
from gateway.configvalues import (
    NAME_LENGTH,
    NOT_IN_NAME,
    Address,
    Count,
    DnsName,
    DnsServer,
    File,
    FileName,
    FilePattern,
    Host,
    KubernetesName,
    KubernetesPort,
    ModelName,
    Name,
    Port,
    Seconds,
    SecretFile,
    Text,
    Url,
    split_url,
    whole,
)
from gateway.errors import ConfigError

Clash: TypeAlias = tuple[str, str, str]  # key path, found, expected

Role: TypeAlias = Literal["both", "prefill", "decode", "encode"]

# Keys of a backend of which this version knows only these values.
NOT_YET: Mapping[str, tuple[object, ...]] = {}


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One mapping of the file. Keys are the attributes' names."""


class BackendTls(Section, frozen=True):
    ca: File | None = None
    certificate: File | None = None
    key: File | None = None
    verify: bool = True


class KvConnector(Section, frozen=True):
    """What connectors must know of an engine of the role prefill or decode."""

    kv_host: Host | None = None  # the URL's
    kv_port: Port | None = None
    bootstrap_port: Port | None = 8998
    handshake_port: Port | None = None
    notify_port: Port | None = None
    dp_size: Annotated[int, whole(1, 65536)] = 1
    tp_size: Annotated[int, whole(1, 65536)] = 1


class BackendConfig(Section, frozen=True):
    url: Url
    name: Name = ""  # filled in from the URL where left out
    models: Annotated[list[ModelName], OneOrMany("the name of a model, or a list of them")] | None = None
    role: Role = "both"
    weight: Annotated[int, whole(1, 65535)] = 1
    max_in_flight: Count | None = None
    api_key_file: SecretFile | None = None
    tls: BackendTls = BackendTls()
    connector: KvConnector = KvConnector()

    @property
    def scheme(self) -> str:
        return split_url(self.url)[0]

    @property
    def address(self) -> Address:
        return split_url(self.url)[1]


Further: TypeAlias = Callable[[BackendConfig, str], Iterable[Clash]]  # what else may be wrong with one, at a path


class Found(Section, frozen=True):
    """What is said of all backends that one look-up finds."""

    scheme: Literal["http", "https"] = "http"
    role: Role = "both"
    max_in_flight: Count | None = None
    api_key_file: SecretFile | None = None
    tls: BackendTls = BackendTls()


class Dns(Found, frozen=True, kw_only=True):
    names: Annotated[list[DnsName], OneOrMany("a DNS name, or a list of them")]
    type: Literal["A", "AAAA", "SRV"] = "A"
    port: Port | None = None
    servers: (
        Annotated[list[DnsServer], OneOrMany("the IP address of a DNS server, with or without :PORT, or a list")] | None
    ) = None


class Kubernetes(Found, frozen=True, kw_only=True):
    service: KubernetesName
    namespace: KubernetesName | None = None
    port: KubernetesPort | None = None
    server: Url | None = None
    token_file: FileName | None = None
    ca: FileName | None = None


class Discovery(Section, frozen=True):
    file: Annotated[list[FilePattern], OneOrMany("the name of a file, or a list of them")] | None = None
    dns: Annotated[list[Dns], OneOrMany("a mapping of names, type and port, or a list of them")] | None = None
    kubernetes: Annotated[list[Kubernetes], OneOrMany("a mapping of service and port, or a list of them")] | None = None
    interval: Seconds = 5.0

    @property
    def asked(self) -> bool:
        return bool(self.file or self.dns or self.kubernetes)


class _Group(Section, frozen=True):
    """One entry of Prometheus's file_sd."""

    targets: list[Text]
    labels: dict[str, object] = {}


# ---- what may not stand together


def tls_clashes(path: str, tls: Any) -> Iterator[Clash]:
    """Of a section with a certificate and its key."""
    if (tls.certificate is None) != (tls.key is None):
        given, left_out = ("key", "certificate") if tls.certificate is None else ("certificate", "key")
        yield f"{path}.{left_out}", f"found nothing beside {path}.{given}", "both of them, or neither"


def backend_clashes(backends: Sequence[BackendConfig], path: str = "backends") -> Iterator[Clash]:
    seen: dict[str, int] = {}
    for index, backend in enumerate(backends):
        yield from tls_clashes(f"{path}[{index}].tls", backend.tls)
        if backend.tls != BackendTls() and backend.scheme != "https":
            yield f"{path}[{index}].tls", f"found TLS settings beside {backend.url}", "an https URL, or none of them"
        if backend.connector != KvConnector() and backend.role == "both":
            yield f"{path}[{index}].connector", "found it beside role: both", "role: prefill or decode, or none of it"
        if backend.role != "both" and backend.scheme == "unix":
            yield f"{path}[{index}].url", f"found a Unix socket beside role: {backend.role}", "an address that engines reach"
        first = seen.setdefault(backend.name, index)
        if first != index:
            yield f"{path}[{index}].name", f"found {backend.name}, as {path}[{first}] is named", "a name of its own"


def discovery_clashes(discovery: Discovery) -> Iterator[Clash]:
    for index, dns in enumerate(discovery.dns or ()):
        path = f"discovery.dns[{index}]"
        if dns.type != "SRV" and dns.port is None:
            yield f"{path}.port", "found nothing", f"the backends' port, of which {dns.type} records say nothing"
        if dns.type == "SRV" and dns.port is not None:
            yield f"{path}.port", f"found {dns.port} beside type: SRV", "none, as SRV records say the port"
        yield from _found_clashes(path, dns)
    for index, kubernetes in enumerate(discovery.kubernetes or ()):
        yield from _found_clashes(f"discovery.kubernetes[{index}]", kubernetes)


def _found_clashes(path: str, found: Found) -> Iterator[Clash]:
    yield from tls_clashes(f"{path}.tls", found.tls)
    if found.tls != BackendTls() and found.scheme != "https":
        yield f"{path}.tls", f"found TLS settings beside scheme: {found.scheme}", "scheme: https, or none of them"


# ---- reading


def named(backend: BackendConfig) -> BackendConfig:
    """With a name, if it had none."""
    if backend.name:
        return backend
    address = backend.address
    name = str(address) if address.path is None else os.path.basename(address.path)
    return msgspec.structs.replace(backend, name=NOT_IN_NAME.sub("_", name)[:NAME_LENGTH])


def read_file(path: Path, more: Further, environ: Mapping[str, str] = os.environ) -> list[BackendConfig]:
    """The backends of a file that is watched. Raises ConfigError with all that is wrong with it, one a line."""
    complaints = Complaints()
    root = compose_any(path, complaints)
    if not isinstance(root.value, list):
        found = "nothing" if root.value is None else describe(root.value)
        raise ConfigError(f"{path}: found {found} at the top; expected a list of backends ([] for none)")
    supported = {f"backends.{key}": values for key, values in NOT_YET.items()}
    reader = Reader(complaints, environ, path.absolute().parent, supported)
    backends: list[BackendConfig] = []
    seen: set[tuple[str, str]] = set()
    for index, node in enumerate(root.value):
        where = f"backends[{index}]"
        if isinstance(node.value, dict) and "targets" in node.value:
            backends += _of_group(reader, node, where, seen)
        else:
            backends.append(reader.read(BackendConfig, node, where))
    complaints.raise_if_any()
    backends = [named(backend) for backend in backends]
    each = (clash for index, backend in enumerate(backends) for clash in more(backend, f"backends[{index}]."))
    for where, found, expected in (*backend_clashes(backends), *each):
        reader.complain(where, found, expected)
    complaints.raise_if_any()
    return backends


def _of_group(reader: Reader, node: Node, path: str, seen: set[tuple[str, str]]) -> list[Any]:
    """Its targets, but for those that have been `seen`: a target that several groups list alike is one, as for Prometheus."""
    group = reader.read(_Group, node, path)
    if not isinstance(group, _Group):
        return []
    scheme = group.labels.get("__scheme__", "http")
    role = {"role": node.value["labels"].value["role"]} if "role" in group.labels else {}
    found = []
    for index, (target, item) in enumerate(zip(group.targets, node.value["targets"].value, strict=False)):
        url = f"{scheme}://{target}"
        if (url, str(group.labels.get("role"))) not in seen:
            seen.add((url, str(group.labels.get("role"))))
            backend = Node({"url": Node(url, item.origin, literal=True), **role}, item.origin)
            found.append(reader.read(BackendConfig, backend, join(f"{path}.targets", index)))
    return found


def read_body(value: object, origin: str) -> BackendConfig:
    """A backend that somebody sent us, as plain data. Raises ConfigError. It may name no file: whoever can connect would
    have it read to them."""
    if isinstance(value, dict):
        tls = value.get("tls")
        files = [key for key in ("api_key_file",) if key in value]
        files += [f"tls.{key}" for key in ("ca", "certificate", "key") if isinstance(tls, dict) and key in tls]
        if files:
            raise ConfigError(
                f"{origin}: {files[0]}: found the name of a file; expected none (files can be named in the configuration)"
            )
    complaints = Complaints()
    reader = Reader(complaints, {}, Path("/"), NOT_YET)
    backend = reader.read(BackendConfig, tree_of(value, origin), "")
    complaints.raise_if_any()
    backend = named(backend)
    for where, found, expected in backend_clashes([backend], ""):
        reader.complain(where.removeprefix("[0]."), found, expected)
    complaints.raise_if_any()
    result: BackendConfig = backend
    return result
