"""Prompts. Without a tokenizer at hand a prompt's length is approximate, and what the endpoint's usage says counts.

Made-up prompts are words of at most four letters: one such word, with the blank before it, is one token to nearly every
vocabulary of a language model, so that N words are N tokens but for a few that the chat template adds. Texts from files are
estimated (`estimate`). Everything is the same for the same seed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from gateway.errors import ConfigError

_WORDS = """
    able acid aged also area army away baby back ball band bank base bath bear beat been bell belt best bill bird blow
    blue boat body bond bone book boot born boss both bowl bulk burn bush busy call calm came camp card care case cash cast
    cell chip city club coal coat code cold come cook cool cope copy core cost crew crop dark data date dawn days dead deal
    dear debt deep deny desk dial diet disk does done door dose down draw drew drop dual duke dust duty each earn ease east
    easy edge else even ever evil exit face fact fail fair fall farm fast fate fear feed feel feet fell felt file fill film
    find fine fire firm fish five flat flow food foot ford form fort four free from fuel full fund gain game gate gave gear
    gene gift girl give glad goal goes gold gone good gray grew grey grow gulf hair half hall hand hang hard harm hate have
    head hear heat held help here hero high hill hire hold hole holy home hope host hour huge hung hunt hurt idea inch into
    iron item join jump just keen keep kept kick kind king knee knew know lack lady laid lake land lane last late lead left
    less life lift like line link list live load loan lock long look lord lose loss lost love luck made mail main make male
    many mark mass meal mean meat meet menu mere mile milk mill mind mine miss mode mood moon more most move much must name
    navy near neck need news next nice nine none nose note okay once only onto open oral over pace pack page paid pain pair
    palm park part pass past path peak pick pink pipe plan play plot plug plus poll pool poor port post pull pure push race
    rail rain rank rare rate read real rear rely rent rest rice rich ride ring rise risk road rock role roll roof room root
    rose rule rush safe said sake sale salt same sand save seat seed seek seem seen self sell send sent ship shop shot show
    shut sick side sign site size skin slip slow snow soft soil sold sole some song soon sort soul spot star stay step stop
    such suit sure take tale talk tall tank tape task team tech tell tend term test text than that them then they thin this
    thus till time tiny told toll tone took tool tour town tree trip true tune turn twin type unit upon used user vary vast
    very vice view vote wage wait wake walk wall want ward warm wash wave ways weak wear week well went were west what when
    whom wide wife wild will wind wine wing wire wise wish with wood word wore work yard yeah year your zero zone"""
WORDS = tuple(_WORDS.split())

_PIECE = re.compile(r"[A-Za-z0-9_]{1,8}|[^\sA-Za-z0-9_]")
# vLLM's limits for ShareGPT (vllm/benchmarks/datasets, is_valid_sequence)
SHORTEST, LONGEST_PROMPT, LONGEST_TOTAL = 4, 1024, 2048


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """`prompt_len`: its tokens, as far as we know; `output_len`: the most to be answered, None: the model's own end."""

    text: str
    prompt_len: int
    output_len: int | None
    messages: list[dict[str, Any]] | None = None
    model: str | None = None  # to ask for, where it is not the run's (--lora-modules)


@dataclasses.dataclass(frozen=True)
class Dataset:
    """What the flags say of it. Lengths are tokens."""

    name: str = "random"
    path: Path | None = None
    texts: tuple[str, ...] = ()  # --prompt
    seed: int = 0
    shuffle: bool = True
    again: bool = True  # a file that has too few prompts is gone through again; else there are fewer
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    random_prefix_len: int = 0
    prefix_len: int = 256
    suffix_len: int = 256
    num_prefixes: int = 10
    repetition_output_len: int = 128
    sharegpt_output_len: int | None = None
    custom_output_len: int = 256  # -1: what the file says of each


def estimate(text: str) -> int:
    """About how many tokens a text is: a word of up to eight letters is one, any other character one of its own."""
    return max(1, len(_PIECE.findall(text)))


REQUEST_OCTETS = 1500  # of memory, beside its text: its record, its times


def octets(dataset: Dataset, count: int) -> int:
    """About how much memory `count` made-up prompts and their records take."""
    each = 0
    if dataset.name == "random":
        each = dataset.random_prefix_len + math.ceil(dataset.random_input_len * (1 + dataset.random_range_ratio))
    elif dataset.name == "prefix_repetition":
        each = dataset.prefix_len + dataset.suffix_len
    return count * (REQUEST_OCTETS + 5 * each) + 5 * dataset.num_prefixes * dataset.prefix_len


def prompts(dataset: Dataset, count: int, salt: str = "") -> list[Prompt]:
    """`count` prompts. Another `salt` changes made-up texts, and not their lengths. Raises ConfigError."""
    return _MAKERS[dataset.name](dataset, count, salt)


def _words(random: Random, count: int) -> str:
    return " ".join(random.choices(WORDS, k=count))


def _random(dataset: Dataset, count: int, salt: str) -> list[Prompt]:
    lengths, words = Random(f"{dataset.seed}/lengths"), Random(f"{dataset.seed}/words/{salt}")
    prefix = _words(Random(f"{dataset.seed}/prefix"), dataset.random_prefix_len)
    made = []
    for _ in range(count):
        length = _around(dataset.random_input_len, dataset.random_range_ratio, lengths)
        most = _around(dataset.random_output_len, dataset.random_range_ratio, lengths)
        text = f"{prefix} {_words(words, length)}".strip()
        made.append(Prompt(text, dataset.random_prefix_len + length, most))
    return made


def _around(length: int, ratio: float, random: Random) -> int:
    return max(1, random.randint(math.floor(length * (1 - ratio)), math.ceil(length * (1 + ratio))))


def _prefix_repetition(dataset: Dataset, count: int, salt: str) -> list[Prompt]:
    words = Random(f"{dataset.seed}/words/{salt}")
    prefixes = [_words(words, dataset.prefix_len) for _ in range(dataset.num_prefixes)]
    length = dataset.prefix_len + dataset.suffix_len
    made = [
        Prompt(
            f"{prefixes[index % len(prefixes)]} {_words(words, dataset.suffix_len)}".strip(),
            length,
            dataset.repetition_output_len,
        )
        for index in range(count)
    ]
    if dataset.shuffle:
        Random(f"{dataset.seed}/order").shuffle(made)
    return made


def _sharegpt(dataset: Dataset, count: int, salt: str) -> list[Prompt]:
    path = _path(dataset)
    whole = _read(path)
    entries: Sequence[Any]
    try:
        loaded = json.loads(whole)
        entries = loaded if isinstance(loaded, list) else [loaded]
    except (ValueError, RecursionError):
        entries = [entry for _, entry in _lines(path, whole)]
    found = []
    for entry in entries:
        turns = _turns(entry)
        if len(turns) < 2:
            continue
        length, answer = estimate(turns[0]), estimate(turns[1])
        most = answer if dataset.sharegpt_output_len is None else dataset.sharegpt_output_len
        short = length < SHORTEST or (dataset.sharegpt_output_len is None and answer < SHORTEST)
        if not short and length <= LONGEST_PROMPT and length + most <= LONGEST_TOTAL:
            found.append(Prompt(turns[0], length, most))
    if not found:
        raise ConfigError(
            f"--dataset-path: {path}: no conversation of two turns or more, the first of {SHORTEST} to {LONGEST_PROMPT} tokens;"
            ' expected a list of {"conversations": [{"from": ..., "value": TEXT}, ...]}'
        )
    return _taken(dataset, found, count)


def _turns(entry: Any) -> list[str]:
    said = entry.get("conversations", entry.get("conversation")) if isinstance(entry, dict) else None
    turns = [turn.get("value", turn.get("content")) for turn in said or () if isinstance(turn, dict)]
    return [turn for turn in turns if isinstance(turn, str)]


def _custom(dataset: Dataset, count: int, salt: str) -> list[Prompt]:
    most = None if dataset.custom_output_len < 0 else dataset.custom_output_len
    if dataset.texts:
        return _taken(dataset, [Prompt(text, estimate(text), most) for text in dataset.texts], count)
    path = _path(dataset)
    whole = _read(path)
    if path.suffix in (".txt", ".text"):
        found = [Prompt(line, estimate(line), most) for line in whole.split("\n") if line.strip()]
    else:
        found = [_custom_prompt(dataset, f"{path}, line {line}", entry) for line, entry in _lines(path, whole)]
    if not found:
        raise ConfigError(f"--dataset-path: {path} holds no prompt; expected one a line")
    return _taken(dataset, found, count)


def _custom_prompt(dataset: Dataset, where: str, entry: Any) -> Prompt:
    """A line of a JSONL file: a string, {"prompt": TEXT} or {"messages": [...]}."""
    fields = entry if isinstance(entry, dict) else {"prompt": entry}
    most: Any = dataset.custom_output_len
    if most < 0:
        most = fields.get("output_tokens")
        if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
            raise ConfigError(f"--dataset-path: {where}: output_tokens is {most!r}; expected a number of tokens, 1 or more")
    text, messages = fields.get("prompt"), fields.get("messages")
    if isinstance(text, str):
        return Prompt(text, estimate(text), most)
    if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
        said = "\n".join(str(message.get("content", "")) for message in messages)
        return Prompt(said, estimate(said), most, messages)
    raise ConfigError(f'--dataset-path: {where}: expected {{"prompt": TEXT}}, {{"messages": [...]}} or a string')


def _path(dataset: Dataset) -> Path:
    if dataset.path is None:
        raise ConfigError(f"--dataset-name {dataset.name} needs a file: --dataset-path FILE")
    return dataset.path


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--dataset-path: {path} is not UTF-8 text: {error}") from None
    except OSError as error:
        raise ConfigError(f"--dataset-path: {path}: {error.strerror or error}") from None


def _lines(path: Path, whole: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(whole.split("\n"), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"--dataset-path: {path}, line {number}: no JSON: {error}") from None


def _taken(dataset: Dataset, found: list[Prompt], count: int) -> list[Prompt]:
    """As many as are asked for, in an order of the seed's; a file that has too few is gone through again, if it may be."""
    if dataset.shuffle:
        Random(f"{dataset.seed}/order").shuffle(found)
    return [found[index % len(found)] for index in range(count if dataset.again else min(count, len(found)))]


_MAKERS: dict[str, Callable[[Dataset, int, str], list[Prompt]]] = {
    "random": _random,
    "prefix_repetition": _prefix_repetition,
    "sharegpt": _sharegpt,
    "custom": _custom,
}
NAMES = tuple(_MAKERS)
MADE_UP = ("random", "prefix_repetition")  # whose texts another salt changes
