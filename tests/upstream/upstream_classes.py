"""What the outcome of one of vLLM's tests says about this package: ``MEANINGS``."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass, field
from pathlib import Path

MEANINGS = {
    "pass": "passes on a manager of this package",
    "untouched": "passes without building a manager, so it says nothing about this package",
    "refused": "needs a configuration that is [refused](support.md)",
    "peeks": "reads a member of vLLM's classes that does not exist here",
    "ids": "expects particular block ids",
    "documented": "meets a difference that [differences.md](differences.md) lists",
    "differs": "none of these: a bug",
}
CLASSES = tuple(MEANINGS)
_MISSING = (
    # The manager's own words, then Python's.
    re.compile(r"vLLM asked for (?P<owner>KVCacheManager)\.(?P<name>\w+)"),
    re.compile(r"'(?P<owner>vllm_tagma\.[\w.]+)' object has no attribute '(?P<name>\w+)'"),
    re.compile(r"'(?P<owner>vllm_tagma\.[\w.]+)' object is not (?P<name>iterable|subscriptable)"),
)
_OPERATORS = {"iterable": "__iter__", "subscriptable": "__getitem__"}


@dataclass(kw_only=True)
class Observation:
    """One test, as the plugin saw it. ``error`` is what :func:`describe` returns."""

    test: str
    outcome: str
    error: dict[str, str] | None = None
    built: int = 0
    built_stock: int = 0
    refusals: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Verdict:
    """The class of a test and why it is in it."""

    name: str
    reason: str = ""


def describe(error: BaseException) -> dict[str, str]:
    """Type, first line and place of an exception; place is ``file:line`` with ``test`` or ``vllm``
    in front, for the innermost frame that is none of ours or of a library."""
    lines = str(error).strip().splitlines() or [""]
    owner = type(getattr(error, "obj", None))
    if owner.__module__.startswith("vllm_tagma"):  # Python names the class, but not whose it is
        lines[0] = lines[0].replace(f"'{owner.__name__}'", f"'{owner.__module__}.{owner.__name__}'")
    place = ""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        where = _side(frame.filename)
        if where in ("test", "vllm"):
            place = f"{where} {Path(frame.filename).name}:{frame.lineno}"
            break
    return {"type": type(error).__name__, "message": lines[0][:300], "place": place}


def classify(seen: Observation) -> Verdict:
    """The class of one test of the run on this package; ``differs`` where a person must look."""
    if seen.built_stock:
        return Verdict("differs", "vLLM's own manager was built: the replacement missed it")
    if seen.outcome == "passed":
        if seen.refusals and not seen.built:
            return Verdict("pass", "is refused where vLLM raises")
        return Verdict("pass" if seen.built else "untouched")
    error = seen.error or {"type": seen.outcome, "message": "", "place": ""}
    if seen.refusals and (error["type"] == "UnsupportedError" or not seen.built):
        return Verdict("refused", refusal(seen.refusals))
    if error["place"].startswith("test "):
        for pattern in _MISSING:
            if found := pattern.search(error["message"]):
                owner, name = found["owner"].rpartition(".")[2], found["name"]
                return Verdict("peeks", f"{owner}.{_OPERATORS.get(name, name)}")
    return Verdict("differs", f"{error['type']}: {error['message']} ({error['place']})")


def refusal(messages: list[str]) -> str:
    """What was refused, in the words of the support matrix, each once."""
    titles = re.findall(r"does not serve (.*?)(?: yet)?: ", "\n".join(messages))
    if not titles:
        titles = [re.split(r"[:;]", re.sub(r"=?\b\d+\b", "", message))[0] for message in messages]
    return "; ".join(dict.fromkeys(titles))


def _side(filename: str) -> str:
    parts = Path(filename).parts
    if "vllm_tagma" in parts:
        return "tagma"
    if "site-packages" in parts:
        return "vllm" if "vllm" in parts else "library"
    return "test" if "tests" in parts and "upstream" not in parts[-2:] else "library"
