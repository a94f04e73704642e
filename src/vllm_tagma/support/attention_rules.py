"""Rules about attention over range tables, ``--attention-backend CUSTOM``.

How rules are joined: ``rule_table.py``; what they ask: ``attention_probes.py``.
"""

from __future__ import annotations

from typing import Final

from vllm_tagma.support import attention_probes as probe
from vllm_tagma.support.rule import Find, Rule, Status

_DROP = "drop --attention-backend"
_E2E = "tests/e2e/test_range_attention.py"


def _not_with(
    name: str, title: str, find: Find, why: str, way_out: str, status: Status = "planned"
) -> Rule:
    return Rule(
        id=f"range-attention-{name}",
        title=f"attention over ranges {title}",
        option="--attention-backend",
        status=status,
        why=why,
        way_out=f"{way_out}, or {_DROP}" if way_out else _DROP,
        in_config=probe.only_if_chosen(find),
    )


ATTENTION_RULES: Final[tuple[Rule, ...]] = (
    Rule(
        id="range-attention",
        title="attention that reads range tables instead of block tables, off by default",
        option="--attention-backend CUSTOM",
        status="served",
        why="vLLM's Triton attention with another kernel, on Model Runner V2 and full attention in "
        "fp16, bf16 or fp32. The same tokens under Triton's interpreter; on a GPU it is as "
        "unproven as the rest of that path",
        proof=(
            f"{_E2E}::test_tokens_equal_those_of_vllms_triton_attention[full]",
            "tests/kernels/test_kernels.py::test_attention_over_ranges_equals_vllms[interpreter]",
        ),
    ),
    _not_with(
        "runner",
        "without Model Runner V2",
        probe.v1_runner,
        "Model Runner V1 has no range tables on the device; on a CPU vLLM would take its own "
        "attention instead and say so only in the log",
        "",
        "refused",
    ),
    _not_with(
        "plugin",
        "where another plugin has registered CUSTOM",
        probe.another_plugins,
        "vLLM has one place for a backend from outside",
        "keep one of the plugins",
        "refused",
    ),
    _not_with(
        "kv-dtype",
        "of quantised KV",
        probe.kv_dtype,
        "Its kernel does not scale keys and values",
        "set --kv-cache-dtype auto",
    ),
    _not_with(
        "head-size",
        f"with heads smaller than {probe.SMALLEST_HEAD}",
        probe.head_size,
        "vLLM's Triton attention, of which it is one, does not take them either",
        "choose another model",
        "refused",
    ),
    _not_with(
        "mla",
        "of latents (MLA)",
        probe.mla,
        "Its kernel reads keys and values, not latents",
        "choose another model",
    ),
    _not_with(
        "windows",
        "with sliding windows in an engine",
        probe.windows,
        "The kernel is tested with windows; no engine has run such a model on it",
        "choose a model with full attention",
    ),
    _not_with(
        "speculation",
        "while drafts are verified",
        probe.speculation,
        "A drafter has tables of its own, which are expanded",
        "drop --speculative-config",
    ),
    _not_with(
        "connector",
        "with a KV connector",
        probe.connector,
        "Not tested",
        "drop --kv-transfer-config",
    ),
    Rule(
        id="range-attention-per-kind",
        title="attention over ranges for some kinds of layers",
        option="--attention-config.backend_per_kind",
        status="planned",
        why="Not tested",
        way_out="name it by --attention-backend alone",
        in_config=probe.per_kind,
    ),
)
