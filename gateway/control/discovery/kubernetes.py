"""Backends from Kubernetes: the EndpointSlices of a service, listed, then watched.

    LIST    all slices, page by page, and the resourceVersion that they are of
    WATCH   from that version on: ADDED, MODIFIED and DELETED change the list, BOOKMARK moves the version on
            ... ended in order (the API ends each after `timeoutSeconds`)   LIST, so that whatever a watch has missed is
                                                                            mended then
            ... broken off, or refused                                      WATCH from the last version, after a pause
            ... the version is too old (410, as a status or as an ERROR)    LIST

The service account's token is read anew for each request, as the kubelet replaces it before it expires, and once more
where it is refused. A watch that hears nothing is ended by its own deadline; its connection's keep-alive (net.sockets)
notices a peer that has vanished sooner.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

from gateway.configvalues import split_url
from gateway.control.discovery import Common, Snapshot, SourceFailed
from gateway.control.discovery.slices import Slice, members_of
from gateway.errors import GatewayError
from gateway.net.fetch import Page, open_page
from gateway.net.upstream import ConnectionPool, Origin, PoolSettings

PAGE = 500  # slices in one page of a list
LIST_MOST = 1 << 26  # octets of one page
EVENT_MOST = 1 << 24  # octets of one event
SECONDS = 30.0  # for one page, and for a watch to begin
WATCH_SECONDS = 300  # after which the API is asked to end a watch, and up to as many more, so that not all come at once
SHORT = 1.0  # seconds; a watch that does not last so long is a failure, or it would be asked for without a pause
GRACE = 30.0  # seconds that it may be late
LONGEST_PAUSE = 30.0
REASON_MOST = 300  # characters of what the API says that are told

IN_CLUSTER = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class KubernetesSettings(NamedTuple):
    service: str
    namespace: str
    server: str  # https://HOST:PORT of the API
    token_file: str | None
    ca: str | None
    port: int | str | None = None
    common: Common = Common()


class _Gone(Exception):
    """The version is older than the API's memory: list again."""


def in_cluster_server(environ: Mapping[str, str]) -> str | None:
    """The API as a pod is told of it."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        return None
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def in_cluster_namespace(folder: Path = IN_CLUSTER) -> str | None:
    try:
        return (folder / "namespace").read_text().strip() or None
    except OSError:
        return None


class KubernetesSource:
    """`chance`: a random number from 0 to 1."""

    def __init__(self, settings: KubernetesSettings, chance: Callable[[], float]):
        self.settings, self._chance = settings, chance
        self._slices: dict[str, Slice] = {}  # by name
        self._version: str | None = None  # of the list; None: there is none to go on from

    @property
    def name(self) -> str:
        settings = self.settings
        port = "" if settings.port is None else f":{settings.port}"
        return f"kubernetes {settings.namespace}/{settings.service}{port}"

    @property
    def longest_pause(self) -> float:
        return LONGEST_PAUSE

    async def snapshots(self) -> AsyncGenerator[Snapshot, None]:
        api = _Api(self.settings)
        while True:
            began, listed = time.monotonic(), self._version is None
            try:
                if self._version is None:
                    await self._list(api)
                    yield self._members()
                watch = await api.watch(self._version or "", int(WATCH_SECONDS * (1 + self._chance())))
                try:
                    while (event := await watch.next()) is not None:
                        self._apply(event)
                        yield self._members()
                finally:
                    watch.close()
                if time.monotonic() - began < SHORT:
                    raise SourceFailed(f"the API ended a watch within {SHORT:g} s")
            except _Gone:
                if listed and time.monotonic() - began < SHORT:
                    self._version = None
                    raise SourceFailed("the API has forgotten (410) what it has just listed") from None
            except GeneratorExit:  # it could not be put in force: it is to be tried again
                self._version = None
                raise
            self._version = None

    def _members(self) -> Snapshot:
        try:
            return members_of(self._slices.values(), self.settings.port, self.settings.common)
        except SourceFailed:
            self._version = None  # no event need ever mend what was listed
            raise

    async def _list(self, api: _Api) -> None:
        """Raises SourceFailed, and then the list of before stands."""
        slices: dict[str, Slice] = {}
        following = ""
        while True:
            answer = await api.list(following)
            try:
                for one in answer["items"] or ():
                    slices[one["metadata"]["name"]] = one
                following, version = answer["metadata"].get("continue", ""), answer["metadata"]["resourceVersion"]
            except (KeyError, TypeError, AttributeError):
                raise SourceFailed("found something else than a list of EndpointSlices in the API's answer") from None
            if not following:
                break
        self._slices, self._version = slices, str(version)

    def _apply(self, event: Any) -> None:
        try:
            kind, item = event["type"], event["object"]
            if kind == "ERROR":
                if item.get("code") == 410:
                    raise _Gone
                raise SourceFailed(f"the API ended a watch: {str(item.get('message'))[:REASON_MOST]}")
            name, version = item["metadata"].get("name"), item["metadata"]["resourceVersion"]
            if kind in ("ADDED", "MODIFIED"):
                self._slices[name] = item
            elif kind == "DELETED":
                self._slices.pop(name, None)
        except (KeyError, TypeError, AttributeError):
            raise SourceFailed("found something else than a watch's event in the API's answer") from None
        self._version = str(version)


class _Api:
    """Requests to one API server. Raises SourceFailed, and _Gone for 410."""

    def __init__(self, settings: KubernetesSettings):
        self._settings = settings
        scheme, address = split_url(settings.server)
        try:
            context = ssl.create_default_context(cafile=settings.ca) if scheme == "https" else None
        except OSError as error:
            what = error.strerror or error
            raise SourceFailed(f"{settings.ca} cannot be used ({what}); expected the API's CA in PEM") from None
        host = address.host if address.path is None else address.path
        port = address.port if address.path is None else None
        origin = Origin(settings.server, host, port, context, b"localhost" if port is None else str(address).encode())
        # where connections are opened; each is for one request
        self._connections = ConnectionPool(origin, PoolSettings(), asyncio.get_running_loop())

    async def list(self, following: str) -> Any:
        """One page; `following` is where the one before told of it."""
        with _translated():
            async with asyncio.timeout(SECONDS):
                page = await self._open({"limit": str(PAGE)} | ({"continue": following} if following else {}))
                try:
                    return json.loads(await page.whole(LIST_MOST))
                finally:
                    page.close()

    async def watch(self, version: str, seconds: int) -> _Watch:
        asked = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(seconds),
        }
        with _translated():
            async with asyncio.timeout(SECONDS):
                return _Watch(await self._open(asked), asyncio.get_running_loop().time() + seconds + GRACE)

    async def _open(self, asked: Mapping[str, str]) -> Page:
        """The answer to a request for slices, if it is 200. The token may have been replaced since it was read, so that
        it is tried once more where it is refused."""
        settings = self._settings
        query = urlencode({"labelSelector": f"kubernetes.io/service-name={settings.service}", **asked})
        path = f"/apis/discovery.k8s.io/v1/namespaces/{settings.namespace}/endpointslices?{query}"
        used = self._token()
        page = await open_page(self._connections, path, _fields(used))
        if page.head.status == 401 and (token := self._token()) != used:
            page.close()
            page = await open_page(self._connections, path, _fields(token))
        if page.head.status == 200:
            return page
        try:
            refusal = await self._refusal(page)
        finally:
            page.close()
        raise refusal

    def _token(self) -> str | None:
        """Blocks for as long as it takes to read a small file."""
        name = self._settings.token_file
        if name is None:
            return None
        try:
            token = Path(name).read_text("ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SourceFailed(f"{name} cannot be read ({error}); expected a service account's token") from None
        if not token or not token.isprintable():
            raise SourceFailed(f"{name} holds no token; expected a service account's")
        return token

    async def _refusal(self, page: Page) -> Exception:
        """What the API says against it, which is a Status (JSON) as a rule."""
        status, settings = page.head.status, self._settings
        if status == 410:
            return _Gone()
        body = await page.whole(EVENT_MOST)
        try:
            reason = str(json.loads(body)["message"])
        except (ValueError, KeyError, TypeError, RecursionError):
            reason = body.decode(errors="replace")
        hint = ""
        if status == 401:
            hint = f"; expected it to take the token in {settings.token_file}"
        elif status == 403:
            hint = "; expected a role that may list and watch endpointslices (discovery.k8s.io) in this namespace"
        return SourceFailed(f"the API at {settings.server} answered {status}: {reason[:REASON_MOST].strip()}{hint}")


def _fields(token: str | None) -> list[tuple[bytes, bytes]]:
    return [(b"Authorization", b"Bearer " + token.encode())] if token is not None else []


class _Watch:
    """The events of one watch."""

    def __init__(self, page: Page, deadline: float):
        self._page, self._deadline = page, deadline
        self._pieces: list[bytes] = []  # of a line that is not whole yet
        self._octets = 0
        self._lines: list[bytes] = []  # the next one last

    async def next(self) -> Any:
        """The next event; None at the watch's end, if the API ended it in order."""
        with _translated():
            while not self._lines:
                async with asyncio.timeout_at(self._deadline):
                    octets = await self._page.read()
                if not octets:
                    return None
                self._take(octets)
            return json.loads(self._lines.pop())

    def _take(self, octets: bytes) -> None:
        *whole, rest = octets.split(b"\n")
        if whole:
            whole[0] = b"".join(self._pieces) + whole[0]
            self._lines = [line for line in reversed(whole) if line.strip()]
            self._pieces, self._octets = [], 0
        self._pieces.append(rest)
        self._octets += len(rest)
        if self._octets > EVENT_MOST:
            raise SourceFailed(f"found an event of more than {EVENT_MOST} octets")

    def close(self) -> None:
        self._page.close()


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Other layers' errors become SourceFailed."""
    try:
        yield
    except SourceFailed:
        raise
    except TimeoutError:
        raise SourceFailed("the API has been silent for too long") from None
    except GatewayError as error:  # net's: it knows all that it connects to as backends
        raise SourceFailed(str(error).replace("the backend's", "the API's").replace("the backend", "the API at")) from None
    except (ValueError, RecursionError):
        raise SourceFailed("found something else than JSON in the API's answer") from None
