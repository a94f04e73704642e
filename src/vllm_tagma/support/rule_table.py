"""The support matrix: all rules joined. How they are used: ``gates.py``.

A rule may name an option of a single vLLM release. A rule for a new option is added in the file of
its subject (``*_rules.py``) and nowhere else; what most ask is in ``config_probes.py``.
"""

from __future__ import annotations

from typing import Final

from vllm_tagma.support.attention_rules import ATTENTION_RULES
from vllm_tagma.support.cache_rules import CACHE_RULES
from vllm_tagma.support.connector_rules import CONNECTOR_RULES
from vllm_tagma.support.feature_rules import FEATURE_RULES
from vllm_tagma.support.model_rules import MODEL_RULES
from vllm_tagma.support.process_rules import PROCESS_RULES
from vllm_tagma.support.rule import Rule
from vllm_tagma.support.served_rules import SERVED_RULES
from vllm_tagma.support.speculation_rules import SPECULATION_RULES

RULES: Final[tuple[Rule, ...]] = (
    SERVED_RULES
    + MODEL_RULES
    + FEATURE_RULES
    + PROCESS_RULES
    + CONNECTOR_RULES
    + CACHE_RULES
    + SPECULATION_RULES
    + ATTENTION_RULES
)
