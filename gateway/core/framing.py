"""Where a message's body ends: chunked bodies (RFC 9112 section 7.1), and requests that come one behind the other.

`ChunkedReader` is fed what a peer sends and says which octets are the body's. It is strict: a size line is hexadecimal
digits and perhaps extensions, ended by CRLF; the data is followed by CRLF; trailers are fields. Extensions and
trailers are checked, and never passed on.

A relay need not write anew what it may pass on as it came: where all that was fed is exactly what this module would
itself write, so that no two neighbours can read it in two ways, `out` is the very octets that came. That holds for
hexadecimal size lines without extension, whole in one read, and no trailers. All else is framed anew in `out`.

`RequestReader` finds the end of each request on a client's connection, and hands on one at a time.
"""

from __future__ import annotations

import enum

from gateway.core.head import CHUNKED, CLOSE, LENGTH, TCHAR, Malformed, RequestHead, ResponseHead, parse_fields, parse_request
from gateway.errors import Refusal

SIZE_LINE = 4096  # octets: a size and its extensions; nginx allows about as much, and nobody sends any
TRAILERS = 16384  # octets of a trailer section
LAST_CHUNK = b"0\r\n\r\n"
_HEX = frozenset(b"0123456789abcdefABCDEF")

# Size lines of whole frames met before, without their CRLF. Tokens of one model are frames of a few hundred sizes at
# most, and a look-up costs a fifth of reading the number. Bounded, and only ever holds plain hexadecimal numbers.
SIZES: dict[bytes, int] = {}
SIZES_MOST = 4096


def frame(data: bytes) -> bytes:
    """`data`, which is not empty, as one chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class _At(enum.Enum):
    SIZE = enum.auto()  # within a size line
    DATA = enum.auto()  # within a chunk's data
    DATA_END = enum.auto()  # within the CRLF behind it
    TRAILERS = enum.auto()
    END = enum.auto()


_SIZE, _DATA, _DATA_END, _TRAILERS, _END = _At  # see core.head


class ChunkedReader:
    """Reads one chunked body. `feed` returns the pieces of its payload; `done` when the last chunk has come whole."""

    __slots__ = ("_at", "_held", "_left", "_passed_on", "done", "extra", "failure", "out")

    def __init__(self) -> None:
        self._at = _SIZE
        self._left = 0  # octets of the chunk's data still to come; in DATA_END, of its CRLF
        self._held = b""  # of a line that is not whole yet
        self._passed_on = True  # the current chunk's size line went through as it came, so its rest must too
        self.out = b""  # the last feed's octets for a receiver of the same framing
        self.done = False
        self.extra = b""  # what came behind the body
        self.failure: Malformed | None = None  # what came last is no chunked body, and nothing more is read

    @property
    def between(self) -> bool:
        """Between two chunks, with nothing held: the next octet begins a size line."""
        return self._at is _SIZE and not self._held

    @property
    def at_boundary(self) -> bool:
        """Between two chunks as the receiver of `out` sees them: there a chunk of one's own may be written."""
        return self._at is _SIZE or not self._passed_on

    def feed(self, data: bytes) -> list[bytes]:
        """The payload in `data`, in pieces. Where it is malformed: up to there, and `failure` says why."""
        pieces: list[bytes] = []
        outs: list[bytes] = []
        at = self._whole_frames(data, pieces) if self._at is _SIZE and not self._held else 0
        if at == len(data):
            self.out = data
            return pieces
        if data.endswith(LAST_CHUNK) and at == len(data) - 5 and self.between:  # the usual end
            self._at, self.done, self.out = _END, True, data
            return pieces
        if at:
            outs.append(data[:at])
        as_it_came = self._passed_on and not self._held and self._at is not _TRAILERS
        try:
            as_it_came = self._slowly(data, at, pieces, outs) and as_it_came
        except Malformed as failure:
            self.failure, as_it_came = failure.with_traceback(None), False  # whose frames hold this reader
        self.out = data if as_it_came else b"".join(outs)
        return pieces

    def _whole_frames(self, data: bytes, pieces: list[bytes]) -> int:
        """Take the plain frames that are whole in `data`, from its start on; returns where they end."""
        at, total, known = 0, len(data), SIZES
        while at < total:
            line_end = data.find(b"\r\n", at, at + 10)
            if line_end < 0:
                break
            size = known.get(data[at:line_end])
            if size is None:
                size = _new_size(data[at:line_end])
            if not size:
                break
            end = line_end + 4 + size
            if end > total or not data.startswith(b"\r\n", end - 2):
                break
            pieces.append(data[line_end + 2 : end - 2])
            at = end
        return at

    def _slowly(self, data: bytes, at: int, pieces: list[bytes], outs: list[bytes]) -> bool:
        """Take `data` from `at` on, state by state. Returns whether it may pass as it came. Raises Malformed."""
        plain, total = True, len(data)
        while at < total and not self.done:
            if self._at is _DATA:
                piece = data[at : at + self._left]
                pieces.append(piece)
                outs.append(piece if self._passed_on else frame(piece))
                at += len(piece)
                self._left -= len(piece)
                if not self._left:
                    self._at, self._left = _DATA_END, 2
            elif self._at is _DATA_END:
                if data[at] != (13, 10)[2 - self._left]:
                    raise Malformed("a chunk's data is not followed by CRLF")
                if self._passed_on:
                    outs.append(data[at : at + 1])
                at += 1
                self._left -= 1
                if not self._left:
                    self._at = _SIZE
            elif self._at is _SIZE:
                at = self._size_line(data, at, outs)
                plain = plain and self._passed_on and not self._held
            else:
                at, whole = self._trailers(data, at, outs)
                plain = plain and whole
        if self.done:
            self.extra += data[at:]
            plain = plain and at == total
        return plain and self._at is not _TRAILERS

    def _size_line(self, data: bytes, at: int, outs: list[bytes]) -> int:
        end = data.find(b"\n", at)
        if end < 0:
            self._hold(data[at:], SIZE_LINE)
            _check_begun(self._held)
            return len(data)
        line = self._held + data[at : end + 1]
        if len(line) > SIZE_LINE:
            raise Malformed("a chunk's size line is too long")
        size, plain = read_size(line)
        self._passed_on, self._held = plain and not self._held, b""
        if size:
            self._at, self._left = _DATA, size
            if self._passed_on:
                outs.append(line)
        else:
            self._at = _TRAILERS  # the last chunk is passed on only once the whole of it has come
        return end + 1

    def _hold(self, rest: bytes, limit: int) -> None:
        self._held += rest
        if len(self._held) > limit:
            raise Malformed("a line of the chunked framing is too long")

    def _trailers(self, data: bytes, at: int, outs: list[bytes]) -> tuple[int, bool]:
        """Up to the empty line, nearly always just that. Returns where it ends, and whether there was no more to it."""
        held = self._held + data[at:]
        if held.startswith(b"\r\n"):
            end = 2
        elif (found := held.find(b"\r\n\r\n")) >= 0:
            end = found + 4
            if end > TRAILERS:
                raise Malformed("the trailer section is too long")
            parse_fields(held[:end])
        else:
            self._hold(data[at:], TRAILERS)
            if held != b"\r" and (held[0] not in TCHAR or b"\n" in held.replace(b"\r\n", b"")):
                raise Malformed("the trailer section is no list of fields")
            return len(data), False
        whole = not self._held and end == 2
        taken, self._held = end - len(self._held), b""
        self._at, self.done = _END, True
        outs.append(LAST_CHUNK)
        return at + taken, whole


def _new_size(line: bytes) -> int:
    """The number that a plain size line stands for; 0 for the last chunk's, and for what is none. Remembered."""
    if not line or not _HEX.issuperset(line):
        return 0
    size = int(line, 16)
    if len(SIZES) < SIZES_MOST:
        SIZES[line] = size
    return size


def read_size(line: bytes) -> tuple[int, bool]:
    """The size that a whole size line gives, and whether it is nothing but that. Raises Malformed."""
    if line[-2:] != b"\r\n":
        raise Malformed("a chunk's size line does not end in CRLF")
    text, extension = line[:-2], b""
    cut = text.find(b";")
    if cut >= 0:
        text, extension = text[:cut], text[cut:]
    plain = cut < 0
    if not plain:
        _check_extension(extension)
        text = text.rstrip(b" \t")  # BWS, RFC 9112 section 7.1.1
    if not text or len(text) > 16 or not _HEX.issuperset(text):
        raise Malformed("a chunk's size is no hexadecimal number")
    size = int(text, 16)
    if size >> 63:
        raise Malformed("a chunk's size is too large")
    return size, plain and len(text) <= 8


def _check_extension(extension: bytes) -> None:
    if any((c < 0x20 and c != 9) or c == 0x7F for c in extension):
        raise Malformed("a chunk extension holds a control octet")


def _check_begun(held: bytes) -> None:
    """An unfinished size line: refuse at once what can never become one, or the peer would wait for ever."""
    text, cut, extension = held.partition(b";")
    if cut:
        _check_extension(extension[:-1] if extension[-1:] == b"\r" else extension)
        text = text.rstrip(b" \t")
    elif text[-1:] == b"\r":
        text = text[:-1]
    if not cut:
        text = text.rstrip(b" \t")
    if not _HEX.issuperset(text) or len(text) > 16 or (cut and not text) or held[:1] in b" \t\r":
        raise Malformed("a chunk's size is no hexadecimal number")


class RequestReader:
    """Finds heads and bodies in what a client sends, and hands on one request at a time.

    What a client sends ahead, behind the request that is being served, is kept until `next_request` is called; the
    caller stops reading from the client while `ahead` is more than it is willing to hold.
    """

    __slots__ = ("_body", "_buffer", "_last", "_left", "_place", "_scanned", "busy", "limit")

    def __init__(self, limit: int):
        self.limit = limit  # octets of a whole head
        self.busy = False  # a head has been handed on, and next_request has not been called since
        # What has come and is not taken yet: `_buffer` from `_place` on. It is not cut for each request that is taken,
        # or thousands that came in one read would be copied thousands of times.
        self._buffer = b""
        self._place = 0
        self._scanned = 0  # where the search for a head's end goes on
        self._body: ChunkedReader | None = None
        self._left = 0  # octets of a body of known length
        self._last: tuple[bytes, RequestHead | None] = (b"", None)  # the head before this one, as octets and as read

    @property
    def in_body(self) -> bool:
        return self._left > 0 or self._body is not None

    @property
    def held(self) -> int:
        """Octets that have come and are not taken yet."""
        return len(self._buffer) - self._place

    @property
    def begun(self) -> bool:
        """A part of a head has come, and not all of it."""
        return not self.busy and self.held > 0

    @property
    def ahead(self) -> int:
        return self.held if self.busy else 0

    def next_request(self) -> None:
        """The request in hand has been answered: the next one may be handed on."""
        self.busy = False
        self._scanned = self._place

    def keep(self, data: bytes) -> None:
        """Sent ahead, while the request in hand is being answered."""
        self._buffer = self._buffer[self._place :] + data if self.held else data
        self._place = 0

    def take(self) -> bytes:
        """All that is held."""
        taken = self._buffer[self._place :]
        self._buffer, self._place, self._scanned = b"", 0, 0
        return taken

    def head(self, data: bytes = b"") -> RequestHead | None:
        """The next request's head, once it is whole; its body is then read by `body`, or `whole_body`.

        Only called when not busy. Raises Refusal (400, 405, 414, 431, 501).
        """
        if data:
            scanned = max(self._scanned - self._place, 0)
            self.keep(data)
            self._scanned = scanned
        buffer = self._buffer
        while buffer.startswith(b"\r\n", self._place):  # RFC 9112 section 2.2: empty lines may come first
            self._place += 2
            self._scanned = self._place
        begin = self._place
        end = buffer.find(b"\r\n\r\n", max(self._scanned - 3, begin))
        if end < 0 or end + 4 - begin > self.limit:
            self._scanned = len(buffer)
            self._unfinished(buffer[begin:])
            return None
        self._place = end + 4
        octets = buffer[begin : end + 4]
        last, head = self._last
        if head is None or octets != last:  # a client that polls, or sends one length again and again, repeats its head
            head = parse_request(octets)
            self._last = octets, head
        self.busy = True
        if head.framing is LENGTH:
            self._left = head.length
        elif head.framing is CHUNKED:
            self._body = ChunkedReader()
        return head

    def whole_body(self) -> bytes | None:
        """The body, if all of it has come along with its head; it is then not to be had by `body` any more."""
        left, begin = self._left, self._place
        if not left or len(self._buffer) - begin < left:
            return None
        self._left, self._place = 0, begin + left
        return self._buffer[begin : begin + left]

    def _unfinished(self, held: bytes) -> None:
        """Refuse what is too large, or can never become a head (TLS on this port, a bare line end), without waiting."""
        if len(held) > self.limit:
            limit = f"limits.request_head, {self.limit} octets"
            if held.find(b"\r\n", 0, self.limit) < 0:
                raise Refusal("target_too_long", f"the request target is longer than {limit}")
            raise Refusal("headers_too_large", f"the request head is larger than {limit}")
        if (held and held[0] not in TCHAR and held != b"\r") or held.count(b"\n") != held.count(b"\r\n"):
            raise Refusal("bad_request", "the head holds a control octet, or a line end that is not CRLF")

    def body(self, data: bytes = b"") -> tuple[list[bytes], bool]:
        """More of the body's octets, and whether it is complete. What lies behind it is kept. Raises Malformed."""
        if self.held:
            data = self.take() + data
        if self._body is not None:
            pieces = self._body.feed(data)
            if self._body.failure is not None:
                raise self._body.failure
            if not self._body.done:
                return pieces, False
            self.keep(self._body.extra)
            self._body = None
            return pieces, True
        piece = data[: self._left]
        self.keep(data[self._left :])
        self._left -= len(piece)
        return ([piece] if piece else []), not self._left


class LengthReader:
    """Reads one body of a known length; the interface of `ChunkedReader`."""

    __slots__ = ("_left", "done", "extra", "failure", "out")

    def __init__(self, length: int):
        self._left = length
        self.out = b""
        self.done = length == 0
        self.extra = b""
        self.failure: Malformed | None = None

    @property
    def at_boundary(self) -> bool:
        return False  # nothing can be put into a body whose length has been announced

    def feed(self, data: bytes) -> list[bytes]:
        left = self._left
        if len(data) > left:
            data, self.extra = data[:left], data[left:]
        self.out = data
        self._left = left = left - len(data)
        self.done = left == 0
        return [data] if data else []


class CloseReader:
    """Reads one body that ends with its connection; the interface of `ChunkedReader`. Its end is `close`d from outside."""

    __slots__ = ("done", "extra", "failure", "out")

    def __init__(self) -> None:
        self.out = b""
        self.done = False
        self.extra = b""
        self.failure: Malformed | None = None

    @property
    def at_boundary(self) -> bool:
        return True

    def feed(self, data: bytes) -> list[bytes]:
        self.out = frame(data) if data else b""
        return [data] if data else []


BodyReader = ChunkedReader | LengthReader | CloseReader


def reader_of(head: ResponseHead) -> BodyReader:
    """What reads the body behind a response's head."""
    if head.framing is CHUNKED:
        return ChunkedReader()
    return CloseReader() if head.framing is CLOSE else LengthReader(head.length)
