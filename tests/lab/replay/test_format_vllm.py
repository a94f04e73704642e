"""What vLLM itself writes: results of ``vllm bench serve``, and the log of requests."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from trace_samples import BENCH, LOG, PARAMS, lines

from vllm_tagma.lab.replay import formats
from vllm_tagma.lab.replay.text_pieces import of_text, of_token_ids
from vllm_tagma.lab.replay.trace import TraceError

if TYPE_CHECKING:
    from conftest import Write


def test_bench(write: Write) -> None:
    trace = formats.read(write(json.dumps(BENCH)), strict=True)
    assert trace.kind == "vllm-bench"
    assert [(r.prompt_tokens, r.output_tokens, r.arrival) for r in trace.requests] == [
        *((127, 58, 10.0), (2, 71, 10.5), (761, 25, 11.0))
    ]
    assert trace.requests[1].place == "line 1, request 2"
    older = {name: BENCH[name] for name in ("input_lens", "output_lens")}
    assert len(formats.read(write(json.dumps(older, indent=2)), strict=True).requests) == 3


@pytest.mark.parametrize(
    ("change", "place", "reason"),
    [
        (
            {"errors": ["", "timeout", ""], "output_lens": [58, 0, 25]},
            "line 1, request 2",
            "failed",
        ),
        ({"input_lens": [127, "2", 761]}, "line 1, request 2", "input_lens is '2', not an integer"),
        ({"output_lens": [58, 0, 25]}, "line 1, request 2", "output_lens is 0, not between"),
        ({"start_times": [1, None, 2]}, None, ""),
        ({"errors": []}, None, ""),
    ],
)
def test_bench_entries(
    write: Write, change: dict[str, Any], place: str | None, reason: str
) -> None:
    trace = formats.read(write(json.dumps({**BENCH, **change})))
    assert len(trace.requests) == (3 if place is None else 2)
    assert [line.place for line in trace.bad] == ([] if place is None else [place])
    assert all(reason in line.reason for line in trace.bad)


def test_bench_without_details(write: Write) -> None:
    brief = {name: value for name, value in BENCH.items() if not isinstance(value, list)}
    with pytest.raises(TraceError, match=r"has no list input_lens; run .* with --save-detailed"):
        formats.read(write(json.dumps(brief)))
    with pytest.raises(TraceError, match=r"has 3 input_lens, 2 output_lens, .*not one for each"):
        formats.read(write(json.dumps({**BENCH, "output_lens": [1, 2]})))


def test_a_log_of_version_0_9(write: Write) -> None:
    trace = formats.read(write(LOG), strict=True)
    assert trace.kind == "vllm-log"
    first, second = trace.requests
    assert first.prompt == of_token_ids([1, 2, 3])
    assert (first.output_tokens, first.max_tokens) == (64, 64)
    assert second.prompt == of_text("Hello there")
    assert (second.output_tokens, second.max_tokens) == (3, 64)  # "General ä!": eleven bytes
    assert second.arrival - first.arrival == 2, "the year turned"
    (note,) = trace.notes
    assert "lacks some answers: these are taken to be as long as their max_tokens" in note


@pytest.fixture
def vllm_log() -> Iterator[tuple[Any, list[str]]]:
    """vLLM's own request logger, and the lines that it writes at level DEBUG."""
    from vllm.entrypoints.serve.utils import request_logger
    from vllm.logging_utils import NewLineFormatter

    written: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            written.append(self.format(record))

    handler = Keep()
    handler.setFormatter(
        NewLineFormatter(
            "(APIServer pid=7) %(levelname)s %(asctime)s [%(fileinfo)s:%(lineno)d] %(message)s",
            datefmt="%m-%d %H:%M:%S",
        )
    )
    logger = request_logger.logger
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield request_logger.RequestLogger(max_log_len=None), written
    logger.removeHandler(handler)
    logger.setLevel(level)


PROMPT = "It's \"so\"\n\\ {b} Received request x: prompt: 'y' params: max_tokens=1 ä\u2028"


def test_what_vllms_own_logger_writes(vllm_log: tuple[Any, list[str]], write: Write) -> None:
    from vllm.sampling_params import SamplingParams

    logger, written = vllm_log

    def asked(name: str, prompt: str | None, ids: list[int] | None, limit: int) -> None:
        logger.log_inputs(name, prompt, ids, None, SamplingParams(max_tokens=limit), None)

    asked("chatcmpl-1", PROMPT, None, 90)
    asked("cmpl-2-0", PROMPT, list(range(40)), 50)
    asked("cmpl-3-0", None, list(range(35)), 7)
    for token in ("a", "b", "c"):
        logger.log_outputs("chatcmpl-1", token, [5, 6], None, is_streaming=True, delta=True)
    logger.log_outputs("chatcmpl-1", PROMPT, None, "streaming_complete", is_streaming=True)
    logger.log_outputs("cmpl-2", PROMPT, list(range(23)), "stop")
    trace = formats.read(write("\n".join(["Starting", *written, "Stopping"])), strict=True)
    assert trace.kind == "vllm-log"
    first, second, third = trace.requests
    assert first.prompt == of_text(PROMPT)
    assert second.prompt == of_token_ids(range(40))
    assert [piece.tokens for piece in third.prompt] == [16, 16, 3]
    assert second.prompt[:2] == third.prompt[:2]
    # Six ids counted in three deltas; 23 ids; and the limit, for want of an answer.
    assert [r.output_tokens for r in trace.requests] == [6, 23, 7]
    assert [r.max_tokens for r in trace.requests] == [90, 50, 7]


def test_colours_and_containers(write: Write) -> None:
    (line,) = (line for line in LOG.splitlines() if "cmpl-1" in line)
    coloured = line.replace("INFO", "\x1b[32mINFO\x1b[0m").replace("[logger", "\x1b[90m[logger")
    docker = json.dumps({"log": line + "\n", "stream": "stderr", "time": "2025-12-31T23:59:59Z"})
    kubernetes = f"2025-12-31T23:59:59.5Z stderr F (APIServer pid=1) {line}"
    expected = formats.read(write(line)).requests
    for text in (coloured, docker, kubernetes):
        trace = formats.read(write(f"noise\n{text}\n"), strict=True)
        assert [r.prompt for r in trace.requests] == [r.prompt for r in expected]
        assert [r.max_tokens for r in trace.requests] == [64]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            f"Received request a: params: {PARAMS.format(4)}, lora_request: None.",
            "has no prompt; ser",
        ),
        (
            "Received request a: prompt: 'Hi', params: PoolingParams(), lora",
            "no answer and no max_",
        ),
        ("Received request a: prompt: 'Hi, params: ", "breaks off inside of its prompt"),
        (r"Received request a: prompt: '\x', params: ", "not quoted as vLLM does"),
        ("Generated response chatcmpl-2: output: 'Hi", "breaks off inside of its output"),
        (f"Received request a: prompt: 'Hi', params: {PARAMS.format(0)}, ", "max_tokens is 0, not"),
    ],
)
def test_bad_log_lines(write: Write, line: str, reason: str) -> None:
    trace = formats.read(write(f"{LOG}INFO 01-01 00:00:03 [logger.py:39] {line}\n"))
    assert len(trace.requests) == 2
    ((place, said),) = trace.bad
    assert place == "line 6"
    assert reason in said
    assert ";" in said


def test_limit_and_order_of_a_log(write: Write) -> None:
    """Requests come in the order in which they did, whenever they were answered."""
    assert [r.place for r in formats.read(write(LOG)).requests] == ["line 2", "line 4"]
    assert len(formats.read(write(LOG), limit=1).requests) == 1
    no_answers = lines(*(line for line in LOG.splitlines() if "Generated" not in line))
    assert [r.output_tokens for r in formats.read(write(no_answers)).requests] == [64, 64]
