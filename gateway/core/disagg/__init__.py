"""Disaggregated prefill and decode: one module a connector, which decides; `gateway/net` sends what they decide."""

from __future__ import annotations

from typing import Final

from gateway.core.disagg.base import Connector, Rules
from gateway.core.disagg.layerwise import Layerwise
from gateway.core.disagg.mooncake import Mooncake, MooncakeAscend
from gateway.core.disagg.moriio import MoriioRead, MoriioWrite
from gateway.core.disagg.nixl import Nixl
from gateway.core.disagg.nixl_bidirectional import NixlBidirectional
from gateway.core.disagg.nixl_push import NixlPush
from gateway.core.disagg.p2p_nccl import P2pNccl
from gateway.core.disagg.sglang import Sglang
from gateway.core.disagg.sidecar import Sidecar
from gateway.core.disagg.stores import LmCache, OffloadingP2p, SharedStorage

CONNECTORS: Final[dict[str, type[Connector]]] = {
    connector.name: connector
    for connector in (
        Nixl,
        NixlPush,
        NixlBidirectional,
        Mooncake,
        MooncakeAscend,
        Layerwise,
        P2pNccl,
        MoriioRead,
        MoriioWrite,
        LmCache,
        SharedStorage,
        OffloadingP2p,
        Sglang,
        Sidecar,
    )
}
# Names that people will try, and why they are not there.
REFUSED: Final[dict[str, str]] = {
    "lmcache_xpyd": "its prefill engines say over ZMQ, not over HTTP, that the cache is there, and its decode engines get "
    "token ids and a first token, so that the client's request and answer would have to be made anew; lmcache (both engines on "
    "one LMCache server) does the same work",
}


def connector(name: str, rules: Rules = Rules()) -> Connector:
    """By the name of `disaggregation.connector`. Raises KeyError."""
    return CONNECTORS[name](rules)
