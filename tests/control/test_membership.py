"""Membership: what a change of the list keeps, what it drains, and what it refuses. Connections are never opened here."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from gateway.control.membership import Entry, Membership, Settings, Taken, described
from gateway.core.backend import Health, HealthSettings
from gateway.core.breaker import BreakerSettings
from gateway.core.members import ADMIN_API, CONFIGURATION, Member, Place, Tls
from gateway.errors import ConfigError
from gateway.net.upstream import PoolSettings


def member(name: str, url: str = "", **more: Any) -> Member:
    return Member(name, Place(url or f"http://{name}:8000"), **more)


A, B, C = member("a"), member("b"), member("c")


class House:
    """A Membership, and what it has put in force."""

    def __init__(self) -> None:
        self.puts: list[list[str]] = []
        self.membership = Membership(self._put)

    def _put(self, entries: Collection[Entry]) -> None:
        self.puts.append([entry.member.name for entry in entries])
        assert not any(entry.backend.draining for entry in entries)

    def configure(self, *static: Member, discovered: dict[str, Any] | None = None, **more: Any) -> None:
        self.membership.configure(static, more.pop("settings", Settings()), discovered or {}, **more)

    def __getitem__(self, name: str) -> Entry:
        return self.membership.entries[name]

    @property
    def names(self) -> list[str]:
        assert list(self.membership.entries) == self.puts[-1]
        return self.puts[-1]

    @property
    def states(self) -> dict[str, str]:
        return {e.member.name: e.backend.standing for e in self.membership.everyone}


@pytest.fixture
async def house() -> House:
    return House()


async def test_unchanged_backends_are_the_same_objects(house: House) -> None:
    house.configure(A, B)
    before = house["a"]
    before.backend.probed(True, HealthSettings())
    before.backend.lease()
    house.membership.snapshot("dns x", [C])
    house.membership.snapshot("dns x", [])
    after = house["a"]
    assert after.backend is before.backend
    assert after.connections is before.connections
    assert after.target is before.target
    assert (after.backend.health, after.backend.in_flight) == (Health.UP, 1)
    assert house.puts == [["a", "b"], ["a", "b", "c"], ["a", "b"]]


async def test_new_settings_of_the_same_backend(house: House) -> None:
    house.configure(A, settings=Settings(breaker=BreakerSettings(1)))
    before = house["a"]
    house.configure(A._replace(weight=3, max_in_flight=7), settings=Settings(breaker=BreakerSettings(9)))
    backend = house["a"].backend
    assert backend is before.backend
    assert (backend.weight, backend.max_in_flight, backend.breaker.settings.failures) == (3, 7, 9)
    assert house["a"].connections is before.connections


@pytest.mark.parametrize(
    ("other", "settings"),
    [(A._replace(credential=b"key"), Settings()), (A, Settings(connections=PoolSettings(idle=1.0)))],
    ids=["another key", "other pool settings"],
)
async def test_another_way_to_speak_is_other_connections(house: House, other: Member, settings: Settings) -> None:
    """... and the same backend."""
    house.configure(A)
    before = house["a"]
    house.configure(other, settings=settings)
    assert house["a"].backend is before.backend
    assert house["a"].connections is not before.connections
    assert before.connections.closed
    assert house["a"].target is not before.target


async def test_another_place_is_another_backend(house: House) -> None:
    house.configure(A)
    before = house["a"]
    lease = before.backend.lease()
    house.configure(member("a", "http://elsewhere:1"))
    assert house["a"].backend is not before.backend
    assert before.connections.closed
    assert [(e.backend.url, e.backend.standing) for e in house.membership.everyone] == [
        ("http://elsewhere:1", "unknown"),
        ("http://a:8000", "draining"),
    ]
    lease.release()
    assert len(house.membership.everyone) == 1


async def test_who_leaves_drains(house: House) -> None:
    """Nobody picks it, its connections are not kept; it is gone when the last lease is given back, at once if there is
    none."""
    house.configure(A, B)
    gone, idle = house["a"], house["b"]
    leases = [gone.backend.lease() for _ in range(2)]
    house.configure(C)
    assert house.names == ["c"]
    assert house.states == {"c": "unknown", "a": "draining"}
    assert gone.connections.closed
    assert idle.connections.closed
    assert not gone.backend.routable
    leases[0].release()
    assert house.states == {"c": "unknown", "a": "draining"}
    leases[1].release()
    assert house.states == {"c": "unknown"}


async def test_who_comes_back_before_the_end_is_who_left(house: House) -> None:
    house.configure(A)
    backend = house["a"].backend
    lease = backend.lease()
    house.configure(B)
    house.configure(A, B)
    assert house["a"].backend is backend
    assert not house["a"].connections.closed
    assert house.states == {"a": "unknown", "b": "unknown"}
    lease.release()
    assert house.names == ["a", "b"]


async def test_who_comes_back_after_the_end_is_new(house: House) -> None:
    house.configure(A)
    backend = house["a"].backend
    house.configure(B)
    house.configure(A)
    assert house["a"].backend is not backend


async def test_what_cannot_be_used_is_refused_whole(house: House, tmp_path: Path) -> None:
    house.configure(A, discovered={"file f": (B,)})
    before = dict(house.membership.entries)
    wrong = member("c", "https://c", tls=Tls(ca=str(tmp_path / "nothing")))
    with pytest.raises(ConfigError):
        house.membership.snapshot("file f", [C, wrong._replace(name="d")])
    with pytest.raises(ConfigError, match="two backends are named c"):
        house.membership.snapshot("file f", [C, member("c", "http://d")])
    with pytest.raises(ConfigError):
        house.configure(wrong)
    with pytest.raises(ConfigError):
        house.membership.add([C, wrong._replace(name="d")])
    assert house.membership.entries == before
    assert len(house.puts) == 1
    house.membership.snapshot("dns x", [C])  # and nothing of it comes after
    assert house.names == ["a", "b", "c"]


async def test_connections_over_tls_outlive_a_snapshot_and_not_a_reload(house: House) -> None:
    """Which is when certificates are read."""
    secure = member("s", "https://s")
    house.configure(secure)
    before = house["s"].connections
    house.membership.snapshot("dns x", [member("t", "https://t")])
    assert house["s"].connections is before
    assert house["t"].connections.origin.tls is before.origin.tls
    backend = house["s"].backend
    house.configure(secure, discovered={"dns x": (member("t", "https://t"),)})
    assert house["s"].connections is not before
    assert house["s"].backend is backend


async def test_an_address_found_by_the_source(house: House) -> None:
    """It is connected to; the name goes into Host, and is whose certificate is expected."""
    house.configure(Member("10.0.0.7:8443", Place("https://vllm.test:8443", "10.0.0.7")))
    origin = house["10.0.0.7:8443"].connections.origin
    assert (origin.host, origin.port, origin.host_field, origin.server_name) == (
        "10.0.0.7", 8443, b"vllm.test:8443", "vllm.test",
    )  # fmt: skip
    assert described(house["10.0.0.7:8443"])["address"] == "10.0.0.7"


class TestTheAdminApi:
    async def test_adds(self, house: House) -> None:
        house.configure(A)
        ((entry, new),) = house.membership.add([B])
        assert new
        assert (entry.member, entry.source) == (B, ADMIN_API)
        assert house.names == ["a", "b"]

    async def test_adds_once(self, house: House) -> None:
        """A script that is run again changes nothing, but for the settings that it gives."""
        house.configure(A)
        ((first, _),) = house.membership.add([B])
        ((again, new),) = house.membership.add([B._replace(weight=2)])
        assert not new
        assert again.backend is first.backend
        assert again.backend.weight == 2
        ((listed, new),) = house.membership.add([A._replace(weight=5)])
        assert not new
        assert (listed.source, listed.backend.weight) == (CONFIGURATION, 1)  # its source describes it

    @pytest.mark.parametrize("other", [member("a", "http://elsewhere"), member("other", "http://a:8000")])
    async def test_never_takes_what_is_another_s(self, house: House, other: Member) -> None:
        house.configure(A)
        with pytest.raises(Taken, match="a is at http://a:8000"):
            house.membership.add([B, other])
        assert house.names == ["a"]

    async def test_takes_out_what_it_added(self, house: House) -> None:
        house.configure(A)
        house.membership.add([B])
        assert [e.member for e in house.membership.take_out(["b"])] == [B]
        assert house.names == ["a"]
        assert not house.membership.take_out(["b"])
        house.configure(A)
        assert house.names == ["a"]

    async def test_takes_out_what_is_listed(self, house: House) -> None:
        """Whatever its source says again, and over a reload, until it is added again."""
        house.configure(A, B, discovered={"dns x": (C,)})
        house.membership.take_out(["a", "c"])
        assert house.names == ["b"]
        house.membership.snapshot("dns x", [C])
        house.configure(A, B, discovered={"dns x": (C,)})
        assert house.names == ["b"]
        house.membership.add([A, C])
        assert [house[name].source for name in house.names] == [CONFIGURATION, CONFIGURATION, "dns x"]

    async def test_forgets_what_is_not_listed_any_more(self, house: House) -> None:
        """A pod of that name that comes later is another one."""
        house.configure(discovered={"dns x": (A,)})
        house.membership.take_out(["a"])
        house.membership.snapshot("dns x", [])
        house.membership.snapshot("dns x", [A])
        assert house.names == ["a"]

    async def test_what_it_added_outlives_a_reload(self, house: House) -> None:
        house.configure(A)
        ((entry, _),) = house.membership.add([B])
        house.configure(C)
        assert house.names == ["c", "b"]
        assert house["b"].backend is entry.backend

    async def test_a_source_takes_over_what_it_added(self, house: House) -> None:
        """The backend is the same; and when the source lists it no more, it is the API's again."""
        house.configure()
        ((entry, _),) = house.membership.add([A])
        house.membership.snapshot("dns x", [A])
        assert (house["a"].source, house["a"].backend) == ("dns x", entry.backend)
        house.membership.snapshot("dns x", [])
        assert (house["a"].source, house["a"].backend) == (ADMIN_API, entry.backend)

    async def test_a_drain_taken_back(self, house: House) -> None:
        house.configure(A)
        backend = house["a"].backend
        lease = backend.lease()
        assert house.membership.take_out(["a"])
        assert house.states == {"a": "draining"}
        assert house.membership.take_out(["a"])  # it is still there
        ((entry, new),) = house.membership.add([A])
        assert new
        assert entry.backend is backend
        assert house.states == {"a": "unknown"}
        lease.release()
        assert house.names == ["a"]


    async def test_takes_out_one_whose_name_another_had(self, house: House) -> None:
        """A backend of that name, elsewhere, is still draining: the one in force is meant."""
        house.configure(A)
        lease = house["a"].backend.lease()
        house.configure(member("a", "http://elsewhere"))
        assert len(house.membership.take_out(["a"])) == 2
        assert house.names == []
        house.configure(member("a", "http://elsewhere"))
        assert house.names == []
        lease.release()


class TestTheSyntheticEngine:
    async def test_stands_in(self, house: House) -> None:
        house.configure(fallback=A)
        assert house.names == ["a"]

    async def test_leaves_for_good_with_the_first_real_one(self, house: House) -> None:
        house.configure(fallback=A)
        house.membership.add([B])
        assert house.names == ["b"]
        house.membership.take_out(["b"])
        assert house.names == []
        house.configure(fallback=A)
        assert house.names == []

    async def test_its_place_is_nobody_s(self, house: House) -> None:
        house.configure(fallback=A)
        house.membership.add([A])
        assert house["a"].source == ADMIN_API


async def test_clashes_are_told_once(house: House, caplog: pytest.LogCaptureFixture) -> None:
    other = member("a", "http://elsewhere")
    house.configure(A, discovered={"dns x": (other,)})
    house.membership.snapshot("dns x", [other, B])
    assert len([r for r in caplog.records if "left out" in r.message]) == 1
    house.configure(discovered={"dns x": (other,)})
    assert house["a"].source == "dns x"
    house.configure(A, discovered={"dns x": (other,)})
    assert len([r for r in caplog.records if "left out" in r.message]) == 2


async def test_changes_are_told_in_one_line(house: House, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever is new, whoever leaves and with how much under way; what stays is not told of, and many are not all named."""
    caplog.set_level("INFO")
    house.configure(A, B)
    house["a"].backend.lease()
    house.configure(member("a", "http://elsewhere"), B)
    house.configure(member("a", "http://elsewhere"), B)
    house.membership.snapshot("dns x", [member(f"m{i}") for i in range(9)])
    named = ", ".join(f"m{i} (dns x)" for i in range(8))
    assert [r.getMessage() for r in caplog.records] == [
        "backends: new: a (configuration), b (configuration); 2 in all",
        "backends: new: a (configuration); leaving: a (configuration) (1 exchanges to end); 2 in all",
        f"backends: new: {named} and 1 more; 11 in all",
    ]
