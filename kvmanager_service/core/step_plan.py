"""A step in the making: which rows it has so far, and how many tokens it may still take.

Station: made by `Scheduler.schedule` and filled by `StepPlanner`, which decides who gets a row; the plan knows what a
row is and when its tokens count as computed.

    add ─▶ row ─claim▶ final row ─▶ make_step
            └─ drop (its request was preempted for another)
"""

from __future__ import annotations

from kvmanager_service.core.kv_cache import KVCache
from kvmanager_service.core.request import Request
from kvmanager_service.core.scheduler_config import SchedulerConfig
from kvmanager_service.core.step import Branch, ScheduledRow, Step
from kvmanager_service.core.tag_outbox import Tag


class StepPlan:
    """Rows in the order they were added.

    Args:
        step_id: the step's.
        previous: the newest outstanding step, None when none is out.
        kv: where full blocks become findable.
        config: the limits.

    Attributes:
        step_id: the step's.
        rows: in the order they were added. One that is dropped is gone when rows are claimed.
        copies: what blocks are to be copied before the rows write, in order: `kv.copies.orders`, and what others add.
        num_awaited: blocks, on their way to the host, that running requests wait for.
        budget: tokens that may still be added.
    """

    def __init__(self, step_id: int, previous: Step | None, kv: KVCache, config: SchedulerConfig) -> None:
        self.step_id = step_id
        self.rows: list[ScheduledRow] = []
        self.copies = kv.copies.orders
        self.num_awaited = 0
        self.budget = config.max_num_batched_tokens
        self._longest_chunk = config.long_prefill_token_threshold or config.max_num_batched_tokens
        self._awaited: dict[int, int] = {}  # arrival_seq -> blocks
        self._row_of: dict[int, ScheduledRow] | None = None  # by arrival_seq; made when the first is dropped
        self._previous = previous
        self._kv = kv

    def chunk(self, request: Request) -> int:
        """How many of its next tokens this step can take."""
        longest = min(self.budget, self._longest_chunk)
        return min(request.num_schedulable_tokens, longest)

    def add(self, request: Request, num_tokens: int) -> ScheduledRow:
        """Compute its next num_tokens tokens; its table has the blocks for them."""
        row = ScheduledRow(request, num_tokens)
        self.rows.append(row)
        if self._row_of is not None:
            self._row_of[request.arrival_seq] = row
        self.budget -= num_tokens
        return row

    def wait(self, request: Request, num_blocks: int) -> None:
        """Compute nothing of this request before so many blocks have come free; it has no row."""
        self.num_awaited += num_blocks - self._awaited.get(request.arrival_seq, 0)
        self._awaited[request.arrival_seq] = num_blocks

    def num_awaited_by(self, request: Request) -> int:
        """Blocks that this request waits for."""
        return self._awaited.get(request.arrival_seq, 0)

    def drop(self, request: Request) -> None:
        """Compute nothing of this request, which need not have a row; and it waits for no blocks."""
        self.num_awaited -= self._awaited.pop(request.arrival_seq, 0)
        if self._row_of is None:
            self._row_of = {row.request.arrival_seq: row for row in self.rows}
        row = self._row_of.pop(request.arrival_seq, None)
        if row is not None:
            self.budget += row.num_tokens

    def claim_all(self) -> None:
        """Nobody's row will be dropped any more."""
        if self._row_of is not None:
            self.rows = list(self._row_of.values())
            self._row_of = None
        for row in self.rows:
            self.claim(row)

    def claim(self, row: ScheduledRow) -> None:
        """The row is final: its tokens count as computed and its full blocks can be found, provisionally."""
        request = row.request
        if row.stop > request.num_tokens:
            assert self._previous is not None
            assert request.last_step_id == self._previous.step_id
            row.feeds_from = request.last_sample_index
        request.num_computed_tokens = row.stop
        request.last_step_id = self.step_id
        self._kv.cache_blocks(request, self.step_id)

    def samples(self, row: ScheduledRow) -> bool:
        """Whether a claimed row computes all tokens of its request, so that the next one is sampled after it."""
        return row.stop == row.request.num_tokens + row.request.num_pending_tokens

    def branch(self, row_index: int, request: Request) -> None:
        """Let a row that samples do so for another request, too, whose tokens and table are the row's.

        All rows are claimed by now: none is dropped that would change the others' places.
        """
        row = self.rows[row_index]
        if row.branches is None:
            row.branches = []
        row.branches.append(Branch(row, row_index, request))
        request.last_step_id = self.step_id

    def make_step(self, tags: list[Tag]) -> Step:
        """The step as it is sent; every row was claimed."""
        num_tokens = num_samples = 0
        feeds_from_step_id = 0
        branches: list[Branch] = []
        for row in self.rows:
            request = row.request
            num_tokens += row.num_tokens
            if row.feeds_from >= 0:
                assert self._previous is not None
                feeds_from_step_id = self._previous.step_id
            request.last_sample_index = -1
            if row.stop == request.num_tokens + request.num_pending_tokens:
                row.sample_index = request.last_sample_index = num_samples
                num_samples += 1
                row.suppress_stop = request.num_output_tokens + request.num_pending_tokens < request.min_tokens
                request.num_pending_tokens += 1
                if row.branches is None:
                    continue
                for branch in row.branches:
                    branch.sample_index = branch.request.last_sample_index = num_samples
                    num_samples += 1
                    branch.request.num_pending_tokens += 1
                    branches.append(branch)
        return Step(
            self.step_id,
            self.rows,
            num_tokens,
            num_samples,
            feeds_from_step_id=feeds_from_step_id,
            tags=tags,
            copies=self._kv.take_copies(),
            branches=branches,
        )
