"""What a scheduler call costs in calls and objects: one native call, nothing per block."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
from kv_requests import decode, make_manager, make_request

from vllm_tagma._native import Pool

BLOCK = 4
TOKENS = list(range(1_000, 1_000 + 4 * BLOCK * 1_024))


def native_calls(call: Callable[[], Any]) -> list[str]:
    """Names of the pool's methods that ``call`` calls."""
    names: list[str] = []

    def note(frame: Any, event: str, function: Any) -> None:
        if event == "c_call" and isinstance(getattr(function, "__self__", None), Pool):
            names.append(function.__name__)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names


def request(name: str, num_blocks: int) -> Any:
    return make_request(name, TOKENS[: num_blocks * BLOCK], block_size=BLOCK)


def admission(manager: Any, asked: Any) -> Callable[[], Any]:
    hit, length, _ = manager.get_computed_blocks(asked)
    computed = {"num_new_computed_tokens": length, "new_computed_blocks": hit}
    return lambda: manager.allocate_slots(
        asked, asked.num_tokens - length, full_sequence_must_fit=True, **computed
    )


def test_a_scheduler_call_is_at_most_one_native_call() -> None:
    manager = make_manager(num_blocks=513, block_size=BLOCK)
    first, second = request("first", 64), request("second", 80)
    assert native_calls(lambda: manager.get_computed_blocks(first)) == ["lookup"]
    assert native_calls(admission(manager, first)) == ["admit"]
    assert native_calls(lambda: manager.get_computed_blocks(second)) == ["lookup"]
    assert native_calls(admission(manager, second)) == ["admit"]
    second.status = second.status.RUNNING
    second.num_computed_tokens = second.num_tokens
    per_token = [native_calls(lambda: decode(manager, second, 7)) for _ in range(2 * BLOCK)]
    # A token that opens a block takes one; one that fills it publishes it; the rest ask nothing.
    assert per_token == [["grow"], [], [], ["publish"]] * 2
    assert native_calls(lambda: manager.get_blocks("second")) == ["row_blocks"]
    assert native_calls(lambda: manager.free(second)) == ["free"]
    assert native_calls(lambda: manager.free(second)) == []


def objects_made(call: Callable[[], Any]) -> int:
    """Memory blocks of Python's allocator that the result of ``call`` keeps."""
    gc.collect()
    gc.disable()
    try:
        before = sys.getallocatedblocks()
        result = call()
        made = sys.getallocatedblocks() - before
        del result
    finally:
        gc.enable()
    return made


@pytest.mark.parametrize("step", ["look up", "admit", "read the row"])
def test_nothing_is_made_per_block(step: str) -> None:
    made = []
    for num_blocks in (8, 1_024):
        manager = make_manager(num_blocks=2_048, block_size=BLOCK)
        owner, asked = request("owner", num_blocks), request("asked", num_blocks)
        admit = admission(manager, owner)
        if step == "admit":
            made.append(objects_made(admit))
            continue
        admit()
        read = {
            "look up": lambda m=manager, r=asked: m.get_computed_blocks(r),
            "read the row": lambda m=manager: m.get_blocks("owner"),
        }[step]
        read()
        made.append(objects_made(read))
    few, many = made
    assert many - few < 32, f"{few} objects for 8 blocks, {many} for 1,024"


def test_a_model_with_windows_asks_nothing_inside_a_block_either() -> None:
    """Of four tokens one opens a block, one lets a window go of one, and one fills a block, which
    each group publishes or passes over."""
    manager = make_manager(num_blocks=513, block_size=BLOCK, windows=(None, 11), retention=0)
    asked = request("asked", 64)
    assert native_calls(lambda: manager.get_computed_blocks(asked)) == ["lookup", "lookup"]
    assert native_calls(admission(manager, asked))[0] == "admit"
    asked.status = asked.status.RUNNING
    asked.num_computed_tokens = asked.num_tokens
    per_token = [native_calls(lambda: decode(manager, asked, 7)) for _ in range(4 * BLOCK)]
    cached = ["num_published", "publish", "num_published", "pass_over"]
    assert per_token == [["grow"], [], ["grow"], ["grow", *cached]] * 4
