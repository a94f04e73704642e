"""Do the seams fit the vLLM that is installed? Start-up, ``tagma doctor`` and tests ask."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from vllm_tagma import versions
from vllm_tagma.errors import SeamError
from vllm_tagma.integration.seams.seam import ROOMS, Room
from vllm_tagma.integration.seams.seam_table import SEAMS


def check_seams(
    vllm_version: str | None = None,
    *,
    root: Path | None = None,
    rooms: Iterable[Room] = ROOMS,
) -> list[str]:
    """The seams that do not fit, one sentence each; an empty list means all fit.

    ``vllm_version`` and ``root`` (the folder of the ``vllm`` package) default to what is
    installed. An unknown or absent vLLM is the only entry of the list, not an exception, so that
    ``tagma doctor`` can print it. Reads each touched source file once per process.
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
    problems = (s.problem(root=root, series=series) for s in SEAMS if s.room in wanted)
    return [problem for problem in problems if problem is not None]


def require_seams(*rooms: Room) -> None:
    """Stop unless every seam of ``rooms`` fits the installed vLLM.

    Raises:
        SeamError: naming each seam that does not fit, what was expected and what was found.
    """
    problems = check_seams(rooms=rooms)
    if problems:
        raise SeamError(
            f"vllm-tagma {versions.tagma_version()} does not fit vLLM "
            f"{versions.installed_vllm_version()}: {'; '.join(problems)}. Install a release it "
            f"was tested with, or use --kv-cache-backend paged."
        )
