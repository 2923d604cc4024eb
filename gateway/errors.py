"""The gateway's errors. Each carries its origin by its class, and its reason as a word of `core.outcome`.

    GatewayError
    ├── ConfigError        the operator's file or flags
    ├── Refusal            before the response has begun: answered with a status, by its code
    ├── UpstreamFailed     the backend failed us, with a reason
    ├── EngineRefused      the backend's stream began with an error, which has not passed: answered as a status
    └── Ended              the response had begun, or there is nobody to answer: only the connection can end

Library exceptions are translated into these at one boundary each, and never leak past it.
"""

from __future__ import annotations

from gateway.core.outcome import RULINGS, Outcome, Ruling


class GatewayError(Exception):
    """Whatever this program itself says has gone wrong."""


class ConfigError(GatewayError):
    """A configuration that cannot be used. Its text names file, key path, what was found and what is expected."""


class Refusal(GatewayError):
    """An answer of the gateway's own. `code` is a key of `RULINGS`; `message` must let the user mend it alone.

    `outcome`: what is counted, where that is not what the code usually means.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after: int | None = None,
        outcome: Outcome | None = None,
    ):
        super().__init__(message)
        if code not in RULINGS:
            raise AssertionError(f"{code} is no refusal code")
        self.code, self.message, self.param, self.retry_after, self.outcome = code, message, param, retry_after, outcome

    @property
    def ruling(self) -> Ruling:
        return RULINGS[self.code]


class UpstreamFailed(Refusal):
    """The backend failed before the response had begun: a refusal, unless another attempt is possible.

    `unsent`: no byte of the request can have been read, so that even a POST may be tried elsewhere.
    """

    def __init__(self, code: str, message: str, *, unsent: bool = False):
        super().__init__(code, message)
        self.unsent = unsent

    @property
    def crossed(self) -> bool:
        """The backend had given the connection up before the request came: on another one it may be sent again at once."""
        return self.unsent and self.code == "stale_connection"


class EngineRefused(GatewayError):
    """The backend's stream began with an error, and nothing of it has passed: it can be answered as a status.

    `body`: the error as the backend worded it. Nothing goes on being generated, so another backend may be asked.
    """

    code = "stream_error"
    unsent = True

    def __init__(self, status: int, body: bytes):
        super().__init__(f"the backend's stream began with an error, status {status}")
        self.status, self.body = status, body


class Ended(GatewayError):
    """The exchange is over without a proper end of the response: the client's connection is to be cut."""

    def __init__(self, outcome: Outcome, message: str = "", *, code: str | None = None):
        super().__init__(message or outcome.value)
        self.outcome, self.code = outcome, code


def forget(error: Exception) -> None:
    """Where it came from: the frames on its way hold what it came from (a future, another error), which holds it."""
    error.__traceback__ = error.__context__ = None
