"""Conversations and batches: ShareGPT, LMSYS, WildChat, OpenAI's messages and batch files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from trace_samples import BATCH, BATCH_OUTPUT, LMSYS, SHAREGPT, chat, lines

from vllm_tagma.lab.replay import formats
from vllm_tagma.lab.replay.text_pieces import of_text, of_token_ids, tokens_of

if TYPE_CHECKING:
    from conftest import Write

SAID = ("What is it?", "A test.", "And now?", "Still a test.")


def test_all_exports_say_the_same(write: Write) -> None:
    """The same conversation in each layout gives the same requests, but for the senders' names."""
    openai = {"names": ("user", "assistant"), "sender": "role", "text": "content"}
    human = {"names": ("human", "gpt"), "sender": "from", "text": "value"}
    wildchat = [
        {**message, "timestamp": None, "toxic": False, "turn_identifier": 7}
        for message in chat(*SAID, **openai)
    ]
    shapes: list[list[tuple[int, int, int | None]]] = []
    for entry in (
        {"id": "x", "conversations": chat(*SAID, **human)},
        {"conversation_id": "x", "model": "m", "conversation": chat(*SAID, **openai)},
        {"conversation_hash": "x", "timestamp": "2023-04-09T00:00:32", "conversation": wildchat},
        {"messages": chat(*SAID, **openai)},
    ):
        for text in (json.dumps([entry]), lines(entry), json.dumps(entry, indent=2)):
            trace = formats.read(write(text), strict=True)
            assert trace.kind == "sharegpt"
            first, second = trace.requests
            assert second.prompt[: len(first.prompt)] == first.prompt
            assert second.prompt[1].content == first.output
            shapes.append([(r.prompt_tokens, r.output_tokens, r.after) for r in trace.requests])
    assert shapes[0] == [(3, 2, None), (7, 4, 0)]
    assert all(shape == shapes[0] for shape in shapes)


def test_a_turn_comes_after_its_own_conversation(write: Write) -> None:
    trace = formats.read(write(lines(SHAREGPT, LMSYS, SHAREGPT)), strict=True)
    assert [request.after for request in trace.requests] == [None, 0, None, None, 3]
    assert trace.requests[4].place == "line 3, answer 2"


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"conversation": []}, "has no list of conversations; remove it"),
        ({"conversation": ["hi"]}, "message 1 is no object"),
        ({"conversation": [{"role": "user", "content": None}]}, "message 1 lacks 'from' or 'val"),
        ({"conversation": [{"role": "user", "content": "hi"}]}, "has no answer of the model"),
    ],
)
def test_bad_conversations(write: Write, entry: dict[str, Any], reason: str) -> None:
    trace = formats.read(write(lines(LMSYS, entry)))
    assert len(trace.requests) == 1
    assert trace.bad[0].place == "line 2"
    assert reason in trace.bad[0].reason


def test_batch_requests_share_what_their_messages_share(write: Write) -> None:
    def request(system: str, user: str) -> dict[str, Any]:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        return {**BATCH, "body": {"messages": messages, "max_completion_tokens": 30}}

    system = "You are terse. " * 40
    trace = formats.read(write(lines(request(system, "One?"), request(system, "Two?"))))
    assert trace.kind == "openai-batch"
    first, second = trace.requests
    shared = sum(a == b for a, b in zip(first.prompt, second.prompt, strict=True))
    assert 0 < shared == len(first.prompt) - 1
    assert first.prompt_tokens == tokens_of(f"system\n{system}\nuser\nOne?\n")
    assert (first.output_tokens, first.max_tokens) == (30, 30)
    assert "each is taken to be as long as its request allows" in trace.notes[0]


def test_other_batch_requests(write: Write) -> None:
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": " there"}]
    bodies: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": parts}], "max_tokens": 3},
        {"prompt": "user\nHi there\n", "max_tokens": 3},
        {"prompt": [7] * 20, "max_tokens": 3},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None}]}
        | {"max_tokens": 3},
    ]
    trace = formats.read(write(lines(*({**BATCH, "body": body} for body in bodies))), strict=True)
    first, second, third, _ = trace.requests
    assert first.prompt == second.prompt
    assert third.prompt == of_token_ids([7] * 20)
    assert [piece.tokens for piece in third.prompt] == [16, 4]


def test_batch_output_has_the_lengths(write: Write) -> None:
    usage = {"input_tokens": 40, "output_tokens": 2}
    responses = {**BATCH_OUTPUT, "response": {"status_code": 200, "body": {"usage": usage}}}
    trace = formats.read(write(lines(BATCH_OUTPUT, responses)), strict=True)
    assert [(r.prompt_tokens, r.output_tokens) for r in trace.requests] == [(31, 12), (40, 2)]
    assert "no prompt shares anything" in trace.notes[0]


IMAGE = [{"type": "image_url", "image_url": {"url": "data:" + "A" * 10_000}}]


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({**BATCH, "body": None}, "has no body"),
        ({**BATCH, "body": {"messages": [{"role": "user", "content": "Hi"}]}}, "no max_tokens, an"),
        (
            {**BATCH, "body": {"input": "Hi"}, "url": "/v1/embeddings"},
            "only requests that generate",
        ),
        ({**BATCH, "body": {"prompt": ""}}, "has an empty prompt"),
        ({**BATCH, "body": {"messages": [{"content": "Hi"}]}}, "has a message without a role"),
        (
            {**BATCH, "body": {"messages": [{"role": "user", "content": IMAGE}], "max_tokens": 5}},
            "has content that is no text ({'image_url': {'url': 'data:AAA",
        ),
        ({**BATCH, "body": {"prompt": "a", "max_tokens": 0}}, "max_tokens is 0, not between 1 and"),
        ({"custom_id": "a", "response": None, "error": {"code": "x"}}, "failed ({'code': 'x'})"),
        ({"custom_id": "a", "response": {"status_code": 429}}, "failed ({'status_code': 429})"),
        ({"custom_id": "a", "response": {"body": {}}}, "has no response.body.usage"),
        ({"custom_id": "a", "response": {"body": {"usage": {}}}}, "prompt_tokens is missing"),
    ],
)
def test_bad_batch_lines(write: Write, entry: dict[str, Any], reason: str) -> None:
    trace = formats.read(write(lines(BATCH, entry, BATCH_OUTPUT)))
    assert [request.place for request in trace.requests] == ["line 1", "line 3"]
    assert trace.bad[0].place == "line 2"
    assert reason in trace.bad[0].reason
    assert len(trace.bad[0].reason) < 300


def test_texts_share_the_beginning_that_they_have_in_common() -> None:
    first, second = of_text("x" * 1000), of_text("x" * 500 + "y" * 500)
    assert sum(piece.tokens for piece in first) == 250
    assert sum(a == b for a, b in zip(first, second, strict=True)) == 7  # of 64 bytes each
    assert tokens_of("\ud800") == 1  # half of a surrogate pair, which JSON can write
    assert of_text("") == ()
