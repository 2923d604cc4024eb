"""One parameter of a query, by its place; what Python's own parser reads is what is found."""

from __future__ import annotations

from urllib.parse import parse_qsl

from hypothesis import example, given
from hypothesis import strategies as st

from gateway.core import query

QUERIES = st.text(alphabet="model=&%6d+a?;", max_size=30)


@given(QUERIES)
@example("model=a&model=b")
@example("mod%65l=%C3%A4+b&x")
@example("model")
def test_as_starlette_reads_it(text: str) -> None:
    """Of several the last one holds (Starlette reads with parse_qsl); but one without = names none here, and goes anywhere."""
    target = f"/v1/realtime?{text}".encode()
    place = query.place_of(target, b"model")
    read = [value for name, value in parse_qsl(text, keep_blank_values=True) if name == "model"]
    found = None if place is None else query.decoded(target[slice(*place)]).decode("utf-8", "replace")
    assert found == (read[-1] if read else None) or ("model" in text.split("&") and not read[-1])


@given(st.text(max_size=20))
def test_what_is_put_in_is_read_again(name: str) -> None:
    target = b"/v1/realtime?a=1&model=x&b=2"
    begin, end = query.place_of(target, b"model") or (0, 0)
    changed = target[:begin] + query.coded(name.encode("utf-8", "replace").decode()) + target[end:]
    assert parse_qsl(changed.partition(b"?")[2].decode(), keep_blank_values=True)[1] == (
        "model", name.encode("utf-8", "replace").decode()
    )  # fmt: skip
