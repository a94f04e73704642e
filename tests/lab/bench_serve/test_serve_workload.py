"""The requests of each stage: their lengths, their prefixes, their order."""

from __future__ import annotations

import itertools
from pathlib import Path

import pandas
import pytest

from vllm_tagma.lab.bench_serve.dataset import DatasetError, Turn, read
from vllm_tagma.lab.bench_serve.profiles import SMOKE_DATASET
from vllm_tagma.lab.bench_serve.serve_plan import Stage, stages_of
from vllm_tagma.lab.bench_serve.workload import Builder, write


def count(text: str) -> int:
    """Words, and one more for each blank line inside: real tokenizers split those as well."""
    return len(text.split()) + text.rstrip().count("\n\n")


@pytest.fixture
def build(settings_of):
    conversations = read(SMOKE_DATASET).conversations

    def make(kind: str = "chat", number: int = 40, **changes):
        settings = settings_of(**changes)
        stage = Stage(name=f"{kind}-c4", kind=kind, num_requests=number, concurrency=4)
        return Builder(settings, conversations, count=count).stage(stage), settings

    return make


def shared(a: str, b: str) -> int:
    """Characters of the common prefix."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def test_chat_requests_fill_their_contexts(build) -> None:
    requests, _ = build(min_context=40, max_context=600, max_output=20)
    lengths = sorted(r.prompt_tokens for r in requests)
    assert len(requests) == 40
    assert all(count(r.prompt) == r.prompt_tokens for r in requests)
    assert lengths[-1] <= 600
    assert lengths[0] >= 20
    assert lengths[-1] > 350
    # Log-uniform: the middle is near the geometric mean, far below the arithmetic one.
    assert 90 < lengths[len(lengths) // 2] < 260
    assert all(1 <= r.output_tokens <= 20 for r in requests)
    assert len({r.output_tokens for r in requests}) > 3


def test_a_question_that_is_too_long_is_shortened(settings_of) -> None:
    conversations = [[Turn(True, "long " * 500), Turn(False, "answer")]]
    settings = settings_of(min_context=50, max_context=60)
    stage = Stage(name="chat-c1", kind="chat", num_requests=3, concurrency=1)
    for request in Builder(settings, conversations, count=count).stage(stage):
        assert 45 <= request.prompt_tokens <= 60


def test_chat_requests_share_no_block(build) -> None:
    requests, _ = build()
    for a, b in itertools.combinations([r.prompt for r in requests], 2):
        assert shared(a, b) < 20


def test_turns_repeat_the_ones_before_and_come_turn_by_turn(build) -> None:
    requests, settings = build("turns", number=12, turns=3)
    assert len(requests) == 12
    for index in range(4):  # four conversations of three turns
        turns = requests[index::4]
        for before, after in itertools.pairwise(turns):
            assert after.prompt.startswith(before.prompt)
            assert after.prompt_tokens > before.prompt_tokens
    first = [r.prompt for r in requests[:4]]
    system = min(shared(a, b) for a, b in itertools.combinations(first, 2))
    assert count(first[0][:system]) >= settings.system_tokens
    assert all(r.prompt_tokens <= settings.max_context for r in requests)


def test_turns_can_begin_with_older_talk(build) -> None:
    without, _ = build("turns", number=6, turns=3, max_context=900)
    requests, _ = build("turns", number=6, turns=3, max_context=900, history_tokens=400)
    for index in range(2):
        more = requests[index].prompt_tokens - without[index].prompt_tokens
        assert 300 < more < 480
        for before, after in itertools.pairwise(requests[index::2]):
            assert after.prompt.startswith(before.prompt)
    # The talk is each conversation's own.
    assert shared(requests[0].prompt, requests[1].prompt) < len(without[0].prompt)


def test_conversations_are_cut_to_whole_requests(build) -> None:
    requests, _ = build("turns", number=7, turns=3)
    assert len(requests) == 7


def test_turns_that_cannot_fit_are_refused(build) -> None:
    with pytest.raises(DatasetError, match="no conversation is short enough for 4 turns"):
        build("turns", max_context=130, system_tokens=120, min_context=48)


def test_outputs_have_both_kinds_and_one_length(settings_of) -> None:
    settings = settings_of(output_requests=6, output_tokens=9)
    (outputs, *_) = stages_of(settings)
    requests = Builder(settings, read(SMOKE_DATASET).conversations, count=count).stage(outputs)
    assert len(requests) == 6
    assert {r.output_tokens for r in requests} == {9}
    assert requests[4].prompt.startswith(requests[3].prompt)


def test_the_same_settings_make_the_same_requests(build) -> None:
    assert build()[0] == build()[0]
    assert build()[0] != build(seed=1)[0]


def test_the_file_is_what_the_client_reads(build, tmp_path: Path) -> None:
    requests, _ = build(number=5)
    facts = write(requests, tmp_path / "chat.jsonl")
    read_back = pandas.read_json(tmp_path / "chat.jsonl", lines=True)  # as vLLM's client does
    assert list(read_back["prompt"]) == [r.prompt for r in requests]
    assert list(read_back["output_tokens"]) == [r.output_tokens for r in requests]
    assert facts["prompt_tokens"] == sum(r.prompt_tokens for r in requests)
    assert facts["requests"] == 5
