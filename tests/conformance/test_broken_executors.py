"""The kit finds every one of these faults, by the cases that are meant for them; without a fault it finds none."""

from __future__ import annotations

import pytest

from executor_service.server import running_executor
from tests.conformance import broken_backends as backends
from tests.conformance import broken_wire as wires
from tests.conformance.trial import (
    CHUNKS,
    COMPUTING,
    NEED_ADAPTERS,
    NEED_CHUNKS,
    NEED_GROUPS,
    NEED_STATES,
    UNEQUAL,
    WINDOWS,
    failures,
    sim_config,
    skipped,
    tried,
    unequal,
)

# What is tried, and what of it must fail.
BACKENDS = {
    backends.OffByOneInLastBlock: (["tables/every_last", "cache/chunks"], {"tables/every_last_block_len"}),
    backends.ReadsWholeLastBlock: (["tables/"], {"tables/stale_slots"}),
    backends.WritesIntoSharedBlocks: (["tables/"], {"tables/shared_prefix_filled_before"}),
    backends.MixesRows: (["rows/"], {"rows/batch_of_prompts", "rows/batch_decodes", "rows/few_rows_sample"}),
    backends.IgnoresCopies: (["copies/", "feeds/forks"], {"copies/copy_on_write", "copies/chained", "feeds/forks"}),
    backends.CopiesNothingBack: (["copies/"], {"copies/out_and_in", "copies/host_blocks_stay"}),
    backends.CopiesAfterRows: (["copies/"], {"copies/before_rows_write"}),
    backends.ForgetsWhatIsCold: (["cache/"], {"cache/untouched_for_long"}),
    backends.DrawsImpurely: (["sampling/"], {"sampling/same_seed_same_tokens"}),
    backends.DrawsByRowLength: (["sampling/same"], {"sampling/same_token_however_computed"}),
    backends.ReadsBeforeItWrites: (["tables/"], {"tables/shared_prefix_filled_now", "tables/prompt_cut_into_rows"}),
}
FAILING = {"rows/row_that_fails_alone", "rows/row_fails_for_all_its_samples", "rows/fed_by_a_failed_row"}
WIRES = {
    wires.IgnoresFeeds: (["feeds/"], {"feeds/chain_sent_ahead", "feeds/crosswise", "feeds/nothing_kept"}),
    wires.AcceptsAnyEpoch: (["epochs/"], {"epochs/step_of_another", "epochs/step_after_a_reset"}),
    wires.LosesTags: (["tags/"], {"tags/stored_and_listed", "tags/listed_to_the_next_manager"}),
    wires.LosesTagsOfCopies: (["copies/"], {"copies/target_tagged_at_once"}),
    wires.ForgetsATerm: (["handshake/profile_"], {"handshake/profile_adds_up"}),
    wires.TimesBackwards: (["steps/sent", "tags/any_bytes"], {"steps/sent_ahead", "tags/any_bytes"}),
    wires.AnswersForFailedRows: (["rows/"], FAILING),
    wires.AnswersForFedRows: (["rows/"], {"rows/fed_by_a_failed_row"}),
    wires.FailsSamplesAlone: (["rows/"], {"rows/row_fails_for_all_its_samples"}),
    wires.FailsWholeSteps: (["rows/"], FAILING),
    wires.RunsStepsOutOfOrder: (["steps/"], {"steps/blocks_handed_on", "steps/chunks_queued"}),
    wires.AnswersMalformedSteps: (["malformed/block_", "tags/too_long"], {"malformed/block_null", "tags/too_long"}),
    wires.HarmsKvOfOthers: (["malformed/block_"], {"malformed/block_null", "malformed/block_beyond_cache"}),
    wires.SaysNothingOfErrors: (["epochs/", "malformed/token"], {"epochs/reset_of_another", "malformed/token_missing"}),
    wires.TakesOverAtOnce: (["streams/"], {"streams/silent_stream", "streams/first_step_that_cannot_be_run"}),
    wires.CountsShort: (["cache/cold"], {"cache/cold_step", "cache/cold_step_after_reset"}),
}
# With several KV groups.
GROUPS = {
    backends.IgnoresWindows: (["windows/"], {"windows/null_before_the_window", "windows/others_before_the_window"}),
    backends.ReadsOneTokenMore: (["windows/"], {"windows/null_before_the_window", "windows/moved_on"}),
    backends.TakesChunksForWindows: (["windows/"], {"windows/null_before_the_window", "windows/chunk_begins_anew"}),
    backends.TakesChunksForLonger: (["windows/"], {"windows/null_before_the_window", "windows/chunk_begins_anew"}),
    backends.LeavesOutNullBlocks: (["windows/"], {"windows/null_before_the_window", "windows/null_before_chunks"}),
    backends.TakesOneTableForAllGroups: (
        ["groups/"],
        {
            "groups/tables_in_orders_of_their_own",
            "groups/prefix_of_each_group_elsewhere",
        },
    ),
    backends.ReadsPrefixByTheFirstTable: (["groups/"], {"groups/prefix_of_each_group_elsewhere"}),
}
# With KV groups that have block sizes of their own.
SIZES = {
    backends.ReadsShortBlocksAsLong: (["groups/", "windows/"], {
        "groups/chunks_to_the_ends_of_each_groups_blocks", "windows/null_before_the_window",
    }),
    backends.TakesLastBlockLenOfTheFirstGroup: (["groups/", "tables/every_last"], {
        "groups/chunks_to_the_ends_of_each_groups_blocks", "tables/every_last_block_len",
    }),
    backends.ReadsWhatAnotherGroupLeft: (["groups/"], {"groups/block_handed_to_another_group"}),
}  # fmt: skip
GROUP_WIRES = {
    wires.AcceptsNullBlocksAnywhere: (["windows/"], {
        "windows/null_in_full_attention", "windows/null_where_the_window_begins", "windows/null_where_it_writes",
    }),
    wires.TakesAnyNumberOfTables: (["malformed/tables"], {
        "malformed/tables_one_missing", "malformed/tables_one_too_many",
    }),
}  # fmt: skip
UNAWARE = "handshake/manager_that_takes_all_blocks_for_equal"
SIZE_WIRES = (wires.MakesACacheForAnyManager, wires.ListsTagsToAnyManager)
# The formula of the sim backend tells what is left out everywhere alike; an executor is no judge of that itself.
NOT_BY_ITSELF = {backends.OffByOneInLastBlock, backends.TakesOneTableForAllGroups}
NEED_LOGITS = {
    "tables/every_token_counts",
    "sampling/bias_decides",
    "sampling/narrowed_to_one",
    "sampling/kept_by_top_k",
    "sampling/logprobs_before_bias",
    "sampling/penalties_use_the_history",
    "sampling/other_positions_other_tokens",
    "sampling/repetition_counts_the_prompt",
    "sampling/in_the_order_given",
    "sampling/fed_token_counts_as_output",
    "numerics/after_one_token",
    "numerics/after_every_length",
    "numerics/long_decode",
    "numerics/mixed_batch",
}


@pytest.mark.parametrize("fault", BACKENDS, ids=lambda fault: fault.__name__)
async def test_conformance_of_faulty_backend_fails(fault):
    filters, expected = BACKENDS[fault]
    async with running_executor(sim_config(), fault()) as server:
        _, results = await tried(server.address, filters)
    assert expected <= failures(results).keys()


@pytest.mark.parametrize(
    "fault", [fault for fault in BACKENDS if fault not in NOT_BY_ITSELF], ids=lambda fault: fault.__name__
)
async def test_conformance_of_faulty_backend_without_a_formula_fails(fault):
    """Nothing is known of how this executor computes: it is its own judge."""
    filters, expected = BACKENDS[fault]
    async with running_executor(sim_config(backend="other"), fault()) as server:
        judge, results = await tried(server.address, filters)
    assert judge.name.startswith("the executor itself")
    assert expected <= failures(results).keys()


@pytest.mark.parametrize("fault", WIRES, ids=lambda fault: fault.__name__)
async def test_conformance_of_faulty_wire_fails(fault):
    filters, expected = WIRES[fault]
    async with wires.broken_wire(fault) as address:
        _, results = await tried(address, filters)
    assert expected <= failures(results).keys()


async def test_conformance_of_wire_that_leaves_old_streams_alone_fails():
    """The end of a stream that nobody ends is waited for."""
    async with wires.broken_wire(wires.LeavesOldStreamsAlone) as address:
        _, results = await tried(address, ["streams/taken_over_by_the_epoch"], answer_within=3.0)
    assert failures(results) == {"streams/taken_over_by_the_epoch": "expected ABORTED, got nothing within 3 s"}


async def test_conformance_of_executor_that_dies_fails_and_so_does_all_that_comes_after():
    async with wires.broken_wire(wires.DiesOfMalformedSteps) as address:
        _, results = await tried(address, ["cache/cold_step", "malformed/block_", "malformed/token"])
    failed = failures(results)
    good, (first, *others) = results[:2], results[2:]
    assert {result.name for result in good} == {"cache/cold_step", "cache/cold_step_after_reset"}
    assert not {result.name for result in good} & failed.keys()
    assert failed[first.name].startswith("expected an executor that answers, got UNAVAILABLE")
    assert {failed[result.name] for result in others} == {
        f"expected an executor that answers, got none since {first.name}"
    }


async def test_conformance_of_wire_without_a_fault_passes():
    """What is found with the faults is not the wire's own doing."""
    async with wires.broken_wire(wires.Wire) as address:
        _, results = await tried(address)
    assert failures(results) == {}


@pytest.mark.parametrize("backend", ["sim", "other"])
async def test_conformance_of_sim_executor_passes(backend):
    async with running_executor(sim_config(backend=backend), backends.FaultyBackend()) as server:
        _, results = await tried(server.address, () if backend == "sim" else COMPUTING)
    if backend == "sim":
        assert failures(results) == {}
        assert skipped(results) == NEED_LOGITS | NEED_GROUPS | NEED_ADAPTERS
    else:
        # Of one that is not known to be sim it is expected that a bias matters.
        assert failures(results).keys() < NEED_LOGITS
        assert "sampling/bias_decides" in failures(results)


@pytest.mark.parametrize("windows", [WINDOWS, CHUNKS, (0, 0), (5,), (2, 17), (-5,), (17, -2, -16)], ids=str)
async def test_conformance_of_sim_executor_with_several_groups_passes(windows):
    """Whole for the usual windows; for others what computes."""
    filters = () if windows in (WINDOWS, CHUNKS) else ("tables/", "groups/", "windows/", "cache/")
    async with running_executor(sim_config(windows)) as server:
        _, results = await tried(server.address, filters)
    assert failures(results) == {}
    if not filters:
        always = NEED_LOGITS | NEED_STATES | NEED_ADAPTERS
        assert skipped(results) == always | (set() if windows == CHUNKS else NEED_CHUNKS)


@pytest.mark.parametrize(
    ("fault", "backend"),
    [(fault, "sim") for fault in GROUPS] + [(fault, "other") for fault in GROUPS if fault not in NOT_BY_ITSELF],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
async def test_conformance_of_faulty_backend_with_several_groups_fails(fault, backend):
    filters, expected = GROUPS[fault]
    async with running_executor(sim_config(fault.WINDOWS, backend=backend), fault()) as server:
        _, results = await tried(server.address, filters)
    assert expected <= failures(results).keys()


@pytest.mark.parametrize(
    ("windows", "sizes"),
    [
        (WINDOWS, UNEQUAL),
        ((0, 0), (4, 8)),
        ((5, -7), (3, 2)),
        ((0, 6, 6), (8, 4, 4)),
        (CHUNKS, (1, 16)),
        ((0,), (8,)),
        ((0, -1), (4, 8)),
        ((0, -1, 6), (4, 2, 8)),
    ],
    ids=str,
)
async def test_conformance_of_sim_executor_with_unequal_blocks_passes(windows, sizes):
    """Whole for the usual windows; for others what computes."""
    filters = (
        ()
        if windows in (WINDOWS, CHUNKS)
        else ("tables/", "groups/", "windows/", "states/", "cache/", "copies/", "tags/")
    )
    async with running_executor(sim_config(**unequal(windows, sizes))) as server:
        _, results = await tried(server.address, filters)
    assert failures(results) == {}
    if not filters:
        always = NEED_LOGITS | NEED_STATES | NEED_ADAPTERS
        assert skipped(results) == always | (set() if windows == CHUNKS else NEED_CHUNKS)


@pytest.mark.parametrize("fault", SIZES, ids=lambda fault: fault.__name__)
async def test_conformance_of_faulty_backend_with_unequal_blocks_fails(fault):
    filters, expected = SIZES[fault]
    config = sim_config(**unequal(fault.WINDOWS, fault.SIZES))
    async with running_executor(config, fault()) as server:
        _, results = await tried(server.address, filters)
    assert expected <= failures(results).keys()
    async with running_executor(config) as server:
        _, results = await tried(server.address, filters)
    assert failures(results) == {}


@pytest.mark.parametrize("fault", SIZE_WIRES, ids=lambda fault: fault.__name__)
async def test_conformance_of_an_executor_that_serves_managers_without_block_sizes_fails(fault):
    async with running_executor(sim_config(**unequal(WINDOWS, UNEQUAL))) as good:
        async with wires.wire_before(good.address, fault) as address:
            _, results = await tried(address, ["handshake/"])
        assert failures(results).keys() == {UNAWARE}
        _, results = await tried(good.address, ["handshake/"])
        assert failures(results) == {}


@pytest.mark.parametrize("fault", GROUP_WIRES, ids=lambda fault: fault.__name__)
async def test_conformance_of_faulty_wire_with_several_groups_fails(fault):
    filters, expected = GROUP_WIRES[fault]
    async with wires.broken_wire(fault, backends.FaultyGroups()) as address:
        _, results = await tried(address, filters)
    assert expected <= failures(results).keys()


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
async def test_conformance_of_other_block_sizes_passes(block_size):
    config = sim_config(block_size=block_size, swap_space=8 * block_size * 8)
    async with running_executor(config) as server:
        _, results = await tried(server.address, (*COMPUTING, "steps/", "streams/", "tags/"))
    assert failures(results) == {}
