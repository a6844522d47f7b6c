"""Models whose layers keep a state, through scheduler, messages and torch backend: the tokens are transformers' own.

Small random models in float32: Mamba and Mamba-2, which attend nowhere, and hybrids of states and attention.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from executor_service.backends.base import STATE
from executor_service.backends.triton_backend import TritonBackend
from tests.integration.executor.scheduled_pair import CHUNK, MAX_LEN, Pair, check
from tests.unit.executor.step_builder import prompt_of, save_tiny_model

GROUPS = {
    "mamba": (STATE,),
    "mamba2": (STATE,),
    "bamba": (0, STATE, STATE),
    "granitemoehybrid": (0, STATE, STATE),
    "jamba": (0, STATE, STATE, STATE),
    "qwen3_next": (0, STATE, STATE, STATE),
}


@pytest.fixture(scope="module", params=GROUPS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[int, ...]]:
    """A folder, and the windows of the groups that its layers make."""
    return save_tiny_model(tmp_path_factory.mktemp(request.param), request.param), GROUPS[request.param]


def test_state_model_chunked_and_decoded_together_gives_transformers_tokens(
    model: tuple[Path, tuple[int, ...]],
) -> None:
    """Prompts of one token, and shorter and longer than a block and a step of 24 tokens."""
    folder, windows = model
    pair = Pair(folder, num_blocks=400)
    assert pair.windows == windows
    assert pair.limits.block_size < CHUNK, "rows that leave more than one checkpoint"
    prompts = {f"p{length}": prompt_of(length, length) for length in (1, 3, 19, 20, 21, 24, 47, 80)}
    check(folder, prompts, pair.run(prompts))
    assert pair.scheduler.stats.preemptions == 0


def test_state_model_one_at_a_time_gives_transformers_tokens(model: tuple[Path, tuple[int, ...]]) -> None:
    folder, _ = model
    pair = Pair(folder, num_blocks=400)
    for length in (1, 2, 33):
        prompts = {f"p{length}": prompt_of(length, length)}
        check(folder, prompts, pair.run(prompts))


def test_state_model_preempted_again_and_again_gives_transformers_tokens(model: tuple[Path, tuple[int, ...]]) -> None:
    folder, windows = model
    # What one sequence of the longest length needs, and a little more.
    longest = Pair(folder, num_blocks=400).scheduler.kv.num_blocks_for(MAX_LEN)
    pair = Pair(folder, num_blocks=1 + longest + longest // 4)
    # Short ones first: many are admitted, and outgrow the pool together.
    prompts = {f"p{index}": prompt_of(length, index) for index, length in enumerate((2, 5, 3, 7, 4, 1, 6, 60, 33, 12))}
    check(folder, prompts, pair.run(prompts))
    assert pair.scheduler.stats.preemptions >= 3, windows


def test_state_model_prefix_hits_give_transformers_tokens(model: tuple[Path, tuple[int, ...]]) -> None:
    """What goes on from checkpoints of others: in the cache, and after a restart of the manager in what it adopts."""
    folder, windows = model
    pair = Pair(folder, num_blocks=400)
    size = pair.limits.block_size
    root = prompt_of(48, 1)
    first = pair.run({"root": root})
    check(folder, {"root": root}, first)
    longer = [*root, *first["root"][:20]]
    prompts = {
        "again": root,
        "branch": [*root[:40], *prompt_of(7, 2)],
        "turn": [*longer, *prompt_of(5, 3)],
        "other": prompt_of(30, 4),
    }
    check(folder, prompts, pair.run(prompts))
    hits = pair.scheduler.stats.prefix_hits
    assert hits >= sum(length // size * size for length in (47, 40, 68)), "each from the last checkpoint before its end"
    if windows[0]:
        return  # without full attention nothing proves a chain whose first blocks are gone
    assert pair.restart_manager() > 0
    adopted = {"turn from what was adopted": prompts["turn"]}
    check(folder, adopted, pair.run(adopted))
    assert pair.scheduler.stats.prefix_hits > hits


# Rows of a tile that stand for nothing divide 0 by 0: silent on a GPU, a warning of NumPy in the interpreter.
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton", "ignore::RuntimeWarning:executor_service")
@pytest.mark.parametrize("kind", ["mamba2", "bamba"])
def test_state_model_on_the_triton_backend_gives_transformers_tokens(kind: str, tmp_path: Path) -> None:
    """Interpreted, so a few tokens: Triton attends, where anything does, and states go on in torch."""
    folder = save_tiny_model(tmp_path, kind)
    pair = Pair(folder, 60, TritonBackend)
    prompts = {f"p{length}": prompt_of(length, length) for length in (3, 21, 47)}
    check(folder, prompts, pair.run(prompts, max_tokens=6), new_tokens=6)
