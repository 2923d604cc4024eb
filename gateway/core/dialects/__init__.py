"""The dialects, one object each, chosen by the request's path.

    dialect = for_path("/v1/chat/completions")
    reading = dialect.read(event)

A path without a dialect (embeddings, tokenize, ...) is relayed but not understood; errors there have OpenAI's shape.
"""

from __future__ import annotations

from typing import Final

from gateway.core.dialects.anthropic import Messages
from gateway.core.dialects.base import Dialect, Reading, failed
from gateway.core.dialects.openai import Chat, Completions
from gateway.core.dialects.responses import Responses

__all__ = (
    "DEFAULT",
    "Dialect",
    "Reading",
    "chat",
    "completions",
    "failed",
    "for_path",
    "messages",
    "responses",
)

chat: Final = Chat()
completions: Final = Completions()
responses: Final = Responses()
messages: Final = Messages()

DEFAULT: Final[Dialect] = chat  # how errors are worded where no dialect is known

_PATHS: Final[dict[str, Dialect]] = {
    "/v1/chat/completions": chat,
    "/v1/completions": completions,
    "/v1/responses": responses,
    "/v1/messages": messages,
}


def for_path(path: str) -> Dialect | None:
    """The dialect of a request's path (without a query)."""
    return _PATHS.get(path)
