import numpy as np
import pytest
from kvplane.executor.v1 import executor_service_pb2 as pb

from executor_service import sampling_input
from executor_service.backends.base import STATE
from executor_service.errors import InvalidFieldError
from executor_service.input_batch import StepLimits, fill_batch, parse_step
from executor_service.sampling_input import SamplingParser
from tests.unit.executor_shell.executor_builders import BLOCK_SIZE, Row, Sample, column, greedy, make_step, values_of

NAN, INF = float("nan"), float("inf")
NO_TOKENS = np.empty(0, dtype=np.int32)


def make_limits(**values):
    defaults = {
        "kv_epoch": 1,
        "num_blocks": 20,
        "num_host_blocks": 3,
        "block_size": 4,
        "vocab_size": 100,
        "max_model_len": 40,
        "windows": (0,),
        "max_num_batched_tokens": 16,
        "max_num_seqs": 4,
        "sampling": SamplingParser(100, 5),
    }
    given = defaults | values
    return StepLimits(**({"group_block_sizes": (given["block_size"],) * len(given["windows"])} | given))


def make_valid():
    """Three rows: a prefill of six, a decode at position 5, a decode at position 8 with a penalty."""
    penalised = greedy(repetition_penalty=1.5)
    return make_step(
        1,
        1,
        [
            Row([1, 2, 3, 4, 5, 6], [1, 2], samples=False),
            Row([7], [3, 4], start=5),
            Row([8], [5, 6, 7], start=8, params=penalised, history=([9, 9, 8], 2)),
        ],
        tags={1: b"tag"},
    )


def test_parse_step_valid_step_gives_the_backends_arrays():
    batch, failed = fill_batch(1, parse_step(make_valid(), make_limits()), NO_TOKENS)
    assert failed == []
    assert batch.num_rows == 3
    assert batch.query_indptr.tolist() == [0, 6, 7, 8]
    assert batch.seq_lens.tolist() == [6, 6, 9]
    assert batch.slot_mappings[0].tolist() == [4, 5, 6, 7, 8, 9, 17, 28]
    assert batch.slot_mappings[0].dtype == np.int64
    assert batch.sampling.rows.tolist() == [1, 2]
    assert batch.sampling.positions.tolist() == [6, 9]
    assert batch.sampling.histories[1].token_ids.tolist() == [9, 9, 8]
    assert batch.sampling.histories[1].prompt_len == 2
    columns = [batch.query_indptr, batch.token_ids, batch.positions, batch.seq_lens, *batch.slot_mappings]
    columns += [batch.sampling.rows, batch.sampling.params_index, batch.sampling.seeds, batch.sampling.positions]
    columns += [batch.tables[0].block_indptr, batch.tables[0].block_ids, batch.tables[0].last_block_len]
    for values in columns:
        assert values.flags.c_contiguous
        assert not values.flags.writeable


def test_parse_step_without_rows_is_legal():
    step = parse_step(make_step(1, 1, [], tags={3: b"t"}), make_limits())
    assert (step.tag_block_ids, step.tags, len(step.seq_lens)) == ([3], [b"t"], 0)


def test_parse_step_seeds_keep_all_64_bits():
    request = make_step(1, 1, [Row([1], [1], seed=2**64 - 1)])
    assert parse_step(request, make_limits()).sampling.seeds.tolist() == [2**64 - 1]


def test_parse_step_row_may_sample_as_often_as_there_may_be_rows():
    penalised, forks = greedy(presence_penalty=1.0), [Sample(seed=seed) for seed in (2, 3)]
    rows = [Row([1, 2], [1], seed=1, forks=forks), Row([3], [2], params=penalised, history=([4], 1))]
    sampling = parse_step(make_step(1, 1, rows), make_limits()).sampling
    assert sampling.rows.tolist() == [0, 0, 0, 1]
    assert sampling.positions.tolist() == [2, 2, 2, 1]
    assert sampling.seeds.tolist() == [1, 2, 3, 0]
    assert list(sampling.histories) == [3]


def test_parse_step_adapter_ids_are_none_where_no_row_has_one():
    request = make_step(1, 1, [Row([1], [1]), Row([2], [2])])
    assert parse_step(request, make_limits()).adapter_ids is None
    request.adapter_ids.CopyFrom(column([0, 0]))
    assert parse_step(request, make_limits()).adapter_ids is None
    request.adapter_ids.CopyFrom(column([0, 5]))
    assert parse_step(request, make_limits()).adapter_ids.tolist() == [0, 5]


@pytest.mark.parametrize(("values", "field"), [([1], "adapter_ids"), ([0, -1], "adapter_ids[1]")])
def test_parse_step_malformed_adapter_ids_are_refused(values, field):
    request = make_step(1, 1, [Row([1], [1]), Row([2], [2])])
    request.adapter_ids.CopyFrom(column(values))
    with pytest.raises(InvalidFieldError) as caught:
        parse_step(request, make_limits())
    assert caught.value.metadata["field"] == field


def test_parse_step_without_copies_has_no_runs():
    copies = parse_step(make_valid(), make_limits()).copies
    assert (copies.runs, copies.written_blocks.tolist()) == ((), [])


def test_parse_step_two_groups_give_two_tables():
    request = make_step(1, 1, [Row([1, 2], [1], more_tables=[[9]])])
    step = parse_step(request, make_limits(windows=(0, 0)))
    assert [slots.tolist() for slots in step.slot_mappings] == [[4, 5], [36, 37]]
    assert step.written_blocks.tolist() == [1, 1, 9, 9]


def test_parse_step_block_written_in_two_groups_is_refused():
    request = make_step(1, 1, [Row([1, 2], [1], more_tables=[[9]]), Row([1, 2], [9], more_tables=[[3]])])
    with pytest.raises(InvalidFieldError, match="every block written in one KV group, got block 9 in two"):
        parse_step(request, make_limits(windows=(0, 0)))


def test_parse_step_groups_with_block_sizes_of_their_own_have_tables_and_slots_of_their_own():
    rows = [Row([1, 2, 3], [1, 2], start=4, more_tables=[[8], [3, 5, 6, 7]]), Row([4], [9], more_tables=[[10], [11]])]
    request = make_step(1, 1, rows, block_sizes=(4, 16, 2))
    assert [values_of(table.last_block_len) for table in request.block_tables] == [[3, 1], [7, 1], [1, 1]]
    step = parse_step(request, make_limits(windows=(0, 0, 3), group_block_sizes=(4, 16, 2)))
    assert [slots.tolist() for slots in step.slot_mappings] == [
        [8, 9, 10, 36],
        [8 * 16 + 4, 8 * 16 + 5, 8 * 16 + 6, 160],
        [12, 13, 14, 22],
    ]
    assert step.written_blocks.tolist() == [2, 2, 2, 9, 8, 8, 8, 10, 6, 6, 7, 11]


@pytest.mark.parametrize(
    ("group", "sizes", "message"),
    [
        (1, (4, 4), r"block_tables\[1\].block_indptr: expected 1 blocks for row 0 .* block_size 8\), got 2 blocks"),
        (0, (8, 8), r"block_tables\[0\].block_indptr: expected 2 blocks for row 0 .* block_size 4\), got 1 blocks"),
    ],
)
def test_parse_step_table_of_another_groups_block_size_is_refused(group, sizes, message):
    request = make_step(1, 1, [Row([1, 2], [1, 2], start=4, more_tables=[[8, 9]])], block_sizes=sizes)
    with pytest.raises(InvalidFieldError, match=message):
        parse_step(request, make_limits(windows=(0, 0), group_block_sizes=(4, 8)))


def test_parse_step_last_block_len_of_another_groups_block_size_is_refused():
    request = make_step(1, 1, [Row([1, 2], [1, 2], start=4, more_tables=[[8]])], block_sizes=(4, 8))
    request.block_tables[1].last_block_len.CopyFrom(column([2]))
    with pytest.raises(InvalidFieldError, match=r"block_tables\[1\].last_block_len\[0\]: expected 6 .* got 2"):
        parse_step(request, make_limits(windows=(0, 0), group_block_sizes=(4, 8)))


def test_parse_step_block_written_in_two_groups_of_unequal_blocks_is_refused():
    """Slot 8 of the first group lies in block 2, slot 16 of the second, too."""
    request = make_step(1, 1, [Row([1], [2], more_tables=[[2]])], block_sizes=(4, 8))
    with pytest.raises(InvalidFieldError, match="every block written in one KV group, got block 2 in two"):
        parse_step(request, make_limits(windows=(0, 0), group_block_sizes=(4, 8)))


@pytest.mark.parametrize(("start", "nulls", "taken"), [(9, 1, True), (9, 2, False), (13, 2, True), (13, 3, False)])
def test_parse_step_null_blocks_go_by_the_groups_own_block_size(start, nulls, taken):
    """A window of 5 over blocks of 4, beside full attention over blocks of 16."""
    windowed = [0] * nulls + [2, 3, 4, 5][nulls:]
    request = make_step(1, 1, [Row([1, 2], [1], start=start, more_tables=[windowed])], block_sizes=(16, 4))
    limits = make_limits(windows=(0, 5), group_block_sizes=(16, 4))
    if taken:
        assert parse_step(request, limits).tables[1].block_ids.tolist() == windowed[: (start + 1) // 4 + 1]
    else:
        with pytest.raises(InvalidFieldError, match=r"block_tables\[1\].block_ids\[\d\].* which row 0 reads"):
            parse_step(request, limits)


@pytest.mark.parametrize(
    ("start", "window", "num_null"),
    [
        *[(8, 5, 1), (8, 4, 1), (9, 6, 1), (12, 5, 2), (12, 1, 3), (11, 4, 2), (0, 4, 0)],
        # Chunks of 5, 4 and 7.
        *[(8, -5, 1), (9, -5, 1), (10, -5, 2), (12, -4, 3), (11, -4, 2), (13, -7, 1), (0, -4, 0)],
    ],
)
def test_parse_step_null_block_is_taken_before_the_window_and_nowhere_else(start, window, num_null):
    """The entry of position p is p // 4; a row reads from start - window + 1 on, or from the first of start's chunk."""
    table = [1, 2, 3, 4]
    for null in range(4):
        windowed = [0 if entry <= null else block for entry, block in enumerate(table)]
        row = Row([1, 2], [11, 12, 13, 14], start=start, more_tables=[windowed])
        request = make_step(1, 1, [Row([5], [7], more_tables=[[8]]), row])
        if null < num_null:
            step = parse_step(request, make_limits(windows=(0, window)))
            assert step.slot_mappings[1].tolist()[1:] == [(start // 4 + 1) * 4 + start % 4 + place for place in (0, 1)]
        elif null < (start + 1) // 4 + 1:
            with pytest.raises(InvalidFieldError, match=r"block_tables\[1\].block_ids\[\d\].* which row 1 reads"):
                parse_step(request, make_limits(windows=(0, window)))


def test_parse_step_null_block_of_full_attention_is_refused():
    request = make_step(1, 1, [Row([1], [0, 2], start=4, more_tables=[[0, 3]])])
    with pytest.raises(InvalidFieldError, match=r"block_tables\[0\].block_ids\[0\]: expected a value in \[1, "):
        parse_step(request, make_limits(windows=(0, 2)))


@pytest.mark.parametrize(("start", "num_null"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_parse_step_null_block_is_taken_before_the_state_that_a_row_starts_from_and_nowhere_else(start, num_null):
    """The state after position start - 1 lies in entry (start - 1) // 4."""
    table = [1, 2, 3][: (start + 1) // 4 + 1]
    for null in range(len(table)):
        left = [0 if entry <= null else block for entry, block in enumerate(table)]
        request = make_step(1, 1, [Row([5], [7]), Row([1, 2], left, start=start)])
        if null < num_null:
            step = parse_step(request, make_limits(windows=(STATE,)))
            assert step.tables[0].block_ids.tolist() == [7, *left]
        else:
            with pytest.raises(InvalidFieldError, match=r"block_tables\[0\].block_ids\[\d\].* row 1 .* with a state"):
                parse_step(request, make_limits(windows=(STATE,)))


@pytest.mark.parametrize(
    ("rows", "block", "pair"),
    [
        # One leaves its state at offset 1, the other at offset 3 of the same block.
        ([Row([1, 2], [4]), Row([3], [4], start=3)], 4, (0, 1)),
        # One fills a block that the other starts from.
        ([Row([1], [4, 5], start=4), Row([1, 2, 3, 4], [4])], 4, (1, 0)),
        ([Row([1, 2, 3, 4], [4]), Row([1], [4, 5], start=4)], 4, (0, 1)),
    ],
)
def test_parse_step_state_that_another_row_of_the_step_uses_is_refused(rows, block, pair):
    message = rf"block_tables\[0\].block_ids: .* got block {block} in rows {pair[0]} and {pair[1]}"
    with pytest.raises(InvalidFieldError, match=message):
        parse_step(make_step(1, 1, rows), make_limits(windows=(STATE,)))


def test_parse_step_checkpoint_that_several_rows_start_from_is_taken():
    rows = [Row([1], [4, 5], start=4), Row([2, 3], [4, 6], start=4), Row([7], [8, 9], start=5)]
    step = parse_step(make_step(1, 1, rows), make_limits(windows=(STATE,)))
    assert step.written_blocks.tolist() == [5, 6, 6, 9]


def test_parse_step_without_rows_is_taken_from_a_model_with_states():
    step = parse_step(make_step(1, 1, [], copies=[(1, 2, 3)]), make_limits(windows=(STATE,)))
    assert step.written_blocks.tolist() == []
    assert step.copies.written_blocks.tolist() == [3]


def _set(path, values):
    """A mutation that replaces a column."""

    def mutate(request):
        target = request
        for name in path.split("."):
            target = target[int(name)] if name.isdigit() else getattr(target, name)
        target.CopyFrom(column(values))

    return mutate


def _raw(path, data):
    def mutate(request):
        target = request
        for name in path.split("."):
            target = target[int(name)] if name.isdigit() else getattr(target, name)
        target.data = data

    return mutate


def _param(**values):
    def mutate(request):
        for name, value in values.items():
            if isinstance(value, (list, dict)):
                getattr(request.sampling.params[0], name).clear() if isinstance(value, dict) else None
                holder = getattr(request.sampling.params[0], name)
                holder.update(value) if isinstance(value, dict) else holder.extend(value)
            else:
                setattr(request.sampling.params[0], name, value)

    return mutate


def _do(statement):
    def mutate(request):
        statement(request)

    return mutate


MALFORMED = {
    "indptr-empty": (_set("query_indptr", []), "query_indptr"),
    "indptr-not-from-0": (_set("query_indptr", [1, 6, 7, 8]), "query_indptr"),
    "indptr-not-to-end": (_set("query_indptr", [0, 6, 7, 9]), "query_indptr"),
    "indptr-not-growing": (_set("query_indptr", [0, 6, 6, 8]), "query_indptr[2]"),
    "indptr-falling": (_set("query_indptr", [0, 7, 6, 8]), "query_indptr[2]"),
    "indptr-negative": (_set("query_indptr", [0, -1, 7, 8]), "query_indptr[1]"),
    "indptr-wraps": (_set("query_indptr", [0, 2**31 - 1, -(2**31), 8]), "query_indptr[1]"),
    "indptr-bytes": (_raw("query_indptr", b"\0" * 15), "query_indptr.data"),
    "rows-more-than-profiled": (_set("query_indptr", [0, 1, 2, 3, 4, 8]), "query_indptr"),
    "tokens-more-than-profiled": (_set("token_ids", [1] * 17), "token_ids"),
    "tokens-too-few": (_set("token_ids", [1] * 7), "query_indptr"),
    "token-negative": (_set("token_ids", [1, 2, 3, -1, 5, 6, 7, 8]), "token_ids[3]"),
    "token-beyond-vocab": (_set("token_ids", [1, 2, 3, 4, 5, 6, 7, 100]), "token_ids[7]"),
    "tokens-bytes": (_raw("token_ids", b"\0" * 33), "token_ids.data"),
    "positions-too-few": (_set("positions", [0, 1, 2, 3, 4, 5, 5]), "positions"),
    "positions-gap": (_set("positions", [0, 1, 2, 4, 5, 6, 5, 8]), "positions[3]"),
    "positions-repeat": (_set("positions", [0, 1, 1, 2, 3, 4, 5, 8]), "positions[2]"),
    "position-negative": (_set("positions", [0, 1, 2, 3, 4, 5, -5, 8]), "positions[6]"),
    "position-beyond-model": (_set("positions", [0, 1, 2, 3, 4, 5, 40, 8]), "positions[6]"),
    "position-extreme": (_set("positions", [0, 1, 2, 3, 4, 5, 2**31 - 1, 8]), "positions[6]"),
    "tables-none": (_do(lambda r: r.ClearField("block_tables")), "block_tables"),
    "tables-two": (_do(lambda r: r.block_tables.add()), "block_tables"),
    "table-short": (_set("block_tables.0.block_indptr", [0, 1, 3, 7]), "block_tables[0].block_indptr"),
    "table-long": (_set("block_tables.0.block_indptr", [0, 3, 4, 7]), "block_tables[0].block_indptr"),
    "table-indptr-rows": (_set("block_tables.0.block_indptr", [0, 2, 7]), "block_tables[0].block_indptr"),
    "table-indptr-end": (_set("block_tables.0.block_indptr", [0, 2, 4, 8]), "block_tables[0].block_indptr"),
    "table-null-block": (_set("block_tables.0.block_ids", [1, 2, 3, 0, 5, 6, 7]), "block_tables[0].block_ids[3]"),
    "table-beyond": (_set("block_tables.0.block_ids", [1, 2, 3, 20, 5, 6, 7]), "block_tables[0].block_ids[3]"),
    "table-negative": (_set("block_tables.0.block_ids", [-1, 2, 3, 4, 5, 6, 7]), "block_tables[0].block_ids[0]"),
    "last-len-wrong": (_set("block_tables.0.last_block_len", [2, 3, 1]), "block_tables[0].last_block_len[1]"),
    "last-len-few": (_set("block_tables.0.last_block_len", [2, 2]), "block_tables[0].last_block_len"),
    "slot-written-twice": (_set("block_tables.0.block_ids", [1, 2, 3, 2, 5, 6, 7]), "block_tables[0].block_ids"),
    "feeds-length": (_set("feeds_from", [-1, 0]), "feeds_from"),
    "feeds-below": (_set("feeds_from", [-1, -2, 0]), "feeds_from[1]"),
    "sampling-row-beyond": (_set("sampling.rows", [1, 3]), "sampling.rows[1]"),
    "sampling-row-negative": (_set("sampling.rows", [-1, 2]), "sampling.rows[0]"),
    "samples-more-than-profiled": (_set("sampling.rows", [1, 1, 1, 2, 2]), "sampling.rows"),
    "sampling-rows-falling": (_set("sampling.rows", [2, 1]), "sampling.rows[1]"),
    "params-index-few": (_set("sampling.params_index", [0]), "sampling.params_index"),
    "params-index-beyond": (_set("sampling.params_index", [0, 2]), "sampling.params_index[1]"),
    "params-none": (_do(lambda r: r.sampling.ClearField("params")), "sampling.params_index[0]"),
    "seeds-few": (_do(lambda r: r.sampling.seeds.pop()), "sampling.seeds"),
    "temperature-nan": (_param(temperature=NAN), "sampling.params[0].temperature"),
    "temperature-inf": (_param(temperature=INF), "sampling.params[0].temperature"),
    "temperature-negative": (_param(temperature=-0.1), "sampling.params[0].temperature"),
    "top-k-negative": (_param(top_k=-1), "sampling.params[0].top_k"),
    "top-p-zero": (_param(top_p=0.0), "sampling.params[0].top_p"),
    "top-p-above": (_param(top_p=1.5), "sampling.params[0].top_p"),
    "top-p-nan": (_param(top_p=NAN), "sampling.params[0].top_p"),
    "min-p-above": (_param(min_p=1.01), "sampling.params[0].min_p"),
    "min-p-nan": (_param(min_p=NAN), "sampling.params[0].min_p"),
    "repetition-zero": (_param(repetition_penalty=0.0), "sampling.params[0].repetition_penalty"),
    "repetition-tiny": (_param(repetition_penalty=1e-40), "sampling.params[0].repetition_penalty"),
    "repetition-huge": (_param(repetition_penalty=16.5), "sampling.params[0].repetition_penalty"),
    "repetition-nan": (_param(repetition_penalty=NAN), "sampling.params[0].repetition_penalty"),
    "presence-above": (_param(presence_penalty=2.1), "sampling.params[0].presence_penalty"),
    "frequency-nan": (_param(frequency_penalty=NAN), "sampling.params[0].frequency_penalty"),
    "logprobs-above": (_param(num_logprobs=6), "sampling.params[0].num_logprobs"),
    "logprobs-below": (_param(num_logprobs=-2), "sampling.params[0].num_logprobs"),
    "bias-id-beyond": (_param(logit_bias={100: 1.0}), "sampling.params[0].logit_bias"),
    "bias-id-negative": (_param(logit_bias={-1: 1.0}), "sampling.params[0].logit_bias"),
    "bias-nan": (_param(logit_bias={7: NAN}), "sampling.params[0].logit_bias[7]"),
    "suppressed-beyond": (_param(suppressed_token_ids=[100]), "sampling.params[0].suppressed_token_ids"),
    "penalties-missing": (_do(lambda r: r.sampling.ClearField("penalties")), "sampling.penalties.sample_index"),
    "penalties-one-missing": (_param(presence_penalty=1.0), "sampling.penalties.sample_index"),
    "penalties-too-many": (_set("sampling.penalties.sample_index", [0, 1]), "sampling.penalties.sample_index"),
    "penalties-other-row": (_set("sampling.penalties.sample_index", [0]), "sampling.penalties.sample_index"),
    "penalties-indptr": (_set("sampling.penalties.indptr", [0, 2]), "sampling.penalties.indptr"),
    "penalties-indptr-length": (_set("sampling.penalties.indptr", [0, 1, 3]), "sampling.penalties.indptr"),
    "penalties-token": (_set("sampling.penalties.token_ids", [9, 9, 100]), "sampling.penalties.token_ids[2]"),
    "penalties-prompt-len": (_set("sampling.penalties.prompt_lens", [4]), "sampling.penalties.prompt_lens[0]"),
    "penalties-prompt-lens": (_set("sampling.penalties.prompt_lens", []), "sampling.penalties.prompt_lens"),
    "tag-block-null": (_set("block_tags.block_ids", [0]), "block_tags.block_ids[0]"),
    "tag-block-beyond": (_set("block_tags.block_ids", [20]), "block_tags.block_ids[0]"),
    "tag-count": (_set("block_tags.block_ids", [1, 2]), "block_tags.block_ids"),
    "tag-long": (_do(lambda r: r.block_tags.tags.__setitem__(0, bytes(4097))), "block_tags.tags[0]"),
}


@pytest.mark.parametrize(("mutate", "field"), MALFORMED.values(), ids=MALFORMED)
def test_parse_step_malformed_names_field_expected_and_got(mutate, field):
    request = make_valid()
    mutate(request)
    with pytest.raises(InvalidFieldError) as refused:
        parse_step(request, make_limits())
    assert refused.value.metadata["field"] == field
    assert refused.value.metadata["expected"]
    assert refused.value.metadata["got"]


def test_parse_step_penalties_without_a_penalised_row_are_refused():
    request = make_valid()
    request.sampling.params[1].repetition_penalty = 1.0
    with pytest.raises(InvalidFieldError, match="sample_index"):
        parse_step(request, make_limits())
    request.sampling.penalties.CopyFrom(pb.PenaltyHistories())
    assert parse_step(request, make_limits()).sampling.histories == {}


def test_parse_step_same_params_twice_are_parsed_once():
    limits = make_limits()
    first, second = (parse_step(make_valid(), limits).sampling.params[1] for _ in range(2))
    assert first is second


def make_biased(logit_bias):
    return make_step(1, 1, [Row([7], [3], params=greedy(logit_bias=logit_bias))])


def biases_of(parsed):
    bias = parsed.sampling.params[0].logit_bias
    return dict(zip(bias.token_ids.tolist(), bias.values.tolist(), strict=True))


def test_parse_step_largest_logit_bias_is_parsed_once_and_a_change_of_one_value_takes_effect():
    limits = make_limits(vocab_size=2_000, sampling=SamplingParser(2_000, 5))
    biases = {token_id: token_id / 4 for token_id in range(1_024)}
    first, second = (parse_step(make_biased(biases), limits) for _ in range(2))
    changed = parse_step(make_biased(biases | {700: -1.0}), limits)
    shorter = parse_step(make_biased({5: 1.25}), limits)
    assert first.sampling.params[0] is second.sampling.params[0]
    assert biases_of(first) == biases
    assert biases_of(changed) == biases | {700: -1.0}
    assert biases_of(shorter) == {5: 1.25}
    assert not first.sampling.params[0].logit_bias.values.flags.writeable


@pytest.mark.parametrize(("limit", "value", "kept"), [("_MAX_KNOWN", 3, 3), ("_MAX_KNOWN_BYTES", 2_000, 5)])
def test_parse_step_remembers_a_bounded_number_of_params(monkeypatch, limit, value, kept):
    monkeypatch.setattr(sampling_input, limit, value)
    parser = SamplingParser(100, 5)
    limits = make_limits(sampling=parser)
    most = 0
    for turn in range(20):
        biases = {token_id: float(turn) for token_id in range(40)}
        assert biases_of(parse_step(make_biased(biases), limits)) == biases
        most = max(most, len(parser._known))
        assert parser._known_bytes == sum(map(len, parser._known)) <= sampling_input._MAX_KNOWN_BYTES
    assert most == kept


def test_parse_step_params_larger_than_all_that_is_remembered_are_parsed_and_not_remembered(monkeypatch):
    monkeypatch.setattr(sampling_input, "_MAX_KNOWN_BYTES", 100)
    parser = SamplingParser(100, 5)
    biases = dict.fromkeys(range(40), 1.0)
    assert biases_of(parse_step(make_biased(biases), make_limits(sampling=parser))) == biases
    assert not parser._known


def test_parse_step_bad_params_are_never_remembered():
    limits = make_limits()
    for _ in range(2):
        request = make_valid()
        request.sampling.params[0].top_k = -1
        with pytest.raises(InvalidFieldError):
            parse_step(request, limits)


def make_fed():
    rows = [
        Row([1, 2, -7], [1], feed=1),
        Row([3], [2], start=1),
        Row([999], [3], start=3, feed=0, params=greedy(presence_penalty=1.0), history=([5, 6], 1)),
    ]
    return make_step(2, 1, rows, feeds_from_step_id=1)


def test_fill_batch_puts_tokens_at_the_rows_ends_and_into_histories():
    batch, failed = fill_batch(2, parse_step(make_fed(), make_limits()), np.array([41, 42], dtype=np.int32))
    assert failed == []
    assert batch.token_ids.tolist() == [1, 2, 42, 3, 41]
    assert not batch.token_ids.flags.writeable
    assert batch.sampling.histories[2].token_ids.tolist() == [5, 6, 41]
    assert batch.sampling.histories[2].prompt_len == 1


def test_fill_batch_row_fed_by_failed_row_runs_with_token_0():
    batch, failed = fill_batch(2, parse_step(make_fed(), make_limits()), np.array([-1, 42], dtype=np.int32))
    assert failed == [2]
    assert batch.token_ids.tolist() == [1, 2, 42, 3, 0]


def test_fill_batch_index_beyond_the_sampled_names_the_row():
    with pytest.raises(InvalidFieldError) as refused:
        fill_batch(2, parse_step(make_fed(), make_limits()), np.array([41], dtype=np.int32))
    assert refused.value.metadata["field"] == "feeds_from[0]"
    assert refused.value.metadata["got"] == "1"


def make_decode(*feeds):
    """One row for each feed, each of one token."""
    rows = [Row([-7], [index + 1], start=index % BLOCK_SIZE, feed=feed) for index, feed in enumerate(feeds)]
    return parse_step(make_step(2, 1, rows, feeds_from_step_id=1), make_limits())


@pytest.mark.parametrize(
    ("feeds", "in_order"), [((0, 1, 2), True), ((0, 1), True), ((0, 2, 1), False), ((1, 2), False), ((0, 0), False)]
)
def test_fill_batch_feeds_each_row_its_sample_in_order_or_not(feeds, in_order):
    step = make_decode(*feeds)
    assert step.feeds_in_order == in_order
    batch, failed = fill_batch(2, step, np.array([41, 42, 43], dtype=np.int32))
    assert failed == []
    assert batch.token_ids.tolist() == [41 + feed for feed in feeds]


def test_fill_batch_in_order_still_refuses_what_was_not_sampled_and_marks_failed_rows():
    with pytest.raises(InvalidFieldError) as refused:
        fill_batch(2, make_decode(0, 1, 2), np.array([41, 42], dtype=np.int32))
    assert refused.value.metadata["field"] == "feeds_from[2]"
    batch, failed = fill_batch(2, make_decode(0, 1, 2), np.array([41, -1, 43], dtype=np.int32))
    assert failed == [1]
    assert batch.token_ids.tolist() == [41, 0, 43]
