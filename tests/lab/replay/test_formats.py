"""Trace files: each format, detection, bad lines, limits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from vllm_tagma.lab.replay import field_names, format_pieces, formats, loads
from vllm_tagma.lab.replay.hashes import block_hashes
from vllm_tagma.lab.replay.replay_command import SHIPPED
from vllm_tagma.lab.replay.trace import BadLine, Piece, Reading, TraceError
from vllm_tagma.lab.replay.trace_source import Source

if TYPE_CHECKING:
    from conftest import Write

MOONCAKE = {"timestamp": 1500, "input_length": 1030, "output_length": 7, "hash_ids": [3, 5, 9]}
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
AZURE = (
    f"{AZURE_HEADER}\r\n2023-11-16 18:15:46.6805900,374,44\r\n2023-11-16 18:15:50.9951690,396,109"
)
TURNS = {
    "id": "x",
    "conversations": [
        {"from": "human", "value": "12345"},
        {"from": "gpt", "value": "1234"},
        {"from": "human", "value": "äö"},
        {"from": "gpt", "value": "1"},
    ],
}
PIECES = [
    {"id": "a1", "arrival": 0.5, "prompt": [["s", 320], ["u1", 55]], "output": 180},
    {
        "id": "a2",
        "after": "a1",
        "arrival": 9.5,
        "prompt": [["s", 320], ["u1", 55], ["a1", 180], ["u2", 31]],
        "output": 90,
        "max_tokens": 100,
        "abort_after": 0,
    },
]


def lines(*entries: object) -> str:
    return "\n".join(e if isinstance(e, str) else json.dumps(e) for e in entries) + "\n"


def test_mooncake(write: Write) -> None:
    trace = formats.read(write(lines(MOONCAKE)))
    assert trace.kind == "mooncake"
    (request,) = trace.requests
    assert request.prompt == (Piece("m3", 512), Piece("m5", 512), Piece("m9", 6))
    assert (request.prompt_tokens, request.output_tokens) == (1030, 7)
    assert request.arrival == 1.5
    assert request.output is None
    assert request.num_blocks(16) == -(-1037 // 16)


def test_azure(write: Write) -> None:
    trace = formats.read(write(AZURE))
    assert trace.kind == "azure"
    first, second = trace.requests
    assert (first.prompt_tokens, first.output_tokens, first.arrival) == (374, 44, 0.0)
    assert second.arrival == pytest.approx(4.314579, abs=1e-6)
    # Nothing is known of the content, so nothing may be shared.
    assert first.prompt[0].content != second.prompt[0].content


def test_sharegpt(write: Write) -> None:
    again = {**TURNS, "conversations": TURNS["conversations"][:2]}
    trace = formats.read(write(json.dumps([TURNS, again])))
    assert trace.kind == "sharegpt"
    first, second, repeated = trace.requests
    # A token is four bytes of UTF-8, rounded up.
    assert [piece.tokens for piece in second.prompt] == [2, 1, 1]
    assert (first.output_tokens, second.output_tokens) == (1, 1)
    # The second turn holds the first one's prompt and answer and comes after it.
    assert second.prompt[:2] == (*first.prompt, Piece(first.output, 1))
    assert (first.after, second.after, repeated.after) == (None, 0, None)
    assert repeated.prompt == first.prompt


def test_pieces(write: Write) -> None:
    trace = formats.read(write(lines(*PIECES)))
    assert trace.kind == "tagma"
    first, second = trace.requests
    assert first.prompt == (Piece("s", 320), Piece("u1", 55))
    assert (first.output, first.after, first.max_tokens, first.abort_after) == (
        *("a1", None, None),
        None,
    )
    assert (second.after, second.max_tokens, second.abort_after) == (0, 100, 0)
    assert second.arrival == 9.5


def test_a_content_that_is_no_character_can_be_hashed(write: Write) -> None:
    """JSON can write half of a surrogate pair."""
    entry = '{"prompt": [["\\ud800", 40], ["\\ud801", 40]], "output": 4}'
    (request,) = formats.read(write(entry), strict=True).requests
    assert len(set(block_hashes(request.prompt, 16))) == 5
    assert request.prompt[0].content != request.prompt[1].content


def test_of_equal_names_the_first_counts() -> None:
    assert field_names.find(["x", "A_b", "a b"], ("ab",)) == "A_b"
    assert field_names.find(["isl", "input_length"], field_names.PROMPT) == "input_length"


def test_format_wins_over_content(write: Write) -> None:
    with pytest.raises(TraceError, match=r"no valid request.*lacks the columns.*read as azure"):
        formats.read(write(lines(MOONCAKE)), kind="azure")


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        (lines(MOONCAKE, "{"), "line 2", "is not JSON"),
        (lines(MOONCAKE, "[1]"), "line 2", "is list, not a JSON object"),
        (lines(MOONCAKE, "", {**MOONCAKE, "input_length": 5}), "line 3", "has 3 hash_ids for"),
        (lines(MOONCAKE, {**MOONCAKE, "output_length": 0}), "line 2", "output_length is 0, not"),
        (lines(MOONCAKE, {**MOONCAKE, "output_length": True}), "line 2", "is True, not an int"),
        (lines(MOONCAKE, {**MOONCAKE, "input_length": None}), "line 2", "input_length is missing"),
        (lines(MOONCAKE, {**MOONCAKE, "hash_ids": ["a"]}), "line 2", "hash_ids is missing or no"),
        (lines(MOONCAKE, {**MOONCAKE, "timestamp": "now"}), "line 2", "timestamp is 'now', not"),
        (f"{AZURE}\n2023-11-16 18:15:51,1", "line 4", "has 2 of 3 columns"),
        (f"{AZURE}\n2023-11-16 18:15:51,1,x", "line 4", "GeneratedTokens is 'x', not an integer"),
        (f"{AZURE}\n2023-11-16 18:15:51,0,4", "line 4", "ContextTokens is 0, not between"),
        (f"{AZURE}\nyesterday,4,4", "line 4", "TIMESTAMP: Invalid isoformat"),
        (f"{AZURE}\n2023-11-16T18:15:51+00:00,4,4", "line 4", "TIMESTAMP: can't subtract"),
        (json.dumps([TURNS, {}]), "entry 2", "has no list of conversations"),
        (
            json.dumps([TURNS, {"conversations": [{"from": "human", "value": "?"}]}]),
            "entry 2",
            "has no answer of the model",
        ),
        (
            json.dumps([TURNS, {"conversations": [{"from": "human", "value": ""}]}]),
            "entry 2",
            "message 1 is empty",
        ),
        (json.dumps([TURNS, {"conversations": [{"value": ""}]}]), "entry 2", "message 1 lacks"),
        (lines(*PIECES, {**PIECES[0], "id": "b", "otput": 3}), "line 3", "unknown fields ['otput'"),
        (lines(*PIECES, PIECES[0]), "line 3", "id 'a1' stands on an earlier line"),
        (lines(PIECES[0], {**PIECES[1], "after": "z"}), "line 2", "after is 'z', which no earlier"),
        (lines(PIECES[0], {**PIECES[1], "max_tokens": 5}), "line 2", "max_tokens is 5, less than"),
        (lines(PIECES[0], {**PIECES[1], "abort_after": 90}), "line 2", "abort_after is 90, not be"),
        (lines(PIECES[0], {"prompt": [], "output": 4}), "line 2", "prompt is missing or no list"),
        (lines(PIECES[0], {"prompt": [["a"]], "output": 4}), "line 2", "prompt has ['a'], not"),
        (
            lines(PIECES[0], {"prompt": [["a", -1]], "output": 4}),
            "line 2",
            "tokens of 'a' is -1, not between 1 and",
        ),
    ],
)
def test_bad_lines(write: Write, text: str, place: str, reason: str) -> None:
    """Skipped with place and reason; with ``strict`` the first one stops."""
    path = write(text)
    trace = formats.read(path)
    (bad,) = trace.bad
    assert bad.place == place
    assert reason in bad.reason
    good = text.count("hash_ids") or 2
    assert len(trace.requests) >= min(good - 1, 1)
    with pytest.raises(TraceError) as caught:
        formats.read(path, strict=True)
    assert str(caught.value) == f"{path}, {place}: {bad.reason}"


def test_limit_counts_requests_and_stops_reading(write: Write) -> None:
    path = write(lines("oops", MOONCAKE, MOONCAKE, MOONCAKE, "oops"))
    trace = formats.read(path, kind="mooncake", limit=2)
    assert [request.place for request in trace.requests] == ["line 2", "line 3"]
    assert [line.place for line in trace.bad] == ["line 1"]


@pytest.mark.parametrize("text", ["", "hello\n", "[]", '{"a": 1}\n'])
def test_unknown_content_names_the_formats(write: Write, text: str) -> None:
    with pytest.raises(
        TraceError, match=r"none of the formats mooncake, azure, burstgpt, share.*, tagma"
    ):
        formats.read(write(text))


def test_a_file_without_requests_is_an_error(write: Write) -> None:
    with pytest.raises(TraceError, match=r"no valid request \(1 bad lines; the first: line 1"):
        formats.read(write(lines({**MOONCAKE, "output_length": 0})))
    with pytest.raises(TraceError, match=r"no valid request \(0 bad lines\)"):
        formats.read(write(AZURE_HEADER))


def test_unreadable_files(write: Write) -> None:
    path = write("")
    with pytest.raises(TraceError, match="cannot be read"):
        formats.read(path.parent)
    path.write_bytes(b"\xff\xfe\x00")
    for kind in (None, *formats.PARSERS):
        with pytest.raises(TraceError, match="cannot be read"):
            formats.read(path, kind=kind)


def test_our_format_reads_back_what_it_wrote() -> None:
    """And the trace that ships is the load that ``loads.py`` says it is."""
    from importlib import resources

    load = loads.generate(
        "mixed", requests=loads.MIXED_REQUESTS, running=loads.MIXED_RUNNING, seed=0
    )
    text = "".join(f"{format_pieces.dump(r, load.requests)}\n" for r in load.requests)
    with resources.as_file(resources.files("vllm_tagma.lab.replay") / SHIPPED) as shipped:
        assert shipped.read_text(encoding="utf-8") == text
        read = formats.read(shipped, strict=True)
    assert read.kind == "tagma"
    fields = ("prompt", "output_tokens", "arrival", "output", "max_tokens", "abort_after", "after")
    for back, made in zip(read.requests, load.requests, strict=True):
        assert [getattr(back, name) for name in fields] == [getattr(made, name) for name in fields]
    assert any(request.abort_after is not None for request in read.requests)
    assert any(request.max_tokens is not None for request in read.requests)


def test_bad_lines_and_requests_keep_the_order_of_the_file(write: Write) -> None:
    with Source(write(lines(PIECES[0], "x", PIECES[1]))) as source:
        items = list(format_pieces.parse(source, Reading()))
    assert [type(item) is BadLine for item in items] == [False, True, False]
    # The index of the parent counts requests, not lines.
    assert items[2].after == 0
