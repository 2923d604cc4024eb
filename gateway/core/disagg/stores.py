"""Where KV goes through a store that both engines see: LMCache, llm-d's shared storage, its offloading connector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from gateway.core.disagg.asked import Asked
from gateway.core.disagg.base import Connector, Handoff, Leg, Order, Pair, Release, params
from gateway.core.disagg.body import as_json


class LmCache(Connector):
    """P computes, D finds it in the cache (pd.md 5.9). There is no word of it but P's answer: what P has not stored by then,
    D computes anew."""

    name = "lmcache"
    order = Order.SERIAL
    hold = 0.0
    release_policy = Release.NEVER

    def prefill(self, asked: Asked, pair: Pair, posted: bytes = b"") -> Leg:
        return Leg(asked.path, self.shaped(asked, {}), pair.attempt.encode())

    def decode(self, asked: Asked, pair: Pair, handoff: Handoff = Handoff()) -> Leg:
        return Leg(asked.path, self.for_decode(asked), pair.attempt.encode())


class SharedStorage(LmCache):
    """D goes ahead where it has enough of the prompt, else it says so, and P is asked (pd.md 5.10)."""

    name = "shared_storage"
    order = Order.PROBE

    def probe(self, asked: Asked, pair: Pair) -> Leg:
        put = {**asked.encoded, "cache_hit_threshold": as_json(self.rules.cache_threshold)}
        return Leg(asked.path, asked.edited(put), pair.attempt.encode())

    def prefill(self, asked: Asked, pair: Pair, posted: bytes = b"") -> Leg:
        return Leg(asked.path, self.shaped(asked, {"cache_hit_threshold": b"0"}), pair.attempt.encode())

    def decode(self, asked: Asked, pair: Pair, handoff: Handoff = Handoff()) -> Leg:
        return Leg(asked.path, self.for_decode(asked, {"cache_hit_threshold": b"0"}), pair.attempt.encode())


class OffloadingP2p(Connector):
    """P stores under an id of ours, D fetches from P by it (pd.md 5.11). One after the other, as llm-d does since: a D that
    fetches before P has stored waits for its load's deadline, and then computes the prompt anew."""

    name = "offloading_p2p"
    order = Order.SERIAL
    hold = 0.0  # blocks stay in P's tier until they are evicted
    release_policy = Release.NEVER
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {"prefill": ("kv_port",)}

    def prefill(self, asked: Asked, pair: Pair, posted: bytes = b"") -> Leg:
        given = params(remote_decoder={"kv_request_id": _uuid(pair)})
        return Leg(asked.path, self.shaped(asked, {"kv_transfer_params": given}), pair.attempt.encode())

    def decode(self, asked: Asked, pair: Pair, handoff: Handoff = Handoff()) -> Leg:
        prefill = pair.prefill
        source = {"kv_request_id": _uuid(pair), "remote_host": prefill.kv_name, "remote_port": prefill.kv_port}
        return Leg(asked.path, self.with_params(asked, params(remote_prefiller=source)), pair.attempt.encode())


def _uuid(pair: Pair) -> str:
    digits = pair.attempt
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
