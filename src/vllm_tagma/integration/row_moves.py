"""How the scheduler tells the workers that blocks of running requests have moved.

vLLM sends a running request's new blocks only; where the old ones are never changes there. A live
move changes it, so the step that carries the copies (``SchedulerOutput.kv_cache_block_copies``)
also carries the moved part of each row, and the runner rewrites its rows before vLLM's own update
of the step. Requests that are new or resumed in a step bring their whole row with them.

The output is a subclass, not an attribute set on vLLM's: it crosses process boundaries by pickle,
and ``dataclasses.replace`` (which V1 does with some speculators) keeps fields only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

from vllm.v1.core.sched.output import SchedulerOutput

from vllm_tagma.errors import InvariantError

RowMoves: TypeAlias = Mapping[str, Sequence[tuple[int, int]]]
"""Request id -> ranges (start, count) of its row from logical block 0 on, in logical order."""

_NO_MOVES: RowMoves = {}


@dataclass
class TagmaSchedulerOutput(SchedulerOutput):  # type: ignore[misc]
    """vLLM's output of one ``schedule()`` and the row moves that belong to the same step."""

    row_moves: RowMoves | None = None


def with_row_moves(output: Any, moves: RowMoves) -> Any:
    """The output of a step with its row moves; ``output`` itself if there are none. O(fields)."""
    if not moves:
        return output
    stock = {field.name: getattr(output, field.name) for field in fields(output)}
    return TagmaSchedulerOutput(**stock, row_moves=moves)


def row_moves_of(output: Any) -> RowMoves:
    """The row moves of a step; empty for vLLM's own output (dummy runs make those)."""
    return getattr(output, "row_moves", None) or _NO_MOVES


def moved_block_ids(ranges: Sequence[tuple[int, int]]) -> list[int]:
    """The block ids of ranges, in logical order. O(blocks)."""
    return [block_id for start, count in ranges for block_id in range(start, start + count)]


def require_within(*, request: str, moved: int, held: int) -> None:
    """Stop if a move names more blocks than the worker's row holds.

    Raises:
        InvariantError: naming the request and both counts. Going on would leave a row that the
            scheduler knows otherwise, and requests would read each other's KV.
    """
    if moved > held:
        raise InvariantError(
            f"law W2 (row moves): {moved} moved blocks for {request}, whose row on the worker has "
            f"{held}. This is a bug of vllm-tagma: please report it, and serve with "
            "--tagma-compaction idle meanwhile, which moves no block of a running request."
        )
