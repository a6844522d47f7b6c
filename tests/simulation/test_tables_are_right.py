"""Hundreds and thousands of requests over far too small a pool: one wrong or half-written block changes an output."""

import random
from array import array

import pytest

from executor_service.backends.sim_digest import expected_tokens
from kvmanager_service.core.request import FinishReason, NewRequest, SamplingParams, StopRules
from kvmanager_service.core.scheduler_config import SchedulerConfig
from tests.simulation.harness import VOCAB_SIZE, World

BLOCK_SIZE = 16


def make_requests(rng: random.Random, count: int, max_len: int) -> list[tuple[NewRequest, list[int], int]]:
    """Requests with shared prefixes (as of conversations) and lengths up to max_len, prompt and output together."""
    roots = [[rng.randrange(VOCAB_SIZE) for _ in range(max_len)] for _ in range(12)]
    requests = []
    for index in range(count):
        total = rng.randint(2, max_len)
        # Half of them are nearly all output: many fit at first, and they grow until somebody must give way.
        max_tokens = rng.randint(1, min(300, total - 1))
        if rng.random() < 0.5:
            total = min(total, max_tokens + rng.randint(1, 64))
        shared = rng.randint(0, total - max_tokens)
        prompt = rng.choice(roots)[:shared]
        prompt += [rng.randrange(VOCAB_SIZE) for _ in range(total - max_tokens - shared)]
        temperature = rng.choice([0.0, 1.0])
        new = NewRequest(
            request_id=f"r{index}",
            prompt=array("i", prompt).tobytes(),
            stop=StopRules(max_tokens=max_tokens),
            sampling=SamplingParams(temperature=temperature),
            seed=rng.getrandbits(64),
            priority=rng.randint(0, 3),
            arrival_time=float(index),
            tenant=f"t{index % 5}",
        )
        requests.append((new, prompt, max_tokens))
    return requests


@pytest.mark.parametrize(
    ("policy", "max_outstanding", "num_requests"),
    [("fcfs", 2, 2000), ("priority", 2, 600), ("fair", 2, 600), ("fcfs", 1, 600)],
)
def test_random_load_on_a_small_pool_gives_the_oracles_tokens(
    policy: str, max_outstanding: int, num_requests: int
) -> None:
    seed = 20_240_611
    rng = random.Random(seed)
    requests = make_requests(rng, num_requests, 2000)
    wanted = sum(-(-(len(prompt) + max_tokens) // BLOCK_SIZE) for _, prompt, max_tokens in requests)
    config = SchedulerConfig(
        policy=policy,
        max_waiting=2000,
        max_num_seqs=2000,
        max_num_batched_tokens=65_536,
        watermark=0.0,
        max_outstanding=max_outstanding,
    )
    world = World(num_blocks=wanted // 10, block_size=BLOCK_SIZE, config=config)
    pending = list(reversed(requests))
    aborted = set()
    while pending or world.scheduler.has_work:
        for _ in range(rng.randint(0, num_requests // 5)):
            if pending:
                world.scheduler.add_request(pending.pop()[0])
        if rng.random() < 0.2 and world.scheduler.requests:
            victim = rng.choice(sorted(world.scheduler.requests))
            world.scheduler.abort(victim)
            aborted.add(victim)
        world.schedule()
        if world.scheduler.outstanding:
            world.complete()
        world.scheduler.check_integrity()

    for new, prompt, max_tokens in requests:
        produced = world.produced[new.request_id]
        expected = expected_tokens(
            prompt, max_tokens, vocab_size=VOCAB_SIZE, seed=new.seed, temperature=new.sampling.temperature
        )
        if new.request_id in aborted:
            assert produced.finish_reason is FinishReason.ABORT
            assert produced.token_ids == expected[: len(produced.token_ids)], f"seed {seed}, {new.request_id}"
        else:
            assert produced.finish_reason is FinishReason.LENGTH
            assert produced.token_ids == expected, f"seed {seed}, {new.request_id}"
    pool = world.scheduler.kv.pool
    assert pool.num_free_blocks == pool.num_usable_blocks
    assert world.scheduler.stats.preemptions > 0
    assert world.scheduler.stats.prefix_hits > 0
    assert aborted
