"""What the manager remembers of a request's row, so that most decode calls need no native call."""

from __future__ import annotations

import sys
from typing import Literal

Hold = Literal["", "receiving", "sending"]
"""What a row is pinned for; see ``transfer_contract.py``."""


class RequestRow:
    """A request's row in the native pool, or its rows, one for each group and all equally long.

    While a running request's tokens, scheduled ones included, number at most ``quiet_tokens``, they
    fit its blocks, fill none that is not published yet, and none falls out of a window: there is
    nothing to do. Of ``published_blocks`` each group has at least so many. ``pins`` are the pool's
    handles while a KV connector may touch the row's blocks.
    """

    __slots__ = (
        "handle",
        "held_blocks",
        "hold",
        "next_skip",
        "pins",
        "published_blocks",
        "quiet_tokens",
    )

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.held_blocks = 0
        self.published_blocks = 0
        self.quiet_tokens = 0
        self.next_skip = sys.maxsize
        """Processed tokens from which on a window has more blocks to let go of."""
        self.pins: tuple[int, ...] = ()
        self.hold: Hold = ""

    def settle(self, block_size: int, enable_caching: bool) -> None:
        """Call after a change of ``held_blocks``, ``published_blocks`` or ``next_skip``."""
        quiet = self.held_blocks * block_size
        if enable_caching:
            unfilled = (self.published_blocks + 1) * block_size - 1
            quiet = unfilled if unfilled < quiet else quiet
        self.quiet_tokens = quiet if quiet < self.next_skip else self.next_skip
