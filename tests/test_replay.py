"""What a real vLLM sent, byte for byte, through the gateway: the same status, fields, body and end come out.

A recording is a `.resp` (raw bytes of a response, head and chunk framing and all), a `.req`, and a `.json` that says
when which bytes were read. Each is replayed with its timing, scaled down, and again with its first and its last bytes
one by one, at once with the others of its folder.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import lzma
from pathlib import Path

import pytest

from tests.support import script as s
from tests.support.client import RawClient
from tests.support.gateway import Gateway
from tests.support.messages import STATUS_LINE, HttpWire, Message, parse_head
from tests.support.upstream import RawUpstream

FOLDER = Path(__file__).resolve().parent / "vllm" / "recordings"
FOLDERS = sorted(path.name for path in FOLDER.iterdir() if path.is_dir()) if FOLDER.is_dir() else []
LONGEST = 0.25  # seconds that a replayed exchange takes
SINGLY = 500, 80  # so many first and last bytes are sent one by one: all of them would take minutes
AT_ONCE = 16
# the API that a request speaks, and a prompt for it
PROMPTS: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8},
}
# this connection's own, and the one that the gateway may add
OWN = ("connection", "keep-alive", "transfer-encoding", "content-length", "x-request-id")


@dataclasses.dataclass(frozen=True)
class Recording:
    name: str
    method: str
    path: str
    streamed: bool
    response: bytes
    reads: list[tuple[float, int]]  # milliseconds since the request, bytes

    def request(self) -> bytes:
        """One that asks in the same dialect; what the recorded one asked in full is beside the point here."""
        fields = [("x-replay", self.name)]
        if self.method != "POST":
            return s.get(self.path, fields, method=self.method)
        return s.post({"model": "m", "stream": self.streamed, **PROMPTS[self.path]}, self.path, fields)

    def pieces(self) -> list[tuple[float, bytes]]:
        """What to send, and how many seconds to wait before it."""
        last = self.reads[-1][0] if self.reads else 0.0
        scale = min(1.0, LONGEST * 1000 / last) / 1000 if last else 0.0
        pieces, at, before = [], 0, 0.0
        for moment, size in self.reads:
            pieces.append(((moment - before) * scale, self.response[at : at + size]))
            at, before = at + size, moment
        if at < len(self.response):
            pieces.append((0.0, self.response[at:]))
        return pieces


def stored(path: Path) -> bytes:
    """Large ones are kept compressed."""
    if path.exists():
        return path.read_bytes()
    return lzma.decompress(path.with_name(path.name + ".xz").read_bytes())


def recordings(folder: str) -> list[Recording]:
    """Those of one whole response head and at most one response, for a request that the gateway would relay."""
    found = []
    for path in sorted((FOLDER / folder).glob("*.json")):
        facts = json.loads(path.read_text())
        request, response = stored(path.with_suffix(".req")), stored(path.with_suffix(".resp"))
        if b"\r\n\r\n" not in response or response.count(b"HTTP/1.1 ") - response.count(b"HTTP/1.1 100 ") > 1:
            continue
        method, _, rest = request.partition(b" ")
        target = rest.split(b" ")[0].split(b"?")[0].decode("latin-1")
        # what was no HTTP request is asked for as a chat: only the answer to it is of interest
        method = method if method in (b"HEAD", b"OPTIONS") else b"POST"
        known = target if target in PROMPTS else "/v1/chat/completions"
        reads = [(moment, size) for moment, size in facts["recvs_ms_bytes"]]
        found.append(Recording(path.stem, method.decode(), known, b'"stream": true' in request, response, reads))
    return found


class Replay:
    """The upstream's side: answers each request with the recording that its x-replay names."""

    def __init__(self, chosen: list[Recording], *, singly: bool) -> None:
        self.chosen = {recording.name: recording for recording in chosen}
        self.singly = singly

    async def __call__(self, wire: HttpWire, request: Message) -> None:
        recording = self.chosen[request.get("x-replay") or ""]
        if self.singly:
            first, last = SINGLY
            middle = max(first, len(recording.response) - last)
            await wire.send_split(recording.response[:first])
            await wire.send_split(recording.response[first:middle], size=997)
            await wire.send_split(recording.response[middle:])
        else:
            for wait, piece in recording.pieces():
                await asyncio.sleep(wait)
                await wire.send(piece)
        # an engine that was killed, or that a client left, says no more; a fault in the gateway must not hang us
        if not (await expected(recording)).complete or b"\r\nconnection: close\r\n" in recording.response.lower():
            wire.fin()


async def expected(recording: Recording) -> Message:
    """The recorded response, read by its framing."""
    raw = recording.response
    upstream = RawUpstream(s.raw(raw, then="fin"))
    await upstream.start()
    client = await RawClient.connect(port=upstream.port)
    try:
        return await client.ask(recording.request(), method=recording.method)
    finally:
        client.fin()
        await upstream.stop()


def differences(got: Message, want: Message) -> list[str]:
    wrong = []
    for what in ("start", "complete"):
        if getattr(got, what) != getattr(want, what):
            wrong.append(f"{what}: {getattr(got, what)!r}, not {getattr(want, what)!r}")
    if got.without(*OWN) != want.without(*OWN):
        wrong.append(f"fields: {got.without(*OWN)}, not {want.without(*OWN)}")
    if want.framing == "length" and got.all("content-length") != want.all("content-length"):
        wrong.append(f"content-length: {got.all('content-length')}, not {want.all('content-length')}")
    if hashlib.sha256(got.body).digest() != hashlib.sha256(want.body).digest():
        wrong.append(f"body: {len(got.body)} bytes, not {len(want.body)}; first {got.body[:80]!r}")
    return wrong


@pytest.mark.skipif(not FOLDERS, reason="no recordings here")
@pytest.mark.seconds(180)
@pytest.mark.parametrize("singly", [False, True], ids=["timed", "bytewise"])
@pytest.mark.parametrize("folder", FOLDERS)
async def test_replay(gateway: Gateway, upstream: RawUpstream, folder: str, singly: bool) -> None:
    chosen = recordings(folder)
    assert chosen
    upstream.script = Replay(chosen, singly=singly)
    turn = asyncio.Semaphore(AT_ONCE)

    async def replay(recording: Recording) -> list[str]:
        async with turn:
            want = await expected(recording)
            client = await gateway.connect()
            try:
                got = await client.ask(recording.request(), method=recording.method, timeout=30)
                if not want.complete:
                    await client.wait_closed()
            except Exception as error:
                return [f"{recording.name}: {error!r}"]
            finally:
                client.reset()
            return [f"{recording.name}: {wrong}" for wrong in differences(got, want)]

    wrong = [line for lines in await asyncio.gather(*map(replay, chosen)) for line in lines]
    assert not wrong, "\n".join(wrong)


@pytest.mark.skipif(not FOLDERS, reason="no recordings here")
def test_the_recordings_are_whole() -> None:
    """Each is one response head and the bytes that its reads add up to."""
    for folder in FOLDERS:
        for recording in recordings(folder):
            assert sum(size for _, size in recording.reads) == len(recording.response), recording.name
            head, blank, _ = recording.response.partition(b"\r\n\r\n")
            assert parse_head(head + blank, STATUS_LINE).fields or recording.response.startswith(b"HTTP/1.1 100")
