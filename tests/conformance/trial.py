"""Runs the kit on an executor of this process, as the command does."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from kvplane_client.conformance.judges import Judge
from kvplane_client.conformance.reference_model import ReferenceModel
from kvplane_client.conformance.runner import Outcome, Result, choose_judge, run_cases, selected
from kvplane_client.conformance.target import Target

from executor_service.config import ExecutorConfig

BLOCK_SIZE = 4
NUM_BLOCKS = 80
NUM_HOST_BLOCKS = 8
"""Of each KV group, as the blocks."""
WINDOWS = (0, 6, 9)
"""Of the KV groups of an executor that has several."""
CHUNKS = (0, -6)
"""Of one whose second KV group has chunks."""
STATES = (0, -1)
"""Of one whose second KV group keeps a state."""
UNEQUAL = (4, 8, 2)
"""Block sizes of one whose KV groups, of WINDOWS, have their own."""
VOCAB_SIZE = 1000
ANSWER_WITHIN_S = 60.0
# Where arithmetic, tables and copies are at work.
COMPUTING = (
    "tables/",
    "groups/",
    "windows/",
    "states/",
    "rows/",
    "cache/",
    "feeds/",
    "copies/",
    "sampling/",
    "numerics/",
)
NEED_GROUPS = {case.name for case in selected(["groups/", "windows/", "states/"])}
"""What is skipped of an executor with one KV group."""
NEED_WINDOWS = {case.name for case in selected(["windows/"])}
"""What is skipped of one without windows and chunks."""
NEED_STATES = {case.name for case in selected(["states/"])}
"""What is skipped of one without states."""
NEED_ADAPTERS = {case.name for case in selected(["adapters/", "adapter_files/"])} - {
    "adapters/none_where_none_fit", "adapters/unknown_in_a_step", "adapters/zero_is_the_model_itself",
}  # fmt: skip
"""What is skipped of one that takes no adapters."""
NEED_NO_ADAPTERS = {"adapters/none_where_none_fit"}
"""What is skipped of one that does."""
NEED_NO_STATES = {"tables/shared_prefix_filled_now", "tables/prompt_cut_into_rows"}
"""What is skipped of one with them."""
NEED_CHUNKS = {"windows/chunk_begins_anew"}
"""What is skipped of one without chunks."""


def sim_config(windows: Sequence[int] = (), **values: object) -> ExecutorConfig:
    """A sim executor with as many blocks as the kit needs; its host blocks are of 8 bytes a slot."""
    groups = max(1, len(windows))
    defaults = {
        "backend": "sim",
        "port": 0,
        "block_size": BLOCK_SIZE,
        "sim_num_blocks": NUM_BLOCKS * groups,
        "sim_windows": tuple(windows),
        "sim_vocab_size": VOCAB_SIZE,
        "swap_space": NUM_HOST_BLOCKS * BLOCK_SIZE * 8 * groups,
    }
    return ExecutorConfig(**(defaults | values))  # type: ignore[arg-type]


def unequal(windows: Sequence[int], sizes: Sequence[int]) -> dict[str, object]:
    """What a sim executor is told whose KV groups have these block sizes, with as many blocks as the kit needs."""
    each = sum(lcm(*sizes) // size for size in sizes)
    return {
        "sim_windows": tuple(windows),
        "sim_block_sizes": tuple(sizes),
        "sim_num_blocks": NUM_BLOCKS * each,
        "swap_space": NUM_HOST_BLOCKS * each * max(sizes) * 8,
    }


async def tried(
    address: str,
    filters: Sequence[str] = (),
    *,
    model: ReferenceModel | None = None,
    answer_within: float = ANSWER_WITHIN_S,
) -> tuple[Judge, list[Result]]:
    """The judge, and how each case ended."""
    async with Target(address, answer_within) as target:
        await target.meet(0.0)
        judge = choose_judge(target, model, None)
        return judge, [result async for result in run_cases(target, judge, selected(filters))]


def failures(results: Sequence[Result]) -> dict[str, str]:
    """What failed and why, by name."""
    return {
        result.name: f"expected {result.expected}, got {result.got}"
        for result in results
        if result.outcome is Outcome.FAILED
    }


def skipped(results: Sequence[Result]) -> set[str]:
    """What was skipped."""
    return {result.name for result in results if result.outcome is Outcome.SKIPPED}
