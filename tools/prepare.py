"""Build the parts of the working tree that a make target needs.

    python3 tools/prepare.py PART...      parts: env tools nixl model vllm-sources upstream wheel

Each part is a no-op when it is up to date. `make serve` has its own entry, serve.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import check_wheel
import default_model
import host
import vllm_sources
import vllm_tests
from environment import Environment
from progress import Progress, SetupFailure

ROOT = Path(__file__).resolve().parent.parent
STEPS = {
    "env": 3,
    "tools": 1,
    "nixl": 1,
    "model": 1,
    "vllm-sources": 1,
    "upstream": 1,
    "wheel": 1,
}
EXTRAS = ("test", "lint", "package", "bench", "docs")


def main(parts: Sequence[str]) -> int:
    """Build ``parts``; returns the exit status."""
    unknown = [part for part in parts if part not in STEPS]
    if unknown or not parts:
        print(f"unknown part {', '.join(unknown) or '(none given)'}: {__doc__}", file=sys.stderr)
        return 2
    try:
        build(parts)
    except SetupFailure as failure:
        print(f"\nmake failed.\n{failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    return 0


def build(parts: Sequence[str]) -> None:
    """Build the parts in order. Raises SetupFailure."""
    host.check_platform()
    cuda = host.wants_cuda()
    progress = Progress(total=sum(STEPS[part] for part in parts), log_dir=ROOT / "build" / "logs")
    environment = Environment(root=ROOT, progress=progress, cuda=cuda)
    for part in parts:
        if part == "env":
            host.check_compiler()
            if not environment.folder.exists():
                need = host.NEED_DISK_CUDA if cuda else host.NEED_DISK_CPU
                host.check_disk(folder=ROOT, need_bytes=need)
            environment.create()
            environment.install_vllm()
            environment.install_plugin()
        elif part == "tools":
            environment.install_extras(EXTRAS)
        elif part == "nixl":
            environment.install_nixl()
        elif part == "model":
            _model(environment)
        elif part == "vllm-sources":
            _vllm_sources(environment)
        elif part == "upstream":
            _upstream(environment)
        else:
            with progress.step("sdist and abi3 wheel: build, audit, install, import"):
                for line in check_wheel.check(environment):
                    progress.say(line)


def _model(environment: Environment) -> None:
    title = f"model {default_model.NAME}"
    if default_model.is_ready(default_model.model_dir(ROOT)):
        environment.progress.skip(title, "up to date")
        return
    with environment.progress.step(f"{title} (download 93 MB, convert once)"):
        default_model.provide(root=ROOT, python=environment.python, progress=environment.progress)


def _vllm_sources(environment: Environment) -> None:
    title = f"sources of vLLM {vllm_sources.VERSION}"
    if vllm_sources.is_ready(ROOT):
        environment.progress.skip(title, "up to date")
        return
    with environment.progress.step(f"{title} (download 336 MB)"):
        _in_ci_at_least(environment, vllm_sources.provide, "the tests against 0.33 will skip")


def _upstream(environment: Environment) -> None:
    title = f"tests of vLLM {vllm_tests.VERSION}"
    if vllm_tests.is_ready(ROOT):
        environment.progress.skip(title, "up to date")
        return
    with environment.progress.step(f"{title} (download 45 MB)"):
        _in_ci_at_least(environment, vllm_tests.provide, "vLLM's own tests will skip")


def _in_ci_at_least(
    environment: Environment, provide: Callable[[Environment], Path], otherwise: str
) -> None:
    """In CI what compares with vLLM must run; elsewhere its tests skip and say so."""
    try:
        provide(environment)
    except SetupFailure as failure:
        if os.environ.get("CI"):
            raise
        environment.progress.say(f"NOT AVAILABLE, {otherwise}: {failure}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
