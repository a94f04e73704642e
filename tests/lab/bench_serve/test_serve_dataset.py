"""ShareGPT's format: what is read, what is passed over, and where a file is malformed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vllm_tagma.lab.bench_serve.dataset import DatasetError, Turn, read
from vllm_tagma.lab.bench_serve.profiles import SMOKE_DATASET

GOOD = {
    "id": "x",
    "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
}


def write(folder: Path, text: str) -> Path:
    path = folder / "data.json"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_file_of_the_project_is_whole() -> None:
    dataset = read(SMOKE_DATASET)
    assert len(dataset.conversations) >= 36
    assert not dataset.skipped
    assert sum(len(turns) >= 6 for turns in dataset.conversations) >= 5


def test_conversations_that_cannot_be_used_are_counted(tmp_path: Path) -> None:
    def said(*sides: str) -> dict:
        return {"conversations": [{"from": side, "value": "text"} for side in sides]}

    odd = [said("gpt", "human"), said("human"), said(), said("human", "human")]
    odd += [said("system", "human", "gpt"), said("human", "gpt"), GOOD, said("user", "chatgpt")]
    odd.append({"conversations": [{"from": "human", "value": " "}, {"from": "gpt", "value": "b"}]})
    dataset = read(write(tmp_path, json.dumps(odd)))
    assert len(dataset.conversations) == 3
    assert dataset.conversations[1] == [Turn(True, "a"), Turn(False, "b")]
    assert dict(dataset.skipped) == {
        "that begin with the model": 1,
        "with fewer than two turns": 2,
        "whose sides do not alternate": 1,
        "with another role": 1,
        "with an empty turn": 1,
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "line 1: expected a list of conversations"),
        ('{"conversations": []}', "line 1: expected a list of conversations"),
        ("[\n\n17]", "line 3: a conversation must be an object, found 17"),
        ('[\n{"id": 3}]', "line 2: conversation 3 has no list 'conversations', found only id"),
        ('[\n{"conversations": "x"}]', "line 2: a conversation has no list 'conversations'"),
        ('[\n{"conversations": [1]}]', "line 2: a conversation, turn 1 must be an object, found 1"),
        (
            '[{"conversations": [{"from": "human", "value": "a"}]},\n\n'
            '{"conversations": [{"from": "human", "value": "a"},\n{"from": "gpt"}]}]',
            "line 3: a conversation, turn 2: 'value' must be text, found nothing",
        ),
        (
            '[\n{"conversations": [{"from": 1, "value": "a"}]}]',
            "line 2: a conversation, turn 1: 'from' must be text, found 1",
        ),
        ("[\n{}}", "line 2: a conversation has no list"),
        (
            f"[\n{json.dumps(GOOD)}\n{json.dumps(GOOD)}]",
            "line 3, column 1: not JSON: Expecting ','",
        ),
        (f"[{json.dumps(GOOD)}] x", "not JSON: Extra data"),
        (f"[{json.dumps(GOOD)},", "line 1"),
        ("[]", "holds no conversation that can be used (it is empty)"),
        ('[{"conversations": []}]', "(1 with fewer than two turns)"),
    ],
)
def test_what_is_malformed_is_named_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(DatasetError) as caught:
        read(path)
    assert str(caught.value).startswith(f"--dataset {path}")
    assert words in str(caught.value)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_bytes(b'["\xff"]')
    with pytest.raises(DatasetError, match="cannot be read"):
        read(path)
