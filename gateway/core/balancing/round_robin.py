"""In turn, by weight, and evenly spread: nginx's smooth weighted round robin."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.core.backend import Backend


def round_robin(candidates: Sequence[Backend], turn: int) -> Backend:
    total = 0.0
    for backend in candidates:
        backend.credit += backend.weight
        total += backend.weight
    chosen = max(candidates, key=lambda b: b.credit)
    chosen.credit -= total
    chosen.picked = turn
    return chosen
