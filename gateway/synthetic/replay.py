"""What a real engine sent, sent again, with its timing at any speed.

A recording is three files of one name: `.json` (when which bytes were read: `recvs_ms_bytes`, milliseconds since the
request and a count; `complete_ms`, null where the answer was cut), `.resp` (every byte of the response, the head too; or
`.resp.xz`) and `.req`, which is not looked at.
"""

from __future__ import annotations

import json
import lzma
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Recording:
    """`pieces`: seconds since the request, and the bytes that came then. `whole`: whether the answer came to its end."""

    pieces: tuple[tuple[float, bytes], ...]
    whole: bool


@lru_cache(maxsize=64)
def load(folder: str, name: str) -> Recording:
    """Raises ValueError where there is none of that name, or one that cannot be read."""
    path = Path(folder, name + ".json")
    try:
        facts: dict[str, Any] = json.loads(path.read_text())
        response = path.with_suffix(".resp")
        raw = response.read_bytes() if response.exists() else lzma.decompress(Path(f"{response}.xz").read_bytes())
        reads = [(float(moment), int(size)) for moment, size in facts["recvs_ms_bytes"]]
    except FileNotFoundError:
        raise ValueError(f"there is no recording {name!r} in {folder}") from None
    except (OSError, ValueError, KeyError, TypeError, lzma.LZMAError) as error:
        raise ValueError(f"the recording {name!r} cannot be read: {error!r}") from None
    pieces, at = [], 0
    for moment, size in reads:
        pieces.append((moment / 1000, raw[at : at + size]))
        at += size
    if at < len(raw):
        pieces.append((pieces[-1][0] if pieces else 0.0, raw[at:]))
    said_close = b"\r\nconnection: close\r\n" in raw.partition(b"\r\n\r\n")[0].lower() + b"\r\n"
    return Recording(tuple(pieces), facts.get("complete_ms") is not None and not said_close)
