"""The manager scenarios: ``TagmaKVCacheManager`` against vLLM's ``KVCacheManager``, interleaved.

Both see requests with equal tokens, hashes and states; each has a pool and requests of its own. A
case is one scenario on one manager: it builds its state once and measures rounds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from vllm_tagma.lab.bench.bench_plan import Effort, Planned
from vllm_tagma.lab.bench.bench_timing import BenchError, Measure, Sample, timed_calls
from vllm_tagma.lab.bench.schema import OURS

if TYPE_CHECKING:
    from vllm.v1.request import Request

STOCK = "vllm"
GROUP = "manager"

RUNNING = (64, 256, 512)
PROMPTS = {"1k": 1_024, "16k": 16_384, "128k": 131_072}

Case = Callable[[str, int], Measure]
"""Builds the state of one scenario for a variant and returns its measure."""


def manager_scenarios(effort: Effort) -> list[Planned]:
    """All manager scenarios, cheapest first."""
    plans = [
        _plan(
            f"decode_allocate/{running}",
            f"allocate_slots, one decode token, {running} running",
            iterations=effort.calls(64),
            case=functools.partial(_decode, running),
            target=8.0,
            note=(
                "An iteration is one step over all running requests, ns are per request; a new "
                "block is needed every 16 steps."
            ),
        )
        for running in RUNNING
    ]
    for label, tokens in PROMPTS.items():
        many = max(1, 65_536 // tokens)
        plans += [
            _plan(
                f"lookup_hit/{label}",
                f"get_computed_blocks, {label} prompt, full hit, first look",
                iterations=effort.calls(2 * many),
                case=functools.partial(_lookup, tokens, True, True),
                target=50.0 if label == "128k" else None,
                note="Hashes in objects that no look-up has seen, as of a prompt that arrives.",
            ),
            _plan(
                f"lookup_hit_retry/{label}",
                f"get_computed_blocks, {label} prompt, full hit, retry",
                iterations=effort.calls(2 * many),
                case=functools.partial(_lookup, tokens, True, False),
                note="The scheduler looks up again in every step until it admits the request.",
            ),
            _plan(
                f"lookup_miss/{label}",
                f"get_computed_blocks, {label} prompt, no hit",
                iterations=effort.calls(512),
                case=functools.partial(_lookup, tokens, False, False),
            ),
            _plan(
                f"allocate_publish/{label}",
                f"allocate_slots of a {label} prompt, every block published",
                iterations=effort.calls(max(2, many // 2)),
                case=functools.partial(_allocate, tokens),
                target=30.0 if label == "128k" else None,
            ),
            _plan(
                f"free/{label}",
                f"free of a {label} prompt, its blocks stay cached",
                iterations=effort.calls(max(2, many // 2)),
                case=functools.partial(_free, tokens),
                target=20.0 if label == "128k" else None,
            ),
            _plan(
                f"get_block_ids/{label}",
                f"get_block_ids of a {label} prompt",
                iterations=effort.calls(4 * many),
                case=functools.partial(_block_ids, tokens),
                note="Both make one Python int a block: vLLM's message to the worker wants a list.",
            ),
        ]
    plans.append(
        _plan(
            "allocate_evicting/16k",
            "allocate_slots of a 16k prompt, evicting as many cached blocks",
            iterations=effort.calls(3),
            case=functools.partial(_allocate_evicting, PROMPTS["16k"]),
            note="A server that has run for a while: no block is free but by eviction.",
        )
    )
    return plans


def _plan(
    name: str,
    title: str,
    *,
    iterations: int,
    case: Case,
    target: float | None = None,
    note: str = "",
) -> Planned:
    return Planned(
        name=f"{GROUP}/{name}",
        group=GROUP,
        title=title,
        iterations=iterations,
        baseline=STOCK,
        target=target,
        note=note,
        open=functools.partial(_open, case, iterations),
    )


@contextmanager
def _open(case: Case, iterations: int) -> Iterator[dict[str, Measure]]:
    yield {variant: case(variant, iterations) for variant in (OURS, STOCK)}


def _prompt(name: str, tokens: int, seed: int) -> Request:
    from vllm_tagma.lab.bench import bench_requests

    return bench_requests.make_request(name, bench_requests.random_tokens(tokens, seed))


def _decode(running: int, variant: str, iterations: int) -> Measure:
    """Steps of a batch in which every request appends one token."""
    from vllm_tagma.lab.bench import bench_requests

    manager = bench_requests.make_manager(variant)
    batch = [_prompt(f"r{i}", 1_000 + i % 16, seed=i) for i in range(running)]
    for request in batch:
        bench_requests.admit(manager, request)

    def step() -> int:
        for request in batch:
            request.append_output_token_ids(7)
        manager.new_step_starts()
        begin = perf_counter_ns()
        for request in batch:
            manager.allocate_slots(request, 1, num_lookahead_tokens=0)
        spent = perf_counter_ns() - begin
        manager.take_new_block_ids()
        for request in batch:
            request.num_computed_tokens += 1
        return spent

    def measure() -> Sample:
        step()
        total = sum(step() for _ in range(iterations))
        if batch[0].num_tokens > 2_500:  # keep rows and pool near their first size
            bench_requests.release(manager, batch)
            batch[:] = [_prompt(f"r{i}", 1_000 + i % 16, seed=i) for i in range(running)]
            for request in batch:
                bench_requests.admit(manager, request)
        return Sample(value=total / (iterations * running))

    return measure


def _lookup(tokens: int, hit: bool, fresh: bool, variant: str, iterations: int) -> Measure:
    """Look-ups of a prompt that another request has published, or nobody has."""
    from vllm_tagma.lab.bench import bench_requests

    manager = bench_requests.make_manager(variant)
    bench_requests.admit(manager, _prompt("cached", tokens + 1, seed=1))
    request = _prompt("asks", tokens + 1, seed=1 if hit else 2)
    expected = tokens if hit else 0
    found = manager.get_computed_blocks(request)[1]
    if found != expected:
        raise BenchError(f"{variant} found {found} cached tokens of {tokens}, not {expected}")

    def prepare() -> None:
        bench_requests.fresh_hashes(request)

    def call() -> object:
        return manager.get_computed_blocks(request)

    return functools.partial(
        timed_calls, call, iterations=iterations, prepare=prepare if fresh else None
    )


def _allocate(tokens: int, variant: str, iterations: int) -> Measure:
    """Allocation of a whole prompt that nothing in the cache matches, into an empty pool."""
    from vllm_tagma.lab.bench import bench_requests

    manager = bench_requests.make_manager(variant)
    request = _prompt("grows", tokens, seed=3)

    def prepare() -> None:
        bench_requests.fresh_hashes(request)

    def call() -> object:
        return manager.allocate_slots(request, tokens)

    def finish() -> None:
        bench_requests.release(manager, [request])

    return functools.partial(
        timed_calls, call, iterations=iterations, prepare=prepare, finish=finish
    )


def _allocate_evicting(tokens: int, variant: str, iterations: int) -> Measure:
    """The same in a pool whose every block is cached, so that each new block evicts one."""
    from vllm_tagma.lab.bench import bench_requests

    blocks = 4 * tokens // bench_requests.BLOCK_SIZE
    manager = bench_requests.make_manager(variant, num_blocks=blocks + 1)
    prompts = [_prompt(f"r{i}", tokens, seed=10 + i) for i in range(8)]
    turn = 0
    for request in prompts[:4]:
        bench_requests.admit(manager, request)
        manager.free(request)

    def prepare() -> None:
        nonlocal turn
        turn += 1
        bench_requests.fresh_hashes(prompts[(turn + 3) % 8])

    def call() -> object:
        return manager.allocate_slots(prompts[(turn + 3) % 8], tokens)

    def finish() -> None:
        manager.free(prompts[(turn + 3) % 8])

    return functools.partial(
        timed_calls, call, iterations=iterations, prepare=prepare, finish=finish
    )


def _free(tokens: int, variant: str, iterations: int) -> Measure:
    """The last reference to a published prompt goes."""
    from vllm_tagma.lab.bench import bench_requests

    manager = bench_requests.make_manager(variant)
    request = _prompt("ends", tokens, seed=4)

    def prepare() -> None:
        bench_requests.admit(manager, request)

    def call() -> object:
        return manager.free(request)

    def finish() -> None:
        manager.reset_prefix_cache()

    return functools.partial(
        timed_calls, call, iterations=iterations, prepare=prepare, finish=finish
    )


def _block_ids(tokens: int, variant: str, iterations: int) -> Measure:
    """The id lists of a row, fresh every time."""
    from vllm_tagma.lab.bench import bench_requests

    manager = bench_requests.make_manager(variant)
    request = _prompt("sent", tokens, seed=5)
    bench_requests.admit(manager, request)

    def call() -> Any:
        return manager.get_block_ids(request.request_id)

    if len(call()[0]) != tokens // bench_requests.BLOCK_SIZE:
        raise BenchError(f"{variant} returned {len(call()[0])} block ids for {tokens} tokens")
    return functools.partial(timed_calls, call, iterations=iterations)
