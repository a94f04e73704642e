"""One row of the support matrix, and the sentence with which it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Status = Literal["served", "planned", "refused"]

Find = Callable[[Any], "str | None"]
"""Looks into a configuration; returns the offending value as text, or ``None`` if it is fine."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One row of the support matrix.

    A row that is not served has ``in_config`` (looks into a ``VllmConfig``) or ``in_cache``
    (looks into a ``KVCacheConfig``). ``planned`` rows are refused today like ``refused`` ones;
    the word only tells what to expect. A served row has a ``proof``: the pytest node ids, without
    which it would be a claim (``tests/plugin/test_support_proofs.py`` collects them).
    """

    id: str
    title: str
    option: str
    status: Status
    why: str
    way_out: str = ""
    in_config: Find | None = None
    in_cache: Find | None = None
    proof: tuple[str, ...] = ()

    def message(self, value: str, *, option: str | None = None) -> str:
        """The refusal: what, which option with which value, why, and the way out.

        ``option``: where ``value`` was found, if not in the option of the row.
        """
        later = " yet" if self.status == "planned" else ""
        return (
            f"--kv-cache-backend tagma does not serve {self.title}{later}: "
            f"{option or self.option} is {value}. {self.why}. Way out: "
            f"{self.way_out}, or use --kv-cache-backend paged."
        )


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A rule that a configuration breaks."""

    rule: Rule
    value: str

    @property
    def message(self) -> str:
        """The sentence a user is shown."""
        return self.rule.message(self.value)
