"""What changes in a request's row: the one message about ranges from scheduler to workers.

Admission, growth, resumption and moves all say the same: from logical block ``first_block`` on, the
row consists of these ranges. What lies in front stays as it is; what lay behind is gone.
"""

from __future__ import annotations

from typing import NamedTuple

from vllm_tagma._native import BlockRanges


class RowUpdate(NamedTuple):
    """The end of one row, of one KV-cache group, from ``first_block`` on. Immutable, picklable."""

    request_id: str
    group: int
    first_block: int
    ranges: BlockRanges

    @property
    def num_blocks(self) -> int:
        """Blocks of the row after the update, null blocks included."""
        return self.first_block + len(self.ranges)
