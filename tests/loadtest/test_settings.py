"""Flags: vLLM's way of writing them, what they come to, and what is said of those that are wrong."""

from __future__ import annotations

import json
import math

import click
import pytest

from gateway.cli import run
from gateway.flags import repeat_flags
from gateway.loadtest.datasets import Prompt
from gateway.loadtest.endpoints import Asking, Kind, body, generated_text
from gateway.loadtest.options import SEVERAL
from gateway.loadtest.settings import build
from gateway.loadtest.target import parse
from tests.loadtest.support import flags, settings


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--goodput ttft:1 tpot:2 URL", "--goodput ttft:1 --goodput tpot:2 URL"),
        ("--goodput ttft:1 http://h:1", "--goodput ttft:1 http://h:1"),
        ("http://h:1 --goodput ttft:1 e2el:3 --seed 1", "http://h:1 --goodput ttft:1 --goodput e2el:3 --seed 1"),
        ("--goodput=ttft:1 tpot:2", "--goodput=ttft:1 --goodput tpot:2"),
        ("--header a=b c=d http://h:1?x=y", "--header a=b --header c=d http://h:1?x=y"),
        ("--metadata a=b --seed 1 x=y", "--metadata a=b --seed 1 x=y"),
        ("--goodput ttft:1 -- tpot:2", "--goodput ttft:1 -- tpot:2"),
    ],
)
def test_several_words_after_one_flag(words: str, expected: str) -> None:
    assert repeat_flags(words.split(), SEVERAL) == expected.split()


@pytest.mark.parametrize("words", ["--goodput --seed 1", "--goodput ttft:1 --header --seed=1"])
def test_no_word_after_a_flag_that_takes_several(words: str) -> None:
    """As with a variable of the shell that is empty: click would take the next flag for the word."""
    with pytest.raises(click.BadOptionUsage, match=r"found no word after it, but --seed; expected at least one"):
        repeat_flags(words.split(), SEVERAL)


def test_a_command_line_of_vllm_bench_serve() -> None:
    words = (
        "--backend vllm --base-url http://h:8000 --endpoint /v1/completions --model org/m --tokenizer org/m"
        " --dataset-name random --random-input-len 64 --random-output-len 16 --num-prompts 32 --request-rate 4"
        " --burstiness 0.5 --max-concurrency 8 --goodput ttft:300 tpot:50 --percentile-metrics ttft,tpot"
        " --metric-percentiles 50,99 --seed 3 --ignore-eos --save-result --result-dir out --metadata a=1 b=2"
        " --header x-a=1 --extra-body {\"min_tokens\":1} --temperature 0 --trust-remote-code --tokenizer-mode slow"
    )  # fmt: skip
    made = build(flags(*words.split()), None)
    assert (made.url, made.kind, made.model, made.tokenizer) == ("http://h:8000", Kind.COMPLETIONS, "org/m", "org/m")
    assert (made.rates, made.burstiness, made.max_concurrency, made.num_prompts) == ((4.0,), 0.5, 8, 32)
    assert made.goodput == {"ttft": 0.3, "tpot": 0.05}
    assert (made.percentile_metrics, made.percentiles) == (("ttft", "tpot"), (50.0, 99.0))
    assert (made.dataset.random_input_len, made.dataset.random_output_len, made.dataset.seed) == (64, 16, 3)
    assert (made.metadata, made.fields) == ((("a", "1"), ("b", "2")), (("x-a", "1"),))
    assert made.extra_body == {"temperature": 0.0, "min_tokens": 1}
    assert made.ignore_eos and made.save_result


@pytest.mark.parametrize("flag", ["timeout", "ready-check-timeout-sec", "temperature", "top-p", "min-p", "presence-penalty",
                                  "frequency-penalty", "repetition-penalty", "ramp-up-start-rps"])  # fmt: skip
@pytest.mark.parametrize("value", ["nan", "inf", "1e999"])
def test_what_is_no_finite_number(capsys: pytest.CaptureFixture[str], flag: str, value: str) -> None:
    assert run(["loadtest", "http://h", f"--{flag}", value]) == 2
    assert f"Invalid value for '--{flag}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "nearest"),
    [
        ("--profile", "POST /start_profile"),
        ("--probe-request-rate 1", "a second tokenpipe loadtest"),
        ("--plot-timeline", "--report FILE.html"),
        ("--timeline-itl-thresholds=25,50", "--report FILE.html"),
        ("--plot-dataset-stats", "--save-detailed"),
        ("--chat-template-kwargs {}", "--extra-body"),
        ("--use_beam_search", "--extra-body"),
        ("--self-timed", "--request-rate"),
        ("--timed-trace-sec-multiplier 2", "--request-rate"),
        ("--hf-split train", "--dataset-path FILE"),
        ("--random-mm-base-items-per-request 1", "--dataset-path FILE"),
        ("--random-batch-size 2", "chat, completions, responses and messages"),
    ],
)
def test_flags_of_vllm_that_are_not_built(capsys: pytest.CaptureFixture[str], words: str, nearest: str) -> None:
    flag = words.replace("_", "-").split()[0].partition("=")[0]
    assert run(["loadtest", "http://h", *words.split()]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"Error: {flag}, of vllm bench serve, is not supported: ") and nearest in said


def test_flags_as_vllm_also_takes_them() -> None:
    made = settings("--num_prompts=3", "--max_concurrency", "2", "--skip-chat-template", "--no-stream", "--no-self-timed")
    assert (made.num_prompts, made.max_concurrency) == (3, 2)
    made = build(flags("--lora-modules", "a", "org/b", "http://h:1", "--lora-assignment", "round-robin"), None)
    assert (made.url, made.lora_modules, made.lora_in_turn) == ("http://h:1", ("a", "org/b"), True)


def test_defaults() -> None:
    made = settings()
    assert (made.kind, made.endpoint, made.rates, made.burstiness) == (Kind.CHAT, "/v1/chat/completions", (math.inf,), 1.0)
    assert (made.num_prompts, made.max_concurrency, made.success) == (1000, None, "strict")
    assert made.ignore_eos  # with random prompts, as vLLM has it
    assert not settings("--prompt", "hi").ignore_eos
    assert not settings("--no-ignore-eos").ignore_eos
    assert settings("--prompt", "hi").dataset.name == "custom"
    assert settings("--output-len", "9").dataset.custom_output_len == 9


def test_the_model_in_requests_may_have_another_name() -> None:
    made = settings("--model", "org/m", "--served-model-name", "m")
    assert (made.model, made.model_id) == ("m", "org/m")


def test_the_kind_follows_the_path() -> None:
    assert settings("--endpoint", "/v1/completions").kind is Kind.COMPLETIONS
    assert settings("--backend", "messages").endpoint == "/v1/messages"


def test_the_key() -> None:
    assert settings(key="k").fields == (("Authorization", "Bearer k"),)
    assert settings("--header", "authorization=mine", key="k").fields == (("authorization", "mine"),)
    assert settings("--backend", "anthropic", key="k").fields[1] == ("x-api-key", "k")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", "no endpoint is given: expected a URL"),
        ("http://h --host x", "given twice"),
        ("http://h --request-rate 0", "--request-rate: found '0'; expected requests a second"),
        ("http://h --request-rate 1,x", "--request-rate: found 'x'"),
        ("http://h --burstiness 0", "--burstiness: found '0'"),
        ("http://h --goodput itl:5", "--goodput: found 'itl:5'; expected KEY:MILLISECONDS"),
        ("http://h --goodput ttft:x", "--goodput: found 'x'"),
        ("http://h --percentile-metrics ttft,x", "--percentile-metrics: found 'x'; expected some of ttft"),
        ("http://h --metric-percentiles 101", "--metric-percentiles: found '101'"),
        ("http://h --ramp-up-strategy linear", "needs both --ramp-up-start-rps"),
        ("http://h --ramp-up-start-rps 1", "need --ramp-up-strategy"),
        ("http://h --ramp-up-strategy linear --ramp-up-start-rps 0 --ramp-up-end-rps 2", "--ramp-up-start-rps: found 0"),
        ("http://h --ramp-up-strategy linear --request-rate 3", "leave out --request-rate"),
        ("http://h --header x", "--header: found 'x'; expected KEY=VALUE"),
        ("http://h --header a:b=c", "--header: found 'a:b'; expected the name of a header field"),
        ("http://h --extra-body [1]", "--extra-body: expected a JSON object"),
        ("http://h --report x.pdf", "--report: found 'x.pdf'; expected a name that ends in .html"),
        ("http://h --plot x.html", "--plot: found 'x.html'; expected a name that ends in .png"),
        ("http://h --dataset-name random --dataset-path x", "leave out --dataset-path"),
        ("http://h --prompt a --dataset-path x", "--prompt is a data set of its own"),
        ("http://h --random-range-ratio 1", "--random-range-ratio: found 1.0"),
        ("http://h --backend responses --logprobs 2", "--logprobs: responses has no such field; expected --backend"),
        ("http://h --endpoint v1/x", "--endpoint: found 'v1/x'"),
        ("http://h --api-key-file /nope", "--api-key-file: /nope cannot be read"),
        ("ftp://h", "URL: found 'ftp://h'; expected http://HOST"),
        ("http://h:x", "URL: found 'http://h:x'"),
        ("http://key@h", "a key does not belong into the URL"),
        ("http://h --compare h:1", "--compare: found 'h:1'; expected http://HOST"),
        ("http://h --header content-length=1", "are written by the tester itself"),
        ("http://h --report /nope/x.html", "/nope/x.html cannot be written: /nope is no folder"),
        ("http://h --save-result --result-dir /proc/nope", "--result-dir: /proc/nope cannot be made: "),
        ("http://h --save-result --result-dir / --result-filename proc", "the result cannot be written to /proc: expected"),
        ("http://h --extra-body " + "[" * 100_000, "--extra-body: no JSON: maximum recursion depth"),
        ("http://h --extra-body {\"x\":NaN}", "--extra-body: no JSON: NaN is no number"),
        ("http://h --num-prompts 99999999999999999999", "expected fewer (--num-prompts, --num-warmups) or shorter ones"),
        ("http://h --num-warmups 99999999999999999999", "expected fewer (--num-prompts, --num-warmups) or shorter ones"),
        ("http://h --random-input-len 999999999999", "GiB of memory, and this machine has"),
        ("http://h --random-prefix-len 999999999999", "GiB of memory, and this machine has"),
        ("http://h --dataset-name prefix_repetition --prefix-repetition-num-prefixes 99999999999", "GiB of memory"),
        ("http://h --request-rate 1e-320", "--request-rate: found '1e-320'; expected requests a second"),
        ("http://h --burstiness 1e-300", "--burstiness: found '1e-300'"),
        ("--port 0", "--port: found 0; expected a port, 1 to 65535"),
        ("--host h --port 99999", "--port: found 99999; expected a port, 1 to 65535"),
    ],
)
def test_bad_usage(capsys: pytest.CaptureFixture[str], words: str, expected: str) -> None:
    assert run(["loadtest", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert expected in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("url", "shown", "path", "host"),
    [
        ("http://h:8000", "http://h:8000", "/v1/chat/completions", b"h:8000"),
        ("http://h:8000/", "http://h:8000", "/v1/chat/completions", b"h:8000"),
        ("http://h/v1", "http://h", "/v1/chat/completions", b"h"),
        ("https://h/loadtest/v1/", "https://h/loadtest", "/loadtest/v1/chat/completions", b"h"),
        ("http://h/v1/chat/completions", "http://h", "/v1/chat/completions", b"h"),
        ("http://[::1]:1", "http://[::1]:1", "/v1/chat/completions", b"[::1]:1"),
        ("unix:/run/a.sock", "unix:/run/a.sock", "/v1/chat/completions", b"localhost"),
    ],
)
def test_urls(url: str, shown: str, path: str, host: bytes) -> None:
    target = parse("URL", url, Kind.CHAT.path)
    assert (target.url, target.path, target.origin.host_field) == (shown, path, host)
    assert (target.origin.tls is not None) is url.startswith("https")


PROMPT = Prompt("hi there", 2, 5)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Kind.CHAT, {"messages": [{"role": "user", "content": "hi there"}], "max_completion_tokens": 5,
                     "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2}),
        (Kind.COMPLETIONS, {"prompt": "hi there", "max_tokens": 5, "stream_options": {"include_usage": True}, "logprobs": 2}),
        (Kind.RESPONSES, {"input": "hi there", "max_output_tokens": 5, "store": False}),
        (Kind.MESSAGES, {"messages": [{"role": "user", "content": "hi there"}], "max_tokens": 5}),
    ],
)  # fmt: skip
def test_bodies(kind: Kind, expected: dict[str, object]) -> None:
    asking = Asking(kind, "m", True, 2 if "logprobs" in expected else None, {"top_k": 1})
    common = {"model": "m", "stream": True, "ignore_eos": True, "top_k": 1}
    assert json.loads(body(asking, PROMPT)) == {**common, **expected}


def test_without_an_output_length() -> None:
    prompt = Prompt("hi", 1, None, [{"role": "system", "content": "be brief"}])
    assert "max_completion_tokens" not in json.loads(body(Asking(Kind.CHAT, "m"), prompt))
    assert json.loads(body(Asking(Kind.CHAT, "m"), prompt))["messages"] == prompt.messages
    assert json.loads(body(Asking(Kind.MESSAGES, "m"), prompt))["max_tokens"] > 0  # the API wants one


def test_generated_text() -> None:
    chat = b'data: {"choices":[{"delta":{"content":"a\\n"}}]}\n\ndata: {"choices":[]}\n\ndata: [DONE]\n\n'
    assert generated_text(Kind.CHAT, chat) == "a\n"
    assert generated_text(Kind.COMPLETIONS, b'data: {"choices":[{"text":"b"}]}\n\n') == "b"
    assert generated_text(Kind.MESSAGES, b'data: {"type":"content_block_delta","delta":{"text":"c"}}\n\n') == "c"
    delta = b'data: {"type":"response.output_text.delta","delta":"d"}\n\n'
    assert generated_text(Kind.RESPONSES, delta + b'data: {"type":"response.reasoning_text.delta","delta":"x"}\n\n') == "d"
