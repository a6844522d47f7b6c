"""What a block takes in memory, and what work does not grow with; times are for `benchmarks.bench_scale`."""

from __future__ import annotations

import dataclasses
import gc
import tracemalloc
from collections.abc import Iterator, Sequence

import pytest

from kvmanager_service.core.block import BlockContent, KVCacheBlock
from kvmanager_service.core.block_hash import default_hash, hash_block_tokens
from kvmanager_service.core.block_pool import BlockPool
from kvmanager_service.core.fork_holds import ForkHolds
from kvmanager_service.core.kv_cache_manager import KVCacheManager
from kvmanager_service.core.request import Request
from kvmanager_service.core.request_queue import FCFSQueue
from kvmanager_service.core.step import ScheduledRow
from kvmanager_service.core.step_plan import StepPlan
from tests.unit.core.builders import make_kv, make_new, make_request, make_result, make_scheduler, run_step

NUM_BLOCKS = 2000
BLOCK_SIZE = 16


@pytest.fixture
def traced() -> Iterator[None]:
    gc.collect()
    tracemalloc.start()
    yield
    tracemalloc.stop()


def fill(pool: BlockPool) -> None:
    """Give every block a content of its own; all in one chain."""
    parent: BlockContent | None = None
    for block in pool.get_new_blocks(pool.num_free_blocks):
        tokens = block.block_id.to_bytes(4, "little") * BLOCK_SIZE
        block_hash = hash_block_tokens(default_hash, parent and parent.block_hash, tokens)
        parent = pool.cache_full_block(block, block_hash, parent, tokens, b"")
        assert parent is not None


def blocks_alive() -> int:
    gc.collect()
    return sum(type(one) is KVCacheBlock for one in gc.get_objects())


@pytest.mark.usefixtures("traced")
def test_pool_block_takes_at_most_160_bytes_empty_and_480_cached() -> None:
    pool = BlockPool(NUM_BLOCKS + 1)
    empty, _ = tracemalloc.get_traced_memory()
    assert empty / NUM_BLOCKS <= 160
    fill(pool)
    full, _ = tracemalloc.get_traced_memory()
    assert full / NUM_BLOCKS <= 480


@pytest.mark.usefixtures("traced")
def test_pool_content_forgotten_gives_its_memory_back() -> None:
    pool = BlockPool(NUM_BLOCKS + 1)
    empty, _ = tracemalloc.get_traced_memory()
    fill(pool)
    pool.reset_prefix_cache()
    gc.collect()
    again, _ = tracemalloc.get_traced_memory()
    # What stays is the index's table, which Python's dict does not shrink.
    assert again - empty < 100 * NUM_BLOCKS


def test_contents_of_a_long_prompt_that_is_evicted_are_freed_by_reference_counts() -> None:
    """Parent and successor refer to each other; the garbage collector, which is kept from pools, is not needed."""

    def contents_alive() -> int:
        return sum(type(one) is BlockContent for one in gc.get_objects())

    gc.collect()
    before = contents_alive()
    kv = KVCacheManager(NUM_BLOCKS + 1, BLOCK_SIZE)
    gc.disable()
    try:
        for index, backwards in enumerate((False, True)):
            request = make_request(f"r{index}", NUM_BLOCKS * BLOCK_SIZE, arrival_seq=index)
            assert kv.allocate_sequence(request)
            request.num_computed_tokens = request.num_tokens
            kv.cache_blocks(request, 0)
            assert contents_alive() - before == NUM_BLOCKS
            blocks = list(reversed(request.blocks) if backwards else request.blocks)
            kv.free(request)
            for block in blocks:
                kv.pool.touch([block])
                kv.pool.overwrite(block)
                kv.pool.free_blocks([block])
            assert contents_alive() == before
    finally:
        gc.enable()


def test_pool_any_life_makes_no_block_and_loses_none() -> None:
    before = blocks_alive()
    kv = KVCacheManager(NUM_BLOCKS + 1, BLOCK_SIZE)
    made = blocks_alive() - before
    assert made <= NUM_BLOCKS + 3, "the blocks and the queue's two ends"
    for index in range(50):
        request = make_request(f"r{index}", 40 * BLOCK_SIZE, arrival_seq=index)
        assert kv.allocate_sequence(request)
        request.num_computed_tokens = request.num_tokens
        kv.cache_blocks(request, 0)
        kv.free(request)
    assert blocks_alive() - before == made


@pytest.mark.patches_core
def test_allocate_slots_within_a_block_asks_the_pool_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    original = BlockPool.get_new_blocks

    def get_new_blocks(self: BlockPool, num_blocks: int) -> list[KVCacheBlock]:
        asked.append(num_blocks)
        return original(self, num_blocks)

    monkeypatch.setattr(BlockPool, "get_new_blocks", get_new_blocks)
    kv = make_kv(NUM_BLOCKS, BLOCK_SIZE)
    request = make_request(prompt=BLOCK_SIZE)
    for num_tokens in range(1, 10 * BLOCK_SIZE + 1):
        assert kv.allocate_slots(request, num_tokens)
    assert asked == [1] * 10


@pytest.mark.patches_core
def test_schedule_ten_thousand_waiting_looks_at_the_head_only(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[Request] = []
    original = FCFSQueue.peek

    def peek(self: FCFSQueue) -> Request:
        looked_at.append(original(self))
        return looked_at[-1]

    monkeypatch.setattr(FCFSQueue, "peek", peek)
    monkeypatch.setattr(FCFSQueue, "__iter__", lambda self: pytest.fail("all waiting requests were walked over"))
    scheduler = make_scheduler(make_kv(9, 4), max_waiting=20_000)
    for index in range(10_000):
        scheduler.add_request(make_new(f"r{index}", [index] * 15, max_tokens=20))
    step = scheduler.schedule()  # two fit, and the third is refused
    assert step is not None
    assert len(step.rows) == 2
    assert len(looked_at) == 3


class RowsLookedAt(list[ScheduledRow]):
    """A plan's rows, that counts how many were walked over."""

    walked = 0

    def __iter__(self) -> Iterator[ScheduledRow]:
        for row in super().__iter__():
            type(self).walked += 1
            yield row


@pytest.mark.patches_core
@pytest.mark.parametrize("num_running", [64, 256])
def test_schedule_many_victims_in_one_step_takes_one_order_and_looks_at_each_once(
    num_running: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them are at a block's end, no block is free: the second half gives way, one for each of the first half."""
    orders: list[int] = []
    tables: list[Request] = []
    rows = type("Rows", (RowsLookedAt,), {"walked": 0})
    original_victims, original_tables, original_init = FCFSQueue.victims, KVCacheManager.tables, StepPlan.__init__

    def victims(self: FCFSQueue, running: Sequence[Request]) -> Iterator[Request]:
        orders.append(len(running))
        return original_victims(self, running)

    def tables_of(self: KVCacheManager, request: Request) -> list[list[KVCacheBlock]]:
        tables.append(request)
        return original_tables(self, request)

    def init(self: StepPlan, *arguments: object) -> None:
        original_init(self, *arguments)  # type: ignore[arg-type]
        self.rows = rows()

    scheduler = make_scheduler(make_kv(num_running + 1, 4), max_num_seqs=num_running)
    for index in range(num_running):
        scheduler.add_request(make_new(f"r{index}", [index] * 4, max_tokens=20))
    run_step(scheduler)
    assert scheduler.kv.pool.num_free_blocks == 0
    monkeypatch.setattr(FCFSQueue, "victims", victims)
    monkeypatch.setattr(KVCacheManager, "tables", tables_of)
    monkeypatch.setattr(StepPlan, "__init__", init)
    step = scheduler.schedule()
    assert step is not None
    assert len(step.rows) == scheduler.stats.preemptions == num_running // 2
    assert orders == [num_running]
    assert len(tables) == len(set(map(id, tables))) == num_running // 2
    assert rows.walked <= 3 * num_running, "to find them by request, to claim them, to send them: not for each victim"


@pytest.mark.patches_core
@pytest.mark.parametrize("num_forks", [5, 50])
def test_schedule_short_of_blocks_asks_no_fork_that_holds_only_what_others_do_for_its_table(
    num_forks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their parent runs on, so none can free a block of the prompt, and short requests preempt each other meanwhile."""
    asked: list[Request] = []
    original_tables, original_hits = KVCacheManager.tables, KVCacheManager.get_computed_blocks

    def tables_of(self: KVCacheManager, request: Request) -> list[list[KVCacheBlock]]:
        asked.append(request)
        return original_tables(self, request)

    def hits_of(self: KVCacheManager, request: Request) -> list[KVCacheBlock]:
        assert request.num_tokens < 200, (
            "the prefix of whoever waits was walked over, though nothing can be free for it"
        )
        return original_hits(self, request)

    prompt, num_short = range(400), 8
    scheduler = make_scheduler(
        make_kv(100 + 20 + 2 * num_short, 4), max_num_seqs=1 + num_short, max_num_batched_tokens=600
    )
    scheduler.add_request(make_new("parent", prompt, max_tokens=100))
    for index in range(num_short):
        scheduler.add_request(make_new(f"r{index}", 4, max_tokens=90 + index))
    run_step(scheduler)
    for index in range(num_forks):
        new = make_new(f"f{index}", prompt, resumed=[50])
        scheduler.add_request(dataclasses.replace(new, fork_of="parent"))
    assert len(scheduler.residency.forks) == num_forks
    monkeypatch.setattr(KVCacheManager, "get_computed_blocks", hits_of)
    while scheduler.stats.preemptions < 5:
        monkeypatch.setattr(KVCacheManager, "tables", tables_of)
        step = scheduler.schedule()
        monkeypatch.setattr(KVCacheManager, "tables", original_tables)
        assert step is not None
        scheduler.update(make_result(step))
    assert len(scheduler.residency.forks) == num_forks
    assert asked, "nobody was looked at at all"
    assert not [one for one in asked if one.request_id.startswith("f")]


def test_forks_that_let_go_are_the_newest_that_help() -> None:
    """50 of them have a block each of their own, beside what all have."""
    kv = make_kv(300, 4)
    holds = ForkHolds(kv)
    forks = [make_request(f"f{index}", range(400 + index), arrival_seq=index) for index in range(1, 51)]
    parent = make_request("parent", 400)
    assert kv.allocate_sequence(parent)
    for fork in forks:
        kv.pool.touch(parent.blocks)
        fork.blocks = [*parent.blocks, *kv.pool.get_new_blocks(1)]
        holds.add(fork)
    own = {fork.blocks[-1] for fork in forks}
    assert set(holds.alone()) == own
    assert holds.choose(own, 1, parent) == [forks[-1]]
    assert holds.choose(own, 3, parent) == forks[:-4:-1]
    assert holds.choose({forks[10].blocks[-1]}, 1, parent) == [forks[10]]
    kv.free(parent)
    assert len(holds.alone()) == 150, "the prompt, too"
    assert len(holds.choose(set(holds.alone()), 51, parent)) == 50
