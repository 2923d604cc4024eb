"""One attempt at a disaggregated exchange: the two legs, where it stands, and what must outlive it when its client leaves.

The decode leg is the call itself, as its answer is what is relayed; the prefill leg is beside it. An attempt never becomes
another one: a second try has other leases, another id, and nothing of what the first one was handed (pd.md 6.1).
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from gateway.core import headers
from gateway.core.backend import Backend, Holding
from gateway.core.disagg.asked import Asked
from gateway.core.disagg.base import GENERATING, OWNED_FIELDS, Connector, Handoff, HandoffMissing, Order, Pair, Release
from gateway.core.disagg.base import Leg as Request
from gateway.core.disagg.parting import NEXT, TELLING, Parting, State, parting
from gateway.core.disagg.signs import Sign
from gateway.core.exchange import Exchange
from gateway.core.head import ResponseHead
from gateway.net.call import Call
from gateway.net.hold import Hold
from gateway.net.legs import Leg, beside
from gateway.net.promise import Promise
from gateway.net.releases import Detached, Ended, Released, Releases
from gateway.net.upstream import ConnectionPool, Origin

# What is coded could not be read: what prefill brought, or what is to be changed in decode's answer.
_UNCODED = OWNED_FIELDS | {b"accept-encoding"}

# Fields that say who the client is
_CLIENT = frozenset({b"authorization", b"x-api-key"})


class PairSettings(NamedTuple):
    """What the operator decided of disaggregation. Seconds; octets."""

    connector: Connector
    paths: frozenset[bytes] = GENERATING  # whose requests are judged
    min_prompt_bytes: int = 0
    prefill_timeout: float | None = None
    hold: float = 30.0
    release: Release = Release.ALWAYS
    notifies: bool = True  # a decode engine that refuses a request tells the prefill engine to let go (`parting.TELLING`)
    release_timeout: float = 30.0
    release_cap: int = 4
    admission_grace: float = 5.0
    prefill_grace: float = 0.0
    abort_unsafe: bool = False
    fallback: bool = False
    cached_tokens: bool = False  # of the client's usage: as prefill said them
    resume: bool = False  # what decode drops under pressure is gone on with, where that is exact
    callback: str = ""
    named: bool = False  # prefill is whom the request names in a header field, as llm-d's sidecars are told


class PairObserver(Protocol):
    """What disaggregation tells. It must not raise, and is called synchronously."""

    def bypassed(self, reason: str) -> None: ...

    def fell_back(self, reason: str) -> None: ...

    def encoded(self, exchange: Exchange, connector: str, seconds: float) -> None:
        """The encoders' first request begun to their last answer read."""

    def prefilled(self, exchange: Exchange, connector: str, seconds: float) -> None:
        """Prefill's request written to its answer read."""

    def handed_over(self, exchange: Exchange, connector: str, seconds: float) -> None:
        """Prefill's answer read to decode's request written."""

    def decoding(self, exchange: Exchange, connector: str, seconds: float) -> None:
        """Decode's request written to the first octet of its body."""

    def held(self, connector: str, seconds: float) -> None:
        """Prefill's answer read to decode's first octet: KV was held for so long."""

    def parted(self, phase: str) -> None:
        """The client left."""

    def released(self, result: str) -> None: ...

    def stranded(self, connector: str, tokens: int) -> None:
        """KV that nobody will fetch."""

    def recomputed(self) -> None:
        """An engine has dropped an answer under pressure."""

    def resumed(self, result: str) -> None:
        """What came of such an answer, where it may be gone on with."""


class Paired:
    __slots__ = (
        "_releases", "answer", "answered", "asked", "call", "conversation", "edits", "encoder", "handoff", "holding", "missed",
        "opening", "pair", "prefill", "said", "sent", "settings", "state", "task", "tasks", "tokens", "transferred",
        "unresumed",
    )  # fmt: skip

    def __init__(self, call: Call, asked: Asked, settings: PairSettings, releases: Releases, tokens: int):
        self.call, self.asked, self.settings, self._releases, self.tokens = call, asked, settings, releases, tokens
        self.state = State.QUEUED
        self.prefill: Leg = beside(call.exchange)
        self.encoder: Leg | None = None  # that is there for the first of its media
        self.pair: Pair | None = None
        self.handoff: Handoff | None = None
        self.holding: Holding | None = None
        self.said = Handoff()  # what prefill's answer says beside the hand-off
        self.missed = False  # decode has too little of the prompt (Order.PROBE)
        self.transferred = True  # decode did not read the prompt itself
        named = settings.connector.conversation(asked)
        self.conversation = named and _kept_apart(call, named)
        self.edits = settings.cached_tokens or asked.prompt_logprobs is not None or bool(self.conversation)  # of the answer
        self.answered = 0.0  # when prefill's answer had been read
        self.sent = 0.0  # when decode's request was written
        self.answer: Promise[ResponseHead] | None = None  # decode's
        self.opening: Hold | None = None  # of decode's body
        self.tasks: tuple[asyncio.Task[Any], ...] = ()  # of the legs, where both are under way at once
        self.task: asyncio.Task[Any] | None = None  # that makes the attempt, where it is not the exchange's own
        self.unresumed = "inexact"  # why an answer that decode dropped is passed on as such

    @property
    def transfers(self) -> bool:
        """Whether decode has been asked to take over what prefill has computed, or computes."""
        return self.state is State.DECODE_WAIT and self.settings.connector.order is not Order.SIDECAR

    def become(self, state: State) -> None:
        if state not in NEXT[self.state] and state is not State.DONE:
            raise AssertionError(f"a pair of legs in state {self.state} cannot come to {state}")
        self.state = state

    def octets(self, request: Request, origin: Origin, *, prefill: bool = False) -> bytes:
        """A leg's request, as it is sent: the client's own fields, but for those that tell engines where KV is."""
        call, route, head = self.call, self.call.route, self.call.request.head
        assert route is not None and head is not None
        without = _UNCODED if prefill or self.edits else OWNED_FIELDS
        host = head.named.get(b"host", b"") if route.authority is None else route.authority
        lines = headers.upstream_head(
            head,
            request.path,
            host=origin.host_field,
            request_id=request.request_id,
            forwarding=call.client.forwarding(host) if call.policy.forwarded else None,
            length=len(request.body),
            credential=origin.credential,
            without=without,
            fields=request.fields,
        )
        return lines + request.body

    def fetched(self) -> None:
        """What prefill held has been fetched, or is gone."""
        holding, self.holding = self.holding, None
        if holding is not None:
            holding.end()

    def refused(self, status: int) -> None:
        """Decode has answered with an error, which is the client's."""
        if not self.settings.notifies or status not in TELLING:
            self.give_up()
        self.fetched()

    def part(self) -> None:
        """The exchange ends, whatever state this is in: what must outlive it is handed on. May be called again."""
        found = parting(
            self.state,
            holds=self.holding is not None,
            unsafe=self.settings.abort_unsafe,
        )
        if found is Parting.RELEASE:
            self.give_up()
        elif found is Parting.DETACH:
            self._detach()
        self.end()

    def give_up(self) -> None:
        """Nobody will come for what prefill holds: have it freed, or count it."""
        holding, self.holding = self.holding, None
        if holding is None:
            return
        lease = self.call.lease
        decode = lease.backend if lease is not None else None
        handoff = self.handoff or Handoff()
        self._releases.release(self._held(handoff, holding, self.answered, decode, self.call.connections))

    def strand(self, prefill: Backend, since: float) -> None:
        """Prefill holds what nobody can fetch, as its answer is of no use: it stays until its time is over."""
        settings = self.settings
        if settings.hold:
            self._releases.lost(prefill.hold(self.tokens), self.tokens, since + settings.hold, settings.connector.name)

    def cut_off(self, prefill: Backend) -> None:
        """Prefill's 200 came, and its body did not: it has finished, and nobody knows where its KV is."""
        if self.settings.connector.order.hands_over:
            self.strand(prefill, time.monotonic())

    def _held(
        self, handoff: Handoff, holding: Holding, since: float, decode: Backend | None, connections: ConnectionPool | None
    ) -> Released:
        """KV that prefill holds, and what `decode` is to be sent so that it is freed."""
        settings, octets = self.settings, None
        assert self.pair is not None
        policy, connector = settings.release, settings.connector
        wanted = policy is not Release.NEVER and (policy is not Release.PRESSURE or holding.pressed)
        if wanted and connections is not None and (connector.asks_again or not self.sent):
            request = (connector.reject if policy is Release.REJECT else connector.release)(self.asked, self.pair, handoff)
            octets = None if request is None else self.octets(request, connections.origin)
        return Released(
            octets,
            policy is Release.REJECT or (settings.notifies and connector.tells),
            decode,
            connections,
            holding,
            self.tokens,
            since + settings.hold,
            settings.release_timeout,
            settings.release_cap,
            settings.connector.name,
        )

    def end_prefill(self) -> None:
        """Have prefill stop. Where it has answered already, and nobody has read that, it holds KV of which nobody would know:
        so what it has written is heard. May be called again."""
        call, settings, leg, pair = self.call, self.settings, self.prefill, self.pair
        connection, lease, reply = leg.connection, leg.lease, leg.reply
        if not settings.hold or connection is None or lease is None or reply is None:
            leg.end()
            return
        assert pair is not None
        self.prefill = beside(call.exchange)
        call.others = (self.prefill,)
        decode, connections = call.lease.backend if call.lease is not None else None, call.connections
        prefill, connector = lease.backend, settings.connector

        def holds(answer: bytes) -> Released:
            try:
                handoff = connector.take(self.asked, pair, answer)
            except HandoffMissing as missing:
                if missing.holds:
                    self.strand(prefill, time.monotonic())
                raise
            held = self._held(handoff, prefill.hold(self.tokens), time.monotonic(), decode, connections)
            # where decode was under way it may have fetched before it was closed: a release would wait for what is gone
            return held._replace(seconds=min(held.seconds, settings.admission_grace)) if self.sent else held

        self._releases.hear(
            Ended(leg, connection, reply, leg.page, settings.prefill_grace, holds, lambda: self.cut_off(prefill))
        )

    def _detach(self) -> None:
        """Take decode's leg from the call: it goes on to its first octet."""
        call, settings = self.call, self.settings
        holding, self.holding = self.holding, None
        decode, connections = call.lease.backend if call.lease is not None else None, call.connections

        def kv(holding: Holding) -> Released:
            return self._held(self.handoff or Handoff(), holding, self.answered, decode, connections)

        connection, call.connection = call.connection, None
        if connection is None or self.answer is None or call.lease is None or call.route is None:
            if holding is not None:
                self._releases.release(kv(holding))
            return
        unsafe = settings.abort_unsafe
        # both or neither: a transfer has two ends
        prefill, self.prefill, call.others = self.prefill, beside(call.exchange), ()
        prefilling = self.tasks[0] if self.tasks else None
        self._cancel(self.tasks[1:])
        self.tasks = ()
        whole = not self.asked.stream and not unsafe
        self._releases.detach(
            Detached(
                self.answer,
                self.opening,
                connection,
                call.lease.backend.lease(),
                holding,
                kv,
                self._fetches,
                self.sent + settings.admission_grace if whole else None,
                settings.release_timeout,
                call.dialect,
                prefill,
                prefilling,
            )
        )

    def _fetches(self, status: int, said: bytes) -> bool:
        """Whether decode has what prefill held, or has told it to let go. `said`: how its body begins."""
        if not 200 <= status < 300:
            return self.settings.notifies and status in TELLING
        return not said or self.settings.connector.sign(said, status, self.asked) is not Sign.FAILED

    def end(self) -> None:
        """Give back all that is left, at once. May be called again."""
        state, self.state = self.state, State.DONE
        self.fetched()
        self._cancel(self.tasks if self.task is None else (self.task, *self.tasks))
        if self.encoder is not None:
            self.encoder.end()
        if state is State.STREAMING:  # decode has what prefill held
            self.prefill.end()
        else:
            self.end_prefill()

    def _cancel(self, tasks: Iterable[asyncio.Task[Any]]) -> None:
        for task in tasks:
            if task is not asyncio.current_task():
                task.cancel()


def _kept_apart(call: Call, conversation: str) -> str:
    """Two clients, or two models, may happen on one name: neither is to read what was computed of the other's prompt."""
    head = call.request.head
    shown = b"\n".join(field[2] for field in head.fields if field[0] in _CLIENT) if head is not None else b""
    return f"{hashlib.blake2b(shown, digest_size=16).hexdigest()} {call.exchange.model} {conversation}"
