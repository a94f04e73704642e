"""Generated loads: multi-turn chats, agents with tools, and a mixture. Stress tests, not evidence.

Nothing here is taken from measured traffic; the shapes are stated so that they can be judged. All
randomness of a replay is in this file and comes from the seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from vllm_tagma.lab.replay.trace import Piece, Trace, TraceRequest

DEFAULT_REQUESTS = 4000

ARRIVALS_PER_SECOND = 20.0
"""Only for ``--arrivals trace``: requests come at random times at this mean rate."""

MIXED_REQUESTS = 400
MIXED_RUNNING = 16
"""Of the trace that ships with tagma: it is small, and so is the set that runs at once."""

_CHAT_TURN_TOKENS = (100, 220)  # message and answer: 20 blocks of 16 tokens together
_CHAT_TURNS = 8
_CHAT_SYSTEMS = (96, 160, 240)
_AGENT_SYSTEMS = (3200, 5600, 7900)
_AGENT_TASK_TOKENS = 400
_AGENT_TURN_TOKENS = (80, 600)  # call of a tool and its result
_AGENT_TURNS = 10
_LONG_PROMPT_TOKENS = 12_000
_LONG_OUTPUT_TOKENS = 250


def generate(kind: str, *, requests: int, running: int, seed: int) -> Trace:
    """The first ``requests`` requests of a load. ``running``: requests that run at once, which sets
    how many conversations are open. The same arguments give the same requests."""
    # A seed of its own for each load: the shapes would else be correlated.
    source = _LOADS[kind](random.Random(f"{kind} {seed}"), running)
    return Trace(name=f"{kind} load", kind="generated", requests=list(islice(source, requests)))


@dataclass
class _Conversation:
    """What has been said; the next request's prompt is all of it and one message more."""

    name: str
    history: list[Piece]
    turns_left: int
    turn: int = 0
    last: int | None = None
    """Index of the request of its latest turn."""


def _chat(rng: random.Random, running: int) -> Iterator[TraceRequest]:
    """Conversations of about eight turns, three times as many open as run; users take their time,
    so a conversation's next turn comes when many others had theirs."""
    return _conversations(
        rng,
        open_at_once=3 * running,
        begin=lambda number: _chat_begins(rng, f"c{number}"),
        turn_tokens=_CHAT_TURN_TOKENS,
    )


def _agent(rng: random.Random, running: int) -> Iterator[TraceRequest]:
    """Tasks of about ten tool calls over one of three long system prompts; tools answer soon, so
    few more tasks are open than run."""
    return _conversations(
        rng,
        open_at_once=running + running // 2,
        begin=lambda number: _agent_begins(rng, f"a{number}"),
        turn_tokens=_AGENT_TURN_TOKENS[::-1],
    )


def _chat_begins(rng: random.Random, name: str) -> _Conversation:
    system = rng.randrange(len(_CHAT_SYSTEMS))
    return _Conversation(
        name=name,
        history=[Piece(f"chat-system-{system}", _CHAT_SYSTEMS[system])],
        turns_left=_turns(rng, _CHAT_TURNS),
    )


def _agent_begins(rng: random.Random, name: str) -> _Conversation:
    system = rng.randrange(len(_AGENT_SYSTEMS))
    task = Piece(f"{name}task", _length(rng, _AGENT_TASK_TOKENS))
    return _Conversation(
        name=name,
        history=[Piece(f"agent-system-{system}", _AGENT_SYSTEMS[system]), task],
        turns_left=_turns(rng, _AGENT_TURNS),
    )


def _conversations(
    rng: random.Random,
    *,
    open_at_once: int,
    begin: Callable[[int], _Conversation],
    turn_tokens: tuple[int, int],
) -> Iterator[TraceRequest]:
    """Requests without end: each is the next turn of a conversation drawn at random."""
    begun = open_at_once
    conversations = [begin(number) for number in range(open_at_once)]
    clock = 0.0
    count = 0
    while True:
        drawn = rng.randrange(open_at_once)
        conversation = conversations[drawn]
        clock += rng.expovariate(ARRIVALS_PER_SECOND)
        yield _next_turn(rng, conversation, turn_tokens, arrival=clock, index=count)
        count += 1
        if not conversation.turns_left:
            conversations[drawn] = begin(begun)
            begun += 1


def _next_turn(
    rng: random.Random,
    conversation: _Conversation,
    turn_tokens: tuple[int, int],
    *,
    arrival: float,
    index: int,
) -> TraceRequest:
    """The request of a conversation's next turn, which is then part of its history. ``index``: the
    request's own."""
    conversation.turn += 1
    conversation.turns_left -= 1
    asked, answered = (_length(rng, mean) for mean in turn_tokens)
    name = f"{conversation.name}.{conversation.turn}"
    conversation.history.append(Piece(f"{name}?", asked))
    request = TraceRequest(
        place=f"request {index}",
        prompt=tuple(conversation.history),
        output_tokens=answered,
        arrival=round(arrival, 3),
        output=name,
        after=conversation.last,
    )
    conversation.history.append(Piece(name, answered))
    conversation.last = index
    return request


def _mixed(rng: random.Random, running: int) -> Iterator[TraceRequest]:
    """Chats, agents and long prompts in turn at random; some with limits, a few aborted."""
    chats = [_chat_begins(rng, f"c{number}") for number in range(2 * running)]
    agents = [_agent_begins(rng, f"a{number}") for number in range(running)]
    clock = 0.0
    count = 0
    while True:
        clock += rng.expovariate(ARRIVALS_PER_SECOND)
        drawn = rng.random()
        if drawn < 0.15:
            yield _long_prompt(rng, arrival=clock, index=count)
        else:
            pool, turn_tokens, begin = (
                (chats, _CHAT_TURN_TOKENS, _chat_begins)
                if drawn < 0.6
                else (agents, _AGENT_TURN_TOKENS[::-1], _agent_begins)
            )
            place = rng.randrange(len(pool))
            yield _next_turn(rng, pool[place], turn_tokens, arrival=clock, index=count)
            if not pool[place].turns_left:
                pool[place] = begin(rng, f"{pool[place].name[0]}{2 * running + count}")
        count += 1


def _long_prompt(rng: random.Random, *, arrival: float, index: int) -> TraceRequest:
    output = _length(rng, _LONG_OUTPUT_TOKENS)
    return TraceRequest(
        place=f"request {index}",
        prompt=(Piece(f"long{index}", _length(rng, _LONG_PROMPT_TOKENS)),),
        output_tokens=output,
        arrival=round(arrival, 3),
        max_tokens=2 * output if rng.random() < 0.5 else None,
        abort_after=output // 3 if rng.random() < 0.15 and output > 3 else None,
    )


def _length(rng: random.Random, mean: int) -> int:
    """A length with a long tail: log-normal of this mean, at most six times it."""
    sigma = 0.7
    value = rng.lognormvariate(0.0, sigma) / math.exp(sigma * sigma / 2)
    return max(1, min(6 * mean, round(mean * value)))


def _turns(rng: random.Random, mean: int) -> int:
    """At least one, geometric with this mean, at most five times it."""
    return 1 + min(5 * mean, int(rng.expovariate(1.0 / (mean - 0.5))))


_LOADS: dict[str, Callable[[random.Random, int], Iterator[TraceRequest]]] = {
    "chat": _chat,
    "agent": _agent,
    "mixed": _mixed,
}
