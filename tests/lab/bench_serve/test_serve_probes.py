"""What is read from outside: /metrics, nvidia-smi (a stand-in), models, and what is missing."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

from vllm_tagma.lab.bench_serve import preflight, serve_metrics
from vllm_tagma.lab.bench_serve.gpu import Gpu, SampleLog, gpus, sampling_command
from vllm_tagma.lab.bench_serve.model import read

TEXT = """\
# HELP vllm:kv_cache_usage_perc KV-cache usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.75
# TYPE vllm:num_preemptions counter
vllm:num_preemptions_total{engine="0"} 3.0
vllm:num_preemptions_total{engine="1"} 4.0
vllm:cache_config_info{num_gpu_blocks="182",block_size="32"} 1.0
# TYPE vllm:tagma_request_ranges histogram
vllm:tagma_request_ranges_bucket{le="1.0"} 6.0
vllm:tagma_request_ranges_bucket{le="4.0"} 9.0
vllm:tagma_request_ranges_bucket{le="+Inf"} 10.0
vllm:tagma_request_ranges_count 10.0
vllm:tagma_request_ranges_sum 17.0
"""


def test_metrics_are_summed_over_engines_and_usage_is_the_fullest() -> None:
    snapshot = serve_metrics.parse(TEXT)
    assert snapshot.get(serve_metrics.KV_USAGE) == 0.75
    assert snapshot.get(serve_metrics.PREEMPTIONS) == 7.0
    assert snapshot.get(serve_metrics.PREFIX_HITS) is None  # absent is not 0
    assert snapshot.cache["num_gpu_blocks"] == "182"
    buckets = snapshot.buckets["vllm:tagma_request_ranges"]
    assert serve_metrics.bucket_quantile(buckets, 0.5) == 1.0
    assert serve_metrics.bucket_quantile(buckets, 0.9) == 4.0
    assert serve_metrics.bucket_quantile(buckets, 0.99) == math.inf
    assert serve_metrics.bucket_quantile({}, 0.5) is None
    before = {1.0: 6.0, 4.0: 6.0, math.inf: 6.0}
    assert serve_metrics.bucket_difference(buckets, before.items()) == {1.0: 0, 4.0: 3, math.inf: 4}


def test_sampling_reads_a_part_of_it() -> None:
    assert serve_metrics.sampled(TEXT) == {
        serve_metrics.KV_USAGE: 0.75,
        serve_metrics.PREEMPTIONS: 7.0,
    }
    assert serve_metrics.sampled("no metrics at all\n\x00") == {}


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8"),
        ("0.0.0.0", "http://127.0.0.1:8"),
        ("::", "http://[::1]:8"),
    ],
)
def test_addresses(host: str, url: str) -> None:
    assert serve_metrics.base_url(host, 8) == url


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prints two GPUs as the real one does, the first one half full."""
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(
        "#!/bin/sh\n"
        'echo "0, NVIDIA H100 80GB HBM3, 570.10, 81559, 40000"\n'
        'echo "1, NVIDIA H100 80GB HBM3, 570.10, 81559, 4"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.usefixtures("nvidia_smi")
def test_gpus_are_those_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    found = gpus()
    assert [gpu.number for gpu in found] == [0, 1]
    assert found[0] == Gpu(0, "NVIDIA H100 80GB HBM3", "570.10", 81559 << 20, 40000 << 20)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [gpu.number for gpu in gpus()] == [1]
    monkeypatch.setenv("PATH", "/nowhere")
    assert gpus() == []


def test_gpu_samples_are_read_as_they_grow(tmp_path: Path) -> None:
    path = tmp_path / "gpu.csv"
    log = SampleLog(path)
    assert log.new() == []
    path.write_text("0, 512, 97, 310.5, 1980, 54\nUnable to determine\n0, 1024, [N/A], 3")
    (sample,) = log.new()
    assert (sample.memory_used, sample.utilization, sample.temperature) == (512 << 20, 97, 54)
    with path.open("a") as file:
        file.write(", 1, 2\n")
    (sample,) = log.new()
    assert (sample.memory_used, sample.utilization) == (1024 << 20, None)
    assert log.new() == []
    words = sampling_command(indices=[0, 1], interval=0.5)
    assert {"--id=0,1", "--loop-ms=500"} <= set(words)


def test_model_facts(model: Path, tmp_path: Path, settings_of) -> None:
    facts = read(model)
    assert facts is not None
    assert facts.max_positions == 4096
    assert facts.is_16_bit
    assert facts.kv_values_per_token == 2 * 2 * 2 * 8
    assert facts.kv_bytes(10, settings_of()) == 10 * 64 * 4  # float32
    assert read(tmp_path) is None
    other = shutil.copytree(model, tmp_path / "other")
    (other / "model.safetensors").write_bytes(b"12345")
    changed = read(other)
    assert changed is not None
    assert changed.weight_bytes == 5
    assert changed.fingerprint != facts.fingerprint


H100 = Gpu(0, "H100", "570", 80 << 30, 1 << 20)


@pytest.mark.parametrize(
    ("changes", "found", "what", "way_out"),
    [
        ({"device": "cuda"}, [], "GPU: nvidia-smi shows none", "CUDA_VISIBLE_DEVICES"),
        (
            {"device": "cuda"},
            [H100._replace(memory_used=70 << 30)],
            "70.0 GiB of GPU 0 (H100) are in use",
            "lower --gpu-memory-utilization",
        ),
        ({"model": "org/absent"}, [], "org/absent is neither a folder", "hf download org/absent"),
        ({"model": ""}, [], "model: none given", "make serve prepares it"),
        ({"model": "{tmp}"}, [], "has no config.json", "--model"),
        (
            {"max_model_len": 5000},
            [],
            "takes 4096 positions, below --max-model-len 5000",
            "lower --max-model-len",
        ),
        (
            {"kv_cache_memory_bytes": 1 << 50},
            [],
            "memory: the server needs about",
            "lower --kv-cache-memory-bytes",
        ),
        ({"dataset": ""}, [], "dataset: none given", "--dataset FILE"),
        ({"dataset": "{tmp}/none.json"}, [], "none.json does not exist", "mend the file"),
        ({"disk_bytes": 1 << 60}, [], "disk: ", "--output elsewhere"),
        ({"vllm_command": "no-such-vllm"}, [], "no command 'no-such-vllm'", "--vllm-command"),
        ({"host": "203.0.113.9"}, [], "port: 203.0.113.9:", "choose another with --port"),
    ],
)
def test_each_absence_is_named(
    settings_of, tmp_path: Path, port: int, changes: dict, found: list, what: str, way_out: str
) -> None:
    filled = {
        key: value.replace("{tmp}", str(tmp_path)) if isinstance(value, str) else value
        for key, value in changes.items()
    }
    settings = settings_of(**{"port": port, "kv_cache_memory_bytes": 1, **filled})
    problems = preflight.problems(settings, output=tmp_path / "deep" / "out", gpus=found)
    assert any(what in p.what and way_out in p.way_out for p in problems), problems
    assert len(problems) == 1, problems


def test_nothing_is_missing(settings_of, tmp_path: Path, port: int) -> None:
    settings = settings_of(port=port, kv_cache_memory_bytes=1)
    assert preflight.problems(settings, output=tmp_path, gpus=[]) == []


def test_all_absences_are_said_at_once(settings_of, tmp_path: Path, port: int) -> None:
    settings = settings_of(port=port, model="", dataset="", device="cuda", disk_bytes=1 << 60)
    problems = preflight.problems(settings, output=tmp_path, gpus=[])
    text = str(preflight.PreflightError(problems))
    for word in ("nothing was started", "GPU:", "model:", "dataset:", "disk:"):
        assert word in text


def test_a_package_that_is_missing_is_named(
    settings_of, tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(preflight._PACKAGES, "no_such_package", "for a reason")
    settings = settings_of(port=port, kv_cache_memory_bytes=1)
    (problem,) = preflight.problems(settings, output=tmp_path, gpus=[])
    assert problem.what == "Python packages: no_such_package (for a reason)"
    assert "pip install 'vllm-tagma[bench]'" in problem.way_out


def test_json_of_the_model_that_is_no_object(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps([1]))
    assert read(tmp_path) is None
