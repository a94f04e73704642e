"""The prefix cache as vLLM's users see it, one rule a test, each asserted on both managers.

Expected values are written out; that stock vLLM gives the same shows that the rule is vLLM's.
"""

from __future__ import annotations

from typing import Any

import pytest
from kv_requests import (
    ResidentSet,
    admit,
    decode,
    event_keys,
    ids_of,
    make_manager,
    make_request,
    row_of,
)
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_manager import KVCacheManager

from vllm_tagma.manager import TagmaKVCacheManager

BLOCK = 4
TOKENS = list(range(100, 160))


@pytest.fixture(params=[TagmaKVCacheManager, KVCacheManager], ids=["tagma", "stock"])
def build(request: pytest.FixtureRequest) -> Any:
    """Builds a manager with blocks of 4 tokens."""

    def make(**options: Any) -> Any:
        return make_manager(request.param, block_size=BLOCK, **options)

    return make


def ask(name: str, tokens: list[int], **options: Any) -> Any:
    return make_request(name, tokens, block_size=BLOCK, **options)


def hit_tokens(manager: Any, tokens: list[int], **options: Any) -> int:
    """Cached tokens that a new request with this prompt would find."""
    return manager.get_computed_blocks(ask("probe", tokens, **options))[1]


def serve(manager: Any, name: str, tokens: list[int], **options: Any) -> Any:
    """Computes a whole prompt and ends the request."""
    request = ask(name, tokens, **options)
    new, _ = admit(manager, request)
    assert new is not None
    manager.free(request)
    return request


# --- hit lengths ----------------------------------------------------------------------------------


def test_a_prompt_longer_than_the_model_allows_is_cached_up_to_its_slots(build: Any) -> None:
    """vLLM's input processor refuses such a prompt, its scheduler does not: slots end at the
    model's length, the prompt's hashes do not."""
    manager = build(max_model_len=20)
    request = serve(manager, "long", TOKENS)
    assert len(TOKENS) // BLOCK == len(request.block_hashes) == 15
    assert hit_tokens(manager, TOKENS) == 20


@pytest.mark.parametrize(
    ("cached", "asked", "hit"),
    [
        (8, 8, 4),  # the last token is computed again: k blocks hit k - 1
        (8, 9, 8),
        (9, 9, 8),  # a part of a block is never cached
        (8, 40, 8),
        (40, 8, 4),
        (3, 40, 0),
        (4, 4, 0),
        (4, 5, 4),
    ],
)
def test_hit_length(build: Any, cached: int, asked: int, hit: int) -> None:
    manager = build()
    serve(manager, "a", TOKENS[:cached])
    assert hit_tokens(manager, TOKENS[:asked]) == hit


def test_hit_ends_where_the_prompts_part(build: Any) -> None:
    manager = build()
    serve(manager, "a", TOKENS[:32])
    assert hit_tokens(manager, [*TOKENS[:21], 7, *TOKENS[22:32]]) == 20
    assert hit_tokens(manager, [7, *TOKENS[1:32]]) == 0


def test_hit_shares_blocks_and_new_blocks_follow(build: Any) -> None:
    manager = build()
    a, b = ask("a", TOKENS[:16]), ask("b", [*TOKENS[:8], 1, 2, 3, 4, 5])
    admit(manager, a)
    new, hit = admit(manager, b)
    assert hit == 8
    assert row_of(manager, b)[:2] == row_of(manager, a)[:2]
    assert row_of(manager, b)[2:] == ids_of(new)
    assert not set(ids_of(new)) & set(row_of(manager, a))


def test_output_tokens_are_cached_for_the_second_turn(build: Any) -> None:
    manager = build()
    request = ask("a", TOKENS[:6])
    admit(manager, request)
    for token in range(7):
        decode(manager, request, token)
    manager.free(request)
    assert hit_tokens(manager, [*TOKENS[:6], *range(7), 50]) == 12


def test_published_at_once_and_shared_within_the_step(build: Any) -> None:
    manager = build()
    manager.new_step_starts()
    admit(manager, ask("a", TOKENS[:12]))
    _, hit = admit(manager, ask("b", TOKENS[:12]))
    assert hit == 8


def test_a_chunk_publishes_only_its_full_blocks(build: Any) -> None:
    manager = build()
    request = ask("a", TOKENS[:30])
    admit(manager, request, num_tokens=10)
    assert hit_tokens(manager, TOKENS[:30]) == 8
    assert manager.estimate_cached_tokens(request) == 8
    manager.allocate_slots(request, 10)
    assert hit_tokens(manager, TOKENS[:30]) == 20
    assert len(row_of(manager, request)) == 5


def test_eviction_takes_the_tail_first_and_the_least_recent(build: Any) -> None:
    manager = build(num_blocks=9)  # 8 usable
    serve(manager, "old", TOKENS[:16])
    serve(manager, "recent", [9, *TOKENS[:15]])
    serve(manager, "new", [1, 2, 3, 4, 5])  # takes 2 blocks
    assert hit_tokens(manager, TOKENS[:17]) == 8
    assert hit_tokens(manager, [9, *TOKENS[:16]]) == 16


def test_a_hit_that_is_adopted_refreshes_recency(build: Any) -> None:
    manager = build(num_blocks=9)
    serve(manager, "old", TOKENS[:16])
    serve(manager, "recent", [9, *TOKENS[:15]])
    serve(manager, "again", TOKENS[:16])  # adopts 3 blocks, computes the fourth again
    serve(manager, "new", [1, 2, 3, 4])
    assert hit_tokens(manager, TOKENS[:17]) == 16
    assert hit_tokens(manager, [9, *TOKENS[:16]]) == 12


def test_a_lookup_has_no_side_effect(build: Any) -> None:
    manager = build(num_blocks=9, log_stats=True)
    serve(manager, "old", TOKENS[:16])
    serve(manager, "recent", [9, *TOKENS[:15]])
    manager.make_prefix_cache_stats()
    for _ in range(10):  # would keep "old" young if it counted as a use
        hit, length, boundary = manager.get_computed_blocks(ask("probe", TOKENS[:17]))
        assert (length, boundary, len(ids_of(hit))) == (16, 0, 4)
    assert manager.usage == 0.0
    assert manager.block_pool.get_num_free_blocks() == 8
    assert manager.make_prefix_cache_stats().queries == 0
    serve(manager, "new", [1, 2, 3, 4])
    assert hit_tokens(manager, TOKENS[:17]) == 12
    assert hit_tokens(manager, [9, *TOKENS[:16]]) == 16


# --- identity -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "identity",
    [
        {"salt": "a"},
        {"salt": "b"},
        {"lora": "red"},
        {"lora": "blue"},
        {"images": (("cat", 0, 4),)},
        {"images": (("dog", 0, 4),)},
        {"lora": "red", "salt": "a"},
    ],
    ids=str,
)
def test_each_identity_hits_itself_only(build: Any, identity: dict[str, Any]) -> None:
    manager = build()
    serve(manager, "plain", TOKENS[:16])
    assert hit_tokens(manager, TOKENS[:16], **identity) == 0
    serve(manager, "own", TOKENS[:16], **identity)
    assert hit_tokens(manager, TOKENS[:16], **identity) == 12
    for other in ({"salt": "c"}, {"lora": "green"}, {"images": (("cat", 1, 4),)}):
        assert hit_tokens(manager, TOKENS[:16], **other) == 0
    assert hit_tokens(manager, TOKENS[:16]) == 12


def test_an_image_parts_prompts_only_from_its_block_on(build: Any) -> None:
    manager = build()
    serve(manager, "cat", TOKENS[:24], images=(("cat", 9, 6),))
    assert hit_tokens(manager, TOKENS[:24], images=(("dog", 9, 6),)) == 8
    assert hit_tokens(manager, TOKENS[:24], images=(("cat", 9, 6),)) == 20


# --- switches -------------------------------------------------------------------------------------


def test_skip_reading_writes_but_does_not_read(build: Any) -> None:
    manager = build(log_stats=True)
    serve(manager, "a", TOKENS[:16])
    assert hit_tokens(manager, TOKENS[:16], skip_reading=True) == 0
    serve(manager, "b", [9, *TOKENS[:15]], skip_reading=True)
    assert hit_tokens(manager, [9, *TOKENS[:15]]) == 12
    skipping = ask("c", TOKENS[:16], skip_reading=True)
    manager.record_prefix_cache_stats(skipping, 0)
    assert manager.make_prefix_cache_stats().requests == 0


def test_caching_off_reads_and_writes_nothing(build: Any) -> None:
    manager = build(enable_caching=False, log_stats=True, enable_kv_cache_events=True)
    request = serve(manager, "a", TOKENS[:16])
    assert hit_tokens(manager, TOKENS[:16]) == 0
    assert manager.estimate_cached_tokens(request) == 0
    assert manager.take_events() == []
    manager.record_prefix_cache_stats(request, 0)
    assert manager.make_prefix_cache_stats().requests == 0


@pytest.mark.parametrize(("asked", "hit"), [(8, 0), (9, 4), (16, 8), (17, 12), (5, 0)])
def test_eagle_drops_the_last_block(build: Any, asked: int, hit: int) -> None:
    manager = build(use_eagle=True)
    serve(manager, "a", TOKENS[:16])
    assert hit_tokens(manager, TOKENS[:asked]) == hit


def test_lookahead_slots_are_held_but_never_published(build: Any) -> None:
    manager = build()
    request = ask("a", TOKENS[:8])
    admit(manager, request, num_lookahead_tokens=5)
    assert len(row_of(manager, request)) == 4  # 8 + 5 tokens
    assert manager.estimate_cached_tokens(request) == 8
    request.append_output_token_ids(1)
    manager.allocate_slots(request, 4, num_lookahead_tokens=5)  # 1 token and 3 drafts
    assert len(row_of(manager, request)) == 5
    assert manager.estimate_cached_tokens(request) == 8  # drafts would fill block 2
    request.num_computed_tokens += 1
    request.append_output_token_ids([2])
    assert ids_of(manager.allocate_slots(request, 1, num_lookahead_tokens=0)) == []
    assert len(row_of(manager, request)) == 5  # rejected drafts do not shrink the row


def test_slots_end_at_the_model_length(build: Any) -> None:
    manager = build(max_model_len=10)
    request = ask("a", TOKENS[:9])
    admit(manager, request, num_lookahead_tokens=8)
    assert len(row_of(manager, request)) == 3


# --- admission ------------------------------------------------------------------------------------


def test_watermark_holds_back_admissions_only_while_something_runs(build: Any) -> None:
    manager = build(num_blocks=11, watermark=0.2)  # 10 usable, 2 kept back
    running = ask("a", TOKENS[:4])
    admit(manager, running)
    waiting = ask("b", TOKENS[10:42])  # 8 blocks of the 9 that are free
    assert admit(manager, waiting, has_scheduled_reqs=True)[0] is None
    assert manager.block_pool.get_num_free_blocks() == 9
    assert admit(manager, waiting, has_scheduled_reqs=False)[0] is not None
    assert decode(manager, running, 5) is not None  # a running request may use the last block
    assert manager.block_pool.get_num_free_blocks() == 0


def test_reserved_blocks_are_left_to_others(build: Any) -> None:
    manager = build(num_blocks=11)
    request = ask("a", TOKENS[:32])
    assert admit(manager, request, reserved_blocks=3)[0] is None
    assert admit(manager, request, reserved_blocks=2)[0] is not None


def test_the_gate_counts_the_whole_prompt(build: Any) -> None:
    manager = build(num_blocks=6)  # 5 usable
    request = ask("a", TOKENS[:24])  # needs 6
    assert admit(manager, request, num_tokens=4)[0] is None
    assert admit(manager, request, num_tokens=4, full_sequence_must_fit=False)[0] is not None


def test_idle_hits_count_as_demand(build: Any) -> None:
    manager = build(num_blocks=9)  # 8 usable
    serve(manager, "a", TOKENS[:16])  # 4 idle
    holder = ask("holder", [1, 2, 3, 4, 5, 6, 7, 8])
    admit(manager, holder)  # 6 free, 4 of them idle hits
    request = ask("b", TOKENS[:28])  # 7 blocks, 4 of them hit
    assert admit(manager, request)[0] is None
    smaller = ask("c", TOKENS[:24])
    new, hit = admit(manager, smaller)
    assert (hit, len(ids_of(new))) == (16, 2)
    assert manager.block_pool.get_num_free_blocks() == 0


def test_nothing_to_compute_is_an_error(build: Any) -> None:
    manager = build()
    with pytest.raises(ValueError, match="must be greater than 0"):
        manager.allocate_slots(ask("a", TOKENS[:4]), 0)


def test_cache_blocks_is_monotone(build: Any) -> None:
    manager = build()
    request = ask("a", TOKENS[:6])
    admit(manager, request)
    request.append_output_token_ids([1, 2, 3, 4, 5, 6])
    manager.allocate_slots(request, 1)
    manager.cache_blocks(request, 8)
    assert manager.estimate_cached_tokens(request) == 8
    manager.cache_blocks(request, 4)
    manager.cache_blocks(request, 0)
    assert manager.estimate_cached_tokens(request) == 8
    assert hit_tokens(manager, [*TOKENS[:6], 1, 2, 3]) == 8


def test_id_lists_are_fresh(build: Any) -> None:
    """vLLM's worker extends the lists it is sent, in the same process."""
    manager = build()
    request = ask("a", TOKENS[:8])
    new, _ = admit(manager, request)
    for blocks in (new, manager.get_blocks("a")):
        first = ids_of(blocks)
        copy = list(first)
        first.extend([99, 98])
        assert ids_of(blocks) == copy
    assert row_of(manager, request) == copy
    manager.get_block_ids("a")[0].clear()
    assert row_of(manager, request) == copy


def test_no_blocks_is_none_where_the_scheduler_asks_for_it(build: Any) -> None:
    manager = build()
    request = ask("a", TOKENS[:5])
    admit(manager, request)
    new = decode(manager, request, 1)
    assert new.get_block_ids(allow_none=True) is None
    assert new.get_block_ids() == ([],)
    assert manager.get_blocks("unknown").get_block_ids() == ([],)


# --- reset, withdrawal, events --------------------------------------------------------------------


def test_reset(build: Any) -> None:
    manager = build(log_stats=True)
    serve(manager, "a", TOKENS[:16])
    assert manager.reset_prefix_cache() is True
    assert hit_tokens(manager, TOKENS[:16]) == 0
    assert manager.make_prefix_cache_stats().reset is True


def test_withdrawn_blocks_are_not_hit_and_stay_with_their_owner(build: Any) -> None:
    manager = build()
    request = ask("a", TOKENS[:16])
    admit(manager, request)
    row = row_of(manager, request)
    manager.evict_blocks({row[2], row[3]})
    assert hit_tokens(manager, TOKENS[:16]) == 8
    assert row_of(manager, request) == row
    assert manager.estimate_cached_tokens(request) == 8
    manager.free(request)
    assert manager.usage == 0.0


def test_events_of_a_life(build: Any) -> None:
    manager = build(num_blocks=5, enable_kv_cache_events=True)
    request = ask("a", TOKENS[:9], lora="red", salt="s", session_id="chat")
    admit(manager, request)
    (stored,) = manager.take_events()
    assert isinstance(stored, BlockStored)
    assert list(stored.block_hashes) == event_keys(request)
    assert (stored.parent_block_hash, stored.block_size, stored.medium) == (None, BLOCK, "GPU")
    assert list(stored.token_ids) == TOKENS[:8]
    assert (stored.lora_name, stored.group_idx, stored.session_id) == ("red", 0, "chat")
    assert stored.kv_cache_spec_kind == "full_attention"
    assert len(stored.extra_keys) == 2

    request.append_output_token_ids([1, 2, 3])
    manager.allocate_slots(request, 3)
    (stored,) = manager.take_events()
    assert list(stored.block_hashes) == [event_keys(request)[2]]
    assert stored.parent_block_hash == event_keys(request)[1]
    assert list(stored.token_ids) == [TOKENS[8], 1, 2, 3]

    manager.free(request)
    assert manager.take_events() == []
    big = ask("b", TOKENS[20:33])  # all 4 blocks: evicts 3, tail first
    admit(manager, big)
    *removed, stored = manager.take_events()
    assert all(isinstance(event, BlockRemoved) for event in removed)
    assert [event.block_hashes for event in removed] == [
        [key] for key in reversed(event_keys(request))
    ]
    assert list(stored.block_hashes) == event_keys(big)
    manager.free(big)
    assert manager.reset_prefix_cache()
    assert [type(event) for event in manager.take_events()] == [AllBlocksCleared]


def test_full_reports_repeat_what_was_hit(build: Any) -> None:
    manager = build(enable_kv_cache_events=True)
    first = serve(manager, "a", TOKENS[:16])
    manager.take_events()
    manager.get_computed_blocks(ask("b", TOKENS[:16]))
    assert manager.take_events() == []
    manager.get_computed_blocks(ask("c", TOKENS[:16], report_mode="full"))
    (stored,) = manager.take_events()
    assert list(stored.block_hashes) == event_keys(first)[:3]
    assert stored.parent_block_hash is None
    assert list(stored.token_ids) == TOKENS[:12]


def test_duplicates_are_counted_by_the_event_stream(build: Any) -> None:
    """Two requests that compute the same block at once each store it, and each copy is removed."""
    manager = build(num_blocks=5, enable_kv_cache_events=True)
    a = ask("a", TOKENS[:4], skip_reading=True)
    b = ask("b", TOKENS[:4], skip_reading=True)
    admit(manager, a)
    admit(manager, b)
    seen = ResidentSet()
    seen.replay(manager.take_events())
    assert seen.count == {event_keys(a)[0]: 2}
    manager.free(a)
    manager.free(b)
    serve(manager, "c", [1, 2, 3, 4, 5, 6, 7, 8, 9])  # 3 blocks: takes one copy
    assert hit_tokens(manager, TOKENS[:5]) == 4
    seen.replay(manager.take_events())
    assert seen.count[event_keys(a)[0]] == 1
