"""What the four APIs have in common, seen from the engine.

A dialect reads a body into an `Ask`, and afterwards shows one generation in its own shape: as events, or whole.
Templates are text put together by hand, since the order of the keys and the absence of blanks are part of what is
imitated.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import ClassVar, Final, Protocol

from gateway.synthetic.ask import Ask, Body, Limits
from gateway.synthetic.generation import Generation, Step
from gateway.synthetic.wire import Event

VERSION: Final = "0.32.0"
FINGERPRINT: Final = f"vllm-{VERSION}-00000000"


class Dialect(Protocol):
    """One generation in the shape of one API. `request_id` is the client's own, where it sent one."""

    path: ClassVar[str]

    def __init__(self, ask: Ask, generation: Generation, request_id: str | None) -> None: ...

    @staticmethod
    def read(body: Body, limits: Limits) -> Ask:
        """Raises VllmRefusal."""
        ...

    def opening(self) -> Iterable[Event]:
        """Sent before anything is computed."""
        ...

    def step(self, step: Step) -> Iterable[Event]: ...

    def closing(self) -> Iterable[Event]: ...

    def whole(self) -> str:
        """The answer to a request that was not streamed, once the generation is over."""
        ...


def created() -> int:
    return int(time.time())


def usage(prompt: int, completion: int) -> str:
    return f'{{"prompt_tokens":{prompt},"total_tokens":{prompt + completion},"completion_tokens":{completion}}}'


def full_usage(prompt: int, completion: int) -> str:
    """As in an answer that is not streamed."""
    return f'{usage(prompt, completion)[:-1]},"prompt_tokens_details":null,"completion_tokens_details":null}}'
