"""vLLM's NixlConnector, pull: P answers with where its KV is, D fetches it from there (pd.md 5.1)."""

from __future__ import annotations

from typing import ClassVar, Final

from gateway.core.dialects import Reading
from gateway.core.disagg.asked import Asked
from gateway.core.disagg.base import Connector, Handoff, HandoffMissing, Leg, Order, Pair, params
from gateway.core.disagg.body import Body, as_json
from gateway.core.disagg.shape import Shape

PREFILL: Final = params(
    do_remote_decode=True,
    do_remote_prefill=False,
    remote_engine_id=None,
    remote_block_ids=None,
    remote_host=None,
    remote_port=None,
)
NAMES: Final = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port", "remote_block_ids")


class Nixl(Connector):
    """Also of all whose P answers with params that D gets as they are: subclasses name what must be in them."""

    name = "nixl"
    order = Order.SERIAL
    hold = 30.0  # kv_lease_duration; older vLLM: VLLM_NIXL_ABORT_REQUEST_TIMEOUT, 120 or 480
    tells = True  # request_finished of vllm/distributed/kv_transfer/kv_connector/v1/nixl/{pull,push}_scheduler.py
    flagged: ClassVar[bool] = True  # P's answer says do_remote_prefill: true
    required: ClassVar[tuple[str, ...]] = NAMES  # without one of these D would compute the prompt anew, and not say so

    def prefill(self, asked: Asked, pair: Pair, posted: bytes = b"") -> Leg:
        return self.leg(asked, pair, self.shaped(asked, {"kv_transfer_params": PREFILL}, self.staging(pair)))

    def staging(self, pair: Pair) -> Shape:
        """Current NIXL stages KV whatever ended P's token, Mooncake and older NIXL only where its limit did (pd.md 2.1)."""
        return Shape(min_tokens=True) if pair.capped else self.shape

    def accept(self, pair: Pair, said: Body, reading: Reading) -> Handoff:
        given = said.inner("kv_transfer_params")
        if given is None:
            early = not self.staging(pair).min_tokens and reading.finish_reason == "stop"
            why = "its first token ended the answer" if early else "does it run with a KV connector?"
            raise HandoffMissing(
                f"the prefill engine {pair.prefill.name} answered without kv_transfer_params: {why}", early=early
            )
        missing = given.lacks(self.required)
        if self.flagged and given.value("do_remote_prefill") is not True:
            missing.insert(0, "do_remote_prefill: true")
        if missing:
            raise HandoffMissing(
                f"the prefill engine {pair.prefill.name} answered with kv_transfer_params that lack {', '.join(missing)}"
            )
        if self.rules.remote_host:
            given = Body(given.edited({"remote_host": as_json(pair.prefill.kv_name)}))
        return super().accept(pair, said, reading)._replace(params=self.handed(pair, given))

    def handed(self, pair: Pair, given: Body) -> bytes:
        """What D gets, of P's params."""
        return given.octets

    def decode(self, asked: Asked, pair: Pair, handoff: Handoff = Handoff()) -> Leg:
        return self.leg(asked, pair, self.with_params(asked, handoff.params))

    def release(self, asked: Asked, pair: Pair, handoff: Handoff) -> Leg | None:
        return self.leg(asked, pair, self.one_token(asked, handoff.params))

    def leg(self, asked: Asked, pair: Pair, body: bytes) -> Leg:
        return Leg(asked.path, body, pair.attempt.encode())
