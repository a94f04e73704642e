"""The names under which traces keep the same few things, in CSV columns and in JSON objects.

Names are compared without case, spaces, underscores and the like: ``ContextTokens``,
``context_tokens`` and ``Context Tokens`` are one. Of several that an entry has, the first listed
here counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

PROMPT = (
    *("contexttokens", "requesttokens", "inputlength", "inputtokens", "prompttokens"),
    *("numprompttokens", "numinputtokens", "numprefilltokens", "promptlen", "promptlength"),
    *("inputlen", "inputtokenlength", "prefilltokens", "isl"),
)
OUTPUT = (
    *("generatedtokens", "responsetokens", "outputlength", "outputtokens", "completiontokens"),
    *("numgeneratedtokens", "numoutputtokens", "numdecodetokens", "numcompletiontokens"),
    *("outputlen", "outputtokenlength", "generationtokens", "decodetokens", "completionlength"),
    *("responselength", "osl"),
)
TIME = (
    *("timestamp", "timestampms", "timestamps", "timestampseconds", "timestamputc"),
    *("arrivaltime", "arrivedat", "arrivaltimems", "arrivalms", "arrivals", "arrival"),
    *("starttime", "requesttime", "time", "datetime", "ts"),
)
HASHES = ("hashids", "blockhashes", "blockhashids", "prefixhashes", "hashes")

_MILLISECONDS = ("timestampms", "arrivaltimems", "arrivalms")
_INSIGNIFICANT = re.compile(r"[\W_]+")


def plain(name: str) -> str:
    """A name as the lists above write it."""
    return _INSIGNIFICANT.sub("", name).lower()


def find(names: Iterable[str], wanted: tuple[str, ...]) -> str | None:
    """The one of ``names`` that comes first in ``wanted``; None if none does."""
    known = {plain(name): name for name in reversed(list(names))}
    return next((known[name] for name in wanted if name in known), None)


def in_milliseconds(name: str) -> bool:
    """Whether a time field says of itself that it counts milliseconds."""
    return plain(name) in _MILLISECONDS
