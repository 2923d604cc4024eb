"""From the configuration to who the backends are: those that it names, and the sources of those that are discovered."""

from __future__ import annotations

import os
import random
import ssl
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from gateway import configbackends, tlscontexts
from gateway.config import Config
from gateway.configbackends import BackendConfig, BackendTls, Dns, Found, Kubernetes
from gateway.configdisagg import Disaggregation, kv_clashes
from gateway.configvalues import Secret, split_url
from gateway.control.discovery import Common, Source
from gateway.control.discovery.file import FileSource
from gateway.control.discovery.kubernetes import (
    IN_CLUSTER,
    KubernetesSettings,
    KubernetesSource,
    in_cluster_namespace,
    in_cluster_server,
)
from gateway.control.membership import Settings
from gateway.core.breaker import BreakerSettings
from gateway.core.caution import CautionSettings
from gateway.core.members import Kv, Member, Place, Tls
from gateway.errors import ConfigError
from gateway.net.upstream import PoolSettings


def member_of(one: BackendConfig) -> Member:
    return Member(
        one.name,
        Place(one.url),
        role=one.role,
        kv=Kv(**msgspec.structs.asdict(one.connector)),
        weight=one.weight,
        max_in_flight=one.max_in_flight,
        credential=_credential(one.api_key_file),
        tls=_tls(one.tls),
        models=None if one.models is None else tuple(dict.fromkeys(one.models)),
    )


def member_of_body(value: object) -> Member:
    """What the admin API was sent. Raises ConfigError."""
    return member_of(configbackends.read_body(value, "the body"))


def server_tls(config: Config) -> ssl.SSLContext | None:
    """What the public listener speaks. Raises ConfigError."""
    tls = config.tls
    if tls.certificate is None:
        return None
    return tlscontexts.for_clients(str(tls.certificate), str(tls.key), None if tls.client_ca is None else str(tls.client_ca))


def check_files(config: Config) -> None:
    """That the certificates which it names can be used. Raises ConfigError."""
    server_tls(config)
    for place, one in enumerate(config.backends):
        tls = member_of(one).tls
        if one.scheme == "https":
            tlscontexts.for_backend(f"backends[{place}].tls", tls.ca, tls.certificate, tls.key, verify=tls.verify)


def static_members(config: Config) -> list[Member]:
    return [member_of(one) for one in config.backends]


def membership_settings(config: Config) -> Settings:
    pool, breaker = config.pool, config.breaker
    return Settings(
        PoolSettings(pool.idle, pool.max_idle, pool.max_age),
        BreakerSettings(breaker.failures, breaker.window, breaker.open),
        CautionSettings(config.health.slow_start, config.health.silence),
    )


def sources_of(config: Config, environ: Mapping[str, str] = os.environ, in_cluster: Path = IN_CLUSTER) -> list[Source]:
    """The sources, the highest rank first. Raises ConfigError."""
    discovery = config.discovery
    read = partial(read_members, disaggregation=config.disaggregation)
    sources: list[Source] = [FileSource(path, discovery.interval, read) for path in discovery.file or ()]
    sources += [_dns(one, discovery.interval) for one in discovery.dns or ()]
    sources += [_kubernetes(one, environ, in_cluster) for one in discovery.kubernetes or ()]
    names = [source.name for source in sources]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"discovery: found {twice} twice; expected it once")
    return sources


def read_members(path: Path, disaggregation: Disaggregation = Disaggregation()) -> Sequence[Member]:
    """The backends of one file. Raises ConfigError."""
    return [member_of(one) for one in configbackends.read_file(path, partial(kv_clashes, disaggregation))]


def _dns(one: Dns, interval: float) -> Source:
    # what it needs takes 4 MiB, which is for those to pay who use it
    from gateway.control.discovery.dns import DnsSettings, DnsSource

    servers = tuple((server.host, server.port) for server in one.servers or ())
    return DnsSource(DnsSettings(tuple(one.names), one.type, one.port, servers, interval, _common(one)))


def _kubernetes(one: Kubernetes, environ: Mapping[str, str], in_cluster: Path) -> Source:
    server = one.server or in_cluster_server(environ)
    if server is None:
        raise ConfigError(
            "discovery.kubernetes.server: found nothing, and KUBERNETES_SERVICE_HOST, which pods have, is not set; expected "
            "the API's URL, as https://HOST:6443, with token_file and ca"
        )
    namespace = one.namespace or in_cluster_namespace(in_cluster)
    if namespace is None:
        raise ConfigError(
            f"discovery.kubernetes.namespace: found nothing, and {in_cluster}/namespace, which pods have, cannot be read; "
            "expected the service's namespace"
        )
    token_file, ca = one.token_file, one.ca
    if one.server is None:  # what is left out is the pod's own; elsewhere it would be another cluster's
        token_file, ca = token_file or str(in_cluster / "token"), ca or str(in_cluster / "ca.crt")
    scheme, _ = split_url(server)
    if scheme == "http" and token_file is not None:
        raise ConfigError(f"discovery.kubernetes.token_file: found it beside {server}; expected an https URL for a token")
    settings = KubernetesSettings(one.service, namespace, server, token_file, ca, one.port, _common(one))
    return KubernetesSource(settings, random.random)


def _common(one: Found) -> Common:
    return Common(one.scheme, one.role, one.max_in_flight, _credential(one.api_key_file), _tls(one.tls))


def _credential(secret: Secret | None) -> bytes | None:
    return secret.reveal().encode() if secret is not None else None


def _tls(tls: BackendTls) -> Tls:
    return Tls(tls.ca, tls.certificate, tls.key, tls.verify)
