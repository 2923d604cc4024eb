"""Durations and counts as the operator writes them: a number, or a distribution to draw from.

A draw takes its randomness as an argument, so that whoever owns the seed owns the sequence. What can come out is
never negative: a normal distribution is cut at zero, as a token cannot come before the one it follows.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

# From randomness, the number of the draw (from 0) and the tokens of the prompt that are to be computed.
Draw = Callable[[Random, int, int], float]

_FORMS = (
    "constant:VALUE, normal:MEAN:STDDEV, uniform:LOW:HIGH, exponential:MEAN, lognormal:MEDIAN:SIGMA,"
    " per_token:BASE:EACH or list:VALUE:VALUE..."
)
_SECONDS = f"expected seconds (0.05) or a distribution: {_FORMS}"
_TOKENS = f"expected a number of tokens (64) or a distribution: {_FORMS}, accepted:DRAFTS:CHANCE"


@dataclass(frozen=True, slots=True)
class Distribution:
    """A parsed distribution. `spec` is what was written, for messages and equality; `drafts` those of `accepted`; `drawn`:
    whether there is any chance in it."""

    spec: str
    _draw: Draw = field(repr=False, compare=False)
    drafts: int = 0
    drawn: bool = field(default=True, compare=False)

    def draw(self, rng: Random, nth: int = 0, prompt: int = 0) -> float:
        """One value: `nth` chooses from a list, `prompt` tokens are what per_token counts."""
        return self._draw(rng, nth, prompt)

    def count(self, rng: Random, nth: int = 0, prompt: int = 0) -> int:
        """One value as a number of tokens: whole, and at least 1."""
        return max(1, round(self._draw(rng, nth, prompt)))


def parse(spec: object, *, tokens: bool = False) -> Distribution:
    """Read a duration, or a count of `tokens`. Raises ValueError with what was found and what is expected."""
    expected = _TOKENS if tokens else _SECONDS
    if isinstance(spec, list | tuple):
        spec = ":".join(("list", *map(str, spec)))
    if isinstance(spec, bool) or not isinstance(spec, str | int | float):
        raise ValueError(f"{spec!r} is not a {'number of tokens' if tokens else 'duration'}: {expected}")
    spec = str(spec)
    kind, *words = spec.strip().split(":")
    if kind not in _KINDS:
        if words:
            near = difflib.get_close_matches(kind, _KINDS, 1)
            hint = f"; the nearest is {near[0]}" if near else ""
            raise ValueError(f"{spec!r}: unknown distribution {kind!r}{hint}: {expected}")
        kind, words = "constant", [kind]
    names, make = _KINDS[kind]
    values = [_number(spec, word, expected) for word in words]
    if not (len(words) == len(names) or (names[-1] == "..." and words)):
        form = ":".join((kind, *names)).replace(":...", "...")
        raise ValueError(f"{spec!r}: {form} is expected, and {len(words)} value(s) were found")
    if tokens and kind == "constant" and values[0] < 1:
        raise ValueError(f"{words[0]} is out of range: 1 or more is expected")
    drafts, drawn = int(values[0]) if kind == "accepted" else 0, kind not in _SETTLED
    return Distribution(spec.strip(), make(spec, values), drafts, drawn)


def _number(spec: str, word: str | float, expected: str) -> float:
    try:
        value = float(word)
    except ValueError:
        raise ValueError(f"{spec!r}: {word!r} is not a number: {expected}") from None
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{spec!r}: {word} is out of range: a finite number, zero or more, is expected")
    return value


def _constant(value: float) -> Draw:
    return lambda rng, nth, prompt: value


def _normal(mean: float, deviation: float) -> Draw:
    return lambda rng, nth, prompt: max(0.0, rng.gauss(mean, deviation))


def _uniform(spec: str, low: float, high: float) -> Draw:
    if low > high:
        raise ValueError(f"{spec!r}: LOW {low:g} is above HIGH {high:g}: uniform:LOW:HIGH is expected")
    return lambda rng, nth, prompt: rng.uniform(low, high)


def _exponential(mean: float) -> Draw:
    return _constant(0.0) if mean == 0 else lambda rng, nth, prompt: rng.expovariate(1.0 / mean)


def _lognormal(median: float, sigma: float) -> Draw:
    # The median, and not the mean of the logarithm, since that is the figure one reads off a measurement.
    return lambda rng, nth, prompt: median * math.exp(rng.gauss(0.0, sigma))


def _per_token(base: float, each: float) -> Draw:
    """What prefill costs: a part for every token of the prompt that is not in the cache."""
    return lambda rng, nth, prompt: base + each * prompt


def _listed(values: Sequence[float]) -> Draw:
    """One after the other, and from the beginning again."""
    return lambda rng, nth, prompt: values[nth % len(values)]


def _accepted(spec: str, drafts: float, chance: float) -> Draw:
    """Speculative decoding: the token that is always right, and the drafts before the first one that was not."""
    if not drafts.is_integer() or drafts < 1 or chance > 1:
        raise ValueError(f"{spec!r}: accepted:DRAFTS:CHANCE is expected, DRAFTS 1 or more and CHANCE from 0 to 1")

    def draw(rng: Random, nth: int, prompt: int) -> float:
        rolls = [rng.random() < chance for _ in range(int(drafts))]
        return 1 + (rolls.index(False) if False in rolls else len(rolls))

    return draw


_SETTLED = ("constant", "per_token", "list")
_KINDS: dict[str, tuple[tuple[str, ...], Callable[[str, list[float]], Draw]]] = {
    "constant": (("VALUE",), lambda spec, v: _constant(v[0])),
    "normal": (("MEAN", "STDDEV"), lambda spec, v: _normal(v[0], v[1])),
    "uniform": (("LOW", "HIGH"), lambda spec, v: _uniform(spec, v[0], v[1])),
    "exponential": (("MEAN",), lambda spec, v: _exponential(v[0])),
    "lognormal": (("MEDIAN", "SIGMA"), lambda spec, v: _lognormal(v[0], v[1])),
    "per_token": (("BASE", "EACH"), lambda spec, v: _per_token(v[0], v[1])),
    "list": (("VALUE", "..."), lambda spec, v: _listed(v)),
    "accepted": (("DRAFTS", "CHANCE"), lambda spec, v: _accepted(spec, v[0], v[1])),
}
