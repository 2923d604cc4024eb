"""Who holds KV for whom: what a prefill engine keeps for a decoder that has not come yet. Pure: the clock is an argument.

A prefill that was asked for by `do_remote_decode` ends with its blocks held under a lease. The decoder's pull frees them,
and so does its refusal; else they stay until the lease is over. Every one that was held ends in exactly one `End`, so
that what is missing at the end of a test was stranded.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum


class End(Enum):
    PULLED = "pulled"
    REJECTED = "rejected"  # by the decoder, which will not come
    EXPIRED = "expired"
    ABORTED = "aborted"  # the request that it was for is over


@dataclass(frozen=True, slots=True)
class Held:
    request_id: str
    blocks: tuple[int, ...]
    tokens: int
    until: float


class Ledger:
    """`lease` in seconds. Block numbers start at 1 and are given out in a ring of `blocks`."""

    def __init__(self, lease: float, blocks: int):
        self.lease, self._blocks, self._next = lease, blocks, 0
        self._held: dict[str, Held] = {}
        self.ends: Counter[End] = Counter()
        self.unknown = 0  # decoders that came for what is not held, or no more

    @property
    def held(self) -> tuple[Held, ...]:
        return tuple(self._held.values())

    @property
    def blocks(self) -> int:
        return sum(len(one.blocks) for one in self._held.values())

    def hold(self, request_id: str, blocks: int, tokens: int, now: float) -> Held:
        numbers = tuple((self._next + at) % self._blocks + 1 for at in range(blocks))
        self._next += blocks
        held = self._held[request_id] = Held(request_id, numbers, tokens, now + self.lease)
        return held

    def end(self, request_id: str, how: End, now: float) -> Held | None:
        """What is over now; None where nothing is held, or no more: its lease may have ended this very moment."""
        held = self._held.get(request_id)
        if held is None or held.until <= now:
            self.unknown += 1
            return None
        return self._over(held, how)

    def expire(self, now: float) -> list[Held]:
        return [self._over(held, End.EXPIRED) for held in self.held if held.until <= now]

    def _over(self, held: Held, how: End) -> Held:
        del self._held[held.request_id]
        self.ends[how] += 1
        return held
