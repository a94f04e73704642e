"""Which vLLM is installed, told from its files, and which ones are accepted."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_tagma import versions
from vllm_tagma.errors import SeamError


@pytest.mark.parametrize(
    ("version", "series"),
    [
        ("0.32.0", "0.32"),
        ("0.32.0+cpu", "0.32"),
        ("0.33.1rc2.dev14+g1234abcd.d20260901", "0.33"),
        ("v0.33.0", "0.33"),
        ("0.320.1", "0.320"),
        ("0.3", "0.3"),
        ("dev", None),
        ("", None),
    ],
)
def test_series(version: str, series: str | None) -> None:
    assert versions.series_of(version) == series


@pytest.mark.parametrize("version", ["0.32.0", "0.32.5+cpu", "0.33.0.dev3"])
def test_known_versions_are_accepted(version: str) -> None:
    assert versions.require_supported_vllm(version) in versions.KNOWN_VLLM_SERIES


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "0.3.2", "0.330.0", "1.0", "dev"])
def test_unknown_versions_are_refused_by_name(version: str) -> None:
    with pytest.raises(SeamError) as error:
        versions.require_supported_vllm(version)
    message = str(error.value)
    assert version in message
    assert "0.32 and 0.33" in message
    assert "--kv-cache-backend paged" in message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("__version__ = version = '0.33.0'\n", "0.33.0"),
        ('__version__: str\nversion: str\nversion = "0.32.1+cpu"\n', "0.32.1+cpu"),
        ("__version__ = '0.32.2'\n", "0.32.2"),
    ],
)
def test_the_package_itself_is_asked_first(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "_version.py").write_text(text)
    assert versions.installed_vllm_version(tmp_path) == expected


def test_without_a_version_file_the_metadata_speaks(tmp_path: Path) -> None:
    (tmp_path / "version.py").write_text('__version__ = "dev"\n')
    installed = versions.installed_vllm_version(tmp_path)
    assert installed is not None
    assert versions.series_of(installed) in versions.KNOWN_VLLM_SERIES


def test_the_installed_vllm_is_a_known_one() -> None:
    assert versions.require_supported_vllm() in versions.KNOWN_VLLM_SERIES


def test_no_vllm_at_all_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "vllm_root", lambda: None)
    with pytest.raises(SeamError, match=r"not installed.*0\.32 and 0\.33"):
        versions.require_supported_vllm()
