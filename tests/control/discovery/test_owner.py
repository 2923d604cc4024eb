"""The owner of sources: what is in force when, what a failure costs, and that each is on its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Hashable

import pytest

from gateway.control.discovery import Snapshot, SourceFailed, owner
from gateway.control.discovery.owner import Discovery, failed
from gateway.core.members import Member, Place
from tests.support.gateway import until


def listed(*names: str) -> Snapshot:
    return tuple(Member(name, Place(f"http://{name}")) for name in names)


class Scripted:
    """A source that says what a test puts into its queue: a list, or what is wrong."""

    longest_pause = 8.0

    def __init__(self, name: str, *said: Snapshot | str, settings: Hashable = None) -> None:
        self.name, self.settings = name, settings or name
        self.said: asyncio.Queue[Snapshot | str] = asyncio.Queue()
        self.asked = 0
        for one in said:
            self.said.put_nowait(one)

    async def snapshots(self) -> AsyncGenerator[Snapshot, None]:
        self.asked += 1
        while True:
            one = await self.said.get()
            if isinstance(one, str):
                raise SourceFailed(one)
            yield one


class House:
    def __init__(self) -> None:
        self.published: list[tuple[str, Snapshot]] = []
        self.discovery = Discovery(lambda *said: self.published.append(said), lambda: 1.0)


@pytest.fixture
async def house(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    monkeypatch.setattr(owner, "FIRST_PAUSE", 0.001)
    house = House()
    yield house
    await house.discovery.stop()


async def test_nothing_is_in_force_before_commit(house: House) -> None:
    source = Scripted("x", listed("a"), listed("b"))
    (staged,) = await house.discovery.stage([source], 5)
    await until(source.said.empty, "all of it")
    assert not house.published
    assert failed([staged]) is None
    assert staged.snapshot == listed("b")
    house.discovery.commit([staged])
    source.said.put_nowait(listed("c"))
    await until(lambda: house.published == [("x", listed("c"))], "c")


async def test_who_is_followed_already_is_left_alone(house: House) -> None:
    source = Scripted("x", listed("a"))
    house.discovery.commit(await house.discovery.stage([source], 5))
    again = await house.discovery.stage([Scripted("x"), Scripted("y", listed("b"))], 5)
    assert [one.snapshot for one in again] == [listed("a"), listed("b")]
    house.discovery.commit(again)
    assert source.asked == 1
    source.said.put_nowait(listed("c"))
    await until(lambda: house.published == [("x", listed("c"))], "c")


async def test_who_is_not_configured_any_more_says_nothing(house: House) -> None:
    source = Scripted("x", listed("a"))
    house.discovery.commit(await house.discovery.stage([source], 5))
    other = Scripted("x", listed("b"), settings="other")
    house.discovery.commit(await house.discovery.stage([other], 5))
    source.said.put_nowait(listed("c"))
    other.said.put_nowait(listed("d"))
    await until(lambda: bool(house.published), "d")
    assert house.published == [("x", listed("d"))]


async def test_what_is_abandoned_is_not_followed(house: House) -> None:
    kept, new = Scripted("x", listed("a")), Scripted("y", "no such file")
    house.discovery.commit(await house.discovery.stage([kept], 5))
    staged = await house.discovery.stage([kept, new], 5)
    assert failed(staged) == "discovery by y: no such file"
    house.discovery.abandon(staged)
    new.said.put_nowait(listed("b"))
    kept.said.put_nowait(listed("c"))
    await until(lambda: house.published == [("x", listed("c"))], "c")
    assert new.said.qsize() == 1


async def test_one_that_says_nothing_holds_nobody_up_for_long(house: House) -> None:
    staged = await house.discovery.stage([Scripted("x"), Scripted("y", listed("a"))], 0.05)
    assert [one.snapshot for one in staged] == [None, listed("a")]
    assert failed(staged) == "discovery by x: it has not answered yet"
    house.discovery.commit(staged)


async def test_cancelled_while_it_waits(house: House) -> None:
    """A stop in the midst of it leaves no task."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await house.discovery.stage([Scripted("x")], 60)


async def test_failures_and_their_log(house: House, caplog: pytest.LogCaptureFixture) -> None:
    """Once for each thing that is wrong, with what stays in force; and once that it works again."""
    caplog.set_level("INFO")
    source = Scripted("x", "first", "first", "second", "second", listed("a"), listed("a"), "third", listed("b"))
    house.discovery.commit(await house.discovery.stage([source], 5))
    await until(lambda: house.published[-1:] == [("x", listed("b"))], "b")
    await until(lambda: len(caplog.records) >= 5, "all of it")
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("WARNING", "discovery by x: first"),
        ("WARNING", "discovery by x: second"),
        ("INFO", "discovery by x works again"),
        ("WARNING", "discovery by x: third; its last list goes on"),
        ("INFO", "discovery by x works again"),
    ]


def test_pauses() -> None:
    """Doubled from 1 s on, up to the source's own limit; and a random half of it is left out."""
    for chance, expected in ((0.0, [1, 2, 4, 8, 8]), (1.0, [0.5, 1, 2, 4, 4])):
        discovery = Discovery(lambda name, snapshot: None, lambda chance=chance: chance)  # type: ignore[misc]
        assert [discovery._pause(Scripted("x"), failures) for failures in (0, 1, 2, 3, 1000)] == expected
