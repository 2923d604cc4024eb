"""recompute: resume. What vLLM Ascend's decode engine drops under pressure is prefilled anew, and goes on in the same stream.

The engine ends such a stream like a complete one, but for a stop_reason. Only that event is held back (`core.seam`), and only
where the rest can be asked for exactly (`core.continuation`): one answer of text, without tools, reasoning, log probabilities
or a grammar, and with a known number of tokens where the client has a limit. Everything else is relayed as it came, which is
what `recompute: relay` does always. The request goes on under a new attempt, with an id and leases of its own.
"""

from __future__ import annotations

from typing import Final

from gateway.core.continuation import Continuation
from gateway.core.disagg.signs import Sign, sign
from gateway.core.seam import Seam

RESUMED_MOST: Final = 3  # times one answer is gone on with: an engine that is always full would be asked for ever


class RecomputedSeam(Seam):
    """The stream of a decode leg. `recomputed`: the engine has dropped it; then `resume` or `give_up`."""

    def __init__(self, continuation: Continuation) -> None:
        super().__init__(continuation)
        self.recomputed = False
        self.resumed = 0

    def resume(self) -> bytes | None:
        """The body of the request for what is still to come: the client's own, with what it has got. What is fed from now on
        is the answer to it. None where it cannot be had: `give_up` then passes the marker on."""
        if not self.recomputed or self.resumed == RESUMED_MOST:
            return None
        body = self.body()
        if body is not None:
            self.resumed += 1
            self.recomputed = False
            self.go_on()
        return body

    def _judge(self, event: bytes) -> list[bytes]:
        if b'"recomputed"' in event and sign(event[5:].strip()) is Sign.RECOMPUTED:
            self.recomputed = not self.lost
            return self._break(event)
        return super()._judge(event)
