"""A step's block copies by our mover, in the place where vLLM makes them.

Both runners call ``copy_kv_cache_blocks_inplace`` by a global name, once the requests that ended
are gone and new blocks are zeroed, and before anything is computed. While that part of a step runs,
the name stands for ours (``name_swap.py``); behind it, that ours was called is checked, so vLLM
never takes over unnoticed. It can go when vLLM lets a runner name the function.

Why not vLLM's: it gathers and scatters tensor by tensor, which moves twice the bytes and, where the
blocks of all layers lie side by side, needs a temporary of all that is moved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from vllm.v1.worker.utils import copy_kv_cache_blocks_inplace

from vllm_tagma.errors import SeamError
from vllm_tagma.integration.name_swap import name_stands_for
from vllm_tagma.worker.block_mover import Mover, mover_of

_NAME = copy_kv_cache_blocks_inplace.__name__


class BlockCopies:
    """The mover of a runner, made anew whenever its KV caches are others.

    ``interpreted``: on a CPU, copy by the Triton kernel under its interpreter.
    """

    def __init__(self, *, interpreted: bool = False) -> None:
        self.num_copies = 0  # since the start
        self._interpreted = interpreted
        self._mover: Mover | None = None
        self._of: tuple[object, ...] = ()

    def copy(
        self,
        kv_caches: Sequence[torch.Tensor],
        num_blocks: int,
        kv_cache_block_copies: Sequence[tuple[int, int]],
    ) -> None:
        """As vLLM's function. Raises ``UnsupportedError`` for caches that cannot be moved."""
        self.mover(kv_caches, num_blocks).move(kv_cache_block_copies)
        self.num_copies += len(kv_cache_block_copies)

    def mover(self, kv_caches: Sequence[torch.Tensor], num_blocks: int) -> Mover:
        """The mover for these caches. O(layers)."""
        key = (num_blocks, *(getattr(cache, "data_ptr", int)() for cache in kv_caches))
        if self._mover is None or key != self._of:
            self._mover = mover_of(kv_caches, num_blocks, interpreted=self._interpreted)
            self._of = key
        return self._mover

    @contextmanager
    def stand_in(self, runner_module: ModuleType, scheduler_output: Any) -> Iterator[None]:
        """Inside, the runner that ``runner_module`` defines copies by ours.

        Raises ``SeamError`` if it did not.
        """
        owed = len(scheduler_output.kv_cache_block_copies or ())
        if not owed:
            yield
            return
        before = self.num_copies
        with name_stands_for(runner_module, _NAME, copy_kv_cache_blocks_inplace, self.copy):
            yield
        if self.num_copies - before != owed:
            raise SeamError(
                f"vLLM made {owed} block copies of a step without calling {_NAME} of "
                f"{runner_module.__name__}. Serve with --kv-cache-backend paged and report this."
            )
