"""The configuration: what each key may be, and that every complaint tells the operator where and what."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.config import NOT_YET, Address, Config, Secret, effective, load
from gateway.configbackends import Dns, Kubernetes
from gateway.configfile import MAX_BYTES, MAX_COMPLAINTS, known_paths, render
from gateway.configmodels import RouteTo
from gateway.errors import ConfigError

EXAMPLE = Path(__file__).resolve().parents[1] / "deploy" / "examples" / "tokenpipe.yaml"

Load = Callable[..., Config]
Complain = Callable[..., str]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "gw.yaml"


@pytest.fixture
def loaded(file: Path) -> Load:
    def load_text(text: str | bytes, overrides: Mapping[str, object] | None = None, **environ: str) -> Config:
        file.write_bytes(text.encode() if isinstance(text, str) else text)
        return load(file, overrides or {}, environ)

    return load_text


@pytest.fixture
def complaint(loaded: Load, file: Path) -> Complain:
    """What loading says, with the file called FILE."""

    def text(*arguments: Any, **environ: str) -> str:
        with pytest.raises(ConfigError) as caught:
            loaded(*arguments, **environ)
        return str(caught.value).replace(str(file), "FILE")

    return text


# ---- defaults

DEFAULTS: dict[str, Any] = {
    "listen": ["127.0.0.1:8000"],
    "admin": {"listen": "127.0.0.1:9400", "token_file": None},
    "workers": 1,
    "tls": {"certificate": None, "key": None, "client_ca": None},
    "backends": [],
    "discovery": {"file": None, "dns": None, "kubernetes": None, "interval": 5},
    "models": {},
    "balance": "least_loaded",
    "affinity": {"by": ["header", "user", "prefix"], "header": "x-session-id", "load_factor": 1.25},
    "disaggregation": {
        "connector": "nixl",
        "min_prompt_bytes": 0,
        "prefill_timeout": None,
        "hold": 30,
        "release": "auto",
        "release_timeout": 30,
        "release_cap": 4,
        "admission_grace": 5,
        "prefill_grace": 0,
        "abort_unsafe": False,
        "local_decode_fallback": False,
        "tool_choice": "bypass",
        "prompt_logprobs": "reject",
        "recompute": "relay",
        "cached_tokens": "decode",
        "cache_threshold": 0.8,
        "list_prompts": "bypass",
        "metaserver": {"listen": None, "url": None},
        "prefiller_header": "ignore",
        "override_remote_host": False,
    },
    "timeouts": {
        "request_header": 30,
        "request_body": 60,
        "keepalive": 75,
        "queue": 30,
        "connect": 5,
        "first_byte": 600,
        "idle": 300,
        "client_write": 60,
        "progress": None,
        "total": None,
        "drain": 120,
    },
    "limits": {
        "request_body": 67108864,
        "request_head": 65536,
        "in_flight": None,
        "queue": 1024,
        "write_buffer": 65536,
        "max_tokens": {"default": None, "cap": None, "over": "clamp"},
        "priority": {"classes": ["high", "normal", "low"], "default": "normal", "header": None},
    },
    "pool": {"idle": 4, "max_idle": 64, "max_age": 300},
    "retry": {"attempts": 2, "budget": 0.2, "replay_stale": False, "statuses": [429, 503]},
    "health": {"path": "/health", "interval": 5, "timeout": 2, "fail": 3, "pass": 2, "slow_start": 10, "silence": 5,
               "panic": False},
    "breaker": {"failures": 5, "window": 30, "open": 10},
    "auth": {"keys_file": None},
    "rate_limits": {"store": "memory"},
    "paths": {"allow": [], "deny": []},
    "fields": {"kv_transfer_params": "reject", "ec_transfer_params": "reject", "bootstrap_room": "reject"},
    "headers": {"forwarded": True, "receipt": False},
    "on_truncation": "abort",
    "commit": "head",
    "coalesce": {"delay": None, "bytes": 4096},
    "keepalive_comment": {"interval": None},
    "usage": "observe",
    "metrics": {"labels": ["model", "backend"], "max_models": 100},
    "log": {"level": "info", "format": "text", "access": True},
    "tracing": {"otlp_endpoint": None},
    "loadtest": {"enabled": False},
    "mock": {"ttft": 0.05, "itl": 0.02, "tokens": 64, "seed": 0, "fault": [], "knobs": {}, "replay": None},
}
BACKEND_DEFAULTS: dict[str, Any] = {
    "url": "http://10.0.0.1:8000",
    "name": "10.0.0.1:8000",
    "models": None,
    "role": "both",
    "weight": 1,
    "max_in_flight": None,
    "api_key_file": None,
    "tls": {"ca": None, "certificate": None, "key": None, "verify": True},
    "connector": {
        "kv_host": None,
        "kv_port": None,
        "bootstrap_port": 8998,
        "handshake_port": None,
        "notify_port": None,
        "dp_size": 1,
        "tp_size": 1,
    },
}


def test_defaults() -> None:
    assert effective(load(None)) == DEFAULTS
    assert list(effective(load(None))) == list(DEFAULTS)  # in the order of the documentation


def test_backend_defaults(loaded: Load) -> None:
    config = loaded("backends: [{url: http://10.0.0.1:8000}]")
    assert effective(config)["backends"] == [BACKEND_DEFAULTS]


@pytest.mark.parametrize("text", ["", "\n", "# nothing\n", "~", "null\n", "---\n...\n", "{}", "\ufeff{}"])
def test_an_empty_file_is_all_defaults(loaded: Load, text: str) -> None:
    assert loaded(text) == Config()


def test_a_section_whose_lines_are_commented_out(loaded: Load) -> None:
    assert loaded("timeouts:\n  # idle: 3\nbackends:\npaths:\n  allow:\n") == Config()


def test_attributes_are_the_keys(loaded: Load) -> None:
    config = loaded(
        "health: {pass: 7}\ntimeouts: {first_byte: 3}\nlimits: {max_tokens: {cap: 9}}\nfields: {bootstrap_room: pass}"
    )
    assert (config.health.pass_, config.timeouts.first_byte, config.limits.max_tokens.cap) == (7, 3.0, 9)
    assert config.fields.bootstrap_room == "pass"


def test_it_is_frozen() -> None:
    with pytest.raises(AttributeError):
        load(None).timeouts.idle = 3.0  # type: ignore[misc]


# ---- values


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:8000", [Address("127.0.0.1", 8000)]),
        ("'[::1]:0'", [Address("::1", 0)]),
        ("LocalHost:80", [Address("localhost", 80)]),
        ("unix:/run/tokenpipe.sock", [Address(path="/run/tokenpipe.sock")]),
        ("unix:///run/tokenpipe.sock", [Address(path="/run/tokenpipe.sock")]),
        ("[a:1, b.c-d_e:2]", [Address("a", 1), Address("b.c-d_e", 2)]),
    ],
)
def test_listen(loaded: Load, text: str, expected: list[Address]) -> None:
    config = loaded(f"listen: {text}")
    assert config.listen == expected
    assert loaded(render(effective(config))) == config


@pytest.mark.parametrize(
    ("url", "normal", "name", "scheme", "address"),
    [
        ("http://10.0.0.1:8000", "http://10.0.0.1:8000", "10.0.0.1:8000", "http", Address("10.0.0.1", 8000)),
        ("http://10.0.0.1:8000/", "http://10.0.0.1:8000", "10.0.0.1:8000", "http", Address("10.0.0.1", 8000)),
        ("HTTPS://Vllm.Internal", "https://vllm.internal", "vllm.internal:443", "https", Address("vllm.internal", 443)),
        ("http://vllm.ns.svc.", "http://vllm.ns.svc.", "vllm.ns.svc.:80", "http", Address("vllm.ns.svc.", 80)),
        ("http://[::1]:9", "http://[::1]:9", "[::1]:9", "http", Address("::1", 9)),
        ("unix:/run/vllm 0.sock", "unix:/run/vllm 0.sock", "vllm_0.sock", "unix", Address(path="/run/vllm 0.sock")),
    ],
)
def test_backend_url(loaded: Load, url: str, normal: str, name: str, scheme: str, address: Address) -> None:
    (backend,) = loaded(yaml.safe_dump({"backends": [{"url": url, "name": None}]})).backends
    assert (backend.url, backend.name, backend.scheme, backend.address) == (normal, name, scheme, address)


def test_words_that_older_yaml_takes_for_something_else(loaded: Load) -> None:
    config = loaded("backends: [{url: http://a, name: no}, {url: http://b, name: 1:30}, {url: http://c, name: '1e3'}]")
    assert [backend.name for backend in config.backends] == ["no", "1:30", "1e3"]
    assert loaded(render(effective(config))) == config


def test_anchors_and_merges(loaded: Load) -> None:
    config = loaded(
        "backends:\n- &a {url: http://a, weight: 3}\n- {<<: *a, url: http://b}\n- {<<: [*a], weight: 1, name: c}"
    )
    assert [(backend.name, backend.weight) for backend in config.backends] == [("a:80", 3), ("b:80", 3), ("c", 1)]


def test_distributions_of_the_synthetic_upstream(loaded: Load) -> None:
    config = loaded("mock: {ttft: 'normal:0.2:0.05', itl: 0, tokens: 'uniform:3:9', fault: [reset], knobs: {itl: [0, 1]}}")
    assert (config.mock.ttft, config.mock.itl, config.mock.tokens) == ("normal:0.2:0.05", 0, "uniform:3:9")
    assert (config.mock.fault, config.mock.knobs) == (["reset"], {"itl": [0, 1]})


# ---- complaints

SECONDS = "expected a positive number of seconds, at most 31536000"
LISTEN = "expected HOST:PORT (an IPv6 address in brackets: '[::1]:8000') or unix:/PATH"
URL = "expected http://HOST[:PORT], https://HOST[:PORT] or unix:/PATH"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # unknown keys, near and far
        ("timeouts:\n  idel: 3", "FILE, line 2: timeouts.idel: unknown key; the nearest known key is timeouts.idle"),
        ("wrokers: 1", "FILE, line 1: wrokers: unknown key; the nearest known key is workers"),
        ("max_tokens: 1", "FILE, line 1: max_tokens: unknown key; the nearest known key is limits.max_tokens"),
        (
            "backends:\n- url: http://a\n  tls:\n    verfy: true",
            "FILE, line 4: backends[0].tls.verfy: unknown key; the nearest known key is backends[0].tls.verify",
        ),
        (
            "log: {zzz: 1}",
            "FILE, line 1: log.zzz: unknown key; expected one of level, format, access; the nearest known key is"
            " log.level",
        ),
        ("health: {pass_: 1}", "FILE, line 1: health.pass_: unknown key; the nearest known key is health.pass"),
        ("log: {1: 1, level: info}", "FILE, line 1: log.1: unknown key; expected one of level, format, access; the"),
        ('log: {"\\e[31m": 1}', "FILE, line 1: log.'\\x1b[31m': unknown key;"),
        # durations
        ("timeouts: {idle: -1}", f"FILE, line 1: timeouts.idle: found -1; {SECONDS}"),
        ("timeouts: {idle: 0}", f"FILE, line 1: timeouts.idle: found 0; {SECONDS}"),
        ("timeouts: {idle: true}", f"FILE, line 1: timeouts.idle: found true; {SECONDS}"),
        ("timeouts: {idle: 5m}", f"FILE, line 1: timeouts.idle: found '5m'; {SECONDS}"),
        ("timeouts: {idle: '5'}", f"FILE, line 1: timeouts.idle: found '5'; {SECONDS}"),
        ("timeouts: {idle: null}", f"FILE, line 1: timeouts.idle: found null; {SECONDS}"),
        ("timeouts: {idle: .nan}", f"FILE, line 1: timeouts.idle: found nan; {SECONDS}"),
        ("timeouts: {total: .inf}", f"FILE, line 1: timeouts.total: found inf; {SECONDS} or null"),
        ("timeouts: {idle: 31536001}", f"FILE, line 1: timeouts.idle: found 31536001; {SECONDS}"),
        ("timeouts: {idle: 010}", f"FILE, line 1: timeouts.idle: found '010'; {SECONDS}"),
        ("timeouts: {drain: -1}", "FILE, line 1: timeouts.drain: found -1; expected zero or a positive number"),
        ("coalesce: {delay: 0}", f"FILE, line 1: coalesce.delay: found 0; {SECONDS} or null"),
        # numbers
        (
            "limits: {request_body: 1.5}",
            "FILE, line 1: limits.request_body: found 1.5; expected a whole number of bytes",
        ),
        ("limits: {request_body: 64MB}", "FILE, line 1: limits.request_body: found '64MB'; expected a whole number of"),
        ("limits: {request_body: 0}", "FILE, line 1: limits.request_body: found 0; expected a whole number of bytes"),
        ("limits: {queue: true}", "FILE, line 1: limits.queue: found true; expected a whole number from 0 to"),
        ("limits: {in_flight: 0}", "FILE, line 1: limits.in_flight: found 0; expected a whole number from 1 to"),
        ("affinity: {load_factor: 0.9}", "FILE, line 1: affinity.load_factor: found 0.9; expected a number from 1 to 1000"),
        ("affinity: {header: 'x session'}", "FILE, line 1: affinity.header: found 'x session'; expected the name of a header"),
        ("affinity: {by: session}", "FILE, line 1: affinity.by: found 'session'; expected a list"),
        ("affinity: {by: [ip]}", "FILE, line 1: affinity.by[0]: found 'ip'; expected header, user or prefix"),
        ("affinity: {by: []}", "FILE, line 1: affinity.by: found []; expected one or more of header, user and prefix"),
        ("affinity: {by: [user, user]}", "FILE, line 1: affinity.by: found ['user', 'user']; expected one or more of header"),
        ("balance: fastest", "FILE, line 1: balance: found 'fastest'; expected least_loaded, round_robin, power_of_two"),
        ("retry: {budget: 1.1}", "FILE, line 1: retry.budget: found 1.1; expected a number from 0 to 1"),
        ("retry: {attempts: 0}", "FILE, line 1: retry.attempts: found 0; expected a whole number from 1 to 100"),
        ("workers: 2000", "FILE, line 1: workers: found 2000; expected a whole number from 1 to 1024"),
        ("mock: {ttft: -1}", "FILE, line 1: mock.ttft: found -1; expected seconds, or a distribution"),
        ("mock: {tokens: 0}", "FILE, line 1: mock.tokens: found 0; expected a number of tokens, or a distribution"),
        ("mock: {fault: [rest]}", "FILE, line 1: mock.fault[0]: found 'rest': unknown fault 'rest'; the nearest is reset;"),
        ("mock: {fault: [reset, 'cpu:5']}", "FILE, line 1: mock.fault[1]: found cpu would hold up the gateway"),
        ("mock: {knobs: {tokns: 3}}", "FILE, line 1: mock.knobs: found tokns: unknown knob; the nearest is tokens;"),
        ("mock: {knobs: [tokens]}", "FILE, line 1: mock.knobs: found a list; expected a mapping of the knobs"),
        ("mock: {itl: 'normal:1'}", "FILE, line 1: mock.itl: found 'normal:1'; expected seconds, or a distribution"),
        # words, flags, shapes
        ("on_truncation: cut", "FILE, line 1: on_truncation: found 'cut'; expected abort or error_event"),
        ("log: {level: trace}", "FILE, line 1: log.level: found 'trace'; expected debug, info, warning or error"),
        ("log: {format: xml}", "FILE, line 1: log.format: found 'xml'; expected text or json"),
        ("log: {access: yes}", "FILE, line 1: log.access: found 'yes'; expected true or false"),
        ("usage: [inject]", "FILE, line 1: usage: found a list; expected observe or inject"),
        (
            "fields: {bootstrap_room: drop}",
            "FILE, line 1: fields.bootstrap_room: found 'drop'; expected reject, strip or",
        ),
        ("limits: {max_tokens: {over: cut}}", "FILE, line 1: limits.max_tokens.over: found 'cut'; expected clamp or"),
        ("metrics: {labels: [key]}", "FILE, line 1: metrics.labels[0]: found 'key'; expected model or backend"),
        ("log: info", "FILE, line 1: log: found 'info'; expected a mapping of level, format, access"),
        ("backends: {url: http://a}", "FILE, line 1: backends: found a mapping; expected a list"),
        ("backends:\n- http://a", "FILE, line 2: backends[0]: found 'http://a'; expected a mapping of url, name,"),
        (
            "backends:\n- name: x",
            "FILE, line 2: backends[0].url: found nothing; expected a value: this key has no default",
        ),
        ("paths: {allow: v1}", "FILE, line 1: paths.allow: found 'v1'; expected a list"),
        ("paths: {allow: [v1]}", "FILE, line 1: paths.allow[0]: found 'v1'; expected a path that begins with /"),
        ("paths: {deny: ['/a?b']}", "FILE, line 1: paths.deny[0]: found '/a?b'; expected a path that begins with /"),
        ("health: {path: /a b}", "FILE, line 1: health.path: found '/a b'; expected a path that begins with /"),
        # addresses
        ("listen: 8000", "FILE, line 1: listen: found 8000; expected HOST:PORT, unix:/PATH, or a list of them"),
        ("listen: []", "FILE, line 1: listen: found []; expected HOST:PORT, unix:/PATH, or a list of them, and one at least"),
        ("listen: ':8000'", f"FILE, line 1: listen: found ':8000'; {LISTEN}"),
        ("listen: '::1:8000'", f"FILE, line 1: listen: found '::1:8000'; {LISTEN}"),
        ("listen: '[127.0.0.1]:8000'", f"FILE, line 1: listen: found '[127.0.0.1]:8000'; {LISTEN}"),
        ("listen: 256.0.0.1:8000", f"FILE, line 1: listen: found '256.0.0.1:8000'; {LISTEN}"),
        ("listen: [a:1, localhost]", "FILE, line 1: listen[1]: found 'localhost'; expected a port from 0 to 65535"),
        ("listen: a:65536", "FILE, line 1: listen: found 'a:65536'; expected a port from 0 to 65535 after the host"),
        ("listen: unix:run.sock", "FILE, line 1: listen: found 'unix:run.sock'; expected unix: and an absolute path"),
        (f"listen: unix:/{'x' * 107}", "expected unix: and an absolute path of at most 107 octets"),
        ("admin: {listen: [a:1]}", f"FILE, line 1: admin.listen: found a list; {LISTEN}"),
        # backends
        ("backends: [{url: 10.0.0.1:8000}]", f"FILE, line 1: backends[0].url: found '10.0.0.1:8000'; {URL}"),
        ("backends: [{url: 'ftp://a'}]", f"FILE, line 1: backends[0].url: found 'ftp://a'; {URL}"),
        ("backends: [{url: 'http://'}]", f"FILE, line 1: backends[0].url: found 'http://'; {URL}"),
        ("backends: [{url: 'http://a b'}]", f"FILE, line 1: backends[0].url: found 'http://a b'; {URL}"),
        ("backends: [{url: 7}]", f"FILE, line 1: backends[0].url: found 7; {URL}"),
        (
            "backends: [{url: 'http://a:8000/v1'}]",
            "FILE, line 1: backends[0].url: found the path '/v1'; expected none after HOST[:PORT]: the client's own"
            " path is sent",
        ),
        ("backends: [{url: 'http://a?b=c'}]", "FILE, line 1: backends[0].url: found the query '?b=c'; expected none"),
        (
            "backends: [{url: 'http://a:0'}]",
            "FILE, line 1: backends[0].url: found 'http://a:0'; expected a port from 1",
        ),
        ("backends: [{url: 'http://a', name: a/b}]", "backends[0].name: found 'a/b'; expected a name of at most 128"),
        (
            "backends: [{url: 'http://a', name: ''}]",
            "backends[0].name: found ''; expected a name of at most 128 letters",
        ),
        ("backends: [{url: 'http://a', weight: 0}]", "backends[0].weight: found 0; expected a whole number from 1"),
        ("backends: [{url: 'http://a', max_in_flight: 0}]", "max_in_flight: found 0; expected a whole number from 1"),
        # what may not stand together
        (
            "backends:\n- {url: http://a}\n- {url: http://b, name: 'a:80'}",
            "FILE, line 3: backends[1].name: found a:80, as backends[0] is named; expected a name of its own",
        ),
        (
            "backends: [{url: http://a}, {url: http://a/}]",
            "FILE, line 1: backends[1].name: found a:80, as backends[0] is named; expected a name of its own",
        ),
        (
            "backends: [{url: http://a, tls: {verify: false}}]",
            "FILE, line 1: backends[0].tls: found TLS settings beside http://a; expected an https URL, or none of them",
        ),
        # discovery
        ("discovery: {file: 3}", "FILE, line 1: discovery.file: found 3; expected the name of a file, or a list of them or"),
        ("discovery: {file: '*/a.json'}", "discovery.file: found '*/a.json'; expected a pattern in the last part of the"),
        ("discovery: {dns: {port: 80}}", "names: found nothing; expected a value: this key has no default"),
        ("discovery: {dns: {names: 10.0.0.1, port: 80}}", "names: found '10.0.0.1'; expected a DNS name"),
        ("discovery: {dns: {names: a}}", "port: found nothing; expected the backends' port, of which A records say nothing"),
        ("discovery: {dns: [{names: a, type: SRV, port: 1}]}", "discovery.dns[0].port: found 1 beside type: SRV; expected"),
        ("discovery: {dns: {names: a, type: TXT}}", "type: found 'TXT'; expected A, AAAA or SRV"),
        ("discovery: {dns: {names: a, port: 1, servers: ns}}", "found 'ns'; expected the IP address of a DNS server"),
        ("discovery: {dns: {names: a, port: 1, tls: {verify: false}}}", "found TLS settings beside scheme: http; expected"),
        ("discovery: {kubernetes: {}}", "service: found nothing; expected a value: this key has no default"),
        ("discovery: {kubernetes: {service: A}}", "service: found 'A'; expected a name of lower case letters, digits and -"),
        ("discovery: {kubernetes: {service: a, port: H}}", "port: found 'H'; expected a port of the service's endpoints"),
        (
            "discovery: {kubernetes: {service: a, selector: b}}",
            "selector: unknown key; expected one of scheme, role, max_in_flight, api_key_file, tls, service, namespace, port,",
        ),
        (
            "listen: 0.0.0.0:9400",
            "FILE: admin.listen: found 127.0.0.1:9400, where the public listener is (0.0.0.0:9400); expected another",
        ),
        ("listen: unix:/a\nadmin:\n  listen: unix:/a", "FILE, line 3: admin.listen: found unix:/a, where the public"),
        (
            "listen: [a:1, a:1]",
            "FILE, line 1: listen[1]: found a:1, which is taken by an earlier one; expected another",
        ),
        (
            "limits: {max_tokens: {default: 9, cap: 8}}",
            "FILE, line 1: limits.max_tokens.default: found 9; expected at most limits.max_tokens.cap, which is 8",
        ),
        # YAML
        ("log:\n  level: info\nlog: {}", "FILE, line 3: log: found a second time, after line 1; expected once"),
        ("a: b: c", "FILE, line 1, column 5: not valid YAML: mapping values are not allowed here"),
        ("log:\n\tlevel: info", "FILE, line 2, column 1: not valid YAML: "),
        ("log: {level: info", "FILE, line 1, column 18: not valid YAML: while parsing a flow mapping, expected ',' or"),
        ("log: {level: ${A}}", "expected ',' or '}', but got '{' (a ${NAME} inside { } or [ ] needs quotes)"),
        ("- a\n- b", "FILE, line 1: found a list at the top; expected a mapping of keys"),
        ("hello", "FILE, line 1: found 'hello' at the top; expected a mapping of keys"),
        ("log: {}\n---\nlog: {}", "FILE, line 2: found a second YAML document; expected one"),
        ("? [a]\n: 1", "FILE, line 1: found a key that is not plain text; expected the name of a key"),
        ("log: {<<: 3}", "FILE, line 1: log: found 3 under <<; expected mappings"),
    ],
)
def test_complaint(complaint: Complain, text: str, expected: str) -> None:
    said = complaint(text)
    assert expected in said
    assert len(said.splitlines()) == 1, said


def test_all_that_is_wrong_is_said_at_once(complaint: Complain) -> None:
    said = complaint(
        "workers: x\nlimits: {max_tokens: {default: 2, cap: 1}}\nlog: {level: 1, level: 2}\nnope: 1\npool: {idle: 0}"
    )
    assert [line.split(": ")[1] for line in said.splitlines()] == [
        "log.level",
        "workers",
        "log.level",
        "nope",
        "pool.idle",
        "limits.max_tokens.default",
    ]


def test_not_more_than_anybody_reads(complaint: Complain) -> None:
    said = complaint("paths:\n  allow: [" + "x," * 1000 + "]").splitlines()
    assert len(said) == MAX_COMPLAINTS + 1
    assert said[-1] == "and 950 more"


def test_a_long_value_is_cut(complaint: Complain) -> None:
    said = complaint("on_truncation: " + "x" * 100_000)
    assert len(said) < 300
    assert "(100002 characters)" in said


# ---- keys of later versions

REFUSED: list[tuple[str, str]] = [
    ("workers: 4", "workers: 4 is not supported by this version; expected 1"),
    ("auth: {keys_file: keys}", "auth.keys_file: 'keys' is not supported by this version; expected null"),
    ("rate_limits: {store: 'redis://a'}", "rate_limits.store: 'redis://a' is not supported by this version; expected"),
    (
        "tracing: {otlp_endpoint: 'http://a'}",
        "tracing.otlp_endpoint: 'http://a' is not supported by this version; expected",
    ),
]


@pytest.mark.parametrize(("text", "expected"), REFUSED)
def test_what_does_nothing_yet_is_refused(complaint: Complain, text: str, expected: str) -> None:
    said = complaint(text)
    assert said.startswith(f"FILE, line 1: {expected}")
    assert len(said.splitlines()) == 1


def test_every_refused_key_is_tried_above() -> None:
    tried = {expected.split(": ")[0].replace("[0]", "") for _, expected in REFUSED}
    assert tried == set(NOT_YET)


def test_refused_keys_exist() -> None:
    assert set(NOT_YET) <= {path.replace("[]", "") for path in known_paths(Config)}


def test_what_does_nothing_yet_may_stand_at_its_default(loaded: Load) -> None:
    assert loaded(yaml.safe_dump(DEFAULTS)) == Config()
    assert loaded(yaml.safe_dump({"backends": [BACKEND_DEFAULTS]})).backends[0].role == "both"


# ---- environment


def test_environment(loaded: Load) -> None:
    text = "backends: [{url: 'http://${HOST}:${PORT_1}', name: '$${x}${EMPTY}-$A'}]"
    with pytest.raises(ConfigError, match="found '\\$\\{x\\}-\\$A'"):  # the escape, as the rule for names sees it
        loaded(text, HOST="a", PORT_1="81", EMPTY="")
    assert loaded("backends: [{url: 'http://${HOST}:${PORT_1}'}]", HOST="a", PORT_1="81").backends[0].name == "a:81"


def test_a_number_from_the_environment(loaded: Load) -> None:
    text = (
        "timeouts:\n  idle: '${A}'\n  total: ${B}\nlog:\n  access: ${C}\nlimits:\n  in_flight: ${D}\n"
        "backends:\n- url: http://a\n  name: ${D}"
    )
    config = loaded(text, A="2.5", B="", C="false", D="7")
    assert (config.timeouts.idle, config.timeouts.total, config.log.access) == (2.5, None, False)
    assert (config.limits.in_flight, config.backends[0].name) == (7, "7")


def test_what_the_environment_holds_is_not_looked_at_again(complaint: Complain) -> None:
    assert "found '${B}'" in complaint("on_truncation: ${A}", A="${B}", B="abort")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "timeouts:\n  idle: ${NOPE}",
            "FILE, line 2: timeouts.idle: found ${NOPE}, which the environment does not set; expected the environment"
            " variable NOPE",
        ),
        ("usage: ${}", "FILE, line 1: usage: found '${}'; expected ${NAME}, or $${ for a ${ as it stands"),
        ("usage: ${a-b}", "FILE, line 1: usage: found '${a-b}'; expected ${NAME}, or $${ for a ${ as it stands"),
        ("usage: '${A'", "FILE, line 1: usage: found '${A'; expected ${NAME}, or $${ for a ${ as it stands"),
        (
            "paths: {allow: [/a, '${A}']}",
            "FILE, line 1: paths.allow[1]: found ${A}, which the environment does not set",
        ),
        ("usage: ${X}", "FILE, line 1: usage: found 'all'; expected observe or inject"),
    ],
)
def test_environment_complaint(complaint: Complain, text: str, expected: str) -> None:
    assert complaint(text, X="all").startswith(expected)


# ---- secrets and files

KEY = "sk-do-not-show-7f3a"


@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\n\n"])
def test_secret(loaded: Load, tmp_path: Path, end: str) -> None:
    (tmp_path / "key").write_bytes(f"{KEY}{end}".encode())
    text = f"admin: {{token_file: key}}\nbackends: [{{url: 'http://a', api_key_file: {tmp_path}/key}}]"
    config = loaded(text)
    assert config.admin.token_file is not None
    assert config.admin.token_file.reveal() == KEY
    assert config.backends[0].api_key_file == Secret(KEY)
    shown = [
        repr(config),
        str(config),
        f"{config.admin.token_file}",
        render(effective(config)),
        str(msgspec.structs.asdict(config)),
    ]
    assert not any(KEY in text for text in shown)
    assert all("***" in text for text in shown)
    assert effective(config)["admin"] == {"listen": "127.0.0.1:9400", "token_file": "***"}
    assert config == loaded(text)
    (tmp_path / "key").write_text("another")
    assert config != loaded(text)


def test_a_secret_survives_copies_only_as_itself() -> None:
    secret = Secret(KEY)
    assert copy.deepcopy(secret) == pickle.loads(pickle.dumps(secret)) == secret
    assert secret != KEY
    assert len({secret, Secret(KEY), Secret("b")}) == 2


@pytest.mark.parametrize(
    ("octets", "expected"),
    [
        (b"", "is empty"),
        (b"\r\n\n", "is empty"),
        (b"sk-do-not-show\n7f3a", "holds a control octet (0x0a, octet 15)"),
        (b"sk-do-not-show\0", "holds a control octet (0x00, octet 15)"),
        (b"sk-do-not-show\x7f7f3a\n", "holds a control octet (0x7f, octet 15)"),
        (b"\xef\xbb\xbfsk-do-not-show", "holds an octet that is not ASCII (0xef, octet 1)"),
        (b"sk-do-not-show \n", "begins or ends with a blank"),
        (b"sk-do-not-show" * 1000, "holds more than 8192 bytes"),
        (None, "cannot be read (No such file or directory)"),
    ],
)
def test_secret_complaint(complaint: Complain, tmp_path: Path, octets: bytes | None, expected: str) -> None:
    if octets is not None:
        (tmp_path / "key").write_bytes(octets)
    said = complaint("admin:\n  token_file: key")
    where = f"'{tmp_path}/key', which {expected}; expected the name of a file that holds one secret or null"
    assert said == f"FILE, line 2: admin.token_file: found {where}"
    assert "sk-do" not in said


def test_a_secret_where_its_file_should_be_named(complaint: Complain) -> None:
    said = complaint("admin: {token_file: '${TOKEN}'}", TOKEN=KEY)
    assert "admin.token_file: found '${TOKEN}', which cannot be read" in said
    assert KEY not in said


@pytest.mark.parametrize("url", ["http://user:{}@a", "ftp://user:{}@a", "user:{}@a", "https://{}@a/v1"])
def test_a_password_in_a_url(complaint: Complain, url: str) -> None:
    said = complaint(yaml.safe_dump({"backends": [{"url": url.format(KEY)}]}))
    assert "backends[0].url: found a URL with a user name or password; expected none" in said
    assert KEY not in said


def test_files_are_relative_to_the_configuration(loaded: Load, tmp_path: Path) -> None:
    for name in ("a.pem", "a.key"):
        (tmp_path / name).write_text("x")
    tls = loaded("tls: {certificate: a.pem, key: a.key}").tls
    assert (tls.certificate, tls.key, tls.client_ca) == (f"{tmp_path}/a.pem", f"{tmp_path}/a.key", None)


def test_files_of_tls_complaints(complaint: Complain, tmp_path: Path) -> None:
    (tmp_path / "a.pem").write_text("x")
    neither = "both of them, or neither"
    assert complaint("tls:\n  certificate: a.pem") == (
        f"FILE, line 1: tls.key: found nothing beside tls.certificate; expected {neither}"
    )
    said = complaint("backends:\n- url: https://a\n  tls: {key: a.pem}")
    path = "backends[0].tls"
    assert said == f"FILE, line 3: {path}.certificate: found nothing beside {path}.key; expected {neither}"
    assert "tls.client_ca: found a client_ca without a certificate" in complaint("tls: {client_ca: a.pem}")
    assert f"tls.key: found '{tmp_path}/nope', which cannot be read" in complaint(
        "tls: {certificate: a.pem, key: nope}"
    )
    assert "tls.key: found 5; expected the name of a file that can be read" in complaint("tls: {key: 5}")
    assert "which cannot be read (Is a directory)" in complaint("tls: {key: .}")


# ---- flags


def test_flags_override(loaded: Load) -> None:
    text = "listen: 10.0.0.1:81\nadmin: {listen: '[::1]:82'}\nlog: {level: error, access: false}\nbackends: [{url: http://a}]"
    flags = {"port": 91, "admin_host": "::", "log_level": "debug", "backend": ("http://b", "unix:/c"), "workers": None}
    config = loaded(text, flags)
    assert config.listen == [Address("10.0.0.1", 91)]
    assert config.admin.listen == Address("::", 82)
    assert (config.log.level, config.log.access) == ("debug", False)
    assert [backend.name for backend in config.backends] == ["b:80", "c"]


@pytest.mark.parametrize("text", ["listen: [a:1, b:2]", "listen: unix:/a", "listen: ${NOPE}", "listen: 7", "log: {}"])
def test_half_an_address_beside_what_has_no_other_half(loaded: Load, text: str) -> None:
    assert loaded(text, {"port": 91}).listen == [Address("127.0.0.1", 91)]


def test_half_an_address_from_the_environment(loaded: Load) -> None:
    assert loaded("listen: ['${HOST}:80']", {"port": 0}, HOST="a").listen == [Address("a", 0)]


def test_flags_that_were_not_given(loaded: Load) -> None:
    config = loaded(
        "backends: [{url: http://a}]\nworkers: 1", {"host": None, "port": None, "backend": (), "workers": None}
    )
    assert config.listen == Config().listen
    assert len(config.backends) == 1


def test_a_flag_does_not_change_what_shares_its_anchor(loaded: Load) -> None:
    config = loaded("timeouts: &x {}\nlog: *x", {"log_level": "debug"})
    assert config.log.level == "debug"
    assert config.timeouts == Config().timeouts


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"port": 99999}, "--port: listen: found '127.0.0.1:99999'; expected a port from 0 to 65535 after the host"),
        ({"port": -1}, "--port: listen: found '127.0.0.1:-1'; expected HOST:PORT"),
        ({"host": "a b"}, "--host: listen: found 'a b'; expected a host name or IP address"),
        ({"host": ""}, "--host: listen: found ''; expected a host name or IP address"),
        ({"host": "unix:/a"}, "--host: listen: found 'unix:/a'; expected a host name or IP address"),
        ({"admin_port": 8000}, "--admin-port: admin.listen: found 127.0.0.1:8000, where the public listener is"),
        (
            {"admin_host": "a", "admin_port": 99999},
            "--admin-host --admin-port: admin.listen: found 'a:99999'; expected",
        ),
        ({"workers": 4}, "--workers: workers: 4 is not supported by this version; expected 1"),
        ({"workers": 0}, "--workers: workers: found 0; expected a whole number from 1 to 1024"),
        ({"log_level": "loud"}, "--log-level: log.level: found 'loud'; expected debug, info, warning or error"),
        ({"log_format": "${HOME}"}, "--log-format: log.format: found '${HOME}'; expected text or json"),
        ({"backend": ["http://a", "b"]}, "--backend: backends[1].url: found 'b'; expected http://HOST[:PORT]"),
    ],
)
@pytest.mark.parametrize("text", [None, "log: {level: info}"])
def test_flag_complaint(file: Path, text: str | None, flags: dict[str, object], expected: str) -> None:
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(None if text is None else file, flags, {})
    assert str(caught.value).startswith(expected)
    assert len(str(caught.value).splitlines()) == 1


def test_a_flag_beside_a_section_that_is_no_section(complaint: Complain) -> None:
    assert "FILE, line 1: log: found 'x'; expected a mapping" in complaint("log: x", {"log_level": "info"})


def test_an_override_that_is_no_flag() -> None:
    with pytest.raises(KeyError):
        load(None, {"nope": 1})


# ---- hostile files


def bomb() -> str:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 30)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (bomb(), "FILE, line 5: a4: found more than 50000 values, aliases expanded; expected fewer"),
        ("listen: &a [*a]", "FILE, line 1: listen[0]: found *a; expected the name of an anchor that is complete above"),
        ("log: *nope", "FILE, line 1: log: found *nope; expected the name of an anchor"),
        (
            "listen: !!python/object/apply:os.system [id]",
            "found the YAML tag '!!python/object/apply:os.system'; expected",
        ),
        (
            "listen: !!python/name:os.system",
            "FILE, line 1: listen: found the YAML tag '!!python/name:os.system'; expected",
        ),
        ("!!python/object/new:os.system {a: b}", "FILE, line 1: found the YAML tag '!!python/object/new:os.system'"),
        ("!!python/name:os.system : 1", "FILE, line 1: found a key that is not plain text"),
        ("log: !x {}", "FILE, line 1: log: found the YAML tag '!x'; expected a value without a tag"),
        ("workers: 1\nlisten: a\0b", "FILE, line 2, column 10: found the control character U+0000; expected printable"),
        ('listen: "a\\0b:1"', "FILE, line 1: listen: found 'a\\x00b:1'; expected HOST:PORT"),
        ('listen: "unix:/\\ud83d"', "FILE, line 1: listen: found 'unix:/\\ud83d'; expected unix: and an absolute path"),
        ('tls: {key: "a\\0b"}', "which cannot be read (embedded null byte)"),
        (b"workers: 1\nlisten: \xff", "FILE, line 2: found octet 0xff; expected UTF-8"),
        ("log: {}".encode("utf-16"), "FILE, line 1: found octet 0xff; expected UTF-8"),
        ("# comment\n" * 1_000_000, f"FILE: found more than {MAX_BYTES} bytes; expected at most {MAX_BYTES}"),
        ("a: " + "[" * 900_000, "found more than 32 levels of nesting; expected fewer"),
        ("\n".join(" " * n + "a:" for n in range(1000)), "found more than 32 levels of nesting; expected fewer"),
        ("listen: [" + "a," * 60_000 + "]", "found more than 50000 values, aliases expanded; expected fewer"),
        ("workers: " + "9" * 5000, "(5002 characters); expected a whole number from 1 to 1024"),
        ("usage: '" + "${" * 100_000 + "'", "FILE, line 1: usage: found '${"),
    ],
    ids=lambda value: str(value[:20]),
)
@pytest.mark.seconds(20)
def test_hostile_file(complaint: Complain, text: str | bytes, expected: str) -> None:
    said = complaint(text)
    assert expected in said
    assert len(said) < 1000
    assert said.isprintable()


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "nope", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigError) as caught:
            load(path)
        assert str(caught.value) == f"{path}: cannot be read ({reason}); expected a YAML file"


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.one_of(st.binary(max_size=200), st.text(alphabet="abl:-[]{}&*!|>'\"%@`,#?\n \t0.~<$", max_size=80)))
def test_any_file_is_read_or_complained_about(loaded: Load, text: str | bytes) -> None:
    try:
        loaded(text)
    except ConfigError as error:
        assert str(error)


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=10)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=5,
)
PATHS = sorted(path for path in known_paths(Config) if "[]" not in path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(PATHS), value=VALUES)
def test_any_value_is_read_or_complained_about(loaded: Load, file: Path, path: str, value: object) -> None:
    for key in reversed(path.split(".")):
        value = {key: value}
    try:
        config = loaded(render(value))  # type: ignore[arg-type]
    except ConfigError as error:
        assert all(line.startswith((f"{file}", "and ")) for line in str(error).splitlines())
    else:
        assert loaded(render(effective(config)).replace("$", "$$")) == config


# ---- the whole


def test_round_trip(loaded: Load) -> None:
    config = loaded(
        "listen: ['0.0.0.0:80', unix:/run/a]\n"
        "backends: [{url: https://a, weight: 3, tls: {verify: false}}, {url: unix:/b c, max_in_flight: 4}]\n"
        "timeouts: {idle: 0.25, total: 1e3}\nlimits: {max_tokens: {default: 5, cap: 50, over: reject}}\n"
        "balance: affinity\naffinity: {by: [prefix, header], header: X-Chat, load_factor: 2}\n"
        "paths: {allow: [/x/, /y], deny: ['/v1/*']}\nhealth: {pass: 9}\nusage: inject\n"
        "metrics: {labels: []}\nmock: {ttft: 'lognormal:0.2:0.5'}\nlog: {format: json}\nloadtest: {enabled: true}"
    )
    assert loaded(render(effective(config))) == config
    assert yaml.safe_load(render(effective(config))) == effective(config)


def test_the_example() -> None:
    config = load(EXAMPLE, environ={})
    assert [backend.name for backend in config.backends] == ["llama-0", "llama-1"]
    # all else stands at its default, so that the file documents them
    assert msgspec.structs.replace(config, backends=[]) == Config()


def test_the_example_of_discovery() -> None:
    discovery = load(EXAMPLE.with_name("discovery.yaml"), environ={}).discovery
    assert discovery.file == [str(EXAMPLE.with_name("backends.yaml")), "/etc/prometheus/vllm/*.json"]
    # all but what must be given, and what tells them apart, stands at its default
    plain, service = discovery.dns or ()
    assert plain == Dns(names=["vllm.internal"], port=8000)
    assert service == Dns(names=["_vllm._tcp.service.consul"], type="SRV", servers=[Address("127.0.0.1", 8600)])
    assert discovery.kubernetes == [Kubernetes(service="vllm", namespace="inference", port="http")]


def test_the_example_of_models(loaded: Load) -> None:
    config = load(EXAMPLE.with_name("models.yaml"), environ={})
    assert config.models["gpt-4"].route_to == [
        RouteTo(model="llama-70b", weight=9), RouteTo(model="llama-70b-next"), RouteTo(model="qwen-7b", fallback=True),
    ]  # fmt: skip
    assert (config.models["qwen-7b"].in_flight, config.models["qwen-7b"].priority) == (64, "low")
    assert loaded(render(effective(config))) == config


@pytest.mark.parametrize(
    "text, expected, near",
    [
        ("backends: [{url: 'http://a', role: prefil}]", "backends[0].role: found 'prefil'; expected both, prefill,", "prefill"),
        ("log: {level: warn}", "log.level: found 'warn'; expected debug, info, warning or error", "warning"),
        ("usage: Inject", "usage: found 'Inject'; expected observe or inject", "inject"),
        ("balance: least-loaded", "balance: found 'least-loaded'; expected least_loaded, round_robin,", "least_loaded"),
        ("disaggregation: {connector: nixel}", "disaggregation.connector: found 'nixel'; expected nixl,", "nixl"),
        ("discovery: {dns: {names: a.b, type: aaa}}", "discovery.dns.type: found 'aaa'; expected A, AAAA or SRV", "AAAA"),
        ("limits: {priority: {default: norml}}", "limits.priority.default: found norml; expected one of", "normal"),
        ("models: {a: {priority: hihg}}", "models.a.priority: found hihg; expected one of limits.priority.classes:", "high"),
        ("usage: qqqqqq", "usage: found 'qqqqqq'; expected observe or inject", None),
        ("usage: 5", "usage: found 5; expected observe or inject", None),
        ("mock: {replay: 5}", "mock.replay: found 5; expected the name of a folder of recordings (deploy/mock.md)", None),
        ("models: {a: {route_to: []}}", "models.a.route_to: found []; expected a mapping of model, weight and", None),
    ],
)
def test_the_nearest_word(complaint: Complain, text: str, expected: str, near: str | None) -> None:
    """A word that is none of those that can be names the one that it is like; one that is like none names none."""
    (line,) = complaint(text).splitlines()
    assert expected in line
    assert line.endswith(f"; the nearest is {near}") if near else "; the nearest" not in line


MODELS_WRONG: list[tuple[str, str]] = [
    ("models: {a: {route_to: [{model: b, fallback: true}]}}", "models.a.route_to: found nothing but fallbacks"),
    ("models: {a: {rewrite_response: true}}", "models.a.rewrite_response: found true for a name that is no alias; expected a"),
    ("models: {a: {rewrite_response: 1}}", "models.a.rewrite_response: found 1; expected true or false"),
    ("models: {a: {route_to: [{model: b}, {model: b, weight: 2}]}}", "models.a.route_to: found b twice; expected each model"),
    ("models: {a: {route_to: {model: b}}, b: {route_to: {model: c}}}", "models.a.route_to[0].model: found the alias b;"),
    ("models: {a: {route_to: {model: b}}, b: {route_to: {model: a}}}", "models.a.route_to[0].model: found the alias b;"),
    ("models: {a: {route_to: []}}", "models.a.route_to: found []; expected a mapping of model, weight and fallback, or"),
    ("models: {a: {route_to: {model: b, weight: 0}}}", "models.a.route_to.weight: found 0; expected a whole number from 1"),
    ("models: {a: {route_to: {weight: 1}}}", "models.a.route_to.model: found nothing; expected a value"),
    ("models: {a: {rout_to: {model: b}}}", "models.a.rout_to: unknown key; the nearest known key is models.a.route_to"),
    ("models: {a: 3}", "models.a: found 3; expected a mapping of route_to, in_flight, priority"),
    ("models: [a]", "models: found a list; expected a mapping"),
    ("models: {a: {priority: urgent}}", "models.a.priority: found urgent; expected one of limits.priority.classes"),
    ("models: {a: {in_flight: 0}}", "models.a.in_flight: found 0; expected a whole number from 1"),
    ("limits: {priority: {classes: [a, a]}}", "limits.priority.classes: found ['a', 'a']; expected 1 to 16 names"),
    ("limits: {priority: {classes: [a]}}", "limits.priority.default: found normal; expected one of limits.priority.classes: a"),
    (
        "{backends: [{url: 'http://a', models: [x]}], models: {a: {route_to: {model: y}}}}",
        "models.a.route_to[0].model: found y, which nobody serves; expected a model that is among some backend's models",
    ),
    ("backends: [{url: 'http://a', models: []}]", "backends[0].models: found []; expected the name of a model, or a list"),
]


@pytest.mark.parametrize(("text", "expected"), MODELS_WRONG)
def test_models_that_cannot_be(complaint: Complain, text: str, expected: str) -> None:
    """Loops, targets of nothing, words that nobody knows: each is one line that says where and what instead."""
    said = complaint(text)
    assert said.startswith(f"FILE, line 1: {expected}")
    assert len(said.splitlines()) == (2 if "route_to: {model: a}}" in text else 1)  # a loop is wrong at both of its ends


def test_an_alias_may_be_a_target_of_its_own(loaded: Load) -> None:
    """A model of that name, beside another one: how a new version is tried on some of the traffic."""
    config = loaded("models: {m: {route_to: [{model: m, weight: 9}, {model: m-next}]}}")
    assert [target.model for target in config.models["m"].route_to or ()] == ["m", "m-next"]


def test_discovery_as_its_users_write_it(loaded: Load) -> None:
    """One or a list of them; files beside the configuration; servers with and without a port."""
    config = loaded("discovery: {file: a.json, dns: {names: A.test., port: 80, servers: ['1.1.1.1', '[::1]:54', '::1']}}")
    assert config.discovery.file is not None
    assert config.discovery.file[0].endswith("/a.json")
    assert [path[0] for path in config.discovery.file] == ["/"]
    (dns,) = config.discovery.dns or ()
    assert (dns.names, dns.servers) == (
        ["a.test."], [Address("1.1.1.1", 53), Address("::1", 54), Address("::1", 53)],
    )  # fmt: skip
    config = loaded("discovery: {kubernetes: [{service: a, port: 80}, {service: b, port: http}]}")
    assert [one.port for one in config.discovery.kubernetes or ()] == [80, "http"]
    assert loaded(render(effective(config))) == config


def test_the_example_has_every_key_that_works() -> None:
    written = {re.sub(r"^models\.[^.]+", "models.NAME", path)
               for name in (EXAMPLE, EXAMPLE.with_name("discovery.yaml"), EXAMPLE.with_name("models.yaml"))
               for path in _paths(yaml.safe_load(name.read_text()))}  # fmt: skip
    sections = {path.rpartition(".")[0] for path in known_paths(Config)}
    for path in known_paths(Config):
        works = path.replace("[]", "") not in NOT_YET
        leaf = path not in sections and f"{path}[]" not in sections
        if leaf:
            assert (path in written) == works, path


def _paths(value: Any, path: str = "") -> list[str]:
    if isinstance(value, dict) and value:
        return [found for key, inner in value.items() for found in _paths(inner, f"{path}.{key}" if path else key)]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [found for item in value for found in _paths(item, f"{path}[]")]
    return [path]


# ---- disaggregation, and the flags of other proxies for it


PROXY = {
    "prefiller_hosts": ("10.0.0.1", "::1"),
    "prefiller_ports": (8100, 8101),
    "decoder_hosts": ("decode.test",),
    "decoder_ports": (8200,),
}


def test_the_flags_of_a_proxy(loaded: Load) -> None:
    config = loaded("backends: [{url: 'http://old'}]", {**PROXY, "kv_connector": "nixl", "max_retries": 4, "log_level": "INFO"})
    assert [(one.url, one.name, one.role) for one in config.backends] == [
        ("http://10.0.0.1:8100", "10.0.0.1:8100", "prefill"),
        ("http://[::1]:8101", "[::1]:8101", "prefill"),
        ("http://decode.test:8200", "decode.test:8200", "decode"),
    ]
    assert (config.retry.attempts, config.log.level, config.disaggregation.connector) == (4, "info", "nixl")


def test_a_proxys_defaults(loaded: Load) -> None:
    """What is left out stands as in vLLM Ascend's proxy; --backend adds an ordinary one."""
    config = loaded("{}", {"prefiller_ports": (9100, 9101), "backend": ("http://a:1",)})
    assert [(one.name, one.role) for one in config.backends] == [
        ("a:1", "both"), ("localhost:9100", "prefill"), ("localhost:9101", "prefill"), ("localhost:8002", "decode"),
    ]  # fmt: skip


def test_an_instance_that_is_named_twice(loaded: Load) -> None:
    config = loaded("{}", {"prefiller_hosts": ("::1", "a", "::1"), "prefiller_ports": (1, 1, 1)})
    assert [one.name for one in config.backends] == ["[::1]:1", "a:1", "localhost:8002"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({**PROXY, "prefiller_ports": (1,)}, "--prefiller-hosts --prefiller-ports: backends: found 2 host(s) and 1 port(s)"),
        ({**PROXY, "decoder_hosts": ("a b",)}, "--decoder-hosts --decoder-ports: backends: found 'a b'"),
        ({**PROXY, "decoder_ports": (0,)}, "expected a port from 1 to 65535 after the host"),
        ({**PROXY, "kv_connector": "layerwise"}, "at which engines of layerwise call back, by a file (-c FILE)"),
        ({**PROXY, "kv_connector": "p2p_nccl"}, "for connector p2p_nccl, by a file (-c FILE, in place of these flags)"),
        ({**PROXY, "kv_connector": "teleport"}, "--kv-connector: disaggregation.connector: found 'teleport'; expected "),
        ({**PROXY, "decoder_hosts": ("::1",), "decoder_ports": (8101,)}, "backends[2].name: found [::1]:8101, as backends[1]"),
    ],
)
def test_flags_of_a_proxy_that_cannot_be(loaded: Load, flags: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as said:
        loaded("{}", flags)
    assert expected in str(said.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{connector: teleport}", "connector: found 'teleport'; expected nixl, nixl_push, "),
        ("{min_prompt_bytes: -1}", "min_prompt_bytes: found -1; expected a whole number from 0"),
        ("{hold: 0}", "hold: found 0; expected a positive number of seconds"),
        ("{release: sometimes}", "release: found 'sometimes'; expected auto, always, pressure, reject or never"),
        ("{release_cap: 0}", "release_cap: found 0; expected a whole number from 1"),
        ("{local_decode_fallback: 1}", "local_decode_fallback: found 1; expected true or false"),
        ("{holds: 3}", "holds: unknown key; the nearest known key is disaggregation.hold"),
    ],
)
def test_disaggregation_is_read_strictly(complaint: Complain, text: str, expected: str) -> None:
    assert complaint(f"disaggregation: {text}").startswith(f"FILE, line 1: disaggregation.{expected}")


@pytest.mark.parametrize(
    ("key", "expected"),
    [("sk\nX-Evil: 1", "holds a control octet (0x0a, octet 3)"), (" sk", "begins or ends with a blank"),
     ("sk-\u00e9", "holds an octet that is not ASCII")],
)  # fmt: skip
def test_a_key_of_the_environment_that_cannot_be_one(key: str, expected: str) -> None:
    with pytest.raises(ConfigError) as said:
        load(None, {"prefiller_hosts": ("a",)}, {"OPENAI_API_KEY": key})
    assert f"the environment variable OPENAI_API_KEY: backends[].api_key_file: {expected}" in str(said.value)
    assert load(None, {}, {"OPENAI_API_KEY": key}).backends == []


@pytest.mark.parametrize("connector", ["mooncake_ascend", "moriio_read", "p2p_nccl", "lmcache"])
def test_what_no_engine_would_tell(complaint: Complain, connector: str) -> None:
    said = complaint(f"disaggregation: {{connector: {connector}, release: reject}}")
    assert "disaggregation.release: found reject; expected another one" in said and said.rstrip().endswith("mooncake")


@pytest.mark.parametrize(
    ("connector", "backend", "expected"),
    [
        ("p2p_nccl", "role: prefill", "backends[0].connector.kv_port: found nothing; expected a port, for connector p2p_nccl"),
        ("moriio_read", "role: decode, connector: {handshake_port: 1}", "backends[0].connector.notify_port: found nothing"),
        ("nixl", "connector: {kv_port: 1}", "backends[0].connector: found it beside role: both"),
        ("nixl", "role: decode, connector: {kv_port: 0}", "backends[0].connector.kv_port: found 0; expected a port from 1"),
    ],
)
def test_what_a_connector_must_know(complaint: Complain, connector: str, backend: str, expected: str) -> None:
    said = complaint(f"disaggregation: {{connector: {connector}}}\nbackends: [{{url: 'http://a', {backend}}}]")
    assert expected in said


@pytest.mark.parametrize("found", ["dns: {names: a, port: 1, role: %s}", "kubernetes: {service: a, namespace: b, role: %s}"])
def test_what_is_looked_up_says_nothing_of_a_connectors_ports(complaint: Complain, loaded: Load, found: str) -> None:
    kind, text = found.partition(":")[0], f"discovery: {{{found}}}\ndisaggregation: {{connector: %s}}"
    said = complaint(text % ("prefill", "moriio_read"))
    assert f"discovery.{kind}[0].role: found prefill; expected another role: connector moriio_read must be told hand" in said
    loaded(text % ("prefill", "nixl"))
    loaded(text % ("decode", "offloading_p2p"))


def test_engines_that_serve_nothing_alone(complaint: Complain) -> None:
    said = complaint("disaggregation: {connector: sglang, local_decode_fallback: true}")
    assert said.startswith("FILE, line 1: disaggregation.local_decode_fallback: found true; expected false")
