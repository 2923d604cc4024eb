"""What a prefill backend has on its hands beyond its requests: prompts to be read, and KV that nobody has fetched yet.

A prompt is charged twice before the leg is sent: as tokens to be read, until P has answered, and at a share as KV that P must
keep, until D's first octet or the release. P may have answered long ago and still be full. Decode backends are charged by
their requests: `Backend.in_flight`.
"""

from __future__ import annotations

from typing import Final

from gateway.core.backend import Backend

KV_SHARE: Final = 0.3  # of a token to be read: what vLLM Ascend's proxy has found


class PrefillLoad:
    """Of one attempt. Each part is given back once, however often it is asked for; `release` gives back what is left."""

    __slots__ = ("_backend", "_held", "_reading")

    def __init__(self, backend: Backend, tokens: int):
        self._backend = backend
        self._reading, self._held = tokens, round(tokens * KV_SHARE)
        backend.tokens += self._reading + self._held

    def answered(self) -> None:
        """P has answered: the prompt has been read, its KV is held."""
        self._give_back(self._reading)
        self._reading = 0

    def fetched(self) -> None:
        """D has it, or it was released, or it went with P's lease."""
        self._give_back(self._held)
        self._held = 0

    def release(self) -> None:
        self.answered()
        self.fetched()

    def _give_back(self, tokens: int) -> None:
        self._backend.tokens -= tokens
        if self._backend.tokens < 0:
            raise AssertionError(f"{self._backend.name} has {self._backend.tokens} tokens on its hands")
