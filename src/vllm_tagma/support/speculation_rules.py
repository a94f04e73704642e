"""Rules of the support matrix about speculative decoding, by method.

A drafter writes KV behind the tokens that are scheduled (lookahead slots), some of it for tokens
that are rejected later, and most take their slots from vLLM's block table rather than from ours. So
each method needs a run of its own. How rules are joined: ``rule_table.py``.
"""

from __future__ import annotations

from typing import Final

from vllm_tagma.support import config_probes as probe
from vllm_tagma.support.rule import Rule

_OPTION = "--speculative-config"
_SHOWN = "tests/e2e/test_speculation_same_tokens.py::test_tokens_hits_and_drafts_are_stocks"
_WAY_OUT = "choose another method in --speculative-config, or drop it"

SERVED_METHODS: Final = ("ngram", "draft_model", "eagle", "eagle3", "medusa", "mtp")
NAMED_METHODS: Final = (
    "suffix",
    "ngram_gpu",
    "mlp_speculator",
    "dflash",
    "dspark",
    "extract_hidden_states",
)

SPECULATION_RULES: Final[tuple[Rule, ...]] = (
    Rule(
        id="ngram",
        title="n-gram speculation",
        option=_OPTION,
        status="served",
        why="drafts come from the tokens; rejected ones are written over",
        proof=(f"{_SHOWN}[ngram]",),
    ),
    Rule(
        id="draft-model",
        title="draft models",
        option=_OPTION,
        status="served",
        why="the draft model's layers share the blocks; it reads the same block table",
        proof=(f"{_SHOWN}[draft-model]",),
    ),
    Rule(
        id="eagle",
        title="EAGLE and EAGLE-3",
        option=_OPTION,
        status="served",
        why="a hit leaves out its last block, as in vLLM; the head has a layer in each block",
        proof=(f"{_SHOWN}[eagle]", f"{_SHOWN}[eagle3]"),
    ),
    Rule(
        id="mtp",
        title="multi-token prediction with one module",
        option=_OPTION,
        status="served",
        why="as EAGLE, with the target's own layer as the head",
        proof=(f"{_SHOWN}[mtp]",),
    ),
    Rule(
        id="medusa",
        title="Medusa heads",
        option=_OPTION,
        status="served",
        why="the heads keep no KV; vLLM 0.33 no longer has them",
        proof=(f"{_SHOWN}[medusa]",),
    ),
    # ---- not served ----
    Rule(
        id="suffix",
        title="suffix decoding",
        option=_OPTION,
        status="planned",
        why="Its drafter is in the package arctic-inference, which has no wheels and which no test "
        "installs",
        way_out='set "method": "ngram" in --speculative-config',
        in_config=probe.speculation("suffix"),
    ),
    Rule(
        id="v2-speculation",
        title="speculative decoding with Model Runner V2",
        option="use_v2_model_runner",
        status="planned",
        why="Its drafters call the runner's block tables in an order of their own, which no test "
        "compares",
        way_out="drop --speculative-config",
        in_config=probe.v2_speculation,
    ),
    Rule(
        id="ngram-gpu",
        title="n-gram speculation on the GPU",
        option=_OPTION,
        status="planned",
        why="It pins host memory, which vLLM's CPU backend cannot, so it was not compared",
        way_out='set "method": "ngram" in --speculative-config',
        in_config=probe.speculation("ngram_gpu"),
    ),
    Rule(
        id="dflash",
        title="DFlash and DSpark drafters",
        option=_OPTION,
        status="planned",
        why="Their slots are computed by Triton kernels from vLLM's own block table, and there is "
        "no compiler for those where the other methods were compared",
        way_out=_WAY_OUT,
        in_config=probe.speculation("dflash", "dspark"),
    ),
    Rule(
        id="mlp-speculator",
        title="MLP speculators",
        option=_OPTION,
        status="refused",
        why="vLLM knows the name, but no worker of it runs the method",
        way_out=_WAY_OUT,
        in_config=probe.speculation("mlp_speculator"),
    ),
    Rule(
        id="hidden-states",
        title="extraction of hidden states",
        option=_OPTION,
        status="planned",
        why="It keeps hidden states in cache layers that a KV connector empties",
        way_out="drop --speculative-config",
        in_config=probe.speculation("extract_hidden_states"),
    ),
    Rule(
        id="speculative-method",
        title="other methods of speculative decoding, custom classes included",
        option=_OPTION,
        status="planned",
        why=f"Served are {', '.join(SERVED_METHODS)}; what others do with blocks is not known",
        way_out=_WAY_OUT,
        in_config=probe.other_speculation(SERVED_METHODS + NAMED_METHODS),
    ),
    Rule(
        id="multi-module-mtp",
        title="multi-token prediction with several modules",
        option=_OPTION,
        status="planned",
        why="Its modules write the last tokens of a chunk again, which the manager does not hold "
        "back from the prefix cache",
        way_out='set "num_speculative_tokens": 1 in --speculative-config',
        in_config=probe.multi_module_mtp,
    ),
    Rule(
        id="parallel-drafting",
        title="drafting in parallel (P-EAGLE, PARD)",
        option=f"{_OPTION}.parallel_drafting",
        status="planned",
        why="Its slots are computed apart from the others, which no test compares",
        way_out="drop parallel_drafting from --speculative-config",
        in_config=probe.parallel_drafting,
    ),
)
