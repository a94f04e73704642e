"""The numbers that scheduler, workers and kernels must agree on. Imports nothing.

``csrc/tagma/block_range.hpp`` holds the same three for the core, and a test compares both with
vLLM's.
"""

from __future__ import annotations

from typing import Final

NULL_BLOCK: Final = 0
"""vLLM's block without content; a run of it is a range of its own, and its positions have no slot.
"""

PAD_SLOT_ID: Final = -1
"""vLLM's marker for a token that is written nowhere."""

MAX_RANGES: Final = 256
"""Ranges of a request, and of a row of a worker's range table: 2 KiB of descriptors a row. The
allocator keeps requests far below it."""
