from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from aiohttp.test_utils import TestClient

from gateway.control.admin import admin_app
from gateway.errors import ConfigError

Client = TestClient[Any, Any]
Connect = Callable[..., Awaitable[Client]]

STREAM = {"request_id": "req-1", "client": "10.0.0.9:5", "phase": "stream", "age_s": 1.5, "paused": False}


class FakeControl:
    def __init__(self) -> None:
        self.accepts: list[str | None] = []
        self.reason: str | None = None
        self.config_error: Exception | None = None
        self.reloads = 0
        self.in_flight = {"req-1": STREAM}

    def render_metrics(self, accept: str | None) -> tuple[Iterator[bytes], str]:
        self.accepts.append(accept)
        return iter([b"up", b"", b" 1\n"]), "text/plain; version=0.0.4; charset=utf-8"

    def ready(self) -> str | None:
        return self.reason

    def backends(self) -> list[dict[str, Any]]:
        return [{"name": "b1", "state": "up"}]

    def streams(self) -> list[dict[str, Any]]:
        return list(self.in_flight.values())

    def abort(self, request_id: str) -> bool:
        return self.in_flight.pop(request_id, None) is not None

    async def reload(self) -> None:
        self.reloads += 1
        if self.config_error is not None:
            raise self.config_error

    def config(self) -> dict[str, Any]:
        return {"workers": 1, "backends": [{"api_key_file": "***"}]}


@pytest.fixture
def control() -> FakeControl:
    return FakeControl()


@pytest.fixture
def connect(control: FakeControl, aiohttp_client: Any) -> Connect:
    async def connect(**options: Any) -> Client:
        client: Client = await aiohttp_client(admin_app(control, **options))
        return client

    return connect


async def error(response: Any, status: int, code: str) -> str:
    assert response.status == status
    assert response.content_type == "application/json"
    body = await response.json()
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert body["error"]["code"] == code
    return str(body["error"]["message"])


async def test_metrics(connect: Connect, control: FakeControl) -> None:
    client = await connect()
    response = await client.get("/metrics", headers=[("Accept", "a/b;q=0.5"), ("Accept", "text/plain")])
    assert response.status == 200
    assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert await response.read() == b"up 1\n"
    assert control.accepts == ["a/b;q=0.5, text/plain"]


async def test_health(connect: Connect, control: FakeControl) -> None:
    client = await connect()
    for path in ("/livez", "/readyz"):
        response = await client.get(path)
        assert (response.status, await response.text()) == (200, "ok\n")
    control.reason = "draining"
    response = await client.get("/readyz")
    assert (response.status, await response.text()) == (503, "draining\n")
    assert (await client.get("/livez")).status == 200
    assert response.headers["Cache-Control"] == "no-store"


async def test_what_is_listed(connect: Connect, control: FakeControl) -> None:
    client = await connect()
    for path, content in [
        ("/-/backends", control.backends()), ("/-/streams", [STREAM]), ("/-/config", control.config()),
    ]:  # fmt: skip
        response = await client.get(path)
        assert response.status == 200
        assert response.content_type == "application/json"
        assert await response.json() == content


async def test_abort(connect: Connect) -> None:
    client = await connect()
    response = await client.delete("/-/streams/req-1")
    assert (response.status, await response.read()) == (204, b"")
    await error(await client.delete("/-/streams/req-1"), 404, "unknown_request")


async def test_abort_takes_an_odd_request_id(connect: Connect, control: FakeControl) -> None:
    control.in_flight["a/b c"] = STREAM
    client = await connect()
    assert (await client.delete("/-/streams/a%2Fb%20c")).status == 204


async def test_reload(connect: Connect, control: FakeControl) -> None:
    client = await connect()
    response = await client.post("/-/reload")
    assert (response.status, control.reloads) == (200, 1)
    assert await response.json() == {"status": "reloaded"}
    control.config_error = ConfigError("f.yaml: timeouts.idle: found 'x', expected a number")
    message = await error(await client.post("/-/reload"), 400, "bad_request")
    assert message == "f.yaml: timeouts.idle: found 'x', expected a number"


async def test_our_own_mistake(connect: Connect, control: FakeControl) -> None:
    control.config_error = RuntimeError("secret detail")
    client = await connect()
    message = await error(await client.post("/-/reload"), 500, "internal")
    assert "secret" not in message


@pytest.mark.parametrize("path", ["/", "/-/", "/metrics/", "/-/streams/", "/v1/models", "/-/nothing"])
async def test_unknown_path(connect: Connect, path: str) -> None:
    client = await connect()
    await error(await client.get(path), 404, "unknown_path")


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("POST", "/metrics", "GET, HEAD"),
        ("GET", "/-/reload", "POST"),
        ("PUT", "/-/streams", "GET, HEAD"),
        ("GET", "/-/streams/req-1", "DELETE"),
    ],
)
async def test_wrong_method(connect: Connect, method: str, path: str, allow: str) -> None:
    client = await connect()
    response = await client.request(method, path)
    await error(response, 405, "method_not_allowed")
    assert response.headers["Allow"] == allow


@pytest.mark.parametrize(
    "field",
    [None, "", "Bearer", "Bearer wrong", "Bearer  ", "Basic s3cret", "s3cret", "Bearer s3cret2", "Bearer s\u00e9cret"],
)
async def test_without_the_token(connect: Connect, control: FakeControl, field: str | None) -> None:
    client = await connect(token="s3cret")
    headers = {} if field is None else {"Authorization": field}
    for method, path in [
        ("GET", "/metrics"), ("GET", "/-/config"), ("POST", "/-/reload"), ("DELETE", "/-/streams/req-1"),
        ("GET", "/nothing"),
    ]:  # fmt: skip
        response = await client.request(method, path, headers=headers)
        await error(response, 401, "unauthenticated")
        assert response.headers["WWW-Authenticate"].startswith("Bearer ")
    assert control.reloads == 0
    assert "req-1" in control.in_flight
    for path in ("/livez", "/readyz"):
        assert (await client.get(path, headers=headers)).status == 200


@pytest.mark.parametrize("field", ["Bearer s3cret", "bearer s3cret", "BEARER   s3cret"])
async def test_with_the_token(connect: Connect, control: FakeControl, field: str) -> None:
    client = await connect(token="s3cret")
    assert (await client.get("/-/config", headers={"Authorization": field})).status == 200
    assert (await client.post("/-/reload", headers={"Authorization": field})).status == 200
    assert control.reloads == 1


def test_an_empty_token_is_no_token(control: FakeControl) -> None:
    with pytest.raises(ValueError, match="empty"):
        admin_app(control, token="")


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "nonsense"},
        {"Origin": "http://[bad"},
        {"Origin": "http://127.0.0.1:1"},  # another port is another origin
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "http://evil.example", "Host": "evil.example"},  # DNS rebinding: the page's own name, our address
        {"Origin": "http://evil.example:9400", "Host": "evil.example:9400"},
    ],
)
async def test_pages_of_others_change_nothing(connect: Connect, control: FakeControl, headers: dict[str, str]) -> None:
    client = await connect()
    await error(await client.post("/-/reload", headers=headers), 403, "forbidden")
    await error(await client.delete("/-/streams/req-1", headers=headers), 403, "forbidden")
    assert control.reloads == 0
    assert "req-1" in control.in_flight
    assert (await client.get("/-/streams", headers=headers)).status == 200


@pytest.mark.parametrize("host", ["127.0.0.1:9400", "localhost:9400", "LOCALHOST", "[::1]:9400", "gw.internal:9400"])
async def test_our_own_pages_may(connect: Connect, control: FakeControl, host: str) -> None:
    client = await connect(names=["GW.internal"])
    headers = {"Host": host, "Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}
    assert (await client.post("/-/reload", headers=headers)).status == 200
    assert control.reloads == 1


async def test_a_token_makes_any_name_ours(connect: Connect, control: FakeControl) -> None:
    client = await connect(token="s3cret")
    headers = {"Host": "gw", "Origin": "http://gw", "Authorization": "Bearer s3cret"}
    assert (await client.post("/-/reload", headers=headers)).status == 200
    headers["Origin"] = "http://evil.example"
    assert (await client.post("/-/reload", headers=headers)).status == 403


async def test_json_never_fails_over_an_odd_value(connect: Connect, control: FakeControl) -> None:
    control.in_flight["req-1"] = {"request_id": "req-1", "path": "/\udcff", "phase": object()}
    client = await connect()
    response = await client.get("/-/streams")
    assert json.loads(await response.read())[0]["path"] == "/\udcff"
