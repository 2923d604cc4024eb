"""How much a backend has on its hands, in requests: what is known at once, and what its engine said last.

    load = (in flight + (unread prompts + 0.3 x held KV) / 1024 tokens + others' + waiting) x pressure        + penalty

What is in flight from here is exact and counts the moment it is sent, so that a figure which is read once a second cannot
send everybody to the same backend until it is read again. A prompt counts until the first of the answer is here: while an
engine reads it, nobody else there gets on, and afterwards it is a request like any other. Of an engine's own figures only
that is added which cannot be known here: requests that others sent it, that some of them wait, and that its cache is nearly
full.
"""

from __future__ import annotations

from typing import NamedTuple

# An unread prompt of so many tokens is as bad for whoever comes next as one more request in flight: what a large GPU reads in
# some 40 ms. Found by simulation (tests/support/simulation.py): TTFT is best from 512 to 2,048.
REQUEST = 1024
# Of the tokens that a prefill engine holds for others to fetch, the part that counts: they take room and no time. The share is
# that of vLLM Ascend's load_balance_proxy_server_example.py.
HELD = 0.3
TOKENS_MOST = 65_536  # of one prompt: what is larger is mostly pictures, whose octets are no measure of tokens
OCTETS = 4  # of a request's body to a token, roughly

# How far each new figure is followed. Where several gateways share engines, each would else go by what the others did a second
# ago, and all of them would swing from one side to the other.
FOLLOWED = 0.25

KV_HIGH = 0.8  # from this use of its cache on an engine's load counts more, up to double: at 1 it preempts
HALF_LIFE = 5.0  # seconds
STEP = 0.05  # seconds for which a penalty is taken to hold: less than a hundredth of it is gone then
PENALTY_MOST = 1024.0  # requests
PENALTY_LEAST = 0.25  # what is less is nothing


def prompt_tokens(octets: int) -> int:
    """About how many tokens a request body of so many octets asks to be read."""
    return min(octets // OCTETS, TOKENS_MOST)


class EngineLoad(NamedTuple):
    """What an engine says of itself, over all its ranks."""

    running: float
    waiting: float
    kv_usage: float = 0.0  # of 1
    asleep: bool | None = None  # all of its ranks are (vLLM's sleep mode); None: it does not say

    def beyond(self, ours: int) -> float:
        """Requests to be added to our own. `ours` of them may be among its figures. Whoever waits there counts once more:
        of two engines that have as many, the one that cannot run them all is the fuller one."""
        return max(self.running + self.waiting - ours, 0.0) + self.waiting

    @property
    def pressure(self) -> float:
        return 1.0 + max(min(self.kv_usage, 1.0) - KV_HIGH, 0.0) / (1.0 - KV_HIGH)


class Penalty:
    """Requests that are added to the load of a backend that fails.

    One that fails at once never has anything in flight, and would draw the whole load on itself. Each failure doubles its
    penalty, each success halves it, and so do some seconds: soon it is asked no more than now and then, however busy the
    others are, and it is back as soon as it does well.
    """

    __slots__ = ("_at", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self._at = 0.0  # as of when

    def at(self, now: float) -> float:
        if now - self._at >= STEP:
            value = self.value * 0.5 ** ((now - self._at) / HALF_LIFE)
            self.value, self._at = value if value >= PENALTY_LEAST else 0.0, now
        return self.value

    def failed(self, now: float) -> None:
        self.value = min(2 * self.at(now) + 1, PENALTY_MOST)

    def succeeded(self) -> None:
        self.value = self.value / 2 if self.value >= 2 * PENALTY_LEAST else 0.0
