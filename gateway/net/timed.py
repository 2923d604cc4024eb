"""What an exchange awaits, with a deadline of its own."""

from __future__ import annotations

import time

from gateway.core.outcome import Outcome
from gateway.errors import Refusal
from gateway.net.call import Call
from gateway.net.deadline import within


class Timed(within):
    """`with Timed(call, 5.0, code, words, *of): await ...`: within so many seconds, and within the exchange's total. Raises
    Refusal, whose text is `words % of`."""

    __slots__ = ("_code", "_of", "_retry_after", "_total", "_words")

    def __init__(self, call: Call, seconds: float, code: str, words: str, *of: object, retry_after: int | None = None):
        self._code, self._words, self._of, self._retry_after = code, words, of, retry_after
        total = call.policy.timeouts.total
        self._seconds = seconds if total is None else min(seconds, call.exchange.accepted + total - time.monotonic())
        self._total = total if total is not None and self._seconds < seconds else None

    def over(self) -> Exception:
        if self._total is not None:
            return total_passed(self._total)
        return Refusal(self._code, self._words % self._of, retry_after=self._retry_after)


def total_passed(seconds: float) -> Refusal:
    return Refusal(
        "timeout_first_byte",
        f"the exchange took longer than {seconds:g} s (timeouts.total)",
        outcome=Outcome.TIMEOUT_TOTAL,
    )
