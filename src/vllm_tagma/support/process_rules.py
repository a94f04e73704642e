"""Rules about workers, processes, and other owners of blocks.

How rules are joined: ``rule_table.py``; what they ask: ``config_probes.py``.
"""

from __future__ import annotations

from typing import Final

from vllm_tagma.support import config_probes as probe
from vllm_tagma.support.rule import Rule

PROCESS_RULES: Final[tuple[Rule, ...]] = (
    # ---- not served: parallelism and processes ----
    Rule(
        id="worker",
        title="workers other than vLLM's for CPU and CUDA",
        option="worker_cls",
        status="planned",
        why="A worker is needed that writes KV by range; there is one for Model Runner V1 on CPU "
        "and one for Model Runner V2",
        way_out="serve on vLLM's CPU backend and leave --worker-cls unset",
        in_config=probe.worker_class,
    ),
    Rule(
        id="gpu",
        title="GPUs (Model Runner V2 on CUDA) without the self-test",
        option="worker_cls",
        status="refused",
        why="No test of this project runs a whole engine on a GPU; what stands in for it is the "
        "self-test that each start runs there (docs/self-test.md)",
        way_out="drop --tagma-self-test off",
        in_config=probe.untested_gpu,
    ),
    Rule(
        id="v2-runner",
        title="Model Runner V2 on a CPU",
        option="use_v2_model_runner",
        status="refused",
        why="On a CPU it needs the Triton interpreter, a slow vehicle for tests, which "
        "TRITON_INTERPRET=1 together with the option v2_interpreter admits",
        way_out="set VLLM_USE_V2_MODEL_RUNNER=0",
        in_config=probe.v2_on_cpu,
    ),
    Rule(
        id="watermarking",
        title="watermarked output",
        option="--watermark-config",
        status="planned",
        why="It forces Model Runner V2",
        way_out="drop --watermark-config",
        in_config=probe.if_set("watermark_config"),
    ),
    Rule(
        id="expert-parallel",
        title="expert parallelism",
        option="--enable-expert-parallel",
        status="planned",
        why="On a CPU stock vLLM dies of it (a segmentation fault in its kernel for experts), so "
        "there is nothing to compare with",
        way_out="drop --enable-expert-parallel; tensor parallelism splits each expert",
        in_config=probe.unless("parallel_config.enable_expert_parallel", False),
    ),
    Rule(
        id="data-parallel-experts",
        title="data parallelism of a mixture of experts",
        option="--data-parallel-size",
        status="planned",
        why="Its engines step together and exchange tokens, which stock vLLM cannot on a CPU, so "
        "there is nothing to compare with",
        way_out="set --data-parallel-size 1 and run one server per replica",
        in_config=probe.engines_with_experts,
    ),
    Rule(
        id="decode-context-parallel",
        title="decode context parallelism",
        option="--decode-context-parallel-size",
        status="planned",
        why="It interleaves a block's tokens over ranks, which range arithmetic does not",
        way_out="set --decode-context-parallel-size 1",
        in_config=probe.unless("parallel_config.decode_context_parallel_size", 1),
    ),
    Rule(
        id="prefill-context-parallel",
        title="prefill context parallelism",
        option="--prefill-context-parallel-size",
        status="planned",
        why="It interleaves a block's tokens over ranks, which range arithmetic does not",
        way_out="set --prefill-context-parallel-size 1",
        in_config=probe.unless("parallel_config.prefill_context_parallel_size", 1),
    ),
    Rule(
        id="executor",
        title="executors other than uni and mp",
        option="--distributed-executor-backend",
        status="planned",
        why="Only uni and mp were tested; vLLM itself refuses ray on a CPU",
        way_out="set --distributed-executor-backend mp",
        in_config=probe.unless("parallel_config.distributed_executor_backend", "uni", "mp"),
    ),
    Rule(
        id="multi-node",
        title="more than one node",
        option="--nnodes",
        status="planned",
        why="Not tested",
        way_out="set --nnodes 1",
        in_config=probe.unless("parallel_config.nnodes", 1),
    ),
    Rule(
        id="elastic-ep",
        title="elastic expert parallelism",
        option="--enable-elastic-ep",
        status="refused",
        why="It rebuilds the workers' block tables while requests keep their blocks",
        way_out="drop --enable-elastic-ep",
        in_config=probe.unless("parallel_config.enable_elastic_ep", False),
    ),
    Rule(
        id="fault-tolerance",
        title="engine fault tolerance",
        option="--enable-fault-tolerance",
        status="refused",
        why="It restores workers under a living scheduler",
        way_out="drop --enable-fault-tolerance and --fault-tolerance-config",
        in_config=probe.unless("parallel_config.enable_fault_tolerance", False),
    ),
    Rule(
        id="scheduler-cls",
        title="other scheduler classes",
        option="--scheduler-cls",
        status="refused",
        why="The backend is a scheduler class of its own",
        way_out="drop --scheduler-cls",
        in_config=probe.scheduler_class,
    ),
    # ---- not served: connectors and other owners of blocks ----
    Rule(
        id="hisparse",
        title="HiSparse host-resident KV",
        option="--attention-config.hisparse_config",
        status="refused",
        why="It keeps a second pool and special cache groups",
        way_out="drop hisparse_config from --attention-config",
        in_config=probe.if_set("attention_config.hisparse_config"),
    ),
    Rule(
        id="encoder-transfer",
        title="encoder-cache connectors",
        option="--ec-transfer-config",
        status="planned",
        why="Not tested",
        way_out="drop --ec-transfer-config",
        in_config=probe.if_set("ec_transfer_config", "ec_connector"),
    ),
    Rule(
        id="aux-output",
        title="auxiliary outputs (routed experts)",
        option="--enable-return-routed-experts",
        status="planned",
        why="From vLLM 0.33 on it follows blocks of vLLM's own pool",
        way_out="drop --enable-return-routed-experts",
        in_config=probe.unless("aux_output_config.enabled", False),
    ),
)
