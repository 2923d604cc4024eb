"""Something to come, for one who may leave before it has come.

A future is cancelled with whoever awaits it. What an engine answers to a leg of a disaggregated exchange is worth something
nevertheless: it says where KV is that somebody must have freed. So whoever waits for it waits in a way that leaves it be, and
another one can wait in their place (`net.releases`). It also takes one turn of the loop less than a shielded future, and
complains of no failure that nobody has asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any, Generic, TypeVar

from gateway.errors import Refusal

T = TypeVar("T")


class Promise(Generic[T]):
    """Kept or broken once. Awaited by one at a time; raises what it was broken by."""

    __slots__ = ("_failure", "_kept", "_value", "_waiter")
    _value: T

    def __init__(self) -> None:
        self._kept = False
        self._failure: Refusal | None = None
        self._waiter: asyncio.Future[None] | None = None

    def done(self) -> bool:
        return self._kept or self._failure is not None

    def set_result(self, value: T) -> None:
        self._value, self._kept = value, True
        self._wake()

    def set_exception(self, failure: Refusal) -> None:
        self._failure = failure
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __await__(self) -> Generator[Any, None, T]:
        while not self._kept:
            if self._failure is not None:
                raise self._failure
            self._waiter = asyncio.get_running_loop().create_future()
            yield from self._waiter
        return self._value
