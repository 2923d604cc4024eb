"""What a request asks for, in the words of the engine and no longer of an API.

The checks come in vLLM's order: first the body's shape, then the model's name, then what the numbers mean, then whether
the prompt fits. Fields nobody knows are ignored, as vLLM ignores them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from gateway.core.jsonbody import truth
from gateway.synthetic.refusals import bad_request, invalid, unknown_model

Body = dict[str, Any]

# vLLM's VLLM_MAX_N_SEQUENCES: one small request must not ask for a million answers.
_MAX_N: Final = 16_384


@dataclass(frozen=True, slots=True)
class Limits:
    """What the served model allows: its name, and how long prompt and output may be together."""

    model: str
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `prompts` are texts, or counts of tokens where the client sent tokens; `n` answers to each.
    `words_only`: the API knows neither reasoning nor tools. `begun`: text whose end may be the beginning of the answer, which
    is gone on with then."""

    body: Body
    prompt_tokens: int
    stream: bool
    model: str
    n: int = 1
    prompts: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    seed: int | None = None
    include_usage: bool = False
    continuous_usage: bool = False
    stream_interval: int | None = None
    words_only: bool = False
    begun: str = ""

    @property
    def choices(self) -> int:
        return self.n * self.prompts


def integer(body: Body, name: str) -> int | None:
    """As pydantic reads one, and the next two: vLLM's models are not strict."""
    value = body.get(name)
    if value is None or isinstance(value, int):
        return value if value is None else int(value)
    if isinstance(value, float) and not value.is_integer():
        why = "Input should be a valid integer, got a number with a fractional part"
        raise invalid("int_from_float", f"body.{name}", why, value)
    if isinstance(value, float):
        return int(value)
    if isinstance(value, str):
        if re.fullmatch(r"[+-]?\d{1,4300}(\.0+)?", value.strip()):
            return int(value.partition(".")[0])
        why = "Input should be a valid integer, unable to parse string as an integer"
        raise invalid("int_parsing", f"body.{name}", why, value)
    raise invalid("int_type", f"body.{name}", "Input should be a valid integer", value)


def number(body: Body, name: str) -> float | None:
    value = body.get(name)
    if value is None or isinstance(value, int | float):
        return value if value is None else value + 0  # true is 1
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            why = "Input should be a valid number, unable to parse string as a number"
            raise invalid("float_parsing", f"body.{name}", why, value) from None
    raise invalid("float_type", f"body.{name}", "Input should be a valid number", value)


def boolean(body: Body, name: str) -> bool:
    value = body.get(name)
    found = False if value is None else truth(value)
    if found is not None:
        return found
    if isinstance(value, int | float | str):
        raise invalid("bool_parsing", f"body.{name}", "Input should be a valid boolean, unable to interpret input", value)
    raise invalid("bool_type", f"body.{name}", "Input should be a valid boolean", value)


def mapping(body: Body, name: str) -> Body:
    value = body.get(name)
    if value is None:
        return {}
    if isinstance(value, dict):
        return value
    raise invalid("dict_type", f"body.{name}", "Input should be a valid dictionary", value)


def required(body: Body, name: str) -> Any:
    if name not in body:
        raise invalid("missing", f"body.{name}", "Field required", body)
    return body[name]


def listed(body: Body, name: str) -> list[Any]:
    value = required(body, name)
    if isinstance(value, list):
        return value
    raise invalid("list_type", f"body.{name}", "Input should be a valid list", value)


def build(
    body: Body,
    limits: Limits,
    prompts: Sequence[int],
    *,
    length_fields: Sequence[str],
    openai: bool = False,
    words_only: bool = False,
    begun: str = "",
) -> Ask:
    """Draw an `Ask` from a body whose prompts were counted already. `length_fields`: who of them is set first, wins.

    `openai`: the API is one of the two that know `n` and `stream_options`; the others ignore them.
    """
    shared = body if openai else {}
    lengths = {name: integer(body, name) for name in length_fields}
    length_field = next((name for name, value in lengths.items() if value is not None), length_fields[0])
    max_tokens, n = lengths[length_field], integer(shared, "n")
    for name in ("kv_transfer_params", "ec_transfer_params"):
        mapping(body, name)
    options, stream = mapping(shared, "stream_options"), boolean(body, "stream")
    if options and not stream:
        raise bad_request("Stream options can only be defined when `stream=True`.", "stream_options")
    include_usage = boolean(options, "include_usage")
    ask = Ask(
        body=body,
        prompt_tokens=sum(prompts),
        stream=stream,
        model=_model(body, limits),
        n=1 if n is None else n,
        prompts=len(prompts),
        max_tokens=max_tokens,
        min_tokens=integer(body, "min_tokens") or 0,
        ignore_eos=boolean(body, "ignore_eos"),
        seed=integer(body, "seed"),
        include_usage=include_usage,
        stream_interval=_interval(body),
        words_only=words_only,
        begun=begun,
        # Alone it does nothing: that is how vLLM reads it.
        continuous_usage=include_usage and boolean(options, "continuous_usage_stats"),
    )
    _check_numbers(ask, length_field, limits)
    _check_prompts(prompts, limits)
    return ask


def _interval(body: Body) -> int | None:
    interval = integer(body, "stream_interval")
    if interval is not None and interval < 1:
        raise bad_request(f"stream_interval must be at least 1, got {interval}.", "stream_interval", interval)
    return interval


def _model(body: Body, limits: Limits) -> str:
    name = body.get("model")
    if name is None or name == limits.model:
        return limits.model
    if not isinstance(name, str):
        raise invalid("string_type", "body.model", "Input should be a valid string", name)
    if name.partition("?")[0] == limits.model:
        return limits.model  # what follows turns knobs
    raise unknown_model(name, limits.model)


def _check_numbers(ask: Ask, length_field: str, limits: Limits) -> None:
    if ask.n < 1:
        raise bad_request(f"n must be at least 1, got {ask.n}.")
    if ask.n > _MAX_N:
        raise bad_request(f"n must be at most {_MAX_N}, got {ask.n}.", "n", ask.n)
    length = ask.max_tokens
    if length is not None and length < 1:
        raise bad_request(f"{length_field} must be at least 1, got {length}.", length_field, length)
    if length is not None and length > limits.max_model_len:
        text = f"{length_field}={length} cannot be greater than max_model_len={limits.max_model_len}."
        raise bad_request(f"{text} Please request fewer output tokens.", length_field, length)
    temperature, top_p = number(ask.body, "temperature"), number(ask.body, "top_p")
    if temperature is not None and temperature < 0:
        value = float(temperature)
        raise bad_request(f"temperature must be non-negative, got {value}.", "temperature", value)
    if top_p is not None and not 0 < top_p <= 1:
        raise bad_request(f"top_p must be in (0, 1], got {float(top_p)}.", "top_p", float(top_p))


def _check_prompts(prompts: Sequence[int], limits: Limits) -> None:
    longest = max(prompts, default=0)
    if longest < limits.max_model_len:
        return
    # vLLM stops counting one past the limit, so that the figure says nothing about how long the prompt really is.
    counted = limits.max_model_len + 1
    raise bad_request(
        f"This model's maximum context length is {limits.max_model_len} tokens. However, your prompt contains at least"
        f" {counted} input tokens, which exceeds this limit even without any output tokens. Please reduce the length of"
        " the input prompt.",
        "input_tokens",
        counted,
    )


def texts_of(content: Any) -> list[str]:
    """The text in a message's content: a string, or parts of which some are text."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        return []
    texts = (part.get("text") if isinstance(part, dict) else part for part in content)
    return [text for text in texts if isinstance(text, str)]


def texts_of_messages(messages: Sequence[Any]) -> list[str]:
    return [text for message in messages if isinstance(message, dict) for text in texts_of(message.get("content"))]
