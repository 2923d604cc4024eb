"""The body that makes an engine compute one token: the client's own, but for what pd.md 6.2 lists.

Whatever shapes the prompt is the same on both legs, for KV is matched by the tokens' places. What is changed is what limits
or steers the one token, what costs P something for nothing, and what would happen twice.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Final, NamedTuple

from gateway.core.disagg.asked import OWNED, Asked
from gateway.core.disagg.body import FALSE, ONE, Body


class Shape(NamedTuple):
    """What a family asks of the prefill body."""

    min_tokens: bool = False  # 1, and no stop strings: KV is staged only where the token is no early end (Mooncake). Else none
    first_token: bool = False  # the token is handed over: all that steers it stays


_PUT: Final[dict[bytes, tuple[str, ...]]] = {  # members that are 1 whether the client sent them or not
    b"/v1/chat/completions": ("max_tokens", "max_completion_tokens", "n"),
    b"/v1/completions": ("max_tokens", "n"),
    b"/v1/responses": ("max_output_tokens",),
    b"/v1/messages": ("max_tokens",),
}
_MIN_TOKENS: Final = frozenset((b"/v1/chat/completions", b"/v1/completions"))  # which take min_tokens
_LIMITS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n")  # 1 where the client sent them
_LEAST: Final = ("min_tokens", "min_completion_tokens")
_MANY: Final = frozenset(("best_of", "use_beam_search"))
_STOPS: Final = frozenset(("stop", "stop_token_ids", "include_stop_str_in_output", "stop_sequences"))
_GRAMMAR: Final = frozenset(("response_format", "structured_outputs", "text", "output_format"))
_LOGPROBS: Final = frozenset(("logprobs", "top_logprobs", "echo", "prompt_logprobs"))
_TWICE: Final = frozenset(("store", "background", "webhook", "webhooks", "metadata"))
_TOOLS: Final = {b"/v1/messages": b'{"type": "auto"}'}
# On /v1/messages vLLM refuses a thinking budget (1,024 tokens at least) that is not below max_tokens. Neither this nor
# "enabled" shapes the prompt there (0.32, entrypoints/anthropic/serving.py, _handle_thinking)
_THINKING: Final = b'{"type": "adaptive"}'


def shaped(asked: Asked, put: Mapping[str, bytes], shape: Shape, *, tool_auto: bool, prompt_logprobs: bool) -> bytes:
    """`put`: the connector's own members. `tool_auto`: a forced tool becomes auto. `prompt_logprobs`: P computes them."""
    path, body = asked.path, asked.body
    new = {**asked.cleaned, **_always(shape, path)}
    for name in _LIMITS if not shape.min_tokens else _LIMITS + _LEAST:
        if name in body:
            new[name] = ONE
    if tool_auto and asked.tool_forced:
        new["tool_choice"] = _TOOLS.get(path, b'"auto"')
    if path == b"/v1/messages" and b'"enabled"' in (body.raw("thinking") or b""):
        new["thinking"] = _THINKING
    keep_logprobs = prompt_logprobs and asked.prompt_logprobs is not None
    if asked.sampling is not None or path == b"/inference/v1/generate":
        new["sampling_params"] = _sampling(
            Body(new.get("sampling_params") or body.raw("sampling_params") or b"{}"), shape, keep_logprobs
        )
    dropped = _dropped(shape, keep_logprobs, path)
    if not shape.first_token and (guided := [name for name in body.names if name.startswith("guided_")]):
        dropped = dropped.union(guided)
    new.update(put)
    return body.edited(new, dropped)


@functools.lru_cache(64)
def _always(shape: Shape, path: bytes) -> dict[str, bytes]:
    """Members that are put in, whether the client sent them or not."""
    put = {"stream": FALSE, **dict.fromkeys(_PUT.get(path, ()), ONE)}
    return put | {"min_tokens": ONE} if shape.min_tokens and path in _MIN_TOKENS else put


@functools.lru_cache(64)
def _dropped(shape: Shape, keep_logprobs: bool, path: bytes) -> frozenset[str]:
    dropped = OWNED | _TWICE | _MANY | {"stream_options"}
    if not shape.min_tokens:
        dropped |= frozenset(_LEAST)
    if not shape.first_token:
        dropped |= _GRAMMAR | (_STOPS if shape.min_tokens else frozenset())
        dropped |= _LOGPROBS - ({"prompt_logprobs"} if keep_logprobs else frozenset())
    return dropped - {"text"} if path == b"/generate" else dropped  # SGLang: there it is the prompt


def _sampling(sampling: Body, shape: Shape, keep_logprobs: bool) -> bytes:
    """vLLM's sampling_params, of /inference/v1/generate."""
    new = {"max_tokens": ONE}
    if "n" in sampling:
        new["n"] = ONE
    dropped = {"best_of"}
    if shape.min_tokens:
        new["min_tokens"] = ONE
    else:
        dropped.add("min_tokens")
    if not shape.first_token:
        dropped |= {"structured_outputs", "guided_decoding"} | (_STOPS if shape.min_tokens else set())
        dropped |= {"logprobs"} if keep_logprobs else {"logprobs", "prompt_logprobs"}
    return sampling.edited(new, dropped)
