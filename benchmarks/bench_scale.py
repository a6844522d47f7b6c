"""Whether the core's costs stay flat as the pool grows, what a block takes in memory, and what waiting requests cost.

    python -m benchmarks.bench_scale [--smallest 1_000] [--largest 10_000_000] [--rounds 41]

Each figure is a median of CPU time, and every size is asked for the same work in the same order: `PREFIXES` of `CHAIN`
blocks, each a chain that lies as a prompt left it. Three patterns differ in which:

* again: the same ones as just before, so that what they take is in the CPU's caches whatever the size of the pool.
  What grew here would be the algorithm.
* prefixes: drawn at random from all that are cached, as requests hit them.
* scattered: as many blocks as are in those, each from another place: looked up, the first block of a prefix each;
  touched and freed, any cached block, not looked up before. No request does that: it is the worst case.

New blocks come from the queue in its own order: empty ones as they lie in memory, those that hold content as they were
freed. A pool has as many blocks with content as its column says, and `OPERATIONS` empty ones. One of ten million takes
some 5 GB.
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
from kvmanager_service.core.request import TOKEN_BYTES, NewRequest, Request, StopRules
from kvmanager_service.core.scheduler import Scheduler
from kvmanager_service.core.scheduler_config import SchedulerConfig

PREFIXES, CHAIN = 7, 64
OPERATIONS = PREFIXES * CHAIN


def tokens_of(serial: int) -> bytes:
    """The tokens of the serial-th block that `fill` makes."""
    return serial.to_bytes(4, "little") * BLOCK_SIZE


def fill(pool: BlockPool, num_blocks: int) -> list[list[KVCacheBlock]]:
    """Give this many blocks a content, in chains as prompts make them, and free them. Returns the chains."""
    chains = []
    for first in range(0, num_blocks, CHAIN):
        blocks = pool.get_new_blocks(min(CHAIN, num_blocks - first))
        contents: list[BlockContent] = []
        hashes: list[bytes] = []
        tokens: list[bytes] = []
        for serial in range(first, first + len(blocks)):
            tokens.append(tokens_of(serial))
            hashes.append(hash_block_tokens(default_hash, hashes[-1] if hashes else None, tokens[-1]))
        keys = [b""] * len(blocks)
        pool.cache_full_blocks(blocks, contents, hashes, tokens, keys, provisional_step=0, owner=first)
        assert len(contents) == len(blocks)
        pool.free_blocks(reversed(blocks))
        chains.append(blocks)
    return chains


def request_for(chain: int, num_blocks: int) -> Request:
    """A request that begins with the first blocks of a chain, hashed already; no memory of the pool is looked at."""
    tokens = [tokens_of(chain * CHAIN + index) for index in range(num_blocks)]
    request = Request(NewRequest("r", b"".join(tokens) + bytes(TOKEN_BYTES), StopRules(max_tokens=1)), 0)
    parent_hash: bytes | None = None
    for block in tokens:
        parent_hash = hash_block_tokens(default_hash, parent_hash, block)
        request.block_hashes.append(parent_hash)
        request.block_tokens.append(block)
    return request


class Walk:
    """The operations on a pool whose cached blocks are these chains; seconds per block are noted by name.

    Args:
        kv: whose pool is measured.
        chains: from `fill`.
    """

    def __init__(self, kv: KVCacheManager, chains: list[list[KVCacheBlock]]) -> None:
        self.kv = kv
        self.pool = kv.pool
        self.chains = [chain for chain in chains if len(chain) == CHAIN]
        self.rng = random.Random(0)
        self.spent: dict[str, list[float]] = {}

    def note(self, name: str, body: Callable[[], None]) -> None:
        """Take the time of one walk over `OPERATIONS` blocks."""
        self.spent.setdefault(name, []).append(timed(body) / OPERATIONS)

    def hit(self, name: str, requests: list[Request]) -> list[list[KVCacheBlock]]:
        """Look up the prefixes of requests, `OPERATIONS` blocks in all. Returns them."""
        found: list[list[KVCacheBlock]] = []

        def look_up() -> None:
            found.extend(self.kv.get_computed_blocks(request) for request in requests)

        self.note(f"lookup, {name}", look_up)
        assert sum(len(blocks) for blocks in found) == OPERATIONS
        return found

    def reuse(self, name: str, tables: list[list[KVCacheBlock]]) -> None:
        """Touch cached blocks and free them."""
        pool = self.pool

        def touch() -> None:
            for table in tables:
                pool.touch(table)

        def free() -> None:
            for table in tables:
                pool.free_blocks(reversed(table))

        self.note(f"touch, {name}", touch)
        self.note(f"free, {name}", free)

    def miss(self) -> None:
        """Look up hashes that nothing has."""
        pool = self.pool
        absent = [self.rng.randbytes(16) for _ in range(OPERATIONS)]

        def look_up() -> None:
            for block_hash in absent:
                pool.lookup.get_cached_block(block_hash, None, b"", b"")

        self.note("lookup, miss", look_up)

    def get(self, name: str, *, evicting: bool) -> None:
        """Take new blocks from the head of the queue, all with content or all without."""
        pool = self.pool
        batches: list[list[KVCacheBlock]] = []

        def get() -> None:
            batches.extend(pool.get_new_blocks(CHAIN) for _ in range(PREFIXES))

        evicted = pool.num_evictions
        self.note(f"get, {name}", get)
        assert pool.num_evictions - evicted == evicting * OPERATIONS
        for batch in batches:
            pool.free_blocks(reversed(batch))


def block_operations(kv: KVCacheManager, chains: list[list[KVCacheBlock]], rounds: int) -> dict[str, float]:
    """Seconds per block: look up, touch, free, get."""
    walk, pool = Walk(kv, chains), kv.pool
    rng, num_chains = walk.rng, len(walk.chains)
    again = [request_for(chain, CHAIN) for chain in range(PREFIXES)]
    for _ in range(rounds):
        for request in again:  # what the last round walked over since is not in the caches any more
            kv.get_computed_blocks(request)
        walk.reuse("again", walk.hit("again", again))
        walk.reuse(
            "prefixes",
            walk.hit("prefixes", [request_for(chain, CHAIN) for chain in rng.sample(range(num_chains), PREFIXES)]),
        )
        walk.hit("scattered", [request_for(rng.randrange(num_chains), 1) for _ in range(OPERATIONS)])
        places = rng.sample(range(num_chains * CHAIN), OPERATIONS)
        blocks = [walk.chains[place // CHAIN][place % CHAIN] for place in places]
        walk.reuse("scattered", [blocks[at : at + CHAIN] for at in range(0, OPERATIONS, CHAIN)])
        walk.miss()
    for _ in range(rounds):
        walk.get("empty", evicting=False)
    # All empty ones are taken, so that what is handed out next holds content.
    taken = pool.get_new_blocks(pool.num_free_blocks - pool.num_cached_blocks)
    for _ in range(min(rounds, num_chains // PREFIXES)):
        walk.get("evicting", evicting=True)
        taken += pool.get_new_blocks(OPERATIONS)
    pool.free_blocks(taken)
    return {name: statistics.median(values) for name, values in walk.spent.items()}


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


def flatness(sizes: list[int], rounds: int) -> None:
    """Print nanoseconds per operation for each size, and the largest over the smallest of the line."""
    lines: dict[str, dict[int, float]] = {}
    for size in sizes:
        kv = KVCacheManager(1 + size + OPERATIONS, BLOCK_SIZE)
        gc.disable()  # it would walk over a pool of millions again and again while that is made
        chains = fill(kv.pool, size)
        gc.enable()
        gc.collect()
        gc.freeze()  # as the manager does once its pool stands
        for name, seconds in block_operations(kv, chains, rounds).items():
            lines.setdefault(name, {})[size] = seconds
        lines.setdefault("allocate_slots, decoding", {})[size] = allocation(kv, rounds)
        gc.unfreeze()
        kv.pool.dismantle()
        del kv, chains
    print(f"{'ns per operation, cached blocks':<36}" + "".join(f"{size:>12,}" for size in sizes) + "   max/min")
    for name, values in lines.items():
        cells = "".join(f"{values[size] * 1e9:>12.1f}" for size in sizes)
        print(f"{name:<36}{cells}{max(values.values()) / min(values.values()):>10.2f}")


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
    parser.add_argument("--smallest", type=int, default=1_000, help="cached blocks of the smallest pool")
    parser.add_argument("--largest", type=int, default=10_000_000, help="cached blocks of the largest pool")
    parser.add_argument("--rounds", type=int, default=41, help="rounds per figure; the median is shown")
    arguments = parser.parse_args()
    print(f"core: {'compiled by mypyc' if is_compiled() else 'pure Python'}")
    sizes = [1_000, 10_000, 100_000, 1_000_000, 10_000_000]
    flatness([size for size in sizes if arguments.smallest <= size <= arguments.largest], arguments.rounds)
    empty, full = memory(100_000)
    print(f"\nbytes per block: {empty:.0f} empty, {full:.0f} cached")
    print(f"\n{'us of schedule(), rows decoding':<36}{'alone':>12}{'10,000 wait':>14}{'per row':>12}")
    for rows in (64, 256, 1024):
        alone, beside = scheduling(rows, 0, 60), scheduling(rows, 10_000, 60)
        print(f"{rows:<36,}{alone * 1e6:>12.1f}{beside * 1e6:>14.1f}{beside / rows * 1e9:>9.0f} ns")


if __name__ == "__main__":
    main()
