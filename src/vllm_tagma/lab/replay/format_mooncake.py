"""Mooncake's JSONL: ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids``.

Each hash id names one block of prompt tokens together with everything before it, so it serves as a
piece of content. The last one covers what is left of the prompt. Alibaba's Bailian traces have the
same fields, blocks of 16 tokens, seconds, and the chat that a request continues.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from vllm_tagma.lab.replay import field_names, json_records, trace_block_size
from vllm_tagma.lab.replay.json_fields import FieldError, checked, integer, seconds
from vllm_tagma.lab.replay.trace import BadLine, Piece, Reading, TraceError, TraceRequest
from vllm_tagma.lab.replay.trace_source import Source

_CHAT, _PARENT = "chat_id", "parent_chat_id"


def matches(entry: dict[str, Any]) -> bool:
    """True for an object with the lengths of a prompt and an output."""
    return None not in (
        field_names.find(entry, field_names.PROMPT),
        field_names.find(entry, field_names.OUTPUT),
    )


def parse(source: Source, reading: Reading) -> Iterator[TraceRequest | BadLine]:
    """The requests and bad lines of a file, in order."""
    return json_records.convert(source, _Converter(source, reading))


class _Converter:
    """Makes requests of objects; remembers the chats that later ones continue."""

    def __init__(self, source: Source, reading: Reading) -> None:
        self._chats: dict[int, int] = {}
        lengths = list(islice(_lengths(source), trace_block_size.LINES_READ))
        self._hashed = any(ids for _, ids in lengths)
        if reading.trace_block_size is not None:
            self._size = reading.trace_block_size
        elif self._hashed:
            usable = [(tokens, ids) for tokens, ids in lengths if tokens and ids]
            self._size = trace_block_size.found(usable, str(source))
            if self._size != trace_block_size.MOONCAKE_BLOCK_TOKENS:
                reading.note(f"a hash id covers {self._size} tokens, as the lengths say")
        if not self._hashed and reading.trace_block_size is not None:
            raise TraceError(
                f"{source} has no hash_ids, so --trace-block-size {reading.trace_block_size} says "
                f"nothing of it. Leave the option out."
            )
        if not self._hashed:
            reading.note("has no hash_ids, so no prompt shares anything with another")

    def __call__(self, entry: dict[str, Any], place: str, count: int) -> TraceRequest:
        prompt_name = field_names.find(entry, field_names.PROMPT) or "input_length"
        output_name = field_names.find(entry, field_names.OUTPUT) or "output_length"
        time_name = field_names.find(entry, field_names.TIME) or "timestamp"
        tokens = integer(entry, prompt_name)
        prompt = self._blocks(entry, tokens) if self._hashed else (Piece(f"m {place}", tokens),)
        request = TraceRequest(
            place=place,
            prompt=prompt,
            output_tokens=integer(entry, output_name),
            arrival=seconds(entry, time_name, scale=_unit(entry, time_name)),
            after=self._parent(entry),
        )
        chat = entry.get(_CHAT)
        if type(chat) is int:
            self._chats[chat] = count
        return request

    def _blocks(self, entry: dict[str, Any], tokens: int) -> tuple[Piece, ...]:
        name = field_names.find(entry, field_names.HASHES) or "hash_ids"
        ids = entry.get(name)
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise FieldError(
                f"{name} is missing or no list of integers, which other lines have; add it, or "
                f"take it out of all lines"
            )
        size = self._size
        expected = -(-tokens // size)
        if len(ids) != expected:
            raise FieldError(
                f"has {len(ids)} hash_ids for input_length {tokens}, which is {expected} blocks of "
                f"{size} tokens; correct the line, or say with --trace-block-size what an id covers"
            )
        pieces = [Piece(f"m{i}", size) for i in ids]
        pieces[-1] = Piece(pieces[-1].content, tokens - size * (len(ids) - 1))
        return tuple(pieces)

    def _parent(self, entry: dict[str, Any]) -> int | None:
        """The request that this one continues; a chat that began before the trace is none."""
        parent = entry.get(_PARENT)
        return self._chats.get(parent) if type(parent) is int else None


def _unit(entry: dict[str, Any], time_name: str) -> float:
    """Seconds that a time counts: Mooncake's ``timestamp`` has ms, Bailian's and others do not."""
    if field_names.in_milliseconds(time_name):
        return 1e-3
    mooncake = time_name == "timestamp" and "input_length" in entry and _CHAT not in entry
    return 1e-3 if mooncake else 1.0


def _lengths(source: Source) -> Iterator[tuple[int, int]]:
    """Prompt tokens and number of hash ids of each object; 0 for what is no number or list."""
    for _, entry, _ in json_records.records(source):
        if entry is None:
            continue
        tokens = entry.get(field_names.find(entry, field_names.PROMPT) or "")
        ids = entry.get(field_names.find(entry, field_names.HASHES) or "")
        try:
            length = checked(tokens, "")
        except FieldError:
            length = 0
        yield length, len(ids) if isinstance(ids, list) else 0
