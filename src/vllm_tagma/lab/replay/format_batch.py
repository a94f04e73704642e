"""OpenAI's batch files, JSONL: the requests of one, or the responses to it.

A request (``custom_id``, ``url``, ``body``) has its prompt but not the length of its answer: the
limit that it set stands for that. A response (``custom_id``, ``response``) has both lengths but not
the prompt, so nothing is shared.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from vllm_tagma.lab.replay import json_records
from vllm_tagma.lab.replay.json_fields import FieldError, checked, integer, shown
from vllm_tagma.lab.replay.text_pieces import of_text, of_token_ids
from vllm_tagma.lab.replay.trace import BadLine, Piece, Reading, TraceRequest
from vllm_tagma.lab.replay.trace_source import Source

_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


def matches(entry: dict[str, Any]) -> bool:
    """True for a request or a response of a batch."""
    return "custom_id" in entry and ("body" in entry or "response" in entry)


def parse(source: Source, reading: Reading) -> Iterator[TraceRequest | BadLine]:
    """The requests and bad lines of a file, in order."""
    return json_records.convert(source, partial(_request, reading))


def _request(reading: Reading, entry: dict[str, Any], place: str, _: int) -> TraceRequest:
    if "response" in entry:
        prompt_tokens, output_tokens = _usage(entry)
        reading.note("has lengths but no prompts, so no prompt shares anything with another")
        return TraceRequest(
            place=place,
            prompt=(Piece(f"batch {place}", prompt_tokens),),
            output_tokens=output_tokens,
        )
    body = entry.get("body")
    if not isinstance(body, dict):
        raise FieldError("has no body; give the request as the API takes it")
    prompt = _prompt(body, entry.get("url"))
    name = next((name for name in _LIMITS if body.get(name) is not None), None)
    if name is None:
        raise FieldError(
            "sets no max_tokens, and nothing else tells how long the answer is; set it, or replay "
            "the batch's output file, which has the lengths"
        )
    limit = checked(body[name], name)
    reading.note("has no answers: each is taken to be as long as its request allows (max_tokens)")
    return TraceRequest(place=place, prompt=prompt, output_tokens=limit, max_tokens=limit)


def _usage(entry: dict[str, Any]) -> tuple[int, int]:
    response = entry["response"]
    if not isinstance(response, dict) or response.get("status_code", 200) != 200:
        error = entry.get("error") or response
        raise FieldError(f"failed ({shown(error)}); it is left out, send it again to have it")
    body = response.get("body")
    usage = body.get("usage") if isinstance(body, dict) else None
    if not isinstance(usage, dict):
        raise FieldError("has no response.body.usage, where the lengths stand; leave it out")
    # Chat and completions name them so, the responses API the other way.
    names = ("prompt_tokens", "completion_tokens")
    if names[0] not in usage and "input_tokens" in usage:
        names = ("input_tokens", "output_tokens")
    return integer(usage, names[0]), integer(usage, names[1])


def _prompt(body: dict[str, Any], url: object) -> tuple[Piece, ...]:
    messages = body.get("messages")
    prompt = body.get("prompt", body.get("input") if "responses" in str(url) else None)
    if isinstance(messages, list):
        prompt = "".join(f"{_role(message)}\n{_content(message)}\n" for message in messages)
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return of_token_ids(prompt)
    if not isinstance(prompt, str):
        raise FieldError(
            f"has no messages and no prompt of text or token ids (url {shown(url)}); only requests "
            f"that generate can be replayed: leave it out"
        )
    if not prompt:
        raise FieldError("has an empty prompt; leave it out")
    return of_text(prompt)


def _role(message: object) -> str:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str):
        raise FieldError(f"has a message without a role ({shown(message)}); add it")
    return role


def _content(message: dict[str, Any]) -> str:
    """The text of a message; of a list of parts, their texts."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            raise FieldError(
                f"has content that is no text ({shown(part)}), whose tokens cannot be known here; "
                f"leave the request out, or replay the batch's output file"
            )
        texts.append(text)
    return "".join(texts)
