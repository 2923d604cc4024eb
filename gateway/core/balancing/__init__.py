"""Policies: which of several backends takes the next exchange. One file each, one line here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gateway.core.backend import Backend
from gateway.core.balancing.least_loaded import least_loaded
from gateway.core.balancing.round_robin import round_robin

# Candidates are never empty. A policy chooses, and changes nothing but its own marks on them.
Policy = Callable[[Sequence[Backend], int], Backend]

POLICIES: dict[str, Policy] = {"least_loaded": least_loaded, "round_robin": round_robin}
