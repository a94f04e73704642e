"""The conditions of a replay: the pool's size and what cannot work."""

from __future__ import annotations

import pytest

from vllm_tagma.lab.replay.replay_settings import Settings, SettingsError, pool_blocks
from vllm_tagma.lab.replay.trace import Piece, TraceRequest

REQUESTS = [
    TraceRequest(place="", prompt=(Piece("a", prompt),), output_tokens=output)
    for prompt, output in ((30, 2), (30, 3), (60, 4))
]


@pytest.mark.parametrize(
    ("memory", "blocks"),
    # Footprints of 2, 3 and 4 blocks: ten requests of the mean size are 30 blocks.
    [("77", 77), ("1x", 30), ("2X", 60), (" 1.5x ", 45), (".5x", 15)],
)
def test_memory_is_a_number_of_blocks_or_a_multiple_of_the_running_set(
    memory: str, blocks: int
) -> None:
    assert pool_blocks(Settings(memory=memory, max_num_seqs=10), REQUESTS) == blocks


@pytest.mark.parametrize("memory", ["", "x", "-3", "1.5", "2xx", "1e3", "0x"])
def test_other_values_are_refused(memory: str) -> None:
    with pytest.raises(SettingsError, match=r"--memory"):
        pool_blocks(Settings(memory=memory), REQUESTS)


def test_a_pool_beyond_any_use_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"gives a pool of 99,999,999,999 blocks, more than"):
        pool_blocks(Settings(memory="99999999999"), REQUESTS)


def test_a_step_gives_every_request_a_token() -> None:
    with pytest.raises(SettingsError, match=r"--max-num-batched-tokens 63 is less than"):
        Settings(max_num_batched_tokens=63)


def test_the_step_time_model() -> None:
    assert Settings().step_seconds(1000) == pytest.approx(0.008 + 0.030)


def test_only_given_options_reach_the_backend() -> None:
    assert Settings().tagma_options() == {}
    options = Settings(compaction="idle", copy_budget=0).tagma_options()
    assert options == {"compaction": "idle", "copy_budget": 0}
