"""A test of the tests: late answers, suspects, durations, fairness, forks and what goes on over several KV groups.

Each of these is broken on purpose, and lives must notice. `test_mutations` has blocks, hits, steps and swaps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import pytest

from executor_service.backends.sim_digest import expected_tokens
from kvmanager_service.core import branches
from kvmanager_service.core.arrival_line import ArrivalLine
from kvmanager_service.core.block import BlockContent, KVCacheBlock
from kvmanager_service.core.content_lookup import ContentLookup
from kvmanager_service.core.errors import RowFailedError
from kvmanager_service.core.fair_queue import FairQueue, TenantAccount
from kvmanager_service.core.group_forks import GroupForks
from kvmanager_service.core.group_hits import GroupHits
from kvmanager_service.core.group_swaps import GroupSwaps
from kvmanager_service.core.pinned_prefixes import PinnedPrefixes
from kvmanager_service.core.priority_policy import PriorityPolicy
from kvmanager_service.core.request import TOKEN_BYTES, NewBranch, NewRequest, Request, SamplingParams
from kvmanager_service.core.request_queue import FCFSQueue, PriorityQueue
from kvmanager_service.core.residency import Residency
from kvmanager_service.core.scheduler import Scheduler
from kvmanager_service.core.scheduler_config import SchedulerConfig
from kvmanager_service.core.step import ScheduledRow, StepResult
from kvmanager_service.core.step_plan import StepPlan
from kvmanager_service.core.suspects import Suspects
from kvmanager_service.core.swap_space import SwapSpace
from tests.simulation.broken import MAX_SEEDS, Mutation, require_notice
from tests.simulation.harness import VOCAB_SIZE, World
from tests.simulation.life import MODELS, Life
from tests.unit.core.builders import make_new

pytestmark = pytest.mark.patches_core


def answers_of_broken_streams_are_believed(patch: pytest.MonkeyPatch) -> None:
    """Whatever comes is the result of the oldest step, if it looks like that."""
    original = Scheduler.update

    def update(self: Scheduler, result: StepResult) -> None:
        if self.outstanding and result.step_id < self.outstanding[0].step_id:
            result.step_id = self.outstanding[0].step_id
        original(self, result)

    patch.setattr(Scheduler, "update", update)


def nobody_is_tried_alone(patch: pytest.MonkeyPatch) -> None:
    """Whoever was in the same steps ends with the one that breaks them."""
    original = Suspects.blame

    def blame(self: Suspects, rows: Iterable[ScheduledRow]) -> list[tuple[Request, RowFailedError]]:
        failed = original(self, rows)
        self._requests.clear()
        return failed

    patch.setattr(Suspects, "blame", blame)


def nobody_is_ended_for_what_it_breaks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Suspects, "blame", lambda self, rows: [])


def durations_never_end(patch: pytest.MonkeyPatch) -> None:
    def advance(self: PriorityPolicy, now: float) -> None:
        self._now = now

    patch.setattr(PriorityPolicy, "advance", advance)


def output_is_free(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FairQueue, "charge_token", lambda self, request: None)


def counters_grow_and_the_heap_does_not_hear(patch: pytest.MonkeyPatch) -> None:
    def lowest(self: FairQueue) -> TenantAccount | None:
        while self._heap and self._heap[0][1] != self._heap[0][2].entry:
            self._heap.pop(0)
            self._heap.sort(key=lambda entry: entry[:2])
        return self._heap[0][2] if self._heap else None

    patch.setattr(FairQueue, "_lowest", lowest)


def whoever_was_away_has_credit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FairQueue, "_floor", lambda self: 0.0)


def newest_first_is_admitted(patch: pytest.MonkeyPatch) -> None:
    """All come to their ends none the less: arrivals are finite."""

    def peek(self: FCFSQueue) -> Request:
        return max(self, key=lambda request: request.arrival_seq)

    patch.setattr(FCFSQueue, "peek", peek)


def preempted_goes_to_the_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FCFSQueue, "requeue", FCFSQueue.add)


def preempted_goes_before_all(patch: pytest.MonkeyPatch) -> None:
    """Whatever its arrival: where many are preempted at once, latest first, that comes to the same."""
    patch.setattr(ArrivalLine, "requeue", lambda self, request: self._preempted.append(request))
    patch.setattr(ArrivalLine, "remove", _take_out)


def _take_out(line: ArrivalLine, request: Request) -> None:
    """Wherever it stands, though the line be out of order."""
    if line._new.pop(request.request_id, None) is None:
        line._preempted.remove(request)


def newest_of_a_tenant_first_is_admitted(patch: pytest.MonkeyPatch) -> None:
    """The tenant is the one whose turn it is."""

    def peek(self: FairQueue) -> Request:
        account = self._lowest()
        assert account is not None
        return max(account.waiting, key=lambda request: request.arrival_seq)

    patch.setattr(FairQueue, "peek", peek)


def preempted_goes_behind_its_tenants_others(patch: pytest.MonkeyPatch) -> None:
    def requeue(self: FairQueue, request: Request) -> None:
        account = self._accounts[request.tenant]
        self._enter(account)
        account.waiting.add(request)
        self._length += 1

    patch.setattr(FairQueue, "requeue", requeue)


def newest_of_a_priority_first_is_admitted(patch: pytest.MonkeyPatch) -> None:
    def peek(self: PriorityQueue) -> Request:
        return min(self._requests.values(), key=lambda request: (request.priority, -request.arrival_seq))

    patch.setattr(PriorityQueue, "peek", peek)


def priorities_are_ignored(patch: pytest.MonkeyPatch) -> None:
    def peek(self: PriorityQueue) -> Request:
        return min(self._requests.values(), key=lambda request: request.arrival_seq)

    patch.setattr(PriorityQueue, "peek", peek)


def resumed_output_may_come_once_more(patch: pytest.MonkeyPatch) -> None:
    original = Request.__init__

    def init(self: Request, new: NewRequest, arrival_seq: int, branch: NewBranch | None = None) -> None:
        original(self, new, arrival_seq, branch)
        self.max_total_tokens += len(new.resumed if branch is None else branch.resumed) // TOKEN_BYTES

    patch.setattr(Request, "__init__", init)


def successor_with_other_keys_is_followed(patch: pytest.MonkeyPatch) -> None:
    original = ContentLookup.follow

    def follow(
        self: ContentLookup, parent: BlockContent | None, block_hash: bytes, token_bytes: bytes, extra_keys: bytes
    ) -> BlockContent | None:
        successor = None if parent is None else parent.successor
        if successor is not None and successor.token_bytes == token_bytes:
            return successor
        return original(self, parent, block_hash, token_bytes, extra_keys)

    patch.setattr(ContentLookup, "follow", follow)


def forks_share_what_is_yet_to_be_computed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(branches, "num_acknowledged", lambda request, outstanding: request.num_computed_tokens)


# --- over several KV groups -------------------------------------------------------------------------------------------


def forks_keep_what_the_next_request_lacks(patch: pytest.MonkeyPatch) -> None:
    """As long as anybody runs."""
    patch.setattr(Residency, "make_room_among_forks", lambda self, request, reserve: False)


def tails_of_one_group_only_are_copied(patch: pytest.MonkeyPatch) -> None:
    """Of the others both write to the same block."""
    original = GroupForks.own_tails

    def own_tails(self: GroupForks, request: Request) -> None:
        groups, self._groups = self._groups, self._groups[:1]
        tables, request.tables = request.tables, request.tables[:1]
        try:
            original(self, request)
        finally:
            self._groups, request.tables = groups, tables

    patch.setattr(GroupForks, "own_tails", own_tails)


def forked_windows_begin_a_block_late(patch: pytest.MonkeyPatch) -> None:
    original = GroupForks.fork

    def fork(self: GroupForks, parent: Request, child: Request, num_tokens: int) -> None:
        original(self, parent, child, num_tokens)
        for table in child.tables[1:]:
            if table.first + 1 < len(table.blocks):
                self._pool.free_blocks([table.blocks[table.first]])
                table.leave(table.first + 1)

    patch.setattr(GroupForks, "fork", fork)


def what_comes_back_goes_to_another_group(patch: pytest.MonkeyPatch) -> None:
    original = GroupSwaps.blocks_to_fill

    def blocks_to_fill(self: GroupSwaps, request: Request, num_tokens: int) -> list[tuple[int, KVCacheBlock]]:
        filled = original(self, request, num_tokens)
        return [(place, block) for (place, _), (_, block) in zip(filled, reversed(filled), strict=True)]

    patch.setattr(GroupSwaps, "blocks_to_fill", blocks_to_fill)


def a_state_that_has_moved_on_is_swapped(patch: pytest.MonkeyPatch) -> None:
    """The token under way is dropped, as recomputation does, and the one before it computed again from its state."""
    original = SwapSpace.leave

    def leave(self: SwapSpace, request: Request, plan: StepPlan | None) -> bool:
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        original(self, request, plan)
        return False

    patch.setattr(SwapSpace, "leave", leave)


def pins_of_groups_take_what_is_yet_to_be_filled(patch: pytest.MonkeyPatch) -> None:
    def filled_block(self: GroupHits, request: Request, entry: tuple[int, int]) -> KVCacheBlock | None:
        return self.cached_block(request, *entry)

    patch.setattr(GroupHits, "filled_block", filled_block)


def pins_of_groups_keep_what_a_failed_row_put_in_doubt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PinnedPrefixes, "distrusted", lambda self: None)


Lives = Callable[[int], Life]


def plain(seed: int) -> Life:
    return Life(seed)


def fair(seed: int) -> Life:
    return Life(seed, policy="fair")


def fcfs(seed: int) -> Life:
    return Life(seed, policy="fcfs")


def crowded(seed: int) -> Life:
    return Life(seed, crowded=True)


def crowded_fcfs(seed: int) -> Life:
    return Life(seed, policy="fcfs", crowded=True)


def crowded_fair(seed: int) -> Life:
    return Life(seed, policy="fair", crowded=True)


def priority(seed: int) -> Life:
    return Life(seed, policy="priority")


def of(model: str, num_requests: int | None = None) -> Lives:
    return lambda seed: Life(seed, windows=MODELS[model], num_requests=num_requests)


def swapping(model: str) -> Lives:
    return lambda seed: Life(seed, windows=MODELS[model], crowded=True, num_requests=12, preemption_mode="swap")


MUTATIONS: Sequence[tuple[Mutation, Lives, int]] = [
    (answers_of_broken_streams_are_believed, plain, 18),
    (nobody_is_tried_alone, plain, 8),
    (nobody_is_ended_for_what_it_breaks, plain, 8),
    (durations_never_end, plain, 11),
    (output_is_free, fair, 1),
    (counters_grow_and_the_heap_does_not_hear, fair, 1),
    (whoever_was_away_has_credit, fair, 1),
    (newest_first_is_admitted, fcfs, 1),
    (preempted_goes_to_the_back, crowded_fcfs, 1),
    (preempted_goes_before_all, crowded_fcfs, 11),
    (preempted_goes_before_all, crowded_fair, 11),
    (newest_of_a_tenant_first_is_admitted, fair, 1),
    (preempted_goes_behind_its_tenants_others, crowded_fair, 1),
    (newest_of_a_priority_first_is_admitted, priority, 1),
    (priorities_are_ignored, priority, 1),
    (resumed_output_may_come_once_more, plain, 1),
    (successor_with_other_keys_is_followed, plain, 31),
    (forks_keep_what_the_next_request_lacks, crowded, 10),
    (tails_of_one_group_only_are_copied, of("two full"), 3),
    (forked_windows_begin_a_block_late, of("full and sliding"), 3),
    (what_comes_back_goes_to_another_group, swapping("full and sliding"), 1),
    (a_state_that_has_moved_on_is_swapped, swapping("full and states"), 8),
    (pins_of_groups_take_what_is_yet_to_be_filled, of("two full", 20), 2),
    (pins_of_groups_keep_what_a_failed_row_put_in_doubt, of("full and sliding"), 6),
]
"""With the first seed to try: those before it live on, and long; one that no longer notices is followed by others."""


@pytest.mark.parametrize(
    ("mutation", "life", "first"), MUTATIONS, ids=lambda value: value.__name__ if callable(value) else str(value)
)
def test_simulation_policy_broken_on_purpose_notices(
    mutation: Mutation, life: Lives, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    require_notice(life(seed) for seed in range(first, first + MAX_SEEDS))


def live_through_a_failed_row_of_a_parent() -> None:
    """Somebody branches off from a request whose first row is in flight, and fails: too few lives come to that."""
    world = World(30, 4, SchedulerConfig(max_outstanding=1))
    greedy = SamplingParams(temperature=0.0)
    prompt = [1, 2, 3]
    longer = prompt + expected_tokens(prompt, 1, vocab_size=VOCAB_SIZE)
    world.scheduler.add_request(make_new("parent", prompt, max_tokens=6, sampling=greedy))
    world.schedule()
    world.scheduler.add_request(
        dataclasses.replace(make_new("child", longer, max_tokens=3, sampling=greedy), fork_of="parent")
    )
    world.executor.backend.rows_to_fail = [0]
    world.complete()
    world.run()
    world.scheduler.check_integrity()
    assert world.produced["parent"].error is not None
    expected = expected_tokens(longer, 3, vocab_size=VOCAB_SIZE)
    assert world.produced["child"].token_ids == expected, "child got other tokens than the oracle's"


def test_simulation_fork_of_a_request_whose_row_fails_gets_the_oracles_tokens() -> None:
    live_through_a_failed_row_of_a_parent()


def test_simulation_fork_that_shares_what_is_in_flight_gets_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    forks_share_what_is_yet_to_be_computed(monkeypatch)
    with pytest.raises(AssertionError, match="child got other tokens"):
        live_through_a_failed_row_of_a_parent()
