"""What the manager remembers of a request's row, so that most decode calls need no native call."""

from __future__ import annotations

from typing import Literal

Hold = Literal["", "receiving", "sending"]
"""What a row is pinned for; see ``transfer_contract.py``."""


class RequestRow:
    """A request's row in the native pool.

    While a running request's tokens, scheduled ones included, number at most ``quiet_tokens``, they
    fit its blocks and fill none that is not published yet: there is nothing to do. ``pin`` is the
    pool's handle while a KV connector may touch the row's blocks, else 0.
    """

    __slots__ = ("handle", "held_blocks", "hold", "pin", "published_blocks", "quiet_tokens")

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.held_blocks = 0
        self.published_blocks = 0
        self.quiet_tokens = 0
        self.pin = 0
        self.hold: Hold = ""

    def settle(self, block_size: int, enable_caching: bool) -> None:
        """Call after a change of ``held_blocks`` or ``published_blocks``."""
        quiet = self.held_blocks * block_size
        if enable_caching:
            unfilled = (self.published_blocks + 1) * block_size - 1
            quiet = unfilled if unfilled < quiet else quiet
        self.quiet_tokens = quiet
