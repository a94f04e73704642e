"""The native pool with the options of a served model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from vllm_tagma._native import Pool
from vllm_tagma.group_spec import GroupSpec

if TYPE_CHECKING:
    from vllm_tagma.config import TagmaConfig

# How many idle blocks, from the oldest, may be evicted before their turn where that makes a range
# longer. With moves there is another way: one in a hundred blocks is enough, and more, up to a
# quarter, saves moves as long as nobody hits the oldest. Without moves ranges depend on it. A pool
# in which the least slack is not even a block has none, and evicts by age and demand alone.
# Measured: docs/compaction.md.
SLACK_WITH_MOVES: Final = 0.01
MOST_SLACK_WITH_MOVES: Final = 0.25
SLACK_WITHOUT_MOVES: Final = 0.10


def new_pool(
    num_blocks: int,
    config: TagmaConfig,
    *,
    record_evictions: bool,
    groups: Iterable[GroupSpec] = (GroupSpec(),),
) -> Pool:
    """A pool of ``num_blocks`` blocks, the null block included. O(num_blocks).

    With several groups a block holds the KV of one group's layers alone, and the same tokens take
    as many more blocks: the copy budget, which stands for bytes, is one for each group.
    Where ranges are aligned neither moves nor slack apply: the cache is off, nothing is idle.
    """
    kinds = tuple(groups)
    moves = config.compaction != "off" and config.copy_budget > 0
    share = SLACK_WITH_MOVES if moves else SLACK_WITHOUT_MOVES
    single = config.alignment == 1
    slack = int(share * num_blocks) if single else 0
    return Pool(
        num_blocks,
        alignment=config.alignment,
        record_evictions=record_evictions,
        compaction=config.compaction if single else "off",
        copy_budget=config.copy_budget * len(kinds),
        slack=slack,
        most_slack=int(MOST_SLACK_WITH_MOVES * num_blocks) if moves and slack else 0,
        groups=kinds,
    )
