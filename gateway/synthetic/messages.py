"""`/v1/messages`, Anthropic's API as vLLM speaks it: named events from message_start to message_stop, no pings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Final

from gateway.synthetic.ask import Ask, Body, Limits, build, listed, required, texts_of, texts_of_messages
from gateway.synthetic.generation import Generation, Step
from gateway.synthetic.text import count_tokens, json_string, json_text
from gateway.synthetic.wire import Event

# An aborted generation has no word here: null.
_STOP_REASONS: Final = {"stop": '"end_turn"', "length": '"max_tokens"'}


class Messages:
    path: ClassVar[str] = "/v1/messages"

    def __init__(self, ask: Ask, generation: Generation, request_id: str | None):
        self._ask, self._generation = ask, generation
        # An OpenAI id on Anthropic's path: vLLM wraps its chat endpoint.
        self._id, self._model = json_text(f"chatcmpl-{request_id or generation.id}"), json_text(ask.model)
        self._spoke = False

    @staticmethod
    def read(body: Body, limits: Limits) -> Ask:
        prompt = prompt_tokens(body)
        required(body, "max_tokens")
        return build(body, limits, [prompt], length_fields=("max_tokens",))

    def opening(self) -> Iterator[Event]:
        yield from ()

    def step(self, step: Step) -> Iterator[Event]:
        if step.first:
            yield _event(
                "message_start",
                f'"message":{{"id":{self._id},"type":"message","role":"assistant","content":[],"model":{self._model},'
                f'"stop_reason":null,"stop_sequence":null,"usage":{self._usage(0)}}}',
            )
        text = step.texts[0]
        if not text:
            return
        if not self._spoke:
            self._spoke = True
            yield _event("content_block_start", '"content_block":{"type":"text","text":""},"index":0')
        delta = f'"delta":{{"type":"text_delta","text":{json_string(text)}}},"index":0'
        yield _event("content_block_delta", delta)

    def closing(self) -> Iterator[Event]:
        if self._spoke:
            yield _event("content_block_stop", '"index":0')
        delta = f'"delta":{{"stop_reason":{self._stop_reason()},"stop_sequence":null}}'
        yield _event("message_delta", f'{delta},"usage":{self._usage(self._generation.produced)}')
        yield "message_stop", '{"type":"message_stop"}'

    def whole(self) -> str:
        text = self._generation.text()
        content = f'[{{"type":"text","text":{json_text(text)}}}]' if text else "[]"
        return (
            f'{{"id":{self._id},"type":"message","role":"assistant","content":{content},"model":{self._model},'
            f'"stop_reason":{self._stop_reason()},"usage":{self._usage(self._generation.produced)}}}'
        )

    def _stop_reason(self) -> str:
        return _STOP_REASONS.get(self._generation.finish or "", "null")

    def _usage(self, output: int) -> str:
        return f'{{"input_tokens":{self._ask.prompt_tokens},"output_tokens":{output}}}'


def prompt_tokens(body: Body) -> int:
    texts = texts_of(body.get("system")) + texts_of_messages(listed(body, "messages"))
    return count_tokens(texts)


def _event(kind: str, rest: str) -> Event:
    return kind, f'{{"type":"{kind}",{rest}}}'
