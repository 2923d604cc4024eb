"""What operators may ask of a running gateway: the admin listener's `Control`, and the live page's `Source`."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any

from gateway import __version__
from gateway.control.membership import Membership, described
from gateway.core.exchange import Exchange, Observer
from gateway.core.outcome import Outcome
from gateway.errors import Ended
from gateway.net.handler import Gateway
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.observer import Observers

NAMED_MOST = 10  # backends that are out, in what /readyz says


class Operator:
    def __init__(
        self,
        gateway: Gateway,
        metrics: Metrics,
        membership: Membership,
        reload: Callable[[], Awaitable[None]],
        config: Callable[[], dict[str, Any]],
    ):
        self._gateway, self._metrics, self._membership = gateway, metrics, membership
        self._reload, self._config = reload, config
        self._observer = gateway.observer
        self._started = time.monotonic()

    async def reload(self) -> None:
        await self._reload()

    def config(self) -> dict[str, Any]:
        return self._config()

    def render_metrics(self, accept: str | None) -> tuple[Iterator[bytes], str]:
        return self._metrics.render(accept)

    def ready(self) -> str | None:
        if self._gateway.draining:
            return "draining"
        fleet = self._gateway.fleet
        if fleet.routable:
            return None
        out = [f"{b.name} is {b.standing}" for b in fleet.pool.backends if not b.routable]
        why = ", ".join(out[:NAMED_MOST]) + (", ..." if len(out) > NAMED_MOST else "")
        return f"no backend can be reached: {why or 'there is none, or not both of prefill and decode'}"

    def backends(self) -> list[dict[str, Any]]:
        return [described(entry) for entry in self._membership.everyone]

    def streams(self) -> list[dict[str, Any]]:
        now = time.monotonic()
        return [
            {
                "request_id": x.request_id,
                "client": x.client,
                "method": x.method,
                "path": x.path,
                "model": x.model,
                "backend": x.backend,
                "prefill_backend": x.prefill_backend,
                "phase": x.phase.value,
                "age_s": round(now - x.accepted, 3),
                "output_events": x.meter.events if x.meter is not None else 0,
                "bytes_out": x.bytes_out,
                "paused": x.paused_at is not None,
            }
            for x in self._gateway.exchanges()
        ]

    def abort(self, request_id: str) -> bool:
        return bool(self._gateway.interrupt(Ended(Outcome.DRAINING, "an operator ended the exchange"), request_id))

    # for the live page ------------------------------------------------------------------------------------------------

    def observe(self, observer: Observer | None) -> None:
        self._gateway.observer = self._observer if observer is None else Observers(self._observer, observer)

    def exchanges(self) -> Iterable[Exchange]:
        return self._gateway.exchanges()

    def outcomes(self) -> Mapping[str, int]:
        return self._metrics.outcomes()

    def status(self) -> dict[str, Any]:
        return {
            "version": __version__,
            "uptime_s": round(time.monotonic() - self._started),
            "queued": self._gateway.admission.waiting,
            "trouble": self.ready(),
        }
