"""HTTP/1.1 messages, read strictly: what is not as the grammar has it is an AssertionError, never repaired."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import time
from typing import Any

from tests.support.wire import ORDINARY, Closed, Wire

_TOKEN = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_REQUEST_LINE = re.compile(rf"({_TOKEN}) ([!-~\x80-\xff]+) HTTP/1\.([01])")
STATUS_LINE = re.compile(r"HTTP/1\.([01]) ([1-9][0-9]{2}) ([\t -~\x80-\xff]*)")
_FIELD = re.compile(rf"({_TOKEN}):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*?)[ \t]*")
_CHUNK_SIZE = re.compile(rb"[0-9A-Fa-f]{1,16}")

Fields = list[tuple[str, str]]


@dataclasses.dataclass
class Message:
    """A request or a response as it stood on the wire. `complete`: its own framing says that it ended."""

    start: str
    fields: Fields
    head: bytes
    body: bytes = b""
    framing: str = "none"  # none, length, chunked, close
    complete: bool = False
    trailers: Fields = dataclasses.field(default_factory=list)
    chunks: list[tuple[float, bytes]] = dataclasses.field(default_factory=list)  # when its last byte was read, data
    interim: list[Message] = dataclasses.field(default_factory=list)  # 1xx heads before a response

    @property
    def status(self) -> int:
        return int(self.start.split(" ")[1])

    @property
    def reason(self) -> str:
        return self.start.split(" ", 2)[2]

    @property
    def method(self) -> str:
        return self.start.split(" ")[0]

    @property
    def target(self) -> str:
        return self.start.split(" ")[1]

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.fields if key.lower() == name.lower()]

    def get(self, name: str, default: str | None = None) -> str | None:
        return next(iter(self.all(name)), default)

    def without(self, *names: str) -> Fields:
        """Its fields but those called so."""
        return [(key, value) for key, value in self.fields if key.lower() not in {name.lower() for name in names}]

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[str]:
        """The data of its server-sent events, comments and event names left out."""
        found = []
        for block in re.split(r"\r\n\r\n|\n\n|\r\r", self.body.decode()):
            lines = [line[5:].removeprefix(" ") for line in re.split(r"\r\n|\n|\r", block) if line.startswith("data:")]
            if lines:
                found.append("\n".join(lines))
        return found

    def text(self) -> str:
        """The text that a stream of chat or text completion chunks spells."""
        parts = []
        for data in self.events():
            for choice in (json.loads(data).get("choices") or []) if data != "[DONE]" else []:
                parts.append(choice.get("text") or (choice.get("delta") or {}).get("content") or "")
        return "".join(parts)


def parse_head(raw: bytes, start: re.Pattern[str]) -> Message:
    """`raw` ends with its empty line."""
    assert raw.endswith(b"\r\n\r\n")
    first, *lines = raw[:-4].decode("latin-1").split("\r\n")
    assert start.fullmatch(first), f"no start line: {first!r}"
    return Message(first, parse_fields(lines), raw)


def parse_fields(lines: list[str]) -> Fields:
    fields = []
    for line in lines:
        match = _FIELD.fullmatch(line)
        assert match, f"no field line: {line!r}"
        fields.append((match[1], match[2]))
    return fields


class HttpWire(Wire):
    """A Wire that reads messages."""

    async def read_request(self, timeout: float = ORDINARY, *, body: bool = True) -> Message:
        """Raises Closed (holding what came) where the peer left before a whole head."""
        message = await self._read_head(_REQUEST_LINE, timeout)
        return await self.read_request_body(message, timeout) if body else message

    async def read_request_body(self, message: Message, timeout: float = ORDINARY) -> Message:
        coding, length = _framing(message)
        if coding or length is not None:
            return await self._read_framed(message, length, timeout)
        message.complete = True
        return message

    async def read_response(self, method: str = "POST", timeout: float = ORDINARY) -> Message:
        """The next final response with its body; `complete` says whether its framing came to its end."""
        return await self.read_response_body(await self.read_response_head(timeout), method, timeout)

    async def read_response_head(self, timeout: float = ORDINARY) -> Message:
        interim = []
        while (message := await self._read_head(STATUS_LINE, timeout)).status < 200 and message.status != 101:
            interim.append(message)
        message.interim = interim
        return message

    async def read_response_body(self, message: Message, method: str = "POST", timeout: float = ORDINARY) -> Message:
        coding, length = _framing(message)
        if method == "HEAD" or message.status in (101, 204, 304):
            message.complete = True
            return message
        if coding or length is not None:
            return await self._read_framed(message, length, timeout)
        message.framing = "close"
        async with asyncio.timeout(timeout):
            while await self.more(timeout):
                pass
        message.body = bytes(self.pending)
        self.pending.clear()
        message.complete = self.ended == "fin" and (self.close_notify or self._tls is None)
        return message

    async def _read_head(self, start: re.Pattern[str], timeout: float) -> Message:
        async with asyncio.timeout(timeout):
            while (end := self.pending.find(b"\r\n\r\n")) < 0:
                if not await self.more(timeout):
                    raise Closed(bytes(self.pending))
        raw = bytes(self.pending[: end + 4])
        del self.pending[: end + 4]
        return parse_head(raw, start)

    async def _read_framed(self, message: Message, length: int | None, timeout: float) -> Message:
        """Cut short, by the peer's end or by the timeout, `message` keeps what of its body had come."""
        async with asyncio.timeout(timeout):
            if length is None:
                message.framing = "chunked"
                await self._read_chunked(message, timeout)
                return message
            message.framing = "length"
            while len(self.pending) < length and await self.more(timeout):
                pass
        message.body = bytes(self.pending[:length])
        del self.pending[:length]
        message.complete = len(message.body) == length
        return message

    async def _read_chunked(self, message: Message, timeout: float) -> None:
        body = bytearray()  # a bytes body would be copied anew for each chunk
        try:
            while (line := await self._line(timeout)) is not None:
                assert _CHUNK_SIZE.fullmatch(line), f"no plain chunk size: {line!r}"
                size = int(line, 16)
                if size == 0:
                    await self._read_trailers(message, timeout)
                    return
                while len(self.pending) < size + 2:
                    if not await self.more(timeout):
                        body += self.pending[:size]
                        return
                data = bytes(self.pending[:size])
                assert self.pending[size : size + 2] == b"\r\n", "a chunk does not end in CRLF"
                del self.pending[: size + 2]
                body += data
                message.chunks.append((time.monotonic(), data))
        finally:
            message.body = bytes(body)

    async def _read_trailers(self, message: Message, timeout: float) -> None:
        lines = []
        while (line := await self._line(timeout)) is not None:
            if not line:
                message.complete = True
                break
            lines.append(line.decode("latin-1"))
        message.trailers = parse_fields(lines)

    async def _line(self, timeout: float) -> bytes | None:
        while (end := self.pending.find(b"\r\n")) < 0:
            if not await self.more(timeout):
                return None
        line = bytes(self.pending[:end])
        del self.pending[: end + 2]
        return line


def _framing(message: Message) -> tuple[bool, int | None]:
    """Whether it is chunked, and its Content-Length."""
    codings, lengths = message.all("transfer-encoding"), message.all("content-length")
    assert len(codings) + len(lengths) <= 1, f"framed twice: {codings} {lengths}"
    if codings:
        assert codings[0].lower() == "chunked", f"transfer-encoding is {codings[0]!r}"
        return True, None
    if lengths:
        assert re.fullmatch(r"[0-9]+", lengths[0]), f"content-length is {lengths[0]!r}"
        return False, int(lengths[0])
    return False, None
