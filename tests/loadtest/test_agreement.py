"""The load tester beside others that saw the same: `vllm bench serve`'s result file, and the gateway's histograms.

What the three tools say of the same run is in gateway/loadtest/README.md, and `python -m tests.bench.agreement` says it anew.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from gateway.telemetry.histogram import B_TPOT, B_TTFT
from tests.integration.test_metrics import within_a_bucket
from tests.loadtest.support import Loadtest
from tests.support.gateway import Gateway
from tests.support.messages import HttpWire, Message
from tests.support.script import DONE, FINISHED, LAST, SSE_HEAD, chunk, delta, event
from tests.support.upstream import RawUpstream
from tests.synthetic.conftest import StartMock, start_mock

__all__ = ("start_mock",)  # a fixture

DATA = Path(__file__).resolve().parents[1] / "data"
USAGE = event({"choices": [], "usage": {"prompt_tokens": 8, "completion_tokens": 5, "total_tokens": 13}})


def shape(value: Any) -> str:
    """What a reader may rely on: the type, and of a list the types in it."""
    if isinstance(value, list):
        return f"list[{', '.join(sorted({shape(each) for each in value}))}]"
    return type(value).__name__


async def test_a_result_file_is_one_of_vllm_bench_serve(start_mock: StartMock, tmp_path: Path) -> None:
    """The file of a run of vLLM 0.32's, and ours of the same command line: the same fields, in order, of the same types."""
    theirs = json.loads((DATA / "vllm_bench_serve.json").read_text())
    mock = await start_mock(ttft=0.05, itl=0.02)
    run = Loadtest(
        tmp_path, "--backend", "openai-chat", "--base-url", mock.url, "--endpoint", "/v1/chat/completions",
        "--model", "synthetic", "--tokenizer", "tokenizer", "--dataset-name", "random", "--random-input-len", "4",
        "--random-output-len", "3", "--num-prompts", "3", "--request-rate", "50", "--max-concurrency", "2", "--ignore-eos",
        "--goodput", "ttft:500", "tpot:100", "--metadata", "tp=2", "--metric-percentiles", "50,99", "--percentile-metrics",
        "ttft,tpot,itl,e2el,client_queue_time,e2el_including_client_queue", "--disable-tqdm", "--save-result",
        "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "ours.json",
    )  # fmt: skip
    assert await run.done() == 0, run.err
    ours = json.loads((tmp_path / "ours.json").read_text())
    del ours["tokenpipe"]
    assert [(name, shape(value)) for name, value in ours.items()] == [(name, shape(value)) for name, value in theirs.items()]
    exact = ("model_id", "tokenizer_id", "num_prompts", "tp", "request_rate", "burstiness", "max_concurrency", "completed",
             "failed", "total_input_tokens", "total_output_tokens", "input_lens", "output_lens", "errors", "rtfx")  # fmt: skip
    assert {name: ours[name] for name in exact} == {name: theirs[name] for name in exact}


async def test_the_gateways_histograms_say_what_the_load_tester_says(
    start_gateway: Callable[..., Awaitable[Gateway]], upstream: RawUpstream, tmp_path: Path
) -> None:
    """TTFT, ITL and TPOT: as many of each, and no quantile of them more than a bucket apart."""

    async def paced(wire: HttpWire, request: Message) -> None:
        chance = random.Random(request.body)
        await wire.send(SSE_HEAD)
        for token in (*[delta("a")] * 4, FINISHED[0]):
            await asyncio.sleep(chance.choice([0.0625, 0.125, 0.25, 0.35]))  # each in the middle of a bucket
            await wire.send(chunk(token))
        await wire.send(chunk(USAGE) + chunk(DONE) + LAST)

    upstream.script = paced
    gateway = await start_gateway(config={}, backends=[upstream.url])
    words = ("--model", "m", "--num-prompts", "24", "--max-concurrency", "12", "--random-input-len", "8", "--save-result",
             "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r.json")  # fmt: skip
    run = Loadtest(tmp_path, gateway.url, *words)
    assert await run.done() == 0, run.err
    await gateway.idle()
    samples, found = await gateway.metrics(), json.loads((tmp_path / "r.json").read_text())
    gaps = [gap for itl in found["itls"] for gap in itl]
    tpots = [(latency - ttft) / 4 for latency, ttft in zip(found["latencies"], found["ttfts"], strict=True)]
    assert (found["completed"], len(gaps), found["output_lens"]) == (24, 96, [5] * 24)
    within_a_bucket(samples, "tokenpipe_time_to_first_token_seconds", B_TTFT, found["ttfts"])
    within_a_bucket(samples, "tokenpipe_inter_token_latency_seconds", B_TPOT, gaps)
    within_a_bucket(samples, "tokenpipe_time_per_output_token_seconds", B_TPOT, tpots, source="usage")
