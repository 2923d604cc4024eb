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

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from gateway.core.admission import Admission
from gateway.core.backend import Backend
from gateway.core.disagg.asked import Asked
from gateway.core.disagg.base import Engine, Handoff, HandoffMissing, Order, Pair, TransferFailed
from gateway.core.disagg.base import Leg as Request
from gateway.core.disagg.budget import Budget
from gateway.core.disagg.layerwise import Rendezvous, posted, unknown
from gateway.core.disagg.parting import State
from gateway.core.disagg.signs import Sign
from gateway.core.exchange import Exchange, Observer
from gateway.core.head import RequestHead, ResponseHead
from gateway.core.headers import is_event_stream
from gateway.core.load import TOKENS_MOST
from gateway.core.outcome import Outcome, Phase
from gateway.core.pool import Pool
from gateway.core.retry import Retries
from gateway.core.routing import Route
from gateway.errors import EngineRefused, Refusal, UpstreamFailed
from gateway.net import body
from gateway.net.attempts import Attempts
from gateway.net.call import Call, Upload
from gateway.net.fetch import Page
from gateway.net.fleet import Fleet
from gateway.net.hold import Hold
from gateway.net.learning import Learning
from gateway.net.legs import Leg
from gateway.net.opening import Opening
from gateway.net.paired import Paired, PairObserver, PairSettings
from gateway.net.releases import Releases
from gateway.net.tasks import Tasks
from gateway.net.upstream import Connection, ConnectionPool
from gateway.net.watch import Watch

T = TypeVar("T")

ANSWER_MOST = 64 << 20  # octets of prefill's answer: with prompt_logprobs it is large
_ALONE = Pair("", Engine("", "", 0), Engine("", "", 0))
_AGAIN = frozenset((408, 429, 500, 502, 503, 504))  # statuses of a leg for which another attempt is made
FALLBACK_FIELD = b"X-Gateway-Prefill: local\r\n"


class _LegFailed(Exception):
    """One leg of an attempt did. `response`: the error that it answered with, which may be relayed; else `cause` says what."""

    def __init__(self, side: str, backend: Backend, cause: Refusal | None = None, response: ResponseHead | None = None):
        super().__init__(side)
        self.side, self.backend, self.cause, self.response = side, backend, cause, response

    @property
    def word(self) -> str:
        return self.cause.code if self.cause is not None else f"{self.side}_status"

    @property
    def again(self) -> bool:
        """Whether another attempt may be made."""
        if self.response is not None:
            return self.response.status in _AGAIN
        return self.cause is not None and self.cause.code not in ("timeout_first_byte", "overloaded")


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
    ):
        self._fleet, self._admission, self._retries, self._observer, self._told = fleet, admission, retries, observer, told
        self._attempts, self._watch, self._tasks = attempts, watch, tasks
        self._learning = Learning()
        self._callbacks: dict[str, tuple[Rendezvous, asyncio.Future[bytes]]] = {}  # that are awaited, by the attempt's id
        self.releases = Releases(tasks, told.released, told.stranded)

    def closed(self, paired: Paired) -> None:
        """Its exchange is over, however it went."""
        meter = paired.call.exchange.meter
        if meter is not None and meter.recomputed:
            self._told.recomputed()
        paired.part()

    def or_one(self, settings: PairSettings, head: RequestHead, route: Route) -> Pairs | Attempts:
        """Who sees to a request: two backends, or one as ever."""
        return self if route.path in settings.paths and head.method == b"POST" and not route.loopback else self._attempts

    async def response(self, call: Call, head: RequestHead, route: Route, upload: Upload) -> ResponseHead:
        """As `Attempts.response`, whose part it takes. Raises Refusal."""
        settings = call.policy.pairs
        assert settings is not None
        fleet = self._fleet
        while not self._can_serve(call) and call.aim is not None and call.aim.go_on(call):
            pass  # an alias' next model
        asked = Asked(route.path, upload.held)
        bypass = self._bypass(call, asked, settings)
        if bypass is not None:
            self._told.bypassed(bypass)
            fleet.pick_whole(call)
            octets = settings.connector.alone(asked, _ALONE).body
            return await self._attempts.response(call, head, route, Upload(octets, len(octets)))
        if call.lease is not None:  # of the queue's, which knows of no legs
            call.lease.release()
            call.lease = None
        self._retries.request()
        tried: dict[str, list[Backend]] = {"prefill": [], "decode": []}
        while True:
            paired = self._begin(call, asked, settings, tried)
            call.exchange.attempts += 1
            try:
                if settings.connector.learns:
                    await self._learn(call, paired)
                if settings.connector.order is Order.CONCURRENT:
                    return await self._both(call, paired, tried["decode"], self._prefill(call, paired))
                if settings.connector.order is Order.DECODE_FIRST:
                    return await self._both(call, paired, tried["decode"], self._called(call, paired))
                if settings.connector.order is Order.SIDECAR:
                    return await self._aside(call, paired, tried["decode"])
                await self._prefill(call, paired)
                return await self._decode(call, paired, tried["decode"])
            except _LegFailed as failed:
                if not self._again(call, paired, failed, tried):
                    return await self._last(call, paired, failed)
                self._observer.retried(call.exchange, failed.word)
                if paired.pair is not None:
                    self._learning.forget(paired.pair.prefill)
                self._end(call, paired)

    def gone(self, paired: Paired) -> None:
        """Its client has left."""
        if paired.state is not State.DONE:
            self._told.parted(paired.state.value)
            paired.part()

    def _can_serve(self, call: Call) -> bool:
        fleet = self._fleet
        return fleet.serves_whole(call) or all(fleet.of(role, call).routable for role in ("prefill", "decode"))

    def _bypass(self, call: Call, asked: Asked, settings: PairSettings) -> str | None:
        """Why one backend is to serve it alone. Raises Refusal."""
        bypass = settings.connector.judge(asked)
        if bypass is not None:
            return bypass.value
        if settings.connector.serves_alone and len(asked.body.octets) < settings.min_prompt_bytes:
            return "short"
        fleet = self._fleet
        if not all(fleet.of(role, call).routable for role in ("prefill", "decode")) and fleet.serves_whole(call):
            return "no_pair"
        return None

    # QUEUED -----------------------------------------------------------------------------------------------------------

    def _begin(self, call: Call, asked: Asked, settings: PairSettings, tried: dict[str, list[Backend]]) -> Paired:
        """An attempt with both of its backends leased. Raises Refusal."""
        fleet, exchange, tokens = self._fleet, call.exchange, min(asked.tokens, TOKENS_MOST)
        paired = Paired(call, asked, settings, self.releases, tokens)
        prefill = fleet.pick_of("prefill", call, paired.prefill, tried["prefill"], tokens)
        if prefill is None:
            raise _nobody("prefill", fleet.of("prefill", call))
        # another decode backend than the one that failed, if there is one: it may be that it did by this very pair
        decode = fleet.pick_of("decode", call, call, tried["decode"]) or fleet.pick_of("decode", call, call)
        if decode is None:
            paired.end()
            raise _nobody("decode", fleet.of("decode", call))
        call.paired, call.others = paired, (paired.prefill,)
        exchange.backend, exchange.prefill_backend = decode.backend.name, prefill.backend.name
        paired.prefill.exchange.backend = prefill.backend.name
        engines = fleet.engines
        one, other = engines[prefill.backend.name], engines[decode.backend.name]
        ranks = min(one.dp_size, other.dp_size)
        rank = random.randrange(ranks) if settings.connector.ranked and ranks > 1 else 0
        paired.pair = Pair(
            f"{random.getrandbits(128):032x}",
            one,
            other,
            room=random.getrandbits(63),
            rank=rank,
            callback=settings.callback,
            capped=self._learning.capped(one.name),
        )
        return paired

    def _end(self, call: Call, paired: Paired) -> None:
        """Of an attempt that failed."""
        paired.give_up()
        paired.end()
        call.let_go()
        lease, call.lease = call.lease, None
        if lease is not None:
            lease.release()
        self._admission.wake()

    # both at once, and one for two ------------------------------------------------------------------------------------

    async def _both(
        self, call: Call, paired: Paired, tried: list[Backend], prefilling: Coroutine[Any, Any, None]
    ) -> ResponseHead:
        """Both legs together, as neither engine gets on without the other. The first one that fails ends the other; decode's
        first octet proves the transfer, and what prefill says then is read beside the stream, never before it."""
        prefill: asyncio.Task[Exception | None] = self._tasks.spawn(_outcome(prefilling), "prefill leg")
        decode: asyncio.Task[ResponseHead | Exception] = self._tasks.spawn(
            _outcome(self._decode(call, paired, tried)), "decode leg"
        )
        paired.tasks = (prefill, decode)
        try:
            await asyncio.wait((prefill, decode), return_when=asyncio.FIRST_COMPLETED)
            if not decode.done() and (failed := prefill.result()) is None:
                await asyncio.wait((decode,))
            elif not decode.done():
                assert isinstance(failed, Exception)
                raise failed
            outcome = decode.result()
        finally:
            if not decode.done():
                decode.cancel()
                call.drop()
                await asyncio.wait((decode,))
        if isinstance(outcome, Exception):
            if prefill.done() and isinstance(first := prefill.result(), Exception):
                raise first  # decode's failure is what prefill's brought
            raise outcome
        if not 200 <= outcome.status < 300:
            paired.prefill.end()
            prefill.cancel()
        return outcome

    async def _called(self, call: Call, paired: Paired) -> None:
        """Prefill's leg, once decode has asked for it: exactly one request, when all of its callbacks have come."""
        assert paired.pair is not None
        name = paired.pair.attempt
        complete: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._callbacks[name] = (Rendezvous(paired.asked, paired.pair), complete)
        try:
            await self._prefill(call, paired, await complete)
        finally:
            del self._callbacks[name]

    def called_back(self, octets: bytes) -> None:
        """A decode engine asks for its prefill. Raises Refusal: it is not one of ours, or not awaited (any more)."""
        callback = posted(octets)
        if callback.attempt not in self._callbacks:
            raise unknown(callback.child)
        rendezvous, complete = self._callbacks[callback.attempt]
        if rendezvous.take(callback) and not complete.done():
            complete.set_result(rendezvous.params())

    async def _learn(self, call: Call, paired: Paired) -> None:
        pair, lease = paired.pair, paired.prefill.lease
        assert pair is not None and lease is not None
        try:
            engine = await self._learning.of(call, paired.settings.connector, pair.prefill)
        except Refusal as failure:
            self._blame(paired.prefill.exchange, lease.backend, failure)
            raise _LegFailed("prefill", lease.backend, failure) from None
        paired.pair = pair._replace(prefill=engine, rank=random.choice(list(engine.engine_ids)))

    async def _aside(self, call: Call, paired: Paired, tried: list[Backend]) -> ResponseHead:
        """One leg: the sidecar before decode asks prefill, which is leased until decode has begun."""
        assert paired.pair is not None
        paired.become(State.PREFILLING)
        request = paired.settings.connector.decode(paired.asked, paired.pair)
        paired.become(State.DECODE_WAIT)
        try:
            return await self._decode(call, paired, tried, request)
        finally:
            paired.prefill.end()

    # PREFILLING -------------------------------------------------------------------------------------------------------

    async def _prefill(self, call: Call, paired: Paired, given: bytes = b"") -> None:
        leg, exchange, settings = paired.prefill, call.exchange, paired.settings
        assert leg.lease is not None and leg.connections is not None and paired.pair is not None
        backend, connector = leg.lease.backend, settings.connector
        if paired.state is State.QUEUED:
            paired.become(State.PREFILLING)
            exchange.phase, exchange.connect_began = Phase.PREFILL, time.monotonic()
        request = _asked_of(backend, connector.prefill, paired, given)
        seconds = settings.prefill_timeout or call.policy.timeouts.first_byte
        key = "disaggregation.prefill_timeout" if settings.prefill_timeout else "timeouts.first_byte"
        try:
            response = await body.timed(
                call,
                self._ask_prefill(call, paired, request, leg.connections),
                seconds,
                "timeout_first_byte",
                f"the prefill leg: the backend {backend.name} gave no answer within {seconds:g} s ({key})",
            )
        except Refusal as failure:
            leg.drop()
            self._blame(leg.exchange, backend, failure)
            raise _LegFailed("prefill", backend, failure) from None
        if response is not None:
            if response.status in _AGAIN:
                backend.answered(response.status, time.monotonic())
            raise _LegFailed("prefill", backend, response=response)

    async def _ask_prefill(
        self, call: Call, paired: Paired, request: Request, connections: ConnectionPool
    ) -> ResponseHead | None:
        """None: its answer has been taken. Else the head of an error, whose body is still to come. Raises Refusal."""
        leg, settings = paired.prefill, paired.settings
        assert leg.lease is not None and paired.pair is not None
        octets = paired.octets(request, connections.origin, prefill=True)
        connection, response = await self._sent(call, leg, connections, octets)
        if response.status >= 400:
            return response
        if response.status != 200:  # no answer for a client: it has neither an error nor what decode needs
            name = leg.lease.backend.name
            raise HandoffMissing(
                f"the prefill engine {name} answered with {response.status}, expected 200 and kv_transfer_params"
            )
        page = Page(connection, response)
        answer = await page.whole(ANSWER_MOST)
        paired.answered = time.monotonic()
        if page.clean:
            connection.give_back()
        else:
            connection.drop()
        leg.connection = None
        backend = leg.lease.backend
        backend.answered(200, paired.answered)
        assert leg.exchange.sent is not None
        self._told.prefilled(call.exchange, settings.connector.name, paired.answered - leg.exchange.sent)
        serial = settings.connector.order is Order.SERIAL
        if serial:
            paired.handoff = settings.connector.accept(paired.asked, paired.pair, answer)
        if settings.hold and paired.state in (State.PREFILLING, State.DECODE_WAIT):
            paired.holding = backend.hold(paired.tokens)
        if serial:
            paired.become(State.HANDOFF)
        leg.end()
        call.others = ()
        return None

    async def _sent(self, call: Call, leg: Leg, connections: ConnectionPool, octets: bytes) -> tuple[Connection, ResponseHead]:
        """A request that may be sent twice: on a kept connection, and if that proves stale on a fresh one. Raises Refusal."""
        marks, fresh = leg.exchange, False
        while True:
            connection = leg.connection = await self._connection(call, connections, fresh=fresh)
            marks.sent = marks.connected = call.exchange.connected = time.monotonic()
            try:
                response = await connection.send(octets, b"POST")
            except UpstreamFailed as failure:
                if fresh or failure.code != "stale_connection":
                    raise
                fresh = True
                continue
            marks.head_received = time.monotonic()
            return connection, response

    async def _connection(self, call: Call, connections: ConnectionPool, *, fresh: bool = False) -> Connection:
        connection = None if fresh else connections.take()
        self._observer.connection(connections.origin.name, reused=connection is not None)
        return connection or await self._attempts.connect(call, connections, call.policy.timeouts.connect)

    # HANDOFF, DECODE_WAIT ---------------------------------------------------------------------------------------------

    async def _decode(self, call: Call, paired: Paired, tried: list[Backend], request: Request | None = None) -> ResponseHead:
        """Decode's head, once its body has begun. `request`: instead of one that fetches what prefill holds."""
        exchange, settings = call.exchange, paired.settings
        connection = await self._reach_decode(call, paired, tried)
        assert call.connections is not None and call.lease is not None and paired.pair is not None
        backend, name = call.lease.backend, settings.connector.name
        now = time.monotonic()
        if request is None:
            if paired.holding is not None and Budget(settings.hold, paired.answered).dead(now):
                raise _LegFailed("decode", backend, TransferFailed("what prefill held was too old to be handed over"))
            request = _asked_of(backend, settings.connector.decode, paired, paired.handoff or Handoff())
            if paired.handoff is not None:
                self._told.handed_over(exchange, name, now - paired.answered)
            if paired.state is State.QUEUED:
                paired.become(State.PREFILLING)
            paired.become(State.DECODE_WAIT)
        call.connection = connection
        exchange.phase = Phase.WAIT
        paired.sent = exchange.sent = now
        answer = paired.answer = connection.send(paired.octets(request, call.connections.origin), b"POST")
        answer.add_done_callback(_heard)
        self._watch.begin(call, now)
        try:
            response = await asyncio.shield(answer)
            exchange.head_received = time.monotonic()
            if 200 <= response.status < 300:
                await self._begun(call, paired, connection, response)
        except UpstreamFailed as failure:
            self._blame(call.exchange, backend, failure)
            raise _LegFailed("decode", backend, _of_leg("decode", failure)) from None
        if response.status in _AGAIN:
            backend.answered(response.status, time.monotonic())
            raise _LegFailed("decode", backend, response=response)
        now = time.monotonic()
        if 200 <= response.status < 300:
            self._told.decoding(exchange, name, now - paired.sent)
            if paired.holding is not None:
                self._told.held(name, now - paired.answered)
        elif not settings.notifies:
            paired.give_up()
        paired.fetched()
        if paired.state is State.DECODE_WAIT:
            paired.become(State.STREAMING)
        return response

    async def _reach_decode(self, call: Call, paired: Paired, tried: list[Backend]) -> Connection:
        """A connection to the decode backend, or to another one where it takes none: nothing has been sent yet, so that what
        prefill holds can go there instead."""
        while True:
            assert call.connections is not None and call.lease is not None and paired.pair is not None
            backend = call.lease.backend
            try:
                return await self._connection(call, call.connections)
            except UpstreamFailed as failure:
                self._blame(call.exchange, backend, failure)
                tried.append(backend)
                failed = _LegFailed("decode", backend, _of_leg("decode", failure))
            before, connections = call.lease, call.connections
            if not paired.settings.connector.reusable or self._fleet.pick_of("decode", call, call, tried) is None:
                raise failed
            if not self._retries.another(call.exchange.attempts):
                call.lease.release()
                call.lease, call.connections = before, connections
                raise failed
            before.release()
            call.exchange.attempts += 1
            self._observer.retried(call.exchange, failed.word)
            name = call.exchange.backend = call.lease.backend.name
            paired.pair = paired.pair._replace(decode=self._fleet.engines[name])

    async def _begun(self, call: Call, paired: Paired, connection: Connection, response: ResponseHead) -> None:
        """Wait for the first octet of decode's body. Raises UpstreamFailed, _LegFailed, EngineRefused."""
        hold = call.policy.hold and is_event_stream(response)
        opening = paired.opening = call.hold = (Hold if hold else Opening)(connection, response, call.dialect)
        opening.done.add_done_callback(_heard)
        try:
            error = await asyncio.shield(opening.done)
        finally:
            call.hold = None
        said = error or (opening.data if isinstance(opening, Opening) else b"")
        sign = paired.settings.connector.sign(said, response.status, paired.asked) if said else Sign.NOTHING
        if sign is Sign.FAILED and paired.handoff is not None:
            assert call.lease is not None
            failed = TransferFailed("the decode engine could not take over what the prefill engine had computed")
            raise _LegFailed("decode", call.lease.backend, failed)
        if error is not None:
            paired.end()
            raise EngineRefused(*call.dialect.as_status(error))

    # what went wrong --------------------------------------------------------------------------------------------------

    def _blame(self, exchange: Exchange, backend: Backend, failure: Refusal) -> None:
        """What a leg's failure says of its backend."""
        if failure.code in ("stale_connection", "overloaded") or failure.code not in _BACKENDS:
            return
        backend.failed(time.monotonic())
        self._observer.failed(exchange, failure.code)

    def _again(self, call: Call, paired: Paired, failed: _LegFailed, tried: dict[str, list[Backend]]) -> bool:
        """Whether another attempt is made: with another prefill backend, or after decode failed with a fresh prefill."""
        if not failed.again:
            return False
        if isinstance(failed.cause, HandoffMissing) and failed.cause.early:  # not its fault: it may be asked once more
            self._learning.cap(failed.backend.name)
            return self._retries.another(call.exchange.attempts)
        tried[failed.side].append(failed.backend)
        if failed.side == "prefill" and not _others(self._fleet.of("prefill", call), tried["prefill"]):
            return False
        unreached = failed.cause is not None and failed.cause.code in ("upstream_connect", "timeout_connect")
        if failed.side == "decode" and unreached and not _others(self._fleet.of("decode", call), tried["decode"]):
            return False
        # a kept connection that proved stale says nothing of the engine: no attempt of the operator's
        attempts = call.exchange.attempts - (failed.word == "stale_connection")
        return self._retries.another(attempts)

    async def _last(self, call: Call, paired: Paired, failed: _LegFailed) -> ResponseHead:
        """There is no other attempt: what the client is told. Raises Refusal."""
        response, cause = failed.response, failed.cause
        if failed.side == "prefill":
            if paired.settings.fallback and failed.again:
                return await self._fall_back(call, paired, failed)
            if response is not None:
                return self._relayed(call, paired, response)
        elif response is not None:
            if not paired.settings.notifies or response.status >= 500:  # what broke tells nobody
                paired.give_up()
            paired.fetched()
            if paired.state is State.DECODE_WAIT:
                paired.become(State.STREAMING)
            return response
        assert cause is not None
        paired.give_up()
        paired.end()
        if cause.code in ("upstream_connect", "timeout_connect"):
            outcome = Outcome.UPSTREAM_CONNECT if cause.code == "upstream_connect" else Outcome.TIMEOUT_CONNECT
            raise Refusal("no_backend", f"the {failed.side} leg: {cause.message}", retry_after=1, outcome=outcome)
        raise _of_leg(failed.side, cause)

    def _relayed(self, call: Call, paired: Paired, response: ResponseHead) -> ResponseHead:
        """Prefill's error is the client's answer: its leg becomes the call's."""
        exchange, marks = call.exchange, paired.prefill.exchange
        if call.lease is not None:
            call.lease.release()
        call.become(paired.prefill)
        paired.end()
        exchange.backend, exchange.phase = exchange.prefill_backend, Phase.WAIT
        exchange.sent, exchange.head_received = marks.sent, marks.head_received
        assert marks.sent is not None
        self._watch.begin(call, marks.sent)
        return response

    async def _fall_back(self, call: Call, paired: Paired, failed: _LegFailed) -> ResponseHead:
        """Decode computes the prompt itself, as the operator allows."""
        self._told.fell_back(failed.word)
        paired.end()
        call.receipt = FALLBACK_FIELD
        assert paired.pair is not None
        try:
            return await self._decode(call, paired, [], paired.settings.connector.alone(paired.asked, paired.pair))
        except _LegFailed as again:
            return await self._last(call, paired, again)


def _heard(future: asyncio.Future[Any]) -> None:
    """Its failure is nobody's any more, where whoever waited for it has left: shielded, it outlives them."""
    if not future.cancelled():
        future.exception()


async def _outcome(leg: Coroutine[Any, Any, T]) -> T | Exception:
    """What it returns, or how it failed."""
    try:
        return await leg
    except (_LegFailed, Refusal, EngineRefused) as failure:
        return failure


def _asked_of(backend: Backend, make: Callable[..., Request], paired: Paired, *more: object) -> Request:
    """A leg's request. Raises Refusal where the connector lacks something about the engines."""
    try:
        return make(paired.asked, paired.pair, *more)
    except LookupError as missing:
        raise Refusal("no_backend", f"the connector cannot use this backend: {missing}", retry_after=5) from None


_BACKENDS = frozenset(("upstream_connect", "upstream_reset", "upstream_malformed", "timeout_connect", "timeout_first_byte"))


def _others(pool: Pool, tried: Sequence[Backend]) -> bool:
    return any(backend.routable and backend not in tried for backend in pool.backends)


def _nobody(side: str, pool: Pool) -> Refusal:
    found = pool.nobody()
    return Refusal(found.code, f"the {side} leg: {found.message}", retry_after=found.retry_after)


def _of_leg(side: str, failure: Refusal) -> Refusal:
    """The same, naming the leg."""
    if failure.message.startswith("the ") and side in failure.message.partition(":")[0]:
        return failure
    if isinstance(failure, HandoffMissing | TransferFailed):
        return failure
    return Refusal(failure.code, f"the {side} leg: {failure.message}", retry_after=failure.retry_after, outcome=failure.outcome)
