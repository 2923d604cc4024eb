"""A Kubernetes API server, as far as EndpointSlices go: list and watch over TLS, with tokens, versions and their limits.

What it does is what the API's documentation says ("Kubernetes API Concepts", "EndpointSlice v1 discovery.k8s.io"): lists
come in pages of `limit` with a `continue` token, all of one version; a watch tells of what came after its
resourceVersion, an event a line, and ends in order after timeoutSeconds; versions older than the last `compact` are
410, of a list's continuation as a status, of a watch as a status or as an ERROR event; bookmarks come to those who allow
them; a token that is not known is 401, a namespace that it may not see 403, each with a Status.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import json
import ssl
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tests.support import script as s
from tests.support.messages import HttpWire, Message
from tests.support.upstream import RawUpstream

NAMESPACE, SERVICE = "inference", "vllm"
SERVICE_NAME = "kubernetes.io/service-name"


def endpoint(address: str, pod: str | None = None, **conditions: bool) -> dict[str, Any]:
    made: dict[str, Any] = {"addresses": [address], "nodeName": "node-1", "zone": "a"}
    made["conditions"] = {"ready": True, "serving": True, "terminating": False} | conditions
    if pod is not None:
        made["targetRef"] = {"kind": "Pod", "name": pod, "namespace": NAMESPACE, "uid": f"uid-{pod}"}
    return made


def endpoint_slice(
    name: str, *endpoints: dict[str, Any], ports: list[tuple[str | None, int]], family: str = "IPv4", service: str = SERVICE
) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": {SERVICE_NAME: service}, "generateName": "vllm-"},
        "addressType": family,
        "endpoints": list(endpoints) or None,  # as Go writes an empty list
        "ports": [{"name": label, "port": port, "protocol": "TCP"} for label, port in ports] or None,
    }


class KubernetesApi:
    def __init__(self) -> None:
        self.upstream = RawUpstream(self._serve)
        self.upstream.probes = {}
        self.tokens = {"token-1"}
        self.slices: dict[str, dict[str, Any]] = {}
        self.version = 1000
        self.oldest = 0  # the API remembers what came after this version
        self.gone_as_event = False
        self.refusal: tuple[int, str] | None = None  # instead of everything
        self.lists: list[dict[str, str]] = []  # queries
        self.watches: list[dict[str, str]] = []
        self.used: list[str] = []  # tokens
        self._history: list[tuple[int, str, dict[str, Any]]] = []
        self._pages: dict[int, list[dict[str, Any]]] = {}  # of lists that are under way, by version
        self._news = asyncio.Event()
        self._ending = 0  # how many times all watches were ended
        self._bookmarks = 0

    async def start(self, tls: ssl.SSLContext | None) -> None:
        await self.upstream.start(tls=tls)

    @property
    def url(self) -> str:
        return self.upstream.url.replace("127.0.0.1", "localhost")

    # what happens in the cluster --------------------------------------------------------------------------------------

    def put(self, one: dict[str, Any]) -> None:
        name = one["metadata"]["name"]
        kind = "MODIFIED" if name in self.slices else "ADDED"
        self._record(kind, one)
        self.slices[name] = one

    def delete(self, name: str) -> None:
        self._record("DELETED", self.slices.pop(name))

    def _record(self, kind: str, one: dict[str, Any]) -> None:
        self.version += 1
        one["metadata"]["resourceVersion"] = str(self.version)
        self._history.append((self.version, kind, copy.deepcopy(one)))
        self._tell()

    def elsewhere(self) -> None:
        """Something changes that nobody here watches: only the version moves."""
        self.version += 1

    def bookmark(self) -> None:
        self._bookmarks += 1
        self._tell()

    def compact(self) -> None:
        """Forget all but the present."""
        self.oldest = self.version
        self._history, self._pages = [], {}

    def end_watches(self) -> None:
        """In order, as after timeoutSeconds."""
        self._ending += 1
        self._tell()

    def cut_watches(self) -> None:
        for wire in self.upstream.open_connections:
            wire.reset()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    # what it answers --------------------------------------------------------------------------------------------------

    async def _serve(self, wire: HttpWire, request: Message) -> None:
        target = urlsplit(request.target)
        query = dict(parse_qsl(target.query))
        token = (request.get("authorization") or "").removeprefix("Bearer ")
        self.used.append(token)
        if self.refusal is not None:
            return await _status(wire, *self.refusal)
        if token not in self.tokens:
            return await _status(wire, 401, "Unauthorized")
        if target.path != f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices":
            return await _status(wire, 403, f'endpointslices is forbidden: cannot list resource in "{target.path}"')
        assert request.method == "GET"
        if query.get("watch") in ("1", "true"):
            self.watches.append(query)
            return await self._watch(wire, query)
        self.lists.append(query)
        return await self._list(wire, query)

    async def _list(self, wire: HttpWire, query: dict[str, str]) -> None:
        start, version = 0, self.version
        if "continue" in query:
            start, version = json.loads(base64.b64decode(query["continue"]))
            if version not in self._pages:
                return await _status(wire, 410, "The provided continue parameter is too old")
        else:
            self._pages[version] = [copy.deepcopy(one) for one in self.slices.values() if _selected(one, query)]
        limit = int(query.get("limit", "0")) or len(self._pages[version]) or 1
        items = self._pages[version][start : start + limit]
        meta: dict[str, Any] = {"resourceVersion": str(version)}
        if left := len(self._pages[version]) - start - len(items):
            meta["continue"] = base64.b64encode(json.dumps([start + limit, version]).encode()).decode()
            meta["remainingItemCount"] = left
        answer = {"kind": "EndpointSliceList", "apiVersion": "discovery.k8s.io/v1", "metadata": meta, "items": items}
        await s.reply(200, json.dumps(answer).encode())(wire, Message("", [], b""))
        return None

    async def _watch(self, wire: HttpWire, query: dict[str, str]) -> None:
        version, ending, bookmarks = int(query["resourceVersion"]), self._ending, self._bookmarks
        assert int(query["timeoutSeconds"]) > 0
        if version < self.oldest:
            told = f"too old resource version: {version} ({self.oldest})"
            if not self.gone_as_event:
                return await _status(wire, 410, told)
            await wire.send(s.head(200, [s.JSON_TYPE, ("transfer-encoding", "chunked")]))
            event = {"type": "ERROR", "object": {"kind": "Status", "status": "Failure", "message": told, "code": 410}}
            await wire.send(s.chunk(json.dumps(event).encode() + b"\n") + s.LAST)
            return None
        await wire.send(s.head(200, [s.JSON_TYPE, ("transfer-encoding", "chunked")]))
        while not wire.closed:
            news = self._news
            for at, kind, one in list(self._history):
                if at > version and _selected(one, query):
                    await _event(wire, kind, one)
                    version = at
            if bookmarks < self._bookmarks and query.get("allowWatchBookmarks") == "true":
                await _event(wire, "BOOKMARK", {"metadata": {"resourceVersion": str(self.version)}, "endpoints": None})
            bookmarks = self._bookmarks
            if ending != self._ending:
                await wire.send(s.LAST)
                return None
            await news.wait()
        return None


def _selected(one: dict[str, Any], query: dict[str, str]) -> bool:
    name, _, value = query["labelSelector"].partition("=")
    return bool(one["metadata"]["labels"].get(name) == value)


async def _event(wire: HttpWire, kind: str, one: dict[str, Any]) -> None:
    """A line in two chunks, as a large one comes."""
    line = json.dumps({"type": kind, "object": one}).encode() + b"\n"
    await wire.send(s.chunk(line[:40]))
    await wire.send(s.chunk(line[40:]))


async def _status(wire: HttpWire, code: int, message: str) -> None:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}
    await s.reply(code, json.dumps(body).encode(), reason="Refused")(wire, Message("", [], b""))


@contextlib.asynccontextmanager
async def kubernetes_api(tls: ssl.SSLContext | None) -> AsyncIterator[KubernetesApi]:
    api = KubernetesApi()
    await api.start(tls)
    try:
        yield api
    finally:
        await api.upstream.stop()
