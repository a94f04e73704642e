"""Files as people have them: compressed, in other encodings, through pipes, cut off, not text."""

from __future__ import annotations

import codecs
import gzip
import io
import os
import tarfile
import tempfile
import threading
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_samples import MOONCAKE, SAMPLES

from conftest import COMPRESSIONS
from vllm_tagma.lab.replay import formats
from vllm_tagma.lab.replay.trace import TraceError, TraceRequest
from vllm_tagma.lab.replay.trace_source import STDIN, Source

if TYPE_CHECKING:
    from conftest import Write, WriteBytes

MARKS = {
    "utf-8-sig": (b"", "utf-8-sig"),
    "utf-8": (b"", "utf-8"),
    "utf-16-le": (codecs.BOM_UTF16_LE, "utf-16-le"),
    "utf-16-be": (codecs.BOM_UTF16_BE, "utf-16-be"),
    "utf-16-le without mark": (b"", "utf-16-le"),
    "utf-16-be without mark": (b"", "utf-16-be"),
    "utf-32-le": (codecs.BOM_UTF32_LE, "utf-32-le"),
}


def contents(requests: list[TraceRequest]) -> list[object]:
    """What the replay sees of requests; not where they stand."""
    return [
        (
            [piece.tokens for piece in r.prompt],
            # Names of content differ by place in formats without any; what is shared does not.
            [[a == b for b in r.prompt] for a in requests[0].prompt],
            *(r.output_tokens, r.arrival, r.max_tokens, r.abort_after, r.after),
        )
        for r in requests
    ]


@settings(max_examples=400, deadline=None)
@given(
    name=st.sampled_from(sorted(SAMPLES)),
    encoding=st.sampled_from(sorted(MARKS)),
    compression=st.sampled_from(sorted(COMPRESSIONS)),
    ending=st.sampled_from(["\n", "\r\n", "\r"]),
    blank=st.sampled_from(["", "\n", "\n\n  \n"]),
    newline_at_end=st.booleans(),
)
def test_a_trace_survives_every_wrapping(
    name: str, encoding: str, compression: str, ending: str, blank: str, newline_at_end: bool
) -> None:
    sample = SAMPLES[name]
    mark, codec = MARKS[encoding]
    text = sample.text.rstrip("\n").replace("\n", "\n" + blank)
    # A file without a mark is told by its first characters, which are no blank lines then.
    text = (blank if mark or codec.startswith("utf-8") else "") + text + "\n" * newline_at_end
    data = mark + text.replace("\n", ending).encode(codec)
    with tempfile.TemporaryDirectory() as folder:
        plain, wrapped = Path(folder, "plain"), Path(folder, "wrapped")
        plain.write_text(sample.text, encoding="utf-8")
        wrapped.write_bytes(COMPRESSIONS[compression](data))
        expected = formats.read(plain)
        trace = formats.read(wrapped)
    assert trace.kind == expected.kind == sample.kind
    assert trace.bad == expected.bad == []
    assert len(trace.requests) == sample.requests
    assert contents(trace.requests) == contents(expected.requests)


@settings(max_examples=400, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(SAMPLES)))
def test_a_damaged_file_is_read_or_refused_and_nothing_else(data: st.DataObject, name: str) -> None:
    """Bytes changed, cut out or put in anywhere, also inside of compressed data."""
    pack = COMPRESSIONS[data.draw(st.sampled_from(sorted(COMPRESSIONS)))]
    content = bytearray(pack(SAMPLES[name].text.encode()))
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(content)))
        end = data.draw(st.integers(start, min(len(content), start + 12)))
        content[start:end] = data.draw(st.binary(max_size=6) | st.sampled_from([b'"', b"[", b"{"]))
    read_or_refused(bytes(content))


@settings(max_examples=300, deadline=None)
@given(
    st.binary(max_size=300)
    | st.text(alphabet='[]{}",:\n\r 019eE.-\ufeff\ud800aä', max_size=200).map(
        lambda text: text.encode("utf-8", "surrogatepass")
    )
)
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    read_or_refused(content)


def read_or_refused(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace")
        path.write_bytes(content)
        for kind in (None, *formats.PARSERS):
            refusal = ""
            try:
                trace = formats.read(path, kind=kind)
            except TraceError as error:
                refusal = str(error)
            assert str(path) in refusal or trace.requests


def test_joined_files_are_one_trace(write_bytes: WriteBytes) -> None:
    """``cat a.gz b.gz``, each with its own byte order mark or header line."""
    marked = ("\ufeff" + MOONCAKE).encode()
    for pack in COMPRESSIONS.values():
        trace = formats.read(write_bytes(pack(marked) + pack(marked)), strict=True)
        assert len(trace.requests) == 4
    table = ("\ufeff" + SAMPLES["azure 2023"].text).encode()
    assert len(formats.read(write_bytes(table + table), strict=True).requests) == 4


@pytest.mark.parametrize("compression", sorted(COMPRESSIONS.keys() - {"none"}))
def test_compressed_data_that_breaks_off(write_bytes: WriteBytes, compression: str) -> None:
    data = COMPRESSIONS[compression](os.urandom(3000).hex().encode())
    path = write_bytes(data[:-40])
    for kind in (None, "azure"):
        with pytest.raises(TraceError, match=rf"cannot be read: its {compression} data is damaged"):
            formats.read(path, kind=kind)


def test_what_is_no_text_is_named_with_the_way_out(write_bytes: WriteBytes) -> None:
    packed, tarred = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("trace.jsonl", MOONCAKE)
    with tarfile.open(fileobj=tarred, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("trace.jsonl"))
    for data, what in (
        (packed.getvalue(), r"is a ZIP archive, not text; unpack it: unzip -p .*trace\.bin"),
        (tarred.getvalue(), r"is a tar archive, not text; unpack it: tar xOf"),
        (gzip.compress(tarred.getvalue()), r"is a tar archive"),
        (b"PAR1\x15\x04\x15", r"is Parquet, not text; .*read_parquet\('.*to_json\("),
    ):
        with pytest.raises(TraceError, match=what):
            formats.read(write_bytes(data))


def test_a_byte_that_is_not_utf8_costs_its_line_only(write_bytes: WriteBytes) -> None:
    first, second = MOONCAKE.encode().splitlines()
    broken = first.replace(b'{"', b'{"caf\xe9": 0, "')
    trace = formats.read(write_bytes(b"\n".join([first, broken, second])))
    assert [request.place for request in trace.requests] == ["line 1", "line 3"]
    ((place, reason),) = trace.bad
    assert place == "line 2"
    assert reason.startswith("has the byte 0xe9 in column 6, which is not UTF-8; convert the file")


def test_a_pipe_with_a_name(tmp_path: Path) -> None:
    """``tagma replay <(zcat ...)``: read once only, though the reader looks several times."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(gzip.compress(MOONCAKE.encode()),))
    writer.start()
    trace = formats.read(path)
    writer.join()
    assert len(trace.requests) == 2


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(COMPRESSIONS["zstd"](b"{"))))
    with pytest.raises(TraceError, match=r"standard input has no valid request.*line 1|none of"):
        formats.read(STDIN)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(MOONCAKE.encode())))
    trace = formats.read(STDIN)
    assert (trace.name, len(trace.requests)) == ("standard input", 2)


def test_without_its_library_zstd_is_an_error_that_names_it(
    write_bytes: WriteBytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_bytes(COMPRESSIONS["zstd"](MOONCAKE.encode()))
    monkeypatch.setitem(__import__("sys").modules, "compression.zstd", None)
    monkeypatch.setitem(__import__("sys").modules, "backports.zstd", None)
    with pytest.raises(TraceError, match=r"needs backports\.zstd: pip install .*\[bench\]"):
        formats.read(path)


def test_a_name_that_is_no_text_can_be_printed(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"caf\xe9.jsonl")
    path.write_text(MOONCAKE, encoding="utf-8")
    trace = formats.read(path)
    assert trace.name.encode() == "caf\ufffd.jsonl".encode()
    path.write_text("", encoding="utf-8")
    with pytest.raises(TraceError) as caught:
        formats.read(path)
    assert str(caught.value).encode()


def test_lines_keep_the_numbers_of_the_file(write: Write) -> None:
    with Source(write("\n a\n\n\u2028b\n")) as source:
        assert list(source.lines()) == [(2, " a"), (4, "\u2028b")]
        assert next(iter(source.lines())) == (2, " a"), "read again from the beginning"
