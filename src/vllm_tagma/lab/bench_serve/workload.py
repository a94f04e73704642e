"""From conversations to the requests of each stage, written as JSON Lines for vLLM's client.

Two kinds of load, both from the same conversations:

- ``chat``: independent requests of mixed length. A request's context is drawn log-uniformly between
  the least and the most prompt tokens and filled with whole turns of consecutive conversations, as
  ShareGPT's own are far shorter than 16K. Its output is as long as the recorded answer. The first
  line is the request's own, so that no two share a prefix block.
- ``turns``: conversations of several turns behind one shared system prompt, and older talk of their
  own if wanted, so that turns are asked at long contexts too. Turn k + 1 repeats turn
  k with the *recorded* answer, not the one just generated, so that both backends are sent the same
  requests. All first turns come first, then all second turns: with fewer requests in flight than
  conversations, a turn arrives after the one before it has been computed.

vLLM's repository has a multi-turn client of its own, but its wheel does not.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_tagma.lab.bench_serve.dataset import DatasetError, Turn
from vllm_tagma.lab.bench_serve.model import folder_of
from vllm_tagma.lab.bench_serve.serve_plan import OUTPUTS, Stage
from vllm_tagma.lab.bench_serve.serve_settings import Settings

Count = Callable[[str], int]
"""Tokens of a text, by the model's tokenizer."""

_LABELS = {True: "User: ", False: "Assistant: "}
_ANSWER = "Assistant:"
_MIN_OUTPUT = 4
_JOIN = 1  # token that a part may take beyond its own when another follows it
_FULL = 0.9  # of the context that was drawn; one more turn would rarely fit
_FRUITLESS = 20  # conversations in a row whose first question does not fit
_RULES = (
    "Answer in the language of the question.",
    "Keep to what was asked and name what you are not sure of.",
    "Give numbers with their units.",
    "Prefer short sentences to long ones.",
    "If a question can be read in two ways, say which one you answer.",
    "Do not repeat the question.",
    "List steps in the order in which they are taken.",
    "When something cannot be known from the conversation, say so.",
)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request: its prompt, the tokens of it, and the tokens to generate."""

    prompt: str
    prompt_tokens: int
    output_tokens: int


class Builder:
    """Makes the requests of stages; the same settings and conversations make the same requests."""

    def __init__(
        self, settings: Settings, conversations: Sequence[list[Turn]], *, count: Count
    ) -> None:
        self.settings = settings
        self._count = count
        self._lengths: dict[str, int] = {}
        order = list(conversations)
        random.Random(settings.seed).shuffle(order)
        self._conversations = order
        self._next = 0

    def stage(self, stage: Stage) -> list[Request]:
        """The requests of a stage, in the order they are sent. Raises DatasetError."""
        settings = self.settings
        if stage.kind == "turns":
            return self._turns(stage.name, stage.num_requests, max_output=settings.max_output)
        if stage.kind == OUTPUTS:
            # Half of each: compared answers should come from prefix hits as well.
            chats = stage.num_requests // 2
            limit = settings.output_tokens
            requests = self._chats(stage.name, chats, max_output=limit, least_output=limit)
            rest = self._turns(
                stage.name, stage.num_requests - chats, max_output=limit, least_output=limit
            )
            return requests + rest
        return self._chats(stage.name, stage.num_requests, max_output=settings.max_output)

    def _chats(
        self, stage: str, number: int, *, max_output: int, least_output: int = _MIN_OUTPUT
    ) -> list[Request]:
        low, high = self.settings.min_context, self.settings.max_context
        requests = []
        for index in range(number):
            chance = random.Random(f"{self.settings.seed}/{stage}/{index}")
            target = round(math.exp(chance.uniform(math.log(low), math.log(high))))
            head = f"Transcript {index} of {stage}.\n\n"
            parts, answer = self._fill(head, target)
            requests.append(
                self._request(
                    parts, answer=answer, max_output=max_output, least_output=least_output
                )
            )
        return requests

    def _fill(self, head: str, target: int) -> tuple[list[str], str]:
        """Whole turns up to ``target`` tokens, ending with the user's, and the recorded answer.

        A turn that alone is longer than the room left ends its conversation here.
        """
        parts, answer = [head], ""
        used = self._cost(head) + self._cost(_ANSWER)
        fruitless = 0
        while fruitless < _FRUITLESS and not (answer and used >= target * _FULL):
            pending: list[str] = []
            fruitless += 1
            for turn, following in self._exchanges():
                text = _say(turn)
                need = sum(map(self._cost, pending)) + self._cost(text)
                if used + need > target:
                    break
                parts += [*pending, text]
                used += need
                pending, answer = [_say(following)], following.text
                fruitless = 0
        if not answer:
            # A short target and long questions: the start of one is a question as well.
            turn, following = next(iter(self._exchanges()))
            words = turn.text.split()
            low, high = 1, len(words)
            while low < high:  # the most words that fit
                middle = (low + high + 1) // 2
                fits = (
                    used + self._count(_say(Turn(True, " ".join(words[:middle])))) + _JOIN <= target
                )
                low, high = (middle, high) if fits else (low, middle - 1)
            parts.append(_say(Turn(True, " ".join(words[:low]))))
            answer = following.text
        return parts, answer

    def _exchanges(self) -> Iterator[tuple[Turn, Turn]]:
        """Questions and answers of the next conversation."""
        turns = self._conversations[self._next % len(self._conversations)]
        self._next += 1
        return zip(turns[::2], turns[1::2], strict=False)

    def _turns(
        self, stage: str, number: int, *, max_output: int, least_output: int = _MIN_OUTPUT
    ) -> list[Request]:
        if not number:
            return []
        per_conversation = min(self.settings.turns, number)
        conversations = [
            self._conversation(
                stage, index, per_conversation, max_output=max_output, least_output=least_output
            )
            for index in range(-(-number // per_conversation))
        ]
        by_turn = [
            conversation[turn] for turn in range(per_conversation) for conversation in conversations
        ]
        return by_turn[:number]

    def _conversation(
        self, stage: str, index: int, turns: int, *, max_output: int, least_output: int
    ) -> list[Request]:
        """The requests of one conversation: each a prefix of the next."""
        parts = [self._system(stage), f"Conversation {index}.\n\n"]
        if self.settings.history_tokens:
            history, answer_then = self._fill("", self.settings.history_tokens)
            parts += [*history, _say(Turn(False, answer_then))]
        used = sum(map(self._cost, parts)) + self._cost(_ANSWER)
        requests: list[Request] = []
        tried = 0
        while len(requests) < turns:
            if tried > _FRUITLESS:
                raise DatasetError(
                    f"no conversation is short enough for {turns} turns within --max-context "
                    f"{self.settings.max_context}: raise it, or lower --turns, --system-tokens or "
                    "--history-tokens"
                )
            tried += 1
            for question, answer in self._exchanges():
                text, reply = _say(question), _say(answer)
                used_then = used + self._cost(text)
                if len(requests) == turns or used_then > self.settings.max_context:
                    break
                parts.append(text)
                requests.append(
                    self._request(
                        parts,
                        answer=answer.text,
                        max_output=max_output,
                        least_output=least_output,
                    )
                )
                parts.append(reply)
                used = used_then + self._cost(reply)
                tried = 0
        return requests

    def _system(self, stage: str) -> str:
        """About ``system_tokens`` tokens of instructions, the same for a whole stage."""
        text = f"Instructions for {stage}.\n"
        number = 0
        while self._length(text) < self.settings.system_tokens:
            text += f"{number + 1}. {_RULES[number % len(_RULES)]}\n"
            number += 1
        return text + "\n"

    def _request(
        self, parts: Sequence[str], *, answer: str, max_output: int, least_output: int
    ) -> Request:
        prompt = "".join(parts) + _ANSWER
        tokens = self._count(prompt)
        if tokens > self.settings.max_context:
            raise DatasetError(
                f"a prompt came out at {tokens} tokens, above --max-context "
                f"{self.settings.max_context}: raise it, or lower --system-tokens or --turns"
            )
        room = self.settings.max_model_len - tokens
        output = min(max(self._length(answer), least_output), max_output, room)
        return Request(prompt=prompt, prompt_tokens=tokens, output_tokens=max(output, 1))

    def _length(self, text: str) -> int:
        length = self._lengths.get(text)
        if length is None:
            length = self._lengths[text] = self._count(text)
        return length

    def _cost(self, text: str) -> int:
        """Tokens that a part takes inside a prompt: blank lines are split where text follows."""
        return self._length(text) + _JOIN


def _say(turn: Turn) -> str:
    return f"{_LABELS[turn.is_human]}{turn.text.strip()}\n\n"


def tokenizer_of(model: str) -> Count:
    """Counts tokens as the model's tokenizer does.

    Reads ``tokenizer.json`` where there is one; only other tokenizers need transformers, whose
    import takes seconds.
    """
    folder = folder_of(model)
    if folder is not None and (folder / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        fast = Tokenizer.from_file(str(folder / "tokenizer.json"))
        return lambda text: len(fast.encode(text).ids)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
    return lambda text: len(tokenizer(text).input_ids)


def write(requests: Sequence[Request], path: Path) -> dict[str, Any]:
    """Writes the file that vLLM's client reads, whole or not at all; returns what it holds."""
    lines = [
        json.dumps({"prompt": r.prompt, "output_tokens": r.output_tokens}, ensure_ascii=False)
        for r in requests
    ]
    data = ("\n".join(lines) + "\n").encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(data)
    os.replace(partial, path)
    prompts = sorted(r.prompt_tokens for r in requests)
    return {
        "file": path.name,
        "sha256": hashlib.sha256(data).hexdigest(),
        "requests": len(requests),
        "prompt_tokens": sum(prompts),
        "prompt_tokens_least": prompts[0],
        "prompt_tokens_median": prompts[len(prompts) // 2],
        "prompt_tokens_most": prompts[-1],
        "output_tokens": sum(r.output_tokens for r in requests),
    }
