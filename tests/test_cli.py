"""The command line: flags, exit status, and errors without a traceback."""

from __future__ import annotations

import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway import __version__
from gateway.cli import run
from gateway.config import Config
from gateway.errors import GatewayError, Refusal
from gateway.synthetic.faults import CATALOGUE
from gateway.synthetic.settings import CONNECTORS

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = ("serve", "check", "mock", "loadtest")


class Recorder:
    """Stands for a function that runs until it is stopped."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answer: int | BaseException = 0

    def __call__(self, *arguments: Any) -> int:
        self.calls.append(arguments)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


def _stub(monkeypatch: pytest.MonkeyPatch, name: str, function: str) -> Recorder:
    module, recorder = types.ModuleType(name), Recorder()
    setattr(module, function, recorder)
    monkeypatch.setitem(sys.modules, name, module)
    return recorder


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return _stub(monkeypatch, "gateway.app", "serve")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return _stub(monkeypatch, "gateway.synthetic.server", "run")


Capture = pytest.CaptureFixture[str]


def test_version(capsys: Capture) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"tokenpipe {__version__}\n"


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_help(capsys: Capture, command: tuple[str, ...], flag: str) -> None:
    assert run([*command, flag]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"Usage: {' '.join(('tokenpipe', *command))} ")
    assert "Example" in out or "Try it" in out
    assert all(len(line) <= 100 for line in out.splitlines())


def test_help_is_fast() -> None:
    """It imports none of what serving needs."""
    code = (
        "import sys; from gateway.cli import run; run(['serve', '-h']);"
        "print(sorted({'aiohttp', 'uvloop', 'yaml', 'msgspec', 'asyncio', 'prometheus_client'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "Usage: tokenpipe [OPTIONS] COMMAND"),
        (["nope"], "No such command 'nope'"),
        (["serve", "--nope"], "No such option"),
        (["serve", "extra"], "unexpected extra argument"),
        (["serve", "--port", "x"], "Invalid value for '--port': 'x' is not a valid integer"),
        (["serve", "--port", "99999"], "tokenpipe: --port: listen: found '127.0.0.1:99999'; expected a port"),
        (["serve", "--backend", "x"], "tokenpipe: --backend: backends[0].url: found 'x'; expected http://"),
        (["serve", "--workers", "4"], "tokenpipe: --workers: workers: 4 is not supported by this version; expected 1"),
        (["serve", "--log-level", ""], "tokenpipe: --log-level: log.level: found ''; expected debug, info"),
        (["serve", "-c", "/nope"], "tokenpipe: /nope: cannot be read (No such file or directory); expected a YAML"),
        (["check"], "Missing option '-c' / '--config'"),
        (
            ["check", "-c", "/nope"],
            "tokenpipe: /nope: cannot be read (No such file or directory); expected a YAML file",
        ),
        (["mock", "--ttft", "x"], "tokenpipe: --ttft: 'x': 'x' is not a number: expected seconds"),
        (["mock", "--itl", "normal:1"], "tokenpipe: --itl: 'normal:1': normal:MEAN:STDDEV is expected"),
        (["mock", "--port", "99999"], "tokenpipe: --port: 99999 is out of range"),
        (["mock", "--tokens", "0"], "tokenpipe: --tokens: 0 is out of range"),
        (["mock", "--fault", "rest@token:3"], "tokenpipe: --fault: 'rest@token:3': unknown fault 'rest'; the nearest is reset"),
        (["mock", "--fault", "reset@tokn:3"], "unknown place 'tokn', the nearest is token; expected reset[@head|"),
        (["mock", "--set", "eol"], "tokenpipe: --set: 'eol' is not KNOB=VALUE"),
        (["mock", "--set", "eol=crl"], "tokenpipe: --set: eol: found 'crl'; expected lf or crlf or cr"),
        (["mock", "--set", "max_num_seq=1"], "tokenpipe: --set: max_num_seq: unknown knob; the nearest is max_num_seqs"),
        (["mock", "--role", "d"], "tokenpipe: --role: 'd' is not a role: both, prefill, decode, encode is expected"),
        (["mock", "--connector", "x"], f"tokenpipe: --connector: 'x' is not there: {', '.join(CONNECTORS)} is expected"),
        (["mock", "--workers", "2"], "tokenpipe: --workers: found 2; this version runs one process: expected 1"),
    ],
)
def test_bad_usage(capsys: Capture, app: Recorder, engine: Recorder, arguments: list[str], expected: str) -> None:
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert expected in err
    assert not app.calls
    assert not engine.calls


# ---- serve


def test_serve_without_anything(app: Recorder) -> None:
    assert run(["serve"]) == 0
    assert app.calls == [(Config(), None, {})]


def test_processes_of_the_proxy_that_it_replaces(app: Recorder, capsys: Capture) -> None:
    """Its command line works as it is; the flag by itself is refused, as are processes that nobody could want."""
    assert run(["serve", "--prefiller-hosts", "a", "--prefiller-ports", "1", "--decoder-ports", "2", "--workers", "4"]) == 0
    ((config, _, overrides),) = app.calls
    assert (config.workers, overrides.get("workers")) == (1, None)
    assert capsys.readouterr().err == "tokenpipe: --workers 4: this version relays all with one process\n"
    assert run(["serve", "--prefiller-hosts", "a", "--prefiller-ports", "1", "--workers", "0"]) == 2


def test_serve(app: Recorder, tmp_path: Path) -> None:
    path = tmp_path / "gw.yaml"
    path.write_text("backends: [{url: http://a}]\nlimits: {queue: 7}")
    flags = (
        "--host ::1 --port 0 --admin-host localhost --admin-port 1 --backend http://b --backend http://c --workers 1"
    )
    assert run(["serve", "-c", str(path), *flags.split(), "--log-level", "debug", "--log-format", "json"]) == 0
    ((config, config_path, overrides),) = app.calls
    assert [str(address) for address in config.listen] == ["[::1]:0"]
    assert str(config.admin.listen) == "localhost:1"
    assert [backend.url for backend in config.backends] == ["http://b", "http://c"]
    assert (config.limits.queue, config.log.level, config.log.format) == (7, "debug", "json")
    assert config_path == path
    # what a reload needs to come to the same again
    assert overrides == {
        "host": "::1",
        "port": 0,
        "admin_host": "localhost",
        "admin_port": 1,
        "backend": ("http://b", "http://c"),
        "workers": 1,
        "log_level": "debug",
        "log_format": "json",
    }


@pytest.mark.parametrize(
    ("answer", "status", "message"),
    [
        (0, 0, ""),
        (1, 1, ""),
        (GatewayError("it went wrong"), 1, "tokenpipe: it went wrong\n"),
        (Refusal("internal", "it went wrong"), 1, "tokenpipe: it went wrong\n"),
        (OSError(98, "Address already in use"), 1, "tokenpipe: Address already in use\n"),
        (OSError(13, "Permission denied", "/run/a.sock"), 1, "tokenpipe: /run/a.sock: Permission denied\n"),
        (OSError("odd"), 1, "tokenpipe: odd\n"),
        (KeyboardInterrupt(), 1, "tokenpipe: interrupted\n"),
        (ZeroDivisionError("oh"), 1, "tokenpipe: internal error: ZeroDivisionError: oh ("),
    ],
)
def test_status(capsys: Capture, app: Recorder, answer: int | BaseException, status: int, message: str) -> None:
    app.answer = answer
    assert run(["serve"]) == status
    err = capsys.readouterr().err.lstrip("\n")
    assert err.startswith(message)
    assert "Traceback" not in err
    assert len(err.splitlines()) <= 1


# ---- check


@pytest.fixture
def check(tmp_path: Path, capsys: Capture) -> Callable[[str], tuple[int, str, str]]:
    def check_text(text: str) -> tuple[int, str, str]:
        (tmp_path / "gw.yaml").write_text(text)
        status = run(["check", "-c", str(tmp_path / "gw.yaml")])
        return (status, *capsys.readouterr())

    return check_text


def test_check(check: Callable[[str], tuple[int, str, str]], tmp_path: Path) -> None:
    (tmp_path / "token").write_text("sk-do-not-show\n")
    status, out, err = check("admin: {token_file: token}\ntimeouts: {idle: 7}")
    assert (status, err) == (0, "")
    shown = yaml.safe_load(out)
    assert shown["timeouts"]["idle"] == 7
    assert shown["timeouts"]["connect"] == 5
    assert shown["admin"]["token_file"] == "***"
    assert "sk-do-not-show" not in out


def test_check_says_all(check: Callable[[str], tuple[int, str, str]], tmp_path: Path) -> None:
    status, out, err = check("timeouts: {idle: x}\nbackends:\n- url: http://a\n  tls: {verify: 1}")
    assert (status, out) == (2, "")
    assert err.splitlines() == [
        f"tokenpipe: {tmp_path}/gw.yaml, line 1: timeouts.idle: found 'x'; expected a positive number of seconds, at"
        " most 31536000",
        f"tokenpipe: {tmp_path}/gw.yaml, line 4: backends[0].tls.verify: found 1; expected true or false",
    ]


def test_what_check_prints_can_be_checked(check: Callable[[str], tuple[int, str, str]]) -> None:
    _, out, _ = check("backends: [{url: http://a}]")
    assert check(out) == (0, out, "")


# ---- mock


def test_mock(engine: Recorder) -> None:
    assert run(["mock"]) == 0
    flags = "--host ::1 --port 0 --model m --ttft normal:1:2 --itl 0 --tokens 3 --seed 4"
    assert run(["mock", *flags.split()]) == 0
    names = ("host", "port", "model", "ttft", "itl", "tokens", "seed")
    assert [tuple(getattr(settings, name) for name in names) for (settings,) in engine.calls] == [
        ("127.0.0.1", 8001, "synthetic", "0.05", "0.02", "64", 0),
        ("::1", 0, "m", "normal:1:2", "0", "3", 4),
    ]


def test_everything_about_the_mock_reaches_it(engine: Recorder) -> None:
    flags = "--fault reset@token:3:0.1 --fault hang --set eol=crlf --set tokens=3 --role decode --connector nixl --replay R"
    assert run(["mock", *flags.split()]) == 0
    ((settings,),) = engine.calls
    assert (settings.fault, settings.knobs) == (("reset@token:3:0.1", "hang"), {"eol": "crlf", "tokens": "3"})
    assert (settings.role, settings.connector, settings.replay) == ("decode", "nixl", "R")


def test_the_help_of_the_mock_names_every_fault(capsys: Capture) -> None:
    assert run(["mock", "--help"]) == 0
    said = capsys.readouterr().out
    assert not [name for name in CATALOGUE if not re.search(rf"\b{name}\b", said)]
    assert "deploy/mock.md" in said


# ---- the process


def _process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gateway", *arguments],
        cwd=ROOT,
        text=True,
        stderr=subprocess.PIPE,
        timeout=20,
        **options,
    )


def test_the_module_is_the_command(tmp_path: Path) -> None:
    done = _process("--version", stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (0, f"tokenpipe {__version__}\n")
    (tmp_path / "gw.yaml").write_text("nope: 1")
    done = _process("check", "-c", str(tmp_path / "gw.yaml"), stdout=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (2, "")
    assert "nope: unknown key" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_left() -> None:
    """As in `tokenpipe check ... | head -1`."""
    with open("/dev/full", "w") as full:
        done = _process("--version", stdout=full)
    assert done.returncode == 1
    assert done.stderr == "tokenpipe: No space left on device\n"
    reader = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    reader.wait()
    assert reader.stdin is not None
    with reader.stdin:
        done = _process("--version", stdout=reader.stdin)
    assert (done.returncode, done.stderr) == (1, "")
