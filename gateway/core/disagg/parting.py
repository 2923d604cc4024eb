"""Where one attempt at a pair of legs stands, and what becomes of it when its client leaves (pd.md 6.1, 6.4).

    state          what there is                                  the client leaves, or the gateway gives up
    QUEUED         two leases                                     nothing to be told to anybody
    ENCODING       encoders compute, each its own leg             close
    PROBING        D has the request, and may say that it has     close
                   too little of the prompt
    PREFILLING     P computes; both legs run, where they do so    close: an engine that loses its client aborts
                   at once                                        What P has answered by then is heard (net.releases)
    HANDOFF        P has answered, and holds KV for D             release: D fetches it, for nobody, so that P frees it
    DECODE_WAIT    D has the request, no octet of its answer yet  detach: D may not have fetched yet. Its leg goes on to the
                                                                  first octet, and is closed then
    STREAMING      D has what P held                              close
    DONE           nothing                                        nothing

Where P holds nothing (KV is pushed, or lies in a store), there is nothing to release, and closing is right in every state;
but where engines do not survive an abort within a transfer, the leg is detached.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final


class State(enum.StrEnum):
    """Its value is the phase that an abort is counted under."""

    QUEUED = "queue"
    ENCODING = "encode"
    PROBING = "probe"
    PREFILLING = "prefill"
    HANDOFF = "handoff"
    DECODE_WAIT = "wait"
    STREAMING = "stream"
    DONE = "done"


class Parting(enum.Enum):
    NOTHING = enum.auto()
    CLOSE = enum.auto()
    RELEASE = enum.auto()
    DETACH = enum.auto()


# What may follow. Any state may be followed by DONE.
NEXT: Final[Mapping[State, frozenset[State]]] = {
    State.QUEUED: frozenset((State.ENCODING, State.PROBING, State.PREFILLING)),
    State.ENCODING: frozenset((State.PROBING, State.PREFILLING)),
    State.PROBING: frozenset((State.PREFILLING, State.STREAMING)),
    State.PREFILLING: frozenset((State.HANDOFF, State.DECODE_WAIT)),  # the latter where both legs are sent at once
    State.HANDOFF: frozenset((State.DECODE_WAIT,)),
    State.DECODE_WAIT: frozenset((State.STREAMING,)),
    State.STREAMING: frozenset(),
    State.DONE: frozenset(),
}

PARTINGS: Final[Mapping[State, Parting]] = {
    State.QUEUED: Parting.NOTHING,
    State.ENCODING: Parting.CLOSE,
    State.PROBING: Parting.CLOSE,
    State.PREFILLING: Parting.CLOSE,
    State.HANDOFF: Parting.RELEASE,
    State.DECODE_WAIT: Parting.DETACH,
    State.STREAMING: Parting.CLOSE,
    State.DONE: Parting.NOTHING,
}


# With these D's serving layer refuses a request that it has read: it tells P to let go (vLLM 41269). What is in front of it
# (keys, paths, limits) knows nothing of KV, and what broke tells nobody.
TELLING: Final = frozenset((400, 422))


def parting(state: State, *, holds: bool, unsafe: bool) -> Parting:
    """`holds`: P keeps KV until D has it. `unsafe`: D must not be aborted between its request and its first octet."""
    found = PARTINGS[state]
    if found is Parting.DETACH and not holds and not unsafe:
        return Parting.CLOSE
    return Parting.NOTHING if found is Parting.RELEASE and not holds else found
