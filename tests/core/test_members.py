"""How the sources' lists combine: the rules of core.members, one test or more for each."""

from __future__ import annotations

from gateway.core.members import ADMIN_API, CONFIGURATION, Member, Merged, Place, merge, repeated


def member(name: str, port: int = 0, **more: object) -> Member:
    return Member(name, Place(f"http://10.0.0.1:{port or 8000 + len(name)}"), **more)  # type: ignore[arg-type]


def names(merged: Merged) -> list[tuple[str, str]]:
    return [(one.member.name, one.source) for one in merged.listed]


A, B, C = member("a", 1), member("b", 2), member("c", 3)


def test_all_sources_together() -> None:
    merged = merge([(CONFIGURATION, [A]), ("dns x", [B]), (ADMIN_API, [C])], {})
    assert names(merged) == [("a", CONFIGURATION), ("b", "dns x"), ("c", ADMIN_API)]
    assert not merged.clashes


def test_nobody_at_all() -> None:
    assert merge([], {}) == ((), (), {})


def test_a_name_is_its_first_source_s() -> None:
    merged = merge([(CONFIGURATION, [A]), ("dns x", [member("a", 9), B])], {})
    assert names(merged) == [("a", CONFIGURATION), ("b", "dns x")]
    assert merged.listed[0].member == A
    assert merged.clashes == ("dns x: the name a is taken by a backend of configuration",)


def test_a_place_is_its_first_source_s() -> None:
    """One engine listed under two names would be counted twice."""
    merged = merge([("file f", [A]), ("dns x", [member("other", 1)])], {})
    assert names(merged) == [("a", "file f")]
    assert merged.clashes == ("dns x: other is at http://10.0.0.1:1, as a of file f is",)


def test_an_address_tells_places_apart() -> None:
    """Two addresses of one DNS name have one URL."""
    found = [Member(f"b{i}", Place("http://vllm:8000", f"10.0.0.{i}")) for i in range(2)]
    assert len(merge([("dns vllm", found)], {}).listed) == 2


def test_one_source_may_list_a_place_twice() -> None:
    """As an operator may, for a reason of theirs."""
    merged = merge([(CONFIGURATION, [A, member("again", 1)])], {})
    assert names(merged) == [("a", CONFIGURATION), ("again", CONFIGURATION)]


def test_who_was_left_out_comes_back() -> None:
    second = ("dns x", [member("a", 9)])
    assert names(merge([(CONFIGURATION, []), second], {})) == [("a", "dns x")]


def test_what_was_taken_out_stays_out() -> None:
    merged = merge([(CONFIGURATION, [A, B])], {"a": A.place})
    assert names(merged) == [("b", CONFIGURATION)]
    assert merged.taken_out == {"a": A.place}


def test_what_was_taken_out_holds_its_name() -> None:
    """Else another source's backend would come in by the back door."""
    merged = merge([(CONFIGURATION, [A]), ("dns x", [member("a", 9)])], {"a": A.place})
    assert not merged.listed


def test_a_mark_is_forgotten_with_its_backend() -> None:
    """No source lists it any more, or lists it elsewhere: whoever comes then is new."""
    assert not merge([(CONFIGURATION, [B])], {"a": A.place}).taken_out
    moved = merge([(CONFIGURATION, [member("a", 9)])], {"a": A.place})
    assert names(moved) == [("a", CONFIGURATION)]
    assert not moved.taken_out


def test_repeated() -> None:
    assert repeated([A, B, member("a", 9)]) == "a"
    assert repeated([A, B]) is None
