"""A DNS server of a few names, over UDP and TCP on one port."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset


class DnsServer:
    """`records`: (name, type) -> what stands in each record. A name without any is NXDOMAIN, one of other types no data."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], list[str]] = {}
        self.rcode: dns.rcode.Rcode | None = None  # answered instead, to everything
        self.silent = False
        self.truncates = False  # over UDP
        self.asked: list[tuple[str, str, str]] = []  # transport, name, type
        self.port = 0
        self._transport: asyncio.DatagramTransport | None = None
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await asyncio.start_server(self._over_tcp, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self._transport, _ = await loop.create_datagram_endpoint(lambda: _Udp(self), ("127.0.0.1", self.port))

    async def stop(self) -> None:
        assert self._transport and self._server
        self._transport.close()
        self._server.close()
        await self._server.wait_closed()

    def answer(self, wire: bytes, transport: str) -> bytes | None:
        query = dns.message.from_wire(wire)
        (question,) = query.question
        name, kind = question.name.to_text(omit_final_dot=True), dns.rdatatype.to_text(question.rdtype)
        self.asked.append((transport, name, kind))
        if self.silent:
            return None
        response = dns.message.make_response(query)
        found = self.records.get((name, kind), [])
        if self.rcode is not None:
            response.set_rcode(self.rcode)
        elif transport == "udp" and self.truncates:
            response.flags |= dns.flags.TC
        elif found:
            response.answer.append(dns.rrset.from_text(question.name, 1, "IN", kind, *found))
        elif not any(have == name and listed for (have, _), listed in self.records.items()):
            response.set_rcode(dns.rcode.NXDOMAIN)
        return response.to_wire()

    async def _over_tcp(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                (length,) = struct.unpack("!H", await reader.readexactly(2))
                answer = self.answer(await reader.readexactly(length), "tcp")
                if answer is not None:
                    writer.write(struct.pack("!H", len(answer)) + answer)
        writer.close()


class _Udp(asyncio.DatagramProtocol):
    def __init__(self, server: DnsServer) -> None:
        self._server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, address: tuple[str | int, ...]) -> None:
        answer = self._server.answer(data, "udp")
        if answer is not None:
            self._transport.sendto(answer, address)  # type: ignore[attr-defined]


@contextlib.asynccontextmanager
async def dns_server() -> AsyncIterator[DnsServer]:
    server = DnsServer()
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
