"""`/v1/completions`: no role chunk; a list of prompts shares one stream, told apart by `index`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from gateway.synthetic.ask import Ask, Body, Limits, boolean, build
from gateway.synthetic.dialect import FINGERPRINT, Accounts, created, full_usage, openai_failure
from gateway.synthetic.generation import Generation, Step
from gateway.synthetic.refusals import bad_request, invalid
from gateway.synthetic.text import count_tokens, json_string, json_text
from gateway.synthetic.wire import Event, Mark


class Completions:
    path: ClassVar[str] = "/v1/completions"

    def __init__(self, ask: Ask, generation: Generation, request_id: str | None):
        self._ask, self._generation = ask, generation
        self._accounts = Accounts(ask, generation)
        id_, model = json_text(f"cmpl-{request_id or generation.id}"), json_text(ask.model)
        self._head = f'{{"id":{id_},"object":"text_completion","created":{created()},"model":{model},"choices":['
        self._echo = _prompts(ask.body) if boolean(ask.body, "echo") else None

    @staticmethod
    def read(body: Body, limits: Limits) -> Ask:
        boolean(body, "echo")
        asked = _prompts(body)
        begun = asked[0] if len(asked) == 1 and isinstance(asked[0], str) else ""
        prompts = [count_tokens([prompt]) if isinstance(prompt, str) else len(prompt) for prompt in asked]
        return build(body, limits, prompts, length_fields=("max_tokens",), openai=True, words_only=True, begun=begun)

    def opening(self) -> Iterator[Event]:
        yield from ()

    def step(self, step: Step) -> Iterator[Event]:
        if step.number == 0 and step.finish == "abort":
            return
        texts = step.parts[0].texts if step.parts else ("",) * self._ask.choices * (step.finish is not None)
        for choice, text in enumerate(texts):
            shown = json_text(self._echoed(choice) + text) if step.first else json_string(text)
            yield self._token(choice, shown, step.number, step.finish)

    def word(self) -> Event | None:
        return None if self._accounts.continuous else self._token(0, "\0", 0, None)

    def _token(self, choice: int, shown: str, number: int, ending: str | None) -> Event:
        last = ending is not None
        finish, reason = (f'"{ending}"', self._generation.stop_reason) if last else ("null", "null")
        tail = f',"system_fingerprint":"{FINGERPRINT}"' if last and not self._accounts.final else ""
        # Each choice's own count against its own prompt is what vLLM sends; prompts of one request count alike here.
        counted = self._accounts.beside(self._ask.prompt_tokens // self._ask.prompts, number, last=last)
        return Event(
            None,
            f'{self._head}{{"index":{choice},"text":{shown},"logprobs":null,"finish_reason":{finish},'
            f'"stop_reason":{reason},"prompt_token_ids":null,"token_ids":null}}]{counted}{tail}}}',
            Mark.FINISH if last else Mark.OUTPUT,
        )

    def closing(self) -> Iterator[Event]:
        return self._accounts.close(self._head)

    def failure(self, code: int, message: str) -> Iterator[Event]:
        return openai_failure(code, message)

    def whole(self) -> str:
        generation = self._generation
        choices = ",".join(
            f'{{"index":{choice},"text":{json_text(self._echoed(choice) + generation.text(choice))},"logprobs":null,'
            f'"finish_reason":"{generation.finish}","stop_reason":{generation.stop_reason},"token_ids":null,"prompt_logprobs":null,'
            '"prompt_token_ids":null,"routed_experts":null}'
            for choice in range(self._ask.choices)
        )
        total = full_usage(self._ask.prompt_tokens, generation)
        return (
            f'{self._head}{choices}],"service_tier":null,"system_fingerprint":"{FINGERPRINT}","usage":{total},'
            f'"kv_transfer_params":{generation.handoff},"ec_transfer_params":null,"metrics":null}}'
        )

    def _echoed(self, choice: int) -> str:
        prompt = None if self._echo is None else self._echo[choice // self._ask.n]
        # Tokens that the client made itself cannot be turned back into its text.
        return prompt if isinstance(prompt, str) else ""


def _prompts(body: Body) -> list[str | list[Any]]:
    """The prompts as they came: a text, a list of texts, tokens, or a list of lists of tokens."""
    prompt = body.get("prompt")
    if not prompt:
        raise bad_request("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list):
        if all(isinstance(token, int) for token in prompt):
            return [prompt]
        if all(isinstance(entry, str | list) for entry in prompt):
            return prompt
    raise invalid("string_type", "body.prompt", "Input should be a valid string", prompt)
