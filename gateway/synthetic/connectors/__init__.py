"""How a mock engine hands KV over: one class for each connector that engines have, by the name that the gateway has for it."""

from __future__ import annotations

from typing import Final

from gateway.synthetic.connectors.agreed import Mooncake, MoriioWrite, OffloadingP2p, P2pNccl, Sglang
from gateway.synthetic.connectors.base import Connector
from gateway.synthetic.connectors.encoder import Encoder
from gateway.synthetic.connectors.layerwise import Layerwise
from gateway.synthetic.connectors.nixl import MooncakeAscend, MoriioRead, Nixl, NixlBidirectional, NixlPush
from gateway.synthetic.connectors.stores import LmCache, SharedStorage
from gateway.synthetic.engine import Engine

_ALL: Final[tuple[type[Connector], ...]] = (
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
)
CONNECTORS: Final = {connector.name: connector for connector in _ALL}


def connector_of(engine: Engine) -> Connector | None:
    """What the settings of an engine come to; None for one that hands nothing over."""
    settings = engine.settings
    if settings.role == "encode":
        return Encoder(engine, settings.role)
    return None if settings.transfers is None else CONNECTORS[settings.transfers](engine, settings.role)
