"""The kit finds each fault in how states are kept, by the case that is meant for it."""

from __future__ import annotations

import pytest

from executor_service.server import running_executor
from tests.conformance import broken_states as states
from tests.conformance import broken_wire as wires
from tests.conformance.test_broken_executors import NEED_LOGITS
from tests.conformance.trial import (
    NEED_ADAPTERS,
    NEED_NO_STATES,
    NEED_WINDOWS,
    STATES,
    failures,
    sim_config,
    skipped,
    tried,
)

# What of "states/" must fail; what else fails follows from the same fault.
FAULTS = {
    states.LeavesNoCheckpoints: "checkpoints_at_ends_of_blocks",
    states.LeavesCheckpointsOfWholeBlocksOnly: "checkpoints_of_chunks",
    states.LeavesStatesWhereRowsStart: "checkpoint_stays",
    states.StartsRowsInTurn: "two_from_one_checkpoint",
    states.StartsFromWhatIsThere: "first_row_starts_from_nothing",
    states.TakesTheFirstStateNamed: "others_before_the_state",
    states.TakesNullForNoTokens: "null_before_the_state",
    states.StartsChunksAnew: "chunked_as_whole",
    states.KeepsStatesBesideBlocks: "forked",
    states.SwapsNoStatesInUse: "swapped",
}
# Nothing else of "states/" knows of these.
FOUND_BY_ONE = {
    states.LeavesCheckpointsOfWholeBlocksOnly,
    states.StartsRowsInTurn,
    states.TakesTheFirstStateNamed,
    states.SwapsNoStatesInUse,
}
WIRES = {
    wires.AcceptsNullBlocksAnywhere: {"null_where_it_starts", "null_where_it_leaves"},
    wires.AnswersMalformedSteps: {
        "started_from_where_another_leaves", "left_by_two", "null_where_it_starts", "null_where_it_leaves",
    },
}  # fmt: skip


@pytest.mark.parametrize("backend", ["sim", "other"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
async def test_conformance_of_backend_with_faulty_states_fails(fault, backend):
    async with running_executor(sim_config(STATES, backend=backend), fault()) as server:
        _, results = await tried(server.address, ["states/"])
    failed = failures(results).keys()
    assert f"states/{FAULTS[fault]}" in failed
    assert len(failed) == 1 or fault not in FOUND_BY_ONE


@pytest.mark.parametrize("fault", WIRES, ids=lambda fault: fault.__name__)
async def test_conformance_of_wire_with_faulty_states_fails(fault):
    async with wires.broken_wire(fault, states.FaultyStates()) as address:
        _, results = await tried(address, ["states/"])
    assert failures(results).keys() == {f"states/{name}" for name in WIRES[fault]}


@pytest.mark.parametrize("windows", [STATES, (-1,), (0, 6, -1), (-1, -6, -1)], ids=str)
async def test_conformance_of_sim_executor_with_states_passes(windows):
    """Whole for the usual groups; for others what computes."""
    filters = () if windows == STATES else ("tables/", "groups/", "windows/", "states/", "cache/", "copies/")
    async with running_executor(sim_config(windows)) as server:
        _, results = await tried(server.address, filters)
    assert failures(results) == {}
    if not filters:
        assert skipped(results) == NEED_LOGITS | NEED_WINDOWS | NEED_NO_STATES | NEED_ADAPTERS


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
async def test_conformance_of_states_in_other_block_sizes_passes(block_size):
    config = sim_config(STATES, block_size=block_size, swap_space=2 * 8 * block_size * 8)
    async with running_executor(config) as server:
        _, results = await tried(server.address, ["states/"])
    assert failures(results) == {}
    assert skipped(results) == set()
