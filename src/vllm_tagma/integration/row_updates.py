"""Row updates on their way from the scheduler to the workers, inside vLLM's own step.

vLLM sends block ids, of which the workers would derive the ranges that the core had in the first
place, and it sends a running request's new blocks only: that its old ones moved cannot be said. So
the output of a step carries the ``RowUpdate`` of each row that was admitted, grew, came back or
moved. vLLM's ids travel beside them. They serve whoever makes up batches of his own (warm-up, dummy
runs, graph capture) and, with ``debug_slots``, as the assertion.

The output is a subclass, not an attribute set on vLLM's: it crosses process boundaries by pickle,
and ``dataclasses.replace`` (which V1 does with some speculators) keeps fields only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput

from vllm_tagma.errors import InvariantError, SeamError
from vllm_tagma.row_update import RowUpdate

REPORT = (
    "This is a bug of vllm-tagma: please report it, and serve with --kv-cache-backend paged "
    "meanwhile."
)
"""How a violated law ends its message."""


@dataclass
class TagmaSchedulerOutput(SchedulerOutput):  # type: ignore[misc]
    """vLLM's output of one ``schedule()`` and the row updates that belong to the same step."""

    row_updates: Sequence[RowUpdate] = ()


# --- the scheduler's side -------------------------------------------------------------------------


def sent_whole(output: Any) -> set[str]:
    """The requests of a step whose whole row a worker writes: new and streamed ones, resumed ones,
    and on V1 those that sat out the last step and are added to the batch again. O(such requests).
    """
    cached = output.scheduled_cached_reqs
    whole = {request.req_id for request in output.scheduled_new_reqs}
    whole.update(cached.resumed_req_ids)
    whole.update(cached.all_token_ids)  # V1 sends a request's tokens when it is added again
    return whole


def with_row_updates(output: Any, updates: Sequence[RowUpdate]) -> Any:
    """The output of a step, now with its row updates; unchanged if there are none. O(1).

    The object stays the same and becomes a ``TagmaSchedulerOutput``. Raises ``SeamError`` if it is
    not vLLM's own.
    """
    if not updates:
        return output
    if type(output) is not SchedulerOutput:
        raise SeamError(
            f"expected vLLM's SchedulerOutput, found {type(output).__qualname__}: another plugin "
            "or an unknown vLLM has replaced it. Serve with --kv-cache-backend paged."
        )
    output.__class__ = TagmaSchedulerOutput
    output.row_updates = updates
    return output


# --- the workers' side ----------------------------------------------------------------------------


def row_updates_of(output: Any) -> Sequence[RowUpdate]:
    """The row updates of a step; none for vLLM's own output (dummy runs make those)."""
    updates: Sequence[RowUpdate] = getattr(output, "row_updates", ())
    return updates


def by_group(updates: Iterable[RowUpdate], num_groups: int) -> list[dict[str, RowUpdate]]:
    """Per KV-cache group: request id -> update. O(updates).

    Raises ``InvariantError`` for a group that the worker has not, or two updates of one row.
    """
    groups: list[dict[str, RowUpdate]] = [{} for _ in range(num_groups)]
    for update in updates:
        if not 0 <= update.group < num_groups or update.request_id in groups[update.group]:
            raise InvariantError(
                f"law W2 (row updates): a second update of a row, or one of a group beyond the "
                f"worker's {num_groups}: {update}. {REPORT}"
            )
        groups[update.group][update.request_id] = update
    return groups


def require_fits(update: RowUpdate, *, held: int, brought: int) -> None:
    """Law W2: an update begins inside the row that the worker holds, or right behind it, and ends
    where the ``brought`` ids of the step end.

    Raises:
        InvariantError: naming the request and both counts. Going on would leave a row that the
            scheduler knows otherwise, and requests would read each other's KV.
    """
    if update.first_block <= held and update.num_blocks == held + brought:
        return
    raise InvariantError(
        f"law W2 (row updates): the update of request {update.request_id} names blocks "
        f"{update.first_block} to {update.num_blocks} of group {update.group}; the worker's row "
        f"has {held} blocks and the step brings {brought} more. {REPORT}"
    )


def row_too_long(row: str, num_blocks: int, width: int) -> InvariantError:
    """Law W2: the error for a row, named as errors shall name it, that is longer than the block
    table is wide."""
    return InvariantError(
        f"law W2 (row updates): {row} would have {num_blocks} blocks, and the block table holds "
        f"{width} a row. {REPORT}"
    )


def require_same_ids(update: RowUpdate, block_ids: Sequence[int]) -> None:
    """Law W1: the ids that vLLM sent are the last ones of an update that fits. O(blocks).

    Raises ``InvariantError`` at the first that differs.
    """
    ranges = update.ranges.sliced(len(update.ranges) - len(block_ids), len(update.ranges))
    first = update.num_blocks - len(block_ids)
    for block, (ours, theirs) in enumerate(zip(ranges.ids(), block_ids, strict=True), first):
        if ours != theirs:
            raise InvariantError(
                f"law W1 (row updates): block {block} of request {update.request_id}, group "
                f"{update.group}, is {ours} in its row update and {theirs} in the ids beside it. "
                f"{REPORT}"
            )
