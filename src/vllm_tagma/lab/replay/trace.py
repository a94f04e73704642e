"""What a replay needs to know of a request, whatever file it came from.

A prompt is a list of pieces. A piece names a stream of tokens by a content id and takes the first
``tokens`` of it, so two prompts share exactly as many tokens as their lists of pieces agree on. No
token is ever made: lengths and shared prefixes are all that a KV-cache manager sees.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_tagma.errors import TagmaError


class TraceError(TagmaError, ValueError):
    """A trace that cannot be replayed: unreadable, of no known format, or without any request."""


class Piece(NamedTuple):
    """The first ``tokens`` tokens of the stream ``content``."""

    content: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One request of a trace; lengths in tokens, times in seconds."""

    place: str
    """Where it stands, for messages: ``"line 12"``."""
    prompt: tuple[Piece, ...]
    output_tokens: int
    """Tokens that the model generates before it stops."""
    arrival: float = 0.0
    output: str | None = None
    """Content id of the generated tokens; None: nothing refers to them."""
    max_tokens: int | None = None
    """The limit that the client set; None: none."""
    abort_after: int | None = None
    """The client goes away after this many generated tokens; 0: right after admission."""
    after: int | None = None
    """Index of the request that must have ended before this one arrives."""

    @property
    def prompt_tokens(self) -> int:
        return sum(piece.tokens for piece in self.prompt)

    def num_blocks(self, block_size: int) -> int:
        """Blocks that hold the prompt and the whole output."""
        return -(-(self.prompt_tokens + self.output_tokens) // block_size)


class BadLine(NamedTuple):
    """A line, or an entry of a JSON list, that is no request."""

    place: str
    reason: str


@dataclass(kw_only=True)
class Trace:
    """The requests of one file or one generated load, in order of their lines."""

    name: str
    kind: str
    """Format of the file, or kind of the load."""
    requests: list[TraceRequest] = field(default_factory=list)
    bad: list[BadLine] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What the reader assumed about the file as a whole, for the user."""


@dataclass(kw_only=True)
class Reading:
    """What a parser is told of how to read, and what it has to say of the file as a whole."""

    trace_block_size: int | None = None
    """Prompt tokens of one hash id; None: found from the data."""
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Adds a note once, however often it is said."""
        if text not in self.notes:
            self.notes.append(text)
