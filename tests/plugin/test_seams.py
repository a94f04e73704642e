"""Each seam in each known vLLM release: this is the test that fails when vLLM changes.

The sources of vLLM 0.33 are taken from the folder in ``TAGMA_VLLM033`` (it holds the package
``vllm``) or from ``build/vllm-0.33``, which ``make test`` fills.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
from pathlib import Path

import pytest

from prerequisites import missing
from vllm_tagma import integration, support, versions
from vllm_tagma.errors import SeamError
from vllm_tagma.integration import seams
from vllm_tagma.integration.seams import seam_table, signatures

REPOSITORY = Path(__file__).parents[2]


def _root_033() -> Path:
    folder = os.environ.get("TAGMA_VLLM033") or REPOSITORY / "build" / "vllm-0.33"
    found = Path(folder) / "vllm"
    if not found.is_dir():
        message = f"NOT TESTED against vLLM 0.33: no {found}. Run `make test`, or set TAGMA_VLLM033"
        missing(message)
    return found


def _installed() -> Path:
    root = versions.vllm_root()
    assert root is not None
    return root


@pytest.fixture(scope="module", params=["installed", "0.33"])
def root(request: pytest.FixtureRequest) -> Path:
    """The ``vllm`` package of each release at hand."""
    return _installed() if request.param == "installed" else _root_033()


def _series(root: Path) -> str:
    version = versions.installed_vllm_version(root)
    assert version is not None
    return versions.require_supported_vllm(version)


def test_the_033_sources_are_033() -> None:
    assert _series(_root_033()) == "0.33"


@pytest.mark.parametrize("seam", seams.SEAMS, ids=lambda s: s.title().replace(" ", "-"))
def test_seam_fits(root: Path, seam: seams.Seam) -> None:
    assert seam.problem(root=root, series=_series(root)) is None


def test_all_seams_fit_in_one_call(root: Path) -> None:
    assert seams.check_seams(root=root) == []


def test_a_release_taken_for_another_does_not_fit() -> None:
    problems = seams.check_seams("0.32.0", root=_root_033())
    assert any("num_hash_lookahead_tokens" in problem for problem in problems)
    assert any("max_cache_hit_length" in problem for problem in problems)


def test_an_unknown_release_is_the_only_problem() -> None:
    (problem,) = seams.check_seams("0.34.0")
    assert "0.34.0" in problem
    assert "0.32 and 0.33" in problem


def test_seams_are_told_apart_and_explained() -> None:
    titles = [seam.title() for seam in seams.SEAMS]
    assert len(titles) == len(set(titles))
    for seam in seams.SEAMS:
        assert seam.why, seam.title()
        assert seam.remove_when, seam.title()
        assert set(seam.changed) <= set(versions.KNOWN_VLLM_SERIES), seam.title()
        assert seam.room in seams.ROOMS


def test_every_method_that_we_override_is_a_seam() -> None:
    """A method of ours that stands for one of vLLM's is called by vLLM, with vLLM's arguments."""
    targets = {seam.target for seam in seams.SEAMS}
    overridden = set()
    for info in pkgutil.iter_modules(integration.__path__, f"{integration.__name__}."):
        module = importlib.import_module(info.name)
        classes = [c for c in vars(module).values() if inspect.isclass(c)]
        for cls in (c for c in classes if c.__module__ == info.name):
            bases = {b for c in classes if issubclass(c, cls) for b in _first_of_vllm(c)}
            for name, value in vars(cls).items():
                written = inspect.isfunction(value) and value.__module__ == info.name
                if written and inspect.unwrap(value).__code__.co_filename == module.__file__:
                    overridden |= {
                        f"{base.__module__}:{base.__qualname__}.{name}"
                        for base in (_owner(b, name) for b in bases)
                        if base is not None
                    }
    # Ours to call: vLLM never builds this logger.
    overridden.remove("vllm.v1.metrics.loggers:AggregateStatLoggerBase.__init__")
    assert len(overridden) > 20
    assert overridden - targets == set()


def _first_of_vllm(cls: type) -> list[type]:
    """The first class of vLLM's among a class's bases."""
    return [base for base in cls.__mro__ if base.__module__.startswith("vllm.")][:1]


def _owner(cls: type, name: str) -> type | None:
    """The class of vLLM's that has the method which ``cls`` inherits."""
    owners = (base for base in cls.__mro__ if name in vars(base))
    found = next(owners, object)
    return found if found.__module__.startswith("vllm.") else None


def test_a_changed_signature_is_noticed(tmp_path: Path) -> None:
    target = "vllm.v1.worker.block_table:BlockTable.move_row"
    (seam,) = [s for s in seams.SEAMS if s.target == target]
    copy = tmp_path / "vllm" / "v1" / "worker" / "block_table.py"
    copy.parent.mkdir(parents=True)
    text = (_installed() / "v1/worker/block_table.py").read_text()
    assert "def move_row(self, src: int, tgt: int)" in text
    copy.write_text(text.replace("def move_row(self, src: int", "def move_row(self, source: int"))
    problem = seam.problem(root=tmp_path / "vllm", series="0.32")
    assert problem == (
        f"{target}: expected (self, src, tgt) -> None, found (self, source, tgt) -> None"
    )
    absent = seam.problem(root=tmp_path / "empty", series="0.32")
    assert str(absent).endswith("found nothing")


def test_start_up_names_every_seam_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "vllm_root", _root_033)
    monkeypatch.setattr(versions, "installed_vllm_version", lambda root=None: "0.32.9")
    with pytest.raises(SeamError) as error:
        seams.require_seams("scheduler")
    message = str(error.value)
    assert "does not fit vLLM 0.32.9" in message
    assert "KVCacheManager.get_computed_blocks" in message
    assert message.endswith("or use --kv-cache-backend paged.")
    with pytest.raises(SeamError, match="prepare_attn"):
        seams.require_seams("worker", "worker_v2")


# ---- the manager's contract ---------------------------------------------------------------------


def _members_read(root: Path) -> dict[str, list[str]]:
    """Manager member -> places in vLLM's scheduler files that read it."""
    found: dict[str, list[str]] = {}
    for path in sorted((root / "v1" / "core" / "sched").glob("*.py")):
        for name, lines in signatures.members_read(path, "self.kv_cache_manager").items():
            found.setdefault(name, []).extend(f"{path.name}:{line}" for line in lines)
    return found


def test_every_member_read_is_implemented_or_refused(root: Path) -> None:
    from vllm_tagma.manager import TagmaKVCacheManager

    read = _members_read(root)
    assert "allocate_slots" in read, "the scan finds nothing: vLLM renamed its attribute"
    implemented = set(dir(TagmaKVCacheManager)) | _assigned_in_the_constructor()
    for name, places in read.items():
        if name == "<itself>":
            continue  # handed to connectors; those that read more than their blocks are refused
        known = name in implemented or name in seam_table.REFUSED_MEMBERS
        assert known, f"vLLM reads KVCacheManager.{name} at {', '.join(places)}"


def _assigned_in_the_constructor() -> set[str]:
    """Instance attributes of our manager: names stored on ``self`` in its class body."""
    import ast

    from vllm_tagma import manager

    assert manager.__file__ is not None
    tree = ast.parse(Path(manager.__file__).read_text())
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "self"
    }


def test_members_that_are_served_are_implemented() -> None:
    from vllm_tagma.manager import TagmaKVCacheManager

    implemented = set(dir(TagmaKVCacheManager)) | _assigned_in_the_constructor()
    assert [name for name in seam_table.ALWAYS_READ if name not in implemented] == []


def test_refused_members_are_refused_by_a_rule() -> None:
    refused = {rule.id for rule in support.rules() if rule.status != "served"}
    assert set(seam_table.REFUSED_MEMBERS.values()) <= refused
    assert not set(seam_table.REFUSED_MEMBERS) & set(seam_table.ALWAYS_READ)


# ---- reading sources ----------------------------------------------------------------------------


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    (tmp_path / "sample.py").write_text(
        "import sys\n"
        "class A(B, metaclass=M):\n"
        "    counts: dict[str, int] = field(default_factory=dict)\n"
        "    bare: int\n"
        "    def plain(self, a: int, /, b=1, *rest: str, c, d: int = 2, **more) -> None: ...\n"
        "    @property\n"
        "    def value(self) -> int: return 0\n"
        "    if sys.version_info < (3, 13):\n"
        "        def guarded(self, *, only): ...\n"
        "    async def waits(self): self.m.go(1, 2, k=3); self.m.go(1, k=4, **kw)\n"
        "    def reads(self): use(self.m); self.m.x = 1; self.m = None; return self.m.y.z\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("plain", "(self, a, /, b=1, *rest, c, d=2, **more) -> None"),
        ("value", "@property (self) -> int"),
        ("guarded", "(self, *, only)"),
        ("waits", "(self)"),
        ("counts", "dict[str, int] = field(default_factory=dict)"),
        ("bare", "int"),
        ("absent", None),
    ],
)
def test_signatures_are_read(sample: Path, name: str, expected: str | None) -> None:
    assert signatures.signature_of(sample, f"vllm.sample:A.{name}") == expected


def test_calls_bases_and_members_are_read(sample: Path) -> None:
    call = signatures.call_of(sample, "vllm.sample:A.waits", "self.m.go")
    assert call == "(*1, k=, **) | (*2, k=)"
    assert signatures.call_of(sample, "vllm.sample:A.plain", "self.m.go") is None
    assert signatures.bases_of(sample, "vllm.sample:A") == "(B)"
    members = signatures.members_read(sample / "sample.py", "self.m")
    assert sorted(members) == ["<itself>", "go", "x", "y"]
    assert len(members["<itself>"]) == 1  # storing self.m is not reading it
