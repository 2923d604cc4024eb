"""NIXL both ways, for conversations: what D has computed of one turn, P fetches for the next (pd.md 5.3).

D's answer says where its own blocks are. They are kept, by conversation, for one use and less long than D keeps the blocks;
the next turn's prefill gets them together with do_remote_decode. Without them it is an ordinary prefill. The store is this
process's: conversations must come back to it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from gateway.core.disagg.asked import Asked
from gateway.core.disagg.base import Handoff, Leg, Pair, Rules
from gateway.core.disagg.body import FALSE, TRUE, Body, as_json
from gateway.core.disagg.nixl import NAMES, Nixl
from gateway.errors import Refusal

TTL: Final = 450.0  # seconds; vLLM's decoder_kv_blocks_ttl is 480
KEPT_MOST: Final = 10_000  # conversations
OCTETS_MOST: Final = 64 << 20  # of all that is kept, names and params; a long prompt's block ids take some 100 KiB
_NAME: Final = "conversation_id"  # the body's member, as vLLM's multi-turn example has it; engines are not sent it


class Conversations:
    """Params by conversation, the oldest first out."""

    def __init__(self, ttl: float = TTL, most: int = KEPT_MOST, octets: int = OCTETS_MOST):
        self.ttl, self.most, self.octets = ttl, most, octets
        self._kept: OrderedDict[str, tuple[float, bytes]] = OrderedDict()
        self._held = 0  # octets

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, conversation: str, params: bytes, now: float) -> None:
        self._pop(conversation)
        self._kept[conversation] = now, params
        self._held += len(conversation) + len(params)
        while self._kept and self._is_too_much(now):
            self._pop(next(iter(self._kept)))

    def take(self, conversation: str, now: float) -> bytes | None:
        """What was kept, once; None where there is nothing, or nothing fresh."""
        kept = self._pop(conversation)
        return kept[1] if kept is not None and now - kept[0] <= self.ttl else None

    def _is_too_much(self, now: float) -> bool:
        """Or the oldest is too old."""
        since, _ = next(iter(self._kept.values()))
        return len(self._kept) > self.most or self._held > self.octets or since < now - self.ttl

    def _pop(self, conversation: str) -> tuple[float, bytes] | None:
        kept = self._kept.pop(conversation, None)
        if kept is not None:
            self._held -= len(conversation) + len(kept[1])
        return kept


class NixlBidirectional(Nixl):
    """`prefill` takes what is kept: call it once an attempt. `answered` keeps what D's answer says."""

    name = "nixl_bidirectional"

    def __init__(self, rules: Rules = Rules(), conversations: Conversations | None = None):
        super().__init__(rules)
        self.conversations = Conversations() if conversations is None else conversations

    def conversation(self, asked: Asked) -> str:
        named = asked.body.value(_NAME)
        return named if isinstance(named, str) else ""

    def prefill(self, asked: Asked, pair: Pair, posted: bytes = b"") -> Leg:
        kept = self.conversations.take(pair.conversation, pair.now) if pair.conversation else None
        leg = super().prefill(asked, pair)
        if kept is None:
            return leg._replace(body=_unnamed(leg.body))
        return leg._replace(body=Body(leg.body).edited({"kv_transfer_params": kept}, {_NAME}))

    def decode(self, asked: Asked, pair: Pair, handoff: Handoff = Handoff()) -> Leg:
        leg = super().decode(asked, pair, handoff)
        return leg._replace(body=_unnamed(leg.body))

    def alone(self, asked: Asked, pair: Pair) -> Leg:
        leg = super().alone(asked, pair)
        return leg._replace(body=_unnamed(leg.body))

    def answered(self, pair: Pair, data: bytes, now: float) -> bool:
        if not pair.conversation or b'"kv_transfer_params"' not in data:
            return False
        put = {"do_remote_decode": TRUE, "do_remote_prefill": FALSE}  # as they are P's at the next turn
        if self.rules.remote_host:
            put["remote_host"] = as_json(pair.decode.kv_name)
        try:
            given = Body(data).inner("kv_transfer_params")
            if given is None or any(given.raw(name) is None for name in NAMES):
                return False
            octets = given.edited(put)
        except Refusal:
            return False
        self.conversations.put(pair.conversation, octets, now)
        return True


def _unnamed(body: bytes) -> bytes:
    return Body(body).edited(drop={_NAME})
