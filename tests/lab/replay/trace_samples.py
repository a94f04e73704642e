"""A small valid file of each format, with the number of requests in it."""

from __future__ import annotations

import json
from typing import NamedTuple


class Sample(NamedTuple):
    kind: str
    text: str
    """Lines end with a single newline."""
    requests: int


def lines(*entries: object) -> str:
    """Entries as JSONL; texts as they are."""
    return "\n".join(e if isinstance(e, str) else json.dumps(e) for e in entries) + "\n"


def chat(*texts: str, sender: str, text: str, names: tuple[str, str]) -> list[dict[str, str]]:
    """Messages of a user and a model by turns, in the fields ``sender`` and ``text``."""
    return [{sender: names[i % 2], text: said} for i, said in enumerate(texts)]


SHAREGPT = {
    "id": "x1",
    "conversations": chat(
        *("Why is the sky blue?", "Rayleigh \u2014 scattering.", "And red?", "Dust."),
        sender="from",
        text="value",
        names=("human", "gpt"),
    ),
}
LMSYS = {
    "conversation_id": "c1",
    "model": "vicuna-13b",
    "conversation": chat(
        *("Bonjour, ça va\u00a0?", "Très bien."),
        sender="role",
        text="content",
        names=("user", "assistant"),
    ),
    "turn": 1,
    "language": "French",
}
BATCH = {
    "custom_id": "r1",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20},
}
BATCH_OUTPUT = {
    "id": "b1",
    "custom_id": "r1",
    "response": {
        "status_code": 200,
        "body": {"usage": {"prompt_tokens": 31, "completion_tokens": 12, "total_tokens": 43}},
    },
    "error": None,
}
BENCH = {
    "date": "20251202-101010",
    "num_prompts": 3,
    "duration": 1.5,
    "completed": 3,
    "request_throughput": 2.0,
    "input_lens": [127, 2, 761],
    "output_lens": [58, 71, 25],
    "start_times": [10.0, 10.5, 11.0],
    "errors": ["", "", ""],
}
PARAMS = "SamplingParams(n=1, temperature=1.0, stop=[], max_tokens={}, min_tokens=0)"
LOG = f"""\
INFO 12-31 23:59:58 [api_server.py:1] vLLM API server version 0.9.0
INFO 12-31 23:59:59 [logger.py:41] Received request cmpl-1-0: prompt: "It's\\n'so'", \
params: {PARAMS.format(64)}, prompt_token_ids: [1, 2, 3], prompt_embeds shape: None, \
lora_request: None, prompt_adapter_request: None.
INFO:     127.0.0.1:4 - "POST /v1/completions HTTP/1.1" 200 OK
INFO 01-01 00:00:01 [logger.py:41] Received request chatcmpl-2: prompt: 'Hello there', \
params: {PARAMS.format(64)}, prompt_token_ids: None, lora_request: None.
INFO 01-01 00:00:02 [logger.py:60] Generated response chatcmpl-2 (streaming complete): \
output: 'General \\u00e4!', output_token_ids: None, finish_reason: streaming_complete
"""
AZURE_2023 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
AZURE_2024 = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.017335+00:00,2399,6
2024-05-10 00:00:03+00:00,76,15
"""
BURSTGPT = """\
Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,230,1317,API log
"""
BURSTGPT_2 = """\
Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5.5,7f3c,1.25,ChatGPT,472,18,490,Conversation log
"""
MOONCAKE = lines(
    {"timestamp": 0, "input_length": 1030, "output_length": 7, "hash_ids": [3, 5, 9]},
    {"timestamp": 3000, "input_length": 600, "output_length": 9, "hash_ids": [3, 11]},
)
BAILIAN = lines(
    *(
        {
            "chat_id": chat_id,
            "parent_chat_id": parent,
            "timestamp": chat_id + 0.5,
            "input_length": tokens,
            "output_length": 4,
            "type": "text",
            "turn": 1,
            "hash_ids": list(range(-(-tokens // 16))),
        }
        for chat_id, parent, tokens in ((10, -1, 16), (11, 10, 83), (12, 99, 501))
    )
)
PIECES = lines(
    {"id": "a1", "prompt": [["s", 320], ["ä", 55]], "output": 180},
    {"id": "a2", "after": "a1", "prompt": [["s", 320], ["a1", 180]], "output": 90},
)

SAMPLES = {
    "azure 2023": Sample("azure", AZURE_2023, 2),
    "azure 2024": Sample("azure", AZURE_2024, 3),
    "burstgpt": Sample("burstgpt", BURSTGPT, 2),
    "burstgpt 2": Sample("burstgpt", BURSTGPT_2, 1),
    "mooncake": Sample("mooncake", MOONCAKE, 2),
    "bailian": Sample("mooncake", BAILIAN, 3),
    "sharegpt": Sample("sharegpt", json.dumps([SHAREGPT, SHAREGPT], ensure_ascii=False), 4),
    "sharegpt, spread out": Sample("sharegpt", json.dumps([SHAREGPT, SHAREGPT], indent=2), 4),
    "sharegpt, lines": Sample("sharegpt", lines(SHAREGPT), 2),
    "lmsys": Sample("sharegpt", lines(json.dumps(LMSYS, ensure_ascii=False)), 1),
    "batch": Sample("openai-batch", lines(BATCH, BATCH), 2),
    "batch output": Sample("openai-batch", lines(BATCH_OUTPUT), 1),
    "bench": Sample("vllm-bench", json.dumps(BENCH), 3),
    "bench, appended": Sample("vllm-bench", lines(BENCH, BENCH), 6),
    "log": Sample("vllm-log", LOG, 2),
    "tagma": Sample("tagma", PIECES, 2),
}
