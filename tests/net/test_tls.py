"""The TLS transport of backends, on both event loops, against peers that end in every way there is."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import hashlib
import os
import random
import shutil
import socket
import ssl
import struct
import subprocess
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import pytest
import uvloop

from gateway.errors import UpstreamFailed
from gateway.net import sockets
from gateway.net.tls import Quiet, TlsTransport, open_tls
from gateway.net.upstream import ConnectionPool, Origin, PoolSettings
from tests.support.tls import Certificates

T = TypeVar("T")
VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
RESET = struct.pack("ii", 1, 0)


class Peer:
    """The server's end of one connection, with blocking calls, in a thread of its own."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext):
        self.sock = sock
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._in, self._out, server_side=True)

    def _turn(self, step: Callable[[], T]) -> T:
        while True:
            try:
                result = step()
            except ssl.SSLWantReadError:
                self.flush()
                data = self.sock.recv(65536)
                if not data:
                    raise EOFError from None
                self._in.write(data)
            except ssl.SSLError:
                self.flush()  # the alert
                raise
            else:
                self.flush()
                return result

    def flush(self) -> None:
        if self._out.pending:
            self.sock.sendall(self._out.read())

    def shake_hands(self) -> None:
        self._turn(self.tls.do_handshake)

    def recv(self) -> bytes:
        try:
            return self._turn(functools.partial(self.tls.read, 65536))
        except EOFError:
            return b"FIN"
        except ssl.SSLZeroReturnError:  # how Python says it where close_notify has been sent too
            return b""

    def send(self, data: bytes, record: int = 16384) -> None:
        for start in range(0, len(data), record):
            self.tls.write(data[start : start + record])
            if self._out.pending > 100_000:
                self.flush()
        self.flush()

    def close_notify(self) -> None:
        with contextlib.suppress(ssl.SSLError):
            self.tls.unwrap()
        self.flush()

    def reset(self) -> None:
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.sock.close()


class Server:
    """Hands each connection to `script`; with `context` after the handshake."""

    def __init__(self, context: ssl.SSLContext | None, script: Callable[[Peer], None]):
        self._context, self._script = context, script
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.failure: BaseException | None = None

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.join(20)
        self._listener.close()
        assert not self._thread.is_alive(), "the server's script is still running"
        if self.failure is not None and error == (None, None, None):
            raise self.failure

    def _run(self) -> None:
        sock, _ = self._listener.accept()
        sock.settimeout(15)
        with sock:
            try:
                if self._context is None:
                    self._script(Peer(sock, ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)))
                else:
                    peer = Peer(sock, self._context)
                    peer.shake_hands()
                    self._script(peer)
            except BaseException as failure:
                self.failure = failure


class Reader(asyncio.Protocol):
    """Keeps what comes, and how it ends. With `seed` it pauses at random, for next to no time or a little longer."""

    def __init__(self, seed: int | None = None):
        self.loop = asyncio.get_running_loop()
        self.random = random.Random(seed) if seed is not None else None
        self.pieces: list[bytes] = []
        self.events: list[Any] = []
        self.got = 0
        self.ended: asyncio.Future[None] = self.loop.create_future()
        self.paused = False
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.write_pauses = 0
        self.on_data: Callable[[bytes], None] = lambda data: None
        self.transport: TlsTransport

    @property
    def data(self) -> bytes:
        return b"".join(self.pieces)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, TlsTransport)
        self.transport = transport
        self.events.append("made")

    def data_received(self, data: bytes) -> None:
        assert "lost" not in self.events and not self.paused, "delivered though paused or ended"
        assert 0 < len(data) <= 65536
        self.pieces.append(data)
        self.got += len(data)
        self.on_data(data)
        if self.random is not None and self.random.random() < 0.3:
            self.pause()
            if self.random.random() < 0.2:
                self.resume()
            else:
                self.loop.call_later(self.random.choice((0, 0, 0.0005, 0.003)), self.resume)

    def pause(self) -> None:
        self.paused = True
        self.transport.pause_reading()

    def resume(self) -> None:
        self.paused = False
        self.transport.resume_reading()

    def eof_received(self) -> None:
        assert not self.paused
        self.events.append("eof")

    def connection_lost(self, exc: Exception | None) -> None:
        self.events += ["lost", exc]
        self.ended.set_result(None)

    def pause_writing(self) -> None:
        self.write_pauses += 1
        self.may_write.clear()

    def resume_writing(self) -> None:
        self.may_write.set()

    async def end(self) -> None:
        await asyncio.wait_for(asyncio.shield(self.ended), 10)


def closed(sock: socket.socket) -> bool:
    """Somebody has called close(), whatever came of it."""
    return bool(sock._closed)  # type: ignore[attr-defined]


async def dial(
    address: tuple[str, int], context: ssl.SSLContext, protocol: asyncio.Protocol, name: str = "127.0.0.1"
) -> TlsTransport:
    loop = asyncio.get_running_loop()
    sock = socket.socket()
    sock.setblocking(False)
    sockets.tune(sock, receive_buffer=65536)
    try:
        await loop.sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    try:
        return await open_tls(loop, sock, context, name, protocol)
    except BaseException:
        assert sock.fileno() == -1 or closed(sock)
        raise


Run = Callable[[Callable[[], Coroutine[Any, Any, T]]], T]


def open_sockets() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
    return count


@pytest.fixture(params=["uvloop", "asyncio"])
def run(request: pytest.FixtureRequest) -> Iterator[Run[Any]]:
    """Runs a coroutine function to its end, and sees to it that it left no socket and no error behind."""
    factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop
    complaints: list[dict[str, Any]] = []

    def run(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.get_loop().set_exception_handler(lambda loop, context: complaints.append(context))
            runner.run(asyncio.sleep(0.001))  # so that the loop has its own
            before = open_sockets()
            result = runner.run(main())
            for _ in range(100):
                if open_sockets() <= before:
                    break
                runner.run(asyncio.sleep(0.01))
            assert open_sockets() <= before, "a socket is left open"
        assert not complaints, complaints
        return result

    yield run


def server_context(certificates: Certificates, version: str = "1.3", **options: bool) -> ssl.SSLContext:
    context = certificates.server_context(**options)
    context.minimum_version = context.maximum_version = VERSIONS[version]
    return context


PAYLOAD = random.Random(4).randbytes(4 << 20)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("notify", [True, False], ids=["close_notify", "FIN"])
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_all_arrives_before_the_end(
    run: Run[None], certificates: Certificates, version: str, notify: bool, seed: int | None
) -> None:
    def script(peer: Peer) -> None:
        assert peer.recv() == b"go"
        peer.send(PAYLOAD)
        if notify:
            peer.close_notify()

    async def main() -> None:
        reader = Reader(seed)
        transport = await dial(server.address, certificates.client_context(), reader)
        transport.write(b"go")
        await reader.end()
        assert reader.data == PAYLOAD, f"{reader.got} octets"
        assert reader.events == (["made", "eof", "lost", None] if notify else ["made", "lost", None])
        assert transport.is_closing()

    with Server(server_context(certificates, version), script) as server:
        run(main)


@pytest.mark.parametrize("notify", [True, False], ids=["close_notify", "FIN"])
def test_the_end_waits_for_a_reader_that_has_paused(run: Run[None], certificates: Certificates, notify: bool) -> None:
    """Each read is answered with a pause: what G026's relay does. The end is long there by then."""

    def script(peer: Peer) -> None:
        peer.send(PAYLOAD[:60_000], record=1000)
        if notify:
            peer.close_notify()

    async def main() -> None:
        reader = Reader()
        reader.on_data = lambda data: reader.pause()
        await dial(server.address, certificates.client_context(), reader)
        while reader.got < 60_000:
            assert "lost" not in reader.events
            await asyncio.sleep(0.005 if reader.got < 3000 else 0)
            if reader.paused and reader.got < 60_000:
                reader.resume()
        await asyncio.sleep(0.02)
        assert reader.events == ["made"]
        reader.resume()
        await reader.end()
        assert reader.data == PAYLOAD[:60_000]
        assert reader.events == (["made", "eof", "lost", None] if notify else ["made", "lost", None])

    with Server(server_context(certificates), script) as server:
        run(main)


def test_close_notify_is_acted_on_without_fin(run: Run[None], certificates: Certificates) -> None:
    def script(peer: Peer) -> None:
        peer.send(b"all")
        peer.close_notify()
        assert peer.recv() == b"", "our close_notify answers it"
        assert peer.sock.recv(1) == b""

    async def main() -> None:
        reader = Reader()
        await dial(server.address, certificates.client_context(), reader)
        await reader.end()
        assert reader.data == b"all" and reader.events == ["made", "eof", "lost", None]

    with Server(server_context(certificates), script) as server:
        run(main)


def test_fin_in_the_midst_of_a_record_is_no_proper_end(run: Run[None], certificates: Certificates) -> None:
    def script(peer: Peer) -> None:
        peer.send(b"one")
        peer.tls.write(b"two")
        peer.sock.sendall(peer._out.read()[:-1])

    async def main() -> None:
        reader = Reader()
        await dial(server.address, certificates.client_context(), reader)
        await reader.end()
        assert reader.data == b"one" and reader.events == ["made", "lost", None]

    with Server(server_context(certificates), script) as server:
        run(main)


@pytest.mark.parametrize("pausing", [False, True], ids=["reading", "paused"])
def test_reset(run: Run[None], certificates: Certificates, pausing: bool) -> None:
    """What had arrived is delivered, and then the error."""
    go = threading.Event()

    def script(peer: Peer) -> None:
        peer.send(PAYLOAD[:60_000])
        go.wait(10)
        peer.reset()

    async def main() -> None:
        reader = Reader()
        if pausing:
            reader.on_data = lambda data: reader.pause()
        transport = await dial(server.address, certificates.client_context(), reader)
        await asyncio.sleep(0.1)  # all has come to the kernel
        go.set()
        held = 0
        if pausing:
            assert 0 < reader.got <= 16384
            await asyncio.sleep(0.1)
            transport.write(b"into the void")  # on some loops this is how the reset is noticed
            await asyncio.sleep(0.05)
            assert "lost" not in reader.events
            reader.on_data = lambda data: None
            held = transport.incoming.pending
            reader.resume()
        await reader.end()
        if pausing:
            assert reader.got > held, "not even what was held is delivered"
            assert PAYLOAD.startswith(reader.data)
        else:
            assert reader.data == PAYLOAD[:60_000]
        assert reader.events[:2] == ["made", "lost"] and isinstance(reader.events[2], ConnectionError)

    with Server(server_context(certificates), script) as server:
        run(main)


def test_reset_that_comes_while_paused(run: Run[None], certificates: Certificates) -> None:
    """Nothing is written meanwhile: then also what the kernel holds is delivered."""
    go = threading.Event()

    def script(peer: Peer) -> None:
        peer.send(PAYLOAD[:60_000])
        go.wait(10)
        peer.reset()

    async def main() -> None:
        reader = Reader(7)
        transport = await dial(server.address, certificates.client_context(), reader)
        transport.pause_reading()
        await asyncio.sleep(0.1)
        go.set()
        await asyncio.sleep(0.1)
        transport.resume_reading()
        await reader.end()
        assert reader.data == PAYLOAD[:60_000]
        assert isinstance(reader.events[-1], ConnectionError)

    with Server(server_context(certificates), script) as server:
        run(main)


def test_broken_tls(run: Run[None], certificates: Certificates) -> None:
    def script(peer: Peer) -> None:
        peer.send(b"sound")
        peer.sock.sendall(b"\x17\x03\x03\x00\x20" + bytes(32) + b"more of it" * 100)
        with contextlib.suppress(OSError):
            while peer.sock.recv(65536):
                pass

    async def main() -> None:
        reader = Reader()
        await dial(server.address, certificates.client_context(), reader)
        await reader.end()
        assert reader.data == b"sound"
        assert reader.events[:2] == ["made", "lost"] and isinstance(reader.events[2], ssl.SSLError)

    with Server(server_context(certificates), script) as server:
        run(main)


# Handshakes that fail ---------------------------------------------------------------------------------------------


def refused(run: Run[None], address: tuple[str, int], context: ssl.SSLContext, name: str = "127.0.0.1") -> Exception:
    failures: list[Exception] = []

    async def main() -> None:
        reader = Reader()
        with pytest.raises(OSError) as caught:
            await asyncio.wait_for(dial(address, context, reader, name), 10)
        assert reader.events == []
        failures.append(caught.value)

    run(main)
    return failures[0]


@pytest.mark.parametrize("version", VERSIONS)
def test_wrong_authority(run: Run[None], certificates: Certificates, version: str) -> None:
    server = Server(server_context(certificates, version), lambda peer: None)
    with contextlib.suppress(ssl.SSLError), server:
        failure = refused(run, server.address, ssl.create_default_context())
    assert isinstance(failure, ssl.SSLCertVerificationError)
    assert "unknown ca" in str(server.failure).lower().replace("_", " "), "the alert came"


def test_wrong_name(run: Run[None], certificates: Certificates) -> None:
    server = Server(server_context(certificates), lambda peer: None)
    with contextlib.suppress(ssl.SSLError, EOFError), server:
        failure = refused(run, server.address, certificates.client_context(), "backend.example")
    assert isinstance(failure, ssl.SSLCertVerificationError)
    assert "backend.example" in failure.verify_message


def test_unusable_name(run: Run[None], certificates: Certificates) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with theirs, pytest.raises(ValueError):
            await open_tls(loop, ours, certificates.client_context(), ".", Reader())
        assert ours.fileno() == -1

    run(main)


def test_no_tls_server(run: Run[None], certificates: Certificates) -> None:
    def script(peer: Peer) -> None:
        peer.sock.recv(65536)
        peer.sock.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

    with Server(None, script) as server:
        assert isinstance(refused(run, server.address, certificates.client_context()), ssl.SSLError)


@pytest.mark.parametrize("reset", [False, True], ids=["FIN", "RST"])
@pytest.mark.parametrize("after", ["at once", "the hello", "half an answer"])
def test_ends_within_the_handshake(run: Run[None], certificates: Certificates, after: str, reset: bool) -> None:
    def script(peer: Peer) -> None:
        if after != "at once":
            peer.sock.recv(65536)
        if after == "half an answer":
            peer.sock.sendall(b"\x16\x03\x03\x00\x7a\x02\x00")
        if reset:
            peer.reset()

    with Server(None, script) as server:
        failure = refused(run, server.address, certificates.client_context())
    assert isinstance(failure, ConnectionError) and failure.strerror


def test_cancelled_within_the_handshake(run: Run[None], certificates: Certificates) -> None:
    def script(peer: Peer) -> None:
        with contextlib.suppress(ConnectionError):
            while peer.sock.recv(65536):
                pass

    async def main() -> None:
        for wait in (0, 0.05):
            with Server(None, script) as server:
                reader = Reader()
                dialling = asyncio.ensure_future(dial(server.address, certificates.client_context(), reader))
                await asyncio.sleep(0.02 if wait else 0)
                await asyncio.sleep(wait)
                dialling.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await dialling
                await asyncio.sleep(0.01)
                assert reader.events == []
                if not wait:
                    with socket.create_connection(server.address):  # it may not have come to connecting
                        pass

    run(main)


def test_cancelled_at_every_step(run: Run[None], certificates: Certificates) -> None:
    """However far it has come: either it ends with no socket, or there is a transport."""

    def script(peer: Peer) -> None:
        peer.recv()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for steps in range(1, 15):
            with contextlib.suppress(OSError, EOFError), Server(server_context(certificates), script) as server:
                sock = socket.create_connection(server.address)
                sock.setblocking(False)
                reader = Reader()
                context = certificates.client_context()
                opening = asyncio.ensure_future(open_tls(loop, sock, context, "127.0.0.1", reader))
                for _ in range(steps):
                    await asyncio.sleep(0.001 if steps > 8 else 0)
                opening.cancel()
                try:
                    transport = await opening
                except asyncio.CancelledError:
                    if reader.events:
                        await reader.end()
                else:
                    transport.abort()
                    await reader.end()
                await asyncio.sleep(0.01)
                assert sock.fileno() == -1

    run(main)


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "TLS"])
def test_a_reset_as_soon_as_it_is_open_leaves_no_descriptor_behind(
    run: Run[None], certificates: Certificates, encrypted: bool
) -> None:
    """uvloop attaches the socket object to a connection that it has closed: the number would be closed once more."""
    turns = 300
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for turn in range(turns):
            sock, _ = listener.accept()
            for _ in range(turn * 20):
                pass  # so that the reset comes at every moment
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            sock.close()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        context = certificates.client_context() if encrypted else None
        origin = Origin("a", "127.0.0.1", listener.getsockname()[1], context, b"a")
        pool = ConnectionPool(origin, PoolSettings(), loop)
        for _ in range(turns):
            with contextlib.suppress(UpstreamFailed):
                (await pool.open()).drop()
        await asyncio.sleep(0.02)
        assert pool.size == 0
        gc.collect()
        for one in gc.get_objects():
            if type(one) is socket.socket:
                assert not (closed(one) and one.fileno() >= 0), one

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        run(main)
        thread.join(10)
    finally:
        listener.close()


# Writing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_large_upload(run: Run[None], certificates: Certificates, version: str) -> None:
    received = []

    def script(peer: Peer) -> None:
        digest, count = hashlib.sha256(), 0
        while data := peer.recv():
            assert data != b"FIN", "it ended without close_notify"
            digest.update(data)
            if count % (1 << 20) > (count + len(data)) % (1 << 20):
                threading.Event().wait(0.01)
            count += len(data)
        received.append((count, digest.hexdigest()))

    async def main() -> None:
        reader = Reader()
        transport = await dial(server.address, certificates.client_context(), reader)
        transport.set_write_buffer_limits(high=100_000, low=20_000)
        most = 0
        for start in range(0, len(PAYLOAD), 50_000):
            await reader.may_write.wait()
            transport.write(PAYLOAD[start : start + 50_000])
            most = max(most, transport.get_write_buffer_size())
        transport.write(PAYLOAD)  # and at once, as a piece of memory and without regard
        transport.write(memoryview(bytearray(PAYLOAD)))
        assert transport.get_write_buffer_size() > len(PAYLOAD)
        transport.close()
        assert transport.is_closing()
        transport.write(b"too late")
        await reader.end()
        assert reader.events == ["made", "lost", None]
        assert reader.write_pauses and most < 200_000

    with Server(server_context(certificates, version), script) as server:
        run(main)
    assert received == [(3 * len(PAYLOAD), hashlib.sha256(PAYLOAD * 3).hexdigest())]


def test_both_directions_at_once(run: Run[None], certificates: Certificates) -> None:
    def script(peer: Peer) -> None:
        while data := peer.recv():
            peer.send(data)

    async def main() -> None:
        reader = Reader(5)
        transport = await dial(server.address, certificates.client_context(), reader)
        for start in range(0, len(PAYLOAD), 30_000):
            await reader.may_write.wait()
            transport.write(PAYLOAD[start : start + 30_000])
            await asyncio.sleep(0)
        while reader.got < len(PAYLOAD):
            await asyncio.sleep(0.01)
        assert reader.data == PAYLOAD
        transport.close()
        await reader.end()

    with Server(server_context(certificates), script) as server:
        run(main)


# What the protocol does -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["abort", "close"])
@pytest.mark.parametrize("where", ["in data_received", "while paused", "while paused, behind the end"])
def test_nothing_is_delivered_after(run: Run[None], certificates: Certificates, how: str, where: str) -> None:
    def script(peer: Peer) -> None:
        peer.send(PAYLOAD[:60_000], record=1000)
        if where.endswith("end"):
            peer.reset()
        else:
            with contextlib.suppress(ConnectionError):
                while peer.recv() not in (b"", b"FIN"):
                    pass

    async def main() -> None:
        reader = Reader()

        def on_data(data: bytes) -> None:
            if where == "in data_received":
                getattr(reader.transport, how)()
            else:
                reader.pause()

        reader.on_data = on_data
        transport = await dial(server.address, certificates.client_context(), reader)
        await asyncio.sleep(0.1)
        if where != "in data_received":
            if where.endswith("end"):
                transport.write(b"x")
                await asyncio.sleep(0.05)
            getattr(transport, how)()
            assert "lost" not in reader.events, "within the call"
            reader.resume()
        await reader.end()
        transport.abort()
        transport.close()
        transport.pause_reading()
        transport.resume_reading()
        transport.write(b"y")
        transport.set_write_buffer_limits(high=10)
        await asyncio.sleep(0.02)
        assert len(reader.pieces) == 1 and reader.events[:2] == ["made", "lost"] and len(reader.events) == 3

    with Server(server_context(certificates), script) as server:
        run(main)


def test_a_paused_reader_bounds_what_is_held(run: Run[None], certificates: Certificates) -> None:
    go = threading.Event()

    def script(peer: Peer) -> None:
        peer.sock.settimeout(0.5)
        with contextlib.suppress(OSError):
            peer.send(bytes(64 << 20))
        go.set()

    async def main() -> None:
        reader = Reader()
        reader.on_data = lambda data: reader.pause()
        transport = await dial(server.address, certificates.client_context(), reader)
        while not go.is_set():
            await asyncio.sleep(0.01)
        assert transport.incoming.pending <= 256 << 10 and reader.got <= 16384
        transport.abort()
        await reader.end()

    with Server(server_context(certificates), script) as server:
        run(main)


def test_a_protocol_that_raises_ends_the_connection(certificates: Certificates) -> None:
    def script(peer: Peer) -> None:
        peer.send(b"one")
        peer.send(b"two")
        with contextlib.suppress(ConnectionError):
            peer.recv()

    async def main() -> list[Any]:
        complaints: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        reader = Reader()

        def on_data(data: bytes) -> None:
            raise RuntimeError("a mistake")

        reader.on_data = on_data
        await dial(server.address, certificates.client_context(), reader)
        await reader.end()
        assert reader.pieces == [b"one"]
        assert isinstance(reader.events[-1], RuntimeError)
        return complaints

    for factory in (uvloop.new_event_loop, asyncio.new_event_loop):
        with Server(server_context(certificates), script) as server, asyncio.Runner(loop_factory=factory) as runner:
            assert runner.run(main())


def test_quiet(run: Run[None], certificates: Certificates) -> None:
    """Octets that have left the kernel and are not delivered are octets behind the response."""
    steps = threading.Semaphore(0)

    def script(peer: Peer) -> None:
        for _ in range(2):
            steps.acquire(timeout=10)
            peer.send(b"response")
            peer.send(b"behind it")
        peer.recv()

    async def main() -> None:
        reader = Reader()
        transport = await dial(server.address, certificates.client_context(), reader)
        quiet = Quiet(transport.get_extra_info("socket"), transport)
        await asyncio.sleep(0.05)
        assert quiet()
        steps.release()
        while reader.got < 17:
            await asyncio.sleep(0.01)
        assert quiet()
        reader.on_data = lambda data: reader.pause()
        steps.release()
        await asyncio.sleep(0.1)
        assert reader.pieces[2:] == [b"response"]
        assert not quiet()
        transport.close()
        await reader.end()
        assert transport.get_write_buffer_size() == 0

    with Server(server_context(certificates), script) as server:
        run(main)


# TLS itself -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
def test_client_certificate(run: Run[None], certificates: Certificates, version: str) -> None:
    def script(peer: Peer) -> None:
        subject = dict(pair[0] for pair in peer.tls.getpeercert()["subject"])  # type: ignore[index, misc]
        peer.send(subject["commonName"].encode())
        peer.close_notify()

    async def main() -> None:
        reader = Reader()
        transport = await dial(server.address, certificates.client_context(certificate=True), reader)
        assert transport.get_extra_info("ssl_object").version() == f"TLSv{version}"
        assert transport.get_extra_info("peername") == server.address
        assert transport.get_extra_info("nothing", 1) == 1
        await reader.end()
        assert reader.data == b"client" and "eof" in reader.events

    with Server(server_context(certificates, version, client_ca=True), script) as server:
        run(main)


@pytest.mark.parametrize("version", VERSIONS)
def test_client_certificate_that_is_missing(run: Run[None], certificates: Certificates, version: str) -> None:
    """With TLS 1.3 the server's refusal comes behind a handshake that was complete for us."""

    async def main() -> None:
        reader = Reader()
        try:
            await dial(server.address, certificates.client_context(), reader)
        except ssl.SSLError:
            assert version == "1.2"
        else:
            await reader.end()
            assert version == "1.3" and isinstance(reader.events[-1], ssl.SSLError)

    server = Server(server_context(certificates, version, client_ca=True), lambda peer: None)
    with contextlib.suppress(ssl.SSLError), server:
        run(main)


@contextlib.contextmanager
def s_server(certificates: Certificates, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], tuple[str, int]]]:
    command = ["openssl", "s_server", "-accept", "127.0.0.1:0", "-cert", str(certificates.certificate),
               "-key", str(certificates.key), *options]  # fmt: skip
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdin and process.stdout
    with process:
        try:
            line = b""
            while not line.startswith(b"ACCEPT"):
                line = process.stdout.readline()
                assert line
            yield process, ("127.0.0.1", int(line.rsplit(b":", 1)[1]))
        finally:
            process.kill()


@pytest.mark.skipif(not shutil.which("openssl"), reason="needs the openssl command")
@pytest.mark.parametrize("command", [b"k\n", b"K\n"], ids=["keys", "keys of both"])
def test_key_update(run: Run[None], certificates: Certificates, command: bytes) -> None:
    async def main() -> None:
        reader = Reader()
        transport = await dial(address, certificates.client_context(), reader)
        for turn in range(3):
            assert process.stdin
            process.stdin.write(command)
            process.stdin.flush()
            await asyncio.sleep(0.05)
            process.stdin.write(b"hello %d\n" % turn)
            process.stdin.flush()
            while b"hello %d\n" % turn not in reader.data:
                await asyncio.sleep(0.01)
            transport.write(b"reply\n")
        transport.close()
        await reader.end()

    with s_server(certificates, "-tls1_3") as (process, address):
        run(main)


@pytest.mark.skipif(not shutil.which("openssl"), reason="needs the openssl command")
def test_renegotiation_is_declined(run: Run[None], certificates: Certificates) -> None:
    async def main() -> None:
        reader = Reader()
        transport = await dial(address, certificates.client_context(), reader)
        assert process.stdin
        process.stdin.write(b"r\n")
        process.stdin.flush()
        await asyncio.sleep(0.1)
        transport.write(b"x" * 100_000)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(reader.ended), 0.5)
        transport.abort()
        await reader.end()
        assert reader.events[:2] == ["made", "lost"]

    with s_server(certificates, "-tls1_2") as (process, address):
        run(main)
