"""The engine that is not there: when each token of a request is due, and what it says.

A request's whole future follows from the seed and from its place in the order of arrival: its length at once, its words
and deadlines as they are reached. Deadlines are absolute (arrival + ttft, then each + itl): a late write, a slow timer
or a reader that paused shifts nothing behind it. As in vLLM a token is computed for every choice in one step, the
last token of an answer that ends by itself is the end-of-text token, which is counted and has no text, and an
orderly stop ends what is running with `finish_reason: "abort"`.

A generation is a context manager and counts itself: it runs from admission to its last token, or to the moment its
client leaves. Leaving shows as the cancellation of the handler or as a connection that takes no more bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from random import Random
from types import TracebackType
from typing import Final

from gateway.synthetic.ask import Ask
from gateway.synthetic.metrics import BLOCK_SIZE, BLOCKS, EngineMetrics
from gateway.synthetic.settings import MockSettings
from gateway.synthetic.text import words

# A client that sets `ignore_eos` and no length would be served for hours.
_MAX_UNASKED: Final = 32_768


@dataclass(frozen=True, slots=True)
class Step:
    """One token of every choice. `number` counts from 1, but a generation aborted before its first token has step 0;
    `first` tells the one that opens an answer from one that only ends it."""

    number: int
    first: bool
    texts: tuple[str, ...]
    finish: str | None


class Engine:
    """What all requests share: the seed, the count of arrivals, the metrics, and the way to stop."""

    def __init__(self, settings: MockSettings, metrics: EngineMetrics):
        self.settings, self.metrics = settings, metrics
        self.ttft, self.itl = settings.first_token().draw, settings.between_tokens().draw
        self.stopping = False
        self._arrivals = 0
        self._running: set[Generation] = set()
        self._blocks = 0

    @property
    def running(self) -> int:
        return len(self._running)

    def admit(self, ask: Ask) -> Generation:
        """A generation for one request; it counts as running once entered."""
        self._arrivals += 1
        return Generation(self, ask, self._arrivals)

    def stop(self) -> None:
        """What runs ends with `abort` at once, as it does when vLLM gets a SIGTERM."""
        self.stopping = True
        for generation in tuple(self._running):
            generation.wake()

    def enter(self, generation: Generation) -> None:
        self._running.add(generation)
        self._count(generation.blocks)

    def leave(self, generation: Generation) -> None:
        """Once: at its last token, or when its client is gone. What comes after that changes nothing."""
        if generation in self._running:
            self._running.remove(generation)
            self._count(-generation.blocks)

    def _count(self, blocks: int) -> None:
        self._blocks += blocks
        self.metrics.running.set(len(self._running))
        self.metrics.kv_usage.set(min(1.0, self._blocks / BLOCKS))


class Generation:
    """One request in the engine. Iterate `steps` inside the `with` block; `text` and `finish` stand afterwards."""

    def __init__(self, engine: Engine, ask: Ask, arrival: int):
        seed = engine.settings.seed
        self._engine, self._ask = engine, ask
        self._loop = asyncio.get_running_loop()
        self._start = self._loop.time()
        self._clock = Random(f"{seed}:{arrival}:time")
        # A request that brings its own seed gets the same words whenever and wherever it is asked.
        source = f"{seed}:{arrival}" if ask.seed is None else f"asked:{ask.seed}"
        self._words = [words(Random(f"{source}:{choice}")) for choice in range(ask.choices)]
        self._spoken: list[list[str]] = [[] for _ in range(ask.choices)]
        self._waiter: asyncio.Future[None] | None = None
        self.id = Random(f"{seed}:{arrival}:id").randbytes(8).hex()
        self.length, self._ending = _length(engine.settings, ask)
        # The key-value cache is taken up front, prompt and output: near enough, and nothing to do per token.
        self.blocks = -(-(ask.prompt_tokens + self.length * ask.choices) // BLOCK_SIZE)
        self._first = self._start
        self.tokens = 0
        self.finish: str | None = None

    def __enter__(self) -> Generation:
        self._engine.enter(self)
        self._engine.metrics.prompt_tokens.inc(self._ask.prompt_tokens)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._engine.leave(self)
        left = isinstance(error, asyncio.CancelledError | ConnectionError)
        if left and self.finish is None and not self._engine.stopping:
            self._engine.metrics.aborted.inc()

    @property
    def produced(self) -> int:
        """Tokens of all choices so far."""
        return self.tokens * self._ask.choices

    def text(self, choice: int = 0) -> str:
        return "".join(self._spoken[choice])

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def steps(self) -> AsyncIterator[Step]:
        """The tokens, each when it is due."""
        engine, metrics, clock = self._engine, self._engine.metrics, self._clock
        due, last = self._start + engine.ttft(clock), self._start
        while self.finish is None:
            await self._until(due)
            if engine.stopping:
                yield self._aborted()
                return
            now = self._loop.time()
            step = self._next()
            if step.first:
                self._first = now
            (metrics.ttft if step.first else metrics.itl).observe(now - last)
            metrics.generation_tokens.inc(len(step.texts))
            if step.finish is not None:
                self._done(now)
            yield step
            last = now
            due += engine.itl(clock)

    async def _until(self, due: float) -> None:
        delay = due - self._loop.time()
        if self._engine.stopping:
            return
        if delay <= 0:
            # Behind schedule there is still somebody else's turn, and a client's leaving to be seen.
            await asyncio.sleep(0)
            return
        self._waiter = self._loop.create_future()
        timer = self._loop.call_later(delay, self.wake)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _next(self) -> Step:
        self.tokens += 1
        finish = self._ending if self.tokens >= self.length else None
        if finish == "stop":
            texts = ("",) * len(self._words)
        else:
            texts = tuple([next(source) for source in self._words])
            for spoken, text in zip(self._spoken, texts, strict=True):
                spoken.append(text)
        self.finish = finish
        return Step(self.tokens, self.tokens == 1, texts, finish)

    def _aborted(self) -> Step:
        self.finish = "abort"
        self._engine.metrics.success["abort"].inc(self._ask.choices)
        self._engine.leave(self)
        return Step(self.tokens, self.tokens == 0, ("",) * len(self._words), "abort")

    def _done(self, now: float) -> None:
        """The last token is out of the engine: whatever the client still has to be sent, nothing runs any more."""
        metrics = self._engine.metrics
        metrics.success[self.finish or "error"].inc(self._ask.choices)
        metrics.e2e.observe(now - self._start)
        # Zero for a single token, as vLLM has it.
        metrics.tpot.observe((now - self._first) / max(1, self.tokens - 1))
        metrics.request_prompt.observe(self._ask.prompt_tokens)
        metrics.request_generation.observe(self.produced)
        self._engine.leave(self)


def _length(settings: MockSettings, ask: Ask) -> tuple[int, str]:
    """How many tokens, and why it ends there."""
    natural = max(settings.tokens, ask.min_tokens)
    room = max(1, settings.max_model_len - ask.prompt_tokens // ask.prompts)
    asked = ask.max_tokens
    if asked is None:
        asked = min(room, _MAX_UNASKED) if ask.ignore_eos else room
    limit = min(asked, room)
    if ask.ignore_eos or limit <= natural:
        return limit, "length"
    return natural, "stop"
