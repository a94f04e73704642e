"""The write path of Model Runner V2 on the device: range tables and the kernels that read them.

This folder imports torch, numpy and Triton, and nothing of vLLM or of the rest of this package but
``ranges.py``, so that it also runs on a GPU machine that has only those. Reading order:
``device_range_tables.py`` (a row),
``slot_mapping.py`` and ``expansion.py`` (how it becomes slots and tables);
``range_attention.py`` is the read path, which nothing serves with yet. What the kernels must
compute, and what they are timed against, is in ``lab/kernel_check/``.
"""
