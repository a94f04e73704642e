"""``make gpu-check``: the V2 kernels against their reference, and beside the paged baseline.

Imports ``vllm_tagma.kernels``, ``ranges.py``, torch, numpy and Triton, and nothing else, so that it
also runs on a GPU machine that has only those. ``kernel_reference.py`` is what the kernels compute,
in numpy; ``layouts.py`` draws batches, ``kernel_checks.py`` compares, ``paged.py`` is the baseline
(one table load per position, one table copy per step), ``kernel_timing.py`` the clock and
``gpu_check.py`` the program.
"""
