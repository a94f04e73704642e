"""ShareGPT's JSON: a list of ``{"id", "conversations": [{"from": "human" | "gpt", "value"}]}``.

Each answer is a request; its prompt is all messages before it. There is no tokenizer at hand: a
message counts as one token per four bytes of UTF-8, rounded up, which is close for English text
and too few for most others. Equal text is equal content.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_tagma.lab.replay.json_fields import FieldError
from vllm_tagma.lab.replay.trace import BadLine, Piece, TraceError, TraceRequest

BYTES_PER_TOKEN = 4
_ANSWERS = ("gpt", "chatgpt", "bing", "bard", "assistant")


def detect(head: str) -> bool:
    """True for a JSON list whose first entries hold conversations."""
    return head.lstrip("\ufeff \t\r\n").startswith("[") and '"conversations"' in head


def parse(path: Path) -> Iterator[TraceRequest | BadLine]:
    """The requests and bad entries of a file, in order."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise TraceError(f"{path} is not JSON: {error}") from None
    if not isinstance(entries, list):
        raise TraceError(f"{path} is {type(entries).__name__}, not a list of conversations")
    count = 0
    for number, entry in enumerate(entries, 1):
        place = f"entry {number}"
        try:
            messages = _messages(entry)
        except FieldError as error:
            yield BadLine(place, str(error))
            continue
        for request in _turns(messages, place, count):
            count += 1
            yield request


def _messages(entry: Any) -> list[tuple[bool, Piece]]:
    """The pieces of a conversation, each with whether the model wrote it."""
    conversations = entry.get("conversations") if isinstance(entry, dict) else None
    if not isinstance(conversations, list) or not conversations:
        raise FieldError("has no list of conversations")
    messages = []
    for number, message in enumerate(conversations, 1):
        if not isinstance(message, dict):
            raise FieldError(f"message {number} is no object")
        sender, text = message.get("from"), message.get("value")
        if not isinstance(sender, str) or not isinstance(text, str):
            raise FieldError(f"message {number} lacks 'from' or 'value'")
        data = text.encode("utf-8", "surrogatepass")
        if not data:
            raise FieldError(f"message {number} is empty")
        answer = sender.lower() in _ANSWERS
        content = hashlib.sha256(sender.encode() + b"\0" + data).hexdigest()
        messages.append((answer, Piece(content, -(-len(data) // BYTES_PER_TOKEN))))
    if not any(answer for answer, _ in messages[1:]):
        raise FieldError("has no answer of the model after a message")
    return messages


def _turns(messages: list[tuple[bool, Piece]], place: str, count: int) -> Iterator[TraceRequest]:
    """A request for each answer. ``count``: requests before the conversation."""
    turn = 0
    for index, (answer, piece) in enumerate(messages):
        if not answer or not index:
            continue
        turn += 1
        yield TraceRequest(
            place=f"{place}, answer {turn}",
            prompt=tuple(before for _, before in messages[:index]),
            output_tokens=piece.tokens,
            output=piece.content,
            after=count + turn - 2 if turn > 1 else None,
        )
