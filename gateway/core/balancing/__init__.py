"""Policies: which of several backends takes the next exchange. One file each, one line here."""

from __future__ import annotations

from gateway.core.balancing.affinity import Affinity
from gateway.core.balancing.base import Policy
from gateway.core.balancing.least_loaded import LeastLoaded
from gateway.core.balancing.power_of_two import PowerOfTwo
from gateway.core.balancing.round_robin import RoundRobin

POLICIES: dict[str, type[Policy]] = {
    "least_loaded": LeastLoaded,
    "round_robin": RoundRobin,
    "power_of_two": PowerOfTwo,
    "affinity": Affinity,
}
