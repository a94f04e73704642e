"""The exceptions that vllm-tagma raises, in one tree.

``except TagmaError`` catches them all. Each message names the value, the limit, the option that
set it and the way out.
"""

from __future__ import annotations


class TagmaError(Exception):
    """Base of every error of this package."""


class ConfigError(TagmaError, ValueError):
    """An option, flag or environment value that cannot be understood."""


class UnsupportedError(TagmaError, ValueError):
    """A configuration outside the support matrix: refused at start-up, never served by paging."""


class SeamError(TagmaError, RuntimeError):
    """vLLM no longer looks as the plugin expects: an unknown version or a changed signature."""


class RangeCapError(TagmaError, RuntimeError):
    """A request's blocks form more ranges than a range table row holds."""


class InvariantError(TagmaError, RuntimeError):
    """A law of ``docs/invariants.md`` does not hold: a bug of this package."""


class SelfTestError(TagmaError, RuntimeError):
    """A kernel wrote something else than its reference, on this machine: the start ends."""
