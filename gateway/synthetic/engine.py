"""What all requests share: slots, the queue before them, the KV cache, the figures, and the ways to stop.

A request waits, first come first served, until there is a slot (`max_num_seqs`; each choice takes one) and room for its
blocks (`kv_blocks`). Without those limits it never waits.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from gateway.synthetic.alarm import Alarm
from gateway.synthetic.behaviour import Behaviour, Capacity
from gateway.synthetic.metrics import BLOCKS, EngineMetrics
from gateway.synthetic.settings import MockSettings

if TYPE_CHECKING:
    from gateway.synthetic.generation import Generation

DEATH: Final = "EngineCore encountered an issue. See stack trace (above) for the root cause."


class Engine:
    def __init__(self, settings: MockSettings, metrics: EngineMetrics):
        self.settings, self.metrics = settings, metrics
        self.behaviour: Behaviour = settings.behaviour()
        self.capacity: Capacity = settings.capacity()
        self.seed, self.max_model_len = settings.seed, settings.max_model_len
        self.stopping = False
        self.dead = False
        self.alarm: Alarm | None = None  # made when the loop is there
        self.close_port: Callable[[float], None] = lambda seconds: None  # the server's
        self.held_blocks = 0  # of prefills that wait for a decoder
        self._arrivals = 0
        self._running: set[Generation] = set()
        self._waiting: deque[Generation] = deque()
        self._blocks = 0
        self._sequences = 0
        metrics.running.set_function(lambda: len(self._running))
        metrics.waiting.set_function(lambda: len(self._waiting))
        metrics.waiting_by_reason["capacity"].set_function(lambda: len(self._waiting))
        metrics.kv_usage.set_function(self._kv_usage)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def pace(self) -> float:
        """How much longer a step takes with so many in the batch."""
        return 1.0 + self.capacity.slowdown * (len(self._running) - 1) if self.capacity.slowdown else 1.0

    @property
    def arrived(self) -> int:
        return self._arrivals

    def arrive(self) -> int:
        """The place of a request in the order of arrival, from 1."""
        self._arrivals += 1
        return self._arrivals

    def full(self, choices: int) -> bool:
        """Whether vLLM's --max-num-queued-reqs, which counts running ones too, turns a request away."""
        most = self.capacity.max_num_queued_reqs
        if most is None or self._sequences + sum(one.sequences for one in self._waiting) + choices <= most:
            return False
        self.metrics.rejections.inc()
        return True

    def enter(self, generation: Generation) -> None:
        self._waiting.append(generation)
        self._schedule()

    def leave(self, generation: Generation) -> None:
        """Once: at its last token, or when its client is gone. What comes after that changes nothing."""
        if generation in self._running:
            self._running.remove(generation)
            self._blocks -= generation.blocks
            self._sequences -= generation.sequences
        elif generation in self._waiting:
            self._waiting.remove(generation)
        else:
            return
        self._schedule()

    async def sleep_until(self, moment: float) -> None:
        if moment <= time.monotonic():
            await asyncio.sleep(0)
            return
        assert self.alarm is not None
        waiter = asyncio.get_running_loop().create_future()
        wake = self.alarm.at(moment, lambda: None if waiter.done() else waiter.set_result(None))
        try:
            await waiter
        finally:
            wake.cancel()

    def reset(self) -> None:
        """As it was started: its knobs, and alive."""
        self.behaviour, self.dead = self.settings.behaviour(), False
        self.changed(self.settings.capacity())

    def changed(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self._schedule()

    def hold(self, blocks: int) -> None:
        """Blocks that stay taken though nothing runs on them, or fewer of them (below zero)."""
        self.held_blocks += blocks
        self._schedule()

    def stop(self) -> None:
        """What runs ends with `abort` at once, as it does when vLLM gets a SIGTERM."""
        self.stopping = True
        self._wake_all()

    def die(self) -> None:
        """Nothing is computed any more, and everybody is told."""
        self.dead = True
        self._wake_all()

    def _wake_all(self) -> None:
        for generation in (*self._running, *self._waiting):
            generation.wake()

    def _schedule(self) -> None:
        while self._waiting and self._fits(self._waiting[0]):
            generation = self._waiting.popleft()
            self._running.add(generation)
            self._blocks += generation.blocks
            self._sequences += generation.sequences
            generation.scheduled(time.monotonic())

    def _kv_usage(self) -> float:
        return min(1.0, (self._blocks + self.held_blocks) / (self.capacity.kv_blocks or BLOCKS))

    def _fits(self, generation: Generation) -> bool:
        capacity = self.capacity
        if not self._running:
            return True  # whatever its size: it would wait for ever
        if capacity.max_num_seqs is not None and self._sequences + generation.sequences > capacity.max_num_seqs:
            return False
        taken = self._blocks + self.held_blocks + generation.blocks
        return capacity.kv_blocks is None or taken <= capacity.kv_blocks
