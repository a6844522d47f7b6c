"""A scheduler over several KV groups and the executor for them: random load on a pool that is far too small."""

from __future__ import annotations

import random
from collections import deque

from kvmanager_service.core.kv_cache_coordinator import KVCacheCoordinator
from kvmanager_service.core.kv_groups import KVGroup
from kvmanager_service.core.request import FinishReason, NewBranch, NewRequest, StopRules
from kvmanager_service.core.scheduler import Scheduler
from kvmanager_service.core.scheduler_config import SchedulerConfig
from tests.simulation.group_executor import VOCAB_SIZE, GroupExecutor, Oracle, SentStep, send
from tests.unit.core.builders import token_bytes

MAX_LEN = 90
CHUNK = 24
MAX_TURNS = 20_000


class GroupWorld:
    """A scheduler and the executor for groups; requests with shared prefixes come and go."""

    def __init__(self, groups: list[KVGroup], num_blocks: int, max_outstanding: int, rng: random.Random) -> None:
        self.groups, self.num_blocks, self.rng = groups, num_blocks, rng
        self.executor = GroupExecutor(groups)
        config = SchedulerConfig(
            max_num_batched_tokens=CHUNK, max_num_seqs=6, watermark=0.0, max_outstanding=max_outstanding
        )
        self.scheduler = Scheduler(config, self.make_kv())
        self.sent: deque[SentStep] = deque()
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}
        self.num_adopted = 0

    def make_kv(self) -> KVCacheCoordinator:
        return KVCacheCoordinator(self.num_blocks, self.groups, longest_chunk=CHUNK)

    def schedule(self) -> None:
        while (step := self.scheduler.schedule()) is not None:
            self.scheduler.check_integrity()
            self.sent.append(send(step))
        self.publish()

    def complete(self, failure_rate: float) -> None:
        step = self.sent.popleft()
        failing = frozenset(index for index in range(len(step.rows)) if self.rng.random() < failure_rate)
        self.scheduler.update(self.executor.run(step, failing))
        self.scheduler.check_integrity()
        self.publish()

    def lose_steps(self) -> None:
        """The stream breaks; some of what was queued was run and nobody will know."""
        for step in list(self.sent)[: self.rng.randint(0, len(self.sent))]:
            self.executor.run(step)
        self.sent.clear()
        self.scheduler.lose_steps()
        self.publish()

    def restart_manager(self) -> None:
        self.lose_steps()
        kv = self.make_kv()
        self.num_adopted += kv.adopt(self.executor.tagged())
        kv.check_integrity([])
        self.scheduler.replace_cache(kv)
        self.publish()

    def publish(self) -> None:
        for output in self.scheduler.take_outputs():
            self.outputs.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.reasons[output.request_id] = output.finish_reason


def make_requests(rng: random.Random, count: int) -> dict[str, tuple[list[int], int]]:
    """By id, prompt and output tokens: conversations over a few roots, that go on from each other's prefixes."""
    roots = [[rng.randrange(VOCAB_SIZE) for _ in range(MAX_LEN)] for _ in range(4)]
    requests = {}
    for index in range(count):
        max_tokens = rng.randint(1, 30)
        shared = rng.randint(0, MAX_LEN - max_tokens - 12)
        own = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 12))]
        requests[f"r{index}"] = (rng.choice(roots)[:shared] + own, max_tokens)
    return requests


def live(groups: list[KVGroup], max_outstanding: int, *, faults: bool, seed: str) -> GroupWorld:
    """Run requests to their ends. Raises when any got other tokens than the oracle's, or a block is left behind."""
    rng = random.Random(seed)
    longest = KVCacheCoordinator(2, groups, longest_chunk=CHUNK).num_blocks_for(MAX_LEN + 1)
    world = GroupWorld(groups, 1 + longest + longest // 2, max_outstanding, rng)
    scheduler, oracle = world.scheduler, Oracle(groups)
    requests = make_requests(rng, 120)
    pending = list(requests)
    expected_of = {request_id: request_id for request_id in requests}
    aborted = set()
    for _ in range(MAX_TURNS):
        for _ in range(rng.randint(0, 3)):
            if pending:
                request_id = pending.pop()
                prompt, max_tokens = requests[request_id]
                # The token is a function of what was read alone: all branches must get the same.
                branches = tuple(
                    NewBranch(f"{request_id}#{index}", index) for index in range(1, rng.choice((1, 1, 1, 2, 4)))
                )
                for branch in branches:
                    expected_of[branch.request_id] = request_id
                scheduler.add_request(
                    NewRequest(request_id, token_bytes(prompt), StopRules(max_tokens=max_tokens), branches=branches)
                )
        if rng.random() < 0.02 and scheduler.requests:
            request_id = rng.choice(sorted(scheduler.requests))
            aborted.update(request.request_id for request in scheduler.book.members(request_id))
            scheduler.abort(request_id)
        world.schedule()
        if faults and rng.random() < 0.01:
            world.lose_steps()
        if faults and rng.random() < 0.02:
            world.restart_manager()
        if world.sent:
            world.complete(failure_rate=0.01 if faults else 0.0)
        if not (pending or scheduler.has_work or scheduler.outstanding):
            break
    oracles = {request_id: oracle.outputs(*request) for request_id, request in requests.items()}
    for request_id, like in expected_of.items():
        expected = oracles[like]
        got, reason = world.outputs.get(request_id, []), world.reasons.get(request_id)
        assert reason is not None, f"{seed}, {request_id} never ended"
        if reason is FinishReason.LENGTH:
            assert got == expected, f"{seed}, {request_id}"
        else:
            assert reason is FinishReason.ABORT if request_id in aborted else faults and reason is FinishReason.ERROR
            assert got == expected[: len(got)], f"{seed}, {request_id}"
    pool = scheduler.kv.pool
    assert pool.num_free_blocks == pool.num_usable_blocks
    return world
