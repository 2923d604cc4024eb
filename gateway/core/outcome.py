"""How an exchange ends: its phases, its outcomes, and the one table of refusal codes.

Every exchange ends in exactly one `Outcome`, in exactly one `Phase`. The same words stand in the access log, in the
metrics and in `interface.md` section 4. An outcome says who ended it; the code, where there is one, says why.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class Phase(enum.StrEnum):
    """Where an exchange is. It only moves down this list, but for another attempt: back to CONNECT."""

    READ = "read"  # the request's head and body
    QUEUE = "queue"  # waiting to be admitted
    CONNECT = "connect"  # opening, or taking from the pool, a connection to the backend
    PREFILL = "prefill"  # the prefill leg of a disaggregated exchange
    WAIT = "wait"  # the request is sent, no response head yet
    FIRST_TOKEN = "first_token"  # the head has passed, no output event yet
    STREAM = "stream"  # output passes
    DONE = "done"  # the upstream's body has ended


class Outcome(enum.StrEnum):
    COMPLETE = "complete"
    EMPTY = "empty"
    REFUSED = "refused"
    UPSTREAM_STATUS = "upstream_status"
    STREAM_ERROR = "stream_error"
    UPSTREAM_TRUNCATED = "upstream_truncated"
    UPSTREAM_RESET = "upstream_reset"
    UPSTREAM_CONNECT = "upstream_connect"
    TIMEOUT_CONNECT = "timeout_connect"
    TIMEOUT_FIRST_BYTE = "timeout_first_byte"
    TIMEOUT_IDLE = "timeout_idle"
    TIMEOUT_PROGRESS = "timeout_progress"
    TIMEOUT_TOTAL = "timeout_total"
    CLIENT_GONE = "client_gone"
    CLIENT_STALLED = "client_stalled"
    DRAINING = "draining"
    INTERNAL = "internal"


# Outcomes that tell of the backend's health. A 4xx passed through, a client that left, a refusal: none of them does.
BACKEND_FAILURES = frozenset(
    {
        Outcome.UPSTREAM_RESET,
        Outcome.UPSTREAM_CONNECT,
        Outcome.TIMEOUT_CONNECT,
        Outcome.TIMEOUT_FIRST_BYTE,
        Outcome.TIMEOUT_IDLE,
        Outcome.TIMEOUT_PROGRESS,
    }
)


class Ruling(NamedTuple):
    """What one refusal code means: the HTTP status, the `type` of an OpenAI error, the outcome that is counted."""

    status: int
    type: str
    outcome: Outcome


_CLIENT, _AUTH, _MISSING, _BUSY, _SERVER = (
    "invalid_request_error",
    "authentication_error",
    "not_found_error",
    "rate_limit_error",
    "api_error",
)

RULINGS: dict[str, Ruling] = {
    "bad_request": Ruling(400, _CLIENT, Outcome.REFUSED),
    "unauthenticated": Ruling(401, _AUTH, Outcome.REFUSED),
    "forbidden": Ruling(403, "permission_error", Outcome.REFUSED),
    "unknown_path": Ruling(404, _MISSING, Outcome.REFUSED),
    "unknown_model": Ruling(404, _MISSING, Outcome.REFUSED),
    "method_not_allowed": Ruling(405, _CLIENT, Outcome.REFUSED),
    "request_timeout": Ruling(408, _CLIENT, Outcome.REFUSED),
    "length_required": Ruling(411, _CLIENT, Outcome.REFUSED),
    "body_too_large": Ruling(413, "request_too_large", Outcome.REFUSED),
    "target_too_long": Ruling(414, _CLIENT, Outcome.REFUSED),
    "unsupported_media": Ruling(415, _CLIENT, Outcome.REFUSED),
    "expectation_failed": Ruling(417, _CLIENT, Outcome.REFUSED),
    "rate_limited": Ruling(429, _BUSY, Outcome.REFUSED),
    "key_concurrency": Ruling(429, _BUSY, Outcome.REFUSED),
    "headers_too_large": Ruling(431, _CLIENT, Outcome.REFUSED),
    "internal": Ruling(500, _SERVER, Outcome.INTERNAL),
    "not_implemented": Ruling(501, _CLIENT, Outcome.REFUSED),
    "upstream_connect": Ruling(502, _SERVER, Outcome.UPSTREAM_CONNECT),
    "upstream_reset": Ruling(502, _SERVER, Outcome.UPSTREAM_RESET),
    "upstream_malformed": Ruling(502, _SERVER, Outcome.UPSTREAM_RESET),
    "stale_connection": Ruling(502, _SERVER, Outcome.UPSTREAM_RESET),
    "pd_handoff_missing": Ruling(502, "pd_handoff_missing", Outcome.REFUSED),
    "pd_transfer_failed": Ruling(502, "pd_transfer_failed", Outcome.REFUSED),
    "no_backend": Ruling(503, "overloaded_error", Outcome.REFUSED),
    "queue_full": Ruling(503, "overloaded_error", Outcome.REFUSED),
    "queue_timeout": Ruling(503, "overloaded_error", Outcome.REFUSED),
    "overloaded": Ruling(503, "overloaded_error", Outcome.REFUSED),
    "draining": Ruling(503, "overloaded_error", Outcome.REFUSED),
    "timeout_connect": Ruling(504, "timeout_error", Outcome.TIMEOUT_CONNECT),
    "timeout_first_byte": Ruling(504, "timeout_error", Outcome.TIMEOUT_FIRST_BYTE),
}
