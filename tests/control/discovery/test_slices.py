"""What EndpointSlices mean (discovery.k8s.io/v1)."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.control.discovery import Common, SourceFailed
from gateway.control.discovery.slices import members_of
from gateway.core.members import Place
from tests.support.kubernetes import endpoint, endpoint_slice

HTTP: list[tuple[str | None, int]] = [("http", 8000)]


def names(*slices: dict[str, Any], port: int | str | None = None) -> list[str]:
    return [member.name for member in members_of(slices, port, Common())]


def test_a_pod() -> None:
    (member,) = members_of([endpoint_slice("s", endpoint("10.1.0.1", "vllm-0"), ports=HTTP)], None, Common(max_in_flight=3))
    assert member.name == "vllm-0.inference:8000"
    assert member.place == Place("http://10.1.0.1:8000")
    assert member.max_in_flight == 3


def test_what_is_no_pod_is_named_by_its_address() -> None:
    """As the endpoints of an engine outside the cluster."""
    assert names(endpoint_slice("s", endpoint("10.1.0.1"), ports=HTTP)) == ["10.1.0.1:8000"]


@pytest.mark.parametrize(
    ("conditions", "listed"),
    [
        ({"ready": True}, True),
        ({"ready": None}, True),  # "unknown state ... should be interpreted as ready"
        ({}, True),
        (None, True),
        ({"ready": False, "serving": False}, False),
        ({"ready": False, "serving": True, "terminating": True}, False),
        ({"ready": True, "serving": True, "terminating": True}, False),  # publishNotReadyAddresses
    ],
)
def test_conditions(conditions: dict[str, bool] | None, listed: bool) -> None:
    one = endpoint("10.1.0.1", "vllm-0")
    one["conditions"] = conditions
    assert bool(names(endpoint_slice("s", one, ports=HTTP))) is listed


def test_several_slices() -> None:
    """One pod may be in two of them while it moves, and is one backend."""
    one = endpoint_slice("s1", endpoint("10.1.0.1", "vllm-0"), endpoint("10.1.0.2", "vllm-1"), ports=HTTP)
    two = endpoint_slice("s2", endpoint("10.1.0.2", "vllm-1"), endpoint("10.1.0.3"), ports=HTTP)
    assert names(one, two) == ["10.1.0.3:8000", "vllm-0.inference:8000", "vllm-1.inference:8000"]


def test_one_place_is_one_backend() -> None:
    """Though one slice names its pod, and another does not."""
    one = endpoint_slice("s1", endpoint("10.1.0.1", "vllm-0"), ports=HTTP)
    assert names(one, endpoint_slice("s2", endpoint("10.1.0.1"), ports=HTTP)) == ["vllm-0.inference:8000"]


def test_two_address_families() -> None:
    """A pod has one address of each, and is one backend, by IPv4 where it can be."""
    six = endpoint_slice("s6", endpoint("fd00::1", "vllm-0"), endpoint("fd00::2", "vllm-1"), ports=HTTP, family="IPv6")
    four = endpoint_slice("s4", endpoint("10.1.0.1", "vllm-0"), ports=HTTP)
    found = members_of([six, four], None, Common())
    assert [(m.name, m.place.url) for m in found] == [
        ("vllm-0.inference:8000", "http://10.1.0.1:8000"),
        ("vllm-1.inference:8000", "http://[fd00::2]:8000"),
    ]


def test_an_empty_slice() -> None:
    assert names(endpoint_slice("s", ports=[])) == []
    assert names() == []


TWO: list[tuple[str | None, int]] = [("http", 8000), ("metrics", 9000)]


class TestPort:
    def test_the_only_one(self) -> None:
        assert names(endpoint_slice("s", endpoint("10.1.0.1"), ports=[(None, 8000)])) == ["10.1.0.1:8000"]

    @pytest.mark.parametrize("port", ["http", 8000])
    def test_by_name_and_by_number(self, port: int | str) -> None:
        assert names(endpoint_slice("s", endpoint("10.1.0.1"), ports=TWO), port=port) == ["10.1.0.1:8000"]

    def test_one_name_of_two_numbers(self) -> None:
        """Pods of two versions may serve on different ports: each slice says which."""
        slices = [endpoint_slice(f"s{n}", endpoint(f"10.1.0.{n}"), ports=[("http", 8000 + n)]) for n in range(1, 3)]
        assert names(*slices, port="http") == ["10.1.0.1:8001", "10.1.0.2:8002"]

    def test_a_service_that_names_none(self) -> None:
        assert names(endpoint_slice("s", endpoint("10.1.0.1"), ports=[]), port=8000) == ["10.1.0.1:8000"]

    @pytest.mark.parametrize(("port", "found"), [(None, "no port"), (80, "the port 80"), ("web", "the port web")])
    def test_none_that_fits(self, port: int | str | None, found: str) -> None:
        """Nothing is taken, and it says which there are: 80 is the service's, 8000 the pods'."""
        with pytest.raises(SourceFailed, match=f"found {found} .* the ports http 8000, metrics 9000 in the EndpointSlice s"):
            names(endpoint_slice("s", endpoint("10.1.0.1"), ports=TWO), port=port)

    def test_none_at_all(self) -> None:
        with pytest.raises(SourceFailed, match="the ports none in the EndpointSlice s"):
            names(endpoint_slice("s", endpoint("10.1.0.1"), ports=[]))


@pytest.mark.parametrize(
    "endpoints", [[{}], [{"addresses": []}], [{"addresses": ["vllm"]}], [{"addresses": None}], ["x"], 3, [endpoint("x")]]
)
def test_what_is_no_slice_is_refused_whole(endpoints: object) -> None:
    bad = endpoint_slice("s2", ports=HTTP) | {"endpoints": endpoints}
    with pytest.raises(SourceFailed, match="EndpointSlice that is none"):
        names(endpoint_slice("s1", endpoint("10.1.0.1"), ports=HTTP), bad)
