"""What a pick and its lease cost, in microseconds: `python -m tests.bench.pick`.

Backends hold leases, as they do under load; some rounds, and of them the best. To compare with another day on one machine.
"""

from __future__ import annotations

import random
import time

from gateway.core.backend import Backend
from gateway.core.balancing import POLICIES
from gateway.core.pool import Pool

PICKS = 2_000
ROUNDS = 15


def cost(policy: str, count: int) -> float:
    """Of one pick, and of giving back the oldest lease."""
    pool = Pool([Backend(f"b{i}", f"http://b{i}") for i in range(count)], policy)
    chance = random.Random(1)
    held = [lease for _ in range(count * 8) if (lease := pool.pick(0.0, key=chance.random(), chance=chance.random()))]
    chance.shuffle(held)
    rounds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(PICKS):
            lease = pool.pick(1.0, key=chance.random(), chance=chance.random())
            assert lease is not None
            held.append(lease)
            held.pop(0).release()
        rounds.append((time.perf_counter() - began) / PICKS)
    return min(rounds) * 1e6


def main() -> None:
    print(f"{'backends':>14} {1:>7} {4:>7} {64:>7}")
    for policy in POLICIES:
        print(f"{policy:>14}", *(f"{cost(policy, count):7.2f}" for count in (1, 4, 64)))


if __name__ == "__main__":
    main()
