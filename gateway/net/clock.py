"""The wall clock, as HTTP writes it: one string a second."""

from __future__ import annotations

import time
from email.utils import formatdate

_written: tuple[int, bytes] = (0, b"")


def http_date() -> bytes:
    """Now, in the form of RFC 9110 section 5.6.7."""
    global _written
    now = int(time.time())
    if now != _written[0]:
        _written = now, formatdate(now, usegmt=True).encode()
    return _written[1]
