"""What the four APIs have in common, seen from the engine.

A dialect reads a body into an `Ask`, and afterwards shows one generation in its own shape: as events, or whole.
Templates are text put together by hand, since the order of the keys and the absence of blanks are part of what is
imitated.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Final, Protocol

from gateway.synthetic.ask import Ask, Body, Limits
from gateway.synthetic.generation import Generation, Step
from gateway.synthetic.wire import DONE, Event, Mark

VERSION: Final = "0.32.0"
FINGERPRINT: Final = f"vllm-{VERSION}-00000000"
_TYPES: Final = {400: "BadRequestError", 404: "NotFoundError"}


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

    def word(self) -> Event | None:
        """The event of any step but the first and the last of an even answer, NUL where its text, a JSON string, stands.
        None: they differ in more than that."""
        ...

    def closing(self) -> Iterable[Event]: ...

    def whole(self) -> str:
        """The answer to a request that was not streamed, once the generation is over."""
        ...

    def failure(self, code: int, message: str) -> Iterable[Event]:
        """What the engine found after the head had gone: an error event, and what vLLM sends after it."""
        ...


class Accounts:
    """Where the two APIs of OpenAI's that have `stream_options` put the usage of a stream."""

    def __init__(self, ask: Ask, generation: Generation):
        self._ask, self._generation, self._mode = ask, generation, generation.plan.behaviour.usage
        asked = self._mode == "asked"
        # Whether a chunk of its own tells the usage: the fingerprint is there then.
        self.final = ask.include_usage if asked else self._mode not in ("none", "finish")
        self.continuous = ask.continuous_usage if asked else self._mode == "continuous"

    def beside(self, prompt: int, completion: int, *, last: bool = False) -> str:
        """What stands in a chunk of output after its choices."""
        if self.continuous or (last and self._mode == "finish"):
            return f',"usage":{usage(prompt, completion, self._generation)}'
        return ',"usage":null' if self._mode == "null" else ""

    def close(self, head: str) -> Iterator[Event]:
        """The stream's last events. `head`: a chunk up to its choices."""
        produced = self._generation.produced * (2 if self._mode == "wrong" else 1)
        total = usage(self._ask.prompt_tokens, produced, self._generation)
        event = Event(None, f'{head}],"usage":{total},"system_fingerprint":"{FINGERPRINT}"}}', Mark.USAGE)
        if self.final and self._mode != "after_done":
            yield event
        if self._mode == "twice":
            yield event
        yield DONE
        if self._mode == "after_done":
            yield event


def created() -> int:
    return int(time.time())


def usage(prompt: int, completion: int, generation: Generation | None = None) -> str:
    details = ""
    if generation is not None and generation.cached:
        details += f',"prompt_tokens_details":{_cached(generation)}'
    if generation is not None and generation.reasoned:
        details += f',"completion_tokens_details":{{"reasoning_tokens":{generation.reasoned}}}'
    return f'{{"prompt_tokens":{prompt},"total_tokens":{prompt + completion},"completion_tokens":{completion}{details}}}'


def full_usage(prompt: int, generation: Generation) -> str:
    """As in an answer that is not streamed."""
    cached = _cached(generation) if generation.cached else "null"
    reasoned = f'{{"reasoning_tokens":{generation.reasoned}}}' if generation.reasoned else "null"
    total = usage(prompt, generation.produced)[:-1]
    return f'{total},"prompt_tokens_details":{cached},"completion_tokens_details":{reasoned}}}'


def _cached(generation: Generation) -> str:
    return f'{{"cached_tokens":{generation.cached},"created_cache_tokens":0,"multimodal_tokens":null}}'


def error_body(code: int, message: str) -> dict[str, Any]:
    kind = _TYPES.get(code, "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def openai_failure(code: int, message: str) -> Iterator[Event]:
    """With blanks, which chunks do not have: vLLM writes this one with json.dumps."""
    yield Event(None, json.dumps(error_body(code, message)))
    yield DONE
