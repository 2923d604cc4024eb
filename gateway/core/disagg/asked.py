"""A client's request as facts: all that a connector decides by, read once from the body's octets.

Flags and numbers are read as pydantic reads them, which is what engines do: "true" and 1 are true, "7" is 7. What pydantic
would refuse is refused here, for the gateway must not take for a stream what the engine does not (or the other way round).
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from typing import Final

import msgspec

from gateway.core.disagg.body import Body
from gateway.core.jsonbody import truth
from gateway.errors import Refusal

OCTETS: Final = 4  # of text to a token, roughly
MEDIUM: Final = 1024  # tokens that one image, sound or film is taken for, however many octets it has

# Members that say where KV is, or how it is found: a connector's own, never a client's (pd.md 2.8). vLLM's, SGLang's, llm-d's.
OWNED: Final = frozenset(
    (
        "kv_transfer_params",
        "ec_transfer_params",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "bootstrap_pair_key",
        "disagg_prefill_dp_rank",
        "routed_dp_rank",
        "data_parallel_rank",
        "data_parallel_rank_decode",
        "decode_tp_size",
        "cache_hit_threshold",
    )
)

_LIMITS: Final[dict[bytes, tuple[str, ...]]] = {  # the first that is given holds
    b"/v1/chat/completions": ("max_completion_tokens", "max_tokens"),
    b"/v1/completions": ("max_tokens",),
    b"/v1/responses": ("max_output_tokens",),
    b"/v1/messages": ("max_tokens",),
}
_GENERATE: Final = b"/inference/v1/generate"
_PROMPT: Final = ("prompt", "text", "token_ids", "input_ids", "prompt_embeds")  # the first that is given holds
_TEXTS: Final = frozenset(("messages", "prompt", "input", "text", "system", "instructions", "tools", "documents", "suffix"))
_IDS: Final = frozenset(("prompt", "token_ids", "input_ids"))
_PROMPTS: Final = _TEXTS | _IDS
# A medium by its place. Within text, quotes are escaped: no text can look like this.
_MEDIA: Final = re.compile(rb'"(?:url|data|image_url|video_url|audio_url|file_url|file_data|b64_json)"[ \t\r\n]*:[ \t\r\n]*"')
_FORCED: Final = frozenset(("required", "any", "tool", "function", "custom"))


class Prompt(enum.Enum):
    """What `prompt` (`text`, `input_ids`) is. Lists stand for several engine requests."""

    NONE = enum.auto()  # a conversation
    TEXT = enum.auto()
    TOKENS = enum.auto()
    TEXTS = enum.auto()
    TOKEN_LISTS = enum.auto()


class Asked:
    """One request. Raises Refusal for a body that no engine could read, or that two parsers could read in two ways."""

    __slots__ = (
        "beam_search",
        "body",
        "cleaned",
        "ec",
        "max_tokens",
        "n",
        "path",
        "prompt_kind",
        "prompt_logprobs",
        "prompts",
        "sampling",
        "stateful",
        "stream",
        "tokens",
        "tool_forced",
    )

    def __init__(self, path: bytes, octets: bytes):
        """`path`: without a query. `octets`: the whole body."""
        self.path = path
        self.body = body = Body(octets)
        # /inference/v1/generate, and SGLang's /generate
        self.sampling = sampling = body.inner("sampling_params") if "sampling_params" in body else None
        if path == _GENERATE and sampling is None and body.raw("sampling_params") is not None:
            raise Refusal("bad_request", "sampling_params is no JSON object", param="sampling_params")
        inner = body if path in _LIMITS else sampling or Body(b"{}")
        self.stream = flag(body, "stream")
        self.n = integer(inner, "n") or 1
        self.beam_search = flag(body, "use_beam_search")
        self.max_tokens = self._limit(body, inner)
        self.prompt_kind, self.prompts = self._prompts(body)
        self.tokens = self._tokens(body)  # of the prompt, by estimate
        self.tool_forced = "tool_choice" in body and _forced(body.value("tool_choice"))
        self.prompt_logprobs = self._prompt_logprobs(body, inner)  # the member that asks for them
        self.stateful = body.raw("previous_response_id") is not None or flag(body, "background")
        self.ec = b""  # ec_transfer_params, as encoders answered: P's, or of a D that serves alone
        # members that have a connector's own within: what they are without it
        self.cleaned = _cleaned(body, sampling) if "vllm_xargs" in body or sampling is not None else {}

    @property
    def encoded(self) -> dict[str, bytes]:
        """The member that whoever reads the prompt gets, as encoders answered."""
        return {"ec_transfer_params": self.ec} if self.ec else {}

    def edited(self, put: Mapping[str, bytes], drop: frozenset[str] = frozenset()) -> bytes:
        """The client's body with the members of `put`, and without `drop` and whatever is a connector's own."""
        return self.body.edited({**self.cleaned, **put} if self.cleaned else put, OWNED | drop if drop else OWNED)

    def _limit(self, body: Body, inner: Body) -> int | None:
        if self.path == b"/generate":  # SGLang
            return integer(inner, "max_new_tokens")
        for name in _LIMITS.get(self.path, ("max_tokens",)):
            if (limit := integer(inner, name)) is not None:
                return limit
        return None

    def _prompts(self, body: Body) -> tuple[Prompt, int]:
        """The kind, and of how many prompts; a list of one is one."""
        if body.names.isdisjoint(_PROMPT):
            return Prompt.NONE, 0
        for name in _PROMPT:
            raw = body.raw(name) if name != "text" or self.path == b"/generate" else None
            if raw is None:
                continue
            if not raw.startswith(b"["):
                return Prompt.TEXT, 1
            first = raw[1:].lstrip(b" \t\r\n")[:1]
            if first not in (b'"', b"["):
                return Prompt.TOKENS, 1
            try:
                count = len(msgspec.json.decode(raw, type=list[msgspec.Raw]))
            except (msgspec.MsgspecError, RecursionError):
                raise Refusal("bad_request", f"{name} is no list that can be read", param=name) from None
            return (Prompt.TEXTS if first == b'"' else Prompt.TOKEN_LISTS), count
        return Prompt.NONE, 0

    def _tokens(self, body: Body) -> int:
        tokens = 0
        for name in body.names:
            if name not in _PROMPTS:
                continue
            raw = body.raw(name) or b""
            if raw[:1] == b"[" and b'"' not in raw:
                if name in _IDS:
                    tokens += raw.count(b",") + 1
            elif name in _TEXTS:
                media, octets = _media(raw)
                tokens += MEDIUM * media + (len(raw) - octets) // OCTETS
        return tokens

    def _prompt_logprobs(self, body: Body, inner: Body) -> str | None:
        if (asked := inner.value("prompt_logprobs")) is not None and asked is not False:
            return "prompt_logprobs"
        # vLLM: with `echo`, these are of the prompt too
        of = {b"/v1/completions": "logprobs", b"/v1/chat/completions": "top_logprobs"}.get(self.path)
        if of is not None and body.raw(of) is not None and flag(body, "echo"):
            return "echo"
        return None


def _media(raw: bytes) -> tuple[int, int]:
    """How many media there are, and how many octets they have."""
    count = octets = at = 0
    if b'url"' not in raw and b'data"' not in raw and b'b64_json"' not in raw:  # found much sooner than what follows
        return 0, 0
    while medium := _MEDIA.search(raw, at):
        at = raw.find(b'"', medium.end()) + 1 or len(raw)  # neither URLs nor base64 have a quote, escaped or not
        count, octets = count + 1, octets + at - medium.start()
    return count, octets


def flag(body: Body, name: str) -> bool:
    """A member as pydantic reads a bool; False where it is missing or null. Raises Refusal."""
    if name not in body:
        return False
    value = body.value(name)
    if value is None and body.raw(name) is None:
        return False
    found = truth(value)
    if found is not None:
        return found
    raise Refusal("bad_request", f"{name} is neither true nor false", param=name)


def integer(body: Body, name: str) -> int | None:
    """A member as pydantic reads an int; None where it is missing or null. Raises Refusal."""
    if name not in body:
        return None
    value = body.value(name)
    if value is None and body.raw(name) is None:
        return None
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            pass
    elif isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return int(value)
    raise Refusal("bad_request", f"{name} is no whole number", param=name)


def _forced(choice: object) -> bool:
    """Whether a tool must be called: "required", or one by its name; Anthropic's any and tool."""
    if isinstance(choice, dict):
        if choice.get("type") == "allowed_tools":
            return choice.get("mode") == "required"
        choice = choice.get("type")
        return choice in _FORCED if isinstance(choice, str) else True
    return choice in _FORCED if isinstance(choice, str) else False


def _cleaned(body: Body, sampling: Body | None) -> dict[str, bytes]:
    """vLLM takes these for sampling parameters' extra_args, where kv_transfer_params would be a connector's."""
    cleaned = {}
    if (extra := body.inner("vllm_xargs")) is not None and not OWNED.isdisjoint(extra.names):
        cleaned["vllm_xargs"] = extra.edited(drop=OWNED)
    extra = sampling.inner("extra_args") if sampling is not None else None
    if sampling is not None and extra is not None and not OWNED.isdisjoint(extra.names):
        cleaned["sampling_params"] = sampling.edited({"extra_args": extra.edited(drop=OWNED)})
    return cleaned
