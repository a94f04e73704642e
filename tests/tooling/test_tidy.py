"""House rules that a machine can check: one home for the version, size, direction, portability.

``src/vllm_tagma/`` is the product, except for ``lab/``, the laboratory: benchmarks, replay,
reports, the map of a pool, the kernel checks. Nothing that serves needs the laboratory; only the
``tagma`` command knows it, and loads it when one of its sub-commands is asked for.
"""

from __future__ import annotations

import re
import subprocess
import tomllib
import warnings

import pytest
from import_graph import (
    PACKAGE,
    circles,
    imports,
    imports_at_import_time,
    imports_that_run,
    package_graph,
)

WARN_LINES, MAX_LINES = 400, 500
CODE = {".py", ".pyi", ".hpp", ".cpp"}
# Core modules know nothing of vLLM's internals: only these may import the integration rooms.
MAY_IMPORT_INTEGRATION = {"plugin.py", "doctor.py"}
# Their calls of vLLM are seams as well (``integration/seams/seam_table_manager.py``); ``doctor``
# builds a configuration, as vLLM's own commands do.
MAY_IMPORT_VLLM = {"manager.py", "events.py", "doctor.py"}
COMMANDS = {"cli", "doctor"}
PRODUCT_FOLDERS = {"integration", "kernels", "support", "transfer", "worker"}
LAB = f"{PACKAGE}.lab"
MACHINE_PATHS = re.compile(r"(?<![\w.$}])/(?:work|home|root|Users|mnt|data)/[\w.-]+")
# Package registries live under .org: what is named there has to be listed, so none slips in.
HOSTS = re.compile(r"\b(?:[\w-]+\.)+org\b")
KNOWN_HOSTS = {
    "download.pytorch.org",
    "semver.org",
    "www.apache.org",
    *("creativecommons.org", "matplotlib.org", "purl.org", "www.w3.org"),  # in SVG files
}


def tracked(root):
    """The files git has, or would add: what a reader of the repository sees."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return [root / name for name in sorted(set(listing.stdout.split("\n"))) if name]


@pytest.fixture(scope="module")
def files(request):
    root = request.config.rootpath
    found = {}
    for path in tracked(root):
        try:
            found[path.relative_to(root).as_posix()] = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):
            continue
    assert "pyproject.toml" in found
    return found


@pytest.fixture(scope="module")
def package(files):
    """The modules of this package, by their path in it."""
    root = "src/vllm_tagma/"
    found = {n.removeprefix(root): t for n, t in files.items() if re.match(rf"{root}.*\.py$", n)}
    assert "manager.py" in found
    return found


def test_version_stands_in_pyproject_only(files):
    version = tomllib.loads(files["pyproject.toml"])["project"]["version"]
    assigned = re.compile(rf"""version\w*\s*[:=]+\s*["']?v?{re.escape(version)}\b""", re.I)
    code = {name: text for name, text in files.items() if not name.endswith(".md")}
    assert [name for name, text in code.items() if assigned.search(text)] == ["pyproject.toml"]


def test_files_are_short(files):
    lengths = {
        name: text.count("\n")
        for name, text in files.items()
        if "." + name.rpartition(".")[2] in CODE
    }
    for name, lines in lengths.items():
        if lines > WARN_LINES:
            warnings.warn(f"{name} has {lines} lines, the aim is {WARN_LINES}", stacklevel=1)
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def test_core_includes_neither_python_nor_torch(files):
    core = {name: text for name, text in files.items() if name.startswith("csrc/tagma/")}
    assert core
    include = re.compile(r"#\s*include\s*[<\"](Python\.h|torch/|ATen/|c10/|bindings/|cuda)")
    assert [name for name, text in core.items() if include.search(text)] == []


def test_imports_are_absolute(package):
    """Then a search for a module's dotted name finds everyone who imports it."""
    assert {n for n, text in package.items() for i in imports(text) if i.startswith(".")} == set()


def test_every_folder_is_product_or_laboratory(package):
    assert {name.partition("/")[0] for name in package if "/" in name} == {*PRODUCT_FOLDERS, "lab"}


def test_the_product_does_without_the_laboratory(package):
    product = {name: text for name, text in package.items() if not name.startswith("lab/")}
    # Not only imports: a name in a string can be imported as well.
    assert {name for name, text in product.items() if LAB in text} == {"cli.py"}
    lazily = [i for i in imports_at_import_time(product["cli.py"]) if i.startswith(LAB)]
    assert lazily == [], "the command loads the laboratory at once, not when it is asked for"


def test_imports_point_downwards(package):
    upward = {
        name: sorted(set(found))
        for name, text in package.items()
        if not name.startswith(("integration/", "lab/"))  # the laboratory runs it whole
        and name not in MAY_IMPORT_INTEGRATION
        and (found := [i for i in imports(text) if "vllm_tagma.integration" in i])
    }
    assert upward == {}


def test_few_modules_outside_the_room_import_vllm(package):
    found = {
        name
        for name, text in package.items()
        if not name.startswith(("integration/", "lab/"))
        for i in imports_that_run(text)
        if i == "vllm" or i.startswith("vllm.")
    }
    assert found == MAY_IMPORT_VLLM


def test_no_imports_in_circles(package):
    graph = package_graph(package)
    assert graph[f"{PACKAGE}.support.gates"], "the graph is of this package"
    assert circles(graph) == []


def test_a_circle_is_found():
    """Over a package's own face, through a function and past a type: all that hides one."""
    found = circles(
        package_graph(
            {
                "__init__.py": "from vllm_tagma import a",
                "a.py": "import vllm_tagma.b",
                "b.py": "def f():\n    from vllm_tagma.c import inner",
                "c/__init__.py": "from vllm_tagma.c.inner import x",
                "c/inner.py": "from vllm_tagma.a import y",
                "d.py": "if TYPE_CHECKING:\n    from vllm_tagma import e",
                "e.py": "from vllm_tagma import d",
            }
        )
    )
    assert found == [[f"{PACKAGE}.{name}" for name in ("a", "b", "c.inner")]]


def test_a_name_of_a_module_finds_one_file(files):
    """So that a search for ``pool_sampler.py``, or a traceback, leads to one place."""
    everywhere = {"__init__.py", "__main__.py", "conftest.py"}
    for root in ("src/", "tests/"):
        names = [n.rpartition("/")[2] for n in files if n.startswith(root) and n.endswith(".py")]
        twice = {name for name in names if names.count(name) > 1}
        assert twice - everywhere == set(), root


def test_only_the_command_line_imports_commands(files):
    found = {
        (name, target)
        for name, text in files.items()
        if name.startswith("src/") and name.endswith(".py") and not name.endswith("/cli.py")
        for target in imports(text)
        if target.startswith("vllm_tagma") and target.rpartition(".")[2] in COMMANDS
    }
    assert found == set()


def test_tools_need_only_the_standard_library(files):
    """They run before anything is installed; convert_gguf.py alone runs inside .venv."""
    import sys

    tools = {name: text for name, text in files.items() if re.fullmatch(r"tools/\w+\.py", name)}
    known = set(sys.stdlib_module_names) | {name[6:-3] for name in tools}
    foreign = {
        (name, top)
        for name, text in tools.items()
        for i in imports(text)
        if (top := i.split(".")[0]) not in known and name != "tools/convert_gguf.py"
    }
    assert foreign == set()


def test_no_path_of_one_machine_and_no_registry_host(files):
    here = "tests/tooling/test_tidy.py"
    found = {
        (name, match.group())
        for name, text in files.items()
        if name != here
        for pattern in (MACHINE_PATHS, HOSTS)
        for match in pattern.finditer(text)
        if match.group() not in KNOWN_HOSTS
    }
    assert found == set()


def test_todo_names_an_issue(files):
    here = "tests/tooling/test_tidy.py"
    bare = re.compile(r"\b(TODO|FIXME|XXX)\b(?!\(#\d+\))")
    found = [name for name, text in files.items() if name != here and bare.search(text)]
    assert found == []
