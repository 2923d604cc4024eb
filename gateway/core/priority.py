"""Classes of priority: who is served first of those that wait. The operator names them, and says who is in which."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gateway.core.head import Field


class Classes:
    """`names`: the highest first. `header`: the field in which a client may name its class; None: no client may."""

    def __init__(self, names: Sequence[str] = ("high", "normal", "low"), default: str = "normal", header: str | None = None):
        self._ranks = {name.encode(): rank for rank, name in enumerate(names)}
        self._default = self._ranks[default.encode()]
        self._header = None if header is None else header.lower().encode("latin-1")

    def rank_of(self, name: str) -> int:
        return self._ranks[name.encode()]

    def rank(self, fields: Iterable[Field], of_model: int | None) -> int:
        """Of a request: what its client names, where that is asked; or its model's; or the default. A name that is none is not
        heard."""
        if self._header is not None:
            for name, _, value, _ in fields:
                if name == self._header and value in self._ranks:
                    return self._ranks[value]
        return self._default if of_model is None else of_model
