"""What an operator may choose about the synthetic upstream, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.synthetic.distribution import Distribution, parse


@dataclass(frozen=True)
class MockSettings:
    """`ttft` and `itl` are seconds or distributions; `tokens` counts the end-of-text token, as vLLM's usage does."""

    host: str = "127.0.0.1"
    port: int = 8001
    model: str = "synthetic"
    ttft: str | float = 0.05
    itl: str | float = 0.02
    tokens: int = 64
    seed: int = 0
    # Long enough that no ordinary load is refused; a test of vLLM's "too long" answers sets it low.
    max_model_len: int = 1_048_576

    def __post_init__(self) -> None:
        self.first_token()
        self.between_tokens()
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port: {self.port} is out of range: 0 to 65535 is expected")
        if not self.model:
            raise ValueError("model: the name is empty")
        if self.tokens < 1:
            raise ValueError(f"tokens: {self.tokens} is out of range: 1 or more is expected")
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len: {self.max_model_len} is out of range: 2 or more is expected")

    def first_token(self) -> Distribution:
        return _named("ttft", self.ttft)

    def between_tokens(self) -> Distribution:
        return _named("itl", self.itl)


def _named(name: str, spec: str | float) -> Distribution:
    try:
        return parse(spec)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
