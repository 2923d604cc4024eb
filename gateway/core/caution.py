"""Why a backend that is up, and whose breaker is closed, is still given less, or nothing for now.

    unproven   it was added while others serve, or its first probe was ill: nothing, until a probe or an answer proves it
    busy       it said that it is full: 429, or 503 with Retry-After: nothing for so long
    silent     somebody was sent there after the last answer, long ago, and waits still: nothing until the first answer. When
               nobody waits there any more, one exchange every `TRIAL` seconds
    warming    it has just come back: its share grows to all of it over `slow_start` seconds (`core.ramp`)

None of these takes it out: where nobody else could take an exchange, it is asked all the same (`core.pool`).

An engine that has frozen still accepts, and its `/health` stays 200: only those who wait there can tell. What is long is told
by what is usual there, for streams (their first event) and for whole answers each by itself. Any answer, or half of one, is
enough to be heard of again. Whoever was sent there before the last answer says nothing: an engine that loses one request, or a
line that did, is well for all others. Nor does whoever waits there since before it was away.
"""

from __future__ import annotations

import enum
import math
from typing import NamedTuple


class Reason(enum.StrEnum):
    UNPROVEN = "unproven"
    BUSY = "busy"
    SILENT = "silent"
    WARMING = "warming"


# Looked up once: see core.head.
_UNPROVEN, _BUSY, _SILENT, WARMING = Reason

BUSY, BUSY_MOST = 1.0, 30.0  # seconds: for a 429 without Retry-After, and for which one is believed
TRIAL = 10.0  # seconds between exchanges that are sent to a silent backend at which nobody waits
UNUSUAL = 4.0  # times the usual wait is long
WHOLE = 6.0  # an answer that comes whole takes so many times longer than a first event, until it is known how long
LEAST = 0.1  # of its share, for one that has just come back, as Envoy's min_weight_percent
_NEVER, _NOW = math.inf, -math.inf


class CautionSettings(NamedTuple):
    """Seconds. `slow_start`: 0 for none. `silence`: the least that is long; None: nothing is."""

    slow_start: float = 10.0
    silence: float | None = 5.0


class Silence:
    """Those who wait for the first of an answer, of one kind of exchange."""

    __slots__ = ("asked", "floor", "patience", "silent", "tried", "usual", "waiting")

    def __init__(self, floor: float):
        self.waiting = 0
        self.asked = _NEVER  # when somebody was first sent there since the last answer
        self.usual = 0.0  # seconds to an answer: the slower ones of late
        self.floor = self.patience = floor
        self.silent = False
        self.tried = 0.0  # when something was last sent to it while silent

    def sent(self, now: float) -> None:
        if not self.waiting or self.asked == _NEVER:
            self.asked = now
        self.waiting += 1
        self.tried = now

    def answered(self, began: float, now: float) -> None:
        self.waiting -= 1
        self.heard()
        wait, usual = now - began, self.usual
        # up fast and down slowly: what is unusual is to be told from the slow ones, not from the mean
        usual = self.usual = usual + (wait - usual) * (0.5 if wait > usual else 0.05)
        self.patience = max(UNUSUAL * usual, self.floor)

    def heard(self) -> None:
        """Somebody was answered, of whatever kind: it does not stand still."""
        self.asked, self.silent = _NEVER, False

    def due(self) -> float:
        """When it will be silent, if nobody is answered until then."""
        return self.asked + self.patience if self.waiting else _NEVER

    def says_nothing(self, now: float) -> bool:
        if not self.silent and now >= self.due():
            self.silent = True
        return self.silent

    def may_try(self, now: float) -> bool:
        return not self.silent or (not self.waiting and now - self.tried >= TRIAL)


class Caution:
    """`look_from`: from then on there may be a `reason`, before it there is none."""

    __slots__ = ("_busy_until", "_returned", "_unproven", "look_from", "settings", "streams", "wholes")

    def __init__(self, settings: CautionSettings):
        self.streams, self.wholes = Silence(_NEVER), Silence(_NEVER)
        self.look_from = _NEVER
        self._unproven = False
        self._busy_until = 0.0
        self._returned: float | None = None  # while it is warming: since when
        self.apply(settings)

    def apply(self, settings: CautionSettings) -> None:
        self.settings = settings
        floor = _NEVER if settings.silence is None else settings.silence
        for kind, least in ((self.streams, floor), (self.wholes, floor * WHOLE)):
            kind.floor, kind.patience = least, max(UNUSUAL * kind.usual, least)
            kind.silent = kind.silent and least != _NEVER
        self.look_from = _NOW

    def reason(self, now: float) -> Reason | None:
        if self._unproven:
            return _UNPROVEN
        if now < self._busy_until:
            return _BUSY
        if self.streams.says_nothing(now) or self.wholes.says_nothing(now):
            return _SILENT
        if self._returned is not None:
            if now - self._returned < self.settings.slow_start:
                return WARMING
            self._returned = None
        self.look_from = min(self.streams.due(), self.wholes.due())
        return None

    def may_try(self, now: float) -> bool:
        """Whether a silent one may be sent an exchange, to see."""
        return self.streams.may_try(now) and self.wholes.may_try(now)

    def invites(self, now: float) -> bool:
        """Nothing speaks against sending it an exchange, be it that it is warming."""
        if now < self.look_from:
            return True
        reason = self.reason(now)
        return reason is None or reason is WARMING or (reason is _SILENT and self.may_try(now))

    def refuses(self, now: float) -> bool:
        """It has said itself that it wants nothing now."""
        return now < self._busy_until

    def share(self, now: float) -> float:
        """Of its weight, while it is warming."""
        if self._returned is None or now - self._returned >= self.settings.slow_start:
            return 1.0
        return max((now - self._returned) / self.settings.slow_start, LEAST)

    # what happens -----------------------------------------------------------------------------------------------------

    def doubted(self) -> None:
        """Nothing good is known of it yet."""
        self._unproven, self.look_from = True, _NOW

    def proven(self, now: float) -> None:
        if self._unproven:
            self._unproven = False
            self.returned(now)

    def returned(self, now: float) -> None:
        """It is back in service."""
        self.streams.heard()
        self.wholes.heard()
        if self.settings.slow_start:
            self._returned, self.look_from = now, _NOW

    def busy(self, seconds: float, now: float) -> None:
        """It asks for so many seconds' rest."""
        self._busy_until, self.look_from = max(self._busy_until, now + min(seconds, BUSY_MOST)), _NOW

    def sent(self, kind: Silence, now: float) -> None:
        kind.sent(now)
        if kind.asked + kind.patience < self.look_from:
            self.look_from = kind.asked + kind.patience

    def answered(self, kind: Silence, began: float, now: float) -> None:
        kind.answered(began, now)
        (self.wholes if kind is self.streams else self.streams).heard()
        if self._unproven:
            self.proven(now)
