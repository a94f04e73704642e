"""Tables of lengths: Azure's of both years, BurstGPT's, and others' names for the same columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from trace_samples import AZURE_2024, BURSTGPT, BURSTGPT_2

from vllm_tagma.lab.replay import formats
from vllm_tagma.lab.replay.trace import TraceError

if TYPE_CHECKING:
    from conftest import Write


def test_azure_2024_has_offsets_and_whole_seconds(write: Write) -> None:
    trace = formats.read(write(AZURE_2024), strict=True)
    assert trace.kind == "azure"
    assert [request.arrival for request in trace.requests] == pytest.approx([0, 0.007405, 2.99007])


def test_burstgpt(write: Write) -> None:
    failed = "60,ChatGPT,700,0,700,Conversation log\n"
    trace = formats.read(write(BURSTGPT + failed))
    assert trace.kind == "burstgpt"
    assert [(r.prompt_tokens, r.output_tokens, r.arrival) for r in trace.requests] == [
        *((472, 18, 5), (1087, 230, 45))
    ]
    assert trace.bad[0].place == "line 4"
    assert "Response tokens is 0, which is how BurstGPT marks a request that" in trace.bad[0].reason
    assert formats.read(write(BURSTGPT_2)).requests[0].arrival == 5.5


@pytest.mark.parametrize(
    ("header", "row", "arrival"),
    [
        ("arrived_at,num_prefill_tokens,num_decode_tokens", "1.5,30,4", 1.5),
        ("timestamp_ms,prompt_tokens,output_tokens", "1500,30,4", 1.5),
        ("Output Tokens;Input Tokens;Time", "4;30;1.5", 1.5),
        ('"","TIMESTAMP","ContextTokens","GeneratedTokens"', '"0","1.5","30.0","4.0"', 1.5),
        ("inputLength\toutputLength", "3e1\t4", 0.0),
        ("\ufeffTIMESTAMP,ContextTokens,GeneratedTokens", " 1.5 , 30 , 4 ,", 1.5),
    ],
)
def test_named_variants(write: Write, header: str, row: str, arrival: float) -> None:
    (request,) = formats.read(write(f"{header}\n{row}\n"), strict=True).requests
    assert (request.prompt_tokens, request.output_tokens) == (30, 4)
    assert request.arrival == arrival


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("2024-05-10 00:00:00,,4", "ContextTokens is empty; fill it in"),
        ("2024-05-10 00:00:00,7.5,4", "ContextTokens is 7.5, not an integer; give it as"),
        ("2024-05-10 00:00:00,1e400,4", "ContextTokens is inf, not an integer"),
        (f"2024-05-10 00:00:00,4,{'9' * 5000}", "GeneratedTokens is a number of 5,000 digits, not"),
        (f"2024-05-10 00:00:00,4,{'x' * 200_000}", "GeneratedTokens is 'xxxx"),
        ("1e300,4,4", "TIMESTAMP: Invalid isoformat string: '1e300'; write it as seconds or as"),
        ("2024-13-10 00:00:00,4,4", "TIMESTAMP: Invalid isoformat string"),
        (",4,4", "TIMESTAMP: Invalid isoformat string: ''"),
        ("2024-05-10 00:00:00;4;4", "has 1 of 3 columns; complete or remove it"),
    ],
)
def test_bad_rows_name_the_fix(write: Write, row: str, reason: str) -> None:
    good = "2024-05-10 00:00:00,4,4"
    header = "TIMESTAMP,ContextTokens,GeneratedTokens"
    trace = formats.read(write("\n".join([header, good, row, "", ",,", good])))
    assert [request.place for request in trace.requests] == ["line 2", "line 6"]
    ((place, said),) = trace.bad
    assert place == "line 3"
    assert reason in said
    assert len(said) < 250


def test_a_table_without_the_columns(write: Write) -> None:
    with pytest.raises(TraceError, match=r"line 1: lacks the columns TIMESTAMP, .*name them so"):
        formats.read(write("a,b\n1,2\n"), kind="burstgpt")
