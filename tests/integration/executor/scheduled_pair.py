"""The core's scheduler and an executor's session as a pair, without processes, and what their tokens are held to."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import numpy as np
from kvplane.executor.v1 import executor_service_pb2 as pb

from executor_service.backends.torch_backend import TorchBackend, TorchBackendConfig
from executor_service.input_batch import parse_step
from executor_service.kv_session import KvSession
from executor_service.step_response import build_response
from kvmanager_service.core.block_tag import decode_tag
from kvmanager_service.core.kv_cache import table_sizes
from kvmanager_service.core.kv_cache_coordinator import KVCacheCoordinator
from kvmanager_service.core.request import FinishReason, NewRequest, SamplingParams, StopRules
from kvmanager_service.core.scheduler import Scheduler
from kvmanager_service.core.scheduler_config import SchedulerConfig
from kvmanager_service.step_message import build_execute_request, read_execute_response
from tests.simulation.harness import kv_group
from tests.unit.executor.step_builder import reference_tokens

BLOCK_SIZE = 4
CHUNK = 24
NEW_TOKENS = 40
MAX_LEN = 128


class Pair:
    """The core's scheduler and an executor's session, steps queued two deep, every message as bytes."""

    def __init__(
        self, folder: Path, num_blocks: int, kind: type[TorchBackend] = TorchBackend, *, num_host_blocks: int = 0
    ) -> None:
        backend = kind(
            TorchBackendConfig(
                str(folder),
                device="cpu",
                max_model_len=MAX_LEN,
                block_size=BLOCK_SIZE,
                state_interval=BLOCK_SIZE,
                memory_limit=8 << 30,
                num_blocks_override=num_blocks,
                swap_space=num_host_blocks * 4096,  # more than a block of any of the models
            )
        )
        config = SchedulerConfig(
            max_num_batched_tokens=CHUNK,
            max_num_seqs=8,
            max_outstanding=2,
            watermark=0.0,
            preemption_mode="swap" if num_host_blocks else "recompute",
        )
        self.session = KvSession(backend)
        self.windows = tuple(group.window for group in self.session.load().kv_groups)
        self.session.profile(config.max_num_batched_tokens, config.max_num_seqs)
        self.limits = self.session.initialize(num_blocks, num_host_blocks).limits
        self.num_blocks = num_blocks
        self.scheduler = Scheduler(config, self.make_kv(), num_host_blocks)
        self.sent: deque[bytes] = deque()
        self.sampled = np.empty(0, np.int32)
        self.outputs: dict[str, list[int]] = {}
        self.reasons: dict[str, FinishReason] = {}

    def make_kv(self) -> KVCacheCoordinator:
        sizes = zip(self.limits.group_block_sizes, self.windows, strict=True)
        groups = [kv_group(size, window) for size, window in sizes]
        return KVCacheCoordinator(self.num_blocks, groups, longest_chunk=CHUNK)

    def restart_manager(self) -> int:
        """New books from what the executor has tagged; returns how many blocks they took over."""
        assert not self.sent
        tags = self.session.list_tags(self.limits.kv_epoch)
        kv = self.make_kv()
        adopted = kv.adopt([tag for block_id, data in tags.items() if (tag := decode_tag(block_id, data))])
        self.scheduler.replace_cache(kv)
        return adopted

    def run(self, prompts: dict[str, list[int]], max_tokens: int = NEW_TOKENS) -> dict[str, list[int]]:
        """Let requests come one a step, and work until all have ended; their outputs."""
        waiting = dict(prompts)
        while waiting or self.scheduler.has_work or self.sent:
            if waiting:
                request_id = next(iter(waiting))
                prompt = np.array(waiting.pop(request_id), dtype="<i4").tobytes()
                greedy = SamplingParams(temperature=0.0)
                self.scheduler.add_request(NewRequest(request_id, prompt, StopRules(max_tokens), greedy))
            while (step := self.scheduler.schedule()) is not None:
                message = build_execute_request(
                    step, self.limits.kv_epoch, self.limits.block_size, table_sizes(self.scheduler.kv)
                )
                self.sent.append(message.SerializeToString())
            if self.sent:
                self._compute()
            self.scheduler.check_integrity()
        assert {self.reasons[request_id] for request_id in prompts} == {FinishReason.LENGTH}
        return {request_id: self.outputs[request_id] for request_id in prompts}

    def _compute(self) -> None:
        request = pb.ExecuteRequest.FromString(self.sent.popleft())
        outcome = self.session.run(request.step_id, parse_step(request, self.limits), self.sampled)
        self.sampled = outcome.sampled_token_ids
        response = build_response(request.step_id, self.limits.kv_epoch, outcome, compute_us=0, queue_us=0)
        message = pb.ExecuteResponse.FromString(response.SerializeToString())
        self.scheduler.update(read_execute_response(message, self.limits.kv_epoch))
        for output in self.scheduler.take_outputs():
            self.outputs.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.reasons[output.request_id] = output.finish_reason


def check(
    folder: Path, prompts: dict[str, list[int]], outputs: dict[str, list[int]], new_tokens: int = NEW_TOKENS
) -> None:
    for request_id, prompt in prompts.items():
        expected = reference_tokens(folder, prompt, new_tokens)
        assert len(set(expected)) > new_tokens // 8, "a model whose tokens tell something"
        assert outputs[request_id] == expected, request_id
