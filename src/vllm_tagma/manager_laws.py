"""The laws between what the manager remembers and what the core holds: M1 to M3."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vllm_tagma._native import BlockRanges, Pool
from vllm_tagma.errors import InvariantError
from vllm_tagma.request_row import RequestRow


def require_manager_laws(
    pool: Pool,
    rows: Mapping[str, RequestRow],
    row_blocks: Callable[[str], tuple[BlockRanges, ...]],
    num_groups: int,
    num_pins: int,
) -> None:
    """Compare ``rows``, by request, and the transfers' ``num_pins`` with the pool, and let the core
    check its own laws (``docs/invariants.md``). O(blocks).

    Raises:
        InvariantError: naming the law, the request and both sides.
    """
    try:
        pool.check_invariants()
    except RuntimeError as error:
        raise InvariantError(str(error)) from error
    for request_id, row in rows.items():
        lengths = {len(blocks) for blocks in row_blocks(request_id)}
        held = max(lengths) if len(lengths) == 1 else sorted(lengths)
        published = min(pool.num_published(row.handle, group) for group in range(num_groups))
        if (held, published) != (row.held_blocks, row.published_blocks):
            raise InvariantError(
                f"law M1 (manager): request {request_id} holds {held} blocks, {published} "
                f"published, and is remembered with {row.held_blocks} and {row.published_blocks}"
            )
    stats = pool.stats()
    if stats["rows"] != len(rows):
        raise InvariantError(
            f"law M2 (manager): {stats['rows']} rows are open for {len(rows)} requests"
        )
    if stats["pins"] != num_pins:
        raise InvariantError(
            f"law M3 (manager): {stats['pins']} pins are held for {num_pins} transfers"
        )
