"""Read signatures and calls out of vLLM's source files, without importing them.

Importing the modules behind the seams loads torch and, for the worker, every attention backend.
The source says the same in milliseconds, for any release lying on disk, and shows what vLLM wrote
even where another plugin has patched the object since. What was found is kept for the process: each
pool that is made checks its seams, and a walk through a scheduler's syntax tree takes 0.1 s.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path


def module_path(root: Path, module: str) -> Path:
    """The source file of ``module`` (``"vllm.a.b"``) below ``root``, the folder of ``vllm``."""
    parts = module.split(".")[1:]
    package = root.joinpath(*parts, "__init__.py")
    return package if package.is_file() else root.joinpath(*parts).with_suffix(".py")


@lru_cache(maxsize=64)
def parse_module(path: Path) -> ast.Module | None:
    """The syntax tree of a source file, or ``None`` if it is absent or does not parse."""
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return None


@lru_cache(maxsize=512)
def signature_of(root: Path, target: str) -> str | None:
    """Parameters and return type of ``"module:Class.method"``; other annotations are left out.

    Example: ``"(self, request, num_lookahead_tokens=0) -> KVCacheBlocks"``. ``None`` if absent.
    Decorators that change how it is called (``property``, ``staticmethod``, ``classmethod``) come
    first: ``"@property (self)"``. Of overloaded definitions the last counts, as at run time.

    For an annotated field of a class, type and default: ``"dict[str, int] = {}"``.
    """
    node = _find(root, target)
    if isinstance(node, ast.AnnAssign):
        default = f" = {ast.unparse(node.value)}" if node.value is not None else ""
        return ast.unparse(node.annotation) + default
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    decorators = [ast.unparse(d) for d in node.decorator_list]
    kinds = [f"@{d} " for d in decorators if d in ("property", "staticmethod", "classmethod")]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    return "".join(kinds) + f"({_parameters(node.args)})" + returns


@lru_cache(maxsize=512)
def call_of(root: Path, target: str, callee: str) -> str | None:
    """How ``target`` calls ``callee``: the argument names of the one such call.

    Example: ``"(*2, request=, num_tokens=)"``: two positional arguments, then these keywords.
    ``None`` if there is no call; several different calls are joined with ``" | "``.
    """
    node = _find(root, target)
    if node is None:
        return None
    shapes = []
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == callee:
            names = [f"*{len(call.args)}"] if call.args else []
            names += [f"{k.arg}=" if k.arg else "**" for k in call.keywords]
            shapes.append(f"({', '.join(names)})")
    return " | ".join(sorted(set(shapes))) or None


@lru_cache(maxsize=512)
def bases_of(root: Path, target: str) -> str | None:
    """The base classes of ``"module:Class"`` as written, or ``None`` if there is no such class."""
    node = _find(root, target)
    if not isinstance(node, ast.ClassDef):
        return None
    return f"({', '.join(ast.unparse(base) for base in node.bases)})"


@lru_cache(maxsize=512)
def members_read(path: Path, owner: str) -> Mapping[str, list[int]]:
    """Attributes that a source file reads from ``owner`` (``"self.kv_cache_manager"``).

    Returns attribute name -> line numbers. Passing ``owner`` on as a value is reported under the
    name ``"<itself>"``: whoever receives it can read anything. Callers share the result.
    """
    tree = parse_module(path)
    if tree is None:
        return {}
    found: dict[str, list[int]] = {}
    inner: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == owner:
            found.setdefault(node.attr, []).append(node.lineno)
            inner.add(id(node.value))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
            continue
        if id(node) not in inner and ast.unparse(node) == owner:
            found.setdefault("<itself>", []).append(node.lineno)
    return found


def _find(root: Path, target: str) -> ast.AST | None:
    module, _, qualified = target.partition(":")
    node: ast.AST | None = parse_module(module_path(root, module))
    for name in qualified.split("."):
        matches = [child for child in _definitions(node) if _name_of(child) == name]
        if not matches:
            return None
        node = matches[-1]
    return node


_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.AnnAssign


def _definitions(node: ast.AST | None) -> list[_Definition]:
    """Definitions and annotated fields directly in ``node``, those behind ``if`` included."""
    found: list[_Definition] = []
    for child in getattr(node, "body", []):
        if isinstance(child, _Definition):
            found.append(child)
        elif isinstance(child, ast.If):
            found.extend(_definitions(child))
    return found


def _name_of(node: _Definition) -> str:
    return ast.unparse(node.target) if isinstance(node, ast.AnnAssign) else node.name


def _parameters(args: ast.arguments) -> str:
    plain = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(plain) - len(args.defaults)) + list(args.defaults)
    shown = [_parameter(a, d) for a, d in zip(plain, defaults, strict=True)]
    if args.posonlyargs:
        shown.insert(len(args.posonlyargs), "/")
    if args.vararg:
        shown.append(f"*{args.vararg.arg}")
    elif args.kwonlyargs:
        shown.append("*")
    shown += [_parameter(a, d) for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    if args.kwarg:
        shown.append(f"**{args.kwarg.arg}")
    return ", ".join(shown)


def _parameter(argument: ast.arg, default: ast.expr | None) -> str:
    return argument.arg if default is None else f"{argument.arg}={ast.unparse(default)}"
