"""EndpointSlices listed and watched, over TLS, against an API server that does what the real one's documentation says."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from gateway.config import Config
from gateway.configbackends import Discovery, Kubernetes
from gateway.control.discovery import kubernetes as sources
from gateway.control.discovery.kubernetes import KubernetesSettings, KubernetesSource
from gateway.control.reload import sources_of
from gateway.errors import ConfigError
from tests.support.following import Follower, following
from tests.support.gateway import until
from tests.support.kubernetes import NAMESPACE, SERVICE, KubernetesApi, endpoint, endpoint_slice, kubernetes_api
from tests.support.tls import Certificates

Follow = Callable[..., AbstractAsyncContextManager[Follower]]
HTTP: list[tuple[str | None, int]] = [("http", 8000)]


def pods(slice_name: str, *numbers: int, **more: Any) -> dict[str, Any]:
    return endpoint_slice(slice_name, *(endpoint(f"10.1.0.{n}", f"vllm-{n}") for n in numbers), ports=HTTP, **more)


def named(*numbers: int) -> list[str]:
    return [f"vllm-{n}.{NAMESPACE}:8000" for n in numbers]


@pytest.fixture
async def api(certificates: Certificates) -> AsyncIterator[KubernetesApi]:
    async with kubernetes_api(certificates.server_context()) as api:
        api.put(pods("s1", 1, 2))
        yield api


@pytest.fixture
def token(tmp_path: Path) -> Path:
    token = tmp_path / "token"
    token.write_text("token-1\n")
    return token


@pytest.fixture
def follow(api: KubernetesApi, token: Path, certificates: Certificates, monkeypatch: pytest.MonkeyPatch) -> Follow:
    monkeypatch.setattr(sources, "SHORT", 0.0)
    monkeypatch.setattr(sources, "LONGEST_PAUSE", 0.05)

    def follow(**more: Any) -> AbstractAsyncContextManager[Follower]:
        given = {"service": SERVICE, "namespace": NAMESPACE, "server": api.url, "ca": str(certificates.ca)}
        settings = KubernetesSettings(**{**given, "token_file": str(token), **more})  # type: ignore[arg-type]
        return following(KubernetesSource(settings, lambda: 0.0), patch=monkeypatch.setattr)

    return follow


async def watching(api: KubernetesApi, count: int = 1) -> None:
    await until(lambda: len(api.watches) >= count, f"{count} watches")


async def test_list_and_watch(api: KubernetesApi, follow: Follow) -> None:
    """Listed once; then each change comes by the watch, which begins where the list ended."""
    api.put(pods("other", 9, service="other"))
    listed = api.version
    async with follow() as told:
        assert told.names == named(1, 2)
        await watching(api)
        api.put(pods("s2", 3))
        await told.say(*named(1, 2, 3))
        api.put(pods("s1", 1))
        await told.say(*named(1, 3))
        api.delete("s2")
        await told.say(*named(1))
        api.put(pods("other", 8, service="other"))
        api.put(endpoint_slice("s1", endpoint("10.1.0.1", "vllm-1", ready=False, terminating=True), ports=HTTP))
        await told.say()
    assert len(api.lists) == 1
    (watch,) = api.watches
    assert watch["resourceVersion"] == str(listed)
    assert watch["labelSelector"] == f"kubernetes.io/service-name={SERVICE}"
    assert int(watch["timeoutSeconds"]) == sources.WATCH_SECONDS


async def test_pages(api: KubernetesApi, follow: Follow, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of many slices comes in pages, and is put in force as one."""
    monkeypatch.setattr(sources, "PAGE", 2)
    for number in range(3, 8):
        api.put(pods(f"s{number}", number))
    async with follow() as told:
        assert told.names == named(*range(1, 8))
        assert len(told.snapshots) == 1
    assert [("continue" in query) for query in api.lists] == [False, True, True]


async def test_a_page_that_is_too_late(api: KubernetesApi, follow: Follow, monkeypatch: pytest.MonkeyPatch) -> None:
    """410 in the midst of a list: from its beginning again."""
    monkeypatch.setattr(sources, "PAGE", 1)
    api.put(pods("s2", 3))
    answer = api._list
    compacted = False

    async def list_once(wire: Any, query: dict[str, str]) -> None:
        nonlocal compacted
        await answer(wire, query)
        if not compacted:
            compacted = True
            api.compact()

    monkeypatch.setattr(api, "_list", list_once)
    monkeypatch.setattr(sources, "SHORT", -1.0)
    async with follow() as told:
        assert told.names == named(1, 2, 3)
    assert [("continue" in query) for query in api.lists] == [False, True, False, True]


@pytest.mark.parametrize("as_event", [False, True])
async def test_a_version_that_is_too_old(api: KubernetesApi, follow: Follow, as_event: bool) -> None:
    """410 Gone, as a status or as an ERROR event: listed anew, with what has been missed."""
    api.gone_as_event = as_event
    async with follow() as told:
        await watching(api)
        api.refusal = (503, "starting")
        api.cut_watches()
        await until(lambda: len(api.used) >= 3, "another try")
        api.delete("s1")
        api.put(pods("s2", 5))
        api.compact()
        api.refusal = None
        await told.say(*named(5))
        await watching(api, 3)
        api.put(pods("s3", 6))
        await told.say(*named(5, 6))
    assert len(api.lists) == 2
    assert [] not in [list(snapshot) for snapshot in told.snapshots]


async def test_a_version_that_is_forgotten_at_once(
    api: KubernetesApi, follow: Follow, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An API that cannot be right is asked after a pause, not round and round."""
    monkeypatch.setattr(sources, "SHORT", 1.0)
    api.oldest = api.version + 1000
    async with follow() as told:
        await until(lambda: "has forgotten (410) what it has just listed" in caplog.text, "a word of it")
        assert told.names == named(1, 2)


async def test_bookmarks(api: KubernetesApi, follow: Follow) -> None:
    """They move the version on where nothing changes: after a break, the watch goes on from there, without a list."""
    async with follow() as told:
        await watching(api)
        (source,) = told.sources
        api.elsewhere()
        api.bookmark()
        marked = str(api.version)
        await until(lambda: source._version == marked, "the bookmark")  # type: ignore[attr-defined]
        api.compact()
        api.cut_watches()
        await watching(api, 2)
        assert api.watches[1]["resourceVersion"] == marked
        api.put(pods("s2", 3))
        await told.say(*named(1, 2, 3))
    assert len(api.lists) == 1


async def test_a_watch_that_ends_in_order(api: KubernetesApi, follow: Follow, caplog: pytest.LogCaptureFixture) -> None:
    """Listed anew, so that what a watch has missed does not stay for ever; and that is nothing to be told of."""
    async with follow() as told:
        await watching(api)
        del api.slices["s1"]  # and no event tells of it
        api.version += 1
        api.put(pods("s2", 7))
        await told.say(*named(1, 2, 7))
        api.end_watches()
        await told.say(*named(7))
        await watching(api, 2)
    assert len(api.lists) == 2
    assert not caplog.records


async def test_a_watch_that_breaks(api: KubernetesApi, follow: Follow, caplog: pytest.LogCaptureFixture) -> None:
    """Taken up where it was, after a pause; what has happened meanwhile is told then. One warning for all of it."""
    caplog.set_level("INFO")
    async with follow() as told:
        for number in range(3, 6):
            await watching(api, number - 2)
            api.cut_watches()
            api.put(pods(f"s{number}", number))
            await told.say(*named(1, 2, *range(3, number + 1)))
    assert len(api.lists) == 1
    assert "works again" in caplog.text


async def test_a_watch_that_ends_at_once(
    api: KubernetesApi, follow: Follow, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Is a failure: it would be asked for round and round."""
    monkeypatch.setattr(sources, "SHORT", 60.0)
    async with follow():
        await watching(api)
        api.end_watches()
        await until(lambda: "ended a watch within 60 s" in caplog.text, "a word of it")


async def test_a_silent_watch_is_given_up(
    api: KubernetesApi, follow: Follow, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The API does not end it when it was asked to: it is not there any more, whatever TCP says."""
    monkeypatch.setattr(sources, "WATCH_SECONDS", 1)
    monkeypatch.setattr(sources, "GRACE", -0.9)
    async with follow() as told:
        await until(lambda: "has been silent for too long" in caplog.text, "a word of it")
        await watching(api, 2)
        assert told.names == named(1, 2)


class TestTokens:
    async def test_rotation(self, api: KubernetesApi, follow: Follow, token: Path, caplog: pytest.LogCaptureFixture) -> None:
        """The file is read anew for each request: nobody need notice that the token was replaced."""
        async with follow():
            await watching(api)
            token.write_text("token-2")
            api.tokens = {"token-2"}
            api.end_watches()
            await watching(api, 2)
        assert api.used == ["token-1", "token-1", "token-2", "token-2"]
        assert not caplog.records

    async def test_one_that_is_replaced_just_then(
        self, api: KubernetesApi, follow: Follow, token: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Refused, it is read once more before that counts as a failure."""
        opened = sources.open_page

        async def late(connections: Any, path: str, fields: Any) -> Any:
            page = await opened(connections, path, fields)
            token.write_text("token-2")
            return page

        api.tokens = {"token-2"}
        monkeypatch.setattr(sources, "open_page", late)
        async with follow() as told:
            assert told.names == named(1, 2)
        assert api.used[:2] == ["token-1", "token-2"]

    async def test_one_that_is_refused(
        self, api: KubernetesApi, follow: Follow, token: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """What was listed stays; and as soon as the file has a good one, it goes on."""
        async with follow() as told:
            await watching(api)
            api.tokens = {"token-2"}
            api.end_watches()
            await until(lambda: "answered 401: Unauthorized; expected it to take the token in" in caplog.text, "a word")
            assert told.names == named(1, 2)
            token.write_text("token-2")
            api.put(pods("s2", 3))
            await told.say(*named(1, 2, 3))
        assert "token-1" not in caplog.text

    async def test_a_file_that_is_not_there(self, follow: Follow, token: Path, caplog: pytest.LogCaptureFixture) -> None:
        kept = token.rename(token.with_name("kept"))
        async with follow() as told:
            assert "expected a service account's token" in caplog.text
            kept.rename(token)
            await told.say(*named(1, 2))


class TestWhatGoesWrong:
    async def test_no_right_to_list(self, api: KubernetesApi, follow: Follow, caplog: pytest.LogCaptureFixture) -> None:
        async with follow(namespace="kube-system"):
            assert "answered 403: endpointslices is forbidden" in caplog.text
            assert "expected a role that may list and watch endpointslices" in caplog.text

    async def test_another_authority(
        self, api: KubernetesApi, follow: Follow, certificates: Certificates, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A server that the CA does not know learns no token."""
        async with follow(ca=None):
            assert "TLS with the API at" in caplog.text
        assert not api.used

    async def test_no_ca_file(self, follow: Follow, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        async with follow(ca=str(tmp_path / "nothing")):
            assert "expected the API's CA in PEM" in caplog.text

    async def test_nobody_there(self, api: KubernetesApi, follow: Follow, caplog: pytest.LogCaptureFixture) -> None:
        api.upstream.close_listener()
        async with follow():
            assert f"no connection to the API at {api.url}: Connection refused" in caplog.text

    async def test_a_slice_that_is_none(
        self, api: KubernetesApi, follow: Follow, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Refused whole, and all is listed anew until it is mended."""
        async with follow() as told:
            await watching(api)
            api.put(pods("s2", 3) | {"endpoints": [{"addresses": None}]})
            await until(lambda: "found an EndpointSlice that is none" in caplog.text, "a word of it")
            assert told.names == named(1, 2)
            api.put(pods("s2", 3))
            await told.say(*named(1, 2, 3))

    async def test_what_is_refused_elsewhere_is_listed_again(self, api: KubernetesApi, follow: Follow) -> None:
        async with follow() as told:
            await watching(api)
            told.refusal = "not now"
            api.put(pods("s2", 3))
            await until(lambda: len(api.lists) > 1, "another list")
            told.refusal = None
            await told.say(*named(1, 2, 3))

    async def test_errors_are_told_once(self, api: KubernetesApi, follow: Follow, caplog: pytest.LogCaptureFixture) -> None:
        api.refusal = (500, "etcdserver: leader changed")
        async with follow() as told:
            await until(lambda: len(api.used) > 5, "more tries")
            assert len(caplog.records) == 1
            assert "answered 500: etcdserver: leader changed" in caplog.text
            api.refusal = None
            await told.say(*named(1, 2))


class TestInCluster:
    def source(self, environ: dict[str, str], folder: Path, **more: Any) -> KubernetesSettings:
        config = Config(discovery=Discovery(kubernetes=[Kubernetes(service=SERVICE, **more)]))
        (source,) = sources_of(config, environ, folder)
        assert isinstance(source, KubernetesSource)
        return source.settings

    def test_defaults(self, tmp_path: Path) -> None:
        """Whatever a pod finds in it: address, token, CA, namespace."""
        (tmp_path / "namespace").write_text("inference")
        environ = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "6443"}
        assert self.source(environ, tmp_path) == KubernetesSettings(
            SERVICE, "inference", "https://10.96.0.1:6443", str(tmp_path / "token"), str(tmp_path / "ca.crt")
        )
        assert self.source({"KUBERNETES_SERVICE_HOST": "fd00::1"}, tmp_path).server == "https://[fd00::1]:443"
        assert self.source(environ, tmp_path, namespace="other", port="http").namespace == "other"

    def test_its_token_is_for_its_own_api(self, tmp_path: Path) -> None:
        (tmp_path / "namespace").write_text("inference")
        settings = self.source({"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, tmp_path, server="https://other:6443")
        assert (settings.token_file, settings.ca) == (None, None)

    def test_outside(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"discovery\.kubernetes\.server: found nothing, and KUBERNETES_SERVICE_HOST"):
            self.source({}, tmp_path)
        with pytest.raises(ConfigError, match=r"discovery\.kubernetes\.namespace: found nothing"):
            self.source({}, tmp_path, server="https://a:1")
        with pytest.raises(ConfigError, match="expected an https URL for a token"):
            self.source({}, tmp_path, server="http://a:1", namespace="n", token_file="/x")
