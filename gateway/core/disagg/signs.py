"""What the beginning of D's answer says of the hand-off: a failed load, a missed cache, a request that was dropped."""

from __future__ import annotations

import enum
import re
from typing import Any, Final

from gateway.core.disagg.body import from_json


class Sign(enum.Enum):
    NOTHING = enum.auto()  # an answer like any other
    FAILED = enum.auto()  # D could not load the KV: a transfer failure. Prefill anew; these params must not be used again
    MISSED = enum.auto()  # D's cache does not have enough of the prompt (finish_reason cache_threshold, llm-d)
    RECOMPUTED = enum.auto()  # D dropped it under pressure (stop_reason recomputed, vLLM Ascend): core.disagg.recompute


_WORTH: Final = re.compile(b'"(?:error|cache_threshold|recomputed|failed)"')
# vLLM 0.9 to 0.32 ends a request whose load failed with finish_reason error, worded so by its API server; the generic text is
# all that it says (kv_load_failure_policy: fail).
_FAILURES: Final = ("InternalServerError", "internal_server_error", "internal_error", "api_error", "server_error")


def sign(data: bytes, status: int = 200) -> Sign:
    """`data`: of one event, or a whole unstreamed answer, without its framing. `status`: of D's response.

    An error of the engine's own at the very beginning is taken for a failed load: nothing else is known to make vLLM end a
    request with 500 that it has admitted, and either way these params are spent. An error of the request (4xx) is none.
    """
    if status >= 400 and status != 500:
        return Sign.NOTHING
    if _WORTH.search(data) is None:
        return Sign.NOTHING
    said = from_json(data)
    if not isinstance(said, dict):
        return Sign.NOTHING
    if _failed(said) or _failed(said.get("response")):
        return Sign.FAILED
    for choice in _choices(said):
        if choice.get("stop_reason") == "recomputed":
            return Sign.RECOMPUTED
        if choice.get("finish_reason") == "cache_threshold":
            return Sign.MISSED
        if choice.get("finish_reason") == "error":
            return Sign.FAILED
    return Sign.NOTHING


def silent(data: bytes) -> bool:
    """Whether an event brings nothing at all, neither a text nor an end: what stands before a missed cache's sign."""
    said = from_json(data)
    choices = said.get("choices") if isinstance(said, dict) else None
    return isinstance(choices, list) and all(isinstance(choice, dict) and not _brings(choice) for choice in choices)


def _brings(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    inner = delta if isinstance(delta, dict) else {}
    said = {**choice, **inner, "delta": None, "index": None, "role": None}
    return any(said.values())


def turned_down(status: int, data: bytes) -> bool:
    """Whether D's serving layer has refused a request, by its whole answer: it has read it then, and P is told. What stands
    before that layer (keys, paths) words its refusals otherwise."""
    if status not in (400, 404, 422):
        return False
    said = from_json(data)
    return isinstance(said, dict) and isinstance(said.get("error"), dict)


def _failed(said: Any) -> bool:
    if not isinstance(said, dict):
        return False
    error = said if said.get("object") == "error" else said.get("error")  # the former: vLLM's, some time ago
    if isinstance(error, dict):
        code, kind = error.get("code"), error.get("type")
        if isinstance(code, int):
            return code == 500
        return code in _FAILURES or kind in _FAILURES
    return said.get("status") == "failed"


def _choices(said: dict[str, Any]) -> list[dict[str, Any]]:
    choices = said.get("choices")
    if isinstance(choices, list):
        return [choice for choice in choices if isinstance(choice, dict)]
    return [said]  # /inference/v1/generate, and SGLang's meta_info have theirs elsewhere: what is not there is no sign
