"""What K/V in eight bits cost on real text: `benchmarks.bench_kv_dtype` says it at length, this holds the bound."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from benchmarks.bench_kv_dtype import open_backend, perplexity, read_windows
from benchmarks.steps import BLOCK_SIZE

WINDOW, TOKENS = 512, 16_384
MOST = 1.01
"""Beside the perplexity of `auto`."""


@pytest.mark.soak  # on fewer tokens chance is as large as the effect: 1.4 % of 1,024, 1.1 % of 4,096, 0.9 % of these
@pytest.mark.timeout(1800)
@pytest.mark.model
@pytest.mark.filterwarnings("ignore")
def test_perplexity_of_real_prompts_in_fp8_e4m3_is_within_one_percent_of_auto() -> None:
    model, traces = os.environ.get("KVPLANE_TEST_MODEL"), os.environ.get("KVPLANE_TRACES")
    if not model:
        pytest.skip("KVPLANE_TEST_MODEL names no model")
    if not traces:
        pytest.skip("KVPLANE_TRACES names no folder of traces")
    found = {}
    for kind in ("auto", "fp8_e4m3"):
        backend, info = open_backend(model, kind, "float32", 1 + WINDOW // BLOCK_SIZE)
        tokenizer = Tokenizer.from_str(info.tokenizer_files["tokenizer.json"].decode())
        windows = read_windows(Path(traces) / "sharegpt_prompts.jsonl", tokenizer, WINDOW, TOKENS)
        assert sum(map(len, windows)) >= TOKENS - 1
        found[kind] = perplexity(backend, windows)
        del backend
    assert 1 < found["auto"] < 50, "the model reads the text"
    assert found["fp8_e4m3"] != found["auto"], "nothing was rounded"
    assert found["fp8_e4m3"] < MOST * found["auto"], found
