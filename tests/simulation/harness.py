"""A scheduler and a `sim` executor in one thread, joined by real wire messages: every run of a seed is the same run."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from kvplane.executor.v1 import executor_service_pb2 as pb

from executor_service.backends.base import STATE, BlockCopies, CopyDirection, RowFailure, StepBatch, StepResult
from executor_service.backends.sim_backend import SimBackend, SimBackendConfig
from executor_service.input_batch import parse_step
from executor_service.kv_session import KvSession
from executor_service.step_response import build_response
from kvmanager_service.core.block_tag import decode_tag
from kvmanager_service.core.kv_cache import KVCache, table_sizes
from kvmanager_service.core.kv_cache_manager import KVCacheManager
from kvmanager_service.core.kv_groups import ChunkedLocal, FullAttention, KVGroup, RecurrentState, SlidingWindow
from kvmanager_service.core.request import TOKEN_BYTES, FinishReason
from kvmanager_service.core.scheduler import Scheduler
from kvmanager_service.core.scheduler_config import SchedulerConfig
from kvmanager_service.executor_groups import longest_fit
from kvmanager_service.step_message import build_execute_request, read_execute_response

VOCAB_SIZE = 32_000
MAX_POOL_TOKENS = 10_000
"""Of a pool whose groups all have windows: it holds sequences of any length."""


def kv_groups(block_size: int, windows: tuple[int, ...], factors: tuple[int, ...] = ()) -> list[KVGroup]:
    """The core's groups for a sim executor's windows; a factor is what a group's blocks are longer by."""
    windows = windows or (0,)
    sizes = [block_size * factor for factor in factors or (1,) * len(windows)]
    return [kv_group(size, window) for size, window in zip(sizes, windows, strict=True)]


def kv_group(block_size: int, window: int) -> KVGroup:
    if window == STATE:
        return RecurrentState(block_size)
    if window < STATE:
        return ChunkedLocal(block_size, -window)
    return SlidingWindow(block_size, window) if window else FullAttention(block_size)


def first_read(position: int, window: int) -> int:
    """The first position that the token at a position reads, by the definition of each type of group."""
    if window < STATE:
        return position - position % -window
    # A state reads as a window of two tokens does: the newest one before it, and itself.
    return max(0, position - (2 if window == STATE else window) + 1) if window else 0


def pool_tokens(
    num_blocks: int,
    block_size: int,
    config: SchedulerConfig,
    windows: tuple[int, ...],
    factors: tuple[int, ...] = (),
) -> int:
    """Tokens of the longest sequence that the pool holds."""
    if not windows:
        return (num_blocks - 1) * block_size
    groups = kv_groups(block_size, windows, factors)
    return longest_fit(groups, num_blocks - 1, MAX_POOL_TOKENS, config.max_num_batched_tokens)


class FailingSimBackend(SimBackend):
    """A sim backend whose next step can fail in some rows: they write garbage and say so.

    It copies to the host after the rows were computed, which is later than it should: whoever has a block overwritten
    before its copy is acknowledged finds that out.
    """

    def __init__(self, config: SimBackendConfig) -> None:
        super().__init__(config)
        self.rows_to_fail: list[int] = []
        self._late_copies: list[BlockCopies] = []

    def copy_blocks(self, copies: Sequence[BlockCopies]) -> None:
        self._late_copies = [run for run in copies if run.direction is CopyDirection.DEVICE_TO_HOST]
        super().copy_blocks([run for run in copies if run.direction is not CopyDirection.DEVICE_TO_HOST])

    def finish_copies(self) -> None:
        """The step is about to be acknowledged."""
        copies, self._late_copies = self._late_copies, []
        super().copy_blocks(copies)

    def execute(self, batch: StepBatch) -> StepResult:
        rows, self.rows_to_fail = self.rows_to_fail, []
        token_ids = batch.token_ids.copy()
        for row in rows:
            token_ids[batch.query_indptr[row] : batch.query_indptr[row + 1]] += 1
        result = super().execute(dataclasses.replace(batch, token_ids=token_ids))
        failures = [RowFailure(row, "NON_FINITE_LOGITS", "the simulation wants it so") for row in rows]
        return dataclasses.replace(result, failures=failures)


class SimExecutor:
    """The executor's own code without its server; steps wait in a queue, as they do in its stream.

    Attributes:
        token_us, copy_us: what it says that a token and the copy of a block took, in microseconds.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        config: SchedulerConfig,
        num_host_blocks: int = 0,
        windows: tuple[int, ...] = (),
        *,
        factors: tuple[int, ...] = (),
    ) -> None:
        self.token_us = self.copy_us = 0
        self.backend = FailingSimBackend(
            SimBackendConfig(
                # Of windows a sequence may get longer than what is promised to fit, and still run.
                max_model_len=MAX_POOL_TOKENS if windows else (num_blocks - 1) * block_size,
                block_size=block_size,
                sim_num_blocks=MAX_POOL_TOKENS * len(windows) + 1 if windows else num_blocks,
                swap_space=num_host_blocks * block_size * max(factors or (1,)) * 8,
                sim_vocab_size=VOCAB_SIZE,
                sim_windows=windows,
                sim_block_sizes=tuple(block_size * factor for factor in factors),
            )
        )
        self.session = KvSession(self.backend)
        self.session.load()
        self.session.profile(config.max_num_batched_tokens, config.max_num_seqs)
        self.limits = self.session.initialize(num_blocks, num_host_blocks).limits
        self.queue: deque[bytes] = deque()
        self.last_sampled = np.empty(0, np.int32)

    @property
    def kv_epoch(self) -> int:
        return self.limits.kv_epoch

    def send(self, message: pb.ExecuteRequest) -> None:
        self.queue.append(message.SerializeToString())

    def compute(self) -> pb.ExecuteResponse:
        """Run the oldest queued step."""
        request = pb.ExecuteRequest.FromString(self.queue.popleft())
        outcome = self.session.run(request.step_id, parse_step(request, self.limits), self.last_sampled)
        self.backend.finish_copies()
        self.last_sampled = outcome.sampled_token_ids
        message = build_response(request.step_id, self.kv_epoch, outcome, compute_us=0, queue_us=0)
        # Times that pass are not the same in every run of a seed.
        message.copy_us = self.copy_us * (len(request.copies.source_ids.data) // TOKEN_BYTES)
        message.compute_us = self.token_us * (len(request.token_ids.data) // TOKEN_BYTES) + message.copy_us
        return pb.ExecuteResponse.FromString(message.SerializeToString())

    def break_stream(self) -> None:
        """What is queued is not run."""
        self.queue.clear()
        self.backend.rows_to_fail = []
        self.last_sampled = np.empty(0, np.int32)


@dataclass
class Produced:
    """What a client has received of one request."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: Exception | None = None


class World:
    """Everything between a client and a slot, with books on what clients have received.

    Args:
        num_blocks: of the executor's cache, the null block included.
        block_size: tokens per block.
        config: the scheduler's.
        make_kv: from num_blocks and block_size to an empty KV cache manager.
        num_host_blocks: blocks in the executor's host memory.
        token_us: microseconds that the executor says a token takes.
        copy_us: the same for the copy of a block.
        windows: of the executor's KV groups, 0 for full attention; none is one group of full attention.
        factors: of each of them, how many times block_size its blocks have; none is once.

    Attributes:
        kv_epoch: of the cache that the books are about.
        former_epoch: of the one before, 0 before the executor was replaced.
        watch: called after every call of the scheduler, by one who wants to see what a single one has done.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        config: SchedulerConfig | None = None,
        make_kv: Callable[[int, int], KVCache] = KVCacheManager,
        *,
        num_host_blocks: int = 0,
        token_us: int = 0,
        copy_us: int = 0,
        windows: tuple[int, ...] = (),
        factors: tuple[int, ...] = (),
    ) -> None:
        self.windows = windows
        self.factors = factors
        self.config = config or SchedulerConfig()
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_host_blocks = num_host_blocks
        self._times = token_us, copy_us
        self.executor = self._make_executor()
        self.kv_epoch, self.former_epoch = self.executor.kv_epoch, 0
        self.make_kv = make_kv
        self.scheduler = Scheduler(self.config, make_kv(num_blocks, block_size), num_host_blocks)
        self.produced: dict[str, Produced] = {}
        self.watch: Callable[[], None] = lambda: None

    def _make_executor(self) -> SimExecutor:
        executor = SimExecutor(
            self.num_blocks, self.block_size, self.config, self.num_host_blocks, self.windows, factors=self.factors
        )
        executor.token_us, executor.copy_us = self._times
        return executor

    def schedule(self) -> bool:
        """Schedule and send as many steps as may be out. Returns whether any was."""
        sent = False
        while (step := self.scheduler.schedule()) is not None:
            self.watch()
            sizes = table_sizes(self.scheduler.kv)
            self.executor.send(build_execute_request(step, self.kv_epoch, self.block_size, sizes))
            sent = True
        self.publish()
        return sent

    def complete(self) -> None:
        """Compute the oldest step and take its result."""
        self.take(self.executor.compute())
        self.publish()

    def take(self, response: pb.ExecuteResponse) -> None:
        """Take a result as the manager does. Raises BadResultError for one that is not what it waits for."""
        self.scheduler.update(read_execute_response(response, self.kv_epoch))

    def lose_stream(self) -> None:
        """The stream breaks; queued steps are not run."""
        self.executor.break_stream()
        self.scheduler.lose_steps()
        self.publish()

    def replace_executor(
        self, num_blocks: int | None = None, block_size: int | None = None, num_host_blocks: int | None = None
    ) -> None:
        """The executor dies and another, empty one takes its place."""
        self.num_blocks = num_blocks or self.num_blocks
        self.block_size = block_size or self.block_size
        self.num_host_blocks = self.num_host_blocks if num_host_blocks is None else num_host_blocks
        self.executor = self._make_executor()
        self.kv_epoch, self.former_epoch = self.executor.kv_epoch, self.kv_epoch
        self.scheduler.replace_cache(self.make_kv(self.num_blocks, self.block_size), self.num_host_blocks)
        self.publish()

    def adopt_cache(self) -> int:
        """The manager forgets its books and makes new ones from the executor's tags. Returns how many it adopted."""
        self.executor.break_stream()
        tags = self.executor.session.list_tags(self.executor.kv_epoch)
        kv = self.make_kv(self.num_blocks, self.block_size)
        adopted = kv.adopt([tagged for block_id, tag in tags.items() if (tagged := decode_tag(block_id, tag))])
        self.scheduler.replace_cache(kv, self.num_host_blocks)
        self.publish()
        return adopted

    def publish(self) -> None:
        for output in self.scheduler.take_outputs():
            produced = self.produced.setdefault(output.request_id, Produced())
            assert produced.finish_reason is None, f"{output.request_id} was told something after its end"
            produced.token_ids += output.token_ids
            produced.finish_reason = output.finish_reason
            produced.error = output.error

    def step(self) -> bool:
        """One turn of the engine loop. Returns whether there was anything to do."""
        self.schedule()
        if self.scheduler.outstanding:
            self.complete()
            return True
        return self.scheduler.has_work and self.schedule()

    def run(self, max_turns: int = 100_000) -> None:
        """Run until nothing is left to do."""
        for _ in range(max_turns):
            if not self.scheduler.has_work:
                return
            assert self.step() or not self.scheduler.has_work, "there is work and nothing was scheduled"
        raise AssertionError(f"not done after {max_turns} turns")
