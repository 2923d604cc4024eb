"""Fixtures, a time limit for every test, and a look for what a test left behind.

    upstream        a RawUpstream; its port stays the same for the whole session
    gateway         the gateway in front of it, shared by the tests of a module that have the same configuration:
                    @pytest.mark.config({"limits": {"queue": 1}}, flags=["--log-level", "debug"])
    client, connect one RawClient of that gateway, and a function that makes more of them
    start_gateway   starts one for this test alone: it may be broken, signalled and stopped
    certificates    of a test authority, for TLS on either side
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support import tls
from tests.support.client import RawClient
from tests.support.gateway import Gateway
from tests.support.upstream import RawUpstream, listening_socket

SECONDS = 30  # for a test that says nothing else with @pytest.mark.seconds


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            # first to be set up, so last to look
            item.fixturenames.insert(0, "no_task_left")


@contextlib.contextmanager
def time_limit(item: pytest.Item) -> Iterator[None]:
    """A test that hangs fails. Again each second: whoever catches everything may have caught the first one."""
    marker = item.get_closest_marker("seconds")
    seconds = marker.args[0] if marker else SECONDS

    def too_long(number: int, frame: object) -> None:
        pytest.fail(f"more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# A slow moment of the machine is no failure, and what is too slow for all examples together is seen by a test's time limit.
settings.register_profile("tokenpipe", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tokenpipe")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with time_limit(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """A limit of its own, so that what a test left is still put in order after it took too long."""
    with time_limit(item):
        return (yield)


@pytest.fixture
async def no_task_left() -> AsyncIterator[None]:
    yield
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, f"tasks left running: {left}"


@pytest.fixture(scope="session")
def upstream_address() -> Iterator[socket.socket]:
    """Bound once: a gateway that several tests share keeps its backend's address. Probes wait here between tests."""
    with listening_socket() as listener:
        yield listener


@pytest.fixture
async def upstream(upstream_address: socket.socket) -> AsyncIterator[RawUpstream]:
    upstream = RawUpstream()
    await upstream.start(upstream_address.dup())
    yield upstream
    await upstream.stop()


Shared = dict[str, Gateway]


@pytest.fixture(scope="module")
def shared_gateways() -> Iterator[Shared]:
    shared: Shared = {}
    yield shared
    failures = []
    for gateway in shared.values():
        try:
            gateway.stop()
        except AssertionError as error:
            failures.append(error)
    if failures:
        raise failures[0]


@pytest.fixture
async def gateway(
    request: pytest.FixtureRequest, upstream: RawUpstream, shared_gateways: Shared, tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Gateway]:  # fmt: skip
    marker = request.node.get_closest_marker("config")
    config = marker.args[0] if marker and marker.args else None
    options = marker.kwargs if marker else {}
    key = json.dumps([config, options], sort_keys=True)
    gateway = shared_gateways.get(key)
    if gateway is None or gateway.process.poll() is not None:
        folder = tmp_path_factory.mktemp("gateway")
        gateway = await Gateway.start(folder, config=config, backends=[upstream.url], **options)
        shared_gateways[key] = gateway
    yield gateway
    assert gateway.process.poll() is None, f"the gateway exited {gateway.process.poll()}: {gateway.stderr()[-3000:]}"
    await gateway.idle()
    gateway.check_tidy()


@pytest.fixture
async def start_gateway(tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[Gateway]]]:
    """`await start_gateway(config=..., flags=..., backends=[...])`; what still runs at the end must stop in order."""
    started: list[Gateway] = []

    async def start(**options: Any) -> Gateway:
        folder = tmp_path / f"gateway{len(started)}"
        folder.mkdir()
        gateway = await Gateway.start(folder, **options)
        started.append(gateway)
        return gateway

    yield start
    failures = []
    for gateway in started:
        if gateway.process.returncode is not None:
            continue  # the test has seen to its end
        try:
            gateway.signal(signal.SIGTERM)
            await gateway.stopped()
        except AssertionError as error:
            failures.append(error)
            gateway.kill()
    if failures:
        raise failures[0]


@pytest.fixture
async def connect(gateway: Gateway) -> AsyncIterator[Callable[..., Awaitable[RawClient]]]:
    """`await connect(receive_buffer=..., rate=...)`: another client of `gateway`."""
    clients: list[RawClient] = []

    async def connect(**options: Any) -> RawClient:
        clients.append(await gateway.connect(**options))
        return clients[-1]

    yield connect
    for client in clients:
        client.reset()


@pytest.fixture
async def client(connect: Callable[..., Awaitable[RawClient]]) -> RawClient:
    return await connect()


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tls.Certificates:
    if not tls.available():
        pytest.skip("needs the openssl command")
    return tls.make(tmp_path_factory.mktemp("certificates"))
