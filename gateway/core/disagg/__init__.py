"""Disaggregated prefill and decode: one module a connector, which decides; `gateway/net` sends what they decide."""

from __future__ import annotations

from typing import Final

from gateway.core.disagg.base import Connector, Rules
from gateway.core.disagg.nixl import Nixl

CONNECTORS: Final[dict[str, type[Connector]]] = {connector.name: connector for connector in (Nixl,)}


def connector(name: str, rules: Rules = Rules()) -> Connector:
    """By the name of `disaggregation.connector`. Raises KeyError."""
    return CONNECTORS[name](rules)
