"""vLLM's P2pNcclConnector: where KV goes from and to is written in the request's id (pd.md 5.7).

Both engines must see the same id: VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1, or a vLLM that leaves ids alone. D computes no
prompt by itself: a request without a prefill would wait for ever, so that nothing can be served by D alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from gateway.core.disagg.asked import Asked
from gateway.core.disagg.base import Connector, Handoff, Leg, Order, Pair
from gateway.core.disagg.shape import Shape, shaped


class P2pNccl(Connector):
    name = "p2p_nccl"
    order = Order.SERIAL
    hold = 480.0  # a buffer of P's or D's keeps it until D asks, or its room is needed: no time is known, this is reckoned
    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {"prefill": ("kv_port",), "decode": ("kv_port",)}
    paths = frozenset((b"/v1/chat/completions", b"/v1/completions"))
    serves_alone = False
    several = False  # it asserts on the ids of children
    asks_again = False  # whoever waits for what is gone waits for ever, and the whole engine with it
    reusable = False  # the id that P was sent names D

    def prefill(self, asked: Asked, pair: Pair, posted: bytes = b"") -> Leg:
        return Leg(asked.path, self.shaped(asked, {}), request_id(pair))

    def decode(self, asked: Asked, pair: Pair, handoff: Handoff = Handoff()) -> Leg:
        return Leg(asked.path, self.for_decode(asked), request_id(pair))

    def release(self, asked: Asked, pair: Pair, handoff: Handoff) -> Leg | None:
        body = shaped(asked, {}, Shape(), tool_auto=True, prompt_logprobs=False)
        return Leg(asked.path, body, request_id(pair))


def request_id(pair: Pair) -> bytes:
    prefill, decode = pair.prefill.kv_address, pair.decode.kv_address
    return f"___prefill_addr_{prefill}___decode_addr_{decode}_{pair.attempt}".encode()
