"""Models with windows, chunks or shared K/V through scheduler, messages and the torch backend: transformers' tokens.

Small random models in float32. Mistral has one KV group, a window in every layer; Gemma 3 has four here: one of two
full layers, and three of sliding ones, of which the last has one layer and leaves a page unused. Llama 4 has one of
full layers, and two of chunks. Of Gemma 3n's seven layers three read the K/V of earlier ones: two groups of two. Gemma
4's full layers keep twice as much of a token as its sliding ones: these have blocks of twice as many tokens.
"""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from pathlib import Path

import numpy as np
import pytest

from executor_service.backends.torch_backend import TorchBackend, TorchBackendConfig
from executor_service.backends.triton_backend import TritonBackend
from kvmanager_service.core.kv_cache_coordinator import KVCacheCoordinator
from kvmanager_service.core.kv_groups import KVGroup
from kvmanager_service.core.pinned_prefixes import PinnedPrefix
from tests.integration.executor.scheduled_pair import BLOCK_SIZE, CHUNK, MAX_LEN, Pair, check
from tests.simulation.harness import kv_groups
from tests.unit.executor.step_builder import prompt_of, save_tiny_model

WINDOWS = {
    "mistral": (20,), "gemma3": (0, 20, 20, 20), "llama4": (0, -20, -20), "gemma3n": (0, 20), "gemma4": (0, 20, 20),
}  # fmt: skip
FACTORS = {WINDOWS["gemma4"]: (1, 2, 2)}
"""By what blocks of a group are longer than BLOCK_SIZE."""


def groups_of(windows: tuple[int, ...]) -> list[KVGroup]:
    """The core's groups of a model."""
    return kv_groups(BLOCK_SIZE, windows, FACTORS.get(windows, ()))


@pytest.fixture(scope="module", params=WINDOWS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[int, ...]]:
    """A folder, and the windows of the groups that its layers make."""
    return save_tiny_model(tmp_path_factory.mktemp(request.param), request.param), WINDOWS[request.param]


def test_sliding_model_chunked_and_decoded_together_gives_transformers_tokens(
    model: tuple[Path, tuple[int, ...]],
) -> None:
    """Prompts shorter and longer than the window of 20 and the step of 24 tokens."""
    folder, windows = model
    pair = Pair(folder, num_blocks=400)
    assert pair.windows == windows
    assert pair.limits.group_block_sizes == tuple(group.block_size for group in groups_of(windows))
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
    longest = KVCacheCoordinator(2, groups_of(windows), longest_chunk=CHUNK).num_blocks_for(MAX_LEN)
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
    longest = KVCacheCoordinator(2, groups_of(windows), longest_chunk=CHUNK).num_blocks_for(MAX_LEN)
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
    size = lcm(*(group.block_size for group in groups_of(windows)))
    assert hits >= sum(known // size * size for known in (47, 32, 64)), "each as far as its blocks go"
    if windows[0]:
        return  # without full attention nothing proves a chain whose first blocks are gone
    assert pair.restart_manager() > 0
    adopted = {"turn from what was adopted": prompts["turn"]}
    check(folder, adopted, pair.run(adopted))
    assert pair.scheduler.stats.prefix_hits > hits


class Fp8Backend(TorchBackend):
    """The torch backend with K/V in eight bits."""

    def __init__(self, config: TorchBackendConfig) -> None:
        super().__init__(replace(config, kv_cache_dtype="fp8_e4m3"))


@pytest.mark.parametrize("model", ["llama4", "gemma3n", "gemma4"], indirect=True)
def test_sliding_model_in_fp8_preempted_gives_the_tokens_that_it_gives_at_leisure(
    model: tuple[Path, tuple[int, ...]],
) -> None:
    """The same bytes, computed once or again and again: with chunks, K/V that others read, and unequal K/V."""
    folder, windows = model
    longest = KVCacheCoordinator(2, groups_of(windows), longest_chunk=CHUNK).num_blocks_for(MAX_LEN)
    prompts = {f"p{index}": prompt_of(length, index) for index, length in enumerate((2, 5, 3, 7, 4, 33, 60))}
    crowded = Pair(folder, 1 + longest + longest // 4, Fp8Backend)
    assert crowded.run(prompts) == Pair(folder, 400, Fp8Backend).run(prompts)
    assert crowded.scheduler.stats.preemptions >= 3


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        # No kernel of the compiled ones takes heads of 20: torch's do.
        ({"head_dim": 20, "global_head_dim": 40}, (4, 8, 8)),
        # 4 tokens of 96 numbers are as many as 6 of 64, or 12 of 32: of the first only multiples of 2 are whole.
        (
            {
                "num_global_key_value_heads": 3, "head_dim": 32, "hidden_size_per_layer_input": 0,
                "num_kv_shared_layers": 0,
            },
            (4, 6, 6),
        ),
        # As much of a token in other heads; and experts.
        (
            {
                "num_global_key_value_heads": 1, "num_kv_shared_layers": 0, "enable_moe_block": True,
                "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
            },
            (4, 4, 4),
        ),
        # Here the sliding layers keep most.
        ({"head_dim": 48, "global_head_dim": 24}, (8, 4, 4)),
    ],
    ids=["torch", "4 and 6", "experts", "sliding most"],
)  # fmt: skip
def test_gemma_4_of_other_shapes_preempted_gives_transformers_tokens(
    tmp_path: Path, changes: dict[str, object], sizes: tuple[int, ...]
) -> None:
    folder = save_tiny_model(tmp_path, "gemma4", **changes)
    pair = Pair(folder, 60)
    assert pair.limits.group_block_sizes[: len(sizes)] == sizes
    prompts = {f"p{index}": prompt_of(length, index) for index, length in enumerate((2, 5, 3, 7, 4, 1, 60, 33))}
    check(folder, prompts, pair.run(prompts))
    assert pair.scheduler.stats.preemptions > 0


# Rows of a tile that stand for nothing divide 0 by 0: silent on a GPU, a warning of NumPy in the interpreter.
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton", "ignore::RuntimeWarning:executor_service")
def test_sliding_model_on_triton_kernels_gives_transformers_tokens(model: tuple[Path, tuple[int, ...]]) -> None:
    """Interpreted, so a few tokens: chunks and decode rows whose windows begin inside, at and behind a block's end."""
    folder, windows = model
    pair = Pair(folder, 120, TritonBackend)
    assert pair.windows == windows
    prompts = {f"p{length}": prompt_of(length, length) for length in (3, 21, 47)}
    check(folder, prompts, pair.run(prompts, max_tokens=6), new_tokens=6)
