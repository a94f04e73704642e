"""One place where this package leans on vLLM's internals: what it is and how it is found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from vllm_tagma.integration.seams import signatures

Kind = Literal["patch", "subclass", "swap", "contract"]
Room = Literal["config", "scheduler", "worker", "worker_v1", "worker_v2", "transfer"]

ROOMS: Final[tuple[Room, ...]] = (
    "config",
    "scheduler",
    "worker",
    "worker_v1",
    "worker_v2",
    "transfer",
)
"""The processes a seam matters in: front end, engine core, every worker, worker by model runner;
and a connector of ours for KV transfer, in whichever process and on whichever backend."""


@dataclass(frozen=True, kw_only=True)
class Seam:
    """One place of vLLM that this package touches or answers to.

    ``target`` is ``"module:Class.method"``. With ``callee`` the seam is the call of ``callee``
    inside ``target``; with ``bases`` it is the base classes of ``target``; with ``owner`` it is
    the set of attributes that the module ``target`` reads from it; otherwise it is the signature
    of ``target``. ``expected`` holds for every known release, ``changed`` replaces it for single
    ones.
    """

    target: str
    kind: Kind
    room: Room
    why: str
    expected: str
    remove_when: str
    callee: str | None = None
    bases: bool = False
    owner: str | None = None
    changed: Mapping[str, str] = field(default_factory=dict)

    def expected_in(self, series: str) -> str:
        """What this seam looks like in a known release series."""
        return self.changed.get(series, self.expected)

    def found_in(self, root: Path) -> str | None:
        """What this seam looks like in the vLLM package at ``root``; ``None`` if it is gone."""
        if self.callee is not None:
            return signatures.call_of(root, self.target, self.callee)
        if self.bases:
            return signatures.bases_of(root, self.target)
        if self.owner is not None:
            path = signatures.module_path(root, self.target)
            return ", ".join(sorted(signatures.members_read(path, self.owner)))
        return signatures.signature_of(root, self.target)

    def title(self) -> str:
        """The seam in words, for a report."""
        if self.callee is not None:
            return f"the call of {self.callee} in {self.target}"
        if self.owner is not None:
            return f"what {self.target} reads from {self.owner}"
        return f"the bases of {self.target}" if self.bases else self.target

    def problem(self, *, root: Path, series: str) -> str | None:
        """``None`` if the seam fits, else a sentence with expectation and finding."""
        expected, found = self.expected_in(series), self.found_in(root)
        if found == expected:
            return None
        return f"{self.title()}: expected {expected or 'nothing'}, found {found or 'nothing'}"
