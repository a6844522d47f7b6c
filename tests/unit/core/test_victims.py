"""Who gives way: a set that frees enough and of which none can be spared, or nobody."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvmanager_service.core.block import KVCacheBlock
from kvmanager_service.core.fork_holds import ForkHolds
from kvmanager_service.core.kv_cache import KVCache
from kvmanager_service.core.kv_groups import FullAttention, KVGroup, SlidingWindow
from kvmanager_service.core.request import Request, RequestStatus
from kvmanager_service.core.scheduler_config import SchedulerConfig
from kvmanager_service.core.step_plan import StepPlan
from kvmanager_service.core.victims import Victims
from tests.unit.core.builders import make_coordinator, make_kv, make_request

MODELS: dict[str, Sequence[KVGroup]] = {
    "one group": (),
    "two full groups": (FullAttention(4), FullAttention(8)),
    "a window": (FullAttention(4), SlidingWindow(4, 6)),
}


def make_cache(model: str, num_blocks: int) -> KVCache:
    groups = MODELS[model]
    return make_coordinator(groups, num_blocks, longest_chunk=8) if groups else make_kv(num_blocks)


def start(kv: KVCache, request_id: str, prompt: Sequence[int] | int, arrival_seq: int = 0) -> Request:
    """A running request whose prompt is computed."""
    request = make_request(request_id, prompt, arrival_seq=arrival_seq)
    assert kv.allocate_sequence(request)
    request.status = RequestStatus.RUNNING
    request.num_computed_tokens = request.num_tokens
    kv.cache_blocks(request, 0)
    return request


def make_plan(kv: KVCache) -> StepPlan:
    return StepPlan(1, None, kv, SchedulerConfig())


def references(kv: KVCache, requests: Sequence[Request]) -> dict[KVCacheBlock, int]:
    counts: dict[KVCacheBlock, int] = {}
    for request in requests:
        for table in kv.tables(request):
            for block in table:
                counts[block] = counts.get(block, 0) + 1
    return counts


def is_enough(kv: KVCache, request: Request, num_tokens: int, victims: Sequence[Request]) -> bool:
    """Whether the request finds its blocks once these are gone; by what the cache says, not by how it is counted."""
    dropped = references(kv, victims)
    num_free = kv.pool.num_free_blocks + sum(block.ref_cnt == count for block, count in dropped.items())
    return kv.num_new_blocks(request, num_tokens, dropped) <= num_free


def choose(kv: KVCache, order: Sequence[Request], request: Request, num_tokens: int) -> list[Request]:
    num_missing = kv.num_lacking(request, num_tokens)
    return Victims(order, kv, {}, ForkHolds(kv), make_plan(kv)).choose(request, num_missing)


@pytest.mark.parametrize("model", MODELS)
def test_choose_any_tables_frees_enough_spares_whom_it_can_or_takes_nobody(model: str) -> None:
    met = {"nobody": 0, "one": 0, "several": 0}
    for seed in range(400):
        rng = random.Random(seed)
        kv = make_cache(model, 10 + rng.randrange(12))
        running: list[Request] = []
        for index in range(8):
            if running and rng.random() < 0.5:  # a branch of one that runs
                parent = rng.choice(running)
                tokens = range(1000 * index, 1000 * index + parent.num_tokens)
                child = make_request(f"r{index}", tokens, arrival_seq=index)
                child.token_bytes = bytearray(parent.token_bytes)
                child.status = RequestStatus.RUNNING
                kv.fork(parent, child, parent.num_computed_tokens)
                running.append(child)
            elif kv.num_lacking(request := make_request(f"r{index}", rng.randrange(1, 20)), request.num_tokens) == 0:
                running.append(start(kv, f"r{index}", request.num_tokens, index))
        for request in running:  # some write, and then no longer share what they write to
            num_tokens = request.num_computed_tokens + 1
            if rng.random() < 0.5 and kv.allocate_slots(request, num_tokens):
                request.num_computed_tokens = request.num_tokens = num_tokens
                request.token_bytes += bytes(4)
        order = rng.sample(running, len(running))
        for request in running:
            num_tokens = request.num_computed_tokens + rng.choice((1, 8))
            if kv.num_lacking(request, num_tokens) == 0:
                continue
            behind = order[: order.index(request)]
            chosen = choose(kv, order, request, num_tokens)
            met["nobody" if not chosen else "one" if len(chosen) == 1 else "several"] += 1
            assert [one for one in behind if one in chosen] == chosen, f"seed {seed}: out of order"
            assert bool(chosen) == is_enough(kv, request, num_tokens, behind), f"seed {seed}"
            for victim in chosen:
                others = [one for one in chosen if one is not victim]
                assert is_enough(kv, request, num_tokens, chosen), f"seed {seed}"
                assert not is_enough(kv, request, num_tokens, others), f"seed {seed}: {victim!r} goes for nothing"
    assert all(met.values()), met


def test_choose_two_that_share_all_they_have_free_it_together() -> None:
    kv = make_kv(num_blocks=4)
    grows, first, second = start(kv, "grows", 4), start(kv, "a", range(4)), start(kv, "rest", 4)
    kv.free(second)
    second = start(kv, "b", [*range(4), 9])
    assert second.blocks[0] is first.blocks[0]
    kv.pool.touch(second.blocks[1:])  # a pin
    assert choose(kv, [second, grows, first], grows, 5) == [], "the first keeps what they share"
    assert choose(kv, [second, first, grows], grows, 5) == [second, first]


def test_choose_passes_over_who_gave_its_blocks_back() -> None:
    kv = make_kv(num_blocks=4)
    grows, first, second = (start(kv, name, 4) for name in ("grows", "a", "b"))
    victims = Victims([first, second, grows], kv, {}, ForkHolds(kv), make_plan(kv))
    assert victims.choose(grows, 1) == [first]
    kv.free(first)
    assert victims.choose(grows, 1) == [second]
    kv.free(second)
    assert victims.choose(grows, 1) == []


def test_choose_blocks_that_a_victim_waits_for_count_as_its() -> None:
    """Blocks on their way to the host come free for one or the other; a victim needs them no more."""
    kv = make_kv(num_blocks=4)
    grows, waits, holds = (start(kv, name, 4, seq) for seq, name in enumerate(("grows", "waits", "holds")))
    plan = make_plan(kv)
    plan.wait(waits, 2)
    victims = Victims([holds, waits, grows], kv, {}, ForkHolds(kv), plan)
    assert victims.choose(grows, 1) == [holds]
    assert victims.choose(grows, 3) == [waits], "two that it waits for, and its own"
    assert victims.choose(grows, 4) == [holds, waits]
    assert victims.choose(grows, 5) == []


def test_choose_references_on_their_way_to_the_host_are_let_go_of() -> None:
    kv = make_kv(num_blocks=3)
    grows, victim = start(kv, "grows", 4), start(kv, "a", 4)
    kv.pool.touch(victim.blocks)  # by one that is being swapped out, and shared it
    assert Victims([victim, grows], kv, {}, ForkHolds(kv), make_plan(kv)).choose(grows, 1) == []
    leaving = {victim.blocks[0]: 1}
    assert Victims([victim, grows], kv, leaving, ForkHolds(kv), make_plan(kv)).choose(grows, 1) == [victim]
