"""Repairs matrix products of bf16 in Triton's interpreter, for every kernel alike.

numpy has no bf16, so the interpreter keeps its bits as uint16, and multiplies them as integers. The
bits are the upper half of an fp32, in which a device multiplies them too.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_create_dot = InterpreterBuilder.create_dot


def _as_fp32(operand: Any) -> Any:
    if operand.dtype.scalar != tl.bfloat16:
        return operand
    return TensorHandle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def repair() -> None:
    """Idempotent."""

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return _create_dot(self, _as_fp32(a), _as_fp32(b), *rest)

    InterpreterBuilder.create_dot = create_dot
