"""The meter: tokens and times of one 2xx response, read beside the relay.

It is shown the body's octets after they have passed, with the time of the read that brought them, and adds up what the
dialect reads in them: when output came (TTFT, gaps), how many tokens (from the best source that the stream offers), and
how the stream ended. The definitions are metrics.md's; the words of the verdict are `Outcome`'s.

Decoding JSON for every token would cost more than relaying it. But nearly all events of a stream differ in one string
only, so the meter learns an event's SHAPE: the octets before and behind the text of the delta. Whatever is prefix +
middle + suffix, the middle without a quote or a line end, is the same JSON but for that string, hence one more output
event of the same kind, and is booked without decoding. Nothing is learnt from an event that says more: usage, token
ids, a finish reason, several choices. `shape` is set only while the stream stands at an event boundary, so whoever
relays may test a chunk against it and call `output` instead of `feed`:

    shape = meter.shape                  # (prefix, suffix), blank line included; None: feed
    chunk.startswith(prefix) and chunk.endswith(suffix) and len(middle) >= meter.least
    no `"`, LF or CR in the middle, and no backslash at its end
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import sub
from typing import Final

from gateway.core.dialects.base import Dialect, Reading, failed
from gateway.core.outcome import Outcome
from gateway.core.sse import LIMIT, Event, Scanner

SHAPE_LIMIT: Final = 4096  # octets of an event whose shape is worth learning
PATIENCE: Final = 8  # shapes learnt in a row that no event fitted: something changes in every event of this stream
CHOICES_LIMIT: Final = 4096  # choices told apart
Totals = tuple[int, int, int, int, str]

# Octets as integers: `in` finds them several times as fast as it does one-octet strings.
_LF: Final = 0x0A
_CR: Final = 0x0D
_QUOTE: Final = 0x22
_BACKSLASH: Final = 0x5C


class Meter:
    """One response. `streamed`: it is a stream of events; else it is one JSON text, of which a bounded copy is kept.
    `edges`: the upper edges of the buckets for gaps, ascending and positive; an edge belongs to its own bucket.

    `feed` and `end` in the order of the body; `output` for an event that fits `shape`; the rest is to be read.
    Times: `first_output`, `last_output`, `first_visible`. Counts: `events` (output events), `reads` (reads that brought
    some), `choices`. Gaps between output events since the last `take_itl`, for streams of one choice only:
    `itl_counts`, `itl_sum`, `itl_n`; and `max_gap` over the whole stream. How it ends: `finish_reason`, `recomputed`,
    `terminal`, `error`, `verdict`. `opaque`: it was too long to be watched, so that what it said is not known.
    """

    __slots__ = (
        "_body",
        "_behind",
        "_booked",
        "_choices",
        "_continuous",
        "_decoded",
        "_dialect",
        "_edges",
        "_first",
        "_ids",
        "_k_first",
        "_last",
        "_learnt",
        "_line_at",
        "_line_feeds",
        "_mark",
        "_max_gap",
        "_misses",
        "_now",
        "_scanner",
        "_shortest",
        "_single",
        "_together",
        "_unfitted",
        "_usage",
        "cached_tokens",
        "error",
        "finish_reason",
        "first_visible",
        "itl_counts",
        "least",
        "opaque",
        "prompt_tokens",
        "recomputed",
        "shape",
        "streamed",
        "terminal",
    )

    def __init__(self, dialect: Dialect, edges: Sequence[float], streamed: bool) -> None:
        self.streamed = streamed
        self.first_visible: float | None = None
        self.itl_counts = [0] * (len(edges) + 1)
        self.finish_reason: str | None = None
        self.recomputed = False
        self.terminal = False
        self.error: str | None = None
        self.opaque = False
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.shape: tuple[bytes, bytes] | None = None
        self.least = 1  # octets of a middle that fits: 0 where an event without text means the same
        self._dialect, self._edges = dialect, edges
        self._scanner = Scanner()
        self._body = bytearray()  # of an unstreamed answer
        self._now = 0.0  # of the last feed
        self._line_at = 0.0  # when the last data line of the open event had come
        self._first = self._last = self._mark = 0.0  # output: the first, the last, the last that take_itl has seen
        self._max_gap = -1.0
        self._booked = 0  # output events that are in no bucket: the first, those that were taken, those of many choices
        self._together = 0  # output events that came with the read of the one before
        self._k_first = 1
        # tokens
        self._usage: int | None = None
        self._continuous: dict[int, int] = {}  # by choice
        self._ids = 0
        self._choices: set[int] = set()
        self._single = True
        # the shape, also while the stream is not at a boundary, and how it does
        self._learnt: tuple[bytes, bytes] | None = None
        self._decoded = 0  # output events that were decoded; the others fitted
        self._unfitted = 0  # how many had fitted when the shape was learnt
        self._misses = 0
        self._line_feeds = 0  # in each event of that shape
        self._shortest = 0  # octets of such an event at least
        self._behind = 0  # where its text ends, from its end

    # -- what the relay calls ------------------------------------------------------------------------------------------

    def output(self, now: float) -> None:
        """Book one output event that fits `shape`. It leaves the stream at the same boundary."""
        gap = now - self._last
        self._last = now
        self.itl_counts[bisect_left(self._edges, gap)] += 1
        if gap > self._max_gap:
            self._max_gap = gap
        if not gap:
            self._together += 1

    def outputs(self, times: Sequence[float]) -> None:
        """`output` for many at once, at a fraction of the cost: all of it runs in C."""
        gaps = sorted(map(sub, times, (self._last, *times)))  # floats sort fast: a few bisects then do for all of them
        self._last = times[-1]
        self._together += bisect_right(gaps, 0.0)
        if gaps[-1] > self._max_gap:
            self._max_gap = gaps[-1]
        counts, edges, counted = self.itl_counts, self._edges, 0
        for bucket in range(bisect_left(edges, gaps[0]), bisect_left(edges, gaps[-1])):
            upto = bisect_right(gaps, edges[bucket], counted)
            counts[bucket] += upto - counted
            counted = upto
        counts[bisect_left(edges, gaps[-1])] += len(gaps) - counted

    def feed(self, payload: bytes, now: float) -> None:
        """Octets of the body, and when they came."""
        if self.shape is not None and len(payload) >= self._shortest:
            prefix, suffix = self.shape
            if payload.startswith(prefix) and payload.endswith(suffix):
                text = payload[len(prefix) : -len(suffix)]
                if not (_QUOTE in text or _LF in text or _CR in text or payload[-self._behind] == _BACKSLASH):
                    self.output(now)
                    return
        if self.streamed:
            self._look(payload, now)
        else:
            self._keep(payload)

    def end(self) -> None:
        """The body has ended, however it did."""
        if not self.streamed:
            if not self.opaque:
                self._note(self._dialect.read_whole(bytes(self._body)))
            self._body = bytearray()
            return
        for event in self._scanner.end():
            self._event(event, self._now)
        self.shape = self._learnt = None

    def take_itl(self) -> tuple[list[int], float, int]:
        """The gaps since the last take, by bucket, with their sum and number. They are the caller's now.

        A gap that was taken before a second choice turned up was one of a single choice then, and stays counted.
        """
        taken = self.itl_counts, self.itl_sum, self.itl_n
        self._forget_gaps()
        return taken

    # -- what can be read ----------------------------------------------------------------------------------------------

    @property
    def at_boundary(self) -> bool:
        """Whether an event or a comment line could be put in just here."""
        return self.streamed and self._scanner.at_boundary

    @property
    def first_output(self) -> float | None:
        return self._first if self._booked else None

    @property
    def last_output(self) -> float | None:
        return self._last if self._booked else None

    @property
    def events(self) -> int:
        return self._booked + sum(self.itl_counts)

    @property
    def reads(self) -> int:
        return self.events - self._together

    @property
    def choices(self) -> int:
        return len(self._choices)

    @property
    def itl_n(self) -> int:
        return sum(self.itl_counts)

    @property
    def itl_sum(self) -> float:
        return self._last - self._mark if self._single else 0.0

    @property
    def max_gap(self) -> float | None:
        return self._max_gap if self._single and self._max_gap >= 0 else None

    @property
    def k_first(self) -> int:
        """Tokens in the first output event, as far as it says."""
        return self._k_first

    @property
    def output_tokens(self) -> int:
        if self._usage is not None:
            return self._usage
        return sum(self._continuous.values()) or self._ids or self.events

    @property
    def token_source(self) -> str:
        """Where `output_tokens` is from. A count of events is a lower bound: one may carry many tokens."""
        if self._usage is not None:
            return "usage"
        if any(self._continuous.values()):
            return "continuous"
        return "token_ids" if self._ids else "events"

    def totals(self) -> Totals:
        """`events`, `itl_n`, `reads`, `output_tokens` and `token_source`, for less than they cost one by one."""
        gaps = sum(self.itl_counts)
        events = self._booked + gaps
        reads = events - self._together
        if self._usage is not None:
            return events, gaps, reads, self._usage, "usage"
        if self._continuous or self._ids:
            return events, gaps, reads, self.output_tokens, self.token_source
        return events, gaps, reads, events, "events"

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first event; None where that means nothing (`tpot_skipped`).

        From a count of events it is an estimate, to be kept apart by its source.
        """
        return self.pace()[0]

    @property
    def tpot_skipped(self) -> str | None:
        """Why there is no `tpot`, or ("estimated") why it is no more than an estimate."""
        return self.pace()[1]

    def pace(self) -> tuple[float | None, str | None]:
        """`tpot` and `tpot_skipped`."""
        if not self.streamed or not self.terminal or self._failed:
            return None, "incomplete"
        if not self._single:
            return None, "n_gt_1"
        events, _, _, tokens, source = self.totals()
        if tokens <= 1:
            return None, "single_token"
        first, last, of_first = self._first, self._last, self._k_first
        if events < 2 or last <= first or tokens <= of_first:
            return None, "single_read"
        return (last - first) / (tokens - of_first), "estimated" if source == "events" else None

    def verdict(self, framing_complete: bool) -> Outcome:
        """How the response ended, for all that its body says. Call it after `end`.

        `framing_complete`: the body came to the end that its framing had announced. A stream needs its terminal event
        instead, and with it is complete; only of one that could not be watched is nothing more known than its framing.
        """
        if self._failed:
            return Outcome.STREAM_ERROR
        if self.streamed and not self.opaque:
            if not self.terminal:
                return Outcome.UPSTREAM_TRUNCATED
            return Outcome.COMPLETE if self._booked else Outcome.EMPTY
        return Outcome.COMPLETE if framing_complete else Outcome.UPSTREAM_TRUNCATED

    # -- inside --------------------------------------------------------------------------------------------------------

    @property
    def _failed(self) -> bool:
        """An error in the stream, or an end that vLLM gives to what it aborts: for a reason of failure, or for none."""
        unreasoned = self.streamed and self.terminal and self.finish_reason is None
        return self.error is not None or failed(self.finish_reason) or unreasoned

    def _keep(self, payload: bytes) -> None:
        if self.opaque:
            return
        if len(self._body) + len(payload) > LIMIT:
            self.opaque, self._body = True, bytearray()
        else:
            self._body += payload

    def _look(self, payload: bytes, now: float) -> None:
        """Any octets of a stream: several events, a part of one, or one that does not fit."""
        size = len(payload)
        lone = size <= LIMIT and payload.startswith(b"data: ") and payload.find(b"\n") == size - 2 and payload.endswith(b"\n")
        if (
            lone and (self._scanner.easy or self._scanner.begin_with(payload)) and _CR not in payload
        ):  # one whole event of one line: nothing to be scanned
            raw = payload[:-2]
            self._event(Event(raw[6:], b"", raw), now)
            self._now, self.shape = now, self._learnt
            return
        size, start, plain = len(payload), 0, _CR not in payload
        while start < size:
            if plain and self.shape is not None:
                start = self._walk(payload, start, now)
                if start == size:
                    return
            # One event by the scanner, then it may be that the shape fits again. Where there is none, all of them.
            hopeful = plain and (self._learnt is not None or self._decoded < PATIENCE)
            cut = payload.find(b"\n\n", start) + 2 if hopeful else size
            if cut < 2:
                cut = size
            self._scan(payload[start:cut], now)
            start = cut

    def _scan(self, payload: bytes, now: float) -> None:
        scanner = self._scanner
        for event in scanner.feed(payload):
            # An event is as old as its last data line: its blank line may be long in coming.
            self._event(event, self._line_at if event.late else now)
        self._now = now
        if scanner.grew:
            self._line_at = now
        if scanner.overflowed:
            self.opaque, self._learnt = True, None
        self.shape = self._learnt if scanner.at_boundary else None

    def _walk(self, payload: bytes, start: int, now: float) -> int:
        """Book the events from `start` on that fit the shape, in octets without a CR; the end of the last of them."""
        assert self.shape is not None
        prefix, suffix = self.shape
        events, at, ahead, behind, least = 0, start, len(prefix), len(suffix), self.least
        while payload.startswith(prefix, at):
            begin = at + ahead
            quote = payload.find(_QUOTE, begin)
            if quote - begin < least or payload[quote - 1] == _BACKSLASH or not payload.startswith(suffix, quote):
                break
            events, at = events + 1, quote + behind
        # None of the texts may hold a line end; to count them all at once is cheaper than to look at each.
        if not events or payload.count(b"\n", start, at) != events * self._line_feeds:
            return start
        self.output(now)
        if events > 1:
            self.itl_counts[0] += events - 1
            self._together += events - 1
        return at

    def _event(self, event: Event, at: float) -> None:
        reading = self._dialect.read(event)
        if reading.key:  # it says nothing but its one string, and of which choice
            self._tell_apart(reading.choices)
        else:
            self._note(reading)
        if reading.output:
            self._book(reading, at)
            # not from the first: a stream of one token has no use for a shape
            if reading.key and event.raw and self._single and self._decoded > 1:
                self._learn(event.raw, reading)

    def _note(self, reading: Reading) -> None:
        """All that a reading says but for the output itself."""
        if reading.choices:
            self._tell_apart(reading.choices)
        if reading.finish_reason is not None and not failed(self.finish_reason):
            self.finish_reason = reading.finish_reason
        self.recomputed = self.recomputed or reading.recomputed
        self.terminal = self.terminal or reading.terminal
        self.error = self.error or reading.error
        if reading.prompt_tokens is not None:
            self.prompt_tokens = reading.prompt_tokens
        if reading.cached_tokens is not None:
            self.cached_tokens = reading.cached_tokens
        if reading.output_tokens is not None:
            self._usage = max(self._usage or 0, reading.output_tokens)
        if reading.tokens is not None and reading.choices[0] in self._choices:
            known = self._continuous.get(reading.choices[0], 0)
            self._continuous[reading.choices[0]] = max(known, reading.tokens)
        self._ids += reading.token_ids

    def _tell_apart(self, choices: tuple[int, ...]) -> None:
        seen = self._choices
        if choices[0] in seen and len(choices) == 1:
            return
        if len(seen) < CHOICES_LIMIT:
            seen.update(choices)
        if self._single and len(seen) > 1:
            # Gaps between events of several choices mean nothing: those not yet taken are dropped.
            self._single = False
            self._learnt = None
            self._forget_gaps()

    def _book(self, reading: Reading, at: float) -> None:
        self._decoded += 1
        if reading.visible and self.first_visible is None:
            self.first_visible = at
        if not self._booked:
            self._booked = 1
            self._first = self._last = self._mark = at
            self._k_first = reading.tokens or reading.token_ids or 1
        elif self._single:
            self.output(at)
        else:
            self._booked += 1
            self._together += at == self._last
            self._last = at

    def _forget_gaps(self) -> None:
        self._booked += sum(self.itl_counts)
        self.itl_counts = [0] * len(self.itl_counts)
        self._mark = self._last

    def _learn(self, raw: bytes, reading: Reading) -> None:
        """Take the shape of an event which says nothing but its one string."""
        shape = self._learnt
        if shape is not None and raw.startswith(shape[0]) and raw.endswith(shape[1][:-2]):
            return  # it is this one; a quote in the text kept it from fitting
        if len(raw) > SHAPE_LIMIT or self._misses >= PATIENCE:
            return
        needles = [b'"%b":"' % reading.key, b'"%b": "' % reading.key]
        counts = [raw.count(needle) for needle in needles]
        if sum(counts) != 1:
            return
        needle = needles[counts.index(1)]
        begin = raw.index(needle) + len(needle)
        quote = raw.find(b'"', begin)
        if raw[begin:quote] != reading.text.encode():  # an escape in it, or another string of that name
            return
        fitted = self.events - self._decoded
        self._misses = self._misses + 1 if shape is not None and fitted == self._unfitted else 0
        self._unfitted = fitted
        self._learnt = (raw[:begin], raw[quote:] + b"\n\n") if self._misses < PATIENCE else None
        self.least, self._line_feeds = reading.least, raw.count(b"\n") + 2
        self._shortest = len(raw) + 2 - (quote - begin) + reading.least
        self._behind = len(raw) + 3 - quote
