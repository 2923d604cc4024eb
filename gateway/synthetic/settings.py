"""What an operator may choose about the synthetic upstream, checked when it is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from gateway.synthetic.behaviour import SERVER_KNOBS, Behaviour, Capacity, T, changed
from gateway.synthetic.distribution import Distribution, parse

ROLES: Final = ("both", "prefill", "decode", "encode")
CONNECTORS: Final = (
    "nixl",
    "nixl_push",
    "nixl_bidirectional",
    "mooncake",
    "mooncake_ascend",
    "layerwise",
    "p2p_nccl",
    "moriio_read",
    "moriio_write",
    "lmcache",
    "shared_storage",
    "offloading_p2p",
    "sglang",
)


@dataclass(frozen=True)
class MockSettings:
    """`ttft` and `itl` are seconds or distributions; `tokens`, a number or a distribution, counts the end-of-text token,
    as vLLM's usage does. `fault` and `knobs` are those of deploy/mock.md; `replay` is a folder of recordings.
    `embedded`: it shares its process with a gateway, which no fault may hold up."""

    host: str = "127.0.0.1"
    port: int = 8001
    model: str = "synthetic"
    ttft: str | float = 0.05
    itl: str | float = 0.02
    tokens: str | int = 64
    seed: int = 0
    # Long enough that no ordinary load is refused; a test of vLLM's "too long" answers sets it low.
    max_model_len: int = 1_048_576
    fault: Sequence[str] = ()
    knobs: Mapping[str, object] = field(default_factory=dict)
    role: str = "both"
    connector: str | None = None
    replay: str | None = None
    embedded: bool = False

    def __post_init__(self) -> None:
        self.behaviour()
        self.capacity()
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port: {self.port} is out of range: 0 to 65535 is expected")
        if not self.model:
            raise ValueError("model: the name is empty")
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len: {self.max_model_len} is out of range: 2 or more is expected")
        if self.role not in ROLES:
            raise ValueError(f"role: {self.role!r} is not a role: {', '.join(ROLES)} is expected")
        if self.connector not in (None, *CONNECTORS):
            raise ValueError(f"connector: {self.connector!r} is not there: {', '.join(CONNECTORS)} is expected")

    @property
    def transfers(self) -> str | None:
        """The connector; an engine of one role has one in any case."""
        return self.connector or ("nixl" if self.role != "both" else None)

    def behaviour(self) -> Behaviour:
        """How answers are to be, where nobody asks for anything else. Raises ValueError that begins with a field's name."""
        base = Behaviour(_named("ttft", self.ttft), _named("itl", self.itl), _named("tokens", self.tokens, tokens=True))
        if self.fault:
            base = changed(base, {"fault": tuple(self.fault)})
        return allowed(_turned(base, self.knobs, server=False), embedded=self.embedded)

    def capacity(self) -> Capacity:
        return _turned(Capacity(), self.knobs, server=True)


def allowed(behaviour: Behaviour, *, embedded: bool) -> Behaviour:
    """`behaviour`, unless it would hold up more than this server. Raises ValueError."""
    if embedded and any(fault.kind.name == "cpu" for fault in behaviour.fault):
        raise ValueError("fault: cpu would hold up the gateway that this server is part of; `tokenpipe mock` alone takes it")
    return behaviour


def _turned(base: T, knobs: Mapping[str, object], *, server: bool) -> T:
    """Turn those of one table; what nobody knows is left to the table of a request's, where its nearest is named."""
    try:
        return changed(base, {name: value for name, value in knobs.items() if (name in SERVER_KNOBS) is server})
    except ValueError as error:
        raise ValueError(f"set: {error}") from None


def _named(name: str, spec: str | float, *, tokens: bool = False) -> Distribution:
    try:
        return parse(spec, tokens=tokens)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
