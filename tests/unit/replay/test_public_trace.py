"""Hit ratios on a public trace, through `KVCacheManager` itself, against those an independent simulation gave.

KVPLANE_TRACES names a folder with mooncake_conversation.jsonl (kvcache-ai/Mooncake, FAST'25 traces). The method: one
pool of N blocks of 512 tokens, prompts only, one after another in file order, every id counted as one full block.
"""

import os
from pathlib import Path

import pytest

from kvmanager_service.core.eviction_policies import EVICTION_POLICIES
from kvmanager_service.core.kv_cache_manager import KVCacheManager
from kvmanager_service.replay.one_at_a_time import replay_one_at_a_time
from kvmanager_service.replay.trace import MOONCAKE_BLOCK, TraceRequest, read_trace
from tests.unit.core.mru_policy import MRUPolicy

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


@pytest.fixture(scope="module")
def trace() -> list[TraceRequest]:
    folder = os.environ.get("KVPLANE_TRACES")
    if not folder:
        pytest.skip("KVPLANE_TRACES is not set: no folder of public traces")
    path = Path(folder) / "mooncake_conversation.jsonl"
    return [traced.with_whole_runs(MOONCAKE_BLOCK) for traced in read_trace(path)]


def hit_ratio(trace: list[TraceRequest], policy: str, num_blocks: int) -> float:
    kv = KVCacheManager(num_blocks + 1, MOONCAKE_BLOCK, eviction_policy=policy)
    found = replay_one_at_a_time(trace, kv)
    assert found.refused == 0
    return found.hit_blocks / found.prompt_blocks


@pytest.mark.parametrize(("policy", "num_blocks"), EXPECTED)
def test_public_trace_hit_ratio_is_the_published_one(trace: list[TraceRequest], policy: str, num_blocks: int) -> None:
    assert hit_ratio(trace, policy, num_blocks) == pytest.approx(EXPECTED[policy, num_blocks], abs=0.005)


@pytest.mark.patches_core
def test_public_trace_last_in_first_out_hits_less_than_half_of_what_lru_does(
    trace: list[TraceRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seed's self-check 3 on conversations of real users, in a pool smaller than what they come back to."""
    monkeypatch.setitem(EVICTION_POLICIES, "lifo", MRUPolicy)
    assert 0 < 2 * hit_ratio(trace, "lifo", 10_000) <= EXPECTED["lru", 10_000] - 0.005
