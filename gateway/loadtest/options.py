"""The flags of `tokenpipe loadtest`: those of `vllm bench serve` under their names, then our own.

It imports nothing but click, for `tokenpipe --help` reads it too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from gateway.flags import repeat_flags

_Command = TypeVar("_Command", bound=Callable[..., int])


def _finite(number: float, value: Any) -> float:
    """click's own takes nan for a number, and for one within any range."""
    if not math.isfinite(number):
        raise click.BadParameter(f"{value!r} is no finite number.")
    return number


class _Number(click.types.FloatParamType):
    """Any finite number; a range without ends would be shown as one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return _finite(super().convert(value, param, ctx), value)


class _Finite(click.FloatRange):
    """A finite number within a range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return _finite(super().convert(value, param, ctx), value)


_FILE: Final = click.Path(path_type=Path)
_COUNT: Final = click.IntRange(min=1)
_SOME: Final = click.IntRange(min=0)
_NUMBER: Final = _Number()
_YEAR: Final = 31_536_000.0  # seconds

BACKENDS: Final = (
    "openai-chat", "openai", "vllm", "openai-responses", "anthropic", "chat", "completions", "responses", "messages",
)  # fmt: skip

# Flags that take several words after them, as in vLLM's command line, and what such a word looks like.
SEVERAL: Final = {
    "--goodput": re.compile(r"[a-z0-9]+:[0-9.]+"),
    "--header": re.compile(r"[^\s=:/-][^\s=:/]*=.*", re.DOTALL),
    "--metadata": re.compile(r"[^\s=:/-][^\s=:/]*=.*", re.DOTALL),
    "--lora-modules": re.compile(r"(?!https?://|unix:)[^\s-].*", re.DOTALL),
}

_FILES_ONLY: Final = "of data sets there are random, prefix_repetition, sharegpt and custom (--dataset-path FILE)"
_NO_POOLING: Final = "only what generates text is loaded: chat, completions, responses and messages"
_OWN_ARRIVALS: Final = "arrivals are those of --request-rate, --burstiness and --ramp-up-strategy"
# Flags of `vllm bench serve` (0.32, 0.33) that are not built, and what is nearest. An entry that ends in - has all that
# begin so.
_NOT_BUILT: Final = {
    "--profile": "the profiler is the engine's own: POST /start_profile to it before, and /stop_profile after",
    "--probe-request-rate": "run a second tokenpipe loadtest beside this one, with --request-rate R --output-len 1",
    "--plot-timeline": "--report FILE.html has the plots over time",
    "--timeline-itl-thresholds": "--report FILE.html has the plots over time, and ITL as a curve",
    "--plot-dataset-stats": "--save-detailed writes the lengths of every request",
    "--chat-template-kwargs": "the server makes the prompt: --extra-body '{\"chat_template_kwargs\": {...}}' asks it",
    "--use-beam-search": "--extra-body '{\"use_beam_search\": true}' asks the engine for it",
    "--duration": "a run takes --num-prompts / --request-rate seconds",
    "--self-timed": _OWN_ARRIVALS,
    "--timed-trace-": _OWN_ARRIVALS,
    "--random-batch-size": _NO_POOLING,
    "--no-reranker": _NO_POOLING,
    "--random-mm-": _FILES_ONLY,
    "--enable-multimodal-chat": _FILES_ONLY,
    "--custom-ensure-client-side-data": _FILES_ONLY,
    "--hf-": _FILES_ONLY,
    "--sonnet-": _FILES_ONLY,
    "--spec-bench-": _FILES_ONLY,
    "--speed-bench-": _FILES_ONLY,
    "--blazedit-": _FILES_ONLY,
    "--asr-": _FILES_ONLY,
    "--bfcl-": _FILES_ONLY,
}


class LoadtestCommand(click.Command):
    """Takes `--goodput ttft:200 tpot:50` for `--goodput ttft:200 --goodput tpot:50`, and `--num_prompts` for `--num-prompts`,
    as vLLM's own parser does.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = {name for option in self.params for name in option.opts}
        words = repeat_flags(_dashed(args, known), SEVERAL)
        for word in words[: words.index("--")] if "--" in words else words:
            name = word.partition("=")[0]
            if name not in known and (nearest := _not_built(name)):
                raise click.UsageError(f"{name}, of vllm bench serve, is not supported: {nearest}", ctx)
        return super().parse_args(ctx, words)


def _dashed(args: list[str], known: set[str]) -> list[str]:
    dashed = []
    for word in args:
        name, equals, value = word.partition("=")
        other = name.replace("_", "-")
        wanted = name.startswith("--") and (other in known or _not_built(other))
        dashed.append(other + equals + value if wanted else word)
    return dashed


def _not_built(name: str) -> str:
    """What is nearest to a flag of vLLM's that is not built; nothing, if it is none."""
    return next((text for flag, text in _NOT_BUILT.items() if name == flag or (flag[-1] == "-" and name.startswith(flag))), "")


def _option(*names: str, **settings: Any) -> Callable[[_Command], _Command]:
    return click.option(*names, **settings)


_OPTIONS: Final = (
    # where to
    _option("--compare", metavar="URL", help="A second endpoint: it gets the same load, interleaved, and what URL adds to"
            " it is reported pair by pair. --num-prompts go to each."),
    _option("--backend", type=click.Choice(BACKENDS), metavar="KIND", help="The kind of endpoint: openai-chat (or chat),"
            " openai or vllm (completions), openai-responses (responses), anthropic (messages).  [openai-chat]"),
    _option("--endpoint", metavar="PATH", help="The path of requests.  [the kind's, such as /v1/chat/completions]"),
    _option("--base-url", metavar="URL", help="The same as URL."),
    _option("--host", help="With --port, instead of URL.  [127.0.0.1]"),
    _option("--port", type=int, help="[8000]"),
    _option("--model", metavar="NAME", help="The model to ask for.  [the first of /v1/models]"),
    _option("--served-model-name", metavar="NAME", help="The model's name in requests, if it differs from --model."),
    _option("--lora-modules", metavar="NAME", multiple=True, help="Ask for one of these models in each request; repeat it for"
            " more."),
    _option("--lora-assignment", type=click.Choice(("random", "round-robin")), default="random", show_default=True,
            metavar="HOW", help="random or round-robin: which of them a request gets."),
    _option("--header", metavar="KEY=VALUE", multiple=True, help="A header field of each request; repeat it for more."),
    _option("--api-key-file", type=_FILE, metavar="FILE", help="The API key. Else it is taken from the environment,"
            " OPENAI_API_KEY."),
    _option("--insecure", is_flag=True, help="Do not check the server's certificate."),
    _option("--ready-check-timeout-sec", type=_Finite(min=0, max=_YEAR), default=0, metavar="SECONDS",
            help="Wait so long for the endpoint to take connections.  [0]"),
    _option("--timeout", type=_Finite(min=0, min_open=True, max=_YEAR), default=21600.0, metavar="SECONDS",
            help="The most that one request may take.  [21600, as in vLLM]"),
    # what is asked
    _option("--dataset-name", type=click.Choice(("random", "prefix_repetition", "sharegpt", "custom")), metavar="NAME",
            help="random, prefix_repetition, sharegpt or custom.  [random; custom with --dataset-path or --prompt]"),
    _option("--dataset-path", type=_FILE, metavar="FILE", help='sharegpt: JSON or JSONL of "conversations"; custom: JSONL of'
            ' "prompt" or "messages", or .txt with a prompt a line.'),
    _option("--prompt", multiple=True, metavar="TEXT", help="A prompt of your own; repeat it for more."),
    _option("--num-prompts", type=_COUNT, default=1000, show_default=True, metavar="N", help="Requests to send."),
    _option("--seed", type=int, default=0, show_default=True, help="The same seed, the same prompts and arrivals."),
    _option("--disable-shuffle", is_flag=True, help="Take a file's prompts in their order."),
    _option("--no-oversample", is_flag=True, help="Do not go through a file again that has fewer prompts than are asked for:"
            " send fewer."),
    _option("--input-len", type=_COUNT, metavar="TOKENS", help="Sets --random-input-len."),
    _option("--output-len", type=_COUNT, metavar="TOKENS", help="Sets the output length of whichever data set."),
    _option("--random-input-len", type=_COUNT, default=1024, show_default=True, metavar="TOKENS", help="Of a prompt."),
    _option("--random-output-len", type=_COUNT, default=128, show_default=True, metavar="TOKENS", help="Of an answer."),
    _option("--random-range-ratio", type=float, default=0.0, show_default=True, metavar="R",
            help="Lengths are drawn from LEN*(1-R) to LEN*(1+R)."),
    _option("--random-prefix-len", type=_SOME, default=0, show_default=True, metavar="TOKENS", help="That all prompts share."),
    _option("--prefix-repetition-prefix-len", type=_COUNT, default=256, show_default=True, metavar="TOKENS",
            help="Of each prefix."),
    _option("--prefix-repetition-suffix-len", type=_SOME, default=256, show_default=True, metavar="TOKENS",
            help="Of what follows it."),
    _option("--prefix-repetition-num-prefixes", type=_COUNT, default=10, show_default=True, metavar="N", help="Prefixes."),
    _option("--prefix-repetition-output-len", type=_COUNT, default=128, show_default=True, metavar="TOKENS",
            help="Of an answer."),
    _option("--sharegpt-output-len", type=_COUNT, metavar="TOKENS", help="Of an answer.  [that of the file]"),
    _option("--custom-output-len", type=click.IntRange(min=-1), default=256, show_default=True, metavar="TOKENS",
            help="Of an answer; -1: output_tokens of the file, or the model's own end."),
    _option("--ignore-eos/--no-ignore-eos", default=None, help="Have the engine go on to the length asked for.  [with random"
            " prompts only]"),
    _option("--logprobs", type=_SOME, metavar="N", help="Ask for log probabilities."),
    _option("--temperature", type=_NUMBER, help="Of the sampling; what is not given is the server's to choose."),
    _option("--top-p", type=_NUMBER, help="Likewise."),
    _option("--top-k", type=int, help="Likewise."),
    _option("--min-p", type=_NUMBER, help="Likewise."),
    _option("--frequency-penalty", type=_NUMBER, help="Likewise."),
    _option("--presence-penalty", type=_NUMBER, help="Likewise."),
    _option("--repetition-penalty", type=_NUMBER, help="Likewise."),
    _option("--extra-body", metavar="JSON", help="An object whose members go into each request's body."),
    _option("--request-id-prefix", metavar="TEXT", help="x-request-id is this and the request's number.  [bench-RANDOM-]"),
    # when
    _option("--request-rate", default="inf", show_default=True, metavar="R[,R...]", help="Requests a second; inf: all at once."
            " Several rates are run one after another, and --report shows goodput over rate."),
    _option("--burstiness", default="1.0", show_default=True, metavar="B", help="1: a Poisson process; below: more bursty;"
            " above: more even; inf: even gaps."),
    _option("--max-concurrency", type=_COUNT, metavar="N", help="Requests under way at most. What waits for a place is"
            " reported as client queue time, and no part of TTFT."),
    _option("--ramp-up-strategy", type=click.Choice(("linear", "exponential")), metavar="HOW",
            help="linear or exponential: the rate grows over the run, instead of --request-rate."),
    _option("--ramp-up-start-rps", type=_NUMBER, metavar="R", help="Where the ramp begins."),
    _option("--ramp-up-end-rps", type=_NUMBER, metavar="R", help="Where it ends."),
    _option("--num-warmups", type=_SOME, default=0, show_default=True, metavar="N", help="Requests before, not measured."),
    # what is reported
    _option("--goodput", multiple=True, metavar="KEY:MS", help="Count requests that keep limits, such as ttft:200 tpot:50"
            " e2el:5000, all of them."),
    _option("--percentile-metrics", default="ttft,tpot,itl,e2el,client_queue_time,e2el_including_client_queue",
            metavar="NAMES", help="What to report.  [all: ttft,tpot,itl,e2el,client_queue_time,e2el_including_client_queue]"),
    _option("--metric-percentiles", default="50,90,95,99", show_default=True, metavar="P,...", help="Which percentiles."),
    _option("--success", type=click.Choice(("strict", "vllm")), default="strict", show_default=True,
            metavar="strict|vllm", help="What counts as a success. strict: the stream came to its terminal event, without an"
            " error in it. vllm: as vllm bench serve has it, which takes a cut stream for a success."),
    _option("--save-result", is_flag=True, help="Write the result as JSON, with the field names of vllm bench serve."),
    _option("--save-detailed", is_flag=True, help="In it, every request's times, texts and errors."),
    _option("--append-result", is_flag=True, help="Append it to the file, as one more line."),
    _option("--result-dir", type=_FILE, metavar="DIR", help="Where to.  [here]"),
    _option("--result-filename", metavar="FILE", help="[BACKEND-RATEqps-concurrencyN-MODEL-DATE.json]"),
    _option("--label", metavar="TEXT", help="Begins the file's name, instead of the backend."),
    _option("--metadata", metavar="KEY=VALUE", multiple=True, help="Goes into the result; repeat it for more."),
    _option("--report", type=_FILE, metavar="FILE.html", help="Write a page with tables and plots, all in one file (needs"
            " tokenpipe[report])."),
    _option("--plot", type=_FILE, metavar="FILE.png", help="Write the plots as one picture: png, svg or pdf (needs"
            " tokenpipe[report])."),
    _option("--disable-tqdm", is_flag=True, help="No progress bar (there is none anyway when standard error is no terminal)."),
    _option("--tokenizer", metavar="NAME", help="Only written into the result: tokens are counted by the endpoint."),
    # of vLLM's tokenizer, which is not there: a script's command line works as it is
    _option("--tokenizer-mode", hidden=True, expose_value=False),
    _option("--trust-remote-code", is_flag=True, hidden=True, expose_value=False),
    _option("--skip-tokenizer-init", is_flag=True, hidden=True, expose_value=False),
    _option("--skip-chat-template", is_flag=True, hidden=True, expose_value=False),  # none is applied here
    _option("--no-stream", is_flag=True, hidden=True, expose_value=False),  # of Hugging Face's data sets
    _option("--no-self-timed", is_flag=True, hidden=True, expose_value=False),  # nor would it be
)  # fmt: skip


def loadtest_options(command: _Command) -> _Command:
    """All of them, and the URL."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return click.argument("url", required=False)(command)
