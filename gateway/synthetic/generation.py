"""One request in the engine that is not there: when each of its tokens is due, and what it says.

A request's whole future follows from the seed and from its place in the order of arrival: its length at once, its words
and deadlines as they are reached. Deadlines are absolute (scheduled + ttft, then each + itl): a late write, a slow timer
or a reader that paused shifts nothing behind it. As in vLLM a token is computed for every choice in one step, the
last token of an answer that ends by itself is the end-of-text token, which is counted and has no text, and an
orderly stop ends what is running with `finish_reason: "abort"`.

A generation is a context manager and counts itself: it runs from admission to its last token, or to the moment its
client leaves. Leaving shows as the cancellation of the handler or as a connection that takes no more bytes.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from random import Random
from types import TracebackType
from typing import Final, Protocol

from gateway.synthetic.alarm import Wake
from gateway.synthetic.ask import Ask
from gateway.synthetic.behaviour import MOST_TOKENS
from gateway.synthetic.engine import DEATH, Engine
from gateway.synthetic.metrics import BLOCK_SIZE
from gateway.synthetic.plan import Plan
from gateway.synthetic.speech import CALL_TOKENS, Layout, Part, Sort, Speech


class EngineFault(Exception):
    """The engine cannot go on with a request. `message` is what the client is told, with code 500."""

    def __init__(self, message: str):
        super().__init__(message)
        self.message = message


class EngineDied(EngineFault):
    """The engine is dead, and with it all that it was computing."""

    def __init__(self) -> None:
        super().__init__(DEATH)


@dataclass(frozen=True, slots=True)
class Step:
    """What the engine gives out at once. `number`: tokens of each choice so far, but a generation aborted before its
    first token has step 0; `first` tells the one that opens an answer from one that only ends it."""

    number: int
    first: bool
    parts: tuple[Part, ...]
    finish: str | None
    due: float


class Timeline(Protocol):
    """What else happens in the course of an answer: `run` is due at `next`."""

    @property
    def next(self) -> float: ...

    async def run(self) -> None: ...


class Voice(Protocol):
    """Who writes steps as they are given out, at once: no coroutine is resumed for them. What each of the two returns tells
    whether there may be another one yet; `settled` waits until there may be."""

    @property
    def plain(self) -> bool:
        """Whether `text` may be called for a step that brings words and does not end the answer."""
        ...

    def text(self, text: str, due: float) -> bool: ...

    def step(self, step: Step) -> bool: ...

    async def settled(self) -> None: ...


class Quiet:
    """Nothing else happens."""

    next: Final = math.inf

    async def run(self) -> None:
        return


_QUIET: Final = Quiet()


class Generation:
    """Iterate `steps` inside the `with` block; what was said, and `finish`, stand afterwards."""

    def __init__(self, engine: Engine, ask: Ask, plan: Plan):
        behaviour = plan.behaviour
        self._engine, self._ask, self.plan = engine, ask, plan
        self.start = time.monotonic()
        bundles = behaviour.tokens_per_event
        self._clock = plan.random("time", drawn=behaviour.ttft.drawn or behaviour.itl.drawn)
        self._bundles = plan.random("bundles", drawn=bundles is not None or behaviour.hidden > 0)
        self.id = plan.random("id").randbytes(8).hex()
        self.length, self._ending, self._layout = _extent(engine, ask, plan)
        # A request that brings its own seed gets the same words whenever and wherever it is asked.
        self._source = f"{plan.seed}:{plan.index}" if ask.seed is None else f"asked:{ask.seed}"
        self._choices = self._speeches(self._source)
        if ask.begun and ask.choices == 1 and self._layout.simple:
            followed = self._choices[0].follow(ask.begun)
            if followed:  # what is left of it
                self.length, self._ending, self._layout = _extent(engine, ask, plan, followed)
        self._simple = self._layout.simple and not behaviour.hidden
        # Whether each step is of one token: `_take` stays what it is.
        interval = behaviour.stream_interval if ask.stream_interval is None else ask.stream_interval
        self._single = interval == 1 and behaviour.tokens_per_event is None
        self.sequences = ask.choices
        # The key-value cache is taken up front, prompt and output: near enough, and nothing to do per token.
        self.blocks = -(-(ask.prompt_tokens + self.length * ask.choices) // BLOCK_SIZE)
        self.cached = min(behaviour.cached, ask.prompt_tokens)
        self._ttft = behaviour.ttft.draw(self._clock, plan.index - 1, ask.prompt_tokens - self.cached) / behaviour.speed
        # What has to be there before the first token can be computed: another engine's KV.
        self.prelude: Callable[[], Awaitable[None]] | None = None
        # What is waited for once its last token is there, before the end of the answer.
        self.coda: Callable[[], Awaitable[None]] | None = None
        # What is to be done once it is over, however it ended.
        self.on_leave: Callable[[], None] | None = None
        # What is to be done with its blocks when it ends.
        self.on_finish: Callable[[], None] | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: Wake | None = None
        self._voice: Voice | None = None
        self._due, self._take, self._gaps = math.inf, 0, 0
        self._admitted = False
        self._conclusion: str | None = None
        self._scheduled = self._first = self._last = self.start
        self.tokens = 0
        # What a prefill hands to its decoder, as JSON.
        self.handoff = "null"
        # Where an encoder has put what it made, as JSON.
        self.encoded = "null"
        # What ended it, as JSON, where that was no token.
        self.stop_reason = "null"
        self.finish: str | None = None

    def __enter__(self) -> Generation:
        metrics = self._engine.metrics
        metrics.prompt_tokens.inc(self._ask.prompt_tokens)
        metrics.prefix_queries.inc(self._ask.prompt_tokens)
        metrics.prefix_hits.inc(self.cached)
        self._engine.enter(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._engine.leave(self)
        if self.on_leave is not None:
            self.on_leave()
        left = isinstance(error, asyncio.CancelledError | ConnectionError)
        if left and self.finish is None and not self._engine.stopping and not self._engine.dead:
            self._engine.metrics.aborted.inc()

    @property
    def produced(self) -> int:
        """Tokens of all choices so far."""
        return self.tokens * self._ask.choices

    def text(self, choice: int = 0) -> str:
        return self._choices[choice].text()

    @property
    def first_token(self) -> float:
        """Seconds from its slot to its first token."""
        return self._ttft

    @property
    def even(self) -> bool:
        """Whether every step is a run of words of one answer, and nothing else."""
        return self._simple and self._ask.choices == 1

    @property
    def usual(self) -> bool:
        """Whether its answer is nothing but words."""
        return self._layout.simple

    def reasoning(self, choice: int = 0) -> str:
        return self._choices[choice].text(Sort.REASONING)

    def calls(self, choice: int = 0) -> list[str]:
        """The arguments of each call of a tool."""
        return ["".join(pieces) for pieces in self._choices[choice].calls]

    @property
    def reasoned(self) -> int:
        """Tokens of reasoning of all choices so far."""
        return min(self.tokens, self.plan.behaviour.reasoning) * self._ask.choices

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def scheduled(self, now: float) -> None:
        """It has its slot: the engine says so."""
        self._admitted, self._scheduled = True, now
        self._engine.metrics.queue_time.observe(now - self.start)
        if self.prelude is None:
            self._begin(now)
        self.wake()

    def garble(self) -> None:
        """From the beginning it says something else than it would have."""
        self._choices = self._speeches(f"{self._source}:other")

    def spared(self) -> None:
        """Its prompt is there already: what is left before its first token is what a prompt of no tokens costs."""
        behaviour = self.plan.behaviour
        self._ttft = behaviour.ttft.draw(self.plan.random("time"), self.plan.index - 1, 0) / behaviour.speed

    def conclude(self, finish: str, stop_reason: str | None = None) -> None:
        """Its next step is its last one, and holds no token."""
        self._conclusion = finish
        self.stop_reason = "null" if stop_reason is None else f'"{stop_reason}"'

    def _speeches(self, source: str) -> list[Speech]:
        return [Speech(Random(f"{source}:{choice}"), self._layout) for choice in range(self._ask.choices)]

    def delay(self, seconds: float) -> None:
        """The engine pauses: all that is due comes later by so much."""
        self._due += seconds

    async def rest(self, until: float) -> None:
        """Wait, before there is anything to say."""
        while until > time.monotonic() and not self._engine.stopping and not self._engine.dead:
            await self._until(until)

    async def steps(self, timeline: Timeline = _QUIET, voice: Voice | None = None) -> AsyncIterator[Step]:
        """What it gives out, each when it is due, unless `voice` took it. Raises EngineDied."""
        engine = self._engine
        while self.finish is None:
            if self._admitted and self.prelude is not None:
                prelude, self.prelude = self.prelude, None
                await prelude()
                self._begin(time.monotonic())
            if self._conclusion is not None:
                yield self._end(self._conclusion)
                return
            if voice is None or self.coda is not None:
                await self._until(min(self._due, timeline.next))
            elif await self._speak(voice):
                return
            if engine.dead:
                raise EngineDied
            if engine.stopping:
                yield self.abort()
                return
            now = time.monotonic()
            if timeline.next <= min(now, self._due):
                await timeline.run()
            elif self._due <= now:
                step = self._advance(now)
                if step.finish is not None and self.coda is not None:
                    await self.coda()
                yield step

    async def _speak(self, voice: Voice) -> bool:
        """Give steps to `voice` until anything but a token comes. Whether the last one was among them."""
        if self._engine.stopping or self._engine.dead:
            return False
        self._voice = voice
        self._waiter = asyncio.get_running_loop().create_future()
        self._expect()
        try:
            await self._waiter
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._waiter = None
        await voice.settled()
        return self.finish is not None

    def _expect(self) -> None:
        if self._due < math.inf:
            assert self._engine.alarm is not None
            self._timer = self._engine.alarm.at(self._due, self._give)

    def _give(self) -> None:
        """The alarm calls: a step is due."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        try:
            going = self._said(time.monotonic())
        except Exception as error:  # it is the waiting coroutine's
            waiter.set_exception(error)
            return
        if going:
            self._expect()
        else:
            waiter.set_result(None)

    def _said(self, now: float) -> bool:
        """One step is out. Whether the next one may follow from here."""
        voice, take = self._voice, self._take
        assert voice is not None
        if voice.plain and self.tokens and self.tokens + take < self.length:
            text = self._choices[0].plain(take)
            self.tokens += take
            self._engine.metrics.itl.observe(now - self._last)
            self._last = now
            self._count(take)
            going = voice.text(text, self._due)
            self._await_next()
            return going
        step = self._advance(now)
        return voice.step(step) and step.finish is None

    def peek(self) -> list[Step]:
        """Every step to come, without its time: to know how long an answer will be. For a generation of its own."""
        self._begin(self.start)
        steps = []
        while self.finish is None:
            steps.append(self._next())
            self._await_next()
        return steps

    def _begin(self, now: float) -> None:
        self._due = now + self._ttft
        self._take = self._bundle()

    def _bundle(self) -> int:
        bundle = self.plan.behaviour.tokens_per_event
        return 1 if bundle is None else bundle.count(self._bundles, self._gaps)

    def _await_next(self) -> None:
        """Settle when the next step is due, and how many tokens will have come together by then."""
        behaviour = self.plan.behaviour
        if self._single:
            self._due += behaviour.itl.draw(self._clock, self._gaps) * self._engine.pace / behaviour.speed
            self._gaps += 1
            return
        left = self.length - self.tokens
        wanted = min(behaviour.stream_interval if self._ask.stream_interval is None else self._ask.stream_interval, left)
        taken = 0
        while True:
            gap = behaviour.itl.draw(self._clock, self._gaps)
            self._due += gap * self._engine.pace / behaviour.speed
            self._gaps += 1
            taken += self._bundle()
            if taken >= wanted:
                self._take = taken
                return

    def _advance(self, now: float) -> Step:
        metrics = self._engine.metrics
        before = self.tokens
        step = self._next()
        if step.first:
            self._first = now
            metrics.ttft.observe(now - self.start)
        else:
            metrics.itl.observe(now - self._last)
        self._last = now
        self._count(self.tokens - before)
        if step.finish is not None:
            self._done(now)
        else:
            self._await_next()
        return step

    def _count(self, tokens: int) -> None:
        """So many tokens of each choice in one step."""
        metrics, bundle = self._engine.metrics, self.plan.behaviour.tokens_per_event
        metrics.generation_tokens.inc(tokens * self._ask.choices)
        if bundle is not None and bundle.drafts:
            metrics.drafts.inc()
            metrics.draft_tokens.inc(bundle.drafts)
            metrics.accepted_tokens.inc(tokens - 1)

    def _next(self) -> Step:
        number = self.tokens
        tokens = min(self._take, self.length - number)
        self.tokens += tokens
        finish = self._ending if self.tokens >= self.length else None
        spoken = tokens - (finish == "stop")  # the last token is the end of the text
        if self._simple:
            texts = tuple([choice.plain(spoken) if spoken else "" for choice in self._choices])
            parts: tuple[Part, ...] = (Part(Sort.TEXT, texts),)
        else:
            parts = self._parts(number, spoken)
        self.finish = finish
        return Step(self.tokens, number == 0, parts, finish, self._due)

    def _parts(self, number: int, spoken: int) -> tuple[Part, ...]:
        """The choices of one request differ in their words only: the runs of one are those of all."""
        runs = [choice.take(number, spoken) for choice in self._choices]
        hidden = self.plan.behaviour.hidden
        if hidden and self._bundles.random() < hidden:
            return ()
        return tuple(Part(run[0][0], tuple(text for _, _, text in run), run[0][1]) for run in zip(*runs, strict=True))

    async def _until(self, due: float) -> None:
        engine = self._engine
        if engine.stopping or engine.dead:
            return
        if due <= time.monotonic():
            # Behind schedule there is still somebody else's turn, and a client's leaving to be seen.
            await asyncio.sleep(0)
            return
        assert engine.alarm is not None
        self._waiter = asyncio.get_running_loop().create_future()
        timer = engine.alarm.at(due, self.wake) if due < math.inf else None
        try:
            await self._waiter
        finally:
            if timer is not None:
                timer.cancel()
            self._waiter = None

    def abort(self) -> Step:
        """It ends here, as everything does when vLLM is shut down."""
        return self._end("abort")

    def recomputed(self) -> Step:
        """vLLM Ascend drops a request for want of room, and leaves it to the proxy to send it once more."""
        self.conclude("stop", "recomputed")
        return self._end("stop")

    def _end(self, finish: str) -> Step:
        self.finish = finish
        self._engine.metrics.success[finish if finish in ("abort", "stop") else "stop"].inc(self._ask.choices)
        self._engine.leave(self)
        parts = (Part(Sort.TEXT, ("",) * len(self._choices)),)
        return Step(self.tokens, self.tokens == 0, parts, finish, time.monotonic())

    def _done(self, now: float) -> None:
        """The last token is out of the engine: whatever the client still has to be sent, nothing runs any more."""
        metrics = self._engine.metrics
        metrics.success[self.finish or "error"].inc(self._ask.choices)
        metrics.e2e.observe(now - self.start)
        metrics.inference_time.observe(now - self._scheduled)
        metrics.prefill_time.observe(self._first - self._scheduled)
        metrics.decode_time.observe(now - self._first)
        # Zero for a single token, as vLLM has it.
        metrics.tpot.observe((now - self._first) / max(1, self.tokens - 1))
        metrics.request_prompt.observe(self._ask.prompt_tokens)
        metrics.request_generation.observe(self.produced)
        if self.on_finish is not None:
            self.on_finish()
        self._engine.leave(self)


def _extent(engine: Engine, ask: Ask, plan: Plan, followed: int = 0) -> tuple[int, str, Layout]:
    """How many tokens, why it ends there, and which of them are what. `followed`: so many were said before."""
    behaviour = plan.behaviour
    reasoning, calls = (0, 0) if ask.words_only else (behaviour.reasoning, behaviour.tools)
    drawn = behaviour.tokens.count(plan.random("length", drawn=behaviour.tokens.drawn), plan.index - 1, ask.prompt_tokens)
    natural = max(drawn - followed, ask.min_tokens, 1)
    natural = max(natural, reasoning + calls * CALL_TOKENS + 1) if reasoning or calls else natural
    room = max(1, engine.max_model_len - ask.prompt_tokens // ask.prompts)
    asked = ask.max_tokens
    if asked is None:
        # A client that sets `ignore_eos` and no length would be served for hours.
        asked = min(room, MOST_TOKENS) if ask.ignore_eos else room
    limit = min(asked, room)
    # The calls come last, before the end-of-text token.
    whole = limit if ask.ignore_eos else natural - 1
    layout = Layout(reasoning, max(reasoning, whole - calls * CALL_TOKENS), calls, behaviour.text == "multibyte")
    if ask.ignore_eos or limit <= natural:
        return limit, "length", layout
    return natural, "stop", layout
