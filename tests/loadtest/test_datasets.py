"""Prompts: their lengths, their sharing, their files, and what is said of a file that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gateway.errors import ConfigError
from gateway.loadtest.datasets import Dataset, estimate, prompts


def test_random_lengths() -> None:
    made = prompts(Dataset(random_input_len=100, random_output_len=20, random_range_ratio=0.3), 300)
    lengths = [len(prompt.text.split()) for prompt in made]
    assert [prompt.prompt_len for prompt in made] == lengths
    assert (min(lengths), max(lengths)) == (70, 130)
    assert {prompt.output_len for prompt in made} <= set(range(14, 27))
    assert len({prompt.text for prompt in made}) == 300


def test_a_word_is_short_enough_to_be_one_token() -> None:
    (prompt,) = prompts(Dataset(random_input_len=1000), 1)
    assert max(map(len, prompt.text.split())) <= 4
    assert estimate(prompt.text) == 1000


def test_a_shared_prefix() -> None:
    made = prompts(Dataset(random_input_len=5, random_prefix_len=3), 4)
    assert len({tuple(prompt.text.split()[:3]) for prompt in made}) == 1
    assert {prompt.prompt_len for prompt in made} == {8}
    assert len({prompt.text for prompt in made}) == 4


@pytest.mark.parametrize("name", ["random", "prefix_repetition"])
def test_the_seed_and_the_salt(name: str) -> None:
    dataset = Dataset(name, random_input_len=50, random_range_ratio=0.5)
    assert prompts(dataset, 5) == prompts(dataset, 5)
    other = Dataset(name, random_input_len=50, random_range_ratio=0.5, seed=1)
    assert [p.text for p in prompts(dataset, 5)] != [p.text for p in prompts(other, 5)]
    salted = prompts(dataset, 5, "second")
    assert [p.prompt_len for p in salted] == [p.prompt_len for p in prompts(dataset, 5)]
    assert not {p.text for p in salted} & {p.text for p in prompts(dataset, 5)}


def test_prefix_repetition() -> None:
    made = prompts(Dataset("prefix_repetition", prefix_len=4, suffix_len=3, num_prefixes=5, repetition_output_len=9), 22)
    assert len(made) == 22
    assert len({tuple(prompt.text.split()[:4]) for prompt in made}) == 5
    assert {(prompt.prompt_len, prompt.output_len) for prompt in made} == {(7, 9)}


def share(*turns: str) -> dict[str, object]:
    return {"id": "x", "conversations": [{"from": "human", "value": turn} for turn in turns]}


LONG = "one two three four five"


def test_sharegpt(tmp_path: Path) -> None:
    path = tmp_path / "share.json"
    entries = [share(LONG, LONG + " six"), share("alone"), share("hi", LONG), share("word " * 1025, LONG), share(LONG, "no")]
    path.write_text(json.dumps(entries))
    made = prompts(Dataset("sharegpt", path), 3)
    assert [(prompt.text, prompt.prompt_len, prompt.output_len) for prompt in made] == [(LONG, 5, 6)] * 3
    fixed = prompts(Dataset("sharegpt", path, sharegpt_output_len=7), 2)
    assert [prompt.output_len for prompt in fixed] == [7, 7]  # then a short answer is no reason to leave it out
    path.write_text("\n".join(json.dumps(entry) for entry in entries))  # the same as lines
    assert prompts(Dataset("sharegpt", path), 3) == made


def test_custom(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    message = {"role": "user", "content": "c d e"}
    lines = [{"prompt": "a b", "output_tokens": 3}, {"messages": [message]}, "plain"]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    made = prompts(Dataset("custom", path, shuffle=False), 4)
    assert [(p.text, p.prompt_len, p.output_len) for p in made] == [
        ("a b", 2, 256), ("c d e", 3, 256), ("plain", 1, 256), ("a b", 2, 256),
    ]  # fmt: skip
    assert made[1].messages == [message]
    assert [p.output_len for p in prompts(Dataset("custom", path, shuffle=False, custom_output_len=-1), 3)] == [3, None, None]


def test_custom_texts_and_lines_of_text(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text("one\u2028line\n\ntwo lines\n")
    assert [p.text for p in prompts(Dataset("custom", path, shuffle=False), 2)] == ["one\u2028line", "two lines"]
    assert [p.text for p in prompts(Dataset("custom", texts=("a", "b"), shuffle=False), 3)] == ["a", "b", "a"]


def test_a_file_is_shuffled_by_the_seed(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text("\n".join(map(str, range(50))))
    orders = [[p.text for p in prompts(Dataset("custom", path, seed=seed), 50)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(map(str, range(50)))


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("custom", '{"prompt": "a"}\n{"prompt', "own.jsonl, line 2: no JSON"),
        ("custom", '{"text": "a"}', 'own.jsonl, line 1: expected {"prompt": TEXT}'),
        ("custom", "\n", "own.jsonl holds no prompt"),
        ("custom", '{"prompt": "a", "output_tokens": "3"}', "line 1: output_tokens is '3'; expected a number"),
        ("sharegpt", "[]", "no conversation of two turns"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, name: str, text: str, expected: str) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--dataset-path") as caught:
        prompts(Dataset(name, path, custom_output_len=-1), 1)
    assert expected in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        prompts(Dataset("custom", tmp_path / "nope"), 1)
    with pytest.raises(ConfigError, match="needs a file: --dataset-path"):
        prompts(Dataset("sharegpt"), 1)


@pytest.mark.parametrize("name", ["custom", "sharegpt"])
def test_a_file_without_a_bottom(tmp_path: Path, name: str) -> None:
    path = tmp_path / "deep.jsonl"
    path.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match=r"deep\.jsonl, line 1: no JSON"):
        prompts(Dataset(name=name, path=path), 1)
