"""The backend with the fewest exchanges in flight for its weight; among equals, the one that has waited longest.

Ties are the rule with short requests, and a fixed order among equals would send all of them to the first backend.

Each failure of late weighs as much as an exchange in flight: a backend that fails at once is always the least loaded one,
and would draw the whole load on itself until its breaker opens.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.core.backend import Backend


def least_loaded(candidates: Sequence[Backend], turn: int) -> Backend:
    chosen = min(candidates, key=lambda b: ((b.in_flight + b.breaker.doubt) / b.weight, b.picked))
    chosen.picked = turn
    return chosen
