"""`/v1/responses`: named events, two before anything is computed, the last `response.completed`, no `[DONE]`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, ClassVar, Final

from gateway.synthetic.ask import Ask, Body, Limits, build, required, texts_of, texts_of_messages
from gateway.synthetic.dialect import created, error_body
from gateway.synthetic.generation import Generation, Step
from gateway.synthetic.speech import TOOL, Sort
from gateway.synthetic.text import count_tokens, json_string, json_text
from gateway.synthetic.wire import Event, Mark

_PARTS: Final[dict[Sort, dict[str, Any]]] = {
    Sort.TEXT: {"annotations": [], "text": "", "type": "output_text", "logprobs": []},
    Sort.REASONING: {"text": "", "type": "reasoning_text"},
}
_PREFIXES: Final = {Sort.TEXT: "msg_", Sort.REASONING: "rs_", Sort.CALL: "fc_"}


class Responses:
    path: ClassVar[str] = "/v1/responses"

    def __init__(self, ask: Ask, generation: Generation, request_id: str | None):
        # The client's own id is not used here: vLLM makes these up itself.
        self._ask, self._generation = ask, generation
        self._id, self._created = f"resp_{generation.id}", created()
        self._sequence = 0
        self._items: list[Sort] = []  # of the output so far
        self._sort: Sort | None = None  # of the one that is open

    @staticmethod
    def read(body: Body, limits: Limits) -> Ask:
        asked = required(body, "input")
        texts = [asked] if isinstance(asked, str) else texts_of_messages(asked if isinstance(asked, list) else [])
        texts += texts_of(body.get("instructions"))
        return build(body, limits, [count_tokens(texts)], length_fields=("max_output_tokens",))

    def opening(self) -> Iterator[Event]:
        snapshot = json_text(self._response())
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, f'{{"response":{snapshot}', mark=Mark.OPENING)

    def step(self, step: Step) -> Iterator[Event]:
        for part in step.parts:
            text = part.texts[0]
            if not text:
                continue
            if part.sort is Sort.CALL or (part.sort is not Sort.ARGUMENTS and part.sort is not self._sort):
                yield from self._close()
                yield from self._open(part.sort)
            if part.sort is not Sort.CALL:
                yield self._delta(part.sort, text)

    def word(self) -> Event | None:
        return None  # they are numbered

    def closing(self) -> Iterator[Event]:
        yield from self._close()
        yield self._event("response.completed", f'{{"response":{self.whole()}', mark=Mark.LAST)

    def failure(self, code: int, message: str) -> Iterator[Event]:
        yield Event("error", json_text({"type": "error", **error_body(code, message)}), Mark.LAST)

    def whole(self) -> str:
        return json_text(self._response(done=True))

    def _open(self, sort: Sort) -> Iterator[Event]:
        """A new item of the output: a message, reasoning, or one call of a tool."""
        self._sort = sort
        self._items.append(sort)
        item, at = self._item(len(self._items) - 1, "in_progress", None), len(self._items) - 1
        yield self._event("response.output_item.added", f'{{"item":{json_text(item)},"output_index":{at}')
        if sort is not Sort.CALL:
            where = f'{{"content_index":0,"item_id":"{item["id"]}","output_index":{at}'
            yield self._event("response.content_part.added", f'{where},"part":{json_text(_PARTS[sort])}')

    def _delta(self, sort: Sort, text: str) -> Event:
        at = len(self._items) - 1
        item, said = f'"item_id":"{self._name(at)}"', json_string(text)
        if sort is Sort.TEXT:
            data = f'{{"content_index":0,"delta":{said},{item},"logprobs":[],"output_index":{at}'
            return self._event("response.output_text.delta", data, mark=Mark.OUTPUT)
        if sort is Sort.REASONING:
            data = f'{{"content_index":0,"delta":{said},{item},"output_index":{at}'
            return self._event("response.reasoning_text.delta", data, mark=Mark.OUTPUT)
        data = f'{{"delta":{said},{item},"output_index":{at}'
        return self._event("response.function_call_arguments.delta", data, mark=Mark.OUTPUT)

    def _close(self) -> Iterator[Event]:
        if self._sort is None:
            return
        at = len(self._items) - 1
        sort, text, item = self._items[at], self._text(at), f'"item_id":"{self._name(at)}"'
        if sort is Sort.CALL:
            done, tail = f'{{"arguments":{json_text(text)},{item},"output_index":{at}', f',"name":"{TOOL}"'
            yield self._event("response.function_call_arguments.done", done, named=tail)
        else:
            where = f'{{"content_index":0,{item}'
            said = f',"text":{json_text(text)}'
            if sort is Sort.TEXT:
                yield self._event("response.output_text.done", f'{where},"logprobs":[],"output_index":{at}', said)
            else:
                yield self._event("response.reasoning_text.done", f'{where},"output_index":{at}', said)
            part = json_text(_part(sort, text))
            yield self._event("response.content_part.done", f'{where},"output_index":{at},"part":{part}')
        ended = json_text(self._item(at, "completed", text))
        yield self._event("response.output_item.done", f'{{"item":{ended},"output_index":{at}')
        self._sort = None

    def _event(self, kind: str, data: str, after: str = "", *, mark: Mark = Mark.OTHER, named: str = "") -> Event:
        """`data` is the object up to its sequence number, which nearly every event has second to last."""
        number, self._sequence = self._sequence, self._sequence + 1
        return Event(kind, f'{data},"sequence_number":{number}{after},"type":"{kind}"{named}}}', mark)

    def _name(self, at: int) -> str:
        """An item's id. The message's does not depend on what comes before it."""
        prefix, id_ = _PREFIXES[self._items[at]], self._generation.id[::-1]
        return f"{prefix}{id_}" if self._items[at] is Sort.TEXT else f"{prefix}{id_[2:]}{at:02x}"

    def _text(self, at: int) -> str:
        sort = self._items[at]
        if sort is Sort.TEXT:
            return self._generation.text()
        if sort is Sort.REASONING:
            return self._generation.reasoning()
        return self._generation.calls()[self._items[:at].count(Sort.CALL)]

    def _item(self, at: int, status: str, text: str | None) -> dict[str, Any]:
        sort, id_ = self._items[at], self._name(at)
        if sort is Sort.TEXT:
            content = [] if text is None else [_part(sort, text)]
            return {
                "id": id_,
                "content": content,
                "role": "assistant",
                "status": status,
                "type": "message",
                "phase": None,
            }
        if sort is Sort.REASONING:
            said = None if text is None else [_part(sort, text)]
            return {
                "id": id_,
                "summary": [],
                "type": "reasoning",
                "content": said,
                "encrypted_content": None,
                "status": status,
            }
        return {
            "arguments": text or "",
            "call_id": f"chatcmpl-tool-{self._generation.id[2:]}{at:02x}",
            "name": TOOL,
            "type": "function_call",
            "id": id_,
            "async": None,
            "caller": None,
            "namespace": None,
            "status": status,
        }

    def _output(self) -> list[dict[str, Any]]:
        """The items of a whole answer, whether they were streamed or not."""
        generation = self._generation
        self._items = [Sort.REASONING] * bool(generation.reasoning()) + [Sort.TEXT] * bool(generation.text())
        self._items += [Sort.CALL] * len(generation.calls())
        return [self._item(at, "completed", self._text(at)) for at in range(len(self._items))]

    def _response(self, *, done: bool = False) -> dict[str, Any]:
        ask, body, generation = self._ask, self._ask.body, self._generation
        cut = done and generation.finish == "length"
        temperature, top_p = body.get("temperature"), body.get("top_p")
        return {
            "id": self._id,
            "created_at": self._created,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata"),
            "model": ask.model,
            "object": "response",
            "output": self._output() if done else [],
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
            "usage": _usage(ask.prompt_tokens, generation) if done else None,
            "user": body.get("user"),
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "kv_transfer_params": json.loads(generation.handoff) if done else None,
            "ec_transfer_params": None,
            "input_messages": None,
            "output_messages": None,
        }


def _part(sort: Sort, text: str) -> dict[str, Any]:
    if sort is Sort.REASONING:
        return {"text": text, "type": "reasoning_text"}
    return {"annotations": [], "text": text, "type": "output_text", "logprobs": None}


def _usage(prompt: int, generation: Generation) -> dict[str, Any]:
    output = generation.produced
    cached = {"cached_tokens": generation.cached, "cache_write_tokens": 0}
    input_per_turn: dict[str, Any] = {"input_tokens_per_turn": [], "cached_tokens_per_turn": []}
    reasoning = {"reasoning_tokens": generation.reasoned, "tool_output_tokens": 0}
    per_turn: dict[str, Any] = {"output_tokens_per_turn": [], "tool_output_tokens_per_turn": []}
    return {
        "input_tokens": prompt,
        "input_tokens_details": {**cached, **input_per_turn},
        "output_tokens": output,
        "output_tokens_details": {**reasoning, **per_turn},
        "total_tokens": prompt + output,
    }
