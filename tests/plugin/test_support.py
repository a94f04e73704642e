"""The support matrix is executable: every refused rule has a configuration that shows its message.

Where vLLM builds such a configuration on a CPU, it is built; otherwise the finished configuration
of a tiny model is changed in the one attribute that the option sets.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import test_support_attention
from support_messages import RULES, assert_message
from test_support_caches import CACHES, cache_of, full

from vllm_tagma import support
from vllm_tagma.errors import UnsupportedError
from vllm_tagma.integration.engine_args import finalise
from vllm_tagma.support.config_probes import attribute
from vllm_tagma.support.support_document import main as write_document

if TYPE_CHECKING:
    from conftest import ConfigFactory

# ---- real arguments: what a user would type -----------------------------------------------------

BY_ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "worker": ({"worker_cls": "my.Worker"}, "worker_cls is my.Worker"),
    "scheduler-cls": ({"scheduler_cls": "my.Sched"}, "--scheduler-cls is my.Sched"),
    "data-parallel-experts": (
        {"data_parallel_size": 2, "hf_overrides": {"num_experts": 4}},
        "--data-parallel-size is 2",
    ),
    "executor": (
        {"distributed_executor_backend": "external_launcher"},
        "--distributed-executor-backend is external_launcher",
    ),
    "kv-offloading": ({"kv_offloading_size": 1.0}, "--kv-offloading-size is 1.0"),
    "prefix-match-unit": (
        {"prefix_match_unit": 16},
        "--prefix-match-unit is 16 with a block size of 32",
    ),
    "retention-interval": (
        {"prefix_cache_retention_interval": 64},
        "--prefix-cache-retention-interval is 64",
    ),
    "ngram-gpu": (
        {
            "speculative_config": {
                "method": "ngram_gpu",
                "num_speculative_tokens": 2,
                "prompt_lookup_max": 2,
            }
        },
        "--speculative-config is ngram_gpu",
    ),
    "fast-prefill": ({"kv_sharing_fast_prefill": True}, "--kv-sharing-fast-prefill is True"),
    "kv-dtype-skip-layers": (
        {"kv_cache_dtype_skip_layers": ["0"]},
        "--kv-cache-dtype-skip-layers is ['0']",
    ),
    "alignment": (
        {"additional_config": {"kv_cache_backend": "tagma", "tagma": {"alignment": 4}}},
        "['alignment'] is 4 blocks",
    ),
}

# ---- one attribute of a finished configuration --------------------------------------------------


def _drafts(method: str, *, parallel_drafting: bool = False) -> SimpleNamespace:
    """What rows read of a ``SpeculativeConfig``."""
    return SimpleNamespace(method=method, parallel_drafting=parallel_drafting)


BY_ATTRIBUTE: dict[str, tuple[str, Any, str]] = {
    "v2-runner": ("use_v2_model_runner", True, "use_v2_model_runner is True"),
    "gpu": (
        "parallel_config.worker_cls",
        "vllm_tagma.integration.worker_v2.TagmaWorker",
        "worker_cls is vllm_tagma.integration.worker_v2.TagmaWorker",
    ),
    "watermarking": ("watermark_config", object(), "--watermark-config is set"),
    "decode-context-parallel": (
        "parallel_config.decode_context_parallel_size",
        2,
        "--decode-context-parallel-size is 2",
    ),
    "prefill-context-parallel": (
        "parallel_config.prefill_context_parallel_size",
        2,
        "--prefill-context-parallel-size is 2",
    ),
    "expert-parallel": (
        "parallel_config.enable_expert_parallel",
        True,
        "--enable-expert-parallel is True",
    ),
    "multi-node": ("parallel_config.nnodes", 2, "--nnodes is 2"),
    "elastic-ep": ("parallel_config.enable_elastic_ep", True, "--enable-elastic-ep is True"),
    "fault-tolerance": (
        "parallel_config.enable_fault_tolerance",
        True,
        "--enable-fault-tolerance is True",
    ),
    "microbatching": ("parallel_config.use_ubatching", True, "--ubatch-size is True"),
    "kv-transfer": (
        "kv_transfer_config",
        SimpleNamespace(kv_connector="FlexKVConnectorV1"),
        "--kv-transfer-config is FlexKVConnectorV1",
    ),
    "kv-offloading-connector": (
        "kv_transfer_config",
        SimpleNamespace(kv_connector="OffloadingConnector"),
        "--kv-transfer-config is OffloadingConnector",
    ),
    "lmcache": (
        "kv_transfer_config",
        SimpleNamespace(kv_connector="LMCacheConnectorV1"),
        "--kv-transfer-config is LMCacheConnectorV1",
    ),
    "mooncake": (
        "kv_transfer_config",
        SimpleNamespace(kv_connector="MooncakeConnector"),
        "--kv-transfer-config is MooncakeConnector",
    ),
    "kv-push": (
        "kv_transfer_config",
        SimpleNamespace(kv_connector="NixlPushConnector"),
        "--kv-transfer-config is NixlPushConnector",
    ),
    "kv-connector-gpu": (
        "kv_transfer_config",
        SimpleNamespace(kv_connector="NixlConnector"),
        "--kv-transfer-config is NixlConnector",
    ),
    "hisparse": ("attention_config.hisparse_config", object(), "hisparse_config is set"),
    "encoder-transfer": (
        "ec_transfer_config",
        SimpleNamespace(ec_connector="ECExampleConnector"),
        "--ec-transfer-config is ECExampleConnector",
    ),
    "weight-transfer": (
        "weight_transfer_config",
        SimpleNamespace(backend="nccl"),
        "--weight-transfer-config is nccl",
    ),
    "aux-output": ("aux_output_config.enabled", True, "--enable-return-routed-experts is True"),
    "sleep-mode": ("model_config.enable_sleep_mode", True, "--enable-sleep-mode is True"),
    "suffix": ("speculative_config", _drafts("suffix"), "--speculative-config is suffix"),
    "dflash": ("speculative_config", _drafts("dspark"), "--speculative-config is dspark"),
    "mlp-speculator": (
        "speculative_config",
        _drafts("mlp_speculator"),
        "--speculative-config is mlp_speculator",
    ),
    "hidden-states": (
        "speculative_config",
        _drafts("extract_hidden_states"),
        "--speculative-config is extract_hidden_states",
    ),
    "speculative-method": (
        "speculative_config",
        _drafts("custom_class"),
        "--speculative-config is custom_class",
    ),
    "parallel-drafting": (
        "speculative_config",
        _drafts("eagle", parallel_drafting=True),
        "--speculative-config.parallel_drafting is True",
    ),
    "multi-module-mtp": (
        "num_prefill_lookahead_tokens",
        2,
        "--speculative-config is None with 2 modules",
    ),
    "diffusion": ("diffusion_config", object(), "--diffusion-config is set"),
    "encoder-decoder": (
        "model_config.is_encoder_decoder",
        True,
        "model architecture is LlamaForCausalLM",
    ),
    "encoder-only-multimodal": ("is_mm_encoder_only", True, "--mm-encoder-only is True"),
    "attention-free": ("model_config.is_attention_free", True, "model architecture is Llama"),
    "sparse-mla": (
        "model_config.hf_text_config.index_topk",
        64,
        "model architecture is LlamaForCausalLM",
    ),
    "mamba": ("model_config.is_hybrid", True, "model architecture is LlamaForCausalLM"),
    "window-transfer": ("kv_transfer_config", object(), "window of the model is 128 tokens"),
    "window-speculation": (
        "speculative_config",
        _drafts("ngram"),
        "window of the model is 128 tokens",
    ),
    "engram": ("engram_config", object(), "--engram-config is set"),
    "sparse-indexer": (
        "attention_config.minimax_m3_indexer_cp",
        True,
        "minimax_m3_indexer_cp is True",
    ),
    "kv-cache-dtype": ("cache_config.cache_dtype", "nvfp4", "--kv-cache-dtype is nvfp4"),
}


@pytest.mark.parametrize("rule_id", BY_ARGUMENTS)
def test_arguments_are_refused(engine_args: ConfigFactory, rule_id: str) -> None:
    changes, value = BY_ARGUMENTS[rule_id]
    arguments = engine_args(**{"additional_config": {"kv_cache_backend": "tagma"}, **changes})
    with pytest.raises(UnsupportedError) as error:
        arguments.create_engine_config()
    lines = [line for line in str(error.value).splitlines() if value in line]
    assert len(lines) == 1, error.value
    assert RULES[rule_id].way_out in lines[0]


class _Changed:
    """A configuration that differs from ``inner`` in one attribute; all else is the real one."""

    def __init__(self, inner: Any, name: str, value: Any) -> None:
        self._inner = inner
        self.__dict__[name] = value

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _with_attribute(config: Any, path: str, value: Any) -> Any:
    head, _, rest = path.partition(".")
    if not rest:
        return _Changed(config, head, value)
    return _Changed(config, head, _with_attribute(getattr(config, head), rest, value))


# Options of one release only; every other attribute must exist in the installed one.
ONLY_IN_033 = {"sparse-indexer"}
IN_MODELS = {"sparse-mla"}  # attributes of a model's own configuration


@pytest.mark.parametrize("rule_id", BY_ATTRIBUTE)
def test_attributes_are_refused(vllm_config: ConfigFactory, rule_id: str) -> None:
    path, wrong, value = BY_ATTRIBUTE[rule_id]
    config = vllm_config()
    if rule_id in ("window-transfer", "window-speculation"):
        config = _with_attribute(config, "model_config.hf_text_config.sliding_window", 128)
        config = _with_attribute(config, "cache_config.sliding_window", 128)
    if rule_id == "kv-connector-gpu":
        config = _on_a_gpu(config)
    if rule_id == "gpu":
        config = _with_options(vllm_config, self_test="off")
    owner, _, name = path.rpartition(".")
    holder = attribute(config, owner) if owner else config
    assert hasattr(holder, name) or rule_id in ONLY_IN_033 | IN_MODELS, f"vLLM has no {path}"
    findings = support.explain(_with_attribute(config, path, wrong))
    assert_message(findings, rule_id, value)


def test_interleaved_windows_are_found(vllm_config: ConfigFactory) -> None:
    """Of what windows are not served with: here drafts."""
    config = _with_attribute(vllm_config(), "speculative_config", _drafts("ngram"))
    config = _with_attribute(config, "model_config.hf_text_config.sliding_window", 512)
    assert support.explain(config) == []  # a window that no layer uses
    layers = ["full_attention", "sliding_attention"]
    config = _with_attribute(config, "model_config.hf_text_config.layer_types", layers)
    assert_message(support.explain(config), "window-speculation", "512 tokens in some layers")
    chunks = _with_attribute(config, "model_config.attention_chunk_size", 64)
    assert_message(support.explain(chunks), "window-speculation", "64 tokens a chunk")
    alone = _with_attribute(config, "scheduler_config.disable_hybrid_kv_cache_manager", True)
    assert support.explain(alone) == []
    layers.remove("full_attention")  # with windows alone vLLM keeps a window group all the same
    assert_message(support.explain(alone), "window-speculation", "512 tokens in some layers")


def test_every_refused_row_is_shown_here() -> None:
    shown = {*BY_ARGUMENTS, *BY_ATTRIBUTE, *(rule_id for rule_id, _, _ in CACHES)}
    shown.add("v2-speculation")  # of two options at once, above
    shown |= test_support_attention.SHOWN
    refused = {rule.id for rule in RULES.values() if rule.status != "served"}
    assert shown == refused


def test_rows_are_well_formed() -> None:
    assert len(RULES) == len(support.rules())
    for rule in support.rules():
        asks = rule.in_config is not None or rule.in_cache is not None
        assert asks == (rule.status != "served"), rule.id
        assert rule.why, rule.id
        assert bool(rule.way_out) == asks, rule.id
        assert not rule.why.endswith("."), rule.id


CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
GPU_WORKER = "vllm.v1.worker.gpu_worker.Worker"


def _on_a_gpu(config: Any, *, v2: bool = True) -> Any:
    """The configuration as vLLM finishes it on CUDA."""
    config = _with_attribute(config, "parallel_config.worker_cls", GPU_WORKER)
    return _with_attribute(config, "use_v2_model_runner", v2)


def _refusals(config: Any) -> list[str]:
    return [finding.rule.id for finding in support.explain(config)]


def _with_options(vllm_config: ConfigFactory, **options: bool | str) -> Any:
    return vllm_config(additional_config={"kv_cache_backend": "tagma", "tagma": options})


def test_a_gpu_is_admitted_if_it_is_tested_there(vllm_config: ConfigFactory) -> None:
    untested = _on_a_gpu(_with_options(vllm_config, self_test="off"))
    assert_message(support.explain(untested), "gpu", f"worker_cls is {GPU_WORKER}")
    assert _refusals(_on_a_gpu(_with_options(vllm_config, self_test="always"))) == []
    config = vllm_config(additional_config={"kv_cache_backend": "tagma"})
    assert _refusals(_on_a_gpu(config)) == []
    assert finalise(_on_a_gpu(config)).parallel_config.worker_cls == (
        "vllm_tagma.integration.worker_v2.TagmaWorker"
    )
    transfer = SimpleNamespace(kv_connector="NixlConnector")
    config = _with_attribute(config, "kv_transfer_config", transfer)
    assert _refusals(_on_a_gpu(config)) == ["kv-connector-gpu"]


def test_drafts_with_the_v2_runner_are_refused(vllm_config: ConfigFactory) -> None:
    config = _with_attribute(
        _on_a_gpu(_with_options(vllm_config)),
        "speculative_config",
        _drafts("eagle"),
    )
    value = "use_v2_model_runner is True while --speculative-config is eagle"
    assert_message(support.explain(config), "v2-speculation", value)


def test_a_gpu_with_the_v1_runner_has_no_worker(vllm_config: ConfigFactory) -> None:
    config = _on_a_gpu(_with_options(vllm_config), v2=False)
    assert_message(support.explain(config), "worker", f"{GPU_WORKER} with Model Runner V1")


def test_v2_on_a_cpu_is_admitted_under_the_interpreter_alone(
    vllm_config: ConfigFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for options, interpret, refused in (
        ({}, "1", ["v2-runner"]),
        ({"self_test": "always"}, "1", ["v2-runner"]),
        ({"v2_interpreter": True}, "0", ["v2-runner"]),
        ({"v2_interpreter": True}, "1", []),
    ):
        config = _with_attribute(
            _with_options(vllm_config, **options), "parallel_config.worker_cls", CPU_WORKER
        )
        config = _with_attribute(config, "use_v2_model_runner", True)
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
        assert _refusals(config) == refused
    assert finalise(config).parallel_config.worker_cls == (
        "vllm_tagma.integration.worker_v2.TagmaV2CPUWorker"
    )


SERVED: dict[str, dict[str, Any]] = {
    "nothing special": {},
    "prefix caching off": {"enable_prefix_caching": False},
    "chunked prefill off": {"enable_chunked_prefill": False},
    "priority": {"scheduling_policy": "priority"},
    "watermark": {"watermark": 0.1},
    "full prompt reservation off": {"scheduler_reserve_full_isl": False},
    "lora": {"enable_lora": True, "max_lora_rank": 8},
    "kv events": {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}},
    "kv metrics": {"kv_cache_metrics": True},
    "async scheduling asked for": {"async_scheduling": True},
    "hash": {"prefix_caching_hash_algo": "sha256_cbor"},
    "debugging": {
        "additional_config": {"kv_cache_backend": "tagma", "tagma": {"debug_slots": True}}
    },
    "match unit equal to the block": {"prefix_match_unit": 32},
    "n-gram speculation": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 2,
            "prompt_lookup_max": 2,
        }
    },
}


@pytest.mark.parametrize("case", SERVED)
def test_what_is_served_is_not_refused(vllm_config: ConfigFactory, case: str) -> None:
    config = vllm_config(**{"additional_config": {"kv_cache_backend": "tagma"}, **SERVED[case]})
    support.require_supported(config, cache_of(full(), hash_block_size=32))


def test_the_document_is_current() -> None:
    path = Path(__file__).parents[2] / support.DOCUMENT
    assert path.read_text() == support.render_markdown(), (
        "docs/support.md differs from the table; run `python -m vllm_tagma.support`"
    )


def test_the_document_is_written_where_asked_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An argument that is no path was once taken for one."""
    monkeypatch.chdir(tmp_path)
    for wrong in (["--no-such-flag"], ["one.md", "two.md"]):
        with pytest.raises(SystemExit) as ended:
            write_document(wrong)
        assert ended.value.code == 2
    with pytest.raises(SystemExit, match="docs is not a folder"):
        write_document([])
    assert list(tmp_path.iterdir()) == []
    write_document(["matrix.md"])
    assert (tmp_path / "matrix.md").read_text() == support.render_markdown()
