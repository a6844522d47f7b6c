"""Hit ratios on a public trace, through `KVCacheManager` itself, against those an independent simulation gave.

KVPLANE_TRACES names a folder with mooncake_conversation.jsonl (kvcache-ai/Mooncake, FAST'25 traces). The method: one
pool of N blocks of 512 tokens, prompts only, one after another in file order, every id counted as one full block.
"""

import os
from pathlib import Path

import pytest

from kvmanager_service.core.kv_cache_manager import KVCacheManager
from kvmanager_service.replay.one_at_a_time import replay_one_at_a_time
from kvmanager_service.replay.trace import MOONCAKE_BLOCK, TraceRequest, read_trace

UNLIMITED = 300_000
EXPECTED = {
    ("lru", UNLIMITED): 0.366,
    ("lru", 100_000): 0.364,
    ("lru", 50_000): 0.355,
    ("lru", 30_000): 0.326,
    ("lru", 10_000): 0.212,
    ("lru", 3_000): 0.065,
    ("lru", 1_000): 0.045,
    ("lfu", UNLIMITED): 0.366,
    ("lfu", 100_000): 0.363,
    ("lfu", 50_000): 0.344,
    ("lfu", 30_000): 0.276,
    ("lfu", 10_000): 0.132,
    ("lfu", 3_000): 0.075,
    ("lfu", 1_000): 0.048,
}
QUICK = {("lru", 30_000), ("lru", 10_000), ("lru", 1_000), ("lfu", 10_000)}


@pytest.fixture(scope="module")
def trace() -> list[TraceRequest]:
    folder = os.environ.get("KVPLANE_TRACES")
    if not folder:
        pytest.skip("KVPLANE_TRACES is not set: no folder of public traces")
    path = Path(folder) / "mooncake_conversation.jsonl"
    return [traced.with_whole_runs(MOONCAKE_BLOCK) for traced in read_trace(path)]


@pytest.mark.parametrize(
    ("policy", "num_blocks"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.soak) for case in EXPECTED],
)
def test_public_trace_hit_ratio_is_the_published_one(trace: list[TraceRequest], policy: str, num_blocks: int) -> None:
    kv = KVCacheManager(num_blocks + 1, MOONCAKE_BLOCK, eviction_policy=policy)
    found = replay_one_at_a_time(trace, kv)
    assert found.refused == 0
    assert found.hit_blocks / found.prompt_blocks == pytest.approx(EXPECTED[policy, num_blocks], abs=0.005)
