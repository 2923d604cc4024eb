"""The command `tokenpipe`: flags in, exit status out.

A command returns its status; what it raises becomes one message on standard error and a status here, in `run`, so that
no command prints an error of its own. Each imports what it needs only when it runs: `--help` must not wait for aiohttp.

    0  an orderly end
    2  bad usage, or a configuration that cannot be used
    1  anything else
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import click

from gateway import __version__
from gateway.errors import ConfigError, GatewayError
from gateway.flags import ANY, CommandOfSeveral
from gateway.loadtest.options import LoadtestCommand, loadtest_options

_CONFIG = click.Path(path_type=Path)  # whether it can be read is for the loader to say, in its own words

_Command = TypeVar("_Command", bound=Callable[..., int])


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="tokenpipe", message="%(prog)s %(version)s")
def cli() -> None:
    """A streaming gateway in front of vLLM.

    \b
    Try it without an engine:
      tokenpipe serve
      curl -N http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
        -d '{"model": "synthetic", "messages": [{"role": "user", "content": "hi"}], "stream": true}'
    """


def _serve_options(command: _Command) -> _Command:
    """The flags of `serve` that override the file. Their parameters' names are what `config.load` knows them by."""
    options = (
        click.option("--host", help="Address of the public listener.  [127.0.0.1]"),
        click.option("--port", type=int, help="Its port; 0 takes a free one.  [8000]"),
        click.option("--admin-host", help="Address of the admin listener: metrics, health, live page.  [127.0.0.1]"),
        click.option("--admin-port", type=int, help="Its port; 0 takes a free one.  [9400]"),
        click.option(
            "--backend",
            metavar="URL",
            multiple=True,
            help="An engine: http://HOST:PORT, https://HOST:PORT or unix:/PATH. Repeat it for more. These replace the"
            " file's backends.",
        ),
        click.option(
            "--workers",
            type=int,
            metavar="N",
            help="Processes that relay; this version has one. More are refused, but with the flags of prefill and decode.  [1]",
        ),
        click.option("--log-level", metavar="debug|info|warning|error", help="The least that is logged.  [info]"),
        click.option("--log-format", metavar="text|json", help="How a line of the log looks.  [text]"),
        # as vLLM Ascend's load_balance_proxy_server_example.py has them, and vLLM's own examples
        click.option(
            "--prefiller-hosts",
            "--prefiller-host",
            metavar="HOST...",
            multiple=True,
            help="Engines that only prefill; one or more after the flag.  [localhost]",
        ),
        click.option("--prefiller-ports", "--prefiller-port", type=int, metavar="PORT...", multiple=True, help="[8001]"),
        click.option(
            "--decoder-hosts",
            "--decoder-host",
            metavar="HOST...",
            multiple=True,
            help="Engines that decode what those prefilled.  [localhost]",
        ),
        click.option("--decoder-ports", "--decoder-port", type=int, metavar="PORT...", multiple=True, help="[8002]"),
        click.option("--kv-connector", metavar="NAME", help="How KV goes from one to the other.  [nixl]"),
        click.option("--max-retries", type=int, metavar="N", help="Attempts at one request (retry.attempts).  [2]"),
        click.option("--retry-delay", type=float, hidden=True, expose_value=False),  # another attempt goes elsewhere, at once
        click.option("--max-waiting-retries", type=int, hidden=True, expose_value=False),  # health probes go on for ever
        click.option("--waiting-retry-interval", type=float, hidden=True, expose_value=False),
    )
    for option in reversed(options):
        command = option(command)
    return command


class _Serve(CommandOfSeveral):
    several: ClassVar = {
        f"--{side}r-{what}": ANY for side in ("prefille", "decode") for what in ("host", "hosts", "port", "ports")
    }


@cli.command(cls=_Serve)
@click.option("-c", "--config", "config_path", type=_CONFIG, metavar="FILE", help="The configuration, in YAML.")
@_serve_options
def serve(config_path: Path | None, **flags: Any) -> int:
    """Run the gateway.

    A flag overrides the file. Backends may also be discovered (files, DNS, Kubernetes; discovery in the file) or added by
    the admin API. With no backend and no discovery at all, a synthetic engine is run inside, to try things out.

    \b
    Examples:
      tokenpipe serve --backend http://10.0.0.1:8000 --backend http://10.0.0.2:8000
      tokenpipe serve -c /etc/tokenpipe.yaml --log-format json
      tokenpipe serve --prefiller-hosts 10.0.0.1 10.0.0.2 --prefiller-ports 8100 8100 \\
        --decoder-hosts 10.0.0.3 --decoder-ports 8200 --kv-connector nixl

    The last one is disaggregated prefill and decode, with the command line of vLLM Ascend's example proxy, whose engines are
    --kv-connector mooncake_ascend. Its /instances/add, /instances/remove and /healthcheck are on --admin-port.

    SIGTERM or SIGINT: no new requests, and those under way are let finish; a second one stops at once. SIGHUP reads the
    configuration again.
    """
    from gateway.config import load
    from gateway.configdisagg import FLAGS

    overrides = {name: value for name, value in flags.items() if value not in (None, ())}
    if overrides.get("workers") in range(2, 1025) and any(name in overrides for name in FLAGS):  # that proxy's command line
        click.echo(f"tokenpipe: --workers {overrides.pop('workers')}: this version relays all with one process", err=True)
    config = load(config_path, overrides)

    from gateway.app import serve as serve_until_stopped
    from gateway.control.reload import check_files

    check_files(config)
    return serve_until_stopped(config, config_path, overrides)


@cli.command()
@click.option("-c", "--config", "config_path", type=_CONFIG, metavar="FILE", required=True, help="The file to check.")
def check(config_path: Path) -> int:
    """Validate a configuration, and print what it comes to.

    Prints the effective configuration, with every default filled in and secrets as ***. Where it cannot be used, says
    all that is wrong, one a line with file, line and key, and exits with status 2.

    \b
    Example:
      tokenpipe check -c /etc/tokenpipe.yaml && systemctl reload tokenpipe
    """
    from gateway.config import effective, load
    from gateway.configfile import render
    from gateway.control.reload import check_files

    config = load(config_path)
    check_files(config)
    click.echo(render(effective(config)), nl=False)
    return 0


@cli.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=int, default=8001, show_default=True, help="Its port; 0 takes a free one.")
@click.option("--model", metavar="NAME", default="synthetic", show_default=True, help="The model it claims to serve.")
@click.option("--ttft", metavar="SECONDS", default="0.05", show_default=True, help="Time to the first token.")
@click.option("--itl", metavar="SECONDS", default="0.02", show_default=True, help="Time between tokens.")
@click.option("--tokens", metavar="N", default="64", show_default=True, help="Tokens in an answer.")
@click.option("--seed", type=int, metavar="N", default=0, show_default=True, help="The same seed, the same answers.")
@click.option("--fault", metavar="WHAT", multiple=True, help="Something that goes wrong. Repeat it for more.")
@click.option("--set", "knobs", metavar="KNOB=VALUE", multiple=True, help="Anything else about it. Repeat it for more.")
@click.option("--role", metavar="ROLE", default="both", show_default=True, help="prefill, decode, encode or both.")
@click.option("--connector", metavar="NAME", help="How KV moves, as deploy/mock.md lists.  [nixl, with a role of one half]")
@click.option("--replay", metavar="FOLDER", help="Recorded answers, for `replay=NAME`.")
@click.option("--workers", type=int, metavar="N", default=1, help="Processes. This version has one.  [1]")
def mock(knobs: tuple[str, ...], workers: int, **settings: Any) -> int:
    """Run the synthetic engine alone: a stand-in for `vllm serve` that can do what an engine can do wrong.

    SECONDS and N are a number, or a distribution to draw from: constant:VALUE, normal:MEAN:STDDEV, uniform:LOW:HIGH,
    exponential:MEAN, lognormal:MEDIAN:SIGMA, per_token:BASE:EACH or list:VALUE:VALUE...

    WHAT is a fault, with where, when and how often it strikes: reset, reset@token:3, hang@ms:500, stall:2000@token:5,
    status:503@every:10, error_event@token:2-9:0.01. The faults:

    \b
      endings  refuse, down:SECONDS, hang, reset, close, eof_clean, eof_trunc, bad_chunk,
               error_event[:CODE], error_cut[:CODE], abort, recomputed, half_event, half_done,
               engine_death
      delays   stall:MS, trickle:BYTES, cpu:MS, slow_read:BYTES
      heads    status:CODE, ct:VALUE, ct_missing, ce:VALUE, early_hints, big_header:BYTES,
               many_cookies:COUNT, head_garbage, http09, cl_short, cl_long, te_and_cl, trailer
      events   long_line:BYTES, bad_json, bad_utf8, nul, wrong_index, ids_change, role_missing,
               finish_missing, dup_done, data_after_done
      after    extra[:BYTES], keepalive_close

    Each request can ask for its own, by a header as x-synth: fault=reset@token:3;ttft=0.2. All of it is one table,
    deploy/mock.md in the source: events of several tokens, reasoning, tools, usage, odd framing, slots and a queue, KV from
    prefill to decode, replay of recordings, and what the server tells about what it did.

    \b
    Examples:
      tokenpipe mock --port 8001 --ttft lognormal:0.2:0.5 --itl 0.01 --tokens 256
      tokenpipe mock --set max_num_seqs=8 --set slowdown=0.05 --fault reset@token:1-200:0.01
      tokenpipe mock --role prefill --port 8001
      tokenpipe mock --role decode --connector mooncake --port 8002
    """
    from gateway.synthetic.behaviour import pairs
    from gateway.synthetic.server import run as run_mock
    from gateway.synthetic.settings import MockSettings

    if workers != 1:
        raise ConfigError(f"--workers: found {workers}; this version runs one process: expected 1")
    try:
        turned = pairs(";".join(knobs))
    except ValueError as error:
        raise ConfigError(f"--set: {error}") from None
    try:
        found = MockSettings(**settings, knobs=turned)
    except ValueError as error:  # it begins with the setting's name, which is the flag's
        raise ConfigError(f"--{error}") from None
    return run_mock(found)


@cli.command(cls=LoadtestCommand)
@loadtest_options
def loadtest(**flags: Any) -> int:
    """Load an OpenAI-compatible endpoint, and report TTFT, TPOT, ITL, E2EL and goodput.

    The flags, the table and the JSON are those of `vllm bench serve`. Requests go out on schedule, however late the
    answers to earlier ones are, and each exactly once. URL is the server's, such as http://127.0.0.1:8000; the path comes
    from the kind of endpoint.

    \b
    Examples:
      tokenpipe loadtest http://127.0.0.1:8000 --request-rate 20 --num-prompts 500
      tokenpipe loadtest http://gateway:8000 --compare http://engine:8000 --request-rate 5
      tokenpipe loadtest http://127.0.0.1:8000 --request-rate 1,2,4,8,16 --num-prompts 200 \\
        --goodput ttft:500 tpot:50 --report report.html

    Ctrl-C reports what is finished. Exit status: 0 when some request succeeded, 1 when none did or the run was
    interrupted, 2 for bad usage.
    """
    from gateway.loadtest.command import loadtest as run_loadtest

    return run_loadtest(flags)


def _forget_output() -> None:
    """The interpreter would stumble once more, and exit with 120, over output that cannot be written."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        return
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run(arguments: Sequence[str]) -> int:
    """Run one command line. Returns the exit status; never raises, but for what ends a process on purpose."""
    try:
        status = cli.main(list(arguments), prog_name="tokenpipe", standalone_mode=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except ConfigError as error:
        _say(str(error))
        return 2
    except GatewayError as error:
        _say(str(error))
    except BrokenPipeError:
        _forget_output()  # whoever read it has left
    except OSError as error:
        _forget_output()
        _say(": ".join(str(part) for part in (error.filename, error.strerror) if part) or str(error))
    except (click.Abort, KeyboardInterrupt):
        _say("interrupted")
    except Exception as error:
        if sys.flags.dev_mode:  # python -X dev -m gateway ...
            traceback.print_exc()
        frame = traceback.extract_tb(error.__traceback__)[-1]
        _say(f"internal error: {type(error).__name__}: {error} ({frame.filename}:{frame.lineno})")
    return 1


def _say(text: str) -> None:
    for line in text.splitlines():
        click.echo(f"tokenpipe: {line}", err=True)


def _open_standard_streams() -> None:
    """Those that were closed (`2>&-`): else the next socket gets their numbers, and what is said goes into it."""
    for number, mode in enumerate(("r", "w", "w")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, and so this one
            name = ("stdin", "stdout", "stderr")[number]
            if getattr(sys, name) is None:
                setattr(sys, name, os.fdopen(opened, mode, closefd=False))


def main() -> None:
    _open_standard_streams()
    sys.exit(run(sys.argv[1:]))
