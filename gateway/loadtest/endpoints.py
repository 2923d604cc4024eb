"""The four kinds of endpoint: their paths, and what a request's body says there.

Fields are named as `vllm bench serve` names them (vllm/benchmarks/lib/endpoint_request_func.py): `max_completion_tokens` on
chat, `max_tokens` on completions and messages, `max_output_tokens` (with `store: false`) on responses; always a stream, and
usage is asked for where it has to be. A temperature is set only if the caller sets one.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import msgspec

from gateway.core.dialects import Dialect, chat, completions, messages, responses
from gateway.loadtest.datasets import Prompt


class Kind(enum.Enum):
    """`value`: the name that --backend has for it; what vLLM calls by two names has the other in `ALIASES`."""

    CHAT = "openai-chat"
    COMPLETIONS = "openai"
    RESPONSES = "openai-responses"
    MESSAGES = "anthropic"

    @property
    def path(self) -> str:
        return _PATHS[self]

    @property
    def dialect(self) -> Dialect:
        return _DIALECTS[self]


_PATHS = {
    Kind.CHAT: "/v1/chat/completions",
    Kind.COMPLETIONS: "/v1/completions",
    Kind.RESPONSES: "/v1/responses",
    Kind.MESSAGES: "/v1/messages",
}
_DIALECTS: dict[Kind, Dialect] = {
    Kind.CHAT: chat,
    Kind.COMPLETIONS: completions,
    Kind.RESPONSES: responses,
    Kind.MESSAGES: messages,
}
ANTHROPIC_VERSION = "2023-06-01"
MESSAGES_TOKENS = 4096  # the Messages API must be told a most


@dataclasses.dataclass(frozen=True)
class Asking:
    """What all requests of a run have in common."""

    kind: Kind
    model: str
    ignore_eos: bool = False
    logprobs: int | None = None  # of chat and completions only
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)  # sampling parameters, --extra-body


def body(asking: Asking, prompt: Prompt) -> bytes:
    """A request's JSON."""
    kind, most = asking.kind, prompt.output_len
    said: dict[str, Any] = {"model": prompt.model or asking.model}
    if kind is Kind.COMPLETIONS:
        said["prompt"] = prompt.text
    elif kind is Kind.RESPONSES:
        said["input"] = prompt.messages or prompt.text
    else:
        said["messages"] = prompt.messages or [{"role": "user", "content": prompt.text}]
    if kind is Kind.MESSAGES:
        said["max_tokens"] = most or MESSAGES_TOKENS
    elif most is not None:
        said[_MOST[kind]] = most
    said["stream"] = True
    if kind in (Kind.CHAT, Kind.COMPLETIONS):
        said["stream_options"] = {"include_usage": True}
    if kind is Kind.RESPONSES:
        said["store"] = False
    if asking.logprobs is not None:
        said |= (
            {"logprobs": asking.logprobs} if kind is Kind.COMPLETIONS else {"logprobs": True, "top_logprobs": asking.logprobs}
        )
    if asking.ignore_eos:
        said["ignore_eos"] = True
    said.update(asking.extra)
    return msgspec.json.encode(said)


_MOST = {
    Kind.CHAT: "max_completion_tokens",
    Kind.COMPLETIONS: "max_tokens",
    Kind.RESPONSES: "max_output_tokens",
}


def generated_text(kind: Kind, payload: bytes) -> str:
    """The text in a stream's octets, for --save-detailed. Reasoning and tool calls are left out, as vLLM leaves them."""
    from gateway.core.sse import Scanner

    scanner, texts = Scanner(), []
    for event in [*scanner.feed(payload), *scanner.end()]:
        try:
            said = msgspec.json.decode(event.data)
        except ValueError:
            continue
        if isinstance(said, dict):
            texts.append(_text(kind, said))
    return "".join(text for text in texts if isinstance(text, str))


def _text(kind: Kind, said: dict[str, Any]) -> Any:
    try:
        if kind is Kind.CHAT:
            return said["choices"][0]["delta"]["content"]
        if kind is Kind.COMPLETIONS:
            return said["choices"][0]["text"]
        if kind is Kind.MESSAGES:
            return said["delta"]["text"]
        return said["delta"] if said["type"] == "response.output_text.delta" else ""
    except (LookupError, TypeError):
        return ""
