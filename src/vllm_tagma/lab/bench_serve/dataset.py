"""Reads conversations in ShareGPT's JSON format, and says where a file is not in it.

The format is a list of ``{"id": …, "conversations": [{"from": "human", "value": …}, …]}``. Files in
circulation hold conversations that begin with the model's turn, are empty, or name other roles:
those are passed over and counted. What is not the format at all (a missing list, a turn without
text) is an error with its line, because a benchmark on half a dataset looks like any other.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from vllm_tagma.errors import TagmaError

_HUMAN = {"human", "user"}
_MODEL = {"gpt", "assistant", "chatgpt", "model", "bing", "bard"}


class DatasetError(TagmaError, ValueError):
    """A dataset that is missing, malformed or empty; the message has line and reason."""


class Turn(NamedTuple):
    """What one side says. ``is_human``: the user's side."""

    is_human: bool
    text: str


@dataclass(kw_only=True)
class Dataset:
    """Conversations that begin with the user and alternate. ``skipped``: reason to count."""

    path: str
    conversations: list[list[Turn]]
    skipped: Counter[str] = field(default_factory=Counter)


def read(path: Path) -> Dataset:
    """Reads a whole file. O(size). Raises :class:`DatasetError`."""
    if not path.exists():
        raise DatasetError(
            f"--dataset {path} does not exist. Any file in ShareGPT's JSON format will do, such as "
            "ShareGPT_V3_unfiltered_cleaned_split.json; --profile cpu-smoke brings its own."
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"--dataset {path} cannot be read: {error}") from None
    dataset = Dataset(path=str(path), conversations=[])
    try:
        for line, entry in _entries(text):
            turns = _turns(entry, line=line)
            if reason := _unusable(turns):
                dataset.skipped[reason] += 1
            else:
                dataset.conversations.append([Turn(who in _HUMAN, said) for who, said in turns])
    except json.JSONDecodeError as error:
        raise DatasetError(
            f"--dataset {path}, line {error.lineno}, column {error.colno}: not JSON: {error.msg}"
        ) from None
    except _FormatError as error:
        raise DatasetError(f"--dataset {path}, line {error.line}: {error}") from None
    if not dataset.conversations:
        passed = ", ".join(f"{count} {reason}" for reason, count in dataset.skipped.items())
        raise DatasetError(
            f"--dataset {path} holds no conversation that can be used ({passed or 'it is empty'}): "
            "at least one must begin with a turn from 'human' and an answer from 'gpt'"
        )
    return dataset


class _FormatError(Exception):
    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line


def _entries(text: str) -> Iterator[tuple[int, Any]]:
    """Line and value of each element of the list; one at a time, so that each has its line."""
    decoder = json.JSONDecoder()
    place = _skip_space(text, 0)
    if text[place : place + 1] != "[":
        raise _FormatError(_line(text, place), "expected a list of conversations, beginning '['")
    place = _skip_space(text, place + 1)
    line, counted = 1, 0
    closed = text[place : place + 1] == "]"
    if closed:
        place = _skip_space(text, place + 1)
    while not closed:
        line += text.count("\n", counted, place)
        counted = place
        entry, place = decoder.raw_decode(text, place)
        yield line, entry
        place = _skip_space(text, place)
        mark = text[place : place + 1]
        if mark not in (",", "]"):
            raise json.JSONDecodeError("Expecting ',' or ']'", text, place)
        closed = mark == "]"
        place = _skip_space(text, place + 1)
    if place != len(text):
        raise json.JSONDecodeError("Extra data", text, place)


def _skip_space(text: str, place: int) -> int:
    while place < len(text) and text[place] in " \t\r\n\ufeff":
        place += 1
    return place


def _line(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1


def _turns(entry: Any, *, line: int) -> list[tuple[str, str]]:
    if not isinstance(entry, dict):
        raise _FormatError(line, f"a conversation must be an object, found {_short(entry)}")
    name = f"conversation {entry['id']!r}" if "id" in entry else "a conversation"
    turns = entry.get("conversations")
    if not isinstance(turns, list):
        found = _short(turns) if "conversations" in entry else f"only {', '.join(entry) or 'none'}"
        raise _FormatError(line, f"{name} has no list 'conversations', found {found}")
    said = []
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict):
            raise _FormatError(
                line, f"{name}, turn {number} must be an object, found {_short(turn)}"
            )
        for key in ("from", "value"):
            if not isinstance(turn.get(key), str):
                raise _FormatError(
                    line,
                    f"{name}, turn {number}: {key!r} must be text, found "
                    f"{_short(turn[key]) if key in turn else 'nothing'}",
                )
        said.append((turn["from"].lower(), turn["value"]))
    return said


def _unusable(turns: list[tuple[str, str]]) -> str | None:
    turns = turns[:]
    if any(who not in _HUMAN | _MODEL for who, _ in turns):
        return "with another role"
    if len(turns) < 2:
        return "with fewer than two turns"
    if turns[0][0] not in _HUMAN:
        return "that begin with the model"
    sides = [who in _HUMAN for who, _ in turns]
    if any(this == following for this, following in itertools.pairwise(sides)):
        return "whose sides do not alternate"
    if any(not said.strip() for _, said in turns):
        return "with an empty turn"
    return None


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:37] + "..."
