"""vLLM's own log of requests: ``--enable-log-requests``, and ``--enable-log-outputs`` for lengths.

Up to version 0.11 a line has the prompt (``Received request ID: prompt: '...', params: ...,
prompt_token_ids: [...]``); later ones have it on a line of its own at level DEBUG (``Request ID
details: ...``). The answer comes later (``Generated response ID: output: '...'``); without it, the
limit that vLLM was given stands for its length. All other lines are passed over.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice

from vllm_tagma.lab.replay.json_fields import FieldError, checked, number
from vllm_tagma.lab.replay.text_pieces import of_text, of_token_ids, tokens_of
from vllm_tagma.lab.replay.trace import BadLine, Piece, Reading, TraceRequest
from vllm_tagma.lab.replay.trace_source import Source, undecodable

_LINES_PROBED = 20_000
"""A server says much before its first request."""
_MESSAGE_FIELDS = ("message", "log", "msg")
_EVENT = re.compile(
    r"(?:Received request (?P<received>\S+):"
    r"|Request (?P<detailed>\S+) details:"
    r"|Generated response (?P<generated>\S+?)(?P<how> \(streaming (?:delta|complete)\))?"
    r"(?: details)?:) "
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_TIME = re.compile(r"\b(\d\d-\d\d \d\d:\d\d:\d\d)\b")
_LITERAL = r"""(?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|None)"""
_PROMPT = re.compile(rf"prompt: {_LITERAL}")
_OUTPUT = re.compile(rf"output: {_LITERAL}")
_PROMPT_IDS = re.compile(r"prompt_token_ids: \[([\d, ]*)\]")
_OUTPUT_IDS = re.compile(r"output_token_ids: \[([\d, ]*)\]")
_LIMIT = re.compile(r"\bmax_tokens=(\d+)")
_LONGEST_JUMP_BACK = timedelta(days=180)


def matches(source: Source) -> bool:
    """True for a log with a request in its first lines."""
    return any(
        (found := _EVENT.search(line)) is not None and not found["generated"]
        for _, line in islice(source.lines(), _LINES_PROBED)
    )


@dataclass(slots=True)
class _Logged:
    """What the lines of one request say of it."""

    line: int
    arrival: float
    prompt: tuple[Piece, ...] = ()
    output_tokens: int = 0
    max_tokens: int | None = None
    counted: bool = False
    """Whether ``output_tokens`` was counted in token ids, not estimated from text."""


def parse(source: Source, reading: Reading) -> Iterator[TraceRequest | BadLine]:
    """The requests in the order in which they came, with bad lines among them.

    The whole log is read first: answers come after their requests.
    """
    logged: dict[str, _Logged] = {}
    bad: list[tuple[int, BadLine]] = []
    clock = _Clock()
    for line_number, line in source.lines():
        if (message := _message(line)) is None:
            continue
        place = f"line {line_number}"
        if (reason := undecodable(line)) is not None:
            bad.append((line_number, BadLine(place, reason)))
            continue
        try:
            _note_event(message, logged, line_number, clock)
        except FieldError as error:
            bad.append((line_number, BadLine(place, str(error))))
    items: list[tuple[int, TraceRequest | BadLine]] = [*bad]
    for request in logged.values():
        items.append((request.line, _item(request, reading)))
    items.sort(key=lambda item: item[0])
    for _, item in items:
        yield item


def _message(line: str) -> str | None:
    """The plain text of a log line that speaks of a request; None for all others."""
    if not _EVENT.search(line):
        return None
    if line.lstrip().startswith("{"):  # Docker's log driver, or a JSON formatter
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        for name in _MESSAGE_FIELDS:
            if isinstance(entry, dict) and isinstance(entry.get(name), str):
                line = entry[name]
                break
    return _COLOUR.sub("", line)


def _note_event(message: str, logged: dict[str, _Logged], line: int, clock: _Clock) -> None:
    found = _EVENT.search(message)
    if found is None:
        return
    rest = message[found.end() :]
    if found["generated"]:
        _note_answer(rest, found, logged)
        return
    name = found["received"] or found["detailed"]
    request = logged.get(name)
    if request is None:
        request = _Logged(line, clock.seconds(message[: found.start()]))
    rest = _note_prompt(rest, request)
    if found["received"] and (limit := _LIMIT.search(rest)):
        request.max_tokens = checked(number(limit[1]), "max_tokens")
    logged[name] = request


def _note_prompt(rest: str, request: _Logged) -> str:
    """Takes the prompt from what a line says; returns what stands behind the prompt's text."""
    text = ""
    if rest.startswith("prompt: "):
        literal = _PROMPT.match(rest)
        if literal is None:
            raise FieldError("breaks off inside of its prompt; log it whole, without cutting lines")
        rest = rest[literal.end() :]
        text = _unquoted(literal["text"])
    if ids := _PROMPT_IDS.search(rest):
        request.prompt = of_token_ids([int(i) for i in ids[1].split(",") if i.strip()])
    if not request.prompt and text:
        request.prompt = of_text(text)
    return rest


def _note_answer(rest: str, found: re.Match[str], logged: dict[str, _Logged]) -> None:
    name = found["generated"]
    # Completions log their prompts as ID-0, ID-1, ..., and their answers as ID.
    request = logged.get(name) or logged.get(f"{name}-0")
    if request is None:
        return
    delta = found["how"] == " (streaming delta)"
    if rest.startswith("output: "):
        literal = _OUTPUT.match(rest)
        if literal is None:
            raise FieldError("breaks off inside of its output; log it whole, without cutting lines")
        rest = rest[literal.end() :]
        if not request.counted and not delta:
            request.output_tokens = tokens_of(_unquoted(literal["text"]))
    if ids := _OUTPUT_IDS.search(rest):
        tokens = sum(1 for i in ids[1].split(",") if i.strip())
        request.output_tokens = tokens + (request.output_tokens if request.counted and delta else 0)
        request.counted = True


def _unquoted(literal: str) -> str:
    try:
        return str(ast.literal_eval(literal) or "")
    except (ValueError, SyntaxError):
        raise FieldError(
            "has a text that is not quoted as vLLM does; leave the line as it was"
        ) from None


def _item(request: _Logged, reading: Reading) -> TraceRequest | BadLine:
    place = f"line {request.line}"
    if not request.prompt:
        return BadLine(
            place,
            "has no prompt; serve with --enable-log-requests and VLLM_LOGGING_LEVEL=DEBUG, at "
            "which vLLM logs prompts",
        )
    tokens, limit = request.output_tokens, request.max_tokens
    if not tokens:
        if limit is None:
            return BadLine(
                place, "has no answer and no max_tokens; serve with --enable-log-outputs"
            )
        reading.note(
            "lacks some answers: these are taken to be as long as their max_tokens allows. Serve "
            "with --enable-log-outputs to have them"
        )
        tokens = limit
    return TraceRequest(
        place=place,
        prompt=request.prompt,
        output_tokens=tokens,
        arrival=request.arrival,
        max_tokens=limit if limit is not None and limit >= tokens else None,
    )


class _Clock:
    """vLLM's times, which have no year: a long jump back is the turn of one."""

    def __init__(self) -> None:
        self._years = 0
        self._last: datetime | None = None

    def seconds(self, prefix: str) -> float:
        """Seconds since the beginning of the first line's year; as before if there is no time."""
        if found := _TIME.search(prefix):
            try:
                # 2000 and every fourth year after it has a 29 February.
                moment = datetime.strptime(f"2000-{found[1]}", "%Y-%m-%d %H:%M:%S")
            except ValueError:
                moment = None
            if moment is not None:
                if self._last is not None and self._last - moment > _LONGEST_JUMP_BACK:
                    self._years += 1
                self._last = moment
        if self._last is None:
            return 0.0
        elapsed = self._last - datetime(2000, 1, 1)
        return elapsed.total_seconds() + self._years * timedelta(days=366).total_seconds()
