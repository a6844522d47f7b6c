"""Whether the core's costs stay flat as the pool grows, what a block takes in memory, and what waiting requests cost.

    python -m benchmarks.bench_scale [--largest 10_000_000] [--cached 1_000_000] [--rounds 41]

Each figure is a median of CPU time; every size is asked for the same work. Up to --cached blocks hold content, the rest
of a larger pool is empty: the memory of both kinds is printed. A full pool of ten million takes several GB.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import tracemalloc
from collections.abc import Callable

from benchmarks.bench_core import BLOCK_SIZE, clock, new_request, result_of, timed
from kvmanager_service.core import is_compiled
from kvmanager_service.core.block import BlockContent, KVCacheBlock
from kvmanager_service.core.block_hash import default_hash, hash_block_tokens
from kvmanager_service.core.block_pool import BlockPool
from kvmanager_service.core.kv_cache_manager import KVCacheManager
from kvmanager_service.core.request import Request
from kvmanager_service.core.scheduler import Scheduler
from kvmanager_service.core.scheduler_config import SchedulerConfig

CALLS, COUNT = 7, 64
OPERATIONS = CALLS * COUNT


def fill(pool: BlockPool, num_blocks: int, chain: int = 64) -> None:
    """Give this many blocks a content, in chains as prompts make them, and free them."""
    serial = 0
    while num_blocks:
        blocks = pool.get_new_blocks(min(chain, num_blocks))
        parent: BlockContent | None = None
        for block in blocks:
            serial += 1
            tokens = serial.to_bytes(4, "little") * BLOCK_SIZE
            parent_hash = None if parent is None else parent.block_hash
            block_hash = hash_block_tokens(default_hash, parent_hash, tokens)
            parent = pool.cache_full_block(block, block_hash, parent, tokens, b"")
        pool.free_blocks(reversed(blocks))
        num_blocks -= len(blocks)


def block_operations(pool: BlockPool, rounds: int) -> dict[str, float]:
    """Seconds per block: get, free, touch, look up."""
    cached = [block for block in pool.blocks if block.content is not None]
    rng = random.Random(0)
    spent: dict[str, list[float]] = {}

    def note(name: str, body: Callable[[], None]) -> None:
        spent.setdefault(name, []).append(timed(body) / OPERATIONS)

    for _ in range(rounds):
        contents = [block.content for block in rng.sample(cached, OPERATIONS)]
        batches: list[list[KVCacheBlock]] = []

        def look_up(contents: list[BlockContent | None] = contents) -> None:
            for content in contents:
                assert content is not None
                pool.get_cached_block(content.block_hash, content.parent, content.token_bytes, b"")

        absent = [rng.randbytes(16) for _ in range(OPERATIONS)]

        def miss(absent: list[bytes] = absent) -> None:
            for block_hash in absent:
                pool.get_cached_block(block_hash, None, b"", b"")

        note("lookup, hit", look_up)
        note("lookup, miss", miss)
        hits = [content.blocks[0] for content in contents if content is not None]

        def touch(hits: list[KVCacheBlock] = hits) -> None:
            pool.touch(hits)

        note("touch", touch)
        pool.free_blocks(hits)

        def get(batches: list[list[KVCacheBlock]] = batches) -> None:
            batches.extend(pool.get_new_blocks(COUNT) for _ in range(CALLS))

        def free(batches: list[list[KVCacheBlock]] = batches) -> None:
            for batch in batches:
                pool.free_blocks(reversed(batch))

        note("get", get)
        note("free", free)
        cached = [block for block in cached if block.content is not None]
        if len(cached) < 2 * OPERATIONS:
            fill(pool, OPERATIONS)
            cached = [block for block in pool.blocks if block.content is not None]
    return {name: statistics.median(values) for name, values in spent.items()}


def allocation(kv: KVCacheManager, rounds: int) -> float:
    """Seconds of allocate_slots for a request that decodes."""
    values = []
    for index in range(rounds):
        request = Request(new_request(f"r{index}", 256, 8192, random.Random(0)), index)
        kv.allocate_slots(request, 256)

        def body(request: Request = request) -> None:
            for num_tokens in range(257, 257 + OPERATIONS):
                kv.allocate_slots(request, num_tokens)

        values.append(timed(body) / OPERATIONS)
        kv.free(request)
    return statistics.median(values)


def flatness(sizes: list[int], cached: int, rounds: int) -> None:
    """Print nanoseconds per operation for each size, and the largest over the smallest of the line."""
    lines: dict[str, list[float]] = {}
    for size in sizes:
        kv = KVCacheManager(size + 1, BLOCK_SIZE)
        fill(kv.pool, min(size, cached))
        gc.collect()
        gc.freeze()  # as the manager does once its pool stands
        for name, seconds in block_operations(kv.pool, rounds).items():
            lines.setdefault(name, []).append(seconds)
        lines.setdefault("allocate_slots, decoding", []).append(allocation(kv, rounds))
        gc.unfreeze()
        del kv
    print(f"{'ns per operation, blocks in the pool':<36}" + "".join(f"{size:>12,}" for size in sizes) + "   max/min")
    for name, values in lines.items():
        print(
            f"{name:<36}" + "".join(f"{value * 1e9:>12.1f}" for value in values) + f"{max(values) / min(values):>10.2f}"
        )


def memory(num_blocks: int) -> tuple[float, float]:
    """Bytes that a block takes empty, and that it takes with content of its own."""
    gc.collect()
    tracemalloc.start()
    pool = BlockPool(num_blocks + 1)
    empty, _ = tracemalloc.get_traced_memory()
    fill(pool, num_blocks)
    full, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return empty / num_blocks, full / num_blocks


def scheduling(rows: int, num_waiting: int, steps: int) -> float:
    """Seconds of schedule() with this many rows decoding and others waiting for a place."""
    rng, prompt_len = random.Random(0), 32
    kv = KVCacheManager(rows * (prompt_len // BLOCK_SIZE + steps // BLOCK_SIZE + 4), BLOCK_SIZE)
    limits = SchedulerConfig(
        max_num_seqs=rows, max_waiting=rows + num_waiting, max_num_batched_tokens=rows * prompt_len
    )
    scheduler = Scheduler(limits, kv)
    for index in range(rows + num_waiting):
        scheduler.add_request(new_request(f"r{index}", prompt_len, 1 << 20, rng))
    outstanding = scheduler.schedule()
    values = []
    for _ in range(steps):
        start = clock()
        following = scheduler.schedule()
        values.append(clock() - start)
        assert outstanding is not None
        scheduler.update(result_of(outstanding))
        scheduler.take_outputs()
        outstanding = following
    assert len(scheduler.waiting) == num_waiting
    return statistics.median(values)


def main() -> None:
    """Run all and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=int, default=10_000_000, help="blocks of the largest pool")
    parser.add_argument("--cached", type=int, default=1_000_000, help="most blocks that hold content")
    parser.add_argument("--rounds", type=int, default=41, help="rounds per figure; the median is shown")
    arguments = parser.parse_args()
    print(f"core: {'compiled by mypyc' if is_compiled() else 'pure Python'}")
    sizes = [size for size in (1_000, 10_000, 100_000, 1_000_000, 10_000_000) if size <= arguments.largest]
    flatness(sizes, arguments.cached, arguments.rounds)
    empty, full = memory(100_000)
    print(f"\nbytes per block: {empty:.0f} empty, {full:.0f} cached")
    print(f"\n{'us of schedule(), rows decoding':<36}{'alone':>12}{'10,000 wait':>14}{'per row':>12}")
    for rows in (64, 256, 1024):
        alone, beside = scheduling(rows, 0, 60), scheduling(rows, 10_000, 60)
        print(f"{rows:<36,}{alone * 1e6:>12.1f}{beside * 1e6:>14.1f}{beside / rows * 1e9:>9.0f} ns")


if __name__ == "__main__":
    main()
