"""Importing the package: light, without vLLM, from inside vLLM, and effective all the same."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

import pytest

from vllm_tagma.integration.import_hook import when_imported


def _python(code: str, path: Path | None = None, *, isolated: bool = False) -> str:
    """Run ``code`` in a fresh interpreter; its standard output."""
    package_parent = str(Path(importlib.import_module("vllm_tagma").__file__).parents[1])
    folders = [str(path)] if path else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*folders, package_parent])}
    flags = ["-S"] if isolated else []  # -S: without site-packages, so without vLLM
    run = subprocess.run(
        [sys.executable, *flags, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_import_does_not_import_vllm_or_torch() -> None:
    out = _python("import sys, vllm_tagma; print('vllm' in sys.modules, 'torch' in sys.modules)")
    assert out.split() == ["False", "False"]


def test_the_import_works_where_vllm_is_not_installed() -> None:
    code = (
        "import vllm_tagma\n"
        "from vllm_tagma.integration.seams import check_seams\n"
        "print(check_seams())"
    )
    assert "vLLM is not installed" in _python(code, isolated=True)


def test_vllm_finds_the_entry_point() -> None:
    values = [e.value for e in entry_points(group="vllm.general_plugins") if e.name == "tagma"]
    assert set(values) == {"vllm_tagma.plugin:register"}


FAKE_VLLM = {
    "vllm/__init__.py": "",
    "vllm/engine/__init__.py": "",
    "vllm/engine/arg_utils.py": (
        "class EngineArgs:\n"
        "    def __init__(self, additional_config=None):\n"
        "        self.additional_config = additional_config\n"
        "    @staticmethod\n"
        "    def add_cli_args(parser):\n"
        "        return parser\n"
        "    def create_engine_config(self):\n"
        "        return 'paged config'\n"
        "class AsyncEngineArgs(EngineArgs):\n"
        "    pass\n"
    ),
}


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_an_unknown_vllm_still_serves_paged_and_refuses_tagma(tmp_path: Path) -> None:
    root = _write(tmp_path, {**FAKE_VLLM, "vllm/_version.py": "version = '0.99.0'\n"})
    code = (
        "import vllm_tagma\n"
        "from vllm.engine.arg_utils import EngineArgs\n"
        "print(EngineArgs().create_engine_config())\n"
        "try: EngineArgs(kv_cache_backend='tagma').create_engine_config()\n"
        "except vllm_tagma.errors.SeamError as error: print(error)\n"
    )
    paged, refusal = _python(code, root).splitlines()
    assert paged == "paged config"
    assert "vLLM 0.99.0 is not known" in refusal
    assert "0.32 and 0.33" in refusal


def test_a_vllm_without_the_seams_is_left_alone(tmp_path: Path) -> None:
    without = FAKE_VLLM["vllm/engine/arg_utils.py"].replace("def create_engine_config", "def build")
    root = _write(tmp_path, {**FAKE_VLLM, "vllm/engine/arg_utils.py": without})
    code = (
        "import vllm_tagma\n"
        "from vllm.engine.arg_utils import EngineArgs\n"
        "print(EngineArgs().build())\n"
        "try: EngineArgs(kv_cache_backend='tagma')\n"
        "except TypeError as error: print(error)\n"
    )
    paged, refusal = _python(code, root).splitlines()
    assert paged == "paged config"
    assert "unexpected keyword argument 'kv_cache_backend'" in refusal


def test_registering_twice_wraps_once() -> None:
    from vllm.engine.arg_utils import EngineArgs

    import vllm_tagma

    vllm_tagma.register()
    before = (EngineArgs.__init__, EngineArgs.add_cli_args, EngineArgs.create_engine_config)
    vllm_tagma.register()
    assert before == (EngineArgs.__init__, EngineArgs.add_cli_args, EngineArgs.create_engine_config)
    assert not hasattr(before[2].__wrapped__, "__wrapped__")


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    finders = list(sys.meta_path)
    yield tmp_path
    sys.meta_path[:] = finders
    sys.modules.pop("hook_sample", None)


def test_the_hook_calls_once_after_the_body_and_leaves_no_trace(sample: Path) -> None:
    (sample / "hook_sample.py").write_text("value = 3\n")
    seen: list[int] = []

    def callback(module: ModuleType) -> None:
        seen.append(module.value)

    before = list(sys.meta_path)
    when_imported("hook_sample", callback)
    when_imported("hook_sample", callback)
    module = importlib.import_module("hook_sample")
    assert seen == [3]
    assert sys.meta_path == before
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__
    when_imported("hook_sample", callback)
    assert seen == [3, 3]


def test_the_hook_survives_a_failed_import(sample: Path) -> None:
    target = sample / "hook_sample.py"
    target.write_text("raise RuntimeError('first attempt')\n")
    seen: list[str] = []
    when_imported("hook_sample", lambda module: seen.append(module.__name__))
    with pytest.raises(RuntimeError, match="first attempt"):
        importlib.import_module("hook_sample")
    assert seen == []
    target.write_text("value = 'second attempt, longer than the first one was'\n")
    importlib.invalidate_caches()
    importlib.import_module("hook_sample")
    assert seen == ["hook_sample"]


def test_the_hook_waits_for_a_module_that_does_not_exist_yet(sample: Path) -> None:
    seen: list[str] = []
    when_imported("hook_sample", lambda module: seen.append(module.__name__))
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("hook_sample")
    (sample / "hook_sample.py").write_text("")
    importlib.invalidate_caches()
    importlib.import_module("hook_sample")
    assert seen == ["hook_sample"]


def test_the_hook_survives_a_look_for_the_module(sample: Path) -> None:
    """Programs ask whether a module is there without importing it."""
    (sample / "hook_sample.py").write_text("")
    seen: list[str] = []
    before = list(sys.meta_path)
    when_imported("hook_sample", lambda module: seen.append(module.__name__))
    for _ in range(2):
        assert importlib.util.find_spec("hook_sample") is not None
    importlib.import_module("hook_sample")
    assert seen == ["hook_sample"]
    assert sys.meta_path == before


def test_a_half_imported_module_is_not_touched(sample: Path) -> None:
    (sample / "hook_sample.py").write_text(
        "from vllm_tagma.integration.import_hook import when_imported\n"
        "seen = []\n"
        "when_imported('hook_sample', lambda module: seen.append(module))\n"
    )
    assert importlib.import_module("hook_sample").seen == []
