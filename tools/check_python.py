# ruff: noqa: UP031, UP036 - this file alone is read by the old interpreter it refuses.
"""Refuse a Python older than 3.11, in a syntax that any Python 3 can read."""

import sys

if sys.version_info < (3, 11):
    sys.exit(
        "%s is Python %d.%d; vllm-tagma needs 3.11 or newer. Install one and name it, for "
        "example: make serve PYTHON=python3.12" % ((sys.executable,) + sys.version_info[:2])
    )
