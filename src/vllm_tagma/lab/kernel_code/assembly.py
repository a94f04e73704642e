"""Compiles a kernel for a named GPU, and counts in its assembler what decides its speed.

Nothing here needs a GPU: Triton brings NVIDIA's assembler and disassembler, and LLVM's for AMD. A
loop is a branch to a label in front of it; an innermost loop has no other inside.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


class Target(NamedTuple):
    """A GPU by what a compiler calls it."""

    name: str
    backend: str
    arch: int | str
    lanes: int


TARGETS: Final = (
    Target("sm_80", "cuda", 80, 32),
    Target("sm_90", "cuda", 90, 32),
    Target("sm_100", "cuda", 100, 32),
    Target("gfx942", "hip", "gfx942", 64),
)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A kernel as launched. ``types``: of arguments that are no int32. ``constants``: values of
    compile-time arguments. ``aligned``: arguments that are multiples of 16, beside all pointers."""

    name: str
    kernel: Any
    constants: Mapping[str, Any]
    types: Mapping[str, str]
    aligned: tuple[str, ...] = ()
    vllms: bool = False


class Loop(NamedTuple):
    """An innermost loop. ``narrow``: loads of device memory of 8 bytes a lane or less, which are of
    tables; ``wide``: larger ones, which are of keys and values. ``depth``: loops around it."""

    instructions: int
    narrow: int
    wide: int
    products: int
    depth: int


@dataclass(frozen=True, kw_only=True)
class Code:
    """A compiled kernel. ``spills``: accesses to local memory, or spilled registers on AMD.
    ``shared``: bytes a block of threads, dynamic ones included. ``loops``: innermost, in order."""

    registers: int
    spills: int
    shared: int
    instructions: int
    loops: tuple[Loop, ...]

    @property
    def main_loop(self) -> Loop | None:
        """The innermost loop with the most matrix products; among equals the one with the fewest
        loops around it, then the longest."""
        key = [(loop.products, -loop.depth, loop.instructions) for loop in self.loops]
        return self.loops[key.index(max(key))] if key else None


def compiled(spec: Spec, target: Target) -> Code:
    """Compiles and reads. Raises what Triton raises; takes seconds."""
    names = spec.kernel.arg_names
    constants = {name: spec.constants[name] for name in names if name in spec.constants}
    signature = {
        name: "constexpr" if name in constants else spec.types.get(name, "i32") for name in names
    }
    aligned = [
        (at,)
        for at, name in enumerate(names)
        if signature[name].startswith("*") or (name in spec.aligned and name not in constants)
    ]
    source = ASTSource(
        fn=spec.kernel,
        signature=signature,
        constexprs=constants,
        attrs={at: [["tt.divisibility", 16]] for at in aligned},
    )
    built = triton.compile(source, target=GPUTarget(target.backend, target.arch, target.lanes))
    shared = int(built.metadata.shared)
    if target.backend == "hip":
        return _amd(built.asm["amdgcn"], shared)
    return _nvidia(built.asm["cubin"], shared)


def _nvidia(cubin: bytes, shared: int) -> Code:
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        usage = _output([str(tools / "cuobjdump"), "--dump-resource-usage", str(file)])
        text = _output([str(tools / "nvdisasm"), "-c", str(file)])
    lines: list[str] = []
    for line in text.splitlines():
        if label := re.match(r"^(\.L\w+):", line):
            lines.append(f"{label[1]}:")
        elif found := re.match(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?\s*([^;]*);", line):
            lines.append(found[1].strip())
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None, usage
    return Code(
        registers=int(registers[1]),
        spills=sum(line.startswith(("LDL", "STL")) for line in lines),
        shared=shared,
        instructions=sum(not line.endswith(":") for line in lines),
        loops=_loops(lines, branch=r"^BRA.*`\((\.L\w+)\)", kinds=_NVIDIA),
    )


def _amd(text: str, shared: int) -> Code:
    lines = []
    for line in text.splitlines():
        if label := re.match(r"^(\.L\w+):", line):
            lines.append(f"{label[1]}:")
        elif found := re.match(r"^\s+([a-z]\w+[^;]*)", line):
            lines.append(found[1].strip())
    said = {key: int(n) for key, n in re.findall(r"\.(\w+_count):\s+(\d+)", text)}
    return Code(
        registers=said["vgpr_count"],
        spills=said["vgpr_spill_count"] + said["sgpr_spill_count"],
        shared=shared,
        instructions=sum(not line.endswith(":") for line in lines),
        loops=_loops(lines, branch=r"^s_c?branch\w*\s+(\.L\w+)", kinds=_AMD),
    )


_NVIDIA: Final = {
    # An asynchronous copy names its width as a load does; TMA (UBLKCP, UTMALDG) moves tiles.
    "wide": r"^(LDG(STS)?\b.*\.128|UBLKCP|UTMALDG)",
    "narrow": r"^LDG(STS)?\b(?!.*\.128)",
    "products": r"^\w*(MMA)\b",
}
_AMD: Final = {
    "wide": r"^(global|buffer|flat)_load_(dwordx4|b128)",
    "narrow": r"^(global|buffer|flat)_load_(?!dwordx4|b128)",
    "products": r"^v_mfma",
}


def _loops(lines: list[str], *, branch: str, kinds: Mapping[str, str]) -> tuple[Loop, ...]:
    """The innermost loops of an assembler text of labels (``name:``) and instructions."""
    at = {line[:-1]: i for i, line in enumerate(lines) if line.endswith(":")}
    ends: dict[int, int] = {}
    for i, line in enumerate(lines):
        if (found := re.match(branch, line)) and at.get(found[1], i) < i:
            ends[at[found[1]]] = max(i, ends.get(at[found[1]], 0))
    spans = sorted(ends.items())
    loops = []
    for first, last in spans:
        body = [line for line in lines[first : last + 1] if not line.endswith(":")]
        if any(first < other and end <= last for other, end in spans):
            continue
        if body[0].startswith("BRA"):  # the trap at the end of a program jumps to itself
            continue
        count = {kind: sum(bool(re.match(r, line)) for line in body) for kind, r in kinds.items()}
        depth = sum(other < first and end > last for other, end in spans)
        loops.append(Loop(instructions=len(body), depth=depth, **count))
    return tuple(loops)


def _output(command: list[str]) -> str:
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return run.stdout + run.stderr
