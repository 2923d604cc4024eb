"""Whether a request may be gone on with on another backend, and the body that asks for it.

A backend that dies in mid-stream leaves a text that the client has and another backend has not. Chat is gone on with as an
assistant's message that is to be continued (vLLM's `continue_final_message`, `add_generation_prompt`), a completion as a longer
prompt: of token ids, where the stream has told them all (`return_token_ids`), as a text is not always cut into the tokens that
it came as. All that is done to the client's body is splicing: every other octet stays as it was.

That is honest only where the second half is what the first backend might have said. So nothing is gone on with that depends on
more than the text: tools, structured output, logprobs, several choices, penalties that count what was generated, stop strings
and bad words, of which one half may stand on either side. Members that are not known here are not guessed at.

Limits in tokens shrink by what the client has got, so that number must be exact where there is such a limit (`counts`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from gateway.core.inspection import ABSENT_COMPLETIONS, Edit, splice
from gateway.core.jsonbody import Member, Members, NotAnObject, truth

CHAT: Final = b"/v1/chat/completions"
COMPLETIONS: Final = b"/v1/completions"

_LIMITS: Final = ("max_tokens", "max_completion_tokens", "min_tokens")
# Members that may say anything: they mean the same behind the seam.
_WORDS: Final = """
    model messages prompt stream temperature top_p top_k min_p seed user ignore_eos stop_token_ids repetition_penalty
    logit_bias allowed_token_ids add_special_tokens chat_template chat_template_kwargs documents mm_processor_kwargs
    media_io_kwargs cache_salt priority request_id metadata store service_tier prompt_cache_key safety_identifier
    include_reasoning reasoning_effort parallel_tool_calls return_token_ids include_stop_str_in_output
    spaces_between_special_tokens max_tokens max_completion_tokens min_tokens stream_options
"""
_ANY: Final = frozenset(_WORDS.split())
# Members that must say no more than they would by their absence; null does everywhere.
_HARMLESS: Final[dict[str, Callable[[Any], bool]]] = {
    "n": lambda value: value == 1,
    "best_of": lambda value: value == 1,
    "echo": lambda value: value is False,
    "logprobs": lambda value: value is False,
    "top_logprobs": lambda value: value == 0,
    "suffix": lambda value: value == "",
    "stop": lambda value: value in ([], ""),
    "bad_words": lambda value: value == [],
    "tools": lambda value: value == [],
    "functions": lambda value: value == [],
    "presence_penalty": lambda value: value == 0,
    "frequency_penalty": lambda value: value == 0,
    "response_format": lambda value: isinstance(value, dict) and value.get("type") == "text",
    "modalities": lambda value: value == ["text"],
    "use_beam_search": lambda value: value is False,
    "skip_special_tokens": lambda value: value is True,
}

_messages = msgspec.json.Decoder(list[msgspec.Raw])


class Continuation(NamedTuple):
    """A request that may be gone on with. `counts`: how many tokens the client has must be known exactly."""

    path: bytes
    body: bytes
    counts: bool
    usage: bool  # the client is told how many there were

    def after(self, text: str, tokens: int | None, prompt: bytes = b"", ids: bytes = b"") -> bytes | None:
        """The body that asks for what follows `text`, of which the client has `tokens` tokens; None where it cannot be had.
        `ids`: of these tokens, and `prompt`: of those before them, as the insides of JSON arrays, where they are known."""
        if not text:
            return self.body  # nothing has been said yet: the same question
        if self.counts and tokens is None:
            return None
        found = {member.key: member for member in _members(self.body)}
        limits = _shrink(self.path, found, tokens or 0)
        if limits is None:
            return None
        grown = _chat(self.body, found, text) if self.path == CHAT else _prompt(self.body, found, text, prompt, ids)
        return None if grown is None else splice(self.body, grown + limits)


def continuation(path: bytes, body: bytes, *, injected: bool = False) -> Continuation | None:
    """The request, if it is one that may be gone on with. `injected`: it was not the client that asked for usage."""
    if path not in (CHAT, COMPLETIONS):
        return None
    try:
        members = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return None
    if not isinstance(members, dict) or members.get("stream") is not True:
        return None
    for key, value in members.items():
        if value is None or key in _ANY:
            continue
        if key in ("continue_final_message", "add_generation_prompt"):
            continue
        harmless = _HARMLESS.get(key)
        if harmless is None or not harmless(value):
            return None
    if not (_fit_for_chat(members) if path == CHAT else _is_one_prompt(members.get("prompt"))):
        return None
    limited = any(type(members.get(key)) is int for key in _LIMITS)
    if any(members.get(key) is not None and type(members.get(key)) is not int for key in _LIMITS):
        return None  # a number in a string, or none: the engine's to read
    options = members.get("stream_options")
    usage = isinstance(options, dict) and truth(options.get("include_usage")) is True and not injected
    unsaid = path == COMPLETIONS and "max_tokens" not in members  # which means 16
    return Continuation(path, body, limited or usage or unsaid, usage)


def _fit_for_chat(members: dict[str, Any]) -> bool:
    messages, goes_on = members.get("messages"), truth(members.get("continue_final_message")) is True
    if not isinstance(messages, list) or not messages or not isinstance(messages[-1], dict):
        return False
    if not goes_on:
        # without a generation prompt nobody's turn has begun, and an assistant's message would begin one
        return truth(members.get("add_generation_prompt")) is not False
    last = messages[-1]
    return last.get("role") == "assistant" and isinstance(last.get("content"), str)


def _is_one_prompt(prompt: object) -> bool:
    """Text, or token ids."""
    return isinstance(prompt, str) or (isinstance(prompt, list) and bool(prompt) and all(type(one) is int for one in prompt))


def _members(body: bytes) -> list[Member]:
    members = Members()
    try:
        members.feed(body)
    except NotAnObject:  # what msgspec reads and this does not: a doubled byte order mark, 10,001 members
        return []
    return members.found if members.complete else []


def _shrink(path: bytes, found: dict[str, Member], tokens: int) -> list[Edit] | None:
    """The limits, less what has been generated; None where nothing is left."""
    edits = []
    for key in _LIMITS:
        member = found.get(key)
        if member is None or member.value is None or member.value == b"null":
            continue
        left = int(member.value) - tokens
        if key == "min_tokens":
            left = max(left, 0)
        elif left < 1:
            return None
        edits.append(Edit(member.value_begin, member.end, b"%d" % left))
    if path == COMPLETIONS and "max_tokens" not in found:
        if tokens >= ABSENT_COMPLETIONS:
            return None
        begin = next(iter(found.values())).begin
        edits.append(Edit(begin, begin, b'"max_tokens": %d, ' % (ABSENT_COMPLETIONS - tokens)))
    return edits


def _prompt(body: bytes, found: dict[str, Member], text: str, before: bytes, ids: bytes) -> list[Edit] | None:
    prompt = found.get("prompt")
    if prompt is None:
        return None
    if body[prompt.value_begin : prompt.value_begin + 1] == b"[":  # its own ids
        return [Edit(prompt.end - 1, prompt.end - 1, b", " + ids)] if ids else None
    if before and ids:
        return [Edit(prompt.value_begin, prompt.end, b"[%b, %b]" % (before, ids))]
    return [Edit(prompt.end - 1, prompt.end - 1, _within_string(text))]


def _chat(body: bytes, found: dict[str, Member], text: str) -> list[Edit] | None:
    messages = found.get("messages")
    if messages is None or text[-1:].isspace():
        return None  # templates trim a message, and what follows a blank is not what follows its absence
    goes_on = found.get("continue_final_message")
    if goes_on is not None and goes_on.value == b"true":
        at = _end_of_last_content(body[messages.value_begin : messages.end])
        return None if at is None else [Edit(messages.value_begin + at, messages.value_begin + at, _within_string(text))]
    end = messages.end - 1
    message = b', {"role": "assistant", "content": "' + _within_string(text) + b'"}'
    edits = [Edit(end, end, message)]
    for key, value in (("continue_final_message", b"true"), ("add_generation_prompt", b"false")):
        member = found.get(key)
        if member is None:
            edits.append(Edit(messages.begin, messages.begin, b'"%b": %b, ' % (key.encode(), value)))
        else:
            edits.append(Edit(member.value_begin, member.end, value))
    return edits


def _end_of_last_content(messages: bytes) -> int | None:
    """Where the text of the last message's content ends, in an array of messages."""
    try:
        last = bytes(_messages.decode(messages)[-1])
    except (msgspec.MsgspecError, IndexError):
        return None
    begin = len(messages[:-1].rstrip(b" \t\r\n")) - len(last)
    content = [member for member in _members(last) if member.key == "content"]
    if not content or messages[begin : begin + len(last)] != last:
        return None
    return begin + content[-1].end - 1


def _within_string(text: str) -> bytes:
    """As it stands between the quotes of a JSON string."""
    return msgspec.json.encode(text)[1:-1]
