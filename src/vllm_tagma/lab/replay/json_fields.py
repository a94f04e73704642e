"""Checked values of one entry of a trace: each refusal names field, value, limit and way out."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from datetime import datetime
from typing import Any

MAX_TOKENS = 10_000_000
"""Longer sequences are taken for a mistake: a typing error must not ask for a pool of terabytes."""
MAX_SECONDS = 1e18
"""Times beyond are taken for a mistake: differences of such times are no longer numbers."""

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d{1,4})?", re.ASCII)


class FieldError(ValueError):
    """A field is missing or no valid value; the text is the reason that is reported."""


class Digits:
    """An integer of so many digits that it is certainly no length, id or time."""

    def __init__(self, text: str) -> None:
        self._count = len(text.lstrip("-"))

    def __repr__(self) -> str:
        return f"a number of {self._count:,} digits"


def shown(value: object) -> str:
    """``value`` for a message: one line, cut short."""
    return _SHORT.repr(value)


def integer(entry: Mapping[str, Any], name: str, *, least: int = 1) -> int:
    """An integer field of at least ``least``. Raises :class:`FieldError`."""
    value = entry.get(name)
    if value is None:
        raise FieldError(f"{name} is missing; every request needs it")
    return checked(value, name, least=least)


def checked(value: object, name: str, *, least: int = 1) -> int:
    """``value`` if it is a whole number from ``least`` to the limit. Raises :class:`FieldError`.

    ``677.0`` is one: tables that went through pandas have such lengths.
    """
    if isinstance(value, float) and value.is_integer() and abs(value) <= MAX_SECONDS:
        value = int(value)
    if isinstance(value, int | Digits) and not isinstance(value, bool):
        if isinstance(value, int) and least <= value <= MAX_TOKENS:
            return value
        raise FieldError(
            f"{name} is {shown(value)}, not between {least} and {MAX_TOKENS}; "
            f"correct it or leave the request out"
        )
    raise FieldError(f"{name} is {shown(value)}, not an integer; give it as a number of tokens")


def number(text: str) -> object:
    """The number that ``text`` writes; the text itself, for a message, if it writes none."""
    if not _NUMBER.fullmatch(text):
        return text
    if text.isdigit():
        return int(text) if len(text) < 1000 else Digits(text)
    return float(text)


def seconds(entry: Mapping[str, Any], name: str, *, scale: float = 1.0) -> float:
    """A time field in seconds, 0 if it is absent. Raises :class:`FieldError`.

    A number counts units of ``scale`` seconds; a text is a date and time, by its UTC offset or
    else as if it were UTC.
    """
    value = entry.get(name)
    if value is None:
        return 0.0
    if isinstance(value, str):
        try:
            return timestamp(datetime.fromisoformat(value.strip()))
        except (ValueError, OverflowError):
            value = number(value.strip())
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) <= MAX_SECONDS  # false for NaN as well
    ):
        return value * scale
    raise FieldError(
        f"{name} is {shown(value)}, not a time; give a number, or a date as 2024-05-10 00:00:00.5"
    )


def timestamp(moment: datetime) -> float:
    """Seconds since 1970; without an offset the clock is taken for UTC, here and everywhere."""
    origin = datetime(1970, 1, 1, tzinfo=moment.tzinfo)
    return (moment - origin).total_seconds()
