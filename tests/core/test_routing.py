"""Which paths are served: by their octets, and by what a backend would make of them."""

from __future__ import annotations

from urllib.parse import unquote_to_bytes

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.routing import MANAGEMENT, Paths, authority, split_target
from gateway.errors import Refusal

PATHS = Paths()


def served(target: bytes, paths: Paths | None = None) -> bool:
    """Whether a request for `target` gets to a backend."""
    try:
        route = (paths or PATHS).route(target)
    except Refusal as refusal:
        assert refusal.code in ("bad_request", "unknown_path")
        return False
    assert route.path == split_target(target)[1] and route.text.encode("latin-1") == route.path
    return True


SERVED = [
    b"/v1/chat/completions",
    b"/v1/completions",
    b"/v1/models",
    b"/v1/responses",
    b"/v1/messages",
    b"/v1/audio/speech",
    b"/tokenize",
    b"/detokenize",
    b"/pooling",
    b"/classify",
    b"/score",
    b"/rerank",
    b"/v2/rerank",
    b"/invocations",
    b"/version",
    b"/v1/x?a=b",
    b"/v1/x?a=../../b",
    b"/v1/x?",
    b"/v1/x?%0d%0a",
    b"/v1/x?//",
    b"/v1/models/org%20name",
    b"/v1/models/a.b",
    b"/v1/.hidden",
    b"/v1/...",
    b"/v1/a..b",
    b"/v1/%C3%A9",
    b"/v1/a;p=1",
    b"/v1/",
    b"/v1/x?y?z",
]
NOT_SERVED = [
    b"/",
    b"/v1",
    b"/V1/models",
    b"/v1x",
    b"/metrics",
    b"/sleep",
    b"/wake_up",
    b"/is_sleeping",
    b"/reset_prefix_cache",
    b"/reset_mm_cache",
    b"/collective_rpc",
    b"/update_weights",
    b"/init_weights_update_group",
    b"/start_profile",
    b"/stop_profile",
    b"/server_info",
    b"/load",
    b"/docs",
    b"/openapi.json",
    b"/admin",
    b"/-/config",
    b"/instances/add",
    b"/v1/load_lora_adapter",
    b"/v1/unload_lora_adapter",
    b"/v1/load_lora_adapter?x=1",
    b"/v1/load_lora_adapter/",
    b"/v1/unload_lora_adapter/;x=1",
    b"/tokenizes",
    b"/tokenize/",
    b"/tokenize/x",
    b"/tokenizer_info",
    b"/v2/",
    b"/v2/rerank/x",
    b"/static/../../../../etc/passwd",
    b"/..%2f..%2fetc/passwd",
    b"/metrics/../admin",
    b"/favicon.ico",
    # a backend might read these as another path
    b"//v1/models",
    b"/v1//models",
    b"/v1/../metrics",
    b"/v1/..",
    b"/v1/.",
    b"/v1/./models",
    b"/v1/%2e%2e/metrics",
    b"/v1/%2E./metrics",
    b"/v1/.%2e/metrics",
    b"/v1/%2e/models",
    b"/v1/..;/metrics",
    b"/v1/..;a=b/metrics",
    b"/v1/%2e%2e;x/metrics",
    b"/v1/..%3b/metrics",
    b"/v1/..%2fmetrics",
    b"/v1/..%2Fmetrics",
    b"/v1/..%5cmetrics",
    b"/v1/..\\metrics",
    b"/v1\\models",
    b"/v1/models%00.html",
    b"/v1/%0d%0aX:1",
    b"/v1/%0a",
    b"/v1/%7f",
    b"/v1/%",
    b"/v1/%4",
    b"/v1/%zz",
    b"/v1/%u002e",
    b"/v1/x/..",
    b"/v1/x/../../metrics",
    b"/%2e/v1/models",
    b"/./v1/models",
    b"/../v1/models",
    b"/v1/x%2f..%2f..%2fmetrics",
    # no path at all
    b"*",
    b"v1/models",
    b"gw:80",
    b"gw",
    b"ftp://gw/v1/models",
    b"javascript:/v1/models",
    b"://gw/v1/models",
    b"http:/v1/models",
    b"/v1/models#frag",
    b"/v1/models?#frag",
    b"/v1/models?x=1#",
    b"http://gw",
    b"http://gw?/v1/models",
    b"?/v1/models",
    b"#",
    b"http://gw#/v1/models",
    b"http://gw/v1/../metrics",
]


@pytest.mark.parametrize("target", SERVED)
def test_inference_paths_are_served(target: bytes) -> None:
    """They reach a backend, and the query is nobody's business."""
    assert served(target)
    assert split_target(target)[0] == target == PATHS.route(target).target
    assert PATHS.route(target).authority is None and not PATHS.route(target).loopback


@pytest.mark.parametrize("target", NOT_SERVED)
def test_all_else_reaches_no_backend(target: bytes) -> None:
    """Management, other paths, and whatever a backend might normalise into one of them."""
    assert not served(target)


@pytest.mark.parametrize("path", MANAGEMENT)
def test_no_spelling_of_a_denied_path_is_served(path: str) -> None:
    """A backend decodes %61 to a before it looks up its route: a denied path stays denied in each such form."""
    for i in range(len("/v1/"), len(path)):
        coded = path[:i] + f"%{ord(path[i]):02x}" + path[i + 1 :]
        assert not served(coded.encode()), coded
    assert not served(b"/v1/" + b"".join(b"%%%02X" % c for c in path[4:].encode()))


@pytest.mark.parametrize("deny", ["/v1/audio/", "/v1/files", "/tokenize"])
def test_what_the_operator_denies_is_denied_in_each_spelling(deny: str) -> None:
    """`paths.deny` outranks the table, coded octets or not."""
    paths = Paths(deny=[deny])
    target = (deny + "x" if deny.endswith("/") else deny).encode()
    assert not served(target, paths)
    for i in range(1, len(deny)):
        if deny[i] != "/":
            coded = target[:i] + b"%%%02x" % target[i] + target[i + 1 :]
            assert not served(coded, paths), coded
    assert served(b"/v1/chat/completions", paths)


def test_allow_adds_and_deny_wins() -> None:
    """An entry with a slash at its end stands for all below it, another one for itself alone."""
    paths = Paths(allow=["/metrics", "/custom/", "/v1/load_lora_adapter"], deny=["/custom/secret", "/v1/embeddings"])
    assert all(served(t, paths) for t in (b"/metrics", b"/custom/x", b"/custom/x/y", b"/v1/load_lora_adapter"))
    assert not any(served(t, paths) for t in (b"/metrics/", b"/custom", b"/custom/secret", b"/v1/embeddings", b"/customx"))
    assert not served(b"/v1/unload_lora_adapter", paths)
    assert not served(b"/x", Paths(allow=["/x"], deny=["/x"]))


ABSOLUTE = [
    (b"http://evil.example/v1/models", b"/v1/models", b"evil.example"),
    (b"HTTP://evil.example:81/v1/models?x=http://y/z", b"/v1/models?x=http://y/z", b"evil.example:81"),
    (b"https://h/v1/x?y", b"/v1/x?y", b"h"),
    (b"http://[::1]:80/v1/x", b"/v1/x", b"[::1]:80"),
]


@pytest.mark.parametrize(("target", "origin", "host"), ABSOLUTE)
def test_an_absolute_form_is_served_by_its_path(target: bytes, origin: bytes, host: bytes) -> None:
    """The backend is never chosen by the target; the authority only tells what Host would have told."""
    assert split_target(target) == (origin, origin.partition(b"?")[0])
    assert authority(target) == host
    assert authority(origin) is None
    route = PATHS.route(target)
    assert (route.target, route.path, route.authority) == (origin, origin.partition(b"?")[0], host)


def test_the_synthetic_upstream_is_reached_below_loadtest_where_that_is_served() -> None:
    """The prefix goes, and what is behind it is held to the same table."""
    paths = Paths(loadtest=True)
    route = paths.route(b"/loadtest/v1/models?x=/loadtest/")
    assert (route.target, route.path, route.loopback) == (b"/v1/models?x=/loadtest/", b"/v1/models", True)
    assert not paths.route(b"/v1/models").loopback
    assert not served(b"/loadtest/v1/models")
    for target in (b"/loadtest/metrics", b"/loadtest/v1/../metrics", b"/loadtest//v1/models", b"/loadtest/", b"/loadtest"):
        with pytest.raises(Refusal):
            paths.route(target)


@pytest.mark.parametrize(
    "host",
    [
        b"",
        b'a"b',
        b'a";for=10.0.0.1;x="b',
        b"user@gw",
        b"user:pw@gw",
        b"a\\b",
        b"a,b",
        b"gw:port",
        b"a<b>",
        b"gw:80:80",
        b"\xe9",
        b"[::1",
        b"a;b=c,d",
    ],
)
def test_an_absolute_form_whose_authority_is_no_host_is_refused(host: bytes) -> None:
    """It would stand in X-Forwarded-Host and, quoted, in Forwarded: what may not stand in Host may not stand here."""
    with pytest.raises(Refusal) as caught:
        split_target(b"http://" + host + b"/v1/models")
    assert caught.value.code == "bad_request"


SEGMENT = st.sampled_from(
    [
        b"v1",
        b"models",
        b"metrics",
        b"..",
        b".",
        b"",
        b"%2e",
        b"%2e%2e",
        b".%2E",
        b"%2f",
        b"%5c",
        b"\\",
        b";",
        b"..;",
        b"%252e%252e",
        b"load_lora_adapter",
        b"%6coad_lora_adapter",
        b"sleep",
        b"%00",
        b"a",
    ]
)


@settings(max_examples=500)
@given(st.lists(SEGMENT, min_size=1, max_size=6))
def test_what_is_served_stays_within_the_table_however_a_backend_reads_it(segments: list[bytes]) -> None:
    """Decoded once and normalised, as a backend may do, a path that is served is still one that the table serves."""
    target = b"/v1/" + b"/".join(segments)
    if not served(target):
        return
    plain = unquote_to_bytes(target).replace(b"\\", b"/")
    stack: list[bytes] = []
    for segment in plain.split(b"/")[1:]:
        name = segment.partition(b";")[0]
        if name == b"..":
            stack[-1:] = []
        elif name not in (b".", b""):
            stack.append(segment)
    assert stack[:1] == [b"v1"] and b"/" + b"/".join(stack) not in {m.encode() for m in MANAGEMENT}
