"""Disaggregated prefill and decode as it is written: the section of the configuration, and the flags of other proxies.

The flags are those of vLLM Ascend's load_balance_proxy_server_example.py and of vLLM's own example proxies, where each
takes several words and the first host goes with the first port.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

from gateway.configbackends import BackendConfig, Clash, Discovery, Section
from gateway.configfile import Complaints, Node, describe
from gateway.configvalues import Count, CountOrZero, Listen, Seconds, SecondsOrZero, Secret, Share, Url, is_host, secret
from gateway.core.disagg import CONNECTORS
from gateway.core.disagg.base import Order

# Those of core.disagg.CONNECTORS
Connector: TypeAlias = Literal[
    "nixl", "nixl_push", "nixl_bidirectional", "mooncake", "mooncake_ascend", "layerwise", "moriio_read", "moriio_write",
    "p2p_nccl", "lmcache", "shared_storage", "offloading_p2p", "sglang", "sidecar",
]  # fmt: skip

# side, role, the port where none is given: as in vLLM Ascend's proxy, whose hosts are localhost then
_SIDES: Final = (("prefiller", "prefill", 8001), ("decoder", "decode", 8002))
KEY: Final = "OPENAI_API_KEY"  # the environment variable
FLAGS: Final = tuple(f"{side}_{what}" for side, _, _ in _SIDES for what in ("hosts", "ports"))


class Metaserver(Section, frozen=True):
    """Where decode engines of the layerwise connector call back."""

    listen: Listen | None = None
    url: Url | None = None  # as they reach it; where `listen` is their address for it


class Disaggregation(Section, frozen=True):
    connector: Connector = "nixl"
    min_prompt_bytes: CountOrZero = 0  # request bodies smaller than this are served by one engine
    prefill_timeout: Seconds | None = None  # timeouts.first_byte
    hold: Seconds = 30.0  # how long a prefill engine keeps KV that nobody fetches
    release: Literal["auto", "always", "pressure", "reject", "never"] = "auto"
    release_timeout: Seconds = 30.0
    release_cap: Count = 4  # releases at once, for each decode backend
    admission_grace: SecondsOrZero = 5.0
    prefill_grace: SecondsOrZero = 0.0  # what a prefill may take to answer whose client has left, before it is told to stop
    abort_unsafe: bool = False  # a decode engine must not be aborted before its first byte
    local_decode_fallback: bool = False
    tool_choice: Literal["bypass", "auto", "pass"] = "bypass"  # a tool that must be called
    list_prompts: Literal["bypass", "reject"] = "bypass"
    prompt_logprobs: Literal["reject", "merge"] = "reject"
    recompute: Literal["relay", "resume"] = "relay"  # an answer that decode drops under pressure (vLLM Ascend)
    cached_tokens: Literal["decode", "prefill"] = "decode"  # whose figure stands in the usage that clients get
    cache_threshold: Share = 0.8  # shared_storage: the part of a prompt that decode must have to go ahead alone
    metaserver: Metaserver = Metaserver()
    prefiller_header: Literal["ignore", "follow"] = "ignore"  # x-prefiller-host-port of a request says who prefills (llm-d)
    override_remote_host: bool = False  # decode gets prefill's host as it stands in the configuration


def backends_of_flags(given: dict[str, object], complaints: Complaints) -> list[Node]:
    """The prefill and decode backends that the flags come to; none where no such flag is given. Takes the flags out of
    `given`."""
    values = {name: given.pop(name, None) for name in FLAGS}
    if not any(value is not None for value in values.values()):
        return []
    found: list[Node] = []
    for side, role, port in _SIDES:
        ports = _words(values[f"{side}_ports"]) or [port]
        hosts = _words(values[f"{side}_hosts"]) or ["localhost"] * len(ports)
        flags = f"--{side}-hosts --{side}-ports"
        if len(hosts) != len(ports):
            complaints.add(
                flags, "backends", f"found {len(hosts)} host(s) and {len(ports)} port(s); expected a port for each host"
            )
            continue
        for host, number in dict.fromkeys(zip(hosts, ports, strict=True)):  # named twice is one instance, as to that proxy
            name = str(host).strip("[]")
            if not is_host(name):
                complaints.add(flags, "backends", f"found {describe(host)}; expected a host name or IP address")
                continue
            url = f"http://[{name}]:{number}" if ":" in name else f"http://{name}:{number}"
            members = {"url": url, "role": role}
            found.append(Node({key: Node(value, flags, literal=True) for key, value in members.items()}, flags))
    return found


def key_of_flags(given: Mapping[str, object], environ: Mapping[str, str]) -> Secret | None:
    """What engines are to be shown, where these flags name them: those proxies send the key in OPENAI_API_KEY, and nothing of
    the client's. Raises BadValue."""
    key = environ.get(KEY, "")
    return secret(os.fsencode(key)) if key and any(given.get(name) for name in FLAGS) else None


def _words(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [] if value is None else [value]


def kv_clashes(disaggregation: Disaggregation, backend: BackendConfig, path: str) -> Iterator[Clash]:
    """What the connector must know of one backend, and nobody has said."""
    connector = CONNECTORS[disaggregation.connector]
    for name in connector.needs.get(backend.role, ()):
        if getattr(backend.connector, name) is None:
            yield f"{path}connector.{name}", "found nothing", f"a port, for connector {connector.name}"


def found_clashes(disaggregation: Disaggregation, discovery: Discovery) -> Iterator[Clash]:
    """The same, of what is looked up: neither DNS nor Kubernetes tells of a connector's ports."""
    connector = CONNECTORS[disaggregation.connector]
    for kind in ("dns", "kubernetes"):
        for index, one in enumerate(getattr(discovery, kind) or ()):
            if names := connector.needs.get(one.role, ()):
                needed = (
                    f"another role: connector {connector.name} must be told {' and '.join(names)} (backends, discovery.file)"
                )
                yield f"discovery.{kind}[{index}].role", f"found {one.role}", needed


def disagg_clashes(disaggregation: Disaggregation, backends: Sequence[BackendConfig]) -> Iterator[Clash]:
    """What the connector must know of each backend, and nobody has said."""
    connector = CONNECTORS[disaggregation.connector]
    for index, backend in enumerate(backends):
        yield from kv_clashes(disaggregation, backend, f"backends[{index}].")
    if disaggregation.release == "reject" and not connector.tells:
        able = ", ".join(name for name, each in CONNECTORS.items() if each.tells)
        yield "disaggregation.release", "found reject", f"another one for connector {connector.name}: it works with {able}"
    place, url = disaggregation.metaserver.listen, disaggregation.metaserver.url
    if place is None and connector.order is Order.DECODE_FIRST:
        yield "disaggregation.metaserver.listen", "found nothing", f"HOST:PORT at which engines of {connector.name} call back"
    elif place is not None and url is None and (place.path is not None or place.host in ("0.0.0.0", "::")):
        yield "disaggregation.metaserver.url", "found nothing", f"the URL at which decode engines reach {place}"
    if disaggregation.local_decode_fallback and not connector.serves_alone:
        yield "disaggregation.local_decode_fallback", "found true", f"false: engines of {connector.name} serve nothing alone"
