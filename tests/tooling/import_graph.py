"""Who imports whom in this package, read from the sources; used by ``test_tidy.py``."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

PACKAGE = "vllm_tagma"


def imports(text: str) -> Iterator[str]:
    """Dotted names of everything a module imports, wherever in it."""
    for node in ast.walk(ast.parse(text)):
        yield from _targets(node)


def imports_at_import_time(text: str) -> Iterator[str]:
    """As ``imports``, without what only a call of a function imports, and what only mypy does."""
    yield from _below(ast.parse(text), functions=False)


def imports_that_run(text: str) -> Iterator[str]:
    """As ``imports``, without what only mypy does."""
    yield from _below(ast.parse(text), functions=True)


def package_graph(package: Mapping[str, str]) -> dict[str, set[str]]:
    """The modules that each module imports, in functions too, by dotted name.

    ``package``: sources by path, ``"a/b.py"``. Imports that only mypy runs do not count. The
    packages above an imported module do not count either: they hold no code that needs it.
    """
    modules = {_dotted(path): text for path, text in package.items()}
    graph = {}
    for module, text in modules.items():
        found = set()
        for node in _nodes(ast.parse(text), functions=True):
            if isinstance(node, ast.ImportFrom):
                for name in node.names:
                    inner = f"{node.module}.{name.name}"
                    found.add(inner if inner in modules else node.module)
            else:
                found.update(_targets(node))
        graph[module] = {target for target in found if target in modules}
    return graph


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Modules that import each other, however indirectly: one sorted list for each knot."""
    reached = {module: _reachable(graph, module) for module in graph}
    knots = {
        tuple(sorted(other for other in reached[module] if module in reached[other]))
        for module in graph
        if module in reached[module]
    }
    return [list(knot) for knot in sorted(knots)]


def _reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    ahead = [*graph[start]]
    while ahead:
        module = ahead.pop()
        if module not in seen:
            seen.add(module)
            ahead += graph[module]
    return seen


def _dotted(path: str) -> str:
    name = path.removesuffix(".py").removesuffix("__init__").strip("/").replace("/", ".")
    return f"{PACKAGE}.{name}" if name else PACKAGE


def _targets(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (name.name for name in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = "." * node.level + (node.module or "")
        yield base
        yield from (f"{base}.{name.name}" for name in node.names)


def _below(tree: ast.AST, *, functions: bool) -> Iterator[str]:
    for node in _nodes(tree, functions=functions):
        yield from _targets(node)


def _nodes(tree: ast.AST, *, functions: bool) -> Iterator[ast.AST]:
    """All nodes below, without bodies of ``if TYPE_CHECKING`` and, unless told, of functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for other in node.orelse:
                yield from _nodes(other, functions=functions)
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not functions:
            continue
        yield node
        yield from _nodes(node, functions=functions)
