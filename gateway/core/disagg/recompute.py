"""recompute: resume. What vLLM Ascend's decode engine drops under pressure is prefilled anew, and goes on in the same stream.

The engine ends such a stream like a complete one, but for a stop_reason, "recomputed" (A#3448). Only that event, and what
comes behind it, is held back, and only where the rest can be asked for exactly (`core.continuation`): one answer of text,
without tools, reasoning, log probabilities or a grammar, and with a known number of tokens where the client has a limit. What
behind the marker says usage tells that number as well: it is of all that the engine has generated. Everything else is relayed
as it came, which is what `recompute: relay` does always.
"""

from __future__ import annotations

from typing import Final

from gateway.core.continuation import Continuation
from gateway.core.disagg.signs import Sign, sign
from gateway.core.seam import Chunk, Delta, Seam, more_than_text, payload, read

RESUMED_MOST: Final = 3  # times one answer is gone on with: an engine that is always full would be asked for ever
_NO_DELTA: Final = Delta()


class RecomputedSeam(Seam):
    """The streams of decode legs. `recomputed`: the engine has dropped the last one, and another may go on; `spent`: that has
    been done as often as it may be."""

    def __init__(self, continuation: Continuation) -> None:
        super().__init__(continuation)
        self.recomputed = False
        self._resumed = 0
        self._bare = True  # the marker brought nothing else

    @property
    def spent(self) -> bool:
        return self._resumed == RESUMED_MOST

    @property
    def mendable(self) -> bool:
        return self.recomputed and not self.lost

    def body(self) -> bytes | None:
        return super().body() if self.recomputed and not self.spent else None

    def go_on(self) -> None:
        super().go_on()
        if self._again:  # whatever was generated of it, nothing came: the tokens are those of the answer that follows
            self._tokens, self._before, self._counted = 0, 0, True
        self.recomputed = False
        self._resumed += 1

    def _judge(self, event: bytes) -> list[bytes]:
        if self.lost or b'"recomputed"' not in event:
            return super()._judge(event)
        data = payload(event)
        chunk = _chunk(data) if sign(data) is Sign.RECOMPUTED else None
        if chunk is None or len(chunk.choices) != 1 or chunk.choices[0].index:
            return super()._judge(event)
        choice = chunk.choices[0]
        delta = choice.delta or _NO_DELTA
        if more_than_text(delta):
            return self._surrender_to(event)
        self.recomputed = True
        self._bare = not (delta.content or choice.text or choice.token_ids)
        return super()._break(self._rewritten(event, data, chunk) if self._second else event)

    def _break(self, event: bytes) -> list[bytes]:
        """An end by a failure: nobody mends that."""
        return self._surrender_to(event)

    def _hold(self, event: bytes) -> None:
        data = payload(event)
        chunk = _chunk(data) if b'"usage"' in data else None
        if chunk is not None and not chunk.choices:
            self._note(chunk, data)
            usage = chunk.usage
            # what the marker itself brought was counted there, and is not with the client
            if usage is not None and usage.completion_tokens is not None and self._counted and self._bare:
                self._tokens = self._before + usage.completion_tokens
            if self._second:
                event = self._rewritten(event, data, chunk)
        super()._hold(event)


def _chunk(data: bytes) -> Chunk | None:
    try:
        return read(data)
    except (ValueError, RecursionError):
        return None
