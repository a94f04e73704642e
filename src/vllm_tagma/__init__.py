"""vllm-tagma: KV-cache blocks held as few contiguous ranges, for stock vLLM.

``import vllm_tagma`` makes ``LLM(kv_cache_backend="tagma")`` work. It does not import vLLM: it
leaves a hook that wires ``EngineArgs`` when vLLM imports it (see ``plugin.py``), so this package
can be imported without vLLM, from inside vLLM's own plugin loading, and in no time.
"""

from __future__ import annotations

from vllm_tagma.plugin import register
from vllm_tagma.versions import tagma_version

__all__ = ["__version__", "register"]

__version__ = tagma_version()

register()
