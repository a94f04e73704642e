"""What the GPU check times: one piece of work, done the paged way and ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from vllm_tagma.lab.kernel_check.kernel_timing import INNER


class Workload(NamedTuple):
    """One row of the table: the same work by table and by ranges, into one buffer each returns."""

    name: str
    paged: Callable[[], torch.Tensor]
    tagma: Callable[[], torch.Tensor]
    calls_per_sample: int = INNER
