"""Complaints of vLLM's users about models with windows or several KV-cache groups.

Each test names its issue of vllm-project/vllm; the others are in ``test_user_complaints.py``. Where
the complaint is that something is lost, vLLM's own manager stands beside ours.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from kv_requests import (
    admit,
    cache_config,
    decode,
    make_manager,
    make_request,
    make_stock,
    nulls_of,
)
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec

from vllm_tagma.errors import UnsupportedError
from vllm_tagma.manager import TagmaKVCacheManager

BLOCK = 4
FULL = None
HYBRID = (FULL, 9)  # a window of 9 tokens: a hit needs its last 2 blocks
TOKENS = list(range(1_000, 1_200))
BOTH = pytest.mark.parametrize("build", [make_stock, make_manager], ids=["vllm", "tagma"])


def ask(name: str, tokens: list[int], **options: Any) -> Any:
    return make_request(name, tokens, block_size=BLOCK, **options)


def serve(manager: Any, name: str, tokens: list[int], *, outputs: int = 0, chunk: int = 16) -> Any:
    """Computes a prompt chunk by chunk, decodes, and ends; the request, and its hit in tokens."""
    request = ask(name, tokens)
    hit, length, request.shared_prefix_boundary = manager.get_computed_blocks(request)
    manager.new_step_starts()
    while request.num_computed_tokens < request.num_tokens:
        first = request.num_computed_tokens == 0
        start = length if first else request.num_computed_tokens
        count = min(chunk, request.num_tokens - start)
        adopted = {"num_new_computed_tokens": length, "new_computed_blocks": hit} if first else {}
        assert manager.allocate_slots(request, count, **adopted) is not None
        request.status = request.status.RUNNING
        request.num_computed_tokens = start + count
        manager.take_new_block_ids()
        manager.new_step_starts()
    for token in range(outputs):
        assert decode(manager, request, token) is not None
    manager.take_new_block_ids()
    manager.free(request)
    return length


def num_free(manager: Any) -> int:
    return manager.block_pool.get_num_free_blocks()


@pytest.mark.parametrize("retention", [None, 0, 8 * BLOCK])
@pytest.mark.parametrize("windows", [(9,), HYBRID, (9, FULL), (FULL, 9, 17)], ids=str)
def test_a_resent_prompt_hits(windows: Any, retention: int | None) -> None:
    """#42948: a hybrid model reports no hits for a prompt that was just served. Ours finds what
    stock finds, whole and aligned prompts alike, and all of the prompt but its last block at most.
    """
    for length in (37, 40, 41):
        hits = []
        for build in (make_stock, make_manager):
            manager = build(num_blocks=201, windows=windows, retention=retention)
            assert serve(manager, "first", TOKENS[:length]) == 0
            hits.append(serve(manager, "again", TOKENS[:length]))
        assert hits[0] == hits[1] == (length - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("retention", [None, 0])
def test_round_robin_sessions_keep_their_hits(retention: int | None) -> None:
    """#48435: with a quarter of the pool in use hits of a hybrid model fall to nothing, because
    the tails of sessions that rest are evicted first. Turn for turn ours hits what stock hits: each
    session's whole past, or, where vLLM keeps only what the prompt itself needs if it comes again
    (retention 0), all but the last block of it."""
    sessions, turns, grown = 6, 5, 24
    hits: dict[Any, list[int]] = {}
    for build in (make_stock, make_manager):
        manager = build(num_blocks=1_441, windows=HYBRID, retention=retention)
        hits[build] = [
            serve(
                manager,
                f"s{session}t{turn}",
                [session * 1_000 + i for i in range((turn + 1) * grown)],
                outputs=3,
            )
            for turn, session in itertools.product(range(turns), range(sessions))
        ]
    assert hits[make_stock] == hits[make_manager]
    assert hits[make_manager] == [
        max(turn * grown - (BLOCK if retention == 0 else 0), 0)
        for turn in range(turns)
        for _ in range(sessions)
    ]


@BOTH
@pytest.mark.parametrize("lost", range(8))
@pytest.mark.parametrize("group", [0, 1])
def test_groups_that_lost_different_blocks_agree(build: Any, group: int, lost: int) -> None:
    """#46453: one group's hit is longer than another's, and the engine crashes. All agree on the
    longest prefix that each can resume, and it is admitted."""
    manager = build(num_blocks=101, windows=HYBRID)
    request = ask("first", TOKENS[:33])
    admit(manager, request)
    rows = manager.get_block_ids("first")
    manager.free(request)
    manager.evict_blocks({rows[group][lost]})
    again = ask("again", TOKENS[:33])
    hit, tokens, _ = manager.get_computed_blocks(again)
    # Full attention is left with the blocks in front; a window with hits that end elsewhere.
    kept = lost if group == 0 or lost >= 6 else 8
    assert tokens == kept * BLOCK
    assert all(len(ids) * BLOCK == tokens for ids in hit.get_block_ids())
    new, length = admit(manager, again)
    assert new is not None
    assert length == tokens
    assert [len(ids) for ids in manager.get_block_ids("again")] == [9, 9]


def test_groups_that_are_not_served_are_refused_by_name() -> None:
    """#55600: a Mamba group is indexed in wrong units, beyond its table. Such groups are refused
    before a pool is built."""
    config = cache_config(num_blocks=65, block_size=BLOCK)
    mamba = MambaSpec(
        block_size=BLOCK, shapes=((2, 8),), dtypes=(torch.float32,), page_size_padded=None
    )
    config.kv_cache_groups.append(KVCacheGroupSpec(["state"], mamba))
    with pytest.raises(UnsupportedError, match="Mamba"):
        TagmaKVCacheManager(
            config, max_model_len=64, scheduler_block_size=BLOCK, hash_block_size=BLOCK
        )


def test_blocks_that_must_be_zeroed_are_refused_by_name() -> None:
    """#47574: pages that a window gave back are read as another type before they are written, and
    give NaN. vLLM asks for zeroing where that can be, and such caches are refused."""
    config = cache_config(num_blocks=65, block_size=BLOCK, windows=HYBRID)
    other = cache_config(num_blocks=65, block_size=BLOCK, windows=(17,)).kv_cache_groups[0]
    object.__setattr__(other.kv_cache_spec, "dtype", torch.float16)
    config.kv_cache_groups.append(other)
    assert config.needs_kv_cache_zeroing
    with pytest.raises(UnsupportedError, match="zeroed"):
        TagmaKVCacheManager(
            config, max_model_len=64, scheduler_block_size=BLOCK, hash_block_size=BLOCK
        )


def test_what_is_said_to_fit_is_given_in_all_groups() -> None:
    """#41282: "cannot get N free blocks" after the check said they fit: idle blocks of one group's
    hit were counted as free for another. Admission asks for all groups at once: it gives all or
    changes nothing, at every size of the pool, just as stock."""
    given = refused = 0
    for num_blocks, retention, length in itertools.product(range(12, 40), (None, 0), (24, 29, 36)):
        stock, tagma = (
            build(num_blocks=num_blocks, windows=(FULL, 9, 9), retention=retention)
            for build in (make_stock, make_manager)
        )
        results = []
        for manager in (stock, tagma):
            first = ask("first", TOKENS[:length])
            if admit(manager, first)[0] is not None:
                manager.free(first)
            other = ask("other", [7, *TOKENS[: length // 2]])
            admit(manager, other)
            before = num_free(manager)
            new, hit = admit(manager, ask("again", TOKENS[:length]), full_sequence_must_fit=False)
            assert new is not None or num_free(manager) == before
            results.append((new is None, hit, before, num_free(manager)))
        assert results[0] == results[1]
        given, refused = given + (not results[0][0]), refused + results[0][0]
        tagma.check_invariants()
    assert min(given, refused) > 10


@BOTH
def test_a_window_is_let_go_of_once_its_tokens_are_processed(build: Any) -> None:
    """#47728: blocks fall out of a window as soon as later tokens are scheduled, while a step in
    flight still reads them. They stay until that step's output is in."""
    manager = build(num_blocks=65, windows=HYBRID)
    request = ask("r", TOKENS[:32])
    admit(manager, request)
    request.num_in_flight_tokens = 32  # the prompt is on its way
    assert decode(manager, request, 7) is not None
    assert not any(nulls_of(manager.get_blocks("r"))[1])
    request.num_in_flight_tokens = 1  # the prompt is done, the token is not
    assert decode(manager, request, 8) is not None
    assert decode(manager, request, 9) is not None
    # 34 tokens are processed: the next one attends to the last 9, from the one at 26 on.
    assert nulls_of(manager.get_blocks("r"))[1] == [True] * 6 + [False] * 3
    assert not any(nulls_of(manager.get_blocks("r"))[0])


@pytest.mark.parametrize("windows", [(9,), HYBRID, (9, FULL, 17)], ids=str)
def test_blocks_that_are_freed_later_are_evicted_in_the_same_order(windows: Any) -> None:
    """#48489: with a KV connector and steps in flight the blocks of a request are freed later, and
    those of a hybrid model then in another order, head before tail. Each group's go back tail
    first, as if they had been freed at once."""
    orders = []
    for later in (False, True):
        manager = make_manager(num_blocks=61, windows=windows, enable_kv_cache_events=True)
        for name, start in (("a", 0), ("b", 50)):
            request = ask(name, TOKENS[start : start + 31])
            admit(manager, request)
            if later:
                manager.block_pool.free_blocks(reversed(manager.pop_blocks_for_free(request)))
            else:
                manager.free(request)
        manager.take_events()
        whole = ask("whole", [9] * (60 // len(windows) * BLOCK - 1))
        assert admit(manager, whole)[0] is not None
        orders.append(
            [
                (event.group_idx, event.block_hashes)
                for event in manager.take_events()
                if type(event).__name__ == "BlockRemoved"
            ]
        )
    assert orders[0] == orders[1]
    assert len(orders[0]) > 8


def test_stock_is_vllms_own() -> None:
    assert type(make_stock(windows=HYBRID)) is KVCacheManager
