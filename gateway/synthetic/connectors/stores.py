"""Connectors without a hand-off: a store that all engines share, here a folder, by what the prompt is.

`store` (a knob) says which folder; engines of one machine have one in common without it.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path

from gateway.synthetic.ask import Ask, number
from gateway.synthetic.connectors.base import Connector, Incoming
from gateway.synthetic.generation import Generation

_PROMPT = ("model", "messages", "prompt", "input", "system", "instructions", "tools", "cache_salt")


class LmCache(Connector):
    """What an engine has computed, others find; who finds nothing computes it, and says nothing."""

    name = "lmcache"

    def prepare(self, ask: Ask, generation: Generation, incoming: Incoming) -> None:
        path = self._path(ask)
        generation.on_finish = lambda: self._store(path)
        if self._decodes:
            generation.prelude = lambda: self._look_up(path, ask, generation)

    def _path(self, ask: Ask) -> Path:
        told = json.dumps({name: ask.body[name] for name in _PROMPT if name in ask.body}, sort_keys=True)
        folder = self._engine.capacity.store or str(Path(tempfile.gettempdir()) / "tokenpipe-mock-kv")
        return Path(folder) / hashlib.sha256(told.encode()).hexdigest()

    def _store(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()

    async def _look_up(self, path: Path, ask: Ask, generation: Generation) -> None:
        if _there(path):
            self.spare(generation)
        else:
            self.recompute()


class SharedStorage(LmCache):
    """llm-d's: a decoder that finds less of the prompt than `cache_hit_threshold` ends with `cache_threshold`, without a
    token."""

    name = "shared_storage"

    async def _look_up(self, path: Path, ask: Ask, generation: Generation) -> None:
        if not _there(path) and (number(ask.body, "cache_hit_threshold") or 0) > 0:
            generation.on_finish = None
            generation.conclude("cache_threshold")
        else:
            await super()._look_up(path, ask, generation)


def _there(path: Path) -> bool:
    return path.exists()
