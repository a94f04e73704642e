"""A report as data: sections of paragraphs, tables and figures, rendered twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cells are text. ``numeric`` columns are set flush right; the first column names the row."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A chart as SVG text. ``name`` is a file name without its ending; ``alt`` says what it shows
    to those who do not see it."""

    name: str
    svg: str
    alt: str
    caption: str


@dataclass(frozen=True, kw_only=True)
class Bullets:
    """A list of sentences."""

    items: Sequence[str]


@dataclass(kw_only=True)
class Section:
    """A heading and what stands below it: text, tables, figures, lists, in order."""

    title: str
    blocks: list[str | Table | Figure | Bullets] = field(default_factory=list)


@dataclass(kw_only=True)
class Document:
    """A whole report."""

    title: str
    subtitle: str
    sections: list[Section] = field(default_factory=list)

    @property
    def figures(self) -> list[Figure]:
        """All figures, in order."""
        return [
            block
            for section in self.sections
            for block in section.blocks
            if isinstance(block, Figure)
        ]
