"""A model of engines, to see what a balancing policy does to them: no sockets, no clock, the same each time.

An engine works in steps, as vLLM does (v1/core/sched/scheduler.py): every running request gets one token, and what is left
of the step's token budget goes to prompts, first come first served, as far as cache blocks are free. A prompt pays for those
of its tokens alone that are not in the prefix cache; blocks that nobody uses stay there until the least recently used ones
have to make room. A step takes a base time, some for each running request, and some for each prompt token that is computed:
so a batch slows down as it fills, and a long prompt holds up everybody else's tokens.

The figures are about those of a model of 8 billion parameters on one large GPU, with a small cache, so that it matters who
holds what.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, deque

from gateway.core.load import EngineLoad

BLOCK = 64  # tokens
BUDGET = 2048  # tokens of a step
RUNNING_MOST = 64
BASE, EACH_RUNNING, EACH_TOKEN = 0.008, 0.00008, 0.00004  # seconds

Block = tuple[int, int]


@dataclasses.dataclass(eq=False)
class Request:
    """One turn: its prompt's blocks by what they hold, and how much it is to generate."""

    conversation: int
    prompt: int  # tokens
    shared: int  # of them, at the beginning, in every conversation
    output: int
    arrived: float
    cached: int = 0
    computed: int = 0  # of the prompt, what was cached included
    first_token: float = 0.0

    def blocks(self, tokens: int) -> list[Block]:
        """The full blocks of so many tokens."""
        shared = self.shared // BLOCK
        return [(-1 if place < shared else self.conversation, place) for place in range(tokens // BLOCK)]

    @property
    def size(self) -> int:
        return -(-(self.prompt + self.output) // BLOCK)


class Engine:
    def __init__(self, blocks: int = 1200, speed: float = 1.0):
        self.capacity, self.speed = blocks, speed
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.stepping = False
        self.prompt_tokens = self.cached_tokens = 0
        self._steps = 0
        self._reading: list[Request] = []  # of those that run: whose prompt is not computed yet
        self._ending: dict[int, list[Request]] = {}  # by the step that brings their last token
        self._used = 0  # blocks that running requests hold, however many of them share one
        self._users: dict[Block, int] = {}
        self._free: OrderedDict[Block, None] = OrderedDict()  # cached, and nobody's; the oldest first

    @property
    def requests(self) -> int:
        return len(self.running) + len(self.waiting)

    def says(self) -> EngineLoad:
        """What its /metrics would say now."""
        return EngineLoad(len(self.running), len(self.waiting), min(self._used / self.capacity, 1.0))

    def step(self, now: float) -> tuple[float, list[Request], list[Request]]:
        """Begin a step. Returns when it ends, who will have got a first token by then, and who all of theirs."""
        self._steps += 1
        decoding = len(self.running) - len(self._reading)
        budget, computed = BUDGET - decoding, 0
        while budget > 0:
            for request in self._reading:
                part = min(budget, request.prompt - request.computed)
                request.computed += part
                budget, computed = budget - part, computed + part
            if not self.waiting or len(self.running) >= RUNNING_MOST or budget <= 0 or not self._admit(self.waiting[0]):
                break
            request = self.waiting.popleft()
            self.running.append(request)
            self._reading.append(request)
        begun = [request for request in self._reading if request.computed >= request.prompt]
        for request in begun:
            self._reading.remove(request)
            self._ending.setdefault(self._steps + request.output - 1, []).append(request)
        seconds = BASE + EACH_RUNNING * decoding + EACH_TOKEN * computed
        return now + seconds / self.speed, begun, self._ending.pop(self._steps, [])

    def finish(self, request: Request) -> None:
        """All its blocks stay cached; the end of it goes first, for it is of the least use to others."""
        self.running.remove(request)
        self._used -= request.size
        kept = request.blocks(request.prompt + request.output)
        for block in reversed(kept):
            users = self._users.get(block, 0) - 1
            if users > 0:
                self._users[block] = users
            else:
                self._users.pop(block, None)
                self._free[block] = None
                self._free.move_to_end(block)
        self._evict()

    def _admit(self, request: Request) -> bool:
        if self._used + request.size > self.capacity and self.running:
            return False
        found = 0
        wanted = request.blocks(request.prompt - 1)  # the last token is computed in any case: its output is asked for
        for block in wanted:
            if block not in self._users and block not in self._free:
                break
            found += 1
        request.cached = request.computed = found * BLOCK
        self.prompt_tokens += request.prompt
        self.cached_tokens += request.cached
        for block in request.blocks(request.prompt + request.output):
            self._free.pop(block, None)
            self._users[block] = self._users.get(block, 0) + 1
        self._used += request.size
        self._evict()
        return True

    def _evict(self) -> None:
        while self._free and len(self._free) + len(self._users) > self.capacity:
            self._free.popitem(last=False)
