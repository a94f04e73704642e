"""``python -m vllm_tagma.lab.kernel_code.code_report``: the table of what compilers say.

Writes ``docs/kernel-code.md`` (or ``--out``). Needs Triton; vLLM's rows need vLLM. No GPU.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import warnings
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import triton

from vllm_tagma.kernels.range_attention import TILE
from vllm_tagma.lab.kernel_code import specs
from vllm_tagma.lab.kernel_code.assembly import TARGETS, Code, Spec, Target, compiled

COMMAND = "python -m vllm_tagma.lab.kernel_code.code_report"

_TEXT = """# What compilers say about the kernels

A static finding: of code compiled for a card, not of a run on one. No time follows from it.

    {command}

wrote this page, with Triton {triton} (its own `ptxas`, `nvdisasm` and LLVM) and vLLM {vllm},
at commit {commit}. {tests} asserts what matters of it on every change.

Each kernel is compiled as it is launched for a model of 32 heads, 8 KV heads of 128, bf16 and
blocks of 16 tokens, with tokens outside heads in the cache (vLLM's default) unless said. `sm_80` is
an A100, `sm_90` an H100 or H200, `sm_100` a B200, `gfx942` an MI300X. A decode is cut into 16
pieces by both, as vLLM does for few requests. vLLM's tile is 16 keys in a decode and 32 in a
prefill, ours {tile} in both.

- **regs**: registers a thread. **spills**: accesses to memory because registers ran out.
  **shared**: bytes a block of threads. **all**: instructions of the kernel; our attention holds two
  loops, for one range and for several.
- **loop**: instructions of the innermost loop: for attention the one with the matrix products (for
  ours, of a row of one range), else the longest; compilers unroll some. **a key**: of those, for
  each key.
- **table**: loads in that loop of 8 bytes a lane or less, which are of tables. **KV**: loads of 16
  bytes, which are of keys and values.

{table}
## What it says

{findings}
"""


def _row(spec: Spec, target: Target, code: Code) -> str:
    loop = code.main_loop
    tile = spec.constants.get("TILE_SIZE", spec.constants.get("TILE", 0))
    attention = loop is not None and loop.products > 0
    cells = [
        f"{spec.name}, {'vLLM' if spec.vllms else 'ours'}",
        target.name,
        f"{code.registers}",
        f"{code.spills}",
        f"{code.shared:,}",
        f"{code.instructions:,}",
        f"{loop.instructions}" if loop else "",
        f"{loop.instructions / tile:.1f}" if loop and attention else "",
        f"{loop.narrow}" if loop else "",
        f"{loop.wide}" if loop and attention else "",
    ]
    return "| " + " | ".join(cells) + " |"


def table(found: Iterable[tuple[Spec, Target, Code]]) -> str:
    """The table in Markdown, in the order given."""
    head = "| kernel | GPU | regs | spills | shared | all | loop | a key | table | KV |"
    rows = [_row(*one) for one in found]
    return "\n".join([head, "|---|---|" + "---:|" * 8, *rows]) + "\n"


def findings(found: list[tuple[Spec, Target, Code]]) -> str:
    """Sentences that follow from the table, whatever it says."""
    attention = [(s, t, c.main_loop) for s, t, c in found if c.main_loop and c.main_loop.products]
    lines = []
    for vllms, whose in ((False, "ours"), (True, "vLLM's")):
        loads = sorted({loop.narrow for s, _, loop in attention if s.vllms == vllms})
        if loads:
            span = f"{loads[0]}" if len(loads) == 1 else f"{loads[0]} to {loads[-1]}"
            lines.append(f"- Table loads in the inner loop of attention, {whose}: {span}.")
    spilled = sorted({f"{s.name} on {t.name}" for s, t, c in found if c.spills and not s.vllms})
    lines.append(f"- Kernels of ours that spill: {', '.join(spilled) or 'none'}.")
    return "\n".join(lines)


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    run = subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return run.stdout.strip() or "unknown"


def _vllm_version() -> str:
    try:
        return version("vllm")
    except PackageNotFoundError:
        return "(absent)"


def main(arguments: list[str] | None = None) -> int:
    """Compiles everything for every target; a minute or two of one core."""
    parser = argparse.ArgumentParser(prog=COMMAND)
    parser.add_argument("--out", type=Path, default=Path("docs") / "kernel-code.md")
    out = parser.parse_args(arguments).out
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    ours = (*specs.range_specs(), *specs.write_specs())
    theirs = {spec.name: spec for spec in specs.vllm_specs()}
    found = []
    for spec in ours:
        for one in (spec, *([theirs[spec.name]] if spec.name in theirs else [])):
            for target in TARGETS:
                found.append((one, target, compiled(one, target)))
                print(_row(*found[-1]), flush=True)
    text = _TEXT.format(
        command=COMMAND,
        triton=triton.__version__,
        vllm=_vllm_version(),
        commit=_commit(),
        tests="`tests/kernels/test_kernel_code.py`",
        tile=TILE,
        table=table(found),
        findings=findings(found),
    )
    out.write_text(text, encoding="utf-8")
    print(f"written to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
