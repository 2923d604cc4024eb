"""From the configuration to disaggregated prefill and decode: the connector with its rules, and what it knows of a backend."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

from gateway.configdisagg import FLAGS, KEY, Disaggregation, key_of_flags
from gateway.configvalues import split_url
from gateway.core.disagg import CONNECTORS
from gateway.core.disagg.base import GENERATING, Engine, Release, Rules, missing
from gateway.core.members import Member
from gateway.errors import ConfigError
from gateway.net.paired import PairSettings

log = logging.getLogger(__name__)

LONG_HOLD = 120.0  # seconds; engines that keep KV for so long do not all let go of what a decode engine refuses


def pair_settings(disaggregation: Disaggregation, callback: str = "") -> PairSettings:
    """`callback`: the URL of the metaserver, where there is one."""
    found = CONNECTORS[disaggregation.connector]
    rules = Rules(
        tool_choice=disaggregation.tool_choice,
        list_prompts=disaggregation.list_prompts,
        remote_host=disaggregation.override_remote_host,
        prompt_logprobs=disaggregation.prompt_logprobs,
        cache_threshold=disaggregation.cache_threshold,
    )
    # what is not set is the connector's own; and where nothing is held, no setting makes it so
    hold = found.hold if disaggregation.hold == Disaggregation().hold or not found.hold else disaggregation.hold
    if found.waits:
        hold = 0.0
    release = found.release_policy if disaggregation.release == "auto" else Release(disaggregation.release)
    return PairSettings(
        found(rules),
        GENERATING | found.paths,
        min_prompt_bytes=disaggregation.min_prompt_bytes,
        prefill_timeout=disaggregation.prefill_timeout,
        hold=hold,
        release=release,
        notifies=disaggregation.release != "always" and hold < LONG_HOLD,
        release_timeout=disaggregation.release_timeout,
        release_cap=disaggregation.release_cap,
        admission_grace=disaggregation.admission_grace,
        prefill_grace=disaggregation.prefill_grace,
        abort_unsafe=disaggregation.abort_unsafe or found.abort_in_transfer_unsafe,
        fallback=disaggregation.local_decode_fallback,
        cached_tokens=disaggregation.cached_tokens == "prefill",
        resume=disaggregation.recompute == "resume",
        callback=callback,
        named=disaggregation.prefiller_header == "follow",
    )


def say_connector(connector: str, flags: Mapping[str, object]) -> None:
    """Tell who comes with the command line of another proxy what engines are sent, and which connector it is where it names
    none."""
    if key_of(flags) is not None:
        log.info("the engines are shown the key in %s, whatever key a client shows", KEY)
    if any(flags.get(name) for name in FLAGS) and "kv_connector" not in flags and connector == Disaggregation().connector:
        log.info(
            "disaggregated prefill and decode with the connector nixl, as --kv-connector is not given: vLLM Ascend's "
            "MooncakeConnector, which keeps KV for 480 s, is --kv-connector mooncake_ascend, its layerwise one layerwise"
        )


def key_of(flags: Mapping[str, object]) -> bytes | None:
    """What engines are shown that are named by the command line of another proxy."""
    key = key_of_flags(flags, os.environ)
    return None if key is None else key.reveal().encode()


def engine_of(member: Member) -> Engine:
    """What connectors know of a backend."""
    _, address = split_url(member.place.url)
    return Engine(member.name, address.host, address.port, **member.kv._asdict())


def check_member(disaggregation: Disaggregation, member: Member) -> None:
    """Raises ConfigError for a backend that the admin API adds without what the connector must know of it."""
    lacks = missing(engine_of(member), CONNECTORS[disaggregation.connector], member.role)
    if lacks:
        expected = f"a port, for connector {disaggregation.connector} (POST /-/backends takes it)"
        raise ConfigError(f"the body: connector.{lacks[0]}: found nothing; expected {expected}")
