"""The client: one request of a run, from its place in the queue to its record.

A request is sent once and never again, whatever becomes of it. It goes over a connection of its own or over a kept one
that is provably clean (`net.upstream`): its last response complete to the octet, nothing behind it, and quiet just now.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from array import array
from collections.abc import Sequence

from gateway import __version__
from gateway.core.outcome import Outcome
from gateway.errors import ConfigError, GatewayError, Refusal, UpstreamFailed
from gateway.loadtest import endpoints
from gateway.loadtest.answer import Answer
from gateway.loadtest.datasets import Prompt
from gateway.loadtest.endpoints import Asking, Kind
from gateway.loadtest.records import Record
from gateway.loadtest.target import Target
from gateway.net.fetch import fetch
from gateway.net.upstream import Connection, ConnectionPool, PoolSettings

MODELS_MOST = 4 << 20  # octets of /v1/models
# uvicorn, and so vLLM, closes an idle connection after 5 s: well before that it is no longer used.
POOL = PoolSettings(idle=4.0, max_idle=1 << 20, max_age=math.inf)


class LoadtestFailed(GatewayError):
    """The run cannot begin, or has brought nothing. The text says what to check."""


class Client:
    """Sends the requests of a run to one endpoint. `fields`: of each request's head, name and value."""

    def __init__(
        self,
        target: Target,
        asking: Asking,
        fields: Sequence[tuple[str, str]],
        *,
        timeout: float,
        request_id_prefix: str = "",
        keep_bodies: bool = False,
    ):
        self.target, self.asking = target, asking
        self._loop = asyncio.get_running_loop()
        self._pool = ConnectionPool(target.origin, POOL, self._loop)
        self._timeout, self._keep = timeout, keep_bodies
        self.request_id_prefix = request_id_prefix
        self._dialect = asking.kind.dialect
        lines = [f"{name}: {value}" for name, value in _fields(asking.kind, fields)]
        host = target.origin.host_field.decode()
        self._head = "\r\n".join((f"POST {target.path} HTTP/1.1", f"Host: {host}", *lines, "")).encode()

    def octets(self, prompt: Prompt, request_id: str) -> bytes:
        """A request, as it is sent."""
        body = endpoints.body(self.asking, prompt)
        id_line = b"x-request-id: %b\r\n" % request_id.encode() if request_id else b""
        return b"%b%bContent-Length: %d\r\n\r\n%b" % (self._head, id_line, len(body), body)

    async def ask(self, prompt: Prompt, record: Record, base: float, slot: asyncio.Semaphore | None) -> None:
        """Send one request, and fill in its record. `base`: the run's start. Cancelled, it is recorded as client_gone."""
        prefix = self.request_id_prefix
        octets = self.octets(prompt, f"{prefix}{record.index}" if prefix else "")
        if slot is None:
            await self._send(octets, record, base)
        else:
            async with slot:
                await self._send(octets, record, base)

    async def _send(self, octets: bytes, record: Record, base: float) -> None:
        clock = time.monotonic
        connection: Connection | None = None
        answer: Answer | None = None
        record.started = clock() - base
        try:
            async with asyncio.timeout(self._timeout):
                connection = self._pool.take()
                record.fresh = connection is None
                if connection is None:
                    connection = await self._pool.open()
                answer = Answer(connection, self._dialect, self._loop, self._keep)
                connection.uses += 1
                connection.hand_over(answer)
                connection.write(octets)
                record.sent = clock() - base
                await answer.done
        except Refusal as failure:  # no connection
            record.outcome, record.error = Outcome.UPSTREAM_CONNECT, connect_error(failure)
        except TimeoutError:
            record.outcome, record.error = Outcome.TIMEOUT_TOTAL, f"not done after {self._timeout:g} s (--timeout)"
        except asyncio.CancelledError:
            record.outcome, record.error = Outcome.CLIENT_GONE, "interrupted"
            raise
        else:
            record.outcome, record.error = answer.outcome, answer.error
        finally:
            record.ended = clock() - base
            if answer is not None:
                _fill_in(record, answer, base)
                if self._keep:
                    record.body = bytes(answer.body)
            if connection is not None:
                if answer is not None and answer.clean:
                    connection.give_back()
                else:
                    connection.drop()

    async def check(self) -> None:
        """That the endpoint takes a connection. Nothing is sent on it. Raises LoadtestFailed."""
        try:
            async with asyncio.timeout(min(self._timeout, 10.0)):
                connection = await self._pool.open()
        except UpstreamFailed as failure:
            raise LoadtestFailed(self._unreachable(connect_error(failure))) from None
        except TimeoutError:
            raise LoadtestFailed(self._unreachable("no answer for 10 s")) from None
        connection.drop()

    def _unreachable(self, reason: str) -> str:
        return (
            f"cannot connect to {self.target.url}: {reason}; check that the server runs, the host, the port and http or https"
        )

    def close(self) -> None:
        self._pool.close()


async def first_model(target: Target, fields: Sequence[tuple[str, str]]) -> str:
    """The first model that the endpoint lists. Raises LoadtestFailed."""
    where, hint = f"{target.url}: GET {target.models}", "name the model with --model"
    key = next((value for name, value in fields if name.lower() == "authorization"), "")
    scheme, _, credential = key.partition(" ")
    origin = target.origin._replace(credential=credential.encode()) if scheme.lower() == "bearer" else target.origin
    pool = ConnectionPool(origin, POOL, asyncio.get_running_loop())
    try:
        async with asyncio.timeout(30.0):
            status, page = await fetch(pool, target.models, MODELS_MOST)
    except Refusal as failure:
        raise LoadtestFailed(f"{where}: {failure}; {hint}") from None
    except TimeoutError:
        raise LoadtestFailed(f"{where}: no answer for 30 s; {hint}") from None
    if status == 401 or status == 403:
        raise LoadtestFailed(f"{where} is refused with {status}: set OPENAI_API_KEY, or use --api-key-file; or {hint}")
    try:
        name = json.loads(page)["data"][0]["id"]
    except (ValueError, LookupError, TypeError):
        name = None
    if status != 200 or not isinstance(name, str):
        raise LoadtestFailed(f"{where} answers {status}, and lists no model; {hint}, or check the URL's path")
    return name


def _fields(kind: Kind, fields: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The caller's own come in place of ours of the same name."""
    ours = [
        ("User-Agent", f"tokenpipe-loadtest/{__version__}"),
        ("Accept", "text/event-stream, application/json"),
        ("Content-Type", "application/json"),
    ]
    if kind is Kind.MESSAGES:
        ours.append(("anthropic-version", endpoints.ANTHROPIC_VERSION))
    given = {name.lower() for name, _ in fields}
    if given & {"host", "content-length", "transfer-encoding", "connection"}:
        raise ConfigError("--header: Host, Content-Length, Transfer-Encoding and Connection are written by the tester itself")
    return [field for field in ours if field[0].lower() not in given] + list(fields)


def connect_error(failure: Refusal) -> str:
    """In the tester's words: what the pool says is worded for the gateway."""
    if failure.code == "overloaded":
        return "the load tester has no file descriptors left (ulimit -n)"
    return str(failure).rpartition(": ")[2]


def _fill_in(record: Record, answer: Answer, base: float) -> None:
    meter, head = answer.meter, answer.head
    if answer.ended:  # else it was cut off by us
        record.ended = answer.ended - base
    record.events = array("d", [at - base for at in answer.times])
    record.head = None if answer.headed is None else answer.headed - base
    record.first_byte = None if answer.first_byte is None else answer.first_byte - base
    record.status = None if head is None else head.status
    if meter is not None:
        record.first_visible = None if meter.first_visible is None else meter.first_visible - base
        record.prompt_tokens, record.choices, record.reads = meter.prompt_tokens, meter.choices, meter.reads
        record.output_tokens, record.token_source = meter.output_tokens, meter.token_source
        record.tpot, record.tpot_skipped = meter.tpot, meter.tpot_skipped
