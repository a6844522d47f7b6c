"""The manager core alone, on one core: nanoseconds per block operation, microseconds per schedule + update.

    python -m benchmarks.bench_core [--json] [--rounds 7]

Each figure is the median over the rounds of CPU time, so that others on the machine count for less; the spread is
(max - min) / median. No wire and no executor: results are made up.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from array import array
from collections.abc import Callable

from kvmanager_service.core import is_compiled
from kvmanager_service.core.block import KVCacheBlock
from kvmanager_service.core.block_events import BlockEventLog
from kvmanager_service.core.block_hash import default_hash, hash_block_tokens
from kvmanager_service.core.block_pool import BlockPool
from kvmanager_service.core.kv_cache import make_kv_cache
from kvmanager_service.core.kv_cache_manager import KVCacheManager
from kvmanager_service.core.kv_groups import FullAttention, KVGroup, SlidingWindow
from kvmanager_service.core.request import NewRequest, Request, StopRules
from kvmanager_service.core.scheduler import Scheduler
from kvmanager_service.core.scheduler_config import SchedulerConfig
from kvmanager_service.core.step import Step, StepResult
from kvmanager_service.step_message import build_execute_request

BLOCK_SIZE = 16
Figure = tuple[str, str, list[float]]
clock = time.thread_time


def timed(body: Callable[[], None]) -> float:
    """Seconds of CPU time one call takes."""
    start = clock()
    body()
    return clock() - start


def new_request(name: str, prompt_len: int, max_tokens: int, rng: random.Random) -> NewRequest:
    """A request with a random prompt."""
    prompt = array("i", [rng.randrange(32_000) for _ in range(prompt_len)]).tobytes()
    return NewRequest(name, prompt, StopRules(max_tokens=max_tokens))


def result_of(step: Step) -> StepResult:
    """A result an executor could have given."""
    return StepResult(step.step_id, [7] * step.num_samples, [row.stop for row in step.rows])


def block_operations(rounds: int) -> list[Figure]:
    """Get 64 blocks, free them, touch them as cached ones."""
    calls, count = 200, 64
    pool = BlockPool(1 + calls * count)
    get, free, touch = [], [], []
    for _ in range(rounds):
        taken: list[list[KVCacheBlock]] = []

        def get_all(pool: BlockPool = pool, taken: list[list[KVCacheBlock]] = taken) -> None:
            taken.extend(pool.get_new_blocks(count) for _ in range(calls))

        get.append(timed(get_all) / calls / count * 1e9)
        for batch in taken:
            for block in batch:
                if block.content is None:
                    pool.cache_full_block(block, block.block_id.to_bytes(16, "little"), None, b"x" * 64, b"")

        def free_all(taken: list[list[KVCacheBlock]] = taken) -> None:
            for batch in taken:
                pool.free_blocks(reversed(batch))

        def touch_all(taken: list[list[KVCacheBlock]] = taken) -> None:
            for batch in taken:
                pool.touch(batch)

        free.append(timed(free_all) / calls / count * 1e9)
        touch.append(timed(touch_all) / calls / count * 1e9)
        free_all()
        pool.reset_prefix_cache()
    return [
        ("get 64 blocks, per block", "ns", get),
        ("free 64 blocks, per block", "ns", free),
        ("touch 64 blocks, per block", "ns", touch),
    ]


def hashing(rounds: int) -> list[Figure]:
    """Hash a block of 16 tokens after its parent."""
    tokens, parent, calls = bytes(64), bytes(16), 20_000

    def body() -> None:
        for _ in range(calls):
            hash_block_tokens(default_hash, parent, tokens)

    return [("hash a 16-token block", "ns", [timed(body) / calls * 1e9 for _ in range(rounds)])]


def admission(rounds: int) -> list[Figure]:
    """Create, hash and admit a request of 1,024 tokens, cold and with 1,008 of them cached."""
    rng, count = random.Random(0), 50
    cold, warm = [], []
    for _ in range(rounds):
        kv = KVCacheManager(count * 65 + 1, BLOCK_SIZE)
        prompts = [new_request(f"r{index}", 1024, 16, rng) for index in range(count)]

        def admit(kv: KVCacheManager = kv, prompts: list[NewRequest] = prompts) -> list[Request]:
            requests = []
            for sequence, new in enumerate(prompts):
                request = Request(new, sequence)
                hits = kv.get_computed_blocks(request)
                kv.allocate_slots(request, request.num_tokens, hits)
                request.num_computed_tokens = request.num_tokens
                kv.cache_blocks(request, 1)
                requests.append(request)
            return requests

        gc.collect()  # what was thrown away before is not this line's to clean up
        start = clock()
        requests = admit()
        cold.append((clock() - start) / count * 1e6)
        kv.pool.commit_step(1)
        for request in requests:
            kv.free(request)
        gc.collect()
        warm.append(timed(admit) / count * 1e6)
    return [("create, hash and admit 1,024 tokens, cold", "us", cold), ("the same, 1,008 tokens cached", "us", warm)]


def allocation(rounds: int) -> list[Figure]:
    """allocate_slots for a request that decodes."""
    rng, steps = random.Random(0), 4096
    figures = []
    for _ in range(rounds):
        kv = KVCacheManager(1000, BLOCK_SIZE)
        request = Request(new_request("r", 1024, 8192, rng), 0)
        kv.allocate_slots(request, 1024)

        def body(kv: KVCacheManager = kv, request: Request = request) -> None:
            for num_tokens in range(1025, 1025 + steps):
                kv.allocate_slots(request, num_tokens)

        figures.append(timed(body) / steps * 1e6)
    return [("allocate_slots, decoding", "us", figures)]


def decoding(rounds: int, rows: int) -> list[Figure]:
    """schedule() + update() with all requests decoding, one step queued ahead; and writing the step's message."""
    rng, steps, prompt_len = random.Random(0), 100, 256
    num_blocks = rows * (prompt_len // BLOCK_SIZE + (rounds + 1) * steps // BLOCK_SIZE + 4)
    kv = KVCacheManager(num_blocks, BLOCK_SIZE, events=BlockEventLog(16_384))  # as the manager has one
    config = SchedulerConfig(max_num_seqs=rows, max_waiting=rows, max_num_batched_tokens=rows * prompt_len)
    scheduler = Scheduler(config, kv)
    for index in range(rows):
        scheduler.add_request(new_request(f"r{index}", prompt_len, 1 << 20, rng))
    outstanding = scheduler.schedule()
    assert outstanding is not None
    core, message = [], []
    for _ in range(rounds):
        spent = written = 0.0
        for _ in range(steps):
            start = clock()
            following = scheduler.schedule()
            middle = clock()
            assert following is not None
            build_execute_request(following, 1, BLOCK_SIZE)
            written += clock() - middle
            result = result_of(outstanding)
            resumed = clock()
            scheduler.update(result)
            scheduler.take_outputs()
            spent += clock() - resumed + middle - start
            outstanding = following
        core.append(spent / steps * 1e6)
        message.append(written / steps * 1e6)
    return [
        (f"schedule + update, {rows} decoding", "us", core),
        (f"write the step's message, {rows} decoding", "us", message),
    ]


def decoding_groups(rounds: int, rows: int, num_sliding: int) -> list[Figure]:
    """schedule() + update() as in `decoding`, of a model with full attention and sliding windows."""
    rng, steps, prompt_len = random.Random(0), 100, 256
    groups: list[KVGroup] = [FullAttention(BLOCK_SIZE)]
    groups += [SlidingWindow(BLOCK_SIZE, 64) for _ in range(num_sliding)]
    num_blocks = rows * (prompt_len // BLOCK_SIZE * len(groups) + (rounds + 1) * steps // BLOCK_SIZE + 4)
    kv = make_kv_cache(num_blocks, groups, longest_chunk=prompt_len)
    config = SchedulerConfig(max_num_seqs=rows, max_waiting=rows, max_num_batched_tokens=rows * prompt_len)
    scheduler = Scheduler(config, kv)
    for index in range(rows):
        scheduler.add_request(new_request(f"r{index}", prompt_len, 1 << 20, rng))
    outstanding = scheduler.schedule()
    assert outstanding is not None
    figures = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(steps):
            following = scheduler.schedule()
            assert following is not None
            scheduler.update(result_of(outstanding))
            scheduler.take_outputs()
            outstanding = following
        figures.append((time.perf_counter() - start) / steps * 1e6)
    assert len(scheduler.running) == rows
    return [(f"schedule + update, {rows} decoding, 1 + {num_sliding} groups", "us", figures)]


def blocked_head(rounds: int, num_blocks: int) -> list[Figure]:
    """schedule() with one request decoding and one waiting, that finds its prefix of num_blocks cached, and no room."""
    rng, steps = random.Random(0), 100
    room = (rounds + 1) * steps // BLOCK_SIZE + 4
    kv = KVCacheManager(1 + num_blocks + room, BLOCK_SIZE)
    scheduler = Scheduler(SchedulerConfig(max_num_batched_tokens=num_blocks * BLOCK_SIZE, watermark=0.0), kv)
    prefix = new_request("prefix", num_blocks * BLOCK_SIZE, 1, rng)
    own = new_request("own", (room - 1) * BLOCK_SIZE, 1, rng)
    scheduler.add_request(prefix)
    step = scheduler.schedule()
    assert step is not None
    scheduler.update(result_of(step))
    scheduler.add_request(new_request("decodes", 3 * BLOCK_SIZE, 1 << 20, rng))
    scheduler.add_request(NewRequest("blocked", prefix.prompt + own.prompt, StopRules(max_tokens=16)))
    step = scheduler.schedule()
    figures = []
    for _ in range(rounds):
        spent = 0.0
        for _ in range(steps):
            assert step is not None
            scheduler.update(result_of(step))
            scheduler.take_outputs()
            start = clock()
            step = scheduler.schedule()
            spent += clock() - start
        figures.append(spent / steps * 1e6)
    assert len(scheduler.waiting) == 1
    return [(f"schedule, head blocked, {num_blocks:,} blocks cached", "us", figures)]


def giving_way(rounds: int, rows: int) -> list[Figure]:
    """schedule() with rows decoding, all at their block's end and none free: half of them give way for the others."""
    rng = random.Random(0)
    config = SchedulerConfig(
        max_num_batched_tokens=rows * BLOCK_SIZE, max_num_seqs=rows, max_waiting=rows, watermark=0.0
    )
    figures = []
    for _ in range(rounds):
        scheduler = Scheduler(config, KVCacheManager(1 + rows, BLOCK_SIZE))
        for index in range(rows):
            scheduler.add_request(new_request(f"r{index}", BLOCK_SIZE, 1 << 20, rng))
        step = scheduler.schedule()
        assert step is not None
        scheduler.update(result_of(step))
        gc.collect()
        start = clock()
        scheduler.schedule()
        figures.append((clock() - start) / (rows // 2) * 1e6)
        assert scheduler.stats.preemptions == rows // 2
    return [(f"schedule, {rows // 2} of {rows} give way, per victim", "us", figures)]


def main() -> None:
    """Run all and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--rounds", type=int, default=7, help="rounds per figure; the median is shown")
    arguments = parser.parse_args()
    gc.freeze()
    figures = block_operations(arguments.rounds) + hashing(arguments.rounds) + admission(arguments.rounds)
    figures += allocation(arguments.rounds)
    figures += blocked_head(arguments.rounds, 2048)
    for rows in (256, 1024):
        figures += giving_way(arguments.rounds, rows)
    for rows in (16, 64, 256, 1024):
        figures += decoding(arguments.rounds, rows)
    for num_sliding in (1, 6):
        figures += decoding_groups(arguments.rounds, 256, num_sliding)
    if arguments.json:
        print(json.dumps({name: {"unit": unit, "median": statistics.median(values)} for name, unit, values in figures}))
        return
    print(f"core: {'compiled by mypyc' if is_compiled() else 'pure Python'}")
    for name, unit, values in figures:
        median = statistics.median(values)
        print(f"{name:<48} {median:>10.2f} {unit}   spread {(max(values) - min(values)) / median:.0%}")


if __name__ == "__main__":
    main()
