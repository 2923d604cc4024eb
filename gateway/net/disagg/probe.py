"""Decode first: it goes ahead where it has enough of the prompt, and says so where it has not, before it computes anything."""

from __future__ import annotations

from gateway.core.backend import Backend
from gateway.core.disagg.parting import State
from gateway.core.head import ResponseHead
from gateway.net.call import Call
from gateway.net.disagg.common import Means, asked_of
from gateway.net.disagg.decode import decode
from gateway.net.opening import Probe
from gateway.net.paired import Paired
from gateway.net.watch import NEVER


async def probe(means: Means, call: Call, paired: Paired, tried: list[Backend]) -> ResponseHead | None:
    """Decode's answer, or its refusal; None: prefill is to be asked. Raises LegFailed, EngineRefused."""
    assert call.lease is not None
    if paired.asked.prompt_logprobs is not None:  # prefill computes them, whatever decode has
        return None
    paired.become(State.PROBING)
    request = asked_of(call.lease.backend, paired.settings.connector.probe, paired)
    response = await decode(means, call, paired, tried, request, Probe)
    if paired.missed:
        call.drop()
        call.look_at = NEVER
        return None
    paired.become(State.STREAMING)
    paired.transferred = False
    paired.prefill.end()
    call.others = ()
    means.admission.wake()
    if 200 <= response.status < 300:
        means.told.bypassed("cached")
    return response
