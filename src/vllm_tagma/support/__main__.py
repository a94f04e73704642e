"""``python -m vllm_tagma.support``: writes ``docs/support.md`` from the table."""

from __future__ import annotations

from vllm_tagma.support.support_document import main

main()
