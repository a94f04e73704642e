"""KV transfer as runs of blocks: the arithmetic, without vLLM and without a transport.

``joint_runs.py`` finds what adjoins on both sides of a transfer, ``descriptor_space.py`` says where
such a run lies in memory. ``integration/transfer/`` hands both to vLLM's NIXL connectors.
"""
