"""Two legs under way at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from gateway.core.backend import Backend
from gateway.core.head import ResponseHead
from gateway.errors import EngineRefused, Refusal
from gateway.net.call import Call
from gateway.net.disagg.common import LegFailed, Means
from gateway.net.disagg.decode import decode
from gateway.net.paired import Paired
from gateway.net.watch import NEVER

T = TypeVar("T")


async def both(
    means: Means, call: Call, paired: Paired, tried: list[Backend], prefilling: Callable[[], Awaitable[None]]
) -> ResponseHead:
    """Both legs together, as neither engine gets on without the other. The first one that fails ends the other; decode's
    first octet proves the transfer, and what prefill says then is read beside the stream, never before it; but where the
    connector `defers`: then decode's output is kept back until prefill has answered."""
    prefill: asyncio.Task[Exception | None] = means.tasks.spawn(_outcome(prefilling), "prefill leg")
    decoding: asyncio.Task[ResponseHead | Exception] = means.tasks.spawn(
        _outcome(partial(decode, means, call, paired, tried)), "decode leg"
    )
    paired.tasks = (prefill, decoding)
    try:
        await asyncio.wait((prefill, decoding), return_when=asyncio.FIRST_COMPLETED)
        if not decoding.done() and (failed := prefill.result()) is None:
            await asyncio.wait((decoding,))
        elif not decoding.done():
            assert isinstance(failed, Exception)
            raise failed
        outcome = decoding.result()
    finally:
        if not decoding.done():
            decoding.cancel()
            call.drop()
            await asyncio.wait((decoding,))
    if isinstance(outcome, Exception):
        if prefill.done() and isinstance(first := prefill.result(), Exception):
            call.drop()  # decode's failure is what prefill's brought: nobody will read what it has answered
            raise first
        raise outcome
    if not 200 <= outcome.status < 300:
        paired.end_prefill()
        prefill.cancel()
    elif paired.settings.connector.defers and (failed := await _deferred(means, call, paired, prefill)) is not None:
        call.drop()
        raise failed
    return outcome


async def _deferred(means: Means, call: Call, paired: Paired, prefill: asyncio.Task[Exception | None]) -> Exception | None:
    """How prefill has failed, for which decode's output, which has begun, is kept back; None: it has not."""
    seconds, lease = paired.settings.connector.defers, paired.prefill.lease
    if not prefill.done():
        assert call.connection is not None and lease is not None
        call.connection.set_aside()
        call.look_at = NEVER  # decode has begun, and prefill has deadlines of its own
        await asyncio.wait((prefill,), timeout=seconds)
        means.watch.begin(call, time.monotonic())
    if prefill.done():
        return prefill.result()
    assert lease is not None
    paired.prefill.end()
    message = f"the prefill leg: the backend {lease.backend.name} gave no answer within {seconds:g} s of decode's first octet"
    return LegFailed("prefill", lease.backend, Refusal("timeout_first_byte", message))


async def _outcome(leg: Callable[[], Awaitable[T]]) -> T | Exception:
    """What it returns, or how it failed. Where it is cancelled before it has begun, there is nothing that nobody awaits."""
    try:
        return await leg()
    except (LegFailed, Refusal, EngineRefused) as failure:
        return failure
