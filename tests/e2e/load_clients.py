"""The clients of the load: chats, agents, long prompts, clients that hang up, aborts, resets.

Each client draws all it does from its own seed, so that its requests are the same in each run;
when they meet is not. Prompts are lists of token ids, built on what the server answered before.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from parallel_server import MAX_MODEL_LEN
from seeded_model import VOCABULARY

CLIENTS = 24
_SYSTEM_PROMPTS = 6
_KINDS = {"chat": 6, "agent": 3, "long": 2, "hang_up": 3, "abort": 2}


@dataclass
class Answer:
    """A finished request: what was asked and every token of the answer."""

    prompt: list[int]
    tokens: list[int]
    kind: str


@dataclass
class Seen:
    """What the clients saw. ``samples``: a fair draw of at most ``most_samples`` answers."""

    most_samples: int
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    seconds: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    samples: list[Answer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._finished = 0

    def finished(self, answer: Answer, seconds: float) -> None:
        """Count an answer and perhaps keep it, each with the same chance."""
        self.counts[answer.kind] += 1
        self.tokens += len(answer.tokens)
        self.seconds.append(seconds)
        self._finished += 1
        if len(self.samples) < self.most_samples:
            self.samples.append(answer)
        elif (at := self._random.randrange(self._finished)) < self.most_samples:
            self.samples[at] = answer


def body_of(prompt: list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
    """A greedy completion that never ends early."""
    return {
        "model": "model",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }


def words(draw: random.Random, count: int) -> list[int]:
    """Random token ids, none of them special."""
    return [draw.randrange(3, VOCABULARY) for _ in range(count)]


class Client:
    """One client: conversations one after another until the time is over."""

    def __init__(
        self,
        number: int,
        seed: int,
        session: aiohttp.ClientSession,
        seen: Seen,
        over: Callable[[], bool],
    ) -> None:
        self._draw = random.Random(f"{seed}/{number}")
        self._number = number
        self._session = session
        self._seen = seen
        self._over = over
        shared = random.Random(f"{seed}/prompts")
        self._systems = [words(shared, shared.randint(60, 420)) for _ in range(_SYSTEM_PROMPTS)]
        self._tools = words(shared, 600)
        self._requests = 0

    async def run(self) -> None:
        """Until the time is over; what goes wrong is noted, and the client goes on."""
        while not self._over():
            (kind,) = self._draw.choices(list(_KINDS), list(_KINDS.values()))
            try:
                await getattr(self, f"_{kind}")()
            except (TimeoutError, aiohttp.ClientError, KeyError, ValueError) as error:
                self._seen.errors.append(f"{kind}: {type(error).__name__}: {error}")
                if len(self._seen.errors) > 50:
                    return
                await asyncio.sleep(0.5)

    async def _chat(self) -> None:
        draw = self._draw
        history = list(draw.choice(self._systems))
        for _ in range(draw.randint(1, 5)):
            history += words(draw, draw.randint(10, 80))
            history += await self._ask("chat", history, draw.randint(16, 110))
            if self._over() or len(history) > MAX_MODEL_LEN - 300:
                return
            await asyncio.sleep(draw.random() * 0.3)

    async def _agent(self) -> None:
        draw = self._draw
        history = self._tools + words(draw, 30)
        for _ in range(draw.randint(4, 10)):
            history += await self._ask("agent", history, draw.randint(6, 24))
            history += words(draw, draw.randint(40, 140))  # what a tool returned
            if self._over() or len(history) > MAX_MODEL_LEN - 300:
                return

    async def _long(self) -> None:
        draw = self._draw
        await self._ask("long", words(draw, draw.randint(700, 1700)), draw.randint(4, 60))

    async def _hang_up(self) -> None:
        """Reads some tokens of a stream, or none, and closes the connection."""
        draw = self._draw
        prompt = draw.choice(self._systems) + words(draw, draw.randint(5, 300))
        chunks, wait = draw.choice((0, 0, 1, 3, 10, 25)), draw.random() * 0.3
        response = await self._post(body_of(prompt, 120, stream=True, priority=draw.randint(0, 3)))
        try:
            response.raise_for_status()
            if not chunks:
                await asyncio.sleep(wait)
            while chunks and await response.content.readline():
                chunks -= 1
        finally:
            response.close()
        self._seen.counts["hang_up"] += 1

    async def _abort(self) -> None:
        """Hangs up on an answer that is not streamed, or has the server abort the request."""
        draw = self._draw
        prompt = words(draw, draw.randint(20, 900))
        name = f"abort-{self._number}-{self._requests}"
        self._requests += 1
        wait, hang_up = draw.random() * 0.6, draw.random() < 0.5
        body = body_of(prompt, 150, request_id=name, priority=draw.randint(0, 3))
        task = asyncio.create_task(self._post(body))
        await asyncio.sleep(wait)
        if hang_up:
            task.cancel()
        else:
            ids = {"request_ids": [f"cmpl-{name}-0"]}
            async with self._session.post("/abort_requests", json=ids) as response:
                response.raise_for_status()
        results = await asyncio.gather(task, return_exceptions=True)
        for result in results:
            if isinstance(result, aiohttp.ClientResponse):
                result.close()
        self._seen.counts["abort"] += 1

    async def _ask(self, kind: str, prompt: list[int], max_tokens: int) -> list[int]:
        stream, priority = self._draw.random() < 0.5, self._draw.randint(0, 3)
        began = time.monotonic()
        prompt = list(prompt)
        response = await self._post(body_of(prompt, max_tokens, stream=stream, priority=priority))
        async with response:
            response.raise_for_status()
            tokens = await (_streamed(response) if stream else _whole(response))
        if len(tokens) != max_tokens:
            raise ValueError(f"{len(tokens)} tokens instead of {max_tokens}")
        self._seen.finished(Answer(prompt, tokens, kind), time.monotonic() - began)
        return tokens

    async def _post(self, body: dict[str, Any]) -> aiohttp.ClientResponse:
        return await self._session.post("/v1/completions", json=body)


async def _whole(response: aiohttp.ClientResponse) -> list[int]:
    return list((await response.json())["choices"][0]["token_ids"])


async def _streamed(response: aiohttp.ClientResponse) -> list[int]:
    tokens: list[int] = []
    async for line in response.content:
        data = line.decode().removeprefix("data: ").strip()
        if data and data != "[DONE]":
            for choice in json.loads(data)["choices"]:
                tokens += choice.get("token_ids") or []
    return tokens


async def resets(
    session: aiohttp.ClientSession, seed: int, every: float, seen: Seen, over: Callable[[], bool]
) -> None:
    """Empty the prefix cache now and then, every other time under running requests."""
    draw = random.Random(f"{seed}/resets")
    while not over():
        await asyncio.sleep(every * (0.5 + draw.random()))
        running = draw.random() < 0.5
        query = f"/reset_prefix_cache?reset_running_requests={'true' if running else 'false'}"
        async with session.post(query) as response:
            response.raise_for_status()
            success = (await response.json())["success"]
        name = "reset_running" if running else "reset_idle" if success else "reset_refused"
        seen.counts[name] += 1
