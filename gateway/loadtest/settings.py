"""What the flags of `tokenpipe loadtest` come to, checked. Raises ConfigError, which names the flag and what it expects."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from gateway.errors import ConfigError
from gateway.loadtest.datasets import Dataset
from gateway.loadtest.endpoints import Kind
from gateway.loadtest.schedule import Ramp

# --backend: vLLM's names first, then the APIs' own
BACKENDS = {
    "openai-chat": Kind.CHAT,
    "openai": Kind.COMPLETIONS,
    "vllm": Kind.COMPLETIONS,
    "openai-responses": Kind.RESPONSES,
    "anthropic": Kind.MESSAGES,
    "chat": Kind.CHAT,
    "completions": Kind.COMPLETIONS,
    "responses": Kind.RESPONSES,
    "messages": Kind.MESSAGES,
}
GOODPUT = ("ttft", "tpot", "e2el")
PERCENTILE_METRICS = ("ttft", "tpot", "itl", "e2el", "client_queue_time", "e2el_including_client_queue")
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
RATE_LEAST = 1e-6  # requests a second: one in eleven days
RAW = (".png", ".svg", ".pdf")

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Settings:
    url: str
    compare: str | None
    backend: str
    kind: Kind
    endpoint: str
    model: str | None  # in requests
    model_id: str | None  # in the result
    dataset: Dataset
    num_prompts: int
    rates: tuple[float, ...]
    burstiness: float
    ramp: Ramp | None
    max_concurrency: int | None
    num_warmups: int
    ready_timeout: float
    timeout: float
    lora_modules: tuple[str, ...]  # instead of the model, one of them in each request
    lora_in_turn: bool
    ignore_eos: bool
    logprobs: int | None
    extra_body: dict[str, Any]
    fields: tuple[tuple[str, str], ...]
    request_id_prefix: str
    insecure: bool
    goodput: dict[str, float]  # seconds
    percentile_metrics: tuple[str, ...]
    percentiles: tuple[float, ...]
    success: str
    save_result: bool
    save_detailed: bool
    append_result: bool
    result_dir: Path | None
    result_filename: str | None
    label: str | None
    metadata: tuple[tuple[str, str], ...]
    tokenizer: str | None
    report: Path | None
    plot: Path | None
    progress: bool

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url,) if self.compare is None else (self.url, self.compare)


def build(flags: Mapping[str, Any], key: str | None) -> Settings:
    """`flags` by the names of `options`; `key`: the API key, if there is one."""
    url = _url(flags)
    backend, kind = _backend(flags)
    endpoint = flags["endpoint"] or kind.path
    if not endpoint.startswith("/"):
        raise ConfigError(f"--endpoint: found {endpoint!r}; expected a path, such as {kind.path}")
    if flags["logprobs"] is not None and kind not in (Kind.CHAT, Kind.COMPLETIONS):
        raise ConfigError(f"--logprobs: {backend} has no such field; expected --backend openai-chat or openai")
    ramp = _ramp(flags)
    for flag, suffixes in (("report", (".html", ".htm")), ("plot", RAW)):
        path = flags[flag]
        if path is not None and path.suffix.lower() not in suffixes:
            raise ConfigError(f"--{flag}: found {str(path)!r}; expected a name that ends in {' or '.join(suffixes)}")
    dataset = _dataset(flags)
    ignore = flags["ignore_eos"]
    if ignore is None:  # vLLM's own rule: so that the lengths that were asked for are those that come
        ignore = dataset.name == "random" and kind is not Kind.MESSAGES
    return Settings(
        url=url,
        compare=flags["compare"],
        backend=backend,
        kind=kind,
        endpoint=endpoint,
        model=flags["served_model_name"] or flags["model"],
        model_id=flags["model"],
        dataset=dataset,
        num_prompts=flags["num_prompts"],
        rates=_rates(flags["request_rate"]),
        burstiness=_burstiness(flags["burstiness"]),
        ramp=ramp,
        max_concurrency=flags["max_concurrency"],
        num_warmups=flags["num_warmups"],
        ready_timeout=flags["ready_check_timeout_sec"],
        timeout=flags["timeout"],
        lora_modules=flags["lora_modules"],
        lora_in_turn=flags["lora_assignment"] == "round-robin",
        ignore_eos=ignore,
        logprobs=flags["logprobs"],
        extra_body=_extra_body(flags),
        fields=_fields(flags["header"], key, kind),
        request_id_prefix=_header_text("--request-id-prefix", flags["request_id_prefix"] or ""),
        insecure=flags["insecure"],
        goodput=_goodput(flags["goodput"]),
        percentile_metrics=_percentile_metrics(flags["percentile_metrics"]),
        percentiles=_percentiles(flags["metric_percentiles"]),
        success=flags["success"],
        save_result=flags["save_result"] or flags["append_result"],
        save_detailed=flags["save_detailed"],
        append_result=flags["append_result"],
        result_dir=flags["result_dir"],
        result_filename=flags["result_filename"],
        label=flags["label"],
        metadata=tuple(_pair("--metadata", text) for text in flags["metadata"]),
        tokenizer=flags["tokenizer"],
        report=flags["report"],
        plot=flags["plot"],
        progress=not flags["disable_tqdm"],
    )


def _url(flags: Mapping[str, Any]) -> str:
    given = [text for text in (flags["url"], flags["base_url"]) if text]
    if len(given) > 1 or (given and (flags["host"] or flags["port"])):
        raise ConfigError("the endpoint is given twice: expected one of URL, --base-url, and --host with --port")
    if given:
        return str(given[0])
    if not flags["host"] and flags["port"] is None:
        raise ConfigError("no endpoint is given: expected a URL, such as http://127.0.0.1:8000")
    if flags["port"] is not None and not 0 < flags["port"] < 65536:
        raise ConfigError(f"--port: found {flags['port']}; expected a port, 1 to 65535")
    host = flags["host"] or "127.0.0.1"
    return f"http://{f'[{host}]' if ':' in host else host}:{flags['port'] or 8000}"


def _backend(flags: Mapping[str, Any]) -> tuple[str, Kind]:
    """By its name; without one, by the path that was given."""
    name, endpoint = flags["backend"], flags["endpoint"] or flags["url"] or ""
    if name is not None:
        return name, BACKENDS[name]
    kind = next((kind for kind in Kind if endpoint.endswith(kind.path)), Kind.CHAT)
    return kind.value, kind


def _number(flag: str, text: str, expected: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise ConfigError(f"{flag}: found {text!r}; expected {expected}")
    return value


def _rates(text: str) -> tuple[float, ...]:
    expected = "requests a second: a number, 0.000001 or more, or inf; several, separated by commas, are run one after another"
    rates = tuple(_number("--request-rate", part, expected) for part in text.split(","))
    if any(rate < RATE_LEAST for rate in rates):
        raise ConfigError(f"--request-rate: found {text!r}; expected {expected}")
    return rates


def _burstiness(text: str) -> float:
    expected = "a number, 0.001 or more, or inf for even gaps"
    value = _number("--burstiness", text, expected)
    if value < 0.001:
        raise ConfigError(f"--burstiness: found {text!r}; expected {expected}")
    return value


def _ramp(flags: Mapping[str, Any]) -> Ramp | None:
    strategy, start, end = flags["ramp_up_strategy"], flags["ramp_up_start_rps"], flags["ramp_up_end_rps"]
    if strategy is None:
        if start is not None or end is not None:
            raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy linear or exponential")
        return None
    if flags["request_rate"] != "inf":
        raise ConfigError("--ramp-up-strategy sets the rate itself: leave out --request-rate")
    if start is None or end is None:
        raise ConfigError("--ramp-up-strategy needs both --ramp-up-start-rps and --ramp-up-end-rps")
    if not RATE_LEAST <= start <= end:
        raise ConfigError(
            f"--ramp-up-start-rps: found {start:g}; expected more than 0, and at most --ramp-up-end-rps ({end:g})"
        )
    return Ramp(start, end, strategy == "exponential")


def _dataset(flags: Mapping[str, Any]) -> Dataset:
    name, path, texts = flags["dataset_name"], flags["dataset_path"], tuple(flags["prompt"])
    if name is None:
        name = "custom" if texts or path is not None else "random"
    if texts and (name != "custom" or path is not None):
        raise ConfigError("--prompt is a data set of its own: leave out --dataset-name and --dataset-path")
    if path is not None and name in ("random", "prefix_repetition"):
        raise ConfigError(f"--dataset-name {name} makes its prompts up: leave out --dataset-path, or name sharegpt or custom")
    if not 0 <= flags["random_range_ratio"] < 1:
        raise ConfigError(f"--random-range-ratio: found {flags['random_range_ratio']}; expected 0 or more, and less than 1")
    output, prompt = flags["output_len"], flags["input_len"]
    return Dataset(
        name=name,
        path=path,
        texts=texts,
        seed=flags["seed"],
        shuffle=not flags["disable_shuffle"],
        again=not flags["no_oversample"],
        random_input_len=prompt or flags["random_input_len"],
        random_output_len=output or flags["random_output_len"],
        random_range_ratio=flags["random_range_ratio"],
        random_prefix_len=flags["random_prefix_len"],
        prefix_len=flags["prefix_repetition_prefix_len"],
        suffix_len=flags["prefix_repetition_suffix_len"],
        num_prefixes=flags["prefix_repetition_num_prefixes"],
        repetition_output_len=output or flags["prefix_repetition_output_len"],
        sharegpt_output_len=output or flags["sharegpt_output_len"],
        custom_output_len=output or flags["custom_output_len"],
    )


def _extra_body(flags: Mapping[str, Any]) -> dict[str, Any]:
    extra: dict[str, Any] = {name: flags[name] for name in SAMPLING if flags[name] is not None}
    if flags["extra_body"] is not None:
        try:
            given = json.loads(flags["extra_body"], parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"--extra-body: no JSON: {error}") from None
        if not isinstance(given, dict):
            raise ConfigError("--extra-body: expected a JSON object")
        extra |= given
    return extra


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no number in JSON")


def _pair(flag: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"{flag}: found {text!r}; expected KEY=VALUE")
    return name.strip(), value.strip()


def _fields(texts: Sequence[str], key: str | None, kind: Kind) -> tuple[tuple[str, str], ...]:
    given = [_pair("--header", text) for text in texts]
    for name, value in given:
        _header_text("--header", name + value)
        if not all(letter.isalnum() or letter in "!#$%&'*+-.^_`|~" for letter in name):
            raise ConfigError(f"--header: found {name!r}; expected the name of a header field before the =")
    names = {name.lower() for name, _ in given}
    if key is not None:
        _header_text("the API key", key)
        if "authorization" not in names:
            given.append(("Authorization", f"Bearer {key}"))
        if kind is Kind.MESSAGES and "x-api-key" not in names:
            given.append(("x-api-key", key))
    return tuple(given)


def _header_text(flag: str, text: str) -> str:
    if not text.isascii() or not text.isprintable():
        raise ConfigError(f"{flag}: it holds a character that no header field can; expected printable ASCII")
    return text


def _goodput(texts: Sequence[str]) -> dict[str, float]:
    expected = "KEY:MILLISECONDS, with KEY one of ttft, tpot, e2el; for several repeat it or write them one after another"
    limits = {}
    for text in texts:
        name, colon, value = text.partition(":")
        limit = _number("--goodput", value, expected) if colon else -1.0
        if name not in GOODPUT or limit < 0 or math.isinf(limit):
            raise ConfigError(f"--goodput: found {text!r}; expected {expected}")
        limits[name] = limit / 1e3
    return limits


def _list(flag: str, text: str, read: Callable[[str], T | None], expected: str) -> tuple[T, ...]:
    found = []
    for part in text.split(","):
        value = read(part.strip())
        if value is None:
            raise ConfigError(f"{flag}: found {part.strip()!r}; expected {expected}")
        found.append(value)
    return tuple(found)


def _percentile_metrics(text: str) -> tuple[str, ...]:
    names = ", ".join(PERCENTILE_METRICS)
    return _list("--percentile-metrics", text, lambda part: part if part in PERCENTILE_METRICS else None, f"some of {names}")


def _percentiles(text: str) -> tuple[float, ...]:
    def read(part: str) -> float | None:
        value = _number("--metric-percentiles", part, "numbers from 0 to 100, separated by commas")
        return value if 0 <= value <= 100 else None

    return _list("--metric-percentiles", text, read, "numbers from 0 to 100, separated by commas")
