"""Names for the profiler around what vLLM does not name: slot mapping and the block table.

vLLM's worker mixes the class below in when it is given as ``--worker-extension-cls``, which only
the recorded runs do, of both backends alike. Importing this module in the worker wraps vLLM's
block-table calls of Model Runner V1 in ``torch.profiler.record_function``: the paged backend's slot
mapping is a named operator there, ours is a plain call that a trace would not show. On a GPU
(Model Runner V2) both are kernels with names and nothing is wrapped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm_tagma.lab.bench_serve.serve_kernels import SLOT_SCOPE, TABLE_SCOPE


class WorkerScopes:
    """Adds nothing to the worker: that this module is imported is all it is for."""


def _named(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    from torch.profiler import record_function

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        with record_function(name):
            return function(*arguments, **options)

    return call


def _wrap() -> None:
    from vllm.v1.worker.block_table import MultiGroupBlockTable as Tables

    Tables.compute_slot_mapping = _named(Tables.compute_slot_mapping, SLOT_SCOPE)
    Tables.commit_block_table = _named(Tables.commit_block_table, TABLE_SCOPE)


_wrap()
