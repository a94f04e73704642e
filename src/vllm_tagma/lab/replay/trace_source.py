"""The text of a trace, whatever it comes in: a file or a pipe, compressed or not, in any Unicode.

What it is, is read off its first bytes, never off its name. Traces are read more than once (which
format, which block size, then the requests), so a pipe is copied to a temporary file first.
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import io
import json
import lzma
import os
import re
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from vllm_tagma.lab.replay.trace import TraceError

STDIN = Path("-")
"""The path that means standard input."""

_IN_MEMORY_BYTES = 64 << 20
_MAGIC_BYTES = 512
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")
_CONTAINERS = (
    (0, b"PK\x03\x04", "a ZIP archive", "unpack it: unzip -p {name} | tagma replay -"),
    (0, b"PK\x05\x06", "an empty ZIP archive", "name the trace itself"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it: 7z x -so {name} | tagma replay -"),
    (0, b"Rar!", "a RAR archive", "unpack it and name the trace in it"),
    (257, b"ustar", "a tar archive", "unpack it: tar xOf {name} | tagma replay -"),
    (
        *(0, b"PAR1", "Parquet"),
        'write it as JSONL, with pandas and pyarrow: python -c "import pandas; '
        "pandas.read_parquet('{name}').to_json('trace.jsonl', orient='records', lines=True)\"",
    ),
    (0, b"ARROW1", "an Arrow file", "write it as JSONL or CSV with pandas"),
    (0, b"\xd0\xcf\x11\xe0", "an Excel file", "save it as CSV"),
    (0, b"SQLite format 3", "an SQLite database", "write the table as CSV"),
)
_ESCAPED = re.compile("[\udc80-\udcff]")
_COMPRESSION_ERRORS = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)


class Source:
    """A trace that can be read from its beginning as often as needed; close it after use."""

    def __init__(self, path: Path) -> None:
        """Opens ``path``, or standard input for ``-``. Raises :class:`TraceError`."""
        self.path = path
        self.name = "standard input" if path == STDIN else _printable(path.name)
        self._held: IO[bytes] | None = None
        self._compression = ""
        try:
            self._held = self._seekable()
            head = self._head()
            self._compression = _compression(head)
            if self._compression:
                head = self._head()
            self._refuse_containers(head)
            # The standard library's reading of RFC 8259: a byte order mark, or where zeros stand.
            self.encoding = json.detect_encoding(head)
        except OSError as error:
            self.close()
            raise TraceError(f"{self} cannot be read: {error}") from None
        except TraceError:
            self.close()
            raise

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __str__(self) -> str:
        return self.name if self.path == STDIN else _printable(str(self.path))

    def close(self) -> None:
        """Lets the file go. A pipe's copy is deleted."""
        if self._held is not None:
            self._held.close()

    @contextmanager
    def text(self, newline: str | None = None) -> Iterator[io.TextIOWrapper]:
        """The text from its beginning, decoded as it is read.

        Bytes that are not UTF-8 become lone surrogates, which :func:`undecodable` finds, so that
        one of them costs its line and not the file. ``newline`` as in :func:`open`. One at a time.

        Raises:
            TraceError: while reading; UTF-16 or compressed data that breaks off or is damaged.
        """
        errors = "surrogateescape" if self.encoding.startswith("utf-8") else "strict"
        with self._bytes() as data:
            text = io.TextIOWrapper(data, encoding=self.encoding, errors=errors, newline=newline)
            try:
                with self._reported():
                    yield text
            finally:
                text.detach()

    def lines(self) -> Iterator[tuple[int, str]]:
        """Lines that hold anything, with their numbers from 1 and without what ends them."""
        with self.text() as text:
            for number, line in enumerate(text, 1):
                # Files that were joined with ``cat`` have byte order marks in their middle.
                line = line.removeprefix("\ufeff").rstrip()
                if line:
                    yield number, line

    def whole(self) -> str:
        """All of the text."""
        with self.text() as text:
            return text.read()

    def _seekable(self) -> IO[bytes]:
        if self.path == STDIN:
            file: IO[bytes] = sys.stdin.buffer
        else:
            file = self.path.open("rb")
            if file.seekable():
                return file
        copy: IO[bytes] = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES)  # noqa: SIM115
        shutil.copyfileobj(file, copy)
        if self.path != STDIN:
            file.close()
        return copy

    @contextmanager
    def _bytes(self) -> Iterator[Any]:
        """What is in the file, unpacked, from its beginning."""
        assert self._held is not None
        self._held.seek(0)
        opened = _unpack(self._held, self._compression, str(self))
        try:
            yield opened
        finally:
            if opened is not self._held:
                opened.close()

    def _head(self) -> bytes:
        with self._reported(), self._bytes() as data:
            head: bytes = data.read(_MAGIC_BYTES)
        return head

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except UnicodeDecodeError as error:
            raise TraceError(
                f"{self} cannot be read: it begins as {error.encoding} and goes on as something "
                f"else ({error.reason}). Save it as UTF-8."
            ) from None
        except _COMPRESSION_ERRORS as error:
            raise self._damaged(error) from None
        except Exception as error:
            # Both homes of Zstandard have an error of their own, and neither may be installed.
            if self._compression == "zstd" and type(error).__name__ == "ZstdError":
                raise self._damaged(error) from None
            raise

    def _damaged(self, error: Exception) -> TraceError:
        return TraceError(
            f"{self} cannot be read: its {self._compression} data is damaged or cut off ({error}). "
            f"Get the file again, or unpack what there is and replay that."
        )

    def _refuse_containers(self, head: bytes) -> None:
        for offset, magic, what, way_out in _CONTAINERS:
            if head[offset : offset + len(magic)] == magic:
                raise TraceError(f"{self} is {what}, not text; {way_out.format(name=self)}.")


def undecodable(text: str) -> str | None:
    """What to say of text that was not UTF-8; None if all of it was."""
    found = _ESCAPED.search(text)
    if found is None:
        return None
    byte = ord(found.group()) - 0xDC00
    return (
        f"has the byte 0x{byte:02x} in column {found.start() + 1}, which is not UTF-8; convert the "
        f"file, for example with iconv -f WINDOWS-1252 -t UTF-8"
    )


def _printable(name: str) -> str:
    """A name of any bytes, as text that every terminal and file takes."""
    return os.fsencode(name).decode("utf-8", "replace")


def _compression(head: bytes) -> str:
    if head.startswith(b"\x1f\x8b"):
        return "gzip"
    if head.startswith(_ZSTD_MAGIC) or _ZSTD_SKIPPABLE.match(head):
        return "zstd"
    if head.startswith(b"BZh"):
        return "bzip2"
    if head.startswith(b"\xfd7zXZ\x00"):
        return "xz"
    return ""


def _unpack(file: IO[bytes], compression: str, name: str) -> Any:
    """A binary reader of what ``file`` holds; the file itself if it is not compressed."""
    if compression == "gzip":
        # The mode is not taken from a temporary file, which is open for writing as well.
        return gzip.GzipFile(fileobj=file, mode="rb")
    if compression == "bzip2":
        return bz2.BZ2File(file)
    if compression == "xz":
        return lzma.LZMAFile(file)
    if compression == "zstd":
        # The same module: the standard library's from Python 3.14, its backport before.
        for home in ("compression.zstd", "backports.zstd"):
            try:
                return importlib.import_module(home).ZstdFile(file)
            except ModuleNotFoundError:
                continue
        raise TraceError(
            f"{name} is compressed with zstd, which needs backports.zstd: pip install "
            f"'vllm-tagma[bench]', or zstd -dc {name} | tagma replay -"
        )
    return file
