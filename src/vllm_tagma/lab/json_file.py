"""JSON files with a schema: written whole or not at all, read strictly, faults named by their path.

msgspec checks types, bounds and missing fields. It names neither the value nor the key of a mapping
(``$.variants[...].rounds``); :func:`convert` finds both. Text goes through the standard library,
since the files hold NaN where vLLM's client had nothing to measure, which msgspec refuses.
"""

from __future__ import annotations

import copy
import json
import os
import re
import reprlib
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from vllm_tagma.errors import TagmaError

T = TypeVar("T")

_STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")


class SchemaError(ValueError):
    """A document that does not fit its schema: ``path`` from ``$``, the ``value`` there, why."""

    def __init__(self, path: str, value: object, reason: str) -> None:
        shown = "" if isinstance(value, dict) else f" is {reprlib.repr(value)}"
        super().__init__(f"{path}{shown}: {reason}")
        self.path, self.value, self.reason = path, value, reason


def convert(document: object, schema: type[T]) -> T:
    """``document`` (plain values) as ``schema``. Raises :class:`SchemaError` for the first fault.

    Fields that the schema does not know are passed over. O(document), at a fault once for each key
    of the mappings on the way to it.
    """
    try:
        return msgspec.convert(document, schema)
    except msgspec.ValidationError as error:
        fault = str(error)
    reason, _, path = fault.partition(" - at `")
    where, value = _located(document, schema, path, fault)
    raise SchemaError(where, value, reason[0].lower() + reason[1:])


def _located(document: Any, schema: Any, path: str, fault: str) -> tuple[str, Any]:
    """The path with the keys of mappings, and the value there.

    A key is found by leaving only one in its mapping at a time: the one with which the fault stays.
    """
    whole = node = copy.deepcopy(document)
    where = "$"
    for field, index in _STEP.findall(path.strip("$`")):
        key: Any = field or index
        if index == "...":
            entries = dict(node)
            for key in entries:
                node.clear()
                node[key] = entries[key]
                try:
                    msgspec.convert(whole, schema)
                except msgspec.ValidationError as error:
                    if str(error) == fault:
                        break
        elif index:
            key = int(index)
        where += f".{field}" if field else f"[{key!r}]"
        node = node[key]
    return where, node


class FileKind(Generic[T]):
    """One kind of file: what it says it is (``kind``, ``version``), who writes it, its schema.

    ``error`` is raised for a file that is not of this kind, of another version, or faulty.
    """

    def __init__(
        self, kind: str, version: int, *, command: str, schema: type[T], error: type[TagmaError]
    ) -> None:
        self.kind, self.version, self.command = kind, version, command
        self._schema, self._error = schema, error

    def document(self, content: Any) -> dict[str, Any]:
        """What is written: the header, then the fields of ``content``."""
        header = {"kind": self.kind, "schema_version": self.version}
        return {**header, **msgspec.to_builtins(content)}

    def read(self, path: Path) -> T:
        """The content of a file. Raises the kind's error, also for one that cannot be read."""
        return self.content(load(path, error=self._error), source=str(path))

    def content(self, document: object, *, source: str) -> T:
        """The content of a document. Raises the kind's error, which begins with ``source``."""
        again = "Measure again, or read it with the release that wrote it."
        if not isinstance(document, dict) or document.get("kind") != self.kind:
            raise self._error(
                f"{source} is not a result of '{self.command}' (no kind={self.kind!r})"
            )
        version = document.get("schema_version")
        if version != self.version:
            raise self._error(
                f"{source} has schema_version {version!r}; this release reads {self.version}. "
                f"{again}"
            )
        try:
            return convert(document, self._schema)
        except SchemaError as error:
            raise self._error(f"{source}: {error}. {again}") from None


def load(path: Path, *, error: type[TagmaError]) -> Any:
    """The plain values of a file. Raises ``error`` for one that cannot be read or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as fault:
        raise error(f"{path} is not JSON: {fault}") from None
    except (OSError, UnicodeDecodeError) as fault:
        raise error(f"{path} cannot be read: {fault}") from None


def write(document: object, path: Path) -> None:
    """Writes plain values, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)
