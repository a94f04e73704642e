"""The flags that `tagma doctor` suggests: from the files of a machine to the line to paste."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm_tagma import flag_advice
from vllm_tagma.flag_advice import GIB, ModelNeeds, advise
from vllm_tagma.machine import Machine, this_machine

PLAIN = Machine(
    cpus=16,
    cpu_quota=None,
    memory=64 * GIB,
    free_memory=60 * GIB,
    nodes=("0-15",),
    bfloat16=True,
)
NEEDS = ModelNeeds(
    weights=2 * GIB, kv_bytes_per_token=1 << 17, max_model_len=8192, kv_heads=8, dtype="bfloat16"
)


def settings(machine: Machine, needs: ModelNeeds | None = None, given: tuple[str, ...] = ()):
    return [item.setting for item in advise(machine, needs, given=given, cuda=False)]


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


def test_the_files_of_a_machine_are_read(tmp_path):
    write(
        tmp_path,
        proc__meminfo="MemTotal:       65536000 kB\nMemAvailable:   60000000 kB\nHugePages: 0",
        proc__cpuinfo="processor\t: 0\nflags\t\t: fpu avx512f avx512_bf16\n\nprocessor\t: 1",
        sys__devices__system__node__node0__cpulist="0-15",
        sys__devices__system__node__node10__cpulist="32-47",
        sys__devices__system__node__node2__cpulist="16-31",
        sys__devices__system__node__node3__cpulist="",
    )
    found = this_machine(tmp_path)
    assert found.memory == 65536000 * 1024
    assert found.free_memory == 60000000 * 1024
    assert found.bfloat16
    assert found.nodes == ("0-15", "16-31", "32-47")
    assert found.cpu_quota is None
    container = {
        "sys/fs/cgroup/memory.max": f"{8 * GIB}",
        "sys/fs/cgroup/memory.current": f"{3 * GIB}",
        "sys/fs/cgroup/cpu.max": "250000 100000",
    }
    write(tmp_path, proc__cpuinfo="flags\t\t: fpu avx512f", **container)
    limited = this_machine(tmp_path)
    assert (limited.memory, limited.free_memory) == (8 * GIB, 5 * GIB)
    assert limited.cpu_quota == 2.5
    assert not limited.bfloat16


def test_a_machine_that_says_nothing_raises_nothing(tmp_path):
    found = this_machine(tmp_path)
    assert (found.memory, found.free_memory, found.nodes) == (0, 0, ())
    assert settings(replace(found, bfloat16=True, gpus=())) == []


def test_the_pool_leaves_room_for_weights_and_the_server():
    assert settings(PLAIN) == [f"--kv-cache-memory-bytes {43 * GIB}"]  # 3/4 of 60 - 2.5
    assert settings(PLAIN, NEEDS) == [f"--kv-cache-memory-bytes {41 * GIB}"]
    (item,) = advise(replace(PLAIN, free_memory=30 * GIB), given=(), cuda=False)
    assert "30.0 GiB of 64.0 GiB are free" in item.why
    assert item.why.endswith("and would not start")


@pytest.mark.parametrize("flag", ["--kv-cache-memory-bytes", "--gpu-memory-utilization=0.5"])
def test_what_the_user_decided_is_left_alone(flag):
    assert settings(PLAIN, NEEDS, given=(flag, "7")) == []
    slow = replace(PLAIN, bfloat16=False, memory=0)
    assert settings(slow, given=("--dtype", "float16")) == []


def test_too_little_memory_is_said_and_no_flag_given():
    (item,) = advise(replace(PLAIN, free_memory=4 * GIB), NEEDS, given=(), cuda=False)
    assert item.setting == ""
    assert "4.0 GiB are free, and the server needs 2.5 GiB beside 2.0 GiB of weights" in item.why


def test_a_pool_that_cannot_hold_one_request_asks_for_a_shorter_limit():
    small = replace(PLAIN, free_memory=5 * GIB)
    pool, length = settings(small, replace(NEEDS, max_model_len=131072))
    num_bytes = int(pool.split()[1])
    assert 0 < num_bytes <= GIB // 2
    tokens = int(length.removeprefix("--max-model-len "))
    assert tokens % 128 == 0
    assert tokens * NEEDS.kv_bytes_per_token <= num_bytes
    assert len(settings(small, NEEDS, given=("--max-model-len", "512"))) == 1


def test_emulated_bfloat16_asks_for_float32_and_counts_it_double():
    slow = replace(PLAIN, bfloat16=False)
    assert settings(slow, NEEDS) == [f"--kv-cache-memory-bytes {40 * GIB}", "--dtype float32"]
    assert "--dtype float32" not in settings(slow, replace(NEEDS, dtype="float16"))


def test_a_container_with_fewer_cpus_gets_as_many_threads():
    assert settings(replace(PLAIN, cpu_quota=2.5, memory=0)) == [
        "OMP_NUM_THREADS=2",
        "VLLM_CPU_OMP_THREADS_BIND=nobind",
    ]
    assert settings(replace(PLAIN, cpu_quota=16.0, memory=0)) == []


def test_numa_nodes_get_a_rank_each_where_the_heads_divide():
    two = replace(PLAIN, nodes=("0-7", "8-15"))
    assert settings(two, NEEDS)[1:] == ["--tensor-parallel-size 2"]
    assert settings(two, replace(NEEDS, kv_heads=3))[1:] == ["VLLM_CPU_OMP_THREADS_BIND=0-7"]
    assert settings(two, NEEDS, given=("-tp", "2"))[1:] == []
    # Half the memory, and half the weights where they are shared: 3/4 of 30 - 1 - 2.5.
    assert settings(two, NEEDS)[0] == f"--kv-cache-memory-bytes {19 * GIB}"


def test_a_gpu_is_named():
    gpu = replace(PLAIN, memory=0, gpus=("NVIDIA H200",))
    (idle,) = advise(gpu, given=(), cuda=False)
    assert idle.setting == ""
    assert "NVIDIA H200 stays idle" in idle.why
    (tested,) = advise(gpu, given=(), cuda=True)
    assert "each start compares the kernels" in tested.why
    assert tested.setting == ""


def test_the_line_to_paste_has_variables_first_and_keeps_the_users_flags():
    limited = replace(PLAIN, cpu_quota=2.0, memory=0, bfloat16=False)
    given = ["--port", "8080"]
    line = flag_advice.command(advise(limited, given=given, cuda=False), "m", given)
    assert line == (
        "OMP_NUM_THREADS=2 VLLM_CPU_OMP_THREADS_BIND=nobind vllm serve m --kv-cache-backend tagma "
        "--port 8080 --dtype float32"
    )
    assert flag_advice.command([], None, []) == "vllm serve MODEL --kv-cache-backend tagma"


def test_what_a_model_needs_is_read_from_its_configuration(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    model = SimpleNamespace(
        model=str(tmp_path),
        dtype=torch.bfloat16,
        max_model_len=512,
        get_num_kv_heads=lambda _: 2,
        get_head_size=lambda: 64,
        get_num_layers=lambda _: 3,
    )
    config = SimpleNamespace(
        model_config=model,
        parallel_config=SimpleNamespace(tensor_parallel_size=2),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )
    assert flag_advice.model_needs(config) == ModelNeeds(
        weights=1000,
        kv_bytes_per_token=2 * 3 * 2 * 64 * 2,
        max_model_len=512,
        kv_heads=4,
        dtype="bfloat16",
    )
    config.cache_config.cache_dtype = "fp8_e4m3"
    assert flag_advice.model_needs(config).kv_bytes_per_token == 2 * 3 * 2 * 64
