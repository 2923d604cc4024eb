"""The live page as it is served: to whom, and under which policy."""

from __future__ import annotations

import base64
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient

import gateway.control.dashboard as dashboard
from gateway.control.admin import admin_app
from tests.control.test_admin import FakeControl, error
from tests.control.test_dashboard_feed import House, samplers, samples
from tests.support.gateway import until

Client = TestClient[Any, Any]
Connect = Callable[..., Awaitable[Client]]
FILES = ("/-/dashboard", "/-/dashboard.css", "/-/dashboard.js")


class Control(FakeControl, House):  # type: ignore[misc]
    def __init__(self) -> None:
        FakeControl.__init__(self)
        House.__init__(self)

    def backends(self) -> list[dict[str, Any]]:
        return House.backends(self)


@pytest.fixture
def control() -> Control:
    return Control()


@pytest.fixture
def connect(control: Control, aiohttp_client: Any) -> Connect:
    async def connect(**options: Any) -> Client:
        client: Client = await aiohttp_client(admin_app(control, **options))
        return client

    return connect


def basic(password: str, name: str = "") -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()}


async def test_the_page_and_all_that_it_loads(connect: Connect) -> None:
    client = await connect()
    kinds = ("text/html", "text/css", "text/javascript")
    for path, kind in zip(FILES, kinds, strict=True):
        response = await client.get(path)
        assert (response.status, response.content_type, response.charset) == (200, kind, "utf-8")
        policy = response.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; script-src 'self';")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert response.headers["Cache-Control"] == "no-store"


def test_nothing_comes_from_elsewhere() -> None:
    """No address of another host in any file, but for the names of XML namespaces; no script or style in the page."""
    folder = Path(dashboard.__file__).parent
    for name in ("dashboard.html", "dashboard.css", "dashboard.js"):
        text = (folder / name).read_text()
        elsewhere = set(re.findall(r"""(?:https?:)?//[\w.-]+\.\w+[^\s"']*|@import|url\([^)]*\)""", text))
        assert elsewhere <= {"http://www.w3.org/2000/svg"}, f"{name}: {elsewhere}"
    page = (folder / "dashboard.html").read_text()
    assert re.findall(r"""(?:src|href)=["']([^"'#d][^"']*)""", page) == []  # but dashboard.*, data: and #
    assert not re.search(r"<style|\son\w+=|\sstyle=|<script[^>]*>[^<]", page)
    script = (folder / "dashboard.js").read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", script)


async def test_the_feed(connect: Connect) -> None:
    client = await connect()
    async with client.get("/-/events") as response:
        assert response.status == 200
        assert (await anext(samples(response)))["in_flight"] == 1
        response.close()
    await until(lambda: not samplers(), "the end of sampling")
    assert (await client.head("/-/events")).status == 405
    assert not samplers()


async def test_a_viewer_too_many(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.control.dashboard_feed.Feed.full", property(lambda feed: feed._viewers >= 1))
    client = await connect()
    first = await client.get("/-/events")
    refused = await client.get("/-/events")
    assert "watching" in await error(refused, 503, "overloaded")
    assert int(refused.headers["Retry-After"]) > 0
    first.close()
    await until(lambda: not samplers(), "the end of sampling")
    second = await client.get("/-/events")
    assert second.status == 200
    second.close()
    await until(lambda: not samplers(), "the end of sampling")


async def test_a_browser_is_asked_for_the_token(connect: Connect) -> None:
    """By HTTP's own means on the page alone; what a script asks for never makes a browser ask."""
    client = await connect(token="s3cret")
    response = await client.get("/-/dashboard")
    assert response.status == 401
    assert response.headers["WWW-Authenticate"].startswith('Basic realm="')
    assert "password" in await response.text()
    assert "default-src 'none'" in response.headers["Content-Security-Policy"]
    for path in (*FILES[1:], "/-/events"):
        response = await client.get(path)
        await error(response, 401, "unauthenticated")
        assert response.headers["WWW-Authenticate"].startswith("Bearer ")


@pytest.mark.parametrize("headers", [basic("s3cret"), basic("s3cret", "whoever"), {"Authorization": "Bearer s3cret"}])
async def test_the_page_with_the_token(connect: Connect, control: Control, headers: dict[str, str]) -> None:
    client = await connect(token="s3cret")
    for path in FILES:
        assert (await client.get(path, headers=headers)).status == 200
    async with client.get("/-/events", headers=headers) as response:
        assert response.status == 200
        response.close()
    assert (await client.delete("/-/streams/req-1", headers=headers)).status == 204
    await until(lambda: not samplers(), "the end of sampling")


@pytest.mark.parametrize(
    "headers",
    [
        basic(""), basic("s3cre"), basic("s3cret2"), basic("wrong", "s3cret"), basic("x:s3cret"),
        {"Authorization": "Basic s3cret"}, {"Authorization": "Basic "}, {"Authorization": "Basic !!!"},
        {"Authorization": "Basic " + base64.b64encode(b"s3cret").decode()}, {"Authorization": "Basic \u00e9"},
    ],
)  # fmt: skip
async def test_a_wrong_password(connect: Connect, control: Control, headers: dict[str, str]) -> None:
    client = await connect(token="s3cret")
    for path in (*FILES, "/-/events"):
        assert (await client.get(path, headers=headers)).status == 401
    assert (await client.delete("/-/streams/req-1", headers=headers)).status == 401
    assert "req-1" in control.in_flight


async def test_what_a_password_does_not_open(connect: Connect, control: Control) -> None:
    """A browser sends it with whatever any page asks of us, so that it is good for what the page itself needs only."""
    client = await connect(token="s3cret")
    for method, path in [("GET", "/metrics"), ("GET", "/-/config"), ("GET", "/-/streams"), ("POST", "/-/reload")]:
        await error(await client.request(method, path, headers=basic("s3cret")), 401, "unauthenticated")
    assert control.reloads == 0


@pytest.mark.parametrize("origin", [{"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}, {"Origin": "null"}])
async def test_other_pages_end_no_stream(connect: Connect, control: Control, origin: dict[str, str]) -> None:
    """With the password that the browser adds by itself, or without any; and nobody is told that they might."""
    for options, headers in (({}, {}), ({"token": "s3cret"}, basic("s3cret"))):
        client = await connect(**options)
        await error(await client.delete("/-/streams/req-1", headers={**headers, **origin}), 403, "forbidden")
        preflight = {"Access-Control-Request-Method": "DELETE", **origin}
        response = await client.options("/-/streams/req-1", headers={**headers, **preflight})
        assert response.status >= 400
        assert "Access-Control-Allow-Origin" not in response.headers
    assert "req-1" in control.in_flight


@pytest.mark.parametrize("host", ["evil.example:9400", "evil.example", "[bad", "127.0.0.1.evil.example"])
async def test_a_name_that_may_be_anybodys(connect: Connect, control: Control, host: str) -> None:
    """DNS rebinding: another page's name with our address would read, as its own, what is told here."""
    client = await connect()
    for path in (*FILES, "/-/events"):
        await error(await client.get(path, headers={"Host": host}), 403, "forbidden")
    assert control.looks == 0
    client = await connect(token="s3cret")  # which a browser gives nobody but whom it was typed in for
    assert (await client.get("/-/dashboard", headers={"Host": host, **basic("s3cret")})).status == 200


@pytest.mark.parametrize("host", ["127.0.0.1:9400", "localhost:19400", "[::1]:9400", "gw:9400"])
async def test_our_own_names(connect: Connect, host: str) -> None:
    client = await connect(names=["gw"])
    assert (await client.get("/-/dashboard", headers={"Host": host})).status == 200
