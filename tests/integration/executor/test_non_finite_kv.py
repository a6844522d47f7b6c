"""A chunk of a prompt that computes NaN: its row fails in the executor, and the manager's core keeps nothing of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from kvplane.executor.v1 import executor_service_pb2 as pb

from executor_service.backends.torch_backend import TorchBackend, TorchBackendConfig
from executor_service.input_batch import parse_step
from executor_service.kv_session import KvSession
from executor_service.step_response import build_response
from kvmanager_service.core.errors import RowFailedError
from kvmanager_service.core.kv_cache_manager import KVCacheManager
from kvmanager_service.core.request import FinishReason, NewRequest, RequestOutput, SamplingParams, StopRules
from kvmanager_service.core.scheduler import Scheduler
from kvmanager_service.core.scheduler_config import SchedulerConfig
from kvmanager_service.core.step import Step
from kvmanager_service.step_message import build_execute_request, read_execute_response
from tests.unit.executor.step_builder import prompt_of, reference_tokens, save_tiny_model

BLOCK_SIZE = 8
NUM_BLOCKS = 40
CHUNK = 32
POISON = 2


class Pair:
    """The core's scheduler and an executor's session with a model for which one token's embedding is not finite."""

    def __init__(self, folder: Path, value: float) -> None:
        config = SchedulerConfig(max_num_batched_tokens=CHUNK + 1, max_outstanding=1, watermark=0.0)
        self.scheduler = Scheduler(config, KVCacheManager(NUM_BLOCKS, BLOCK_SIZE))
        backend = TorchBackend(
            TorchBackendConfig(
                str(folder), device="cpu", block_size=BLOCK_SIZE, memory_limit=8 << 30, num_blocks_override=NUM_BLOCKS
            )
        )
        self.session = KvSession(backend)
        self.session.load()
        with torch.inference_mode():
            backend._ready().loaded.model.get_input_embeddings().weight[POISON] = value
        self.session.profile(config.max_num_batched_tokens, config.max_num_seqs)
        self.limits = self.session.initialize(NUM_BLOCKS).limits

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        self.scheduler.add_request(
            NewRequest(
                request_id,
                np.array(prompt, dtype="<i4").tobytes(),
                StopRules(max_tokens),
                SamplingParams(temperature=0.0),
            )
        )

    def step(self) -> tuple[Step, dict[str, RequestOutput]]:
        """One step through both sides, every message as bytes; what each client is told after it."""
        step = self.scheduler.schedule()
        assert step is not None
        message = build_execute_request(step, self.limits.kv_epoch, BLOCK_SIZE).SerializeToString()
        request = pb.ExecuteRequest.FromString(message)
        outcome = self.session.run(request.step_id, parse_step(request, self.limits), np.empty(0, np.int32))
        response = build_response(request.step_id, self.limits.kv_epoch, outcome, compute_us=0, queue_us=0)
        answer = pb.ExecuteResponse.FromString(response.SerializeToString())
        self.scheduler.update(read_execute_response(answer, self.limits.kv_epoch))
        self.scheduler.check_integrity()
        return step, {output.request_id: output for output in self.scheduler.take_outputs()}


def test_middle_chunk_with_nan_fails_and_no_later_request_hits_it(tmp_path: Path) -> None:
    pair = Pair(save_tiny_model(tmp_path, "llama"), float("nan"))
    neighbour = prompt_of(9, 1)
    poisoned = prompt_of(3 * CHUNK, 2)
    poisoned[CHUNK - 3] = POISON
    pair.add("neighbour", neighbour, max_tokens=4)
    _, told = pair.step()
    produced = list(told["neighbour"].token_ids)

    pair.add("poisoned", poisoned, max_tokens=4)
    step, told = pair.step()

    assert [(row.request.request_id, row.num_tokens, row.sample_index) for row in step.rows] == [
        ("neighbour", 1, 0),
        ("poisoned", CHUNK, -1),
    ]
    failed = told["poisoned"]
    assert failed.finish_reason is FinishReason.ERROR
    assert isinstance(failed.error, RowFailedError)
    assert failed.error.reason == "NON_FINITE_KV"
    assert pair.session.list_tags(pair.limits.kv_epoch).keys() <= {
        block.block_id for block in pair.scheduler.kv.pool.blocks if block.content is not None
    }

    pair.add("sharer", [*poisoned[: CHUNK - 8], *prompt_of(4, 3)], max_tokens=2)
    step, more = pair.step()
    produced += [*told["neighbour"].token_ids, *more["neighbour"].token_ids]

    assert [(row.request.request_id, row.start) for row in step.rows if row.request.request_id == "sharer"] == [
        ("sharer", 0)
    ]
    expected = reference_tokens(tmp_path, [*poisoned[: CHUNK - 8], *prompt_of(4, 3)], 1)
    assert list(more["sharer"].token_ids) == expected
    assert produced == reference_tokens(tmp_path, neighbour, 3)


def test_chunk_of_finite_numbers_is_hit_by_the_next_request(tmp_path: Path) -> None:
    pair = Pair(save_tiny_model(tmp_path, "llama"), float("nan"))
    prompt = prompt_of(3 * CHUNK, 2)
    pair.add("first", prompt, max_tokens=4)
    pair.step()

    pair.add("second", prompt[: CHUNK + 2], max_tokens=2)
    starts = []
    while not starts:
        step, _ = pair.step()
        starts = [row.start for row in step.rows if row.request.request_id == "second"]

    assert starts[0] >= CHUNK
