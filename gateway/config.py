"""The configuration: what may be set, what each value must be, and what may not stand together.

The structs below are `interface.md` section 5, attribute for key, and are frozen: a reload makes a new one. A key that
this version knows but does nothing with yet is refused unless it stands at its default (`NOT_YET`): a setting that is
silently ignored is worse than an error. How text becomes these structs,
and how errors find their line, is `configfile`; what single values may be is `configvalues`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal, TypeAlias

import msgspec

from gateway.configbackends import NOT_YET as NOT_YET_OF_BACKENDS
from gateway.configbackends import (
    BackendConfig,
    Clash,
    Discovery,
    Section,
    backend_clashes,
    discovery_clashes,
    named,
    tls_clashes,
)
from gateway.configdisagg import KEY, Disaggregation, backends_of_flags, disagg_clashes, found_clashes, key_of_flags
from gateway.configfile import BadValue, Complaints, Node, Reader, compose, describe, get, put, substitute
from gateway.configmodels import ModelConfig, Priority, model_clashes, priority_clashes, unserved_clashes
from gateway.configvalues import Address as Address
from gateway.configvalues import (
    Bytes,
    Count,
    CountOrZero,
    Delay,
    Factor,
    Fault,
    FieldName,
    File,
    FullStatus,
    Knobs,
    Listen,
    ListenList,
    Recordings,
    RoutePath,
    Seconds,
    SecondsOrZero,
    SecretFile,
    Share,
    Text,
    Tokens,
    UrlPath,
    is_host,
    parse_address,
    whole,
)
from gateway.configvalues import Secret as Secret

# ---- sections


class Admin(Section, frozen=True):
    listen: Listen = Address("127.0.0.1", 9400)
    token_file: SecretFile | None = None


class Tls(Section, frozen=True):
    certificate: File | None = None
    key: File | None = None
    client_ca: File | None = None


class Affinity(Section, frozen=True):
    by: list[Literal["header", "user", "prefix"]] = msgspec.field(default_factory=lambda: ["header", "user", "prefix"])
    header: FieldName = "x-session-id"
    load_factor: Factor = 1.25


class Timeouts(Section, frozen=True):
    request_header: Seconds = 30.0
    request_body: Seconds = 60.0
    keepalive: SecondsOrZero = 75.0  # zero: no second request on a connection
    queue: SecondsOrZero = 30.0  # zero: nobody waits
    connect: Seconds = 5.0
    first_byte: Seconds = 600.0
    idle: Seconds = 300.0
    client_write: Seconds = 60.0
    progress: Seconds | None = None
    total: Seconds | None = None
    drain: SecondsOrZero = 120.0  # zero: a stop cuts what is under way


class MaxTokens(Section, frozen=True):
    default: Count | None = None
    cap: Count | None = None
    over: Literal["clamp", "reject"] = "clamp"


class Limits(Section, frozen=True):
    request_body: Bytes = 67_108_864
    request_head: Bytes = 65_536
    in_flight: Count | None = None
    queue: CountOrZero = 1024
    write_buffer: Bytes = 65_536
    max_tokens: MaxTokens = MaxTokens()
    priority: Priority = msgspec.field(default_factory=Priority)


class Pool(Section, frozen=True):
    idle: Seconds = 4.0
    max_idle: CountOrZero = 64  # zero: every exchange on a connection of its own
    max_age: Seconds = 300.0


class Retry(Section, frozen=True):
    attempts: Annotated[int, whole(1, 100)] = 2
    budget: Share = 0.2
    replay_stale: bool = False
    statuses: list[FullStatus] = msgspec.field(default_factory=lambda: [429, 503])


class Health(Section, frozen=True, rename={"pass_": "pass"}):
    path: UrlPath = "/health"
    interval: Seconds = 5.0
    timeout: Seconds = 2.0
    fail: Count = 3
    pass_: Count = 2
    slow_start: SecondsOrZero = 10.0
    silence: Seconds | None = 5.0
    panic: bool = False


class Breaker(Section, frozen=True):
    failures: Count = 5
    window: Seconds = 30.0
    open: Seconds = 10.0


class Auth(Section, frozen=True):
    keys_file: Text | None = None


class RateLimits(Section, frozen=True):
    store: Text = "memory"


class Paths(Section, frozen=True):
    allow: list[RoutePath] = msgspec.field(default_factory=list)
    deny: list[RoutePath] = msgspec.field(default_factory=list)


FieldRule: TypeAlias = Literal["reject", "strip", "pass"]


class Fields(Section, frozen=True):
    kv_transfer_params: FieldRule = "reject"
    ec_transfer_params: FieldRule = "reject"
    bootstrap_room: FieldRule = "reject"


class Headers(Section, frozen=True):
    forwarded: bool = True
    receipt: bool = False


class Coalesce(Section, frozen=True):
    delay: Seconds | None = None
    bytes: Bytes = 4096


class KeepaliveComment(Section, frozen=True):
    interval: Seconds | None = None


class Metrics(Section, frozen=True):
    labels: list[Literal["model", "backend"]] = msgspec.field(default_factory=lambda: ["model", "backend"])
    max_models: Annotated[int, whole(1, 10_000)] = 100


class Log(Section, frozen=True):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"
    access: bool = True


class Tracing(Section, frozen=True):
    otlp_endpoint: Text | None = None


class Loadtest(Section, frozen=True):
    enabled: bool = False


class Mock(Section, frozen=True):
    ttft: Delay = 0.05
    itl: Delay = 0.02
    tokens: Tokens = 64
    seed: CountOrZero = 0
    fault: list[Fault] = msgspec.field(default_factory=list)
    knobs: Knobs = msgspec.field(default_factory=dict)
    replay: Recordings | None = None


class Config(Section, frozen=True):
    listen: ListenList = msgspec.field(default_factory=lambda: [Address("127.0.0.1", 8000)])
    admin: Admin = Admin()
    workers: Annotated[int, whole(1, 1024)] = 1
    tls: Tls = Tls()
    backends: list[BackendConfig] = msgspec.field(default_factory=list)
    discovery: Discovery = Discovery()
    models: dict[str, ModelConfig] = msgspec.field(default_factory=dict)
    balance: Literal["least_loaded", "round_robin", "power_of_two", "affinity"] = "least_loaded"
    affinity: Affinity = msgspec.field(default_factory=Affinity)
    disaggregation: Disaggregation = Disaggregation()
    timeouts: Timeouts = Timeouts()
    limits: Limits = msgspec.field(default_factory=Limits)
    pool: Pool = Pool()
    retry: Retry = Retry()
    health: Health = Health()
    breaker: Breaker = Breaker()
    auth: Auth = Auth()
    rate_limits: RateLimits = RateLimits()
    paths: Paths = msgspec.field(default_factory=Paths)
    fields: Fields = Fields()
    headers: Headers = Headers()
    on_truncation: Literal["abort", "error_event"] = "abort"
    commit: Literal["head", "first_event"] = "head"
    coalesce: Coalesce = Coalesce()
    keepalive_comment: KeepaliveComment = KeepaliveComment()
    usage: Literal["observe", "inject"] = "observe"
    metrics: Metrics = msgspec.field(default_factory=Metrics)
    log: Log = Log()
    tracing: Tracing = Tracing()
    loadtest: Loadtest = Loadtest()
    mock: Mock = Mock()

    @property
    def names_backends(self) -> bool:
        """Or else the synthetic engine stands in."""
        return bool(self.backends) or self.discovery.asked


# Keys of which this version knows only these values. To build one is to take its line out.
NOT_YET: Mapping[str, tuple[object, ...]] = {
    "workers": (1,),
    **{f"backends.{key}": values for key, values in NOT_YET_OF_BACKENDS.items()},
    "auth.keys_file": (None,),
    "rate_limits.store": ("memory",),
    "tracing.otlp_endpoint": (None,),
}

# ---- what may not stand together


def _tls(config: Config) -> Iterator[Clash]:
    yield from tls_clashes("tls", config.tls)
    if config.tls.client_ca and not config.tls.certificate:
        yield "tls.client_ca", "found a client_ca without a certificate", "tls.certificate and tls.key beside it"


def _same_place(one: Address, other: Address) -> bool:
    """Whether both cannot be listened on. Port 0 is a fresh port each time."""
    if one.path is not None or other.path is not None:
        return one.path == other.path
    wild = {"0.0.0.0", "::"} & {one.host, other.host}
    return one.port == other.port != 0 and (one.host == other.host or bool(wild))


def _listeners(config: Config) -> Iterator[Clash]:
    for index, address in enumerate(config.listen):
        if any(_same_place(address, other) for other in config.listen[:index]):
            yield f"listen[{index}]", f"found {address}, which is taken by an earlier one", "another address"
    for address in config.listen:
        if _same_place(address, config.admin.listen):
            expected = "another one: metrics and management are not for the public"
            yield "admin.listen", f"found {config.admin.listen}, where the public listener is ({address})", expected
            return


def _affinity(config: Config) -> Iterator[Clash]:
    by = config.affinity.by
    if not by or len(set(by)) != len(by):
        yield "affinity.by", f"found {describe(by)}", "one or more of header, user and prefix, each once"


def _max_tokens(config: Config) -> Iterator[Clash]:
    limit = config.limits.max_tokens
    if limit.default is not None and limit.cap is not None and limit.default > limit.cap:
        yield (
            "limits.max_tokens.default",
            f"found {limit.default}",
            f"at most limits.max_tokens.cap, which is {limit.cap}",
        )


def _models(config: Config) -> Iterator[Clash]:
    yield from model_clashes(config.models, config.limits.priority.classes)
    if config.backends and not config.discovery.asked and all(backend.models for backend in config.backends):
        yield from unserved_clashes(config.models, config.backends)


# Each is asked only where nothing is wrong with the top level keys it looks at: one slip, one complaint.
_CLASHES: tuple[tuple[tuple[str, ...], Callable[[Config], Iterator[Clash]]], ...] = (
    (("listen", "admin"), _listeners),
    (("tls",), _tls),
    (("backends",), lambda config: backend_clashes(config.backends)),
    (("backends", "disaggregation"), lambda config: disagg_clashes(config.disaggregation, config.backends)),
    (("discovery",), lambda config: discovery_clashes(config.discovery)),
    (("discovery", "disaggregation"), lambda config: found_clashes(config.disaggregation, config.discovery)),
    (("limits",), _max_tokens),
    (("limits",), lambda config: priority_clashes(config.limits.priority)),
    (("models", "limits", "backends", "discovery"), _models),
    (("affinity",), _affinity),
)

# ---- flags

# A flag of `tokenpipe serve` by its parameter's name -> the key that it sets.
_FLAGS: Mapping[str, tuple[str, ...]] = {
    "workers": ("workers",),
    "log_level": ("log", "level"),
    "log_format": ("log", "format"),
    "kv_connector": ("disaggregation", "connector"),
    "max_retries": ("retry", "attempts"),
}
_LISTENERS: Mapping[str, tuple[tuple[str, ...], Address]] = {
    "": (("listen",), Config().listen[0]),
    "admin_": (("admin", "listen"), Admin().listen),
}


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _override(root: Node, overrides: Mapping[str, object], environ: Mapping[str, str], complaints: Complaints) -> Node:
    """The file's tree with the flags' values in it. None and an empty list stand for a flag that was not given."""
    given = {name: value for name, value in overrides.items() if value is not None and value != () and value != []}
    for prefix, (keys, default) in _LISTENERS.items():
        names = [name for name in (f"{prefix}host", f"{prefix}port") if name in given]
        if names:
            origin = " ".join(flag(name) for name in names)
            host, port = (given.pop(f"{prefix}{part}", None) for part in ("host", "port"))
            address = _listener(get(root, keys), default, host, port, environ)
            if isinstance(host, str) and not is_host(host.strip("[]")):
                complaints.add(origin, ".".join(keys), f"found {describe(host)}; expected a host name or IP address")
            else:
                root = put(root, keys, Node(address, origin, literal=True))
    urls = given.pop("backend", None)
    nodes = [Node({"url": Node(url, "--backend", literal=True)}, "--backend") for url in _several(urls)]
    nodes += backends_of_flags(given, complaints)
    if nodes:
        root = put(root, ("backends",), Node(nodes, nodes[0].origin))
    level = given.get("log_level")
    if isinstance(level, str):  # Python's names, as other proxies take them
        given["log_level"] = {"critical": "error"}.get(level.lower(), level.lower())
    if given.get("max_retries") == 0:  # of attempts in all; the first is made in any case
        given["max_retries"] = 1
    for name, value in given.items():
        root = put(root, _FLAGS[name], Node(value, flag(name), literal=True))
    return root


def _several(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else []


def _listener(node: Node | None, default: Address, host: object, port: object, environ: Mapping[str, str]) -> str:
    """The address of which a flag gave one half, or both; the other half is the file's where it has one address."""
    written = node.value if node else None
    if isinstance(written, list) and len(written) == 1:
        written = written[0].value
    try:
        base = parse_address(substitute(written, environ)) if isinstance(written, str) else default
    except BadValue:
        base = default  # a flag was given in its stead
    base = default if base.path is not None else base
    name = str(host).strip("[]") if host is not None else base.host
    number = port if port is not None else base.port
    return f"[{name}]:{number}" if ":" in name else f"{name}:{number}"


# ---- the whole


def load(
    path: Path | None,
    overrides: Mapping[str, object] = MappingProxyType({}),
    environ: Mapping[str, str] = os.environ,
) -> Config:
    """The configuration of a file, or of none, with the flags of `serve` over it. Raises ConfigError with all that is
    wrong, one a line. `overrides` has the flags by their parameters' names: host, port, admin_host, admin_port,
    backend (a sequence), workers, log_level, log_format, those of `configdisagg.FLAGS` (sequences), kv_connector,
    max_retries."""
    complaints = Complaints()
    root = Node({}, "") if path is None else compose(path, complaints)
    root = _override(root, overrides, environ, complaints)
    # Files are named relative to the configuration, not to wherever the service manager stands.
    directory = Path.cwd() if path is None else path.absolute().parent
    reader = Reader(complaints, environ, directory, NOT_YET)
    config: Config = reader.read(Config, root, "")
    key = _engines_key(overrides, environ, complaints)
    keyed = {} if key is None else {"api_key_file": key}
    config = msgspec.structs.replace(
        config, backends=[msgspec.structs.replace(named(backend), **keyed) for backend in config.backends]
    )
    for keys, clashes in _CLASHES:
        if complaints.clean(*keys):
            for where, found, expected in clashes(config):
                reader.complain(where, found, expected + _beyond_flags(reader.origin(where), where, found))
    complaints.raise_if_any()
    return config


def _beyond_flags(origin: str, where: str, found: str) -> str:
    """What is said besides of a key that a flag has made necessary, and none can give."""
    if not origin.startswith("--") or found != "found nothing":
        return ""
    return f", by a file (-c FILE{', in place of these flags' if where.startswith('backends') else ''})"


def _engines_key(overrides: Mapping[str, object], environ: Mapping[str, str], complaints: Complaints) -> Secret | None:
    """Of all backends, which are those of the flags then."""
    try:
        return key_of_flags(overrides, environ)
    except BadValue as bad:
        complaints.add(f"the environment variable {KEY}", "backends[].api_key_file", str(bad))
        return None


def effective(config: Config) -> dict[str, object]:
    """The configuration as plain data, in the file's own terms, secrets redacted."""
    return {field.encode_name: _plain(getattr(config, field.name)) for field in msgspec.structs.fields(config)}


def _plain(value: object) -> object:
    if isinstance(value, Secret | Address):
        return str(value)
    if isinstance(value, msgspec.Struct):
        return {field.encode_name: _plain(getattr(value, field.name)) for field in msgspec.structs.fields(value)}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value
