"""What `make` refuses before anything long starts: each message names value, limit and way out."""

from __future__ import annotations

import platform
import socket
import subprocess
import sys

import pytest

import host
from progress import SetupFailure


@pytest.fixture
def busy_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_port_in_use_is_named_with_another_to_take(busy_port):
    with pytest.raises(SetupFailure, match=f"Port {busy_port} on 127.0.0.1 is in use.*PORT="):
        host.check_port(host="127.0.0.1", port_text=str(busy_port))


def test_free_port_is_accepted_and_left_free():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert host.check_port(host="127.0.0.1", port_text=str(port)) == port
    assert host.check_port(host="127.0.0.1", port_text=str(port)) == port


@pytest.mark.parametrize("text", ["", "http", "0", "65536", "-1", "80.5"])
def test_port_that_is_no_port(text):
    with pytest.raises(SetupFailure, match="is not a port: give a number from 1 to 65535"):
        host.check_port(host="127.0.0.1", port_text=text)


def test_host_that_is_not_of_this_machine():
    # 192.0.2.0/24 is reserved for documentation: no machine has it.
    with pytest.raises(SetupFailure, match=r"cannot listen on 192\.0\.2\.1:8000"):
        host.check_port(host="192.0.2.1", port_text="8000")


def test_no_compiler(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SetupFailure, match=r"No C\+\+ compiler was found.*apt install g\+\+"):
        host.check_compiler()


def test_compiler_that_does_not_know_cpp17(monkeypatch, tmp_path):
    old = tmp_path / "old-cxx"
    old.write_text("#!/bin/sh\necho 'unknown option -std=c++17' >&2\nexit 1\n")
    old.chmod(0o755)
    monkeypatch.setenv("CXX", str(old))
    with pytest.raises(SetupFailure, match=r"does not compile C\+\+17: unknown option"):
        host.check_compiler()


def test_python_headers_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(host.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(SetupFailure, match=r"Python\.h is missing.*python3-dev"):
        host.check_compiler()


def test_compiler_of_this_machine_is_enough(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    assert host.check_compiler()


def test_too_little_disk(tmp_path):
    with pytest.raises(SetupFailure, match=r"Only .* GiB are free .* needs 1048576 GiB"):
        host.check_disk(folder=tmp_path, need_bytes=1 << 50)
    host.check_disk(folder=tmp_path, need_bytes=1)


def test_unsupported_machine(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(SetupFailure, match=r"linux/riscv64.*x86_64 and aarch64"):
        host.check_platform()


def test_c_library_too_old(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.17"))
    with pytest.raises(SetupFailure, match=r"glibc 2\.17.*need glibc 2\.28"):
        host.check_platform()


def test_python_newer_than_the_wheels(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr(host.sys, "version_info", (3, 99, 0))
    with pytest.raises(SetupFailure, match=r"newer than vLLM's wheels.*PYTHON="):
        host.check_platform()


def test_python_too_old_is_refused_by_a_script_that_it_can_read(root):
    script = root / "tools" / "check_python.py"
    code = "import sys; sys.version_info = (3, 9, 2); exec(open(sys.argv[1]).read())"
    old = subprocess.run([sys.executable, "-c", code, script], capture_output=True, text=True)
    assert old.returncode == 1
    assert "is Python 3.9; vllm-tagma needs 3.11 or newer" in old.stderr
    assert subprocess.run([sys.executable, script]).returncode == 0


def test_available_memory_is_the_smaller_of_machine_and_container(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 9999 kB\nMemAvailable:    4096 kB\n")
    assert host.available_memory(proc=tmp_path, cgroup=tmp_path / "none") == 4096 * 1024
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert host.available_memory(proc=tmp_path, cgroup=tmp_path) == 4096 * 1024
    (tmp_path / "memory.max").write_text("3000\n")
    assert host.available_memory(proc=tmp_path, cgroup=tmp_path) == 2000


def test_cached_files_of_a_container_count_as_available(tmp_path):
    """An installation fills it with cached files; a second `make serve` must still start."""
    (tmp_path / "meminfo").write_text("MemAvailable:    4096 kB\n")
    (tmp_path / "memory.max").write_text("3000\n")
    (tmp_path / "memory.current").write_text("2900\n")
    stat = "anon 900\nfile 2000\nshmem 300\ninactive_file 1500\nactive_file 200\n"
    (tmp_path / "memory.stat").write_text(stat)
    assert host.available_memory(proc=tmp_path, cgroup=tmp_path) == 3000 - (2900 - 1700)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model name : x\nflags\t\t: fpu avx2 avx512f\n", False),
        ("flags\t\t: fpu avx2 avx512_bf16 sse\n", True),
        ("flags\t\t: amx_bf16 amx_tile\n", True),
        ("Features\t: fp asimd bf16\n", True),
        ("", False),
    ],
)
def test_bfloat16_in_hardware_is_read_from_the_cpu_flags(tmp_path, text, expected):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(text)
    assert host.has_bfloat16(cpuinfo) is expected
    assert host.has_bfloat16(tmp_path / "missing") is False


def test_a_gpu_is_used_only_when_asked_for(monkeypatch):
    monkeypatch.setattr(host, "has_cuda", lambda: True)
    assert host.wants_cuda({}) is False
    assert host.wants_cuda({"TAGMA_CUDA": "0"}) is False
    assert host.wants_cuda({"TAGMA_CUDA": "1"}) is True
    with pytest.raises(SetupFailure, match="TAGMA_CUDA=yes; it takes 0 or 1"):
        host.wants_cuda({"TAGMA_CUDA": "yes"})
    monkeypatch.setattr(host, "has_cuda", lambda: False)
    with pytest.raises(SetupFailure, match="lists no NVIDIA GPU"):
        host.wants_cuda({"TAGMA_CUDA": "1"})
