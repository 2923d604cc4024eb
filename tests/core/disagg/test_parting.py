"""What becomes of an attempt whose client leaves, in every state."""

from __future__ import annotations

import itertools

import pytest

from gateway.core.backend import Backend
from gateway.core.disagg.parting import NEXT, PARTINGS, Parting, State, parting
from gateway.core.load import HELD, REQUEST

EXPECTED = {
    # state: (held, safe), (held, unsafe), (nothing held, safe), (nothing held, unsafe)
    State.QUEUED: (Parting.NOTHING,) * 4,
    State.ENCODING: (Parting.CLOSE,) * 4,
    State.PROBING: (Parting.CLOSE,) * 4,
    State.PREFILLING: (Parting.CLOSE,) * 4,
    State.HANDOFF: (Parting.RELEASE, Parting.RELEASE, Parting.NOTHING, Parting.NOTHING),
    State.DECODE_WAIT: (Parting.DETACH, Parting.DETACH, Parting.CLOSE, Parting.DETACH),
    State.STREAMING: (Parting.CLOSE,) * 4,
    State.DONE: (Parting.NOTHING,) * 4,
}


@pytest.mark.parametrize("state", State)
def test_every_state(state: State) -> None:
    cases = itertools.product((True, False), (False, True))
    assert tuple(parting(state, holds=holds, unsafe=unsafe) for holds, unsafe in cases) == EXPECTED[state]


def test_the_tables_are_whole() -> None:
    assert set(NEXT) == set(PARTINGS) == set(State)
    assert not NEXT[State.DONE]
    reached = {State.QUEUED}
    for _ in State:
        reached |= {following for state in reached for following in NEXT[state]}
    assert reached == set(State) - {State.DONE}


def test_what_is_held_counts_and_keeps_a_backend() -> None:
    backend, told = Backend("p", "http://p"), []
    lease = backend.lease(2 * REQUEST)
    assert backend.load(0.0) == 3
    holding = backend.hold(2 * REQUEST)
    backend.emptied = lambda: told.append(1)
    lease.release()
    assert (backend.load(0.0), backend.busy, told) == (2 * HELD, True, [])
    holding.end()
    assert (backend.load(0.0), backend.busy, told) == (0, False, [1])
    with pytest.raises(AssertionError):
        holding.end()
