"""What is settled about a request when it comes: its place in the order, how it is to behave, and what will go wrong. Pure.

Seed and place decide every draw, and each kind of draw has a sequence of its own: a request that is given one more fault
keeps its words and its times.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Final

from gateway.synthetic.behaviour import Behaviour
from gateway.synthetic.faults import Place, Strike, strikes

_IDLE: Final = Random(0)  # for who takes one and draws nothing


@dataclass(frozen=True, slots=True)
class Plan:
    index: int
    seed: int
    behaviour: Behaviour
    strikes: tuple[Strike, ...] = ()

    def random(self, what: str, *, drawn: bool = True) -> Random:
        """A sequence of its own for each kind of draw. Seeding one costs more than an event: not where nothing is `drawn`."""
        return Random(f"{self.seed}:{self.index}:{what}") if drawn else _IDLE

    def struck(self, name: str) -> Strike | None:
        return next((strike for strike in self.strikes if strike.name == name), None)

    def at(self, place: Place) -> list[Strike]:
        return [strike for strike in self.strikes if strike.place is place]


def settle(behaviour: Behaviour, seed: int, index: int) -> Plan:
    drawn = strikes(behaviour.fault, index, Random(f"{seed}:{index}:faults")) if behaviour.fault else ()
    return Plan(index, seed, behaviour, drawn)
