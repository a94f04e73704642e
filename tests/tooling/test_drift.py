"""What `make drift` says about a release that fits, one that is known not to, and a new one."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

import drift
from vllm_tagma import versions


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The seams' files of the installed vLLM, which a test may change."""
    from vllm_tagma.integration import seams
    from vllm_tagma.integration.seams import signatures

    root = versions.vllm_root()
    assert root is not None
    copy = tmp_path / "vllm"
    for seam in seams.SEAMS:
        source = signatures.module_path(root, seam.target.partition(":")[0])
        if source.is_file():
            target = copy / source.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    (copy / "_version.py").write_text("version = '0.32.7'\n")
    return copy


def test_a_known_series_has_to_fit(package: Path, tmp_path: Path) -> None:
    found = drift.differences(Path(sys.executable), package)
    assert found == ("0.32.7", True, [])
    assert drift.verdict(*found, records=tmp_path) == []
    scheduler = package / "v1" / "core" / "kv_cache_manager.py"
    scheduler.write_text(
        scheduler.read_text().replace("def free(self, request", "def free(self, r")
    )
    found = drift.differences(Path(sys.executable), package)
    told = drift.verdict(*found, records=tmp_path)
    assert told[0] == "vLLM 0.32.7 is of a known series and does not fit:"
    assert "KVCacheManager.free" in told[1]


def test_a_new_series_is_told_once(package: Path, tmp_path: Path) -> None:
    (package / "_version.py").write_text("version = '0.99.0'\n")
    found = drift.differences(Path(sys.executable), package)
    version, known, lines = found
    assert (version, known) == ("0.99.0", False)
    assert lines, "0.32 differs from the newest known series"
    told = drift.verdict(*found, records=tmp_path)
    assert told[0] == "vLLM 0.99.0 is new, no vllm-0.99.txt in docs/drift:"
    record = drift.record_of(version, records=tmp_path)
    record.write_text("".join(f"{line}\n" for line in lines))
    assert drift.verdict(*found, records=tmp_path) == []
    assert drift.verdict("0.99.1", False, lines, records=tmp_path) == []
    told = drift.verdict("0.99.1", False, [*lines, "one more"], records=tmp_path)
    assert told[0] == "vLLM 0.99.1 is not what docs/drift/vllm-0.99.txt says:"
    assert told[-1] == "+one more"


def test_what_is_written_down_is_of_series_that_are_refused(root: Path) -> None:
    for record in (root / drift.RECORDS).glob("*"):
        assert record.name.removeprefix("vllm-").removesuffix(".txt") not in (
            versions.KNOWN_VLLM_SERIES
        )
