"""vLLM's MoRIIOConnector: READ, where D reads P's KV, and WRITE, where P writes into D's (pd.md 5.8).

READ is serial: a D that is asked before P has answered crashes (vLLM 46115). WRITE has both legs at once, on one DP rank
that is chosen here; D's output waits for P's outcome.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from gateway.core.dialects import Reading
from gateway.core.disagg.asked import Asked
from gateway.core.disagg.base import (
    RANK,
    Connector,
    Engine,
    Handoff,
    HandoffMissing,
    Leg,
    Order,
    Pair,
    Release,
    bracketed,
    params,
)
from gateway.core.disagg.body import FALSE, TRUE, Body, as_json
from gateway.core.disagg.nixl import Nixl

PORTS = ("handshake_port", "notify_port")


class MoriioRead(Nixl):
    name = "moriio_read"
    hold = 30.0
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {"prefill": PORTS, "decode": PORTS}
    ranked = True
    reusable = False  # P was told where D is
    flagged = False
    tells = False
    required = ("remote_engine_id", "remote_block_ids", "transfer_id")

    def prefill(self, asked: Asked, pair: Pair, posted: bytes = b"") -> Leg:
        given = params(
            do_remote_decode=True,
            do_remote_prefill=False,
            remote_engine_id=None,
            remote_block_ids=None,
            transfer_id=transfer_id(pair),
            **_peer(pair.decode),
        )
        return _leg(asked, pair, self.shaped(asked, {"kv_transfer_params": given}, self.staging(pair)), pair.prefill, pair.rank)

    def handed(self, pair: Pair, given: Body) -> bytes:
        """P's own object, as one that says where P is and on which rank it ran."""
        rank = rank_of(given, pair)
        put = {"do_remote_decode": FALSE, "do_remote_prefill": TRUE, "remote_dp_rank": as_json(rank)}
        put |= {name: as_json(value) for name, value in _peer(pair.prefill).items() if given.raw(name) is None}
        return given.edited(put)

    def decode(self, asked: Asked, pair: Pair, handoff: Handoff = Handoff()) -> Leg:
        return self._to_decode(asked, pair, self.with_params(asked, handoff.params), handoff)

    def release(self, asked: Asked, pair: Pair, handoff: Handoff) -> Leg | None:
        return self._to_decode(asked, pair, self.one_token(asked, handoff.params), handoff)

    def _to_decode(self, asked: Asked, pair: Pair, body: bytes, handoff: Handoff) -> Leg:
        return _leg(asked, pair, body, pair.decode, rank_of(Body(handoff.params), pair))


class MoriioWrite(Connector):
    name = "moriio_write"
    order = Order.CONCURRENT
    hold = 30.0  # P writes once D has said whereto, and keeps what it has computed until then
    defers = 30.0  # as llm-d's sidecar does (pd.md 5.8)
    release_policy = Release.NEVER
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {"prefill": PORTS, "decode": PORTS}
    ranked = True
    reusable = False  # P was told where D is

    def prefill(self, asked: Asked, pair: Pair, posted: bytes = b"") -> Leg:
        decode = pair.decode
        given = params(
            do_remote_decode=True,
            do_remote_prefill=False,
            remote_engine_id=None,
            remote_block_ids=None,
            remote_dp_rank=pair.rank,
            remote_dp_rank_override=True,
            transfer_id=transfer_id(pair),
            tp_size=decode.tp_size,
            **_peer(decode),
        )
        return _leg(asked, pair, self.shaped(asked, {"kv_transfer_params": given}), pair.prefill, pair.rank)

    def decode(self, asked: Asked, pair: Pair, handoff: Handoff = Handoff()) -> Leg:
        prefill = pair.prefill
        given = params(
            do_remote_decode=False,
            do_remote_prefill=True,
            remote_engine_id=f"{bracketed(prefill.kv_name)}:{prefill.handshake_port}",
            remote_block_ids=[],  # null is taken for another mode
            remote_dp_rank=pair.rank,
            remote_dp_rank_override=True,
            transfer_id=transfer_id(pair),
            tp_size=prefill.tp_size,
            **_peer(prefill),
        )
        return _leg(asked, pair, self.with_params(asked, given), pair.decode, pair.rank)

    def accept(self, pair: Pair, said: Body, reading: Reading) -> Handoff:
        """Nothing is carried, but P says on which rank it ran: it must be the one that D was given."""
        given = said.inner("kv_transfer_params")
        if given is not None and (rank := rank_of(given, pair)) != pair.rank:
            raise HandoffMissing(f"the prefill engine {pair.prefill.name} ran on DP rank {rank}, and not on {pair.rank}")
        return super().accept(pair, said, reading)


def rank_of(given: Body, pair: Pair) -> int:
    """The rank that P says it ran on, else the one it was pinned to. Raises HandoffMissing for one that P cannot have."""
    rank = given.value("remote_dp_rank")
    if rank is None:
        return pair.rank
    if type(rank) is not int or not 0 <= rank < pair.prefill.dp_size:
        raise HandoffMissing(
            f"the prefill engine {pair.prefill.name} answered with remote_dp_rank {rank!r}; expected 0 to "
            f"{pair.prefill.dp_size - 1}"
        )
    return rank


def transfer_id(pair: Pair) -> str:
    return f"tx-{pair.attempt}"  # the connector routes by the tx


def _peer(engine: Engine) -> dict[str, Any]:
    """Where an engine is, as the other one is told."""
    return {
        "remote_host": engine.kv_name,
        "remote_port": engine.kv_port if engine.kv_port is not None else engine.handshake_port,
        "remote_handshake_port": engine.handshake_port,
        "remote_notify_port": engine.notify_port,
        "remote_dp_size": engine.dp_size,
        "remote_tp_size": engine.tp_size,
    }


def _leg(asked: Asked, pair: Pair, body: bytes, engine: Engine, rank: int) -> Leg:
    fields = ((RANK, b"%d" % rank),) if engine.dp_size > 1 and rank < engine.dp_size else ()
    return Leg(asked.path, body, request_id(pair), fields)


def request_id(pair: Pair) -> bytes:
    """Both addresses, as newer connectors read them out of it; older ones take it for any id."""
    prefill, decode = _zmq(pair.prefill), _zmq(pair.decode)
    return f"___prefill_addr_{prefill}___decode_addr_{decode}_{pair.attempt}".encode()


def _zmq(engine: Engine) -> str:
    return f"host:{engine.kv_name},handshake:{engine.handshake_port},notify:{engine.notify_port}"
