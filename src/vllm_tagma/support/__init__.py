"""What is served and what is refused: one table, from which refusals and document both come.

Closed where not proven: a configuration that changes what KV-cache blocks mean is refused at
start-up, with the option that set it and the way out, until a test shows equal results for it.
Nothing falls back to paging by itself.

The table is joined in ``rule_table.py``. Gate 1 is ``create_engine_config`` in the front end, which
sees the ``VllmConfig``; gate 2 is the scheduler's constructor in the engine core, which also sees
the ``KVCacheConfig`` that the loaded model led to. Behind them, code that would break on a value
refuses it by the same rule (``refuse``). ``python -m vllm_tagma.support`` writes
``docs/support.md``.
"""

from __future__ import annotations

from vllm_tagma.support.gates import explain, refuse, require_supported, rules
from vllm_tagma.support.rule import Find, Finding, Rule, Status
from vllm_tagma.support.support_document import DOCUMENT, render_markdown

__all__ = [
    "DOCUMENT",
    "Find",
    "Finding",
    "Rule",
    "Status",
    "explain",
    "refuse",
    "render_markdown",
    "require_supported",
    "rules",
]
