"""A form's field is found where it stands, whatever comes around it, and only once its end is there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.form import boundary, place_of


def form(*parts: tuple[bytes, bytes], edge: bytes = b"b0undary") -> bytes:
    return b"".join(b"--%b\r\n%b\r\n\r\n%b\r\n" % (edge, head, value) for head, value in parts) + b"--%b--\r\n" % edge


def named(name: bytes) -> bytes:
    return b'Content-Disposition: form-data; name="%b"' % name


def value(body: bytes, edge: bytes = b"b0undary") -> bytes | None:
    place = place_of(body, edge, b"model")
    return None if place is None else body[slice(*place)]


@pytest.mark.parametrize(
    ("content_type", "expected"),
    [
        (b"multipart/form-data; boundary=x", b"x"),
        (b'multipart/form-data; charset=utf-8; Boundary="a b:c"', b"a b:c"),
        (b"multipart/form-data", None),
        (b"multipart/form-data; boundary=", None),
    ],
)
def test_boundary(content_type: bytes, expected: bytes | None) -> None:
    assert boundary(content_type) == expected


FILE = (b'Content-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav', b"\0\r\n--b0undar\r\n\r\n")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (form((named(b"model"), b"whisper")), b"whisper"),
        (form(FILE, (named(b"model"), b"whisper"), FILE), b"whisper"),
        (form((b"Content-Type: text/plain\r\ncontent-disposition:form-data;name=model", b"w")), b"w"),
        (form((named(b"model"), b"one"), (named(b"model"), b"two")), b"two"),
        (form((named(b"models"), b"w"), (named(b"x\"; a=\"model"), b"w")), None),
        (form((b'Content-Disposition: form-data; name="model"; filename="f"', b"w")), None),
        (form((named(b"model"), b"")), b""),
        (b"preamble\r\n" + form((named(b"model"), b"w")), b"w"),
        (b"", None), (b"--b0undary", None), (form((named(b"model"), b"w"), edge=b"other"), None),
    ],
)  # fmt: skip
def test_value(body: bytes, expected: bytes | None) -> None:
    assert value(body) == expected


@given(st.binary(max_size=40), st.integers(0, 400))
def test_never_half_a_value(content: bytes, cut: int) -> None:
    """Of what has not come whole nothing is said, and nothing raises."""
    body = form((named(b"file"), content), (named(b"model"), b"whisper"))
    assert value(body[:cut]) in (None, b"whisper")
    assert value(content) is None
    assert value(body) == b"whisper"
