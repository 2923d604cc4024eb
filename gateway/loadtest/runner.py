"""A run: requests set going when the schedule says, whatever became of those before them (an open loop).

The tester watches itself meanwhile: how late it got to each arrival, how late its event loop was at a regular beat, and how
much processor time it took. Whoever reads the result must be able to tell a slow endpoint from a slow tester.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime

from gateway.core.outcome import Outcome
from gateway.loadtest.client import Client
from gateway.loadtest.datasets import Prompt
from gateway.loadtest.records import Record, Run, Watch
from gateway.net.tasks import Tasks

SLEEP_MOST = 86400.0  # seconds; event loops cannot count up to just any number
BEAT = 0.01  # seconds between two looks at the loop's lag


class Interrupt:
    """The first Ctrl-C (or SIGTERM) ends a run in order; after it the signal does what it always does."""

    def __init__(self) -> None:
        self.happened = False
        self.tell: Callable[[], None] = lambda: None  # whoever runs

    def _take(self, number: int) -> None:
        asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)
        self.happened = True
        self.tell()

    @contextlib.contextmanager
    def raised(self) -> Iterator[None]:
        """Around what does not await, and so would not hear of it: the signal is raised there, as KeyboardInterrupt."""

        def interrupt(number: int, frame: object) -> None:
            self.happened = True
            raise KeyboardInterrupt

        before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        loop, numbers = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.getsignal(number) for number in numbers}
        for number in numbers:
            loop.add_signal_handler(number, self._take, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
                signal.signal(number, before[number])


class Runner:
    """Runs against the same clients, one after another."""

    def __init__(self, clients: Sequence[Client], most: int | None, interrupt: Interrupt):
        self._clients, self._most, self._interrupt = clients, most, interrupt
        self._tasks = Tasks()
        self._over = asyncio.Event()  # all requests have ended, or are to
        self.left = self.done = self.failed = self.asked = self.under_way = 0

    async def warm_up(self, prompt: Prompt, count: int) -> list[Record]:
        """`count` requests to each endpoint, all at once but for --max-concurrency."""
        records = [[Record(-1 - index, 0.0) for index in range(count)] for _ in self._clients]
        await self._go([[prompt] * count] * len(self._clients), records, time.monotonic())
        return [record for each in records for record in each if record.ended > 0.0]

    async def run(self, prompts: Sequence[Sequence[Prompt]], times: Sequence[Sequence[float]], rate: float) -> Run:
        """Of each client the prompts, and when each is to be sent. Ends when all have, or at an interrupt."""
        records = [
            [
                Record(index, at, prompt.prompt_len, prompt.output_len)
                for index, (prompt, at) in enumerate(zip(*own, strict=True))
            ]
            for own in zip(prompts, times, strict=True)
        ]
        run = Run(rate, len(times[0]), records, datetime.now().astimezone())
        gc.collect()
        gc.freeze()  # prompts and schedule do not change any more; to look through them again and again would be a lag
        cpu, base = time.process_time(), time.monotonic()
        beat = _Beat(run.watch)
        try:
            await self._go(prompts, records, base)
        finally:
            beat.stop()
            run.duration = run.watch.wall_seconds = time.monotonic() - base
            run.watch.cpu_seconds = time.process_time() - cpu
            gc.unfreeze()
        run.interrupted = self._interrupt.happened
        run.records = [[record for record in own if record.ended > 0.0] for own in records]  # what was sent
        return run

    async def _go(self, prompts: Sequence[Sequence[Prompt]], records: Sequence[Sequence[Record]], base: float) -> None:
        self.asked = self.left = sum(map(len, records))
        self.done = self.failed = self.under_way = 0
        self._over.clear()
        self._interrupt.tell = self._over.set
        if not self.asked or self._interrupt.happened:
            return
        dispatch = self._tasks.spawn(self._dispatch(prompts, records, base), "dispatch")
        try:
            await self._over.wait()
        finally:
            await self._tasks.stop()
        if not dispatch.cancelled():
            dispatch.result()

    async def _dispatch(self, prompts: Sequence[Sequence[Prompt]], records: Sequence[Sequence[Record]], base: float) -> None:
        due = sorted((record.scheduled, place, which) for which, own in enumerate(records) for place, record in enumerate(own))
        # each endpoint has its own: so both of a comparison are under the same load
        slots = [asyncio.Semaphore(self._most) if self._most else None for _ in self._clients]
        clock, start = time.monotonic, self._tasks.start
        try:
            for at, place, which in due:
                while (wait := base + at - clock()) > 0:  # noqa: ASYNC110  (no event but the clock)
                    await asyncio.sleep(
                        math.ceil(min(wait, SLEEP_MOST) * 1000) / 1000
                    )  # the event loop's own grain is a millisecond
                record = records[which][place]
                record.arrived = clock() - base
                start(self._one(self._clients[which], prompts[which][place], record, base, slots[which]), "request")
        except BaseException:
            self._over.set()
            raise

    async def _one(self, client: Client, prompt: Prompt, record: Record, base: float, slot: asyncio.Semaphore | None) -> None:
        self.under_way += 1
        try:
            await client.ask(prompt, record, base, slot)
        finally:
            self.under_way -= 1
            self.done += 1
            self.failed += record.outcome not in (Outcome.COMPLETE, Outcome.CLIENT_GONE)
            self.left -= 1
            if not self.left:
                self._over.set()


class _Beat:
    """Looks at a regular beat how late the event loop is."""

    def __init__(self, watch: Watch):
        self._lags, self._loop = watch.loop_lags, asyncio.get_running_loop()
        self._again()

    def _again(self) -> None:
        self._due = time.monotonic() + BEAT
        self._timer = self._loop.call_later(BEAT, self._look)

    def _look(self) -> None:
        self._lags.append(max(0.0, time.monotonic() - self._due))
        self._again()

    def stop(self) -> None:
        self._timer.cancel()
