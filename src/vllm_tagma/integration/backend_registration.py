"""Puts our attention backend where vLLM looks for one from outside (``attention_backend.py``).

Seam: ``register_backend`` of vLLM's registry, which is made for this.
"""

from __future__ import annotations

from vllm_tagma import attention_backend


def register() -> None:
    """Makes ``CUSTOM`` ours, unless it is another plugin's, which a rule then refuses. Idempotent.

    For processes that serve tagma only: whoever serves paged must not notice this package.
    """
    from vllm.v1.attention.backends import registry

    if attention_backend.owner() is None:
        custom = registry.AttentionBackendEnum[attention_backend.NAME]
        registry.register_backend(custom, attention_backend.CLASS)
