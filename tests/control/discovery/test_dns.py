"""DNS: what each kind of record means, how it is followed, and what an answer is that has no record."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import dns.rcode
import pytest

from gateway.control.discovery import Common
from gateway.control.discovery import dns as sources
from gateway.control.discovery.dns import DnsSettings, DnsSource, Target, members_of_targets
from gateway.core.members import Place
from tests.support.dns import DnsServer, dns_server
from tests.support.following import Follower, following
from tests.support.gateway import until

Follow = Callable[..., AbstractAsyncContextManager[Follower]]


@pytest.fixture
async def server() -> AsyncIterator[DnsServer]:
    async with dns_server() as server:
        yield server


@pytest.fixture
def follow(server: DnsServer, monkeypatch: pytest.MonkeyPatch) -> Follow:
    def follow(*names: str, **more: Any) -> AbstractAsyncContextManager[Follower]:
        settings = DnsSettings(names or ("vllm.test",), servers=(("127.0.0.1", server.port),), interval=0.02, **more)
        return following(DnsSource(settings), patch=monkeypatch.setattr)

    return follow


async def test_every_address_is_a_backend(server: DnsServer, follow: Follow) -> None:
    """Named by its address, known by its name; and they are followed as they come and go."""
    server.records["vllm.test", "A"] = ["10.0.0.2", "10.0.0.1"]
    async with follow(port=8000) as told:
        assert told.names == ["10.0.0.1:8000", "10.0.0.2:8000"]
        assert [m.place for m in told.snapshots[0]] == [
            Place("http://vllm.test:8000", "10.0.0.1"),
            Place("http://vllm.test:8000", "10.0.0.2"),
        ]
        server.records["vllm.test", "A"] = ["10.0.0.2", "10.0.0.3"]
        await told.say("10.0.0.2:8000", "10.0.0.3:8000")


async def test_the_order_of_records_means_nothing(server: DnsServer, follow: Follow) -> None:
    """Servers turn it round at each answer."""
    server.records["vllm.test", "A"] = ["10.0.0.1", "10.0.0.2"]
    async with follow(port=8000) as told:
        server.records["vllm.test", "A"].reverse()
        asked = len(server.asked)
        await until(lambda: len(server.asked) > asked + 2, "more look-ups")
        assert len(told.snapshots) == 1


async def test_aaaa(server: DnsServer, follow: Follow) -> None:
    """A and AAAA are one or the other: an engine with two addresses would be counted twice."""
    server.records["vllm.test", "A"] = ["10.0.0.1"]
    server.records["vllm.test", "AAAA"] = ["fd00::1"]
    async with follow(type="AAAA", port=8000) as told:
        assert told.names == ["[fd00::1]:8000"]
        assert told.snapshots[0][0].place.address == "fd00::1"


async def test_several_names(server: DnsServer, follow: Follow) -> None:
    server.records["a.test", "A"] = ["10.0.0.1"]
    server.records["b.test", "A"] = ["10.0.0.2", "10.0.0.1"]
    async with follow("a.test", "b.test", port=8000) as told:
        assert sorted(told.names or ()) == ["10.0.0.1:8000", "10.0.0.2:8000"]


async def test_names_of_one_address_are_one_backend(server: DnsServer, follow: Follow) -> None:
    """One engine, known by the first name that led to it, for as long as that does, whatever others do."""
    server.records["b.test", "A"] = ["10.0.0.1"]
    async with follow("a.test", "b.test", port=8000) as told:
        assert [m.place for m in told.snapshots[-1]] == [Place("http://b.test:8000", "10.0.0.1")]
        server.records["a.test", "A"] = ["10.0.0.1", "10.0.0.2"]
        server.records["b.test", "A"] = ["10.0.0.1", "10.0.0.2"]
        await told.say("10.0.0.1:8000", "10.0.0.2:8000")
        assert {m.place.address: m.place.url for m in told.snapshots[-1]} == {
            "10.0.0.1": "http://b.test:8000", "10.0.0.2": "http://a.test:8000"}  # fmt: skip
        server.records["b.test", "A"] = []
        await until(lambda: {m.place.url for m in told.snapshots[-1]} == {"http://a.test:8000"}, "the name that is left")
        assert sorted(told.names or ()) == ["10.0.0.1:8000", "10.0.0.2:8000"]


async def test_targets_of_one_address_are_one_backend(server: DnsServer, follow: Follow) -> None:
    """At the same port, in one service or in two; at another port it is another engine."""
    server.records["_one._tcp.test", "SRV"] = ["1 10 8000 b.test.", "1 10 8001 b.test."]
    server.records["_two._tcp.test", "SRV"] = ["1 10 8000 a.test."]
    server.records["a.test", "A"] = server.records["b.test", "A"] = ["10.0.0.1"]
    async with follow("_one._tcp.test", "_two._tcp.test", type="SRV") as told:
        assert told.names == ["b.test:8000", "b.test:8001"]
        server.records["_one._tcp.test", "SRV"] = ["1 10 8000 a.test.", "1 10 8000 b.test."]
        await told.say("b.test:8000")


async def test_srv(server: DnsServer, follow: Follow) -> None:
    """Ports and weights are the records', and targets are looked up: A, and AAAA where there is no A."""
    server.records["_vllm._tcp.test", "SRV"] = ["1 20 8001 a.test.", "1 40 8002 b.test.", "1 0 8003 c.test."]
    server.records["a.test", "A"] = ["10.0.0.1"]
    server.records["a.test", "AAAA"] = ["fd00::1"]
    server.records["b.test", "AAAA"] = ["fd00::2"]
    server.records["c.test", "A"] = ["10.0.0.4", "10.0.0.3"]
    async with follow("_vllm._tcp.test", type="SRV", common=Common(scheme="https", max_in_flight=4)) as told:
        found = {m.name: (m.place, m.weight, m.max_in_flight) for m in told.snapshots[0]}
        assert found == {
            "a.test:8001": (Place("https://a.test:8001", "10.0.0.1"), 1, 4),
            "b.test:8002": (Place("https://b.test:8002", "fd00::2"), 2, 4),
            "c.test:8003@10.0.0.3": (Place("https://c.test:8003", "10.0.0.3"), 0.01, 4),
            "c.test:8003@10.0.0.4": (Place("https://c.test:8003", "10.0.0.4"), 0.01, 4),
        }
        server.records["a.test", "A"] = ["10.0.0.9"]
        server.records["_vllm._tcp.test", "SRV"] = ["1 20 8001 a.test."]
        await told.say("a.test:8001")
        assert told.snapshots[-1][0].place.address == "10.0.0.9"


async def test_an_address_of_a_service_keeps_its_name(server: DnsServer, follow: Follow) -> None:
    """Another address joins its target, or leaves it: whoever stays is the same backend, with all that is known of it."""
    server.records["_vllm._tcp.test", "SRV"] = ["1 1 8001 a.test."]
    server.records["a.test", "A"] = ["10.0.0.1"]
    async with follow("_vllm._tcp.test", type="SRV") as told:
        await told.say("a.test:8001")
        server.records["a.test", "A"] = ["10.0.0.1", "10.0.0.2"]
        await told.say("a.test:8001", "a.test:8001@10.0.0.2")
        assert {m.name: m.place.address for m in told.snapshots[-1]}["a.test:8001"] == "10.0.0.1"
        server.records["a.test", "A"] = ["10.0.0.2"]
        await told.say("a.test:8001@10.0.0.2")
        server.records["a.test", "A"] = ["10.0.0.3"]
        await told.say("a.test:8001")
        assert told.snapshots[-1][0].place.address == "10.0.0.3"


async def test_srv_of_lower_priority_waits(server: DnsServer, follow: Follow) -> None:
    """RFC 2782: the lowest number is asked first; the others only when there is no such record any more."""
    server.records["_vllm._tcp.test", "SRV"] = ["20 1 8001 spare.test.", "10 1 8000 main.test."]
    server.records["main.test", "A"] = server.records["spare.test", "A"] = ["10.0.0.1"]
    async with follow("_vllm._tcp.test", type="SRV") as told:
        assert told.names == ["main.test:8000"]
        del server.records["_vllm._tcp.test", "SRV"][1]
        await told.say("spare.test:8001")


async def test_no_such_service(server: DnsServer, follow: Follow) -> None:
    """RFC 2782: a target of "." says so."""
    server.records["_vllm._tcp.test", "SRV"] = ["0 0 0 ."]
    async with follow("_vllm._tcp.test", type="SRV") as told:
        assert told.names == []


async def test_an_answer_without_records(server: DnsServer, follow: Follow) -> None:
    """NXDOMAIN, and no data: there are no backends, as a service without pods has none."""
    server.records["vllm.test", "A"] = ["10.0.0.1"]
    async with follow(port=8000) as told:
        server.records["vllm.test", "A"] = []
        await told.say()
        server.records["vllm.test", "AAAA"] = ["fd00::1"]
        server.records["vllm.test", "A"] = ["10.0.0.1"]
        await told.say("10.0.0.1:8000")
        del server.records["vllm.test", "A"]
        await told.say()


@pytest.mark.parametrize("rcode", [dns.rcode.SERVFAIL, dns.rcode.REFUSED])
async def test_a_server_that_fails(
    server: DnsServer, follow: Follow, rcode: dns.rcode.Rcode, caplog: pytest.LogCaptureFixture
) -> None:
    """What it said last stays; it is told of once, and once that it works again."""
    caplog.set_level("INFO")
    server.records["vllm.test", "A"] = ["10.0.0.1"]
    async with follow(port=8000) as told:
        server.rcode = rcode
        asked = len(server.asked)
        await until(lambda: len(server.asked) > asked + 6, "more look-ups")
        assert told.names == ["10.0.0.1:8000"]
        server.rcode = None
        server.records["vllm.test", "A"].append("10.0.0.2")
        await told.say("10.0.0.1:8000", "10.0.0.2:8000")
        await until(lambda: "works again" in caplog.text, "that it works again")
        assert [r.levelname for r in caplog.records] == ["WARNING", "INFO"], caplog.text
        assert "vllm.test (A) could not be looked up" in caplog.text


async def test_a_server_that_says_nothing(
    server: DnsServer, follow: Follow, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sources, "PATIENCE", 0.1)
    server.records["vllm.test", "A"] = ["10.0.0.1"]
    async with follow(port=8000) as told:
        server.silent = True
        await until(lambda: "no DNS server answered for vllm.test (A) within 0.1 s" in caplog.text, "a word of it")
        server.silent = False
        server.records["vllm.test", "A"] = ["10.0.0.2"]
        await told.say("10.0.0.2:8000")


async def test_a_long_answer_comes_over_tcp(server: DnsServer, follow: Follow) -> None:
    server.truncates = True
    server.records["vllm.test", "A"] = [f"10.0.{i}.1" for i in range(200)]
    async with follow(port=8000) as told:
        assert len(told.snapshots[0]) == 200
        assert {transport for transport, _, _ in server.asked} == {"udp", "tcp"}


def test_weights_are_proportions() -> None:
    """So that they stand beside backends of other sources, whose weight is 1."""
    targets = [Target(f"h{i}", 1, weight, ("10.0.0.1",)) for i, weight in enumerate((33, 33, 66))]
    assert [m.weight for m in members_of_targets(targets, Common())] == [1, 1, 2]
    assert [m.weight for m in members_of_targets([Target("h", 1, 0, ("10.0.0.1",))], Common())] == [1]
    targets = [Target(f"h{i}", 1, weight, ("10.0.0.1",)) for i, weight in enumerate((0, 10, 20))]
    assert [m.weight for m in members_of_targets(targets, Common())] == [0.01, 1, 2]  # RFC 2782: a very small chance
    assert members_of_targets([], Common()) == []
