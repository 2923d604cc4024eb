"""One field of a multipart form (RFC 7578), as uploads of audio are: where its value stands, in what is at hand of the body."""

from __future__ import annotations

import re

_BOUNDARY = re.compile(rb';[ \t]*boundary=(?:"([^"]{1,70})"|([^ \t";,]{1,70}))', re.I)
_DISPOSITION = re.compile(rb"^content-disposition:[ \t]*form-data[ \t]*(;[^\r\n]*)$", re.I | re.M)
_PARAMETER = re.compile(rb';[ \t]*([a-z*]+)=(?:"([^"]*)"|([^ \t";]*))', re.I)
PARTS_MOST = 1000


def boundary(content_type: bytes) -> bytes | None:
    """What its parts are told apart by."""
    found = _BOUNDARY.search(content_type)
    return (found[1] or found[2]) if found else None


def place_of(body: bytes, boundary: bytes, name: bytes) -> tuple[int, int] | None:
    """The begin and end of a text field's value; of several, the last one, as engines (Starlette) read it. None where there is
    none whose end has come."""
    delimiter, found = b"--" + boundary, None
    at = 0 if body.startswith(delimiter) else body.find(b"\r\n" + delimiter) + 2
    if at == 1:
        return None
    for _ in range(PARTS_MOST):
        at += len(delimiter)
        head_end = body.find(b"\r\n\r\n", at)
        if body[at : at + 2] == b"--" or head_end < 0:
            break
        begin = head_end + 4
        end = body.find(b"\r\n" + delimiter, begin)
        if end < 0:
            break
        if _names(body[at:head_end], name):
            found = begin, end
        at = end + 2
    return found


def _names(head: bytes, name: bytes) -> bool:
    disposition = _DISPOSITION.search(head.replace(b"\r\n", b"\n"))
    if disposition is None:
        return False
    parameters = {key.lower(): quoted or plain for key, quoted, plain in _PARAMETER.findall(disposition[1])}
    return parameters.get(b"name") == name and b"filename" not in parameters
