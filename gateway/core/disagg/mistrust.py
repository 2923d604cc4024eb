"""Pairs of engines between which KV does not get across: a failed transfer says nothing of either of them alone (pd.md 6.12).

So it counts against the pair, by a breaker as backends have (`core.breaker`): a prefill engine's prompts go to other decode
engines than those that could not fetch from it, while there are any; after `open` seconds it is tried again.
"""

from __future__ import annotations

from typing import Final

from gateway.core.breaker import Breaker, BreakerSettings

PAIRS_MOST: Final = 10_000


class Mistrust:
    """Backends go by their names. Pairs that have not failed are not kept."""

    def __init__(self) -> None:
        self._breakers: dict[tuple[str, str], Breaker] = {}

    def failed(self, prefill: str, decode: str, settings: BreakerSettings, now: float) -> None:
        pair = prefill, decode
        breaker = self._breakers.get(pair)
        if breaker is None:
            if len(self._breakers) >= PAIRS_MOST:
                del self._breakers[next(iter(self._breakers))]
            breaker = self._breakers[pair] = Breaker(settings)
        breaker.failed(now)

    def succeeded(self, prefill: str, decode: str) -> None:
        if self._breakers:
            self._breakers.pop((prefill, decode), None)

    def avoided(self, prefill: str, now: float) -> frozenset[str]:
        """Decode engines that it is not to be paired with, where there are others."""
        if not self._breakers:
            return frozenset()
        return frozenset(
            decode for (one, decode), breaker in self._breakers.items() if one == prefill and not breaker.allows(now)
        )
