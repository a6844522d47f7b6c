"""The kit finds each fault in what an executor does with LoRA adapters, by the case that is meant for it."""

from __future__ import annotations

import pytest

from executor_service.server import running_executor
from tests.conformance import broken_adapters as adapters
from tests.conformance.broken_wire import Wire, broken_wire
from tests.conformance.trial import NEED_NO_ADAPTERS, STATES, failures, sim_config, skipped, tried

# What of "adapters/" fails.
BACKENDS = {
    adapters.IgnoresAdapters: {
        "changes_the_output", "rows_with_and_without", "chunked_and_fed", "base_after_unloading", "cache_stays",
        "stays_with_a_new_cache", "ids_are_not_used_again", "name_of_other_content", "one_more_than_fit",
        "unloaded_between_steps",
    },
    adapters.TakesOneAdapterForAllRows: {"rows_with_and_without", "cache_stays", "unloaded_between_steps"},
    adapters.AdaptsPromptsOnly: {
        "rows_with_and_without", "chunked_and_fed", "cache_stays", "base_after_unloading", "name_of_other_content",
        "stays_with_a_new_cache",
    },
    adapters.LeavesAdaptersInTheWeights: {"base_after_unloading", "cache_stays", "unloaded_between_steps"},
    adapters.LosesTheCacheOnLoad: {"cache_stays"},
    adapters.LosesAdaptersWithTheCache: {"stays_with_a_new_cache"},
}  # fmt: skip
WIRES = {
    adapters.ListsNewestFirst: {"loaded_and_listed", "one_more_than_fit"},
    adapters.AnswersAnew: {"loaded_again", "name_of_other_content", "another_revision", "one_more_than_fit"},
    adapters.UsesIdsAgain: {"ids_are_not_used_again"},
    adapters.TakesOtherContent: {"name_of_other_content"},
    adapters.TakesAnyRevision: {"another_revision"},
    adapters.MakesRoom: {"one_more_than_fit"},
    adapters.UnloadsAnything: {"unloaded_twice"},
    adapters.CutsFields: {"fields_out_of_range"},
    adapters.RunsWithoutWhatIsGone: {"unknown_in_a_step", "ids_are_not_used_again", "unloaded_between_steps"},
}
# Which of its steps are computed, and which refused, is for the executor to say: it may meet a fault, or not.
_MAY_FAIL = {"adapters/unloaded_with_steps_queued"}


@pytest.mark.parametrize("fault", BACKENDS, ids=lambda fault: fault.__name__)
async def test_conformance_of_backend_with_faulty_adapters_fails(fault):
    async with running_executor(sim_config(max_loras=fault.MAX_LORAS), fault()) as server:
        _, results = await tried(server.address, ["adapters/"])
    assert failures(results).keys() - _MAY_FAIL == {f"adapters/{name}" for name in BACKENDS[fault]}


@pytest.mark.parametrize("fault", WIRES, ids=lambda fault: fault.__name__)
async def test_conformance_of_wire_with_faulty_adapters_fails(fault):
    async with broken_wire(fault, adapters.FaultyAdapters()) as address:
        _, results = await tried(address, ["adapters/"])
    assert failures(results).keys() - _MAY_FAIL == {f"adapters/{name}" for name in WIRES[fault]}


async def test_conformance_of_wire_that_runs_queued_steps_as_the_model_fails():
    async with broken_wire(adapters.RunsQueuedStepsAsTheModel, adapters.FaultyAdapters()) as address:
        _, results = await tried(address, ["adapters/unloaded_with_steps_queued"])
    assert failures(results).keys() == {"adapters/unloaded_with_steps_queued"}


async def test_conformance_of_wire_that_keeps_sources_to_itself_fails():
    async with broken_wire(adapters.KeepsSourcesToItself, adapters.FaultyAdapters()) as address:
        _, results = await tried(address, ["adapters/loaded_and_listed", "adapters/loaded_again"])
    assert "adapters/loaded_and_listed" in failures(results)


async def test_conformance_of_wire_that_digests_names_fails():
    async with broken_wire(adapters.DigestsNames, adapters.FaultyAdapters()) as address:
        _, results = await tried(address, ["adapters/revision_of"])
    assert failures(results).keys() == {"adapters/revision_of_the_content"}


async def test_conformance_of_wire_that_loads_where_there_is_no_room_fails():
    async with broken_wire(adapters.TakesNoneAndLoadsAll) as address:
        _, results = await tried(address, ["adapters/"])
    assert failures(results).keys() == {"adapters/none_where_none_fit"}


@pytest.mark.parametrize("windows", [(), STATES], ids=str)
@pytest.mark.parametrize("max_loras", [1, 3])
async def test_conformance_of_sim_executor_with_adapters_passes(windows, max_loras):
    async with broken_wire(Wire, _backend(windows, max_loras)) as address:
        _, results = await tried(address, ["adapters/", "adapter_files/"])
    assert failures(results) == {}
    needs_files = {result.name for result in results if "sim backend takes any text" in result.reason}
    needs_two = {"adapters/loaded_and_listed"} if max_loras == 1 else set()
    assert skipped(results) == NEED_NO_ADAPTERS | needs_files | needs_two
    assert len(results) - len(skipped(results)) >= 18


def _backend(windows: tuple[int, ...], max_loras: int) -> adapters.FaultyAdapters:
    """One without a fault."""

    class Good(adapters.FaultyAdapters):
        WINDOWS = windows
        MAX_LORAS = max_loras

    return Good()
