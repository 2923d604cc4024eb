"""`/v1/responses`: named events, two before anything is computed, the last `response.completed`, no `[DONE]`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from gateway.synthetic.ask import Ask, Body, Limits, build, required, texts_of, texts_of_messages
from gateway.synthetic.dialect import created
from gateway.synthetic.generation import Generation, Step
from gateway.synthetic.text import count_tokens, json_string, json_text
from gateway.synthetic.wire import Event


class Responses:
    path: ClassVar[str] = "/v1/responses"

    def __init__(self, ask: Ask, generation: Generation, request_id: str | None):
        # The client's own id is not used here: vLLM makes these up itself.
        self._ask, self._generation = ask, generation
        self._id, self._item, self._created = f"resp_{generation.id}", f"msg_{generation.id[::-1]}", created()
        self._sequence = 0
        self._spoke = False

    @staticmethod
    def read(body: Body, limits: Limits) -> Ask:
        asked = required(body, "input")
        texts = [asked] if isinstance(asked, str) else texts_of_messages(asked if isinstance(asked, list) else [])
        texts += texts_of(body.get("instructions"))
        return build(body, limits, [count_tokens(texts)], length_fields=("max_output_tokens",))

    def opening(self) -> Iterator[Event]:
        snapshot = json_text(self._response())
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, f'{{"response":{snapshot}')

    def step(self, step: Step) -> Iterator[Event]:
        text = step.texts[0]
        if not text:
            return
        if not self._spoke:
            self._spoke = True
            yield from self._start()
        yield self._event(
            "response.output_text.delta",
            f'{{"content_index":0,"delta":{json_string(text)},"item_id":"{self._item}","logprobs":[],"output_index":0',
        )

    def closing(self) -> Iterator[Event]:
        if self._spoke:
            yield from self._stop()
        yield self._event("response.completed", f'{{"response":{self.whole()}')

    def whole(self) -> str:
        return json_text(self._response(done=True))

    def _start(self) -> Iterator[Event]:
        item = '"content":[],"role":"assistant","status":"in_progress","type":"message","phase":null'
        yield self._event("response.output_item.added", f'{{"item":{{"id":"{self._item}",{item}}},"output_index":0')
        part = '{"annotations":[],"text":"","type":"output_text","logprobs":[]}'
        yield self._event(
            "response.content_part.added",
            f'{{"content_index":0,"item_id":"{self._item}","output_index":0,"part":{part}',
        )

    def _stop(self) -> Iterator[Event]:
        text = self._generation.text()
        where = f'{{"content_index":0,"item_id":"{self._item}"'
        data = f'{where},"logprobs":[],"output_index":0'
        yield self._event("response.output_text.done", data, f',"text":{json_text(text)}')
        yield self._event("response.content_part.done", f'{where},"output_index":0,"part":{json_text(_part(text))}')
        item = json_text(self._message(text))
        yield self._event("response.output_item.done", f'{{"item":{item},"output_index":0')

    def _event(self, kind: str, data: str, after: str = "") -> Event:
        """`data` is the object up to its sequence number, which nearly every event has second to last."""
        number, self._sequence = self._sequence, self._sequence + 1
        return kind, f'{data},"sequence_number":{number}{after},"type":"{kind}"}}'

    def _message(self, text: str) -> dict[str, Any]:
        head = {"id": self._item, "content": [_part(text)], "role": "assistant", "status": "completed"}
        return {**head, "type": "message", "phase": None}

    def _response(self, *, done: bool = False) -> dict[str, Any]:
        ask, body, generation = self._ask, self._ask.body, self._generation
        cut = done and generation.finish == "length"
        spoken = generation.text() if done else ""
        temperature, top_p = body.get("temperature"), body.get("top_p")
        return {
            "id": self._id,
            "created_at": self._created,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata"),
            "model": ask.model,
            "object": "response",
            "output": [self._message(spoken)] if spoken else [],
            "parallel_tool_calls": True,
            "temperature": 1.0 if temperature is None else temperature,
            "tool_choice": "none",
            "tools": [],
            "top_p": 1.0 if top_p is None else top_p,
            "background": False,
            "max_output_tokens": generation.length if ask.max_tokens is None else ask.max_tokens,
            "max_tool_calls": None,
            "previous_response_id": None,
            "prompt": None,
            "reasoning": None,
            "service_tier": "auto",
            "status": "in_progress" if not done else "incomplete" if cut else "completed",
            "text": body.get("text"),
            "top_logprobs": None,
            "truncation": "disabled",
            "usage": _usage(ask.prompt_tokens, generation.produced) if done else None,
            "user": body.get("user"),
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "kv_transfer_params": None,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }


def _part(text: str) -> dict[str, Any]:
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}


def _usage(prompt: int, output: int) -> dict[str, Any]:
    cached = {"cached_tokens": 0, "cache_write_tokens": 0, "input_tokens_per_turn": [], "cached_tokens_per_turn": []}
    reasoning = {"reasoning_tokens": 0, "tool_output_tokens": 0}
    per_turn: dict[str, Any] = {"output_tokens_per_turn": [], "tool_output_tokens_per_turn": []}
    return {
        "input_tokens": prompt,
        "input_tokens_details": cached,
        "output_tokens": output,
        "output_tokens_details": {**reasoning, **per_turn},
        "total_tokens": prompt + output,
    }
