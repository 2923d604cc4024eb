"""The composition root: the only place that names every part, and puts them together.

`Snapshot` is all that a configuration comes to; `App` is the running process. A reload makes a new snapshot, whole, and
puts it in place of the old one in a single step, so that a request lives by one or by the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import random
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from aiohttp import http_parser, web

from gateway import __version__
from gateway import config as configuration
from gateway.config import Config
from gateway.control import systemd
from gateway.control.admin import admin_app
from gateway.control.disagg import check_member, engine_of, key_of, pair_settings, say_connector
from gateway.control.discovery.owner import Discovery, Followed, failed
from gateway.control.fleet import fleet_routes
from gateway.control.listener import listening
from gateway.control.membership import Entry, Membership, origin_of
from gateway.control.metaserver import PATH, Metaserver
from gateway.control.modelpages import ModelPages
from gateway.control.modelrules import classes_of, hedges, model_rules, second_tries
from gateway.control.operator import Operator
from gateway.control.probes import Probes, ProbeSettings
from gateway.control.reload import member_of_body, membership_settings, server_tls, sources_of, static_members
from gateway.core.admission import Admission
from gateway.core.affinity import Keys
from gateway.core.backend import Backend, HealthSettings
from gateway.core.disagg.base import OWNED_FIELDS
from gateway.core.exchange import Observer
from gateway.core.inspection import Inspector, TokenRules
from gateway.core.members import Member, Place
from gateway.core.models import Models, Way
from gateway.core.outcome import Outcome
from gateway.core.pool import Pool
from gateway.core.retry import Retries, RetrySettings
from gateway.core.routing import Paths
from gateway.errors import ConfigError, Ended, GatewayError
from gateway.net import listen
from gateway.net.call import Policy
from gateway.net.downstream import ClientSettings, Downstream, Server
from gateway.net.fleet import Fleet
from gateway.net.handler import Gateway
from gateway.net.sockets import tune
from gateway.net.tasks import Tasks
from gateway.net.upstream import ConnectionPool, PoolSettings
from gateway.net.watch import Timeouts
from gateway.synthetic.server import SyntheticUpstream
from gateway.synthetic.settings import MockSettings
from gateway.telemetry import logs
from gateway.telemetry.accesslog import AccessLog
from gateway.telemetry.histogram import B_TPOT
from gateway.telemetry.metrics import BackendSample, Metrics, Sources
from gateway.telemetry.observer import Observers
from gateway.telemetry.outlet import Outlet

log = logging.getLogger("gateway")

LAG_INTERVAL = 0.25  # seconds between looks at how late the event loop is
COLLECT_AT = 10_000  # objects made and not freed before the collector looks at them; Python's own 700 cost some percent
YOUNG = 0.25  # seconds in which the first request of a new connection is still expected when the process stops
FIRST_LOOK = 5.0  # seconds that new sources of backends have to say something before the gateway serves, or a reload fails
FIRST_LISTS = 0.5  # seconds that backends have to say which models they serve before the gateway serves
LAST_WORDS = 1.0  # seconds that cut exchanges have to unwind before the process ends


def serve(config: Config, config_path: Path | None, overrides: Mapping[str, object]) -> int:
    """Run until a signal. Returns the exit status."""
    if http_parser.HttpRequestParser.__module__ != "aiohttp._http_parser":
        sys.stderr.write(
            "tokenpipe: aiohttp's C extensions are missing or switched off (AIOHTTP_NO_EXTENSIONS); "
            "install a wheel of aiohttp that has them: pip install --force-reinstall aiohttp\n"
        )
        return 1
    outlet = Outlet(sys.stderr.fileno())
    logs.configure(config.log.level, config.log.format, outlet)
    listen.raise_descriptor_limit()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        status = runner.run(App(config, config_path, overrides, outlet).run())
    outlet.finish(LAST_WORDS)
    return status


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


class App:
    def __init__(self, config: Config, config_path: Path | None, overrides: Mapping[str, object], outlet: Outlet):
        self._outlet = outlet
        self.config, self._config_path, self._overrides = config, config_path, overrides
        self._tasks = Tasks()
        self._stopping = asyncio.Event()
        self._at_once = asyncio.Event()
        self._reloading = asyncio.Lock()
        self._synthetic: SyntheticUpstream | None = None
        self._servers: list[asyncio.Server] = []
        self._queues: list[tuple[socket.socket, ssl.SSLContext | None]] = []
        self._fronts: list[Server] = []
        self._files: list[listen.SocketFile] = []
        self._admin: web.AppRunner | None = None
        self._metaserver: Metaserver | None = None
        self._callback = ""  # its URL
        self._unserved: frozenset[tuple[str, str]] = frozenset()  # that the log has told of

    async def run(self) -> int:
        try:
            await self._start()
        except (GatewayError, OSError) as error:
            sys.stderr.write(f"tokenpipe: {error}\n")
            await self._end()
            return 1
        # What is here now stays; and exchanges leave no cycles behind, so that there is little to be looked for.
        gc.collect()
        gc.freeze()
        gc.set_threshold(COLLECT_AT, 10, 10)
        await self._stopping.wait()
        await self._drain()
        await self._end()
        return 0

    # starting ---------------------------------------------------------------------------------------------------------

    def _soon(self, callback: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(0.05, callback)

    async def _start(self) -> None:
        config = self.config
        self._outlet.later = self._soon
        self.metrics = Metrics(
            Sources(
                known_models=self._known_models,
                live=lambda: self.gateway.exchanges(),
                backends=self._backend_samples,
                queue_depth=lambda: self.gateway.admission.waiting,
                write_buffers=lambda: (client.buffered for client in self._clients()),
            ),
            wall=time.time,
            version=__version__,
            labels=config.metrics.labels,
            max_models=config.metrics.max_models,
        )
        parts: list[Observer] = [self.metrics]
        if config.log.access:
            write = logs.LineWriter(self._outlet)
            self._access_log = AccessLog(write, wall=time.time, form=config.log.format, later=self._soon)
            parts.append(self._access_log)
        observer: Observer = parts[0] if len(parts) == 1 else Observers(*parts)
        sockets = systemd.listen_fds()
        if not sockets:
            for address in config.listen:
                sockets.append(self._bind(address))
        admin_socket = self._bind(config.admin.listen)
        if not config.names_backends or config.loadtest.enabled:
            await self._start_synthetic()
        models = Models(config.balance, config.affinity.load_factor)
        self.probes = Probes(lambda: self.gateway.admission.wake(), self._learn_models)
        self.gateway = Gateway(
            _policy(config),
            Fleet(models, {}, self._loopback() if config.loadtest.enabled else None),
            Admission(config.limits.in_flight, config.limits.queue, time.monotonic),
            Retries(_retry(config)),
            observer,
            self.metrics.pairs,
            B_TPOT,
            ModelPages(models, self.probes, int(time.time())).page,
        )
        await self._start_metaserver(config)
        self.metrics.pairs.inflight = lambda: self.gateway.pairs.releases.busy
        self.membership = Membership(self._put_members)
        self.discovery = Discovery(self.membership.snapshot, random.random)
        self._signals()
        self._configure_members(config, await self.discovery.stage(sources_of(config), FIRST_LOOK))
        await self._first_lists(models)
        await self._listen(sockets, admin_socket)
        self._tasks.start(self._measure_lag(), "event loop lag")
        public = ", ".join(self._public)
        say_connector(config.disaggregation.connector, self._overrides)
        sys.stderr.write(f"listening on {public}, admin on {self._admin_url}\n")
        sys.stderr.flush()
        systemd.notify(f"READY=1\nSTATUS=serving {len(models.whole.backends)} backend(s) on {public}")

    async def _start_synthetic(self) -> None:
        """The embedded synthetic upstream, on a loopback port of its own."""
        mock = self.config.mock
        self._synthetic = SyntheticUpstream(MockSettings(port=0, embedded=True, **msgspec.structs.asdict(mock)))
        url = await self._synthetic.start()
        if not self.config.names_backends:
            sys.stderr.write(
                f"no backend is configured: serving the embedded synthetic upstream ({url}); add --backend URL for a real one\n"
            )

    async def _first_lists(self, models: Models) -> None:
        """Where there are several backends, what each serves is known before the first request, as far as it can be soon."""
        deadline = time.monotonic() + FIRST_LISTS
        while len(models.whole.backends) > 1 and not all(backend.heard_of for backend in models.whole.backends):
            if time.monotonic() > deadline:
                return
            await asyncio.sleep(0.01)

    async def _start_metaserver(self, config: Config) -> None:
        meta = config.disaggregation.metaserver
        if meta.listen is not None:
            sock = self._bind(meta.listen)
            self._callback = (meta.url or listen.url("http", sock)) + PATH
            self._metaserver = Metaserver(self.gateway.pairs.called_back, sock)
            await self._metaserver.start()

    def _configure_members(self, config: Config, staged: Sequence[Followed]) -> None:
        """Raises ConfigError, and then nothing has changed."""
        fallback = None
        if not config.names_backends:
            assert self._synthetic is not None
            fallback = Member("synthetic", Place(self._synthetic.url))
        discovered = {one.source.name: one.snapshot or () for one in staged}
        self.membership.configure(static_members(config), membership_settings(config), discovered, fallback)
        self.discovery.commit(staged)

    def _put_members(self, entries: Collection[Entry]) -> None:
        """A new list of backends, for all who go by it."""
        gateway, config = self.gateway, self.config
        gateway.fleet.apply(
            [e.backend for e in entries],
            {e.member.name: e.connections for e in entries},
            {e.member.name: engine_of(e.member) for e in entries if e.member.role != "both"},
            config.balance,
            config.affinity.load_factor,
            model_rules(config.models, config.limits.priority),
        )
        gateway.policy = self._policy(config)
        gateway.admission.wake()
        self.probes.watch([e.target for e in entries], _probing(self.config))
        self._tell_unserved(gateway.fleet.models)

    def _learn_models(self) -> None:
        """Some backend's list of models has changed."""
        models = self.gateway.fleet.models
        self.gateway.fleet.learn()
        self.gateway.admission.wake()
        self._tell_unserved(models)

    def _tell_unserved(self, models: Models) -> None:
        """A line for each name of the configuration that nobody serves, when that begins."""
        unserved = frozenset(models.unserved())
        for name, model in sorted(unserved - self._unserved):
            log.warning("models.%s asks for %s, which no backend serves; GET /v1/models lists what they do", name, model)
        self._unserved = unserved

    def _loopback(self) -> tuple[Way, dict[str, ConnectionPool]]:
        """The synthetic upstream as a pool of its own, for /loadtest."""
        assert self._synthetic is not None
        one = Member("synthetic", Place(self._synthetic.url))
        pool = ConnectionPool(origin_of(one), PoolSettings(), asyncio.get_running_loop())
        return Way(Pool([Backend(one.name, one.place.url)])), {one.name: pool}

    def _bind(self, address: listen.Place) -> socket.socket:
        sock = listen.bind(address)
        if (file := listen.file_of(sock)) is not None:
            self._files.append(file)
        return sock

    # listening --------------------------------------------------------------------------------------------------------

    async def _listen(self, sockets: list[socket.socket], admin_socket: socket.socket) -> None:
        config, loop = self.config, asyncio.get_running_loop()
        tls = server_tls(config)
        scheme = "https" if tls is not None else "http"
        settings = _client_settings(config)
        handshake = None if tls is None else config.timeouts.request_header
        self._public = []
        self._queues = [(sock.dup(), tls) for sock in sockets]
        for sock in sockets:
            tune(sock)
            front = Server(self.gateway, settings, scheme.encode())
            server = (
                await loop.create_server(front, sock=sock, ssl=tls, ssl_handshake_timeout=handshake, backlog=listen.BACKLOG)
                if sock.family != socket.AF_UNIX
                else await loop.create_unix_server(
                    front, sock=sock, ssl=tls, ssl_handshake_timeout=handshake, backlog=listen.BACKLOG
                )
            )
            self._fronts.append(front)
            self._servers.append(server)
            self._public.append(listen.url(scheme, sock))
        token = config.admin.token_file.reveal() if config.admin.token_file is not None else None
        operator = Operator(
            self.gateway, self.metrics, self.membership, self.reload, lambda: configuration.effective(self.config)
        )
        live, key = self.gateway.live, key_of(self._overrides)
        fleet = fleet_routes(
            self.membership, member_of_body, lambda one: check_member(self.config.disaggregation, one), live, key
        )
        admin = admin_app(operator, token=token, names=(socket.gethostname(),), more=fleet)
        self._admin = await listening(admin, admin_socket)
        self._admin_url = listen.url("http", admin_socket)

    def _signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        loop.add_signal_handler(signal.SIGHUP, lambda: self._tasks.start(self._reload_logged(), "reload"))

    def _stop(self) -> None:
        if self._stopping.is_set():
            self._at_once.set()
        self._stopping.set()

    # stopping ---------------------------------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """No new work; what is under way may finish, until the drain limit or a second signal."""
        gateway = self.gateway
        seconds = self.config.timeouts.drain
        gateway.draining = True
        systemd.notify(f"STOPPING=1\nSTATUS=draining {len(gateway.live)} exchange(s), for at most {seconds:g} s")
        log.info(
            "stopping: %d exchanges under way, %g s for them to end (a second signal ends them at once)",
            len(gateway.live),
            seconds,
        )
        await asyncio.sleep(0)  # what has been accepted already is answered, not reset
        for server in self._servers:
            server.close()
        deadline = time.monotonic() + seconds
        await self._accept_last()
        while time.monotonic() < deadline and not self._at_once.is_set():
            waiting = self._close_idle()
            if not gateway.live and not gateway.pairs.releases.busy and not waiting:
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.02):
                    await self._at_once.wait()
        if gateway.live:
            why = "a second signal" if self._at_once.is_set() else "the drain limit"
            log.warning("%s cuts %d exchanges", why, len(gateway.live))
            gateway.interrupt(Ended(Outcome.DRAINING, "the gateway is shutting down"))
            deadline = time.monotonic() + LAST_WORDS
            while gateway.live and time.monotonic() < deadline:  # noqa: ASYNC110  # the last steps of a process
                await asyncio.sleep(0.01)

    async def _accept_last(self) -> None:
        """Take what the kernel had already accepted: closing the listener itself would reset it.

        All of them together have as long as a new connection's first request is waited for, TLS handshakes included.
        """
        taking = [
            self._tasks.spawn(_take(front, sock, tls), "one of the last connections")
            for front, (queue, tls) in zip(self._fronts, self._queues, strict=True)
            for sock in listen.accept_all(queue)
        ]
        self._queues = []
        if taking:
            await asyncio.wait(taking, timeout=YOUNG)

    def _close_idle(self) -> bool:
        """Close connections without a request. Returns whether there are some so new that theirs may be under way."""
        young = False
        now = time.monotonic()
        for client in self._clients():
            if not client.idle or client.transport is None:
                continue
            if not client.served and now - client.opened < YOUNG:
                young = True
            else:
                client.transport.close()
        return young

    def _clients(self) -> list[Downstream]:
        return [client for front in self._fronts for client in front.clients]

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        if hasattr(self, "discovery"):
            await self.discovery.stop()
        if hasattr(self, "probes"):
            await self.probes.stop()
        if hasattr(self, "gateway"):
            await self.gateway.stop()
            for pool in self.gateway.fleet.connections.values():
                pool.close()
            for entry in self.membership.entries.values():
                entry.target.connections.close()
        await self._part_from_clients()
        if self._admin is not None:
            await self._admin.cleanup()
        if self._metaserver is not None:
            await self._metaserver.stop()
        if self._synthetic is not None:
            await self._synthetic.stop()
        await self._tasks.stop()
        listen.forget(self._files)
        if hasattr(self, "_access_log"):
            self._access_log.flush()
        self._outlet.later = None

    async def _part_from_clients(self) -> None:
        """Close what is left, in order; then at once whatever does not close."""
        for client in self._clients():
            if client.transport is not None:
                client.transport.close()
        deadline = time.monotonic() + LAST_WORDS
        while any(front.clients for front in self._fronts) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for client in self._clients():
            if client.transport is not None:
                client.transport.abort()

    # reloading --------------------------------------------------------------------------------------------------------

    async def reload(self) -> None:
        """Read the configuration anew, and put it in force; or raise ConfigError, and change nothing."""
        async with self._reloading:
            staged: list[Followed] = []
            try:
                config = await asyncio.to_thread(configuration.load, self._config_path, self._overrides)
                self._refuse_what_needs_a_restart(config)
                staged = await self.discovery.stage(sources_of(config), FIRST_LOOK)
                if (why := failed(staged)) is not None:
                    raise ConfigError(f"{why}; nothing has been changed")
                self._put_in_force(config, staged)
            except ConfigError:
                self.discovery.abandon(staged)
                self.metrics.reloaded(success=False)
                raise
            self.metrics.reloaded(success=True)

    def _refuse_what_needs_a_restart(self, config: Config) -> None:
        old = self.config
        fixed = {
            "listen": (old.listen, config.listen),
            "admin": (old.admin, config.admin),
            "tls": (old.tls, config.tls),
            "loadtest": (old.loadtest, config.loadtest),
            "mock": (old.mock, config.mock),
            "metrics": (old.metrics, config.metrics),
            "log.access": (old.log.access, config.log.access),
            "disaggregation.metaserver": (old.disaggregation.metaserver, config.disaggregation.metaserver),
            "log.format": (old.log.format, config.log.format),
        }
        changed = [key for key, (before, now) in fixed.items() if before != now]
        if not config.names_backends and old.names_backends:
            changed.append("backends (to none)")
        if changed:
            raise ConfigError(f"{', '.join(changed)}: cannot be changed without a restart; nothing has been changed")

    def _put_in_force(self, config: Config, staged: Sequence[Followed]) -> None:
        """In one step. Raises ConfigError, and then nothing has changed."""
        gateway, before = self.gateway, self.config
        self.config = config
        try:
            self._configure_members(config, staged)
        except ConfigError:
            self.config = before
            raise
        gateway.policy = self._policy(config)
        gateway.retries.settings = _retry(config)
        gateway.admission.limit, gateway.admission.queue_limit = config.limits.in_flight, config.limits.queue
        for front in self._fronts:
            front.settings = _client_settings(config)
        logging.getLogger().setLevel(config.log.level.upper())
        gateway.admission.wake()
        log.info("the configuration has been read again and is in force")

    async def _reload_logged(self) -> None:
        systemd.notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            await self.reload()
        except ConfigError as error:
            log.error("the configuration is refused, and the old one goes on: %s", error)
        systemd.notify("READY=1")

    # small things -----------------------------------------------------------------------------------------------------

    def _known_models(self) -> frozenset[str]:
        leaving = {model for entry in self.membership.leaving for model in entry.backend.models or ()}
        return self.gateway.fleet.models.names | leaving

    def _policy(self, config: Config) -> Policy:
        """What the operator decided, for the backends that there are."""
        policy = _policy(config)
        if not self.gateway.fleet.disaggregated:
            return policy
        return dataclasses.replace(
            policy, pairs=pair_settings(config.disaggregation, self._callback), without=OWNED_FIELDS, looks=True
        )

    def _backend_samples(self) -> Iterable[BackendSample]:
        """One a name: what drains is added to the backend that has its name now, if there is one."""
        now, samples = time.monotonic(), dict[str, BackendSample]()
        for entry in self.membership.everyone:
            b, size = entry.backend, entry.connections.size
            other = samples.get(b.name)
            if other is None:
                samples[b.name] = BackendSample(b.name, b.routable, b.state_at(now), b.in_flight, size, b.panics)
            else:
                samples[b.name] = other._replace(
                    in_flight=other.in_flight + b.in_flight,
                    connections=other.connections + size,
                    panics=other.panics + b.panics,
                )
        return samples.values()

    async def _measure_lag(self) -> None:
        while True:
            asked = time.monotonic()
            await asyncio.sleep(LAG_INTERVAL)
            self.metrics.loop_lag(max(time.monotonic() - asked - LAG_INTERVAL, 0.0))


async def _take(front: Server, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
    with contextlib.suppress(OSError):  # it left, or its handshake failed: its own affair
        await asyncio.get_running_loop().connect_accepted_socket(front, sock, ssl=tls)


# from the configuration to each part's own settings -------------------------------------------------------------------


def _policy(config: Config) -> Policy:
    limits, timeouts, fields = config.limits, config.timeouts, config.fields
    rules = {name: getattr(fields, name) for name in ("kv_transfer_params", "ec_transfer_params", "bootstrap_room")}
    watched = {name: rule for name, rule in rules.items() if rule != "pass"}
    tokens = TokenRules(limits.max_tokens.default, limits.max_tokens.cap, limits.max_tokens.over == "reject")
    deadlines = Timeouts(
        timeouts.request_body,
        timeouts.queue,
        timeouts.connect,
        timeouts.first_byte,
        timeouts.idle,
        timeouts.client_write,
        timeouts.progress,
        timeouts.total,
    )
    comment = config.keepalive_comment.interval
    return Policy(
        paths=Paths(config.paths.allow, config.paths.deny, config.loadtest.enabled),
        inspector=Inspector(watched, tokens, config.usage == "inject"),
        timeouts=deadlines,
        request_body=limits.request_body,
        forwarded=config.headers.forwarded,
        error_events=config.on_truncation == "error_event",
        hold=config.commit == "first_event",
        receipt=config.headers.receipt,
        comment=comment,
        coalesce=(config.coalesce.delay, config.coalesce.bytes) if config.coalesce.delay is not None else None,
        classes=classes_of(config.limits.priority),
        step=deadlines.shortest(comment),
        hedges=hedges(config.models) or None,
        migrations={name: m.migrate.attempts for name, m in config.models.items() if m.migrate is not None} or None,
        renamed=frozenset(name for name, model in config.models.items() if model.rewrite_response),
        keys=Keys(config.affinity.by, config.affinity.header) if config.balance == "affinity" else None,
        looks=bool(watched) or second_tries(config.models) or tokens != TokenRules() or config.usage == "inject",
    )


def _client_settings(config: Config) -> ClientSettings:
    return ClientSettings(
        config.limits.request_head,
        config.timeouts.request_header,
        config.timeouts.keepalive,
        config.limits.write_buffer,
    )


def _retry(config: Config) -> RetrySettings:
    retry = config.retry
    return RetrySettings(retry.attempts, retry.budget, retry.replay_stale, frozenset(retry.statuses))


def _probing(config: Config) -> ProbeSettings:
    health = config.health
    return ProbeSettings(
        health.path,
        health.interval,
        health.timeout,
        config.discovery.interval,
        HealthSettings(health.fail, health.pass_, health.panic),
        config.balance != "round_robin",
    )
