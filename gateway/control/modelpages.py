"""GET /v1/models where it is made here: the models of all backends, each as its backend describes it, and aliases."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import unquote_to_bytes

from gateway.control.probes import Probes
from gateway.core.models import Models, Target
from gateway.net.call import Local

_LIST = b"/v1/models"
_OWNER = "tokenpipe"


class ModelPages:
    """`created`: seconds since 1970, of what is described by nobody but the configuration."""

    def __init__(self, models: Models, probes: Probes, created: int):
        self._models, self._probes, self._created = models, probes, created

    async def page(self, path: bytes) -> Local:
        """Raises Refusal."""
        cards = await self._cards()
        if path == _LIST:
            return _json({"object": "list", "data": list(cards.values())})
        name = unquote_to_bytes(path[len(_LIST) + 1 :]).decode("utf-8", "replace")
        if name not in cards:
            raise self._models.unknown(name)
        return _json(cards[name])

    async def _cards(self) -> dict[str, dict[str, Any]]:
        """By name: each model described by the first backend that serves it, and of the configuration's names the aliases."""
        models = self._models
        asked = models.whole.asked
        if not asked:
            raise models.whole.nobody()
        lists = await asyncio.gather(*(self._probes.cards(backend.name) for backend in asked))
        cards: dict[str, dict[str, Any]] = {}
        for backend, found in zip(asked, lists, strict=True):
            described = {card["id"]: card for card in found}
            for name in (backend.models or ()) if backend.told else described:
                cards.setdefault(name, described.get(name) or self._card(name))
        aliases = {name: self._alias(name, rule.route_to, cards) for name, rule in models.rules.items() if rule.route_to}
        return cards | {name: card for name, card in aliases.items() if name not in cards}

    def _alias(self, name: str, targets: tuple[Target, ...], cards: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """The card of the first target that there is one of, under the alias' name."""
        target = next((target.model for target in targets if target.model in cards), targets[0].model)
        return {**cards.get(target, self._card(name)), "id": name, "root": target}

    def _card(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": _OWNER, "root": name, "parent": None}


def _json(content: dict[str, Any]) -> Local:
    return Local(200, json.dumps(content).encode())
