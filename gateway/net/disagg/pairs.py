"""Disaggregated prefill and decode: from a request to the head of the decode engine's answer, by two legs.

    QUEUED        two backends are chosen, and leased, before anything is sent: no KV waits for a place to go to
    PREFILLING    the prefill engine computes one token, and answers with where its KV is
    HANDOFF       decode is sent the client's request with that
    DECODE_WAIT   until the first octet of its body: only then is it certain that the KV has arrived, and only then something
                  passes to the client
    STREAMING     the relay's, as with any other exchange

What goes wrong on the way is mended by another attempt where that can harm nobody, or told in the engine's own words: an error
of an engine's is relayed as it came. Nothing is computed twice in silence: what prefill did not hand over is an error, unless
`local_decode_fallback` says otherwise.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import partial

from gateway.core.admission import Admission
from gateway.core.backend import Backend, Lease
from gateway.core.disagg.asked import Asked
from gateway.core.disagg.base import Connector, Engine, HandoffMissing, Order, Pair, missing
from gateway.core.disagg.mistrust import Mistrust
from gateway.core.disagg.parting import State
from gateway.core.disagg.sidecar import named
from gateway.core.exchange import Observer
from gateway.core.head import RequestHead, ResponseHead
from gateway.core.load import TOKENS_MOST
from gateway.core.retry import Retries
from gateway.core.routing import Route
from gateway.errors import Refusal
from gateway.net.attempts import Attempts
from gateway.net.body import HELD_JSON
from gateway.net.call import Call, Upload
from gateway.net.disagg.both import both
from gateway.net.disagg.callbacks import Callbacks
from gateway.net.disagg.common import LegFailed, Means, nobody
from gateway.net.disagg.decode import decode
from gateway.net.disagg.encode import encode, first_leg, needed
from gateway.net.disagg.mishaps import another, answered, last, put_off
from gateway.net.disagg.prefill import prefill
from gateway.net.disagg.probe import probe
from gateway.net.disagg.resume import ended
from gateway.net.disagg.turns import Turns
from gateway.net.fleet import Fleet
from gateway.net.learning import Learning
from gateway.net.migrate import SeamedRelay
from gateway.net.paired import Paired, PairObserver, PairSettings
from gateway.net.releases import Releases
from gateway.net.tasks import Tasks
from gateway.net.waiting import Waiting
from gateway.net.watch import Watch

_ALONE = Pair("", Engine("", "", 0), Engine("", "", 0))

Tried = dict[str, list[Backend]]  # by role, those that a request needs: backends that failed


class Pairs:
    def __init__(
        self,
        fleet: Fleet,
        admission: Admission,
        retries: Retries,
        observer: Observer,
        told: PairObserver,
        attempts: Attempts,
        watch: Watch,
        tasks: Tasks,
        waiting: Waiting,
    ):
        self.means = Means(fleet, admission, retries, observer, told, attempts, watch, tasks, Mistrust())
        self._waiting, self._turns = waiting, Turns(fleet, admission, waiting)
        self._learning = Learning()
        self._callbacks = Callbacks()
        self.called_back = self._callbacks.take
        self.releases = Releases(tasks, told.released, told.stranded)

    def closed(self, call: Call, paired: Paired) -> None:
        """The exchange is over, however it went."""
        meter = call.exchange.meter
        if meter is not None and meter.recomputed:
            self.means.told.recomputed()
            if paired.settings.resume:
                self.means.told.resumed(paired.unresumed)
        paired.part()
        call.paired = None  # which holds the call

    async def ended(self, call: Call, relay: SeamedRelay) -> None:
        """Wait for the end of a stream, which an engine may drop. Raises Ended."""
        await ended(self, call, relay)

    def or_one(self, settings: PairSettings, head: RequestHead, route: Route) -> Pairs | Attempts:
        """Who sees to a request: two backends, or one as ever."""
        return self if route.path in settings.paths and head.method == b"POST" and not route.loopback else self.means.attempts

    async def response(self, call: Call, head: RequestHead, route: Route, upload: Upload) -> ResponseHead:
        """As `Attempts.response`, whose part it takes. Raises Refusal."""
        settings = call.policy.pairs
        assert settings is not None
        fleet = self.means.fleet
        while call.aim is not None and not self._can_serve(call) and call.aim.go_on(call):
            pass  # an alias' next model
        asked = Asked(route.path, upload.held)
        others = self.unnamed(call) if settings.named else []
        bypass = self._bypass(call, asked, settings)
        if bypass is None and others is None and settings.connector.serves_alone:
            bypass = "unnamed"
        if bypass is not None:
            self.means.told.bypassed(bypass)
            without = () if settings.connector.serves_alone else await self._for_whole(call, head)
            fleet.pick_whole(call)
            if needed(self.means, call, asked):
                self._let_go_of_lease(call)
                if (refused := await self._served(call, head, asked, settings, {"encode": [], "both": [*without]})) is not None:
                    return refused
            upload.held = settings.connector.alone(asked, _ALONE).body  # the same one, which an alias' aim goes on with
            upload.length = len(upload.held)
            return await self.means.attempts.response(call, head, route, upload, without)
        self._let_go_of_lease(call)  # of the queue's, which knows of no legs
        self.means.retries.request()
        if settings.resume and len(upload.held) <= HELD_JSON:
            call.asked = upload
        response = await self._served(call, head, asked, settings, self.roles(call, asked, others))
        assert response is not None
        return response

    async def _for_whole(self, call: Call, head: RequestHead) -> Sequence[Backend]:
        """All decode backends, of a connector whose engines serve nothing alone, once the call has a lease on somebody else,
        where there is such a one; it is waited for where it is full. Raises Refusal."""
        fleet = self.means.fleet
        halves = [backend for backend in fleet.pool.backends if backend.role != "both"]
        if call.lease is not None and call.lease.backend in halves:
            self._let_go_of_lease(call)
        fleet.pick_whole(call)
        if call.lease is None and fleet.held_up(call, halves):
            await self._waiting.once_more(call, head, halves)
        return halves

    def roles(self, call: Call, asked: Asked, others: list[Backend] | None) -> Tried:
        """Those that a pair of legs needs. `others`: prefill backends that are not to be asked. Raises Refusal."""
        encode: Tried = {"encode": []} if needed(self.means, call, asked) else {}
        return encode | {"prefill": others or [], "decode": []}

    async def _served(
        self, call: Call, head: RequestHead, asked: Asked, settings: PairSettings, tried: Tried
    ) -> ResponseHead | None:
        """One attempt after the other, by backends of the roles that `tried` names. None: that was the encoders' stage only,
        and one backend is to do all else. Raises Refusal, EngineRefused."""
        if self._turns.waits(call, tried):
            paired = await self._in_turn(call, head, asked, settings, tried)
        else:
            paired = self.begin(call, asked, settings, tried)
        while True:
            try:
                if "both" in tried:
                    await self._encoded(call, paired, tried)
                    return None
                return await self.attempt(call, paired, tried)
            except LegFailed as failed:
                if not self._may_again(call, failed, tried):
                    return await last(self.means, call, paired, failed)
                if settings.fallback and failed.side == "prefill" and self._turns.is_full(call, tried):
                    return await last(self.means, call, paired, failed)
                kept = put_off(call, paired, failed)
                try:
                    following = await self._following(call, head, paired, failed, tried)
                    if following is None:
                        return answered(self.means, call, failed, kept)
                finally:
                    if kept is not None and call.connection is not kept.connection:
                        kept.connection.drop()
                paired = following

    def tries_again(self, call: Call, paired: Paired, failed: LegFailed, tried: Tried) -> bool:
        """Whether there is another attempt after this one, which then has given back all that it had."""
        if not self._may_again(call, failed, tried):
            return False
        self.means.observer.retried(call.exchange, failed.word)
        self._over(call, paired, failed)
        return True

    def _may_again(self, call: Call, failed: LegFailed, tried: Tried) -> bool:
        paired = call.paired
        if paired is not None and paired.pair is not None and (failed.again or failed.response is None):
            self._learning.forget(paired.pair.prefill)
        if isinstance(failed.cause, HandoffMissing) and failed.cause.early:
            self._learning.cap(failed.backend.name)
        if failed.doubted:
            call.doubted += (failed.backend,)
        again = another(self.means, call, failed, tried)
        if not again:
            self.means.judge(call, at_fault=False)
        return again

    def _over(self, call: Call, paired: Paired, failed: LegFailed) -> None:
        if failed.leg is not None:
            failed.leg.end()
        self.end(call, paired)

    async def attempt(self, call: Call, paired: Paired, tried: Tried) -> ResponseHead:
        """Raises LegFailed, Refusal, EngineRefused."""
        call.exchange.attempts += 1
        if paired.encoder is not None:
            await encode(self.means, call, paired, tried["encode"])
        response = await self._legs(call, paired, tried["decode"])
        if call.doubted:
            self.means.judge(call, at_fault=response.status < 500)
        return response

    async def _encoded(self, call: Call, paired: Paired, tried: Tried) -> None:
        """The encoders' stage before one backend that does all else. Raises LegFailed, Refusal."""
        call.exchange.attempts += 1
        await encode(self.means, call, paired, tried["encode"])
        paired.end()
        call.paired = None
        call.exchange.attempts = 0  # of the one that follows

    async def _legs(self, call: Call, paired: Paired, tried: list[Backend]) -> ResponseHead:
        """Raises LegFailed, Refusal, EngineRefused."""
        means, connector = self.means, paired.settings.connector
        if connector.learns:
            await self._learn(call, paired)
        if connector.order is Order.CONCURRENT:
            return await both(means, call, paired, tried, partial(prefill, means, call, paired))
        if connector.order is Order.DECODE_FIRST:
            return await both(means, call, paired, tried, partial(self._callbacks.prefill, means, call, paired))
        if connector.order is Order.SIDECAR:
            return await self._aside(call, paired, tried)
        if connector.order is Order.PROBE and (response := await probe(means, call, paired, tried)) is not None:
            return response
        await prefill(means, call, paired)
        return await decode(means, call, paired, tried)

    @staticmethod
    def _let_go_of_lease(call: Call) -> None:
        if call.lease is not None:
            call.lease.release()
            call.lease = None

    def gone(self, paired: Paired) -> None:
        """Its client has left."""
        if paired.state is not State.DONE:
            self.means.told.parted(paired.state.value)
            paired.part()

    def unnamed(self, call: Call) -> list[Backend] | None:
        """All prefill backends but those that the request names; None where it names none. Raises Refusal."""
        assert call.request.head is not None
        backends, engines = self.means.fleet.of("prefill", call).backends, self.means.fleet.engines
        wanted = named(call.request.head.fields, [engines[backend.name] for backend in backends])
        return None if wanted is None else [backend for backend in backends if backend.name not in wanted]

    def _can_serve(self, call: Call) -> bool:
        fleet = self.means.fleet
        return fleet.serves_whole(call) or all(fleet.of(role, call).asked for role in ("prefill", "decode"))

    def _bypass(self, call: Call, asked: Asked, settings: PairSettings) -> str | None:
        """Why one backend is to serve it alone. Raises Refusal."""
        fleet = self.means.fleet
        if fleet.serves_whole(call) and not all(fleet.of(role, call).routable for role in ("prefill", "decode")):
            return "no_pair"  # and what its connector cannot hand over is no matter
        bypass = settings.connector.judge(asked)
        if bypass is not None:
            return bypass.value
        if settings.connector.serves_alone and len(asked.body.octets) < settings.min_prompt_bytes:
            return "short"
        return None

    # QUEUED -----------------------------------------------------------------------------------------------------------

    async def _in_turn(self, call: Call, head: RequestHead, asked: Asked, settings: PairSettings, tried: Tried) -> Paired:
        """As `begin`, when there is room for it. Raises Refusal."""
        taken: list[Paired | Refusal] = []
        await self._turns.wait(call, head, tried, lambda: taken.append(self._taken(call, asked, settings, tried)))
        call.exchange.selected = time.monotonic()
        (found,) = taken
        if isinstance(found, Refusal):
            raise found
        return found

    async def _following(self, call: Call, head: RequestHead, before: Paired, failed: LegFailed, tried: Tried) -> Paired | None:
        """The next attempt, when there is room for it, after one that then has given back all that it had. None: there was
        none within the time that the queue gives. Raises Refusal."""
        asked, settings = before.asked, before.settings
        self._over(call, before, failed)
        taken: list[Paired | Refusal] = []
        if self._turns.is_full(call, tried):
            await self._turns.once_more(call, head, tried, lambda: taken.append(self._taken(call, asked, settings, tried)))
        else:
            taken.append(self._taken(call, asked, settings, tried))
        if not taken or isinstance(taken[0], Refusal):
            return None
        self.means.observer.retried(call.exchange, failed.word)
        return taken[0]

    def _taken(self, call: Call, asked: Asked, settings: PairSettings, tried: Tried) -> Paired | Refusal:
        """As `begin`, for a turn that has come."""
        try:
            return self.begin(call, asked, settings, tried)
        except Refusal as refusal:
            return refusal

    def begin(self, call: Call, asked: Asked, settings: PairSettings, tried: Tried) -> Paired:
        """An attempt with a backend of each role that it needs leased. Raises Refusal."""
        fleet, exchange, tokens = self.means.fleet, call.exchange, min(asked.tokens, TOKENS_MOST)
        paired = Paired(call, asked, settings, self.releases, tokens)
        attempt = f"{random.getrandbits(128):032x}"
        if "encode" in tried:
            paired.encoder = first_leg(self.means, call, tried["encode"])
        if "both" in tried:
            fleet.pick_whole(call)
            call.lease = call.lease or fleet.pick(call)
            call.paired, paired.pair = paired, _ALONE._replace(attempt=attempt)
            return paired
        prefill = fleet.pick_of("prefill", call, paired.prefill, tried["prefill"], tokens)
        if prefill is None:
            paired.end()
            raise nobody("prefill", fleet.of("prefill", call))
        # another decode backend than the one that failed, if there is one: it may be that it did by this very pair
        decode = self._trusted(call, prefill.backend, tried["decode"])
        decode = decode or fleet.pick_of("decode", call, call, tried["decode"]) or fleet.pick_of("decode", call, call)
        if decode is None:
            paired.end()
            raise nobody("decode", fleet.of("decode", call))
        engines = fleet.engines
        one, other = engines[prefill.backend.name], engines[decode.backend.name]
        if settings.connector.needs and (why := _unusable(settings.connector, one, other)):
            paired.end()
            decode.release()
            call.lease = None
            raise Refusal("no_backend", why, retry_after=5)
        call.paired, call.others = paired, (paired.prefill,)
        exchange.backend, exchange.prefill_backend = decode.backend.name, prefill.backend.name
        paired.prefill.exchange.backend = prefill.backend.name
        ranks = min(one.dp_size, other.dp_size)
        rank = random.randrange(ranks) if settings.connector.ranked and ranks > 1 else 0
        paired.pair = Pair(
            attempt,
            one,
            other,
            room=random.getrandbits(63),
            rank=rank,
            callback=settings.callback,
            conversation=paired.conversation,
            now=time.monotonic(),
            capped=self._learning.capped(one.name),
        )
        return paired

    def _trusted(self, call: Call, prefill: Backend, tried: list[Backend]) -> Lease | None:
        """A decode backend to which KV gets from this one, where there is some to which it does not."""
        fleet, avoided = self.means.fleet, self.means.mistrust.avoided(prefill.name, time.monotonic())
        if not avoided:
            return None
        shunned = [backend for backend in fleet.of("decode", call).backends if backend.name in avoided]
        return fleet.pick_of("decode", call, call, [*tried, *shunned])

    def end(self, call: Call, paired: Paired) -> None:
        """Of an attempt that failed."""
        paired.give_up()
        paired.end()
        call.let_go()
        lease, call.lease = call.lease, None
        if lease is not None:
            lease.release()
        self.means.admission.wake()

    async def _learn(self, call: Call, paired: Paired) -> None:
        pair, lease = paired.pair, paired.prefill.lease
        assert pair is not None and lease is not None
        try:
            engine = await self._learning.of(call, paired.settings.connector, pair.prefill)
        except Refusal as failure:
            self.means.blame(paired.prefill.exchange, lease.backend, failure)
            raise LegFailed("prefill", lease.backend, failure) from None
        paired.pair = pair._replace(prefill=engine, rank=random.choice(list(engine.engine_ids)))

    async def _aside(self, call: Call, paired: Paired, tried: list[Backend]) -> ResponseHead:
        """One leg: the sidecar before decode asks prefill, which is leased until decode has begun."""
        assert paired.pair is not None
        paired.become(State.PREFILLING)
        request = paired.settings.connector.decode(paired.asked, paired.pair)
        paired.become(State.DECODE_WAIT)
        try:
            return await decode(self.means, call, paired, tried, request)
        finally:
            paired.prefill.end()


def _unusable(connector: Connector, prefill: Engine, decode: Engine) -> str | None:
    """What the connector must know of one of them, and nobody has said: its setting came after the backend (a reload)."""
    for engine, role in ((prefill, "prefill"), (decode, "decode")):
        if lacks := missing(engine, type(connector), role):
            return f"connector {connector.name} cannot use the {role} backend {engine.name}: {', '.join(lacks)} not set"
    return None
