"""One parameter of a request target's query (application/x-www-form-urlencoded), by its place: every other octet stays."""

from __future__ import annotations

from urllib.parse import quote, unquote_to_bytes


def place_of(target: bytes, name: bytes) -> tuple[int, int] | None:
    """The begin and end of its value; of several, the last one, as engines (Starlette) read it. None where there is none."""
    path, mark, query = target.partition(b"?")
    at, found = len(path) + len(mark), None
    for parameter in query.split(b"&"):
        key, _, _ = parameter.partition(b"=")
        end = at + len(parameter)
        if decoded(key) == name and len(key) < len(parameter):
            found = at + len(key) + 1, end
        at = end + 1
    return found


def decoded(text: bytes) -> bytes:
    return unquote_to_bytes(text.replace(b"+", b" "))


def coded(text: str) -> bytes:
    return quote(text, safe="").encode()
