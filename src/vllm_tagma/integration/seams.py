"""Every place where this package leans on vLLM's internals, as data, and the check that they fit.

A seam names what is touched, how, why, what it looked like in each release this package knows,
and when the seam can go. Start-up checks the seams of the process it runs in and stops on the
first that does not fit; ``tagma doctor`` and the tests check all of them, the latter for each
known release. The checks read vLLM's source files (``signatures.py``), so they are cheap and
never import a worker into an API server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from vllm_tagma import versions
from vllm_tagma.errors import SeamError
from vllm_tagma.integration import signatures

Kind = Literal["patch", "subclass", "swap", "contract"]
Room = Literal["config", "scheduler", "worker", "worker_v2"]

ROOMS: Final[tuple[Room, ...]] = ("config", "scheduler", "worker", "worker_v2")
"""The processes a seam matters in: front end, engine core, worker by model runner."""

SCHEDULERS: Final[Mapping[bool, str]] = {
    False: "vllm_tagma.integration.scheduler.TagmaScheduler",
    True: "vllm_tagma.integration.scheduler.TagmaAsyncScheduler",
}
"""Scheduler class by ``scheduler_config.async_scheduling``. Strings cross process boundaries, and
a process without this package dies on them instead of serving paged."""

CPU_WORKER: Final = "vllm.v1.worker.cpu_worker.CPUWorker"
GPU_WORKER: Final = "vllm.v1.worker.gpu_worker.Worker"

WORKERS: Final[Mapping[tuple[str, bool], str]] = {
    (CPU_WORKER, False): "vllm_tagma.integration.worker_v1.TagmaCPUWorker",
    (CPU_WORKER, True): "vllm_tagma.integration.worker_v2.TagmaV2CPUWorker",
    (GPU_WORKER, True): "vllm_tagma.integration.worker_v2.TagmaWorker",
}
"""Our worker class by the worker class that vLLM's platform chose and whether the runner is V2.
Which of them are admitted is for ``support.py`` to say."""


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


def seams() -> tuple[Seam, ...]:
    """All seams, in the order of ``ROOMS``."""
    from vllm_tagma.integration import seam_table

    return seam_table.SEAMS


def check_seams(
    vllm_version: str | None = None,
    *,
    root: Path | None = None,
    rooms: Iterable[Room] = ROOMS,
) -> list[str]:
    """The seams that do not fit, one sentence each; an empty list means all fit.

    ``vllm_version`` and ``root`` (the folder of the ``vllm`` package) default to what is
    installed. An unknown or absent vLLM is the only entry of the list, not an exception, so that
    ``tagma doctor`` can print it. Costs one parse of each touched source file per process.
    """
    root = root or versions.vllm_root()
    if root is None:
        return ["vLLM is not installed"]
    try:
        series = versions.require_supported_vllm(
            vllm_version or versions.installed_vllm_version(root)
        )
    except SeamError as error:
        return [str(error)]
    wanted = set(rooms)
    problems = (s.problem(root=root, series=series) for s in seams() if s.room in wanted)
    return [problem for problem in problems if problem is not None]


def require_seams(room: Room) -> None:
    """Stop unless every seam of ``room`` fits the installed vLLM.

    Raises:
        SeamError: naming each seam that does not fit, what was expected and what was found.
    """
    problems = check_seams(rooms=(room,))
    if problems:
        raise SeamError(
            f"vllm-tagma {versions.tagma_version()} does not fit vLLM "
            f"{versions.installed_vllm_version()}: {'; '.join(problems)}. Install a release it "
            f"was tested with, or use --kv-cache-backend paged."
        )
