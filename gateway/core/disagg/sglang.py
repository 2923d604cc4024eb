"""SGLang: both engines get the same body and meet in a room, at P's bootstrap server (pd.md 5.12).

P's answer is withheld until D has fetched: both legs must be under way together. Engines in these modes can do nothing alone.
A room that is used twice crashes: each attempt has its own, and a batch one for each of its requests.
"""

from __future__ import annotations

from typing import Final

from gateway.core.disagg.asked import Asked, Prompt
from gateway.core.disagg.base import GENERATING, Bypass, Connector, Handoff, Leg, Order, Pair, Release
from gateway.core.disagg.body import as_json
from gateway.errors import Refusal

BATCH_MOST: Final = 4096  # requests that one request may stand for: prompts times answers
ROOMS: Final = 1 << 63  # a room is a signed 64-bit integer, and not negative


class Sglang(Connector):
    name = "sglang"
    order = Order.CONCURRENT
    hold = 300.0  # SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT, and the waiting timeout
    waits = True
    release_policy = Release.NEVER
    ranked = True
    lists = True
    serves_alone = False
    shapes = False  # the engine's mode ends the prefill
    paths = GENERATING | {b"/generate"}

    def judge(self, asked: Asked) -> Bypass | None:
        if asked.path in self.paths and _count(asked) > BATCH_MOST:
            raise Refusal("bad_request", f"found {_count(asked)} prompts times n; at most {BATCH_MOST} are taken", param="n")
        return super().judge(asked)

    def prefill(self, asked: Asked, pair: Pair, posted: bytes = b"") -> Leg:
        return Leg(asked.path, asked.edited(asked.encoded | self._meeting(asked, pair)), pair.attempt.encode())

    def decode(self, asked: Asked, pair: Pair, handoff: Handoff = Handoff()) -> Leg:
        put = self._meeting(asked, pair)
        if pair.prefill.dp_size > 1:
            put["disagg_prefill_dp_rank"] = as_json(pair.rank)
        return Leg(asked.path, asked.edited(put), pair.attempt.encode())

    def _meeting(self, asked: Asked, pair: Pair) -> dict[str, bytes]:
        host, port = pair.prefill.kv_name, pair.prefill.bootstrap_port
        found = rooms(pair, min(_count(asked), BATCH_MOST))
        if asked.n <= 1 and asked.prompt_kind not in (Prompt.TEXTS, Prompt.TOKEN_LISTS):
            values: tuple[object, object, object] = host, port, found[0]
        else:
            values = [host] * len(found), [port] * len(found), found
        return {f"bootstrap_{name}": as_json(value) for name, value in zip(("host", "port", "room"), values, strict=True)}


def _count(asked: Asked) -> int:
    return max(asked.prompts, 1) * max(asked.n, 1)


def rooms(pair: Pair, count: int) -> list[int]:
    """Rooms in a row from the pair's own on, all of which fall to its rank: P serves room modulo its ranks."""
    ranks = pair.prefill.dp_size
    step = ranks * (ROOMS // ranks)  # rooms beyond would fall to other ranks
    first = (pair.room // ranks * ranks + pair.rank) % step
    return [(first + i * ranks) % step for i in range(count)]
