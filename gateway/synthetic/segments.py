"""Where one write ends and the next begins, and one HTTP chunk and the next: neither has to be where an event ends. Pure."""

from __future__ import annotations

from collections.abc import Iterator

LAST = b"0\r\n\r\n"


def chunked(data: bytes, size: int) -> bytes:
    """`data` in HTTP chunks of at most `size` bytes, or in one (0)."""
    if not size or len(data) <= size:
        return b"%x\r\n%b\r\n" % (len(data), data)
    return b"".join(chunked(data[at : at + size], 0) for at in range(0, len(data), size))


def writes(data: bytes, split: int | str) -> Iterator[bytes]:
    """`data` as it is to be written, piece by piece."""
    if isinstance(split, int):
        yield from (data[at : at + split] for at in range(0, len(data), split))
        return
    start = 0
    for end in (*_cuts(data, split), len(data)):
        if start < end:
            yield data[start:end]
            start = end


def _cuts(data: bytes, split: str) -> Iterator[int]:
    """Where to cut: inside every character of several bytes, or inside every pair of line ends."""
    before = 0
    for at, octet in enumerate(data):
        inside = octet & 0xC0 == 0x80 if split == "utf8" else split == "crlf" and octet == 0x0A and before in (0x0A, 0x0D)
        if inside:
            yield at
        before = octet
