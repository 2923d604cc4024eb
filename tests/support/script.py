"""What an upstream answers: bytes as vLLM writes them, and scripts, which are `async (wire, request)`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from tests.support.messages import HttpWire, Message
from tests.support.wire import ORDINARY

Script = Callable[[HttpWire, Message], Awaitable[None]]


def head(status: int, fields: Sequence[tuple[str, str]] = (), reason: str = "OK") -> bytes:
    lines = [f"HTTP/1.1 {status} {reason}", *(f"{name}: {value}" for name, value in fields)]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(payload: Any, name: str | None = None) -> bytes:
    """A server-sent event of `payload` as JSON, as vLLM writes it: no blanks, text as it is."""
    data = json.dumps(payload, separators=(",", ":"), ensure_ascii=False)
    return (f"event: {name}\n" if name else "").encode() + f"data: {data}\n\n".encode()


def delta(text: str, *, finish: str | None = None, model: str = "m", **extra: Any) -> bytes:
    """One chat.completion.chunk event."""
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": finish}
    return event({"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": model,
                  "choices": [choice], **extra})  # fmt: skip


DONE = b"data: [DONE]\n\n"
LAST = b"0\r\n\r\n"
JSON_TYPE = ("content-type", "application/json")
SSE_TYPE = ("content-type", "text/event-stream; charset=utf-8")
SSE_HEAD = head(200, [("date", "Tue, 01 Dec 2026 06:28:10 GMT"), ("server", "uvicorn"), SSE_TYPE,
                      ("transfer-encoding", "chunked")])  # fmt: skip
FINISHED = (delta("", finish="stop"), DONE)  # what ends a complete stream of vLLM's


def reply(
    status: int = 200, body: bytes | dict[str, Any] = b"{}", fields: Sequence[tuple[str, str]] = (JSON_TYPE,),
    reason: str = "OK",
) -> Script:  # fmt: skip
    """A whole answer with a Content-Length, in one write."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def script(wire: HttpWire, request: Message) -> None:
        whole = head(status, [*fields, ("content-length", str(len(content)))], reason)
        await wire.send(whole if request.method == "HEAD" else whole + content)

    return script


def stream(*events: bytes, gap: float = 0.0, end: bytes = LAST) -> Script:
    """An event stream, one chunk and one write an event, `gap` seconds apart. Nothing is added to `events`."""

    async def script(wire: HttpWire, request: Message) -> None:
        await wire.send(SSE_HEAD)
        for item in events:
            await wire.send(chunk(item))
            await asyncio.sleep(gap)
        if end:
            await wire.send(end)

    return script


def raw(*pieces: bytes, gap: float = 0.0, then: str = "keep") -> Script:
    """`pieces` as they are, each in a write of its own; `then` keep the connection, or end it: fin, reset."""
    assert then in ("keep", "fin", "reset"), then

    async def script(wire: HttpWire, request: Message) -> None:
        await wire.send_pieces(*pieces, gap=gap)
        if then == "fin":
            wire.fin()
        elif then == "reset":
            wire.reset()

    return script


def in_turn(*scripts: Script) -> Script:
    """The first request gets the first script, and so on; the last one stays."""
    left = list(scripts)

    async def script(wire: HttpWire, request: Message) -> None:
        await (left.pop(0) if len(left) > 1 else left[0])(wire, request)

    return script


async def vanish(wire: HttpWire, request: Message) -> None:
    """An engine that dies with the request read and nothing answered."""
    wire.reset()


class Held:
    """A script that sends `first`, hands its wire to the test, and lasts until the peer's end or our own."""

    def __init__(self, *first: bytes) -> None:
        self.first = first
        self.requests: list[Message] = []
        self.wires: list[HttpWire] = []
        self._arrived = asyncio.Event()

    async def __call__(self, wire: HttpWire, request: Message) -> None:
        await wire.send_pieces(*self.first)
        self.requests.append(request)
        self.wires.append(wire)
        self._arrived.set()
        await wire.wait_closed(timeout=600)

    async def wire(self, index: int = 0, timeout: float = ORDINARY) -> HttpWire:
        """The connection of the `index`-th request, once `first` has been sent on it."""
        async with asyncio.timeout(timeout):
            while len(self.wires) <= index:
                self._arrived.clear()
                await self._arrived.wait()
        return self.wires[index]


CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 64}


def post(
    body: bytes | dict[str, Any] = CHAT, path: str = "/v1/chat/completions", fields: Sequence[tuple[str, str]] = (),
    *, length: bool = True, version: str = "1.1",
) -> bytes:  # fmt: skip
    """A request's bytes. `length=False` leaves Content-Length out, for a body framed otherwise."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/{version}", "Host: gateway.test", "Content-Type: application/json"]
    lines += [f"{name}: {value}" for name, value in fields]
    if length:
        lines.append(f"Content-Length: {len(content)}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + content


def get(path: str, fields: Sequence[tuple[str, str]] = (), *, method: str = "GET") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: gateway.test", *(f"{name}: {value}" for name, value in fields)]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
