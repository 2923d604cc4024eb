"""vLLM's NIXL in push mode: D tells P where it is, and P writes the KV there (pd.md 5.2).

D gets P's coordinates only. With remote_block_ids it would pull.
"""

from __future__ import annotations

from typing import Final

from gateway.core.disagg.base import Pair
from gateway.core.disagg.body import FALSE, TRUE, Body, as_json
from gateway.core.disagg.nixl import Nixl

_COORDINATES: Final = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


class NixlPush(Nixl):
    name = "nixl_push"
    required = _COORDINATES
    flagged = False
    abort_in_transfer_unsafe = True  # what D has allocated for a push leaks where it is aborted (vLLM 46283, 46289, 50754)

    def handed(self, pair: Pair, given: Body) -> bytes:
        put = {"do_remote_prefill": TRUE, "do_remote_decode": FALSE}
        put |= {name: raw for name in (*_COORDINATES, "tp_size") if (raw := given.raw(name)) is not None}
        if "tp_size" not in put:
            put["tp_size"] = as_json(pair.prefill.tp_size)
        return Body(b"{}").edited(put)
