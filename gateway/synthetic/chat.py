"""`/v1/chat/completions`: a role chunk for each choice with the first token, then a chunk a token, then `[DONE]`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from gateway.synthetic.ask import Ask, Body, Limits, boolean, build, listed, texts_of_messages
from gateway.synthetic.dialect import FINGERPRINT, Accounts, created, full_usage, openai_failure
from gateway.synthetic.generation import Generation, Step
from gateway.synthetic.refusals import bad_request
from gateway.synthetic.speech import TOOL, Part, Sort
from gateway.synthetic.text import count_tokens, json_string, json_text
from gateway.synthetic.wire import Event, Mark


class Chat:
    path: ClassVar[str] = "/v1/chat/completions"

    def __init__(self, ask: Ask, generation: Generation, request_id: str | None):
        self._ask, self._generation = ask, generation
        self._accounts = Accounts(ask, generation)
        self._early = generation.plan.behaviour.role == "early"
        self._thought = generation.plan.behaviour.reasoning_field
        self._id = json_text(f"chatcmpl-{request_id or generation.id}")
        self._origin = f'"created":{created()},"model":{json_text(ask.model)},"choices":['
        self._chunk = f'{{"id":{self._id},"object":"chat.completion.chunk",{self._origin}'

    @staticmethod
    def read(body: Body, limits: Limits) -> Ask:
        messages = listed(body, "messages")
        prompt = count_tokens(texts_of_messages(messages))
        lengths = ("max_completion_tokens", "max_tokens")
        return build(body, limits, [prompt], length_fields=lengths, openai=True, begun=_begun(body, messages))

    def opening(self) -> Iterator[Event]:
        if self._early:
            yield from self._roles()

    def step(self, step: Step) -> Iterator[Event]:
        if step.first and not self._early:
            yield from self._roles()
        if step.number == 0 and step.finish == "abort":
            # Stopped while it waited for its first token: vLLM ends such a stream with no finish_reason at all.
            return
        if self._generation.usual and step.parts:
            yield from self._part(step.parts[0], step, step.finish)
            return
        # A parser's last delta is empty where an end-of-text token ended it; else the last token rides on it.
        riding = len(step.parts) if step.finish is None or step.finish == "stop" else len(step.parts) - 1
        for at, part in enumerate(step.parts):
            if part.texts[0] or step.finish is None or at >= riding:
                yield from self._part(part, step, step.finish if at >= riding else None)
        if step.finish is not None and riding == len(step.parts):
            for choice in range(self._ask.choices):
                yield self._token(choice, "", step.number, self._finish())

    def word(self) -> Event | None:
        if self._accounts.continuous:
            return None
        return self._token(0, '"content":\0', 0, None)

    def closing(self) -> Iterator[Event]:
        return self._accounts.close(self._chunk)

    def failure(self, code: int, message: str) -> Iterator[Event]:
        return openai_failure(code, message)

    def whole(self) -> str:
        generation = self._generation
        choices = ",".join(
            f'{{"index":{choice},"message":{self._message(choice)},"logprobs":null,'
            f'"finish_reason":"{self._finish()}","stop_reason":{generation.stop_reason},"token_ids":null,"routed_experts":null}}'
            for choice in range(self._ask.choices)
        )
        total = full_usage(self._ask.prompt_tokens, generation)
        return (
            f'{{"id":{self._id},"object":"chat.completion",{self._origin}{choices}],'
            f'"service_tier":null,"system_fingerprint":"{FINGERPRINT}","usage":{total},'
            f'"prompt_logprobs":null,"prompt_token_ids":null,"prompt_text":null,"kv_transfer_params":{generation.handoff},'
            f'"ec_transfer_params":{generation.encoded},"metrics":null}}'
        )

    def _finish(self) -> str | None:
        generation = self._generation
        return "tool_calls" if generation.finish == "stop" and generation.calls() else generation.finish

    def _message(self, choice: int) -> str:
        text, thought, calls = (
            found(choice) for found in (self._generation.text, self._generation.reasoning, self._generation.calls)
        )
        content = "null" if thought and not text else json_text(text)
        listed = ",".join(
            f'{{"id":"{self._call(at)}","type":"function","function":{{"name":"{TOOL}","arguments":{json_text(arguments)}}}}}'
            for at, arguments in enumerate(calls)
        )
        shown = f'"tool_calls":[{listed}],' if calls else ""
        return (
            f'{{"role":"assistant","content":{content},"refusal":null,"annotations":null,"audio":null,'
            f'"function_call":null,{shown}"reasoning":{json_text(thought) if thought else "null"}}}'
        )

    def _call(self, call: int) -> str:
        return f"chatcmpl-tool-{self._generation.id[2:]}{call:02x}"

    def _roles(self) -> Iterator[Event]:
        for choice in range(self._ask.choices):
            delta = f'{{"index":{choice},"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}]'
            counted = self._accounts.beside(self._ask.prompt_tokens, 0)
            yield Event(None, f'{self._chunk}{delta}{counted},"prompt_token_ids":null,"prompt_text":null}}', Mark.OPENING)

    def _part(self, part: Part, step: Step, finish: str | None) -> Iterator[Event]:
        for choice, text in enumerate(part.texts):
            if part.sort is Sort.TEXT:
                delta = f'"content":{json_string(text)}'
            elif part.sort is Sort.REASONING:
                delta = f'"{self._thought}":{json_string(text)}'
            elif part.sort is Sort.CALL:
                call = f'"id":"{self._call(part.call)}","type":"function","index":{part.call},"function":{{"name":"{TOOL}"}}'
                delta = f'"content":null,"tool_calls":[{{{call}}}]'
            else:
                call = f'"index":{part.call},"function":{{"arguments":{json_string(text)}}}'
                delta = f'"content":null,"tool_calls":[{{{call}}}]'
            yield self._token(choice, delta, step.number, finish)

    def _token(self, choice: int, delta: str, number: int, reason: str | None) -> Event:
        finish = "null" if reason is None else f'"{reason}","stop_reason":{self._generation.stop_reason}'
        # The fingerprint comes once: on the usage chunk where there is one.
        tail = "" if reason is None or self._accounts.final else f',"system_fingerprint":"{FINGERPRINT}"'
        counted = self._accounts.beside(self._ask.prompt_tokens, number, last=reason is not None)
        return Event(
            None,
            f'{self._chunk}{{"index":{choice},"delta":{{{delta}}},"logprobs":null,'
            f'"finish_reason":{finish},"token_ids":null}}]{counted}{tail}}}',
            Mark.OUTPUT if reason is None else Mark.FINISH,
        )


def _begun(body: Body, messages: list[Any]) -> str:
    """The message that is to be gone on with. vLLM's words where it is told to begin another one as well."""
    if not boolean(body, "continue_final_message"):
        return ""
    if body.get("add_generation_prompt") is None or boolean(body, "add_generation_prompt"):
        raise bad_request("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    return "".join(texts_of_messages(messages[-1:]))
