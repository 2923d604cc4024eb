"""`tokenpipe loadtest` as a user runs it: against the mock, bare sockets, and nobody."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.loadtest.progress import line
from tests.loadtest.support import ROOT, Loadtest
from tests.support.gateway import until
from tests.support.script import FINISHED, SSE_HEAD, Held, chunk, delta, in_turn, reply, stream
from tests.support.upstream import RawUpstream, listening_socket
from tests.synthetic.conftest import StartMock, start_mock

__all__ = ("start_mock",)  # a fixture

TWO = (delta("a"), delta("b"), *FINISHED)
SMALL = ("--random-input-len", "8", "--num-prompts", "20")


def result(folder: Path, name: str = "r.json") -> dict[str, Any]:
    found = json.loads((folder / name).read_text())
    assert isinstance(found, dict)
    return found


def saved(folder: Path, *more: str) -> tuple[str, ...]:
    return ("--save-result", "--result-dir", str(folder), "--result-filename", "r.json", *more)


@pytest.mark.parametrize("backend", ["openai-chat", "openai", "openai-responses", "anthropic"])
async def test_against_the_mock(start_mock: StartMock, tmp_path: Path, backend: str) -> None:
    mock = await start_mock(ttft=0.03, itl=0.005, tokens=8)
    run = Loadtest(tmp_path, mock.url, *SMALL, "--backend", backend, "--random-output-len", "6", "--request-rate", "100",
                   *saved(tmp_path, "--save-detailed"), "--ignore-eos", "--goodput", "ttft:2000", "tpot:1000")  # fmt: skip
    assert await run.done() == 0, run.err
    found = result(tmp_path)
    assert (found["completed"], found["failed"], found["model_id"]) == (20, 0, "synthetic")
    assert found["output_lens"] == [6] * 20
    assert (found["total_output_tokens"], found["input_lens"][0] > 0) == (120, True)
    assert found["tokenpipe"]["output_token_sources"] == {"usage": 120}
    assert found["request_goodput"] == found["request_throughput"]
    assert all(len(itls) == 5 for itls in found["itls"])
    assert all(ttft > 0.029 for ttft in found["ttfts"])  # never before its time
    assert all(found["generated_texts"])
    assert found["tokenpipe"]["generator"]["asked_rps"] == 100.0
    assert "============ Serving Benchmark Result ============" in run.out
    assert "\r" not in run.err  # no terminal, no progress bar
    assert f"the result is in {tmp_path / 'r.json'}" in run.err


async def test_a_sweep_with_a_comparison_and_a_report(start_mock: StartMock, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    slow, fast = await start_mock(ttft=0.05, tokens=4), await start_mock(ttft=0.01, tokens=4)
    page, picture = tmp_path / "r.html", tmp_path / "r.png"
    run = Loadtest(tmp_path, slow.url, *SMALL, "--compare", fast.url, "--request-rate", "50,100", *saved(tmp_path),
                   "--report", str(page), "--plot", str(picture), "--goodput", "ttft:40")  # fmt: skip
    assert await run.done() == 0, run.err
    for name, rate in (("r-50.0qps.json", 50.0), ("r-100.0qps.json", 100.0)):
        found = result(tmp_path, name)
        assert (found["completed"], found["request_rate"], found["request_goodput"]) == (20, rate, 0.0)
        compared = found["tokenpipe"]["compare"]
        assert (compared["url"], compared["second"]["completed"]) == (fast.url, 20)
        value, low, high = compared["differences"]["ttft"]["mean_ms"]
        assert low < value < high
        assert compared["differences"]["ttft"]["pairs"] == 20
        assert value > 20  # 40 by the schedule
    assert "What the first endpoint adds" in run.out
    assert picture.read_bytes().startswith(b"\x89PNG")
    html = page.read_text()
    assert_self_contained(html)
    titles = re.findall(r"<figcaption>(.*?)</figcaption>", html)
    for title in ("TTFT: share", "TPOT: share", "ITL: share", "E2EL: share", "TTFT over time", "Output over time",
                  "Requests under way", "Goodput frontier", "What the first endpoint adds"):  # fmt: skip
        assert any(each.startswith(title) for each in titles), title
    assert html.count("<svg role=") == len(titles)
    assert re.search(r">ttft 40 ms<", html)


def assert_self_contained(html: str) -> None:
    """Nothing is loaded from anywhere: no element refers to something outside the page."""
    outside = re.findall(r'(?:src|href|data|action|poster)\s*=\s*"(?!#)[^"]*"|@import|url\((?!#)[^)]*\)|<script', html)
    assert outside == []
    identifiers = re.findall(r'\sid="([^"]+)"', html)
    assert len(identifiers) == len(set(identifiers))
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', html)) <= set(identifiers)
    assert "default-src 'none'" in html


async def test_a_report_needs_its_library(tmp_path: Path) -> None:
    """Said before the run, with the name of the extra."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'matplotlib' else find(name, *rest)\n"
    )
    run = Loadtest(tmp_path, "http://127.0.0.1:9", "--report", str(tmp_path / "r.html"),
                   environment={"PYTHONPATH": f"{tmp_path}:{ROOT}"})  # fmt: skip
    assert await run.done() == 2
    assert "--report needs matplotlib, which is not installed: pip install matplotlib (the extra tokenpipe[report])" in run.err


async def test_nobody_there(tmp_path: Path) -> None:
    run = Loadtest(tmp_path, "http://127.0.0.1:9")
    assert await run.done() == 1
    assert run.err == (
        "tokenpipe: cannot connect to http://127.0.0.1:9: Connection refused; check that the server runs, the host, the port"
        " and http or https\n"
    )
    assert run.out == ""


async def test_waiting_until_it_is_there(tmp_path: Path) -> None:
    with listening_socket() as found:
        port = found.getsockname()[1]
    run = Loadtest(tmp_path, f"http://127.0.0.1:{port}", *SMALL, "--ready-check-timeout-sec", "20")
    late = RawUpstream(stream(*TWO))
    await asyncio.sleep(0.3)
    await late.start(listening_socket(port=port))
    try:
        assert await run.done() == 0, run.err
    finally:
        await late.stop()


async def test_every_request_fails(upstream: RawUpstream, tmp_path: Path) -> None:
    upstream.script = reply(500, {"error": "no"})
    run = Loadtest(tmp_path, upstream.url, *SMALL, *saved(tmp_path))
    assert await run.done() == 1
    assert len(upstream.requests) == 20
    assert run.err.endswith("tokenpipe: every request failed\n")
    found = result(tmp_path)
    assert (found["completed"], found["failed"], found["mean_ttft_ms"]) == (0, 20, 0.0)
    assert found["tokenpipe"]["statuses"] == {"500": 20}
    assert '  20 x status 500 OK {"error": "no"}' in run.out


async def test_some_fail_and_each_is_sent_once(upstream: RawUpstream, tmp_path: Path) -> None:
    upstream.script = in_turn(reply(429, b"busy"), stream(TWO[0]), stream(*TWO))
    run = Loadtest(tmp_path, upstream.url, *SMALL, "--num-warmups", "2", "--max-concurrency", "1", *saved(tmp_path))
    assert await run.done() == 0, run.err
    assert len(upstream.requests) == 22  # the two of the warm-up are those that fail
    assert "of the warm-up 1 failed: status 429" in run.err
    assert result(tmp_path)["completed"] == 20


async def test_success_as_vllm_has_it(upstream: RawUpstream, tmp_path: Path) -> None:
    upstream.script = stream(*TWO[:2])  # cut, without a terminal event
    strict = Loadtest(tmp_path, upstream.url, *SMALL, *saved(tmp_path))
    assert await strict.done() == 1
    assert "upstream_truncated:                      20" in strict.out
    lenient = Loadtest(tmp_path, upstream.url, *SMALL, *saved(tmp_path), "--success", "vllm")
    assert await lenient.done() == 0
    found = result(tmp_path)
    assert (found["completed"], found["failed"], found["tokenpipe"]["outcomes"]) == (20, 0, {"upstream_truncated": 20})


async def test_key_headers_and_body(upstream: RawUpstream, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sk-file\n")
    upstream.script = stream(*TWO)
    words = (upstream.url, "--num-prompts", "1", "--prompt", "how are you", "--model", "own", "--header", "X-A=1", "X-B=2",
             "--extra-body", '{"min_tokens": 2}', "--output-len", "3", "--disable-tqdm")  # fmt: skip
    run = Loadtest(tmp_path, *words, environment={"OPENAI_API_KEY": "sk-env"})
    assert await run.done() == 0, run.err
    run = Loadtest(tmp_path, *words, "--api-key-file", str(tmp_path / "key"))
    assert await run.done() == 0, run.err
    first, second = upstream.requests
    assert [first.get("authorization"), second.get("authorization")] == ["Bearer sk-env", "Bearer sk-file"]
    assert (first.get("x-a"), first.get("x-b")) == ("1", "2")
    assert json.loads(first.body) == {
        "model": "own",
        "messages": [{"role": "user", "content": "how are you"}],
        "max_completion_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "min_tokens": 2,
    }
    assert not upstream.probed  # a model that is named is not asked for
    assert "sk-" not in run.out + run.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_ctrl_c_reports_what_is_finished(upstream: RawUpstream, tmp_path: Path, number: int) -> None:
    held = Held(SSE_HEAD, chunk(TWO[0]))
    upstream.script = in_turn(*[stream(*TWO)] * 3, held)
    run = Loadtest(tmp_path, upstream.url, *SMALL, "--max-concurrency", "1", *saved(tmp_path))
    await held.wire()
    await until(lambda: len(upstream.requests) == 4, "the one that hangs")
    run.process.send_signal(number)
    assert await run.done() == 1
    assert run.err.endswith("tokenpipe: interrupted: reported is what was finished\n")
    assert "Successful requests:                     3\n" in run.out
    assert "Abandoned at the interrupt:              1\n" in run.out
    found = result(tmp_path)
    assert (found["completed"], found["failed"], found["num_prompts"], found["tokenpipe"]["interrupted"]) == (3, 0, 20, True)
    assert len(upstream.requests) == 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_ctrl_c_while_the_prompts_are_made(upstream: RawUpstream, tmp_path: Path, number: int) -> None:
    """Which takes long where they are many: it does not await, and a handler of the event loop's would not be called."""
    run = Loadtest(tmp_path, upstream.url, "--model", "m", "--num-prompts", "100000", "--random-input-len", "4096",
                   "--request-rate", "1")  # fmt: skip
    await until(lambda: upstream.connections, "the look whether somebody is there")
    await asyncio.sleep(0.3)
    run.process.send_signal(number)
    assert await asyncio.wait_for(run.done(), 10) == 1
    assert run.err == "tokenpipe: interrupted: reported is what was finished\n"
    assert not upstream.requests


async def test_adapters_in_turn_and_a_file_that_is_not_gone_through_again(upstream: RawUpstream, tmp_path: Path) -> None:
    upstream.script = stream(*TWO)
    (tmp_path / "p.txt").write_text("\n".join("abcde"))
    words = ("--dataset-path", str(tmp_path / "p.txt"), "--model", "base", "--lora-modules", "x", "y", "--num-prompts", "50",
             "--no-oversample", "--max-concurrency", "1")  # fmt: skip
    assert await Loadtest(tmp_path, *words, "--lora-assignment", "round-robin", upstream.url).done() == 0
    assert [json.loads(request.body)["model"] for request in upstream.requests] == ["x", "y", "x", "y", "x"]
    upstream.requests.clear()
    run = Loadtest(tmp_path, upstream.url, *words)
    assert await run.done() == 0
    assert {json.loads(request.body)["model"] for request in upstream.requests} <= {"x", "y"}
    assert "tokenpipe: 5 requests to" in run.err


@pytest.mark.parametrize("closed", ["0", "1", "2"])
async def test_a_standard_stream_that_is_closed(upstream: RawUpstream, tmp_path: Path, closed: str) -> None:
    """Its number would be the next socket's."""
    upstream.script = stream(*TWO)
    words = f"{sys.executable} -m gateway loadtest {upstream.url} --model m --prompt hi --num-prompts 3"
    process = await asyncio.create_subprocess_shell(
        f"exec {words} {closed}>&-", cwd=ROOT, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode == 0, err
    assert (b"Successful requests:                     3\n" in out) is (closed != "1")
    assert (b"3 requests to" in err) is (closed != "2")
    assert len(upstream.requests) == 3


async def test_a_progress_bar_on_a_terminal(upstream: RawUpstream, tmp_path: Path) -> None:
    held = Held(SSE_HEAD)
    upstream.script = in_turn(*[stream(*TWO)] * 19, held)
    terminal, other = pty.openpty()
    os.set_blocking(terminal, False)
    shown = b""

    def look() -> bytes:
        nonlocal shown
        with contextlib.suppress(OSError):
            shown += os.read(terminal, 65536)
        return shown

    words = ["loadtest", upstream.url, *SMALL, "--max-concurrency", "1"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", *words, cwd=ROOT, stderr=other, stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    os.close(other)
    try:
        await held.wire()
        await until(lambda: b"19/20, 1 under way" in look(), "the progress bar")
        (await held.wire()).reset()
        assert await process.wait() == 0
        assert look().endswith(b"\r\x1b[K")  # it is gone once the run is over
        assert shown.index("\r  0% ··".encode()) < shown.index("█".encode())  # it began empty, and with what is asked for
        assert b" 0/20, " in shown and b"0/0" not in shown
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(terminal)


async def test_a_sweep_tells_of_each_rate_as_it_is_done(upstream: RawUpstream, tmp_path: Path) -> None:
    held = Held(SSE_HEAD)
    upstream.script = in_turn(*[stream(*TWO)] * 3, held)
    words = ["loadtest", upstream.url, *SMALL, "--num-prompts", "2", "--request-rate", "500,600", "--max-concurrency", "1"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", *words, *saved(tmp_path), cwd=ROOT, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        await held.wire()  # the last request of the second rate, which gets no answer yet
        assert result(tmp_path, "r-500.0qps.json")["completed"] == 2
        shown = await asyncio.wait_for(process.stdout.readuntil(b"Successful requests:                     2\n"), 10)
        assert b"RPS" not in shown
        process.kill()  # and none of it is lost
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def test_what_is_of_no_use_without_save_result_is_said(upstream: RawUpstream, tmp_path: Path) -> None:
    upstream.script = in_turn(stream(*TWO))
    run = Loadtest(tmp_path, upstream.url, "--num-prompts", "1", "--random-input-len", "8", "--save-detailed",
                   "--result-dir", str(tmp_path))  # fmt: skip
    assert await run.done() == 0, run.err
    assert "nothing is written for --save-detailed and --result-dir: add --save-result" in run.err


def test_the_help_shows_no_range_without_ends() -> None:
    run = subprocess.run([sys.executable, "-m", "gateway", "loadtest", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert "--top-p FLOAT" in run.stdout and "None" not in run.stdout


def test_what_the_bar_says() -> None:
    assert line(30, 60, 2, 5, 10.0) == f" 50% {'█' * 15}{'·' * 15} 30/60, 2 failed, 5 under way, 3.0 req/s, 10 s"
