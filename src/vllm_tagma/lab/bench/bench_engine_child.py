"""One engine on one backend: ``python -m vllm_tagma.lab.bench.bench_engine_child BACKEND MODEL``.

Prints its output tokens per second, one figure a generation. The engine core runs in this process,
so that a machine of few CPUs measures the scheduler and not the operating system's.
"""

from __future__ import annotations

import sys
import time

from vllm_tagma.lab.bench.bench_engine import GENERATIONS, OUTPUT_TOKENS, RUNNING, answer

PROMPT_TOKENS = 256


def measure(backend: str, model: str) -> list[float]:
    """Starts an engine and returns output tokens per second of each timed generation."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        additional_config={"kv_cache_backend": backend},
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="float32",
        max_model_len=1_024,
        enforce_eager=True,
        block_size=32,
        kv_cache_memory_bytes=1 << 30,
        max_num_seqs=RUNNING,
        max_num_batched_tokens=16_384,
        seed=0,
    )
    sampling = SamplingParams(
        max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False, temperature=0.0
    )
    rates = []
    for generation in range(GENERATIONS + 1):
        prompts = [
            {"prompt_token_ids": [(i * 7 + j + generation) % 200 + 3 for i in range(PROMPT_TOKENS)]}
            for j in range(RUNNING)
        ]
        llm.reset_prefix_cache()
        begin = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        spent = time.perf_counter() - begin
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        if tokens != RUNNING * OUTPUT_TOKENS:
            raise RuntimeError(f"{tokens} tokens came out, expected {RUNNING * OUTPUT_TOKENS}")
        if generation:  # the first one warms up
            rates.append(tokens / spent)
    return rates


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    print(answer(measure(sys.argv[1], sys.argv[2])), flush=True)
