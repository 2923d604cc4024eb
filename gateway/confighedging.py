"""What a model may opt in to: a second attempt beside a late one, and going on elsewhere when a backend dies in mid-stream."""

from __future__ import annotations

from typing import Annotated

from gateway.configbackends import Section
from gateway.configvalues import Seconds, whole


class HedgeConfig(Section, frozen=True):
    after: Seconds  # without a first event of a stream
    unstreamed: Seconds | None = None  # without an answer in one piece, which takes as long as it takes to generate it


class MigrateConfig(Section, frozen=True):
    attempts: Annotated[int, whole(1, 3)] = 1  # to go on elsewhere, for one exchange
