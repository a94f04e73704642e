"""The write path of Model Runner V2 on the device: range tables and the kernels that read them.

This folder imports torch, numpy and Triton, and nothing of vLLM or of the rest of this package, so
that it also runs on a GPU machine that has only those. Reading order: ``range_tables.py`` (a row),
``reference.py`` (what the kernels compute), ``slot_mapping.py`` and ``expansion.py`` (how).
``paged.py`` is the baseline: one table load per position, one table copy per step.
``python -m vllm_tagma.kernels.gpu_check`` checks and times them natively.
"""
