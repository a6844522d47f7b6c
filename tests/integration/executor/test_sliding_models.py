"""Models with sliding windows through scheduler, messages and the torch backend: the tokens are transformers' own.

Small random models in float32. Mistral has one KV group, a window in every layer; Gemma 3 has four here: one of two
full layers, and three of sliding ones, of which the last has one layer and leaves a page unused.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

import numpy as np
import pytest
from kvplane.executor.v1 import executor_service_pb2 as pb

from executor_service.backends.torch_backend import TorchBackend, TorchBackendConfig
from executor_service.backends.triton_backend import TritonBackend
from executor_service.input_batch import parse_step
from executor_service.kv_session import KvSession
from executor_service.step_response import build_response
from kvmanager_service.core.block_tag import decode_tag
from kvmanager_service.core.kv_cache_coordinator import KVCacheCoordinator, table_sizes
from kvmanager_service.core.pinned_prefixes import PinnedPrefix
from kvmanager_service.core.request import FinishReason, NewRequest, SamplingParams, StopRules
from kvmanager_service.core.scheduler import Scheduler
from kvmanager_service.core.scheduler_config import SchedulerConfig
from kvmanager_service.step_message import build_execute_request, read_execute_response
from tests.simulation.harness import kv_groups
from tests.unit.executor.step_builder import prompt_of, reference_tokens, save_tiny_model

BLOCK_SIZE = 4
CHUNK = 24
NEW_TOKENS = 40
MAX_LEN = 128
WINDOWS = {"mistral": (20,), "gemma3": (0, 20, 20, 20)}


@pytest.fixture(scope="module", params=["mistral", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[int, ...]]:
    """A folder, and the windows of the groups that its layers make."""
    return save_tiny_model(tmp_path_factory.mktemp(request.param), request.param), WINDOWS[request.param]


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
                memory_limit=8 << 30,
                num_blocks_override=num_blocks,
                swap_space=num_host_blocks * 4096,  # more than a block of either model
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
        return KVCacheCoordinator(self.num_blocks, kv_groups(BLOCK_SIZE, self.windows), longest_chunk=CHUNK)

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
                message = build_execute_request(step, self.limits.kv_epoch, BLOCK_SIZE, table_sizes(self.scheduler.kv))
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
        self.scheduler.update(read_execute_response(pb.ExecuteResponse.FromString(response.SerializeToString())))
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


def test_sliding_model_chunked_and_decoded_together_gives_transformers_tokens(
    model: tuple[Path, tuple[int, ...]],
) -> None:
    """Prompts shorter and longer than the window of 20 and the step of 24 tokens."""
    folder, windows = model
    pair = Pair(folder, num_blocks=400)
    assert pair.windows == windows
    prompts = {f"p{length}": prompt_of(length, length) for length in (1, 3, 19, 20, 21, 24, 47, 80)}
    check(folder, prompts, pair.run(prompts))
    assert pair.scheduler.stats.preemptions == 0


@pytest.mark.parametrize("num_host_blocks", [0, 200])
def test_sliding_model_preempted_again_and_again_gives_transformers_tokens(
    model: tuple[Path, tuple[int, ...]], num_host_blocks: int
) -> None:
    """Computed again, or by pages of all groups to host memory and back, null blocks before the windows."""
    folder, windows = model
    # What one sequence of the longest length needs, and a little more.
    longest = KVCacheCoordinator(2, kv_groups(BLOCK_SIZE, windows), longest_chunk=CHUNK).num_blocks_for(MAX_LEN)
    pair = Pair(folder, num_blocks=1 + longest + longest // 4, num_host_blocks=num_host_blocks)
    # Short ones first: many are admitted, and outgrow the pool together.
    prompts = {f"p{index}": prompt_of(length, index) for index, length in enumerate((2, 5, 3, 7, 4, 1, 6, 60, 33, 12))}
    check(folder, prompts, pair.run(prompts))
    stats = pair.scheduler.stats
    assert stats.preemptions >= 3, windows
    if num_host_blocks:
        assert min(stats.swapped_out, stats.swapped_in) >= 3, stats


def test_sliding_model_pinned_prefix_survives_and_gives_transformers_tokens(
    model: tuple[Path, tuple[int, ...]],
) -> None:
    folder, windows = model
    longest = KVCacheCoordinator(2, kv_groups(BLOCK_SIZE, windows), longest_chunk=CHUNK).num_blocks_for(MAX_LEN)
    pair = Pair(folder, num_blocks=1 + 2 * longest)
    root = prompt_of(49, 1)
    pair.scheduler.pins.pin(PinnedPrefix("root", np.array(root, dtype="<i4").tobytes()))
    pair.run({"root": root}, max_tokens=1)
    pair.run({f"p{index}": prompt_of(60, 100 + index) for index in range(6)}, max_tokens=2)
    evicted, hits = pair.scheduler.kv.pool.num_evictions, pair.scheduler.stats.prefix_hits
    assert evicted > 0
    branch = {"branch": [*root, *prompt_of(7, 2)]}
    check(folder, branch, pair.run(branch))
    assert pair.scheduler.stats.prefix_hits - hits == 48


def test_sliding_model_prefix_hits_give_transformers_tokens(model: tuple[Path, tuple[int, ...]]) -> None:
    """What goes on from others' prompts and outputs, and after a restart of the manager from what it adopts."""
    folder, windows = model
    pair = Pair(folder, num_blocks=400)
    root = prompt_of(48, 1)
    first = pair.run({"root": root})
    check(folder, {"root": root}, first)
    longer = [*root, *first["root"][:20]]
    prompts = {
        "again": root,
        "branch": [*root[:32], *prompt_of(7, 2)],
        "turn": [*longer, *prompt_of(5, 3)],
        "other": prompt_of(30, 4),
    }
    check(folder, prompts, pair.run(prompts))
    hits = pair.scheduler.stats.prefix_hits
    assert hits >= 44 + 32 + 64, "each as far as its blocks go"
    if windows[0]:
        return  # without full attention nothing proves a chain whose first blocks are gone
    assert pair.restart_manager() > 0
    adopted = {"turn from what was adopted": prompts["turn"]}
    check(folder, adopted, pair.run(adopted))
    assert pair.scheduler.stats.prefix_hits > hits


# Rows of a tile that stand for nothing divide 0 by 0: silent on a GPU, a warning of NumPy in the interpreter.
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton", "ignore::RuntimeWarning:executor_service")
def test_sliding_model_on_triton_kernels_gives_transformers_tokens(model: tuple[Path, tuple[int, ...]]) -> None:
    """Interpreted, so a few tokens: chunks and decode rows whose windows begin inside, at and behind a block's end."""
    folder, windows = model
    pair = Pair(folder, 120, TritonBackend)
    assert pair.windows == windows
    prompts = {f"p{length}": prompt_of(length, length) for length in (3, 21, 47)}
    check(folder, prompts, pair.run(prompts, max_tokens=6), new_tokens=6)
