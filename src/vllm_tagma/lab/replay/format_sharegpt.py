"""Conversations: ShareGPT, LMSYS-Chat, WildChat, and lists of OpenAI's messages.

    {"id": ..., "conversations": [{"from": "human", "value": "..."}, {"from": "gpt", ...}]}
    {"conversation_id": ..., "conversation": [{"role": "user", "content": "..."}, ...]}

Each answer is a request; its prompt is all messages before it. Equal text is equal content.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_tagma.lab.replay import json_records
from vllm_tagma.lab.replay.json_fields import FieldError
from vllm_tagma.lab.replay.text_pieces import named
from vllm_tagma.lab.replay.trace import BadLine, Piece, Reading, TraceRequest
from vllm_tagma.lab.replay.trace_source import Source

_LISTS = ("conversations", "conversation", "messages")
_ANSWERS = ("gpt", "chatgpt", "bing", "bard", "assistant", "model")


def matches(entry: dict[str, Any]) -> bool:
    """True for an object that holds a list of messages."""
    return any(isinstance(entry.get(name), list) for name in _LISTS)


def parse(source: Source, _: Reading) -> Iterator[TraceRequest | BadLine]:
    """The requests and bad entries of a file, in order."""
    count = 0
    for place, entry, reason in json_records.records(source):
        if entry is None:
            yield BadLine(place, reason)
            continue
        try:
            messages = _messages(entry)
        except FieldError as error:
            yield BadLine(place, str(error))
            continue
        for request in _turns(messages, place, count):
            count += 1
            yield request


def _messages(entry: dict[str, Any]) -> list[tuple[bool, Piece]]:
    """The pieces of a conversation, each with whether the model wrote it."""
    found = next((entry[name] for name in _LISTS if isinstance(entry.get(name), list)), None)
    if not found:
        raise FieldError("has no list of conversations; remove it")
    messages = []
    for number, message in enumerate(found, 1):
        if not isinstance(message, dict):
            raise FieldError(f"message {number} is no object; write its sender and its text")
        sender = message.get("from", message.get("role"))
        text = message.get("value", message.get("content"))
        if not isinstance(sender, str) or not isinstance(text, str):
            raise FieldError(
                f"message {number} lacks 'from' or 'value' ('role' or 'content'); add them"
            )
        piece = named(text, sender)
        if not piece.tokens:
            raise FieldError(f"message {number} is empty; remove it, or the conversation")
        messages.append((sender.lower() in _ANSWERS, piece))
    if not any(answer for answer, _ in messages[1:]):
        raise FieldError("has no answer of the model after a message; remove it")
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
