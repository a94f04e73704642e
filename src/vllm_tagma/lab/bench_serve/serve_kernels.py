"""Which share of a step goes to slot mapping, block tables and attention, from a torch trace.

On a GPU the shares are of the time that kernels ran, added up over the streams; on a CPU they are
of the time of the worker's steps, by the operators inside them. The two are not comparable with
each other, only between backends.

Range reads would let attention read ranges instead of block ids. They would spare the expansion (or
gather) of the table, and of attention itself at most its loads of block ids. The bound below takes
:data:`TABLE_LOADS` of the attention time for those, which is an assumption, and is compared with
:data:`WORTH`: what a serving benchmark can just see.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from vllm_tagma.errors import TagmaError

SLOTS, TABLE, ATTENTION, WRITES, OTHER = (
    *("slot mapping", "table gather or expansion", "attention", "KV writes"),
    "everything else",
)
CATEGORIES: Final = (SLOTS, TABLE, ATTENTION, WRITES, OTHER)
# Names that scopes.py gives to calls of the CPU worker.
SLOT_SCOPE: Final = "tagma bench: slot mapping"
TABLE_SCOPE: Final = "tagma bench: block table"
TABLE_LOADS: Final = 0.1
WORTH: Final = 0.02

# FlashAttention, FlashInfer and vLLM's Triton kernels, with what merges their parts.
_ATTENTION_NAMES: Final = (
    r"attention|attn|flash|fmha|mha|BatchPrefill|BatchDecode|merge_state|reduce_segments"
)
# The first match counts: a KV write is named after the cache, an expansion after the table.
_KERNELS: Final = (
    (SLOTS, re.compile(r"slot_mapping")),
    (TABLE, re.compile(r"gather_block_table|_gather_kernel|_expansion_kernel|_write_rows_kernel")),
    (WRITES, re.compile(r"reshape_and_cache|concat_and_cache|kv_cache_update")),
    (ATTENTION, re.compile(_ATTENTION_NAMES)),
)
_SCOPES: Final = {SLOT_SCOPE: SLOTS, TABLE_SCOPE: TABLE}
_CPU_OPS: Final = (
    (WRITES, re.compile(r"^_C\w*::.*reshape_and_cache")),
    (ATTENTION, re.compile(r"^_C\w*::.*attention_with_kv_cache|^aten::.*scaled_dot_product")),
)
_STEP = re.compile(r"^execute_(?:context|\w*)_?\d+\(\d+\)_generation_\d+\(\d+\)")
_KERNEL_KINDS = {"kernel", "gpu_memcpy", "gpu_memset"}


class TraceError(TagmaError, RuntimeError):
    """The profiler left no trace, or one without a step."""


def analyse(folder: Path) -> dict[str, Any]:
    """Times and shares of the traces below ``folder``; see :func:`shares`. Raises TraceError."""
    traces = sorted(folder.glob("*.pt.trace.json*"))
    if not traces:
        raise TraceError(
            f"the profiler wrote no trace to {folder}: the server's log says why; a recorded stage "
            "that is too short ends before it begins (--profile-requests)"
        )
    events = [event for trace in traces for event in _events(trace)]
    return {"traces": [trace.name for trace in traces], **shares(events)}


def shares(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """``on`` (gpu or cpu), ``steps``, ``step_us`` (what the shares are of, all steps together),
    ``us`` and ``shares`` by category, ``top`` (the longest kernels or operators by name).

    Raises TraceError for a trace without a step.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    steps = [e for e in complete if _STEP.match(e["name"]) and e.get("cat") == "user_annotation"]
    steps = [e for e in steps if "_0(0)_generation_0(0)" not in e["name"]]
    if not steps:
        raise TraceError("the trace has no step of the worker: nothing ran while it was recorded")
    spent = [event for event in complete if event.get("cat") in _KERNEL_KINDS]
    on = "gpu" if spent else "cpu"
    times: defaultdict[str, float] = defaultdict(float)
    names: defaultdict[str, float] = defaultdict(float)
    if spent:
        total = 0.0
        for event in spent:
            total += event["dur"]
            times[_category(event["name"], _KERNELS)] += event["dur"]
            names[event["name"]] += event["dur"]
    else:
        total = float(sum(event["dur"] for event in steps))
        for event in complete:
            category = _SCOPES.get(event["name"]) or _category(event["name"], _CPU_OPS)
            if category != OTHER:
                times[category] += event["dur"]
            if event.get("cat") == "cpu_op":
                names[event["name"]] += event["dur"]
        times[OTHER] = max(total - sum(times.values()), 0.0)
    top = sorted(names.items(), key=lambda item: -item[1])[:12]
    return {
        "on": on,
        "steps": len(steps),
        "step_us": round(total, 1),
        "us": {name: round(times[name], 1) for name in CATEGORIES},
        "shares": {name: times[name] / total if total else 0.0 for name in CATEGORIES},
        "top": [[name[:120], round(us, 1)] for name, us in top],
    }


def best_case(shares_by_category: dict[str, float]) -> float:
    """The most that range reads in attention could spare, as a share of a step."""
    return shares_by_category[TABLE] + TABLE_LOADS * shares_by_category[ATTENTION]


def _category(name: str, patterns: Iterable[tuple[str, re.Pattern[str]]]) -> str:
    return next((category for category, pattern in patterns if pattern.search(name)), OTHER)


def _events(path: Path) -> list[dict[str, Any]]:
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if path.suffix == ".gz" else data
        events: list[dict[str, Any]] = json.loads(data)["traceEvents"]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{path} is no trace that can be read: {error!r}") from None
    return events
