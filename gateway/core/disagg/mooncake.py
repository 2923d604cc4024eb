"""Mooncake: vLLM's MooncakeConnector (rendezvous, pd.md 5.4) and vLLM Ascend's (pull, 5.5).

Both stage KV only where the prefill's one token ended by its limit: hence min_tokens 1, and no stop strings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

from gateway.core.disagg.asked import Asked
from gateway.core.disagg.base import RANK, Connector, Engine, Handoff, Leg, Order, Pair, bracketed, params
from gateway.core.disagg.body import from_json
from gateway.core.disagg.nixl import NAMES, Nixl
from gateway.core.disagg.shape import Shape

HOLD: Final = 480.0  # VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT, which is in seconds


class MooncakeAscend(Nixl):
    """P answers with params as NIXL's does, and with more: all of it is D's."""

    name = "mooncake_ascend"
    hold = HOLD
    shape = Shape(min_tokens=True)
    tells = False  # its newest versions do, older ones do not
    required = NAMES


class Mooncake(Connector):
    """Both legs at once, by a transfer id of ours. D is told which engine of P (a DP rank) has its KV: P is pinned to it."""

    name = "mooncake"
    order = Order.CONCURRENT
    hold = HOLD
    shape = Shape(min_tokens=True)
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {"prefill": ("bootstrap_port",)}
    learns = True
    ranked = True
    tells = True

    def prefill(self, asked: Asked, pair: Pair, posted: bytes = b"") -> Leg:
        given = params(do_remote_decode=True, do_remote_prefill=False, transfer_id=_transfer(pair))
        body = self.shaped(asked, {"kv_transfer_params": given})
        return Leg(asked.path, body, pair.attempt.encode(), ((RANK, b"%d" % pair.rank),))

    def decode(self, asked: Asked, pair: Pair, handoff: Handoff = Handoff()) -> Leg:
        return Leg(asked.path, self.with_params(asked, self._given(pair)), pair.attempt.encode())

    def release(self, asked: Asked, pair: Pair, handoff: Handoff) -> Leg | None:
        """For a P that has answered while D had not been reached."""
        return Leg(asked.path, self.one_token(asked, self._given(pair)), pair.attempt.encode())

    def ask(self, engine: Engine) -> str:
        return f"{_bootstrap(engine)}/query"

    def learn(self, answer: bytes) -> Mapping[int, str]:
        said = from_json(answer)
        found: dict[int, str] = {}
        for rank, entry in (said if isinstance(said, dict) else {}).items():
            engine_id = entry.get("engine_id") if isinstance(entry, dict) else None
            if not rank.isdecimal() or not isinstance(engine_id, str) or not engine_id:
                raise ValueError(f'expected {{"RANK": {{"engine_id": "..."}}}}, found {answer[:200]!r}')
            found[int(rank)] = engine_id
        if not found:
            raise ValueError(f'expected {{"RANK": {{"engine_id": "..."}}}}, found {answer[:200]!r}')
        return found

    def _given(self, pair: Pair) -> bytes:
        engine_id = pair.prefill.engine_ids.get(pair.rank)
        if engine_id is None:
            raise LookupError(f"backend {pair.prefill.name}: the engine id of rank {pair.rank} is not known yet")
        return params(
            do_remote_decode=False,
            do_remote_prefill=True,
            transfer_id=_transfer(pair),
            remote_bootstrap_addr=_bootstrap(pair.prefill),
            remote_engine_id=engine_id,
        )


def _transfer(pair: Pair) -> str:
    return f"xfer-{pair.attempt}"


def _bootstrap(engine: Engine) -> str:
    return f"http://{bracketed(engine.kv_name)}:{engine.bootstrap_port}"
