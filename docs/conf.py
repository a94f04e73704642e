"""The documentation site (``make docs``): the pages of this repository, read where they lie.

The source folder is the repository's root, so each link between README, ``docs/`` and the sources
is the same in the repository and on the site. Sphinx follows them all: a page becomes a page, any
other file comes along as a copy, and a missing target, heading anchors included, fails the build.
"""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
# The order in which to read. What is named nowhere comes at the end, so that no page gets lost.
CHAPTERS = {
    "Use it": [
        "using",
        "support",
        "limits",
        "differences",
        "metrics",
        "replay",
        "kv-transfer",
        "parallel",
        "vllm-releases",
    ],
    "How it works": [
        "design",
        "invariants",
        "compaction",
        "v2-write-path",
        "read-path",
        "self-test",
        "api",
    ],
    "What is shown": [
        "evidence",
        "benchmarks",
        "bench-host",
        "bench-serve",
        "upstream",
        "kernel-code",
    ],
    "More": [],
}
PROJECT_PAGES = ["reports/host/report", "CHANGELOG", "CONTRIBUTING"]

project = "vllm-tagma"
author = "the vllm-tagma contributors"
release = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/*.md", "reports/**/*.md"]
exclude_patterns = [".*", "build", "dist", "csrc", "src", "tests", "tools"]
root_doc = "README"
source_suffix = {".md": "markdown"}
# Pygments does not know the colons in names of metrics.
suppress_warnings = ["misc.highlighting_failure"]
myst_heading_anchors = 3

# vLLM and torch are the host, not a dependency: stand-ins let the site be built without them.
autodoc_mock_imports = ["vllm", "torch", "triton", "transformers"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}

html_theme = "furo"
html_title = f"vllm-tagma {release}"
html_copy_source = False


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _append_navigation)
    app.connect("build-finished", _name_first_page)


def _append_navigation(_app: Sphinx, name: str, source: list[str]) -> None:
    """The README carries the site's navigation, which would be noise where it is read as a file."""
    if name != root_doc:
        return
    named = {page for pages in CHAPTERS.values() for page in pages}
    unnamed = sorted({path.stem for path in (ROOT / "docs").glob("*.md")} - named)
    for caption, pages in CHAPTERS.items():
        listed = [f"docs/{page}" for page in pages]
        if caption == "More":
            listed = [*(f"docs/{page}" for page in unnamed), *PROJECT_PAGES]
        body = "\n".join(listed)
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{body}\n```\n"


def _name_first_page(app: Sphinx, error: Exception | None) -> None:
    """A web server looks for ``index.html``; in the same folder the README's links still hold."""
    if error is None and app.builder.format == "html":
        shutil.copyfile(Path(app.outdir) / f"{root_doc}.html", Path(app.outdir) / "index.html")
