"""Hash ids of any block size, found from the lengths; traces without any; Bailian's chats."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from trace_samples import BAILIAN, lines

from vllm_tagma.lab.replay import formats
from vllm_tagma.lab.replay.trace import Piece, TraceError
from vllm_tagma.lab.replay.trace_block_size import MAX_BLOCK_TOKENS, found

if TYPE_CHECKING:
    from conftest import Write

LENGTHS = st.lists(st.integers(1, 200_000), min_size=1, max_size=30)


def ids(tokens: int, size: int) -> int:
    return -(-tokens // size)


@given(LENGTHS, st.integers(0, 14).map(lambda bit: 1 << bit))
@example([16, 16, 17], 16)
@example([1024, 2048], 1024)
def test_a_power_of_two_is_found_wherever_it_matters(lengths: list[int], size: int) -> None:
    """Any line of two ids or more leaves no other power of two, unless 512 fits as well."""
    answer = found([(tokens, ids(tokens, size)) for tokens in lengths], "x")
    assert all(ids(tokens, answer) == ids(tokens, size) for tokens in lengths)
    if max(lengths) > size:
        assert answer in (size, 512)


@given(LENGTHS, st.integers(1, 3000))
def test_any_size_is_found_or_asked_for(lengths: list[int], size: int) -> None:
    try:
        answer = found([(tokens, ids(tokens, size)) for tokens in lengths], "x")
    except TraceError:
        # A full block and one token more leave no other size.
        assert size not in lengths or size + 1 not in lengths
        return
    assert all(ids(tokens, answer) == ids(tokens, size) for tokens in lengths)


def test_many_lengths_leave_one_size() -> None:
    for size in (1, 3, 48, 100, 1000):
        assert found([(n, ids(n, size)) for n in range(1, 5 * size + 2)], "x") == size


def test_broken_lines_are_outvoted() -> None:
    good = [(n, ids(n, 16)) for n in range(100, 140)]
    assert found([*good, *((500, 3), (7, 9), (100, 1))] * 3, "x") == 16
    assert found([], "x") == found([(5, 9)], "x") == 512


def test_what_is_left_open_asks_with_what_would_fit() -> None:
    with pytest.raises(TraceError, match=r"x does not tell .*: 16 to 19 or 32 to 39 would fit"):
        found([(80, 5), (160, 5)], "x")
    with pytest.raises(TraceError, match=r": 37 to 48 would fit\. Say it with --trace-block-size"):
        found([(100, 3), (145, 4)], "x")


def mooncake(tokens: int, *hashes: object, **more: Any) -> dict[str, Any]:
    return {"timestamp": 0, "input_length": tokens, "output_length": 5, "hash_ids": hashes, **more}


def test_prompts_of_one_block_fit_any_size(write: Write) -> None:
    for tokens in (16, 512, 700, MAX_BLOCK_TOKENS):
        (request,) = formats.read(write(lines(mooncake(tokens, 1))), strict=True).requests
        assert request.prompt == (Piece("m1", tokens),)


def test_the_option_overrides_what_is_found(write: Write) -> None:
    path = write(lines(mooncake(100, 1, 2), mooncake(40, 1)))
    assert formats.read(path).requests[0].prompt == (Piece("m1", 64), Piece("m2", 36))
    trace = formats.read(path, trace_block_size=50)
    assert trace.requests[0].prompt == (Piece("m1", 50), Piece("m2", 50))
    assert trace.notes == []
    wrong = formats.read(path, trace_block_size=48)
    assert "has 2 hash_ids for input_length 100, which is 3 blocks of 48" in wrong.bad[0].reason
    assert "--trace-block-size" in wrong.bad[0].reason


def test_the_option_is_refused_where_it_says_nothing(write: Write) -> None:
    table = write("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,3\n")
    with pytest.raises(TraceError, match=r"--trace-block-size 16 .* read as azure, has none"):
        formats.read(table, trace_block_size=16)
    with pytest.raises(TraceError, match=r"has no hash_ids, so --trace-block-size 16 says nothing"):
        formats.read(write('{"input_length": 1, "output_length": 2}'), trace_block_size=16)


def test_bailian(write: Write) -> None:
    trace = formats.read(write(BAILIAN), strict=True)
    first, second, third = trace.requests
    assert first.prompt == (Piece("m0", 16),)
    assert second.prompt[-1] == Piece("m5", 3)
    # Seconds, and a request comes after the one that it continues, if that is in the trace.
    assert [request.arrival for request in trace.requests] == [10.5, 11.5, 12.5]
    assert (first.after, second.after, third.after) == (None, 0, None)
    assert trace.notes == ["a hash id covers 16 tokens, as the lengths say"]


def test_without_hash_ids_nothing_is_shared(write: Write) -> None:
    entry = {"timestamp": 1500, "input_length": 600, "output_length": 5}
    trace = formats.read(write(lines(entry, entry)), strict=True)
    first, second = trace.requests
    assert first.prompt[0].content != second.prompt[0].content
    assert (first.prompt_tokens, first.arrival) == (600, 1.5)
    assert trace.notes == ["has no hash_ids, so no prompt shares anything with another"]


def test_one_line_without_hash_ids_is_bad(write: Write) -> None:
    whole = mooncake(600, 1, 2)
    broken = [{**whole, "hash_ids": ids} for ids in (None, [], "1", [1, True], [1, "2"], [1, 2.0])]
    trace = formats.read(write(lines(whole, *broken)))
    assert len(trace.requests) == 1
    assert [line.place for line in trace.bad] == [f"line {n}" for n in range(2, 8)]
    assert all("hash_ids" in line.reason and ";" in line.reason for line in trace.bad)


@pytest.mark.parametrize(
    ("entry", "arrival"),
    [
        ({"timestamp": 1.5, "prompt_tokens": 30, "completion_tokens": 4}, 1.5),
        ({"timestamp_ms": 1500, "input_tokens": 30, "output_tokens": 4}, 1.5),
        ({"arrivalTime": 1.5, "inputLength": 30, "outputLength": 4}, 1.5),
        ({"arrived_at": "1.5", "prompt_len": 30.0, "output_len": 4}, 1.5),
        ({"timestamp": "1970-01-01T00:00:01.5Z", "isl": 30, "osl": 4}, 1.5),
        ({"num_prefill_tokens": 30, "num_decode_tokens": 4, "block_hashes": [7]}, 0.0),
    ],
)
def test_named_variants(write: Write, entry: dict[str, Any], arrival: float) -> None:
    for text in (json.dumps(entry), json.dumps([entry], indent=2)):
        (request,) = formats.read(write(text), strict=True).requests
        assert (request.prompt_tokens, request.output_tokens) == (30, 4)
        assert request.arrival == arrival
