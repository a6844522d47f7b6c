"""A test of the tests: the core is broken on purpose, and the simulation must notice each time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from kvplane.executor.v1 import executor_service_pb2 as pb

from kvmanager_service import step_message
from kvmanager_service.core.adoption import TaggedBlock, adopt_block
from kvmanager_service.core.block import BlockContent, KVCacheBlock
from kvmanager_service.core.block_pool import BlockPool
from kvmanager_service.core.content_lookup import ContentLookup
from kvmanager_service.core.departures import Departures
from kvmanager_service.core.fork_holds import ForkHolds
from kvmanager_service.core.kv_cache_manager import KVCacheManager
from kvmanager_service.core.pinned_prefixes import PinnedPrefixes
from kvmanager_service.core.priority_policy import PriorityPolicy
from kvmanager_service.core.request import NewRequest, Request
from kvmanager_service.core.request_book import RequestBook
from kvmanager_service.core.residency import Residency
from kvmanager_service.core.scheduler import Scheduler
from kvmanager_service.core.scheduler_config import RECOMPUTE, SchedulerConfig
from kvmanager_service.core.step import BlockCopy, CopyDirection, ScheduledRow, Step, StepResult
from kvmanager_service.core.step_plan import StepPlan
from kvmanager_service.core.step_planner import StepPlanner
from kvmanager_service.core.swap_space import CopyPhase, HostCopy, SwapSpace
from kvmanager_service.core.tag_outbox import Tag
from tests.simulation.broken import MAX_SEEDS, Mutation, require_notice
from tests.simulation.chaos import Chaos
from tests.simulation.life import Life
from tests.simulation.test_faults import (
    live_through_a_failed_copy,
    live_through_a_failed_twin,
    live_through_a_lost_copy,
)

pytestmark = pytest.mark.patches_core


def one_block_too_few(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCacheManager, "num_blocks_for", lambda self, num_tokens: num_tokens // self.block_size)


def one_block_too_many(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCacheManager, "num_blocks_for", lambda self, num_tokens: num_tokens // self.block_size + 1)


def wrong_blocks_in_the_table(patch: pytest.MonkeyPatch) -> None:
    def extend_table(request: Request, blocks: list[KVCacheBlock]) -> None:
        request.blocks += blocks
        for block in reversed(blocks):
            request.block_id_bytes += block.block_id.to_bytes(4, "little")

    patch.setattr(KVCacheManager, "_extend_table", staticmethod(extend_table))


def freed_blocks_keep_a_reference(patch: pytest.MonkeyPatch) -> None:
    original = BlockPool.free_blocks

    def free_blocks(self: BlockPool, blocks: Iterable[KVCacheBlock]) -> None:
        original(self, list(blocks)[1:])

    patch.setattr(BlockPool, "free_blocks", free_blocks)


def evicted_block_keeps_its_hash(patch: pytest.MonkeyPatch) -> None:
    def get_new_blocks(self: BlockPool, num_blocks: int) -> list[KVCacheBlock]:
        blocks = self.free_block_queue.popleft_n(num_blocks)
        for block in blocks:
            block.ref_cnt = 1
            if block.content is not None:  # nobody tells the index
                block.content = None
                self.num_cached_blocks -= 1
        return blocks

    patch.setattr(BlockPool, "get_new_blocks", get_new_blocks)
    patch.setattr(BlockPool, "check_integrity", lambda self, tables: list(tables))


def hit_is_not_taken_out_of_the_free_queue(patch: pytest.MonkeyPatch) -> None:
    def touch(self: BlockPool, blocks: Iterable[KVCacheBlock]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    patch.setattr(BlockPool, "touch", touch)


def partial_blocks_are_hashed(patch: pytest.MonkeyPatch) -> None:
    original = KVCacheManager.cache_blocks

    def cache_blocks(self: KVCacheManager, request: Request, provisional_step: int) -> None:
        computed = request.num_computed_tokens
        # Known is taken for computed: the rest of the prompt counts, though no step computes it yet.
        request.num_computed_tokens = request.num_tokens
        original(self, request, provisional_step)
        request.num_computed_tokens = computed

    patch.setattr(KVCacheManager, "cache_blocks", cache_blocks)


def tokens_not_known_yet_are_hashed(patch: pytest.MonkeyPatch) -> None:
    original = KVCacheManager.cache_blocks

    def cache_blocks(self: KVCacheManager, request: Request, provisional_step: int) -> None:
        known = request.num_tokens
        unknown = max(0, request.num_computed_tokens - known)
        request.token_bytes += bytes(4 * unknown)
        request.num_tokens += unknown
        original(self, request, provisional_step)
        request.num_tokens = known
        del request.token_bytes[4 * known :]

    patch.setattr(KVCacheManager, "cache_blocks", cache_blocks)


def parent_is_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        BlockContent,
        "is_same",
        lambda self, parent, tokens, keys: self.token_bytes == tokens and self.extra_keys == keys,
    )


def evicted_content_is_still_followed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockContent, "_leave_chain", lambda self: None)


def whatever_followed_last_is_believed(patch: pytest.MonkeyPatch) -> None:
    original = ContentLookup.follow

    def follow(
        self: ContentLookup, parent: BlockContent | None, block_hash: bytes, token_bytes: bytes, extra_keys: bytes
    ) -> BlockContent | None:
        if parent is not None and parent.successor is not None:
            return parent.successor
        return original(self, parent, block_hash, token_bytes, extra_keys)

    patch.setattr(ContentLookup, "follow", follow)


def salt_is_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        BlockContent, "is_same", lambda self, parent, tokens, keys: self.parent is parent and self.token_bytes == tokens
    )


def provisional_blocks_survive_lost_steps(patch: pytest.MonkeyPatch) -> None:
    def forget_provisional(self: BlockPool) -> int:
        for step_id in list(self._provisional):
            self.commit_step(step_id)
        return 0

    patch.setattr(BlockPool, "forget_provisional", forget_provisional)


def blocks_are_committed_when_scheduled(patch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the answer: what a step is to fill counts as filled."""
    original = KVCacheManager.cache_blocks

    def cache_blocks(self: KVCacheManager, request: Request, provisional_step: int) -> None:
        original(self, request, 0)

    patch.setattr(KVCacheManager, "cache_blocks", cache_blocks)


def failed_rows_are_trusted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_distrust", lambda self, row, step: None)


def failed_content_survives_in_its_twin(patch: pytest.MonkeyPatch) -> None:
    def distrust(self: BlockPool, blocks: Iterable[KVCacheBlock]) -> set[KVCacheBlock]:
        distrusted = {block for block in blocks if block.content is not None}
        for block in distrusted:
            self._uncache(block)
        return distrusted

    patch.setattr(BlockPool, "distrust", distrust)


def fed_by_another_sample(patch: pytest.MonkeyPatch) -> None:
    original = StepPlan.claim

    def claim(self: StepPlan, row: ScheduledRow) -> None:
        original(self, row)
        if row.feeds_from > 0:
            row.feeds_from -= 1

    patch.setattr(StepPlan, "claim", claim)


def old_incarnations_are_believed(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler.update

    def update(self: Scheduler, result: StepResult) -> None:
        for row in self.outstanding[0].rows if self.outstanding else ():
            row.incarnation = row.request.incarnation
        original(self, result)

    patch.setattr(Scheduler, "update", update)


def results_of_former_executors_are_believed(patch: pytest.MonkeyPatch) -> None:
    def read(message: pb.ExecuteResponse, kv_epoch: int) -> StepResult:
        return step_message.read_execute_response(message, message.kv_epoch)

    patch.setattr("tests.simulation.harness.read_execute_response", read)


def preempted_request_keeps_its_tokens_on_the_way(patch: pytest.MonkeyPatch) -> None:
    original = Departures.preempt

    def preempt(self: Departures, request: Request, plan: StepPlan | None = None) -> None:
        pending = request.num_pending_tokens
        original(self, request, plan)
        request.num_pending_tokens = pending

    patch.setattr(Departures, "preempt", preempt)


def stop_tokens_are_never_suppressed(patch: pytest.MonkeyPatch) -> None:
    original = StepPlan.make_step

    def make_step(self: StepPlan, tags: list[Tag]) -> Step:
        step = original(self, tags)
        for row in step.rows:
            row.suppress_stop = False
        return step

    patch.setattr(StepPlan, "make_step", make_step)


def one_token_too_many(patch: pytest.MonkeyPatch) -> None:
    original = Request.__init__

    def init(self: Request, *arguments: object) -> None:
        original(self, *arguments)  # type: ignore[arg-type]
        self.max_total_tokens += 1

    patch.setattr(Request, "__init__", init)


def victims_row_stays_in_the_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepPlan, "drop", lambda self, request: None)


def preemption_forgets_to_wait(patch: pytest.MonkeyPatch) -> None:
    """A lone request that outgrew the pool is taken for a preemption: whoever waits is not admitted."""
    plan_running, plan_waiting = StepPlanner.plan_running, StepPlanner.plan_waiting

    def running_or_ended(self: StepPlanner, plan: StepPlan) -> bool:
        before = len(self.running)
        return plan_running(self, plan) or len(self.running) < before

    def waiting_unless_preempted(self: StepPlanner, plan: StepPlan) -> None:
        if plan.rows or self.running or not any(request.num_preemptions for request in self.waiting):
            plan_waiting(self, plan)

    patch.setattr(StepPlanner, "plan_running", running_or_ended)
    patch.setattr(StepPlanner, "plan_waiting", waiting_unless_preempted)


def wrong_last_block_len(patch: pytest.MonkeyPatch) -> None:
    original = step_message.build_execute_request

    def build(*arguments: Any) -> pb.ExecuteRequest:
        message = original(*arguments)
        data = bytearray(message.block_tables[0].last_block_len.data)
        data[0] = 1
        message.block_tables[0].last_block_len.data = bytes(data)
        return message

    patch.setattr("tests.simulation.harness.build_execute_request", build)


def adopted_without_their_parents(patch: pytest.MonkeyPatch) -> None:
    def adopt(self: KVCacheManager, tagged: Sequence[TaggedBlock]) -> int:
        count = 0
        for tag in tagged:
            # Any block is taken for a first one.
            content = adopt_block(self.pool, tag, None)
            count += content is not None
        return count

    patch.setattr(KVCacheManager, "adopt", adopt)
    patch.setattr(BlockContent, "is_same", lambda self, parent, tokens, keys: self.token_bytes == tokens)


def shared_blocks_are_written_in_place(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCacheManager, "_own_tail", lambda self, request: None)


def copies_are_not_ordered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCacheManager, "take_copies", lambda self: [])


def copies_come_a_step_late(patch: pytest.MonkeyPatch) -> None:
    original = KVCacheManager.take_copies

    def take_copies(self: KVCacheManager) -> list[BlockCopy]:
        late: list[BlockCopy] = vars(self).setdefault("late", [])  # with the cache, so that none outlives it
        copies = list(late)
        late[:] = original(self)
        return copies

    patch.setattr(KVCacheManager, "take_copies", take_copies)


def leaving_blocks_are_free_at_once(patch: pytest.MonkeyPatch) -> None:
    original = SwapSpace.leave

    def leave(self: SwapSpace, request: Request, plan: StepPlan | None) -> None:
        original(self, request, plan)
        copy = self._copies.get(request.arrival_seq)
        if copy is not None and copy.blocks:
            self._give_back_blocks(copy)

    patch.setattr(SwapSpace, "leave", leave)
    patch.setattr(SwapSpace, "_check_copy", lambda self, copy: None)  # it must be seen in what comes out


def host_blocks_are_free_before_they_are_read(patch: pytest.MonkeyPatch) -> None:
    original = SwapSpace.bring_back

    def bring_back(self: SwapSpace, request: Request, plan: StepPlan) -> None:
        original(self, request, plan)
        copy = self._copies.get(request.arrival_seq)
        if copy is not None and copy.phase is CopyPhase.RETURNING:
            self._free_host_ids += copy.host_ids

    def acknowledged(self: SwapSpace, step: Step, result: StepResult) -> None:
        for copy in self._under_way.get(step.step_id, ()):
            if copy.phase is CopyPhase.RETURNING:
                del self._copies[copy.request.arrival_seq]
                copy.phase = CopyPhase.HELD
        acknowledge(self, step, result)

    acknowledge = SwapSpace.acknowledged
    patch.setattr(SwapSpace, "bring_back", bring_back)
    patch.setattr(SwapSpace, "acknowledged", acknowledged)
    patch.setattr(SwapSpace, "check_integrity", lambda self, outstanding: None)


def swapped_request_has_computed_one_token_more(patch: pytest.MonkeyPatch) -> None:
    original = HostCopy.__init__

    def init(self: HostCopy, request: Request, *, num_tokens: int, **rest: Any) -> None:
        original(self, request, num_tokens=min(num_tokens + 1, request.num_tokens - 1), **rest)

    patch.setattr(HostCopy, "__init__", init)
    patch.setattr(SwapSpace, "_check_copy", lambda self, copy: None)


def swapped_request_loses_the_token_under_way(patch: pytest.MonkeyPatch) -> None:
    """Then it has computed all that is known of it, and nothing is left to compute."""
    original = RequestBook.preempt

    def preempt(self: RequestBook, request: Request, *, keeps_samples: bool = False) -> None:
        original(self, request)

    patch.setattr(RequestBook, "preempt", preempt)
    patch.setattr(SwapSpace, "_check_copy", lambda self, copy: None)


def token_under_way_outlives_the_copy(patch: pytest.MonkeyPatch) -> None:
    """The request may be admitted before it comes, and samples it, too."""
    original = SwapSpace.forget

    def forget(self: SwapSpace, request: Request) -> None:
        awaited, pending = request.awaited_incarnation, request.num_pending_tokens
        original(self, request)
        if awaited >= 0:
            request.awaited_incarnation, request.num_pending_tokens = awaited, pending

    patch.setattr(SwapSpace, "forget", forget)


def last_block_is_not_copied(patch: pytest.MonkeyPatch) -> None:
    original = StepPlan.make_step

    def make_step(self: StepPlan, tags: list[Tag]) -> Step:
        del self.copies[-1:]
        return original(self, tags)

    patch.setattr(StepPlan, "make_step", make_step)


def forks_take_no_reference(patch: pytest.MonkeyPatch) -> None:
    """The parent's end frees what its branches read; nobody looks at the books."""
    original = KVCacheManager.fork

    def fork(self: KVCacheManager, parent: Request, child: Request, num_tokens: int) -> None:
        original(self, parent, child, num_tokens)
        for block in child.blocks:
            block.ref_cnt -= 1

    def free_blocks(self: BlockPool, blocks: Iterable[KVCacheBlock]) -> None:
        unchecked(self, [block for block in blocks if block.ref_cnt])

    unchecked = BlockPool.free_blocks
    patch.setattr(KVCacheManager, "fork", fork)
    patch.setattr(BlockPool, "free_blocks", free_blocks)
    patch.setattr(BlockPool, "check_integrity", lambda self, tables: list(tables))


def waiting_forks_write_in_place(patch: pytest.MonkeyPatch) -> None:
    original = ForkHolds.add

    def add(self: ForkHolds, fork: Request) -> None:
        original(self, fork)
        fork.may_share_tail = False

    patch.setattr(ForkHolds, "add", add)


def waiting_forks_keep_their_tokens_when_they_let_go(patch: pytest.MonkeyPatch) -> None:
    original = Residency.let_go

    def let_go(self: Residency, fork: Request) -> None:
        num_computed = fork.num_computed_tokens
        original(self, fork)
        fork.num_computed_tokens = num_computed

    patch.setattr(Residency, "let_go", let_go)


def waiting_forks_trust_failed_rows(patch: pytest.MonkeyPatch) -> None:
    """They let go of nothing, but where all that they hold is gone."""
    original = Residency.distrust

    def distrust(self: Residency, *args: Any) -> set[KVCacheBlock]:
        with patch.context() as inner:
            inner.setattr(Residency, "let_go", lambda self, fork: None)
            return original(self, *args)

    patch.setattr(Residency, "distrust", distrust)


def branches_are_sampled_with_the_leaders_seed(patch: pytest.MonkeyPatch) -> None:
    original = RequestBook.fork

    def fork(self: RequestBook, follower: Request) -> None:
        assert follower.leader is not None
        follower.seed = follower.leader.seed
        original(self, follower)

    patch.setattr(RequestBook, "fork", fork)


def resumed_branches_are_sampled_with_the_requests_seed(patch: pytest.MonkeyPatch) -> None:
    original = RequestBook.new_requests

    def new_requests(self: RequestBook, new: NewRequest) -> list[Request]:
        requests = original(self, new)
        for request in requests:
            request.seed = new.seed
        return requests

    patch.setattr(RequestBook, "new_requests", new_requests)


def branches_that_have_begun_are_resumed_from_the_prompt(patch: pytest.MonkeyPatch) -> None:
    """Their tokens would come once more."""
    original = RequestBook.new_requests

    def new_requests(self: RequestBook, new: NewRequest) -> list[Request]:
        branches = tuple(dataclasses.replace(branch, resumed=b"") for branch in new.branches)
        return original(self, dataclasses.replace(new, branches=branches))

    patch.setattr(RequestBook, "new_requests", new_requests)


def places_of_branches_are_not_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RequestBook, "has_room", lambda self, request: len(self.running) < self._max_num_seqs)


def lost_copies_are_held(patch: pytest.MonkeyPatch) -> None:
    original = SwapSpace.lose

    def lose(self: SwapSpace, lost: list[Step]) -> None:
        for copy in self._copies.values():
            if copy.phase is CopyPhase.LEAVING:
                copy.phase = CopyPhase.HELD
                self._give_back_blocks(copy)
        original(self, lost)

    patch.setattr(SwapSpace, "lose", lose)


def host_memory_outlives_its_executor(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler.replace_cache

    def replace_cache(self: Scheduler, kv: KVCacheManager, num_host_blocks: int = 0) -> None:
        before = self.swap_space
        if before is None or (before.num_host_blocks, before._kv.block_size) != (num_host_blocks, kv.block_size):
            original(self, kv, num_host_blocks)
            return
        with patch.context() as inner:
            inner.setattr(SwapSpace, "forget_all", lambda self: None)
            original(self, kv, num_host_blocks)
        before._kv = kv
        self.residency.swap_space = before

    patch.setattr(Scheduler, "replace_cache", replace_cache)


def request_is_admitted_before_its_copy_is_there(patch: pytest.MonkeyPatch) -> None:
    original = SwapSpace.bring_back

    def bring_back(self: SwapSpace, request: Request, plan: StepPlan) -> None:
        copy = self._copies.get(request.arrival_seq)
        if copy is not None and copy.phase is CopyPhase.LEAVING:
            copy.phase = CopyPhase.HELD
            request.awaited_incarnation = -1  # as when the copy is acknowledged
        original(self, request, plan)

    # Its next token is known by then: without one there is nothing to compute, which an executor refuses at once.
    patch.setattr(SwapSpace, "is_leaving", lambda self, request: request.num_pending_tokens > 0)
    patch.setattr(SwapSpace, "bring_back", bring_back)  # it must be seen in what comes out
    patch.setattr(SwapSpace, "_check_copy", lambda self, copy: None)


def ended_request_keeps_its_host_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SwapSpace, "forget", lambda self, request: None)


def whoever_waits_for_blocks_takes_more(patch: pytest.MonkeyPatch) -> None:
    """Nobody waits for what is on its way: the next victim is taken, down to the one that needs the blocks."""
    patch.setattr(SwapSpace, "will_have_room", lambda self, request, num_tokens, plan: False)


def pins_do_not_stand_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PinnedPrefixes, "make_room", lambda self, request, num_tokens: False)


def pins_take_what_is_yet_to_be_filled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ContentLookup, "get_filled_block", ContentLookup.get_cached_block)


def pins_keep_what_a_failed_row_put_in_doubt(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PinnedPrefixes, "distrusted", lambda self: None)


def priority_block_in_use_is_handed_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PriorityPolicy, "_is_valid", lambda self, entry: True)


ANY_HASH = None
ONE_BYTE = True
MUTATIONS: list[tuple[Mutation, bool | None]] = [
    (one_block_too_few, ANY_HASH),
    (one_block_too_many, ANY_HASH),
    (wrong_blocks_in_the_table, ANY_HASH),
    (freed_blocks_keep_a_reference, ANY_HASH),
    (evicted_block_keeps_its_hash, ANY_HASH),
    (hit_is_not_taken_out_of_the_free_queue, ANY_HASH),
    (partial_blocks_are_hashed, ANY_HASH),
    (tokens_not_known_yet_are_hashed, ANY_HASH),
    (parent_is_not_compared, ONE_BYTE),
    (evicted_content_is_still_followed, ANY_HASH),
    (whatever_followed_last_is_believed, ANY_HASH),
    (salt_is_not_compared, ONE_BYTE),
    (provisional_blocks_survive_lost_steps, ANY_HASH),
    (blocks_are_committed_when_scheduled, ANY_HASH),
    (failed_rows_are_trusted, ANY_HASH),
    (fed_by_another_sample, ANY_HASH),
    (old_incarnations_are_believed, ANY_HASH),
    (results_of_former_executors_are_believed, ANY_HASH),
    (preempted_request_keeps_its_tokens_on_the_way, ANY_HASH),
    (stop_tokens_are_never_suppressed, ANY_HASH),
    (one_token_too_many, ANY_HASH),
    (victims_row_stays_in_the_step, ANY_HASH),
    (preemption_forgets_to_wait, ANY_HASH),
    (wrong_last_block_len, ANY_HASH),
    (adopted_without_their_parents, ANY_HASH),
    (shared_blocks_are_written_in_place, ANY_HASH),
    (copies_are_not_ordered, ANY_HASH),
    (copies_come_a_step_late, ANY_HASH),
    (forks_take_no_reference, ANY_HASH),
    (waiting_forks_write_in_place, ANY_HASH),
    (waiting_forks_keep_their_tokens_when_they_let_go, ANY_HASH),
    (waiting_forks_trust_failed_rows, ANY_HASH),
    (branches_are_sampled_with_the_leaders_seed, ANY_HASH),
    (resumed_branches_are_sampled_with_the_requests_seed, ANY_HASH),
    (branches_that_have_begun_are_resumed_from_the_prompt, ANY_HASH),
    (places_of_branches_are_not_kept, ANY_HASH),
    (pins_do_not_stand_back, ANY_HASH),
    (pins_take_what_is_yet_to_be_filled, ANY_HASH),
    (pins_keep_what_a_failed_row_put_in_doubt, ANY_HASH),
    (priority_block_in_use_is_handed_out, ANY_HASH),
]


SWAP_MUTATIONS: list[Mutation] = [
    leaving_blocks_are_free_at_once,
    host_blocks_are_free_before_they_are_read,
    swapped_request_has_computed_one_token_more,
    swapped_request_loses_the_token_under_way,
    token_under_way_outlives_the_copy,
    last_block_is_not_copied,
    lost_copies_are_held,
    host_memory_outlives_its_executor,
    ended_request_keeps_its_host_blocks,
    whoever_waits_for_blocks_takes_more,
]


NOTICED_BY: dict[Mutation, int] = {
    old_incarnations_are_believed: 36,
    failed_rows_are_trusted: 14,
    victims_row_stays_in_the_step: 290,
    lost_copies_are_held: 8,
    places_of_branches_are_not_kept: 11,
    pins_keep_what_a_failed_row_put_in_doubt: 10,
    swapped_request_has_computed_one_token_more: 44,
    blocks_are_committed_when_scheduled: 3,
    host_memory_outlives_its_executor: 19,
    waiting_forks_write_in_place: 88,
    waiting_forks_trust_failed_rows: 37,
    waiting_forks_keep_their_tokens_when_they_let_go: 37,
}
"""Where seeds before it live on, and long, the first that notices; a seed that no longer does is followed by others."""


def seeds_for(mutation: Mutation) -> range:
    """Lives to try, until one of them notices."""
    first = NOTICED_BY.get(mutation, 1)
    return range(first, first + MAX_SEEDS)


@pytest.mark.parametrize(("mutation", "one_byte"), MUTATIONS, ids=lambda value: getattr(value, "__name__", ""))
def test_simulation_core_broken_on_purpose_notices(
    mutation: Mutation, one_byte: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutation(monkeypatch)
    require_notice(Life(seed, one_byte=one_byte, preemption_mode=RECOMPUTE) for seed in seeds_for(mutation))


@pytest.mark.parametrize("mutation", SWAP_MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_simulation_swap_broken_on_purpose_notices(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    require_notice(Life(seed, preemption_mode="swap", crowded=True) for seed in seeds_for(mutation))


def test_simulation_failed_content_that_survives_in_its_twin_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    failed_content_survives_in_its_twin(monkeypatch)
    with pytest.raises(AssertionError):
        live_through_a_failed_twin()


def test_simulation_copy_of_a_failed_row_that_is_trusted_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SwapSpace, "distrust", lambda self, request, root, distrusted: None)
    with pytest.raises(AssertionError):
        live_through_a_failed_copy()


def test_simulation_request_that_is_admitted_before_its_copy_is_there_gets_other_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only if the copy is lost, for an executor takes steps in order: few of the lives above come to that."""
    request_is_admitted_before_its_copy_is_there(monkeypatch)
    with pytest.raises(AssertionError, match="c got other tokens"):
        live_through_a_lost_copy()


def test_simulation_copies_come_a_step_late_none_outlives_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lives that follow each other in one test must not share what a mutation keeps."""
    copies_come_a_step_late(monkeypatch)
    first, second = KVCacheManager(5, 4), KVCacheManager(5, 4)
    copy = BlockCopy(CopyDirection.DEVICE_TO_DEVICE, 1, 2)
    first.copies.orders.append(copy)
    assert StepPlan(1, None, first, SchedulerConfig()).make_step([]).copies == []
    assert StepPlan(1, None, second, SchedulerConfig()).make_step([]).copies == []
    assert StepPlan(2, None, first, SchedulerConfig()).make_step([]).copies == [copy]


def test_simulation_free_order_reversed_is_noticed_by_the_hits_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of eviction changes no output: what it changes is how much of a prefix is found again."""

    def hits() -> int:
        total = 0
        for seed in (3, 9, 10, 11):  # whose requests share prefixes
            chaos = Chaos(Life(seed, faults=False, one_byte=False))
            chaos.run()
            total += chaos.world.scheduler.stats.prefix_hits
        return total

    in_order = hits()
    original = BlockPool.free_blocks
    monkeypatch.setattr(BlockPool, "free_blocks", lambda self, blocks: original(self, list(blocks)[::-1]))
    assert hits() < in_order
