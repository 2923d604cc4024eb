"""`/v1/messages`, Anthropic's API as vLLM speaks it: named events from message_start to message_stop, no pings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Final

from gateway.synthetic.ask import Ask, Body, Limits, build, listed, required, texts_of, texts_of_messages
from gateway.synthetic.dialect import error_body
from gateway.synthetic.generation import Generation, Step
from gateway.synthetic.speech import TOOL, Sort
from gateway.synthetic.text import count_tokens, json_string, json_text
from gateway.synthetic.wire import Event, Mark

# An aborted generation has no word here: null.
_STOP_REASONS: Final = {"stop": '"end_turn"', "length": '"max_tokens"'}
_BLOCKS: Final = {Sort.TEXT: '{"type":"text","text":""}', Sort.REASONING: '{"type":"thinking","thinking":""}'}
_DELTAS: Final = {
    Sort.TEXT: '"type":"text_delta","text":',
    Sort.REASONING: '"type":"thinking_delta","thinking":',
    Sort.ARGUMENTS: '"type":"input_json_delta","partial_json":',
}
_SIGNATURE: Final = "bb17d317f79046978a12f3a3f4284c3d"


class Messages:
    path: ClassVar[str] = "/v1/messages"

    def __init__(self, ask: Ask, generation: Generation, request_id: str | None):
        self._ask, self._generation = ask, generation
        # An OpenAI id on Anthropic's path: vLLM wraps its chat endpoint.
        self._id, self._model = json_text(f"chatcmpl-{request_id or generation.id}"), json_text(ask.model)
        self._early = generation.plan.behaviour.role == "early"
        # The content block that is open, and its number.
        self._sort: Sort | None = None
        self._block = -1

    @staticmethod
    def read(body: Body, limits: Limits) -> Ask:
        prompt = prompt_tokens(body)
        required(body, "max_tokens")
        return build(body, limits, [prompt], length_fields=("max_tokens",))

    def opening(self) -> Iterator[Event]:
        if self._early:
            yield self._start()

    def step(self, step: Step) -> Iterator[Event]:
        if step.first and not self._early:
            yield self._start()
        for part in step.parts:
            text = part.texts[0]
            if not text:
                continue
            if part.sort is Sort.CALL:
                yield from self._open(part.sort, self._tool(part.call))
                continue
            if part.sort is not Sort.ARGUMENTS and part.sort is not self._sort:
                yield from self._open(part.sort, _BLOCKS[part.sort])
            yield self._delta(part.sort, json_string(text), self._block)

    def word(self) -> Event | None:
        # Characters that cost several tokens: some steps have no text, and no event.
        if self._generation.plan.behaviour.text == "multibyte":
            return None
        return self._delta(Sort.TEXT, "\0", 0)

    def closing(self) -> Iterator[Event]:
        yield from self._close()
        delta = f'"delta":{{"stop_reason":{self._stop_reason()},"stop_sequence":null}}'
        yield _event("message_delta", f'{delta},"usage":{self._usage(self._generation.produced)}', Mark.FINISH)
        yield Event("message_stop", '{"type":"message_stop"}', Mark.LAST)

    def failure(self, code: int, message: str) -> Iterator[Event]:
        error = error_body(code, message)["error"]
        body = {"type": "error", "error": {"type": error["type"], "message": message}}
        yield Event("error", json_text(body), Mark.LAST)

    def whole(self) -> str:
        generation = self._generation
        thought, text = generation.reasoning(), generation.text()
        blocks = []
        if thought:
            blocks.append(f'{{"type":"thinking","thinking":{json_text(thought)},"signature":"{_SIGNATURE}"}}')
        if text:
            blocks.append(f'{{"type":"text","text":{json_text(text)}}}')
        for call, arguments in enumerate(generation.calls()):
            blocks.append(f"{self._tool(call)[:-3]}{arguments or '{}'}}}")
        transfers = {"kv_transfer_params": generation.handoff, "ec_transfer_params": generation.encoded}
        told = "".join(f',"{name}":{value}' for name, value in transfers.items() if value != "null")  # nulls are left out
        return (
            f'{{"id":{self._id},"type":"message","role":"assistant","content":[{",".join(blocks)}],"model":{self._model},'
            f'"stop_reason":{self._stop_reason()},"usage":{self._usage(generation.produced)}{told}}}'
        )

    def _start(self) -> Event:
        return _event(
            "message_start",
            f'"message":{{"id":{self._id},"type":"message","role":"assistant","content":[],"model":{self._model},'
            f'"stop_reason":null,"stop_sequence":null,"usage":{self._usage(0)}}}',
            Mark.OPENING,
        )

    def _delta(self, sort: Sort, said: str, block: int) -> Event:
        return _event("content_block_delta", f'"delta":{{{_DELTAS[sort]}{said}}},"index":{block}', Mark.OUTPUT)

    def _open(self, sort: Sort, block: str) -> Iterator[Event]:
        yield from self._close()
        self._sort = sort
        self._block += 1
        yield _event("content_block_start", f'"content_block":{block},"index":{self._block}')

    def _close(self) -> Iterator[Event]:
        if self._sort is Sort.REASONING:
            signature = f'"delta":{{"type":"signature_delta","signature":"{_SIGNATURE}"}}'
            yield _event("content_block_delta", f'{signature},"index":{self._block}')
        if self._sort is not None:
            yield _event("content_block_stop", f'"index":{self._block}')

    def _tool(self, call: int) -> str:
        id_ = f"chatcmpl-tool-{self._generation.id[2:]}{call:02x}"
        return f'{{"type":"tool_use","id":"{id_}","name":"{TOOL}","input":{{}}}}'

    def _stop_reason(self) -> str:
        generation = self._generation
        if generation.finish == "stop" and generation.calls():
            return '"tool_use"'
        return _STOP_REASONS.get(generation.finish or "", "null")

    def _usage(self, output: int) -> str:
        counted, cached = self._ask.prompt_tokens, self._generation.cached
        if not cached or not output:
            return f'{{"input_tokens":{counted},"output_tokens":{output}}}'
        # Told at the end only: message_start has the whole prompt in input_tokens.
        read = f'"cache_creation_input_tokens":0,"cache_read_input_tokens":{cached}'
        return f'{{"input_tokens":{counted - cached},"output_tokens":{output},{read}}}'


def prompt_tokens(body: Body) -> int:
    texts = texts_of(body.get("system")) + texts_of_messages(listed(body, "messages"))
    return count_tokens(texts)


def _event(kind: str, rest: str, mark: Mark = Mark.OTHER) -> Event:
    return Event(kind, f'{{"type":"{kind}",{rest}}}', mark)
