"""Admission: the limit is never passed, first come is first served, and whoever leaves the queue leaves it at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.admission import Admission, Ticket
from gateway.errors import Refusal


def admission(limit: int | None = 1, queue: int = 2, room: Callable[[], bool] = lambda: True) -> Admission:
    return Admission(limit, queue, room)


def test_no_limit_admits_all() -> None:
    """Without a limit nobody waits."""
    free = admission(None, 0)
    assert all(free.enter() for _ in range(1000))
    assert free.in_flight == 1000


def test_first_come_first_served() -> None:
    """Slots go to those who wait in the order in which they came, and newcomers do not overtake."""
    one, turns = admission(1, 3), list[str]()
    assert one.enter()
    for name in "abc":
        assert not one.enter()
        one.ticket(lambda name=name: turns.append(name))  # type: ignore[misc]
    for _ in range(3):
        one.release()
        assert not one.enter()
    assert turns == ["a", "b", "c"]
    assert (one.in_flight, one.waiting) == (1, 0)


def test_a_full_queue_refuses() -> None:
    """503 queue_full with Retry-After, also where no queue is allowed at all."""
    one = admission(1, 2)
    one.enter()
    one.ticket(lambda: None)
    one.ticket(lambda: None)
    none = admission(1, 0)
    none.enter()
    for full in (one, none):
        with pytest.raises(Refusal) as refused:
            full.ticket(lambda: None)
        assert (refused.value.code, refused.value.ruling.status, refused.value.retry_after) == ("queue_full", 503, 1)


def test_leaving_the_queue_makes_room_at_once() -> None:
    """The one behind moves up, and a new one may queue."""
    one, turns = admission(1, 2), list[str]()
    one.enter()
    first = one.ticket(lambda: turns.append("first"))
    one.ticket(lambda: turns.append("second"))
    one.leave(first)
    assert one.waiting == 1
    one.ticket(lambda: turns.append("third"))
    one.release()
    one.release()
    assert turns == ["second", "third"]


def test_leaving_is_harmless_twice_and_after_the_turn() -> None:
    """A deadline that fires in the moment of the turn gives nothing back that it does not hold."""
    one = admission(1, 2)
    one.enter()
    ticket = one.ticket(lambda: None)
    one.release()
    one.leave(ticket)
    one.leave(ticket)
    assert (one.in_flight, one.waiting) == (1, 0)


def test_a_slot_given_back_twice_raises() -> None:
    """A counter below zero is a fault, not a number."""
    one = admission()
    one.enter()
    one.release()
    with pytest.raises(AssertionError):
        one.release()


def test_waits_for_room_on_the_backends() -> None:
    """Below its own limit it still waits for a backend, and is woken when one has room."""
    room, turns = [False], list[int]()
    one = admission(None, 5, lambda: room[0])
    assert not one.enter()
    one.ticket(lambda: turns.append(1))
    one.wake()
    assert turns == []
    room[0] = True
    one.wake()
    assert turns == [1]


def test_no_more_turns_than_room() -> None:
    """Each turn takes its room before the next one is given: the backend's last place is not promised twice."""
    places = [1]

    def granted() -> None:
        places[0] -= 1

    one = admission(None, 5, lambda: places[0] > 0)
    one.enter()
    places[0] = 0
    for _ in range(3):
        one.ticket(granted)
    places[0] = 1
    one.release()
    assert (one.waiting, places) == (2, [0])


def test_a_raised_limit_of_a_reload_wakes() -> None:
    """A reload that raises the limit lets in as many as now fit."""
    one, turns = admission(1, 5), list[str]()
    one.enter()
    for name in "abc":
        one.ticket(lambda name=name: turns.append(name))  # type: ignore[misc]
    one.limit = 3
    one.wake()
    assert turns == ["a", "b"]
    assert one.in_flight == 3


def test_a_lowered_limit_of_a_reload_takes_nothing_away() -> None:
    """Those in flight stay, and nobody follows until they are few enough."""
    one, turns = admission(3, 5), list[str]()
    for _ in range(3):
        one.enter()
    one.ticket(lambda: turns.append("a"))
    one.limit = 1
    one.release()
    one.release()
    assert turns == []
    one.release()
    assert turns == ["a"]


@given(st.integers(1, 3), st.integers(0, 3), st.lists(st.sampled_from("earlw"), max_size=80))
def test_random_operations(limit: int, queue: int, steps: list[str]) -> None:
    """Arrivals, ends, and leavings in any order: no limit passed, no slot idle, always in order."""
    one = Admission(limit, queue, lambda: True)
    waiting: deque[tuple[int, Ticket]] = deque()
    turns: list[int] = []
    in_flight = 0
    for number, step in enumerate(steps):
        before = len(turns)
        if step in "ea":
            if one.enter():
                assert not waiting
                in_flight += 1
            elif len(waiting) == queue:
                with pytest.raises(Refusal):
                    one.ticket(lambda: None)
            else:
                waiting.append((number, one.ticket(lambda number=number: turns.append(number))))  # type: ignore[misc]
        elif step == "r" and in_flight:
            in_flight -= 1
            one.release()
        elif step == "l" and waiting:
            one.leave(waiting.pop()[1])
        elif step == "w":
            one.wake()
        for number_ in turns[before:]:
            assert waiting.popleft()[0] == number_
            in_flight += 1
        assert (one.in_flight, one.waiting) == (in_flight, len(waiting))
        assert in_flight <= limit
        assert not waiting or in_flight == limit
