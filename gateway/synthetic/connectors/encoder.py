"""An engine that only encodes (EPD): its answer says where each medium's embeddings are, in `ec_transfer_params`."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from gateway.synthetic.ask import Ask
from gateway.synthetic.connectors.base import Connector, Incoming, compact
from gateway.synthetic.generation import Generation


class Encoder(Connector):
    """`--role encode`, with every connector. What nobody fetches stays for `lease` seconds, as a prefill's KV does."""

    name = "encoder"

    def prepare(self, ask: Ask, generation: Generation, incoming: Incoming) -> None:
        items = [part for message in ask.body.get("messages") or () for part in _media(message)]
        generation.on_finish = lambda: self._keep(items, generation)

    def _keep(self, items: list[dict[str, Any]], generation: Generation) -> None:
        host, port = self.address or (None, None)
        names = [hashlib.sha256(json.dumps(item, sort_keys=True).encode()).hexdigest() for item in items]
        if names:
            kept = {name: {"peer_host": host, "peer_port": port, "size_bytes": 4096, "nbytes": 4096} for name in names}
            generation.encoded = compact(kept)


def _media(message: Any) -> list[dict[str, Any]]:
    content = message.get("content") if isinstance(message, dict) else None
    parts = content if isinstance(content, list) else []
    return [part for part in parts if isinstance(part, dict) and part.get("type") not in (None, "text")]
