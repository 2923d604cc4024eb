"""`/v1/chat/completions`: a role chunk for each choice with the first token, then a chunk a token, then `[DONE]`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from gateway.synthetic.ask import Ask, Body, Limits, build, listed, texts_of_messages
from gateway.synthetic.dialect import FINGERPRINT, created, full_usage, usage
from gateway.synthetic.generation import Generation, Step
from gateway.synthetic.text import count_tokens, json_string, json_text
from gateway.synthetic.wire import DONE, Event


class Chat:
    path: ClassVar[str] = "/v1/chat/completions"

    def __init__(self, ask: Ask, generation: Generation, request_id: str | None):
        self._ask, self._generation = ask, generation
        self._id = json_text(f"chatcmpl-{request_id or generation.id}")
        self._origin = f'"created":{created()},"model":{json_text(ask.model)},"choices":['
        self._chunk = f'{{"id":{self._id},"object":"chat.completion.chunk",{self._origin}'

    @staticmethod
    def read(body: Body, limits: Limits) -> Ask:
        prompt = count_tokens(texts_of_messages(listed(body, "messages")))
        return build(body, limits, [prompt], length_fields=("max_completion_tokens", "max_tokens"), openai=True)

    def opening(self) -> Iterator[Event]:
        yield from ()

    def step(self, step: Step) -> Iterator[Event]:
        if step.first:
            for choice in range(self._ask.choices):
                yield self._role(choice)
        if step.number == 0:
            # Stopped while it waited for its first token: vLLM ends such a stream with no finish_reason at all.
            return
        for choice, text in enumerate(step.texts):
            yield self._token(choice, text, step)

    def closing(self) -> Iterator[Event]:
        if self._ask.include_usage:
            total = usage(self._ask.prompt_tokens, self._generation.produced)
            yield None, f'{self._chunk}],"usage":{total},"system_fingerprint":"{FINGERPRINT}"}}'
        yield DONE

    def whole(self) -> str:
        generation = self._generation
        choices = ",".join(
            f'{{"index":{choice},"message":{{"role":"assistant","content":{json_text(generation.text(choice))},'
            '"refusal":null,"annotations":null,"audio":null,"function_call":null,"reasoning":null},"logprobs":null,'
            f'"finish_reason":"{generation.finish}","stop_reason":null,"token_ids":null,"routed_experts":null}}'
            for choice in range(self._ask.choices)
        )
        total = full_usage(self._ask.prompt_tokens, generation.produced)
        return (
            f'{{"id":{self._id},"object":"chat.completion",{self._origin}{choices}],'
            f'"service_tier":null,"system_fingerprint":"{FINGERPRINT}","usage":{total},'
            '"prompt_logprobs":null,"prompt_token_ids":null,"prompt_text":null,"kv_transfer_params":null,'
            '"ec_transfer_params":null,"metrics":null}'
        )

    def _role(self, choice: int) -> Event:
        delta = f'{{"index":{choice},"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}]'
        return None, f'{self._chunk}{delta}{self._usage(0)},"prompt_token_ids":null,"prompt_text":null}}'

    def _token(self, choice: int, text: str, step: Step) -> Event:
        finish = "null" if step.finish is None else f'"{step.finish}","stop_reason":null'
        # The fingerprint comes once: on the usage chunk where there is one.
        tail = "" if step.finish is None or self._ask.include_usage else f',"system_fingerprint":"{FINGERPRINT}"'
        return None, (
            f'{self._chunk}{{"index":{choice},"delta":{{"content":{json_string(text)}}},"logprobs":null,'
            f'"finish_reason":{finish},"token_ids":null}}]{self._usage(step.number)}{tail}}}'
        )

    def _usage(self, completion: int) -> str:
        return f',"usage":{usage(self._ask.prompt_tokens, completion)}' if self._ask.continuous_usage else ""
