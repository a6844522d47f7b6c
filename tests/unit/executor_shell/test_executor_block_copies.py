import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor_service.backends.base import CopyDirection
from executor_service.backends.sim_backend import SimBackend, SimBackendConfig
from executor_service.block_copies import parse_copies
from executor_service.errors import InvalidFieldError
from tests.unit.executor_shell.executor_builders import D2D, D2H, H2D, column, copies_of, make_copies

NUM_BLOCKS, NUM_HOST_BLOCKS, BLOCK_SIZE = 6, 3, 2


def runs_of(*copies):
    """The runs, as lists of (direction, source, target)."""
    parsed = parse_copies(make_copies(copies), NUM_BLOCKS, NUM_HOST_BLOCKS)
    return [
        [(int(run.direction), source, target) for source, target in zip(run.source_ids, run.target_ids, strict=True)]
        for run in parsed.runs
    ]


MALFORMED = {
    "more-sources": ("source_ids", [4, 2, 0, 1], "copies.source_ids"),
    "fewer-sources": ("source_ids", [4, 2], "copies.source_ids"),
    "more-targets": ("target_ids", [1, 0, 3, 3], "copies.target_ids"),
    "no-targets": ("target_ids", [], "copies.target_ids"),
    "no-directions": ("directions", [], "copies.source_ids"),
    "direction-unspecified": ("directions", [D2D, 0, H2D], "copies.directions[1]"),
    "direction-unknown": ("directions", [D2D, D2H, 4], "copies.directions[2]"),
    "direction-negative": ("directions", [-1, D2H, H2D], "copies.directions[0]"),
    "source-null-block": ("source_ids", [0, 2, 0], "copies.source_ids[0]"),
    "source-negative": ("source_ids", [4, -2, 0], "copies.source_ids[1]"),
    "source-device-beyond": ("source_ids", [4, NUM_BLOCKS, 0], "copies.source_ids[1]"),
    "source-host-beyond": ("source_ids", [4, 2, NUM_HOST_BLOCKS], "copies.source_ids[2]"),
    "source-host-negative": ("source_ids", [4, 2, -1], "copies.source_ids[2]"),
    "target-null-block": ("target_ids", [1, 0, 0], "copies.target_ids[2]"),
    "target-device-beyond": ("target_ids", [NUM_BLOCKS, 0, 3], "copies.target_ids[0]"),
    "target-host-beyond": ("target_ids", [1, NUM_HOST_BLOCKS, 3], "copies.target_ids[1]"),
    "target-largest": ("target_ids", [2**31 - 1, 0, 3], "copies.target_ids[0]"),
    "itself": ("target_ids", [4, 0, 3], "copies.target_ids[0]"),
}


@pytest.mark.parametrize(("name", "values", "field"), MALFORMED.values(), ids=MALFORMED)
def test_parse_copies_malformed_names_the_field(name, values, field):
    message = make_copies([(D2D, 4, 1), (D2H, 2, 0), (H2D, 0, 3)])
    getattr(message, name).CopyFrom(column(values))
    with pytest.raises(InvalidFieldError) as caught:
        parse_copies(message, NUM_BLOCKS, NUM_HOST_BLOCKS)
    assert caught.value.metadata["field"] == field


def test_parse_copies_bytes_that_are_no_int32_are_refused():
    message = make_copies([(D2D, 4, 1)])
    message.source_ids.data += b"\0"
    with pytest.raises(InvalidFieldError, match=r"copies\.source_ids\.data"):
        parse_copies(message, NUM_BLOCKS, NUM_HOST_BLOCKS)


def test_parse_copies_without_host_blocks_says_so():
    with pytest.raises(InvalidFieldError, match=r"copies\.target_ids\[0\]: expected no host block, .*num_host_blocks"):
        parse_copies(make_copies([(D2H, 4, 0)]), NUM_BLOCKS, 0)


def test_parse_copies_same_id_in_the_other_memory_is_another_block():
    assert runs_of((D2H, 2, 2), (H2D, 1, 1)) == [[(D2H, 2, 2)], [(H2D, 1, 1)]]


def test_parse_copies_none_gives_no_runs():
    empty = column([])
    message = make_copies([(D2D, 4, 1)])
    for name in ("directions", "source_ids", "target_ids"):
        getattr(message, name).CopyFrom(empty)
    parsed = parse_copies(message, NUM_BLOCKS, 0)
    assert (list(parsed.runs), parsed.written_blocks.tolist()) == ([], [])


def test_parse_copies_written_blocks_are_the_device_targets():
    parsed = parse_copies(make_copies([(D2H, 1, 2), (D2D, 2, 3), (H2D, 0, 5), (D2D, 1, 3)]), NUM_BLOCKS, 3)
    assert parsed.written_blocks.tolist() == [3, 5, 3]


CUTS = {
    "one source, two targets": ([(D2D, 1, 2), (D2D, 1, 3)], [2]),
    "reads what was written": ([(D2D, 1, 2), (D2D, 2, 3)], [1, 1]),
    "written twice": ([(D2D, 1, 3), (D2D, 2, 3)], [1, 1]),
    "writes what was read": ([(D2D, 2, 1), (D2D, 3, 2)], [1, 1]),
    "out, then another in": ([(D2H, 1, 0), (D2H, 2, 1), (H2D, 2, 1), (H2D, 2, 4)], [2, 2]),
    "out and in again": ([(D2H, 1, 0), (H2D, 0, 1)], [1, 1]),
    "directions in turn": ([(D2H, 1, 0), (D2D, 2, 3), (D2H, 4, 1), (H2D, 2, 5)], [1, 2, 1]),
    "as long as it can be": ([(D2D, 1, 2), (D2D, 3, 4), (D2D, 4, 5), (D2D, 1, 3), (D2D, 5, 1)], [2, 2, 1]),
}


@pytest.mark.parametrize(("copies", "lengths"), CUTS.values(), ids=CUTS)
def test_parse_copies_cuts_only_where_order_matters(copies, lengths):
    runs = runs_of(*copies)
    assert [len(run) for run in runs] == lengths
    assert sorted(copy for run in runs for copy in run) == sorted(copies)


@given(st.lists(copies_of(NUM_BLOCKS, NUM_HOST_BLOCKS), min_size=1, max_size=24))
def test_parse_copies_runs_are_independent_and_as_if_one_after_the_other(copies):
    def moved(memories, some):
        for direction, source, target in some:
            content = memories["host" if direction == H2D else "device"][source]
            memories["host" if direction == D2H else "device"][target] = content
        return memories

    def fresh():
        return {"device": list("abcdef"), "host": list("xyz")}

    runs = runs_of(*copies)
    assert sorted(copy for run in runs for copy in run) == sorted(copies)
    for run in runs:
        assert len({direction for direction, _, _ in run}) == 1
        targets = [target for _, _, target in run]
        assert len(set(targets)) == len(targets)
        if run[0][0] == D2D:
            assert not set(targets) & {source for _, source, _ in run}
    in_order = moved(fresh(), copies)
    # Independent within a run: the other way round gives the same.
    assert moved(fresh(), [copy for run in runs for copy in run]) == in_order
    assert moved(fresh(), [copy for run in runs for copy in reversed(run)]) == in_order


@given(st.lists(copies_of(NUM_BLOCKS, NUM_HOST_BLOCKS), min_size=1, max_size=12))
def test_sim_copy_blocks_equals_a_naive_loop(copies):
    backend = SimBackend(SimBackendConfig(block_size=BLOCK_SIZE, sim_num_blocks=NUM_BLOCKS))
    backend.load()
    backend.initialize_kv_cache(NUM_BLOCKS, NUM_HOST_BLOCKS)
    device = np.arange(NUM_BLOCKS * BLOCK_SIZE, dtype=np.uint64).reshape(NUM_BLOCKS, BLOCK_SIZE)
    host = np.arange(NUM_HOST_BLOCKS * BLOCK_SIZE, dtype=np.uint64).reshape(NUM_HOST_BLOCKS, BLOCK_SIZE) + np.uint64(99)
    backend._slots[:], backend._polynomials[:] = device.ravel(), device.sum(axis=1)
    backend._host_slots[:], backend._host_polynomials[:] = host.ravel(), host.sum(axis=1)
    backend.copy_blocks(parse_copies(make_copies(copies), NUM_BLOCKS, NUM_HOST_BLOCKS).runs)
    for direction, source, target in copies:
        content = (host if direction == CopyDirection.HOST_TO_DEVICE else device)[source].copy()
        (host if direction == CopyDirection.DEVICE_TO_HOST else device)[target] = content
    np.testing.assert_array_equal(backend.slots, device.ravel())
    np.testing.assert_array_equal(backend._polynomials, device.sum(axis=1))
    np.testing.assert_array_equal(backend._host_slots, host.ravel())
    np.testing.assert_array_equal(backend._host_polynomials, host.sum(axis=1))
