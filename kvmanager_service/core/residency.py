"""What of requests is where: blocks on the device, copies on the host, pins, and what the executor is to be told of it.

Station: owned by `Scheduler`, which says what happens to requests and steps. It keeps `KVCacheManager` (or
`KVCacheCoordinator`), `SwapSpace`, `ForkHolds`, `PinnedPrefixes` and `TagOutbox` of one mind, and stays when a cache is
replaced. It knows no queue: whom to admit, to preempt or to schedule anew, the scheduler decides.

    admit ─▶ on the device ─leave▶ on the host, in the prefix cache or nowhere ─admit▶ …
                   └──────── end ▶ in the prefix cache
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from kvmanager_service.core.block import KVCacheBlock
from kvmanager_service.core.fork_holds import ForkHolds
from kvmanager_service.core.kv_cache import KVCache
from kvmanager_service.core.kv_cache_manager import NONE_LEAVING
from kvmanager_service.core.pinned_prefixes import PinnedPrefixes
from kvmanager_service.core.request import Request
from kvmanager_service.core.scheduler_config import RECOMPUTE, SchedulerConfig
from kvmanager_service.core.step import ScheduledRow, SchedulerStats, Step, StepResult
from kvmanager_service.core.step_plan import StepPlan
from kvmanager_service.core.swap_policy import SwapPolicy
from kvmanager_service.core.swap_space import SwapSpace
from kvmanager_service.core.tag_outbox import TagOutbox
from kvmanager_service.core.victims import choose_victims, forks_beside_pins


class Residency:
    """The memory of one executor at a time.

    Args:
        config: the limits.
        kv: the block tables.
        num_host_blocks: blocks in the executor's host memory; without them preempted requests compute again.
        stats: where is counted who was swapped, and what replaced pools have evicted.

    Attributes:
        kv: the block tables; what grows a running request's is asked of them.
        forks: those that wait, and hold blocks.
        pins: what stays in the cache.
        swap_space: what is in host memory; None where nothing can be.
        tags: what the next step takes along.
    """

    def __init__(self, config: SchedulerConfig, kv: KVCache, num_host_blocks: int, stats: SchedulerStats) -> None:
        self.kv = kv
        self.forks = ForkHolds(kv)
        self.pins = PinnedPrefixes(config.max_pinned_fraction)
        self.pins.attach(kv)
        self.tags = TagOutbox(kv.pool)
        self._swap_policy = None if config.preemption_mode == RECOMPUTE else SwapPolicy(config.preemption_mode)
        self._stats = stats
        self.swap_space = self._make_swap_space(num_host_blocks)

    def _make_swap_space(self, num_host_blocks: int) -> SwapSpace | None:
        if self._swap_policy is None or not num_host_blocks:
            return None
        return SwapSpace(self.kv, num_host_blocks, self._swap_policy, self._stats)

    def replace(self, kv: KVCache, num_host_blocks: int) -> None:
        """The executor's memory is gone or another one; no request is on the device, no step is out."""
        assert not self.forks, "steps were not lost before the cache"
        self._stats.blocks_evicted += self.kv.pool.num_evictions
        if self.swap_space is not None:
            self.swap_space.forget_all()
        self.kv = kv
        self.forks = ForkHolds(kv)
        self.tags = TagOutbox(kv.pool)
        self.swap_space = self._make_swap_space(num_host_blocks)
        self.pins.attach(kv)

    # --- requests come and go -------------------------------------------------------------------------------------

    def admit(self, request: Request, reserve: int, plan: StepPlan) -> bool:
        """Give a waiting request its blocks, if that leaves `reserve` blocks free; what the host holds is ordered back.

        Returns:
            False when too few are free, or its own are still on their way to the host; then nothing has changed.
        """
        if request in self.forks:
            return self._admit_fork(request, reserve)
        swap_space = self.swap_space
        if swap_space is None:
            return self.kv.allocate_sequence(request, reserve)
        if swap_space.is_leaving(request) or not self.kv.allocate_sequence(request, reserve):
            return False
        swap_space.bring_back(request, plan)
        return True

    def _admit_fork(self, fork: Request, reserve: int) -> bool:
        """It has blocks already: give it those of the rest of its known sequence."""
        if self.kv.num_lacking(fork, fork.num_tokens, reserve):
            return False
        self.forks.discard(fork)
        return self.kv.allocate_slots(fork, fork.num_tokens)

    def let_go(self, fork: Request) -> None:
        """A fork that waits gives its blocks back; it is then as any request that waits."""
        self.forks.discard(fork)
        self.kv.free(fork)

    def leave(self, request: Request, plan: StepPlan | None) -> bool:
        """Take a running request's blocks; `plan`, where there is one, may order copies of them to the host.

        Returns:
            Whether it takes what is being sampled for it, see `SwapSpace.leave`.
        """
        keeps_samples = self.swap_space is not None and self.swap_space.leave(request, plan)
        self.kv.free(request)
        return keeps_samples

    def end(self, request: Request) -> None:
        """A request has ended, wherever it stood."""
        self.forks.discard(request)
        self.kv.free(request)
        if self.swap_space is not None:
            self.swap_space.forget(request)

    # --- blocks run short -----------------------------------------------------------------------------------------

    def awaits_host(self, request: Request, num_tokens: int, plan: StepPlan, *, is_alone: bool) -> bool:
        """Whether blocks on their way to the host may suffice for a running request's first num_tokens tokens."""
        if self.swap_space is None:
            return False
        return self.swap_space.will_have_room(request, num_tokens, plan) or (is_alone and self._others_await_host())

    @property
    def leaving(self) -> Mapping[KVCacheBlock, int]:
        """References that will be dropped once all on its way to the host is acknowledged, by block."""
        return NONE_LEAVING if self.swap_space is None else self.swap_space.leaving

    def num_missing(self, request: Request, num_tokens: int, plan: StepPlan) -> int:
        """Blocks that a running request's first num_tokens tokens lack, what is on its way to the host being free."""
        if self.swap_space is None:
            return self.kv.num_lacking(request, num_tokens)
        return self.swap_space.num_missing(request, num_tokens, plan)

    def make_room_among_forks(self, request: Request, reserve: int) -> bool:
        """Let forks that wait let go for whoever is next, if its blocks then leave `reserve` blocks free.

        They do not as long as something may come free on its way to the host.

        Returns:
            Whether it finds enough blocks now, and did not before; if not, nothing has changed. It may be asked at each
            step, however long the prefix is, and however many forks there are.
        """
        kv, forks = self.kv, self.forks
        if not len(forks) or self._others_await_host():
            return False
        if request not in forks:  # otherwise it has a table, and what that lacks is soon told
            num_alone = len(forks.alone())
            if not num_alone or not kv.may_fit(request, reserve - num_alone):
                return False
        num_missing = kv.num_lacking(request, request.num_tokens, reserve)
        chosen = choose_victims((), kv, request, num_missing, holds=forks) if num_missing else []
        for fork in chosen:
            self.let_go(fork)
        return bool(chosen)

    def make_room(self, request: Request, num_tokens: int) -> bool:
        """Let forks that wait, and then pins, stand back for a request that is alone, or next where nobody runs.

        They do not as long as something may come free on its way to the host.

        Returns:
            Whether its first num_tokens tokens find enough blocks now, and did not before; if not, nothing has changed.
        """
        if self._others_await_host():
            return False
        kv, forks = self.kv, self.forks
        num_missing = kv.num_lacking(request, num_tokens) if len(forks) else 0
        if num_missing:
            chosen = choose_victims((), kv, request, num_missing, holds=forks)
            is_enough = bool(chosen)
            if not is_enough:
                num_missing -= self.pins.num_helpful(request)
                chosen = forks_beside_pins(forks, kv, request, num_missing, self.pins.references())
            for fork in chosen:
                self.let_go(fork)
            if is_enough:
                return True
        return self.pins.make_room(request, num_tokens)

    def _others_await_host(self) -> bool:
        """Whether somebody could stand back, but need not before it is known what comes free on its way to the host."""
        could_stand_back = self.pins.num_held_blocks > 0 or len(self.forks) > 0
        return could_stand_back and self.swap_space is not None and self.swap_space.has_leaving

    # --- steps come back, or do not -------------------------------------------------------------------------------

    def acknowledged(self, step: Step, result: StepResult) -> None:
        """A step was computed, its copies are done; what its failed rows wrote is distrusted by now."""
        if self.swap_space is not None:
            self.swap_space.acknowledged(step, result)
        self.tags.committed(self.kv.pool.commit_step(step.step_id))
        self.pins.hold()

    def distrust(
        self, row: ScheduledRow, step_id: int, failed: Sequence[Request], forked: Sequence[Request]
    ) -> set[KVCacheBlock]:
        """A row failed: un-hash what it filled or read, on the device and on the host; no pin holds it any more.

        Args:
            row: the failed one.
            step_id: the step that it was in.
            failed: the requests that it computed for and that still live that life; the row's own may be among them.
            forked: requests that were forked since from what it wrote.

        Returns:
            All blocks that lost their content; whoever else holds one must be scheduled anew.
        """
        request = row.request
        is_current = request in failed
        root = request.contents[0] if is_current and request.contents else None
        distrusted = self.kv.distrust(request, step_id, with_table=is_current)
        for branch in (*failed, *forked):
            if branch is not request:
                distrusted |= self.kv.distrust(branch, step_id, with_table=True)
        self.tags.forgotten(distrusted)
        if self.swap_space is not None:
            self.swap_space.distrust(request, root, distrusted)
        for fork in self.forks.newest_first():
            if self.kv.relies_on(fork, distrusted):
                self.let_go(fork)
        self.pins.distrusted()
        return distrusted

    def lose(self, lost: Sequence[Step]) -> None:
        """All outstanding steps are lost: nothing that they would have filled or copied is there.

        Forks that wait let go of their blocks, as all that run are about to.
        """
        for fork in self.forks.newest_first():
            self.let_go(fork)
        self.tags.lost(lost)
        self.kv.pool.forget_provisional()
        if self.swap_space is not None:
            self.swap_space.lose(lost)

    def reset(self) -> int:
        """Forget every cached block, and what was swapped out; no request runs. Returns how many were cached."""
        for fork in self.forks.newest_first():
            self.let_go(fork)
        if self.swap_space is not None:
            self.swap_space.forget_all()
        self.pins.forget()
        forgotten = self.kv.pool.reset_prefix_cache()
        self.tags.forgotten(forgotten)
        return len(forgotten)

    # --- checks ---------------------------------------------------------------------------------------------------

    def check_integrity(self, running: Iterable[Request], outstanding: Iterable[Step]) -> None:
        """Check that every reference is somebody's, given who runs and which steps are out. Raises AssertionError."""
        detached = self.pins.tables()
        if self.swap_space is not None:
            detached += self.swap_space.tables()
            self.swap_space.check_integrity([step.step_id for step in outstanding])
        self.forks.check_integrity()
        self.kv.check_integrity(chain(running, self.forks.newest_first()), detached)
