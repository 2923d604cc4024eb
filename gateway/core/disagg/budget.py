"""The time that a hand-off has: how long P keeps KV for D, and until when it may be handed over (pd.md 6.4).

What is fetched too late is no error but another request's KV, in an answer that looks right: so params are dead well before
the hold ends.
"""

from __future__ import annotations

from typing import Final

DEAD: Final = 0.8  # of the hold: from then on D must not be sent these params


def dead(hold: float, taken: float, now: float) -> bool:
    """Whether what P held from `taken` on must not be fetched any more: the prompt is to be prefilled anew. `hold`: seconds; 0
    where P keeps nothing that could go."""
    return hold > 0 and now - taken > DEAD * hold
