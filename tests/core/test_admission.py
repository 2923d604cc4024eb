"""Admission: the limit is never passed, first come is first served, and whoever leaves the queue leaves it at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.admission import FAIR, Admission, Line, Quota, Ticket, exchanged
from gateway.core.pace import FORGOTTEN, KNOWN, Pace
from gateway.errors import Refusal


class Room:
    """Backends with so many places; None: any number. Whoever has a turn takes one."""

    def __init__(self, places: int | None = None):
        self.places = places
        self.in_flight: int | None = None

    def has_room(self, clock: Callable[[], float]) -> bool:
        return self.places is None or self.places > 0

    def take(self) -> None:
        if self.places is not None:
            self.places -= 1


class One(Admission):
    """An admission with a single line, in which all tests that need no other one wait."""

    def __init__(self, limit: int | None, queue: int, clock: Callable[[], float] = lambda: 0.0):
        super().__init__(limit, queue, clock)
        self.room = Room()
        self.line = Line(self.room)

    def come(self) -> bool:
        return self.enter(self.line)

    def wait(self, granted: Callable[[], None] = lambda: None, rank: int = 0) -> Ticket:
        return self.ticket(self.line, granted, rank)


def admission(limit: int | None = 1, queue: int = 2) -> One:
    return One(limit, queue)


def test_no_limit_admits_all() -> None:
    """Without a limit nobody waits."""
    free = admission(None, 0)
    assert all(free.come() for _ in range(1000))
    assert free.in_flight == 1000


def test_first_come_first_served() -> None:
    """Slots go to those who wait in the order in which they came, and newcomers do not overtake."""
    one, turns = admission(1, 3), list[str]()
    assert one.come()
    for name in "abc":
        assert not one.come()
        one.wait(lambda name=name: turns.append(name))  # type: ignore[misc]
    for _ in range(3):
        one.release()
        assert not one.come()
    assert turns == ["a", "b", "c"]
    assert (one.in_flight, one.waiting) == (1, 0)


def test_a_full_queue_refuses() -> None:
    """503 queue_full with Retry-After, also where no queue is allowed at all."""
    one = admission(1, 2)
    one.come()
    one.wait(lambda: None)
    one.wait(lambda: None)
    none = admission(1, 0)
    none.come()
    for full in (one, none):
        with pytest.raises(Refusal) as refused:
            full.wait()
        assert (refused.value.code, refused.value.ruling.status, refused.value.retry_after) == ("queue_full", 503, 1)


def test_leaving_the_queue_makes_room_at_once() -> None:
    """The one behind moves up, and a new one may queue."""
    one, turns = admission(1, 2), list[str]()
    one.come()
    first = one.wait(lambda: turns.append("first"))
    one.wait(lambda: turns.append("second"))
    one.leave(first)
    assert one.waiting == 1
    one.wait(lambda: turns.append("third"))
    one.release()
    one.release()
    assert turns == ["second", "third"]


def test_leaving_is_harmless_twice_and_after_the_turn() -> None:
    """A deadline that fires in the moment of the turn gives nothing back that it does not hold."""
    one = admission(1, 2)
    one.come()
    ticket = one.wait(lambda: None)
    one.release()
    one.leave(ticket)
    one.leave(ticket)
    assert (one.in_flight, one.waiting) == (1, 0)


def test_a_slot_given_back_twice_raises() -> None:
    """A counter below zero is a fault, not a number."""
    one = admission()
    one.come()
    one.release()
    with pytest.raises(AssertionError):
        one.release()


def test_waits_for_room_on_the_backends() -> None:
    """Below its own limit it still waits for a backend, and is woken when one has room."""
    one, turns = admission(None, 5), list[int]()
    one.room.places = 0
    assert not one.come()
    one.wait(lambda: turns.append(1))
    one.wake()
    assert turns == []
    one.room.places = 1
    one.wake()
    assert turns == [1]


def test_no_more_turns_than_room() -> None:
    """Each turn takes its room before the next one is given: the backend's last place is not promised twice."""
    one = admission(None, 5)
    one.come()
    one.room.places = 0
    for _ in range(3):
        one.wait(one.room.take)
    one.room.places = 1
    one.release()
    assert (one.waiting, one.room.places) == (2, 0)


def test_a_raised_limit_of_a_reload_wakes() -> None:
    """A reload that raises the limit lets in as many as now fit."""
    one, turns = admission(1, 5), list[str]()
    one.come()
    for name in "abc":
        one.wait(lambda name=name: turns.append(name))  # type: ignore[misc]
    one.limit = 3
    one.wake()
    assert turns == ["a", "b"]
    assert one.in_flight == 3


def test_a_lowered_limit_of_a_reload_takes_nothing_away() -> None:
    """Those in flight stay, and nobody follows until they are few enough."""
    one, turns = admission(3, 5), list[str]()
    for _ in range(3):
        one.come()
    one.wait(lambda: turns.append("a"))
    one.limit = 1
    one.release()
    one.release()
    assert turns == []
    one.release()
    assert turns == ["a"]


@given(st.integers(1, 3), st.integers(0, 3), st.lists(st.sampled_from("earlw"), max_size=80))
def test_random_operations(limit: int, queue: int, steps: list[str]) -> None:
    """Arrivals, ends, and leavings in any order: no limit passed, no slot idle, always in order."""
    one = admission(limit, queue)
    waiting: deque[tuple[int, Ticket]] = deque()
    turns: list[int] = []
    in_flight = 0
    for number, step in enumerate(steps):
        before = len(turns)
        if step in "ea":
            if one.come():
                assert not waiting
                in_flight += 1
            elif len(waiting) == queue:
                with pytest.raises(Refusal):
                    one.wait(lambda: None)
            else:
                waiting.append((number, one.wait(lambda number=number: turns.append(number))))  # type: ignore[misc]
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


# lines --------------------------------------------------------------------------------------------------------------------


def test_a_full_model_holds_up_no_other() -> None:
    """Whoever waits for one model's backends stands in nobody's way who goes elsewhere, also where it came first."""
    one, turns = Admission(None, 9, lambda: 0.0), list[str]()
    full, free = Line(Room(0), "full"), Line(Room(), "free")
    assert not one.enter(full)
    one.ticket(full, lambda: turns.append("full"))
    assert one.enter(free)
    assert (one.waiting, one.in_flight, turns) == (1, 1, [])


def test_the_gateway_s_own_limit_is_all_lines() -> None:
    """At the gateway's limit each line waits, and turns go by arrival to those whose line has room."""
    one, turns = Admission(1, 9, lambda: 0.0), list[str]()
    full, free, other = Line(Room(0)), Line(Room()), Line(Room())
    assert one.enter(free)
    for name, line in (("a", full), ("b", other), ("c", free)):
        assert not one.enter(line)
        one.ticket(line, lambda name=name: turns.append(name))  # type: ignore[misc]
    one.release()
    one.release()
    assert turns == ["b", "c"]


def test_a_model_s_own_limit() -> None:
    """`models.NAME.in_flight`: no more at once under that name, and others go on. Slots go back to the name they came from."""
    one, turns, quota = Admission(None, 9, lambda: 0.0), list[str](), Quota("llama", 2)
    line, other = Line(Room(), "llama", (quota,)), Line(Room(), "qwen")
    assert one.enter(line)
    assert one.enter(line)
    assert not one.enter(line)
    one.ticket(line, lambda: turns.append("third"))
    assert one.enter(other)
    one.release(())
    assert (turns, quota.in_flight) == ([], 2)
    one.release((quota,))
    assert (turns, quota.in_flight) == (["third"], 2)
    with pytest.raises(AssertionError):
        one.release((quota, quota, quota))


def test_a_slot_moves_to_another_line() -> None:
    """A request that goes on to a fallback counts there, and not any more where it was."""
    one, first, second = Admission(None, 9, lambda: 0.0), Quota("a", 1), Quota("b", 1)
    line, other = Line(Room(), "a", (first,)), Line(Room(), "b", (second,))
    one.enter(line)
    held = exchanged(line.quotas, other)
    assert (first.in_flight, second.in_flight, held) == (0, 1, (second,))
    one.release(held)
    assert (second.in_flight, one.in_flight) == (0, 0)


# classes ------------------------------------------------------------------------------------------------------------------


def test_the_higher_class_first_but_for_every_fourth_turn() -> None:
    """Low ones wait for high ones, and yet have a quarter of the turns: whoever has waited longest."""
    one, turns = admission(1, 99), list[str]()
    one.come()
    for number in range(4):
        one.wait(lambda number=number: turns.append(f"low {number}"), 2)  # type: ignore[misc]
    for number in range(12):
        one.wait(lambda number=number: turns.append(f"high {number}"), 0)  # type: ignore[misc]
    for _ in range(16):
        one.release()
    assert [turn for turn in turns if "high" in turn] == [f"high {n}" for n in range(12)]
    assert [place for place, turn in enumerate(turns) if "low" in turn] == [3, 7, 11, 15]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=40), st.integers(1, 3))
def test_nobody_is_starved(arrivals: list[tuple[int, int]], limit: int) -> None:
    """While high ones keep coming in every line, everybody has had a turn after some turns for each who was there before."""
    one = Admission(limit, 10_000, lambda: 0.0)
    lines = [Line(Room()) for _ in range(3)]
    for _ in range(limit):
        assert one.enter(lines[0])
    left = set(range(len(arrivals)))
    for number, (line, rank) in enumerate(arrivals):
        one.ticket(lines[line], lambda number=number: left.discard(number), rank)  # type: ignore[misc]
    for turn in range(len(arrivals) * FAIR + FAIR):
        one.ticket(lines[turn % 3], lambda: None, 0)
        one.release()
    assert not left


@given(
    st.lists(st.tuples(st.sampled_from("earl"), st.integers(0, 2), st.integers(0, 2)), max_size=120),
    st.one_of(st.none(), st.integers(1, 4)),
    st.tuples(*[st.one_of(st.none(), st.integers(0, 2))] * 3),
)
def test_no_line_waits_that_could_go_on(
    steps: list[tuple[str, int, int]], limit: int | None, quotas: tuple[int | None, ...]
) -> None:
    """Whatever comes and goes, in any line and class: no limit is passed, and whoever waits lacks something."""
    one = Admission(limit, 1000, lambda: 0.0)
    held = [Quota(str(n), most) for n, most in enumerate(quotas)]
    lines = [Line(Room(), str(n), (quota,)) for n, quota in enumerate(held)]
    running: list[Line] = []
    tickets: list[Ticket] = []
    for step, number, rank in steps:
        line = lines[number]
        if step in "ea":
            if one.enter(line):
                running.append(line)
            else:
                tickets.append(one.ticket(line, lambda line=line: running.append(line), rank))  # type: ignore[misc]
        elif step == "r" and running:
            one.release(running.pop(number % len(running)).quotas)
        elif step == "l" and tickets:
            one.leave(tickets.pop(number % len(tickets)))
        assert one.in_flight == len(running)
        assert limit is None or len(running) <= limit
        assert [quota.in_flight for quota in held] == [running.count(line) for line in lines]
        assert all(quota.limit is None or quota.in_flight <= quota.limit for quota in held)
        assert one.waiting == sum(line.waiting for line in lines)
        full = limit is not None and len(running) == limit
        assert full or not any(line.waiting and line.has_room(lambda: 0.0) for line in lines)


# what is foretold ---------------------------------------------------------------------------------------------------------


def slow(seconds: float, turns: int = KNOWN) -> tuple[One, list[float]]:
    """One place, in which so many turns have come, each after so many seconds; and the clock."""
    now = [100.0]
    one = One(1, 99, lambda: now[0])
    one.come()
    for _ in range(turns):
        one.wait()
    for _ in range(turns):
        now[0] += seconds
        one.release()
    return one, now


def test_whoever_would_wait_too_long_is_told_at_once() -> None:
    """Turns come every 2 s: the fifth in the line would wait 10 s, and may for 9. It is told when that will be better."""
    one, _ = slow(2.0)
    for _ in range(4):
        one.ticket(one.line, lambda: None, 0, 9.0)
    with pytest.raises(Refusal) as refused:
        one.ticket(one.line, lambda: None, 0, 9.0)
    assert (refused.value.code, refused.value.ruling.status, refused.value.retry_after) == ("overloaded", 503, 1)
    assert "10 s" in refused.value.message
    assert "timeouts.queue" in refused.value.message
    with pytest.raises(Refusal) as refused:
        one.foresee(one.line, 0, 4.0)
    assert refused.value.retry_after == 6
    assert one.waiting == 4


def test_a_higher_class_waits_for_its_own_only() -> None:
    """What is foretold of a class goes by those before it."""
    one, _ = slow(2.0)
    for _ in range(4):
        one.ticket(one.line, lambda: None, 1, 9.0)
    one.ticket(one.line, lambda: None, 0, 9.0)
    with pytest.raises(Refusal):
        one.ticket(one.line, lambda: None, 1, 9.0)


def test_nothing_is_foretold_where_little_is_known() -> None:
    """Not before some turns have come; nor long after them; nor where nobody's patience is known."""
    few, _ = slow(50.0, KNOWN - 1)
    few.ticket(few.line, lambda: None, 0, 1.0)
    known, now = slow(50.0)
    known.ticket(known.line, lambda: None, 0, None)
    known.release()
    now[0] += FORGOTTEN + 1
    for _ in range(5):
        known.ticket(known.line, lambda: None, 0, 1.0)


def held(one: One, line: Line, seconds: float, stays: int = KNOWN) -> None:
    """So many requests have been served by then, none of which had to wait."""
    for _ in range(stays):
        line.pace.held(seconds, one._clock())


@pytest.mark.parametrize("places", [1, 2])
@pytest.mark.parametrize("limit", ["gateway", "model", "backends"])
def test_how_long_places_are_held_tells_as_well(limit: str, places: int) -> None:
    """The first flood finds no turns that have come, only requests that were served before: each held its place for 3 s."""
    one = One(places if limit == "gateway" else None, 99, lambda: 100.0)
    quota = Quota("m", places)
    line = Line(Room(0) if limit == "backends" else one.room, "m", (quota,) if limit == "model" else ())
    line.pool.in_flight = places  # type: ignore[misc]
    if limit != "backends":
        for _ in range(places):
            assert one.enter(line)
    held(one, line, 3.0, KNOWN - 1)
    one.foresee(line, 0, 1.0)  # nothing is known yet
    held(one, line, 3.0, 1)
    came = 0
    with pytest.raises(Refusal, match=r"timeouts\.queue"):
        for _ in range(99):
            one.ticket(line, lambda: None, 0, 9.0)
            came += 1
    assert came == 3 * places  # 1.5 s, 4.5 s, 7.5 s until their turns


def test_all_who_wait_for_the_gateway_are_before_one() -> None:
    """Where the gateway itself is full, whoever waits in another line comes first, too; and long ago says nothing of now."""
    now = [100.0]
    one = One(1, 99, lambda: now[0])
    mine, other = Line(one.room, "a"), Line(one.room, "b")
    assert one.enter(other)
    held(one, mine, 3.0)
    for _ in range(4):
        one.ticket(other, lambda: None)
    with pytest.raises(Refusal):
        one.foresee(mine, 0, 9.0)
    now[0] += FORGOTTEN + 1
    one.foresee(mine, 0, 9.0)


@given(st.lists(st.floats(0, 100), min_size=KNOWN, max_size=60))
def test_a_pace_is_among_the_times_that_it_has_seen(times: list[float]) -> None:
    """A mean: never below the least nor above the most of them."""
    pace, now = Pace(), 1.0
    pace.waits(now)
    for time in times:
        now += time
        pace.turn(now)
    found = pace.wait(0, now)
    assert found is not None
    assert min(times) - 1e-6 <= found <= max(times) + 1e-6
    assert pace.wait(9, now) == pytest.approx(10 * found)
