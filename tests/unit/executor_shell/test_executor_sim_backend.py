import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor_service.backends.base import STATE, BackendError, NotEnoughMemoryError
from executor_service.backends.sim_backend import SimBackend, SimBackendConfig
from executor_service.backends.sim_digest import expected_tokens
from executor_service.input_batch import StepLimits, fill_batch, parse_step
from executor_service.sampling_input import SamplingParser
from tests.unit.executor_shell.executor_builders import Row, Sample, greedy, make_step

VOCAB = 1000
PROMPT = list(range(100, 111))
NO_TOKENS = np.empty(0, dtype=np.int32)


class Sim:
    """A sim backend that is fed steps as the executor would."""

    def __init__(self, *, block_size=4, num_blocks=64, vocab_size=VOCAB, windows=(), sizes=()):
        config = SimBackendConfig(
            block_size=block_size,
            sim_num_blocks=num_blocks,
            sim_vocab_size=vocab_size,
            sim_windows=windows,
            sim_block_sizes=sizes,
        )
        self.block_size, self.sizes = block_size, sizes
        self.backend = SimBackend(config)
        info = self.backend.load()
        self.backend.initialize_kv_cache(num_blocks)
        sampling = SamplingParser(vocab_size, info.max_logprobs)
        self.limits = StepLimits(
            kv_epoch=1,
            num_blocks=num_blocks,
            num_host_blocks=0,
            block_size=block_size,
            vocab_size=vocab_size,
            max_model_len=info.max_model_len,
            windows=windows or (0,),
            group_block_sizes=info.group_block_sizes,
            max_num_batched_tokens=10_000,
            max_num_seqs=1_000,
            sampling=sampling,
        )

    def run(self, *rows):
        request = make_step(1, 1, rows, block_size=self.block_size, block_sizes=self.sizes)
        batch, _ = fill_batch(1, parse_step(request, self.limits), NO_TOKENS)
        return self.backend.execute(batch)

    def tokens(self, *rows):
        return self.run(*rows).sampled_token_ids.tolist()


def oracle(prompt, count, **values):
    return expected_tokens(prompt, count, vocab_size=VOCAB, **values)


def generate(sim, prompt, table, count, **values):
    """Prefill in one step, then decode."""
    tokens = sim.tokens(Row(prompt, table, **values))
    while len(tokens) < count:
        tokens += sim.tokens(Row([tokens[-1]], table, start=len(prompt) + len(tokens) - 1, **values))
    return tokens


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_execute_any_block_size_gives_the_oracles_tokens(block_size):
    table = [7, 3, 20, 1, 9, 2, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43]
    assert generate(Sim(block_size=block_size), PROMPT, table, 9) == oracle(PROMPT, 9)


@pytest.mark.parametrize("windows", [(0, 5), (6,), (0, 0), (0, 2, 9, 2), (STATE,), (0, STATE, 3, STATE)])
def test_execute_several_groups_give_the_oracles_tokens(windows):
    """Decoding, with null blocks from where a window has passed on."""
    sim, length = Sim(windows=windows), len(PROMPT)
    first, *more = tables = [list(range(1 + 15 * group, 16 + 15 * group)) for group in range(len(windows))]
    tokens = sim.tokens(Row(PROMPT, first, more_tables=more))
    while len(tokens) < 20:
        start = length + len(tokens) - 1
        for table, window in zip(tables, windows, strict=True):
            reads = 2 if window == STATE else window
            passed = max(0, start - reads + 1) // 4 if window else 0
            table[:passed] = [0] * passed
        tokens += sim.tokens(Row([tokens[-1]], first, start=start, more_tables=more))
    assert tokens == oracle(PROMPT, 20, windows=windows)
    assert tokens != oracle(PROMPT, 20)


@pytest.mark.parametrize(
    ("windows", "sizes"),
    [((0, 5), (4, 8)), ((0, 5), (8, 4)), ((0, 0), (3, 4)), ((0, 2, -9), (2, 6, 4)), ((0, STATE, 3), (4, 12, 2))],
)
def test_execute_groups_with_block_sizes_of_their_own_give_the_oracles_tokens(windows, sizes):
    """Before, the blocks held another sequence, each in another group and so in another size."""
    sim, length, count = Sim(windows=windows, sizes=sizes, num_blocks=80), len(PROMPT), len(windows)
    tables = [list(range(1 + 20 * group, 21 + 20 * group)) for group in range(count)]
    for turn in (1, 0):
        first, *more = tables[turn:] + tables[:turn]
        tokens = sim.tokens(Row(PROMPT, first, more_tables=more))
        while len(tokens) < 12:
            start = length + len(tokens) - 1
            tokens += sim.tokens(Row([tokens[-1]], first, start=start, more_tables=more))
        assert tokens == oracle(PROMPT, 12, windows=windows)


def test_execute_block_of_another_size_reads_as_unwritten():
    """A group that reads what another left, of the same tokens, finds nothing of it."""
    sim = Sim(windows=(0, 0), sizes=(4, 8))
    sim.run(Row(list(range(8)), [1, 2], more_tables=[[3]]))
    right = oracle(list(range(9)), 1, windows=(0, 0))
    assert sim.tokens(Row([8], [1, 2, 4], start=8, more_tables=[[3, 5]])) == right
    assert sim.tokens(Row([8], [3, 2, 4], start=8, more_tables=[[3, 5]])) != right
    sim.run(Row([8], [3], more_tables=[[9]], samples=False))
    assert sim.tokens(Row([8], [1, 2, 4], start=8, more_tables=[[3, 5]])) != right


@pytest.mark.parametrize("sizes", [(4,), (4, 8, 8), (4, 0)])
def test_load_block_sizes_that_are_not_one_for_each_group_are_refused(sizes):
    with pytest.raises(BackendError, match="--sim-block-sizes: expected a block size of at least 1 for each") as caught:
        SimBackend(SimBackendConfig(sim_windows=(0, 8), sim_block_sizes=sizes)).load()
    assert caught.value.reason == "BAD_BLOCK_SIZES"


def test_profile_of_unequal_blocks_counts_each_groups_own_and_their_common_bytes():
    """A sequence of 100 tokens: 25 blocks of 4, and at most 3 of 32 at a time for a window of 20 and chunks of 16."""
    config = {"sim_windows": (0, 20), "sim_block_sizes": (4, 32), "max_model_len": 100, "swap_space": 1000}
    profile = SimBackend(SimBackendConfig(**config, sim_num_blocks=29)).profile_memory(16, 4)
    assert (profile.bytes_per_block, profile.num_blocks, profile.num_host_blocks) == (32 * 8, 29, 3)
    info = SimBackend(SimBackendConfig(**config)).load()
    assert info.group_block_sizes == (4, 32)
    assert {group.bytes_per_block for group in info.kv_groups} == {32 * 8}
    with pytest.raises(NotEnoughMemoryError, match="needs 29 blocks of 4 or 32 tokens"):
        SimBackend(SimBackendConfig(**config, sim_num_blocks=28)).profile_memory(16, 4)


def test_execute_group_that_reads_another_block_in_its_window_gives_another_token():
    def token(sliding):
        sim = Sim(windows=(0, 5))
        sim.run(Row(list(range(12)), [1, 2, 3], more_tables=[[5, 6, 7]]))
        return sim.tokens(Row([12], [1, 2, 3, 4], start=12, more_tables=[sliding]))

    right = oracle(list(range(13)), 1, windows=(0, 5))
    assert token([5, 6, 7, 8]) == token([0, 0, 7, 8]) == token([9, 9, 7, 8]) == right
    assert token([5, 6, 9, 8]) != right
    assert token([5, 6, 3, 8]) != right, "another group's block of the same tokens"


def test_oracle_values_never_change():
    """Recorded: a change of the arithmetic must be seen, since other tests and traces build on the tokens."""
    assert oracle([1, 2, 3], 4) == [936, 300, 864, 456]
    assert oracle([1, 2, 3], 4, seed=5, temperature=1.0) == [444, 859, 880, 975]


def test_execute_temperature_uses_seed_and_position():
    params = greedy(temperature=0.7)
    drawn = generate(Sim(), PROMPT, list(range(1, 9)), 6, params=params, seed=2**63 + 5)
    assert drawn == oracle(PROMPT, 6, seed=2**63 + 5, temperature=0.7)
    assert drawn != oracle(PROMPT, 6, seed=5, temperature=0.7)
    assert drawn != oracle(PROMPT, 6)


def test_execute_row_sampled_often_equals_as_many_rows():
    warm, penalised = greedy(temperature=0.7), greedy(temperature=0.7, presence_penalty=1.0)
    ways = [Sample(warm, 1), Sample(warm, 2), Sample(greedy()), Sample(penalised, 2, (PROMPT, 4))]
    ways += [Sample(greedy(suppressed_token_ids=oracle(PROMPT, 1), num_logprobs=0))]
    first, *forks = ways
    rows = [Row([9, 9], [50]), Row(PROMPT, [1, 2, 3], params=first.params, seed=first.seed, forks=forks)]
    together = Sim().run(*rows)
    apart = Sim().run(*(Row(PROMPT, [3 * i + 1, 3 * i + 2, 3 * i + 3], **vars(way)) for i, way in enumerate(ways)))
    tokens = together.sampled_token_ids.tolist()
    assert tokens[1:] == apart.sampled_token_ids.tolist()
    assert tokens[1:3] == [oracle(PROMPT, 1, temperature=0.7, seed=seed)[0] for seed in (1, 2)]
    assert len(set(tokens[1:])) == len(ways)
    assert list(together.logprobs) == [5]


def test_execute_row_whose_one_fork_has_no_token_left_fails():
    none_left = Sample(greedy(suppressed_token_ids=range(4)))
    result = Sim(vocab_size=4).run(Row([1], [1], forks=[none_left]), Row([2], [2]))
    assert {(failure.row, failure.reason) for failure in result.failures} == {(0, "ALL_TOKENS_SUPPRESSED")}
    assert result.sampled_token_ids.tolist()[2:] == expected_tokens([2], 1, vocab_size=4)


def test_execute_state_that_is_of_another_position_gives_another_token():
    """Not the state of the block before, nor the same block's once it has gone on."""
    tokens, table = list(range(50, 61)), [1, 2, 3]
    right = oracle(tokens, 1, windows=(STATE,))
    sim = Sim(windows=(STATE,))
    sim.run(Row(tokens[:8], table, samples=False))
    assert sim.tokens(Row(tokens[8:], table, start=8)) == right
    # The same row once more starts from where it started: a checkpoint. One that goes on in its block does not.
    assert sim.tokens(Row(tokens[8:], table, start=8)) == right
    assert sim.tokens(Row(tokens[9:], table, start=9)) != right
    assert sim.tokens(Row(tokens[8:], [1, 1, 3], start=8)) != right


def test_execute_state_rows_start_from_a_checkpoint_and_leave_others():
    tokens = list(range(70, 90))
    sim = Sim(windows=(STATE,))
    sim.run(Row(tokens, [1, 2, 3, 4, 5], samples=False))
    for checkpoint in (1, 2, 3, 4):
        own = [*range(1, checkpoint + 1), 9]
        branch = [*tokens[: 4 * checkpoint], 7, 7]
        assert sim.tokens(Row([7, 7], own, start=4 * checkpoint)) == oracle(branch, 1, windows=(STATE,))


@pytest.mark.parametrize("size", [2, 3, 4, 7, 50])
@pytest.mark.parametrize("first", [1, 5, 6, 7, 8, 10])
def test_execute_chunks_give_the_oracles_tokens_and_read_nothing_before(size, first):
    """A prompt in two rows, then decoded; what lies before the chunk of a row's first token is the null block."""
    windows = (0, -size)
    sim, tokens, start = Sim(windows=windows), list(PROMPT), 0
    while len(tokens) < len(PROMPT) + 8:
        end = first if not start else len(tokens)
        nulls = start // size * size // 4
        chunks = [0] * nulls + list(range(21 + nulls, 29))
        row = Row(tokens[start:end], list(range(1, 9)), start=start, more_tables=[chunks])
        start, produced = end, sim.tokens(row)
        tokens += produced if end == len(tokens) else []
    assert tokens[len(PROMPT) :] == oracle(PROMPT, 8, windows=windows)
    assert tokens[len(PROMPT) :] != oracle(PROMPT, 8, windows=(0, size)) or size == 50


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 9])
def test_execute_rows_that_read_chunks_of_the_same_step_give_the_oracles_tokens(size):
    """The third goes on from the second, which goes on from the first, of which each chunk's digests begin anew."""
    windows = (-size,)
    tokens = [PROMPT, [*PROMPT[:4], 7, 8, 9, 10], [*PROMPT[:4], 7, 8, 9, 10, 11]]
    rows = [Row(tokens[2][8:], [1, 5, 6], start=8), Row(tokens[0], [1, 2, 3]), Row(tokens[1][4:], [1, 5], start=4)]
    right = [oracle(sequence, 1, windows=windows)[0] for sequence in tokens]
    assert Sim(windows=windows).tokens(*rows) == [right[2], right[0], right[1]]


def test_load_window_in_which_no_token_reads_the_one_before_is_refused():
    window = 1
    with pytest.raises(BackendError, match=f"--sim-windows: expected 0 .* got {window}") as caught:
        SimBackend(SimBackendConfig(sim_windows=(0, window))).load()
    assert caught.value.reason == "BAD_WINDOW"


def test_profile_memory_of_several_groups_counts_a_sequences_blocks_in_all():
    # 100 tokens in blocks of 16: 7 of full attention, and of a window of 20 with steps of 16 tokens 4.
    config = {"sim_windows": (0, 20), "max_model_len": 100}
    SimBackend(SimBackendConfig(sim_num_blocks=12, **config)).profile_memory(16, 4)
    with pytest.raises(NotEnoughMemoryError, match="needs 12 blocks of 16"):
        SimBackend(SimBackendConfig(sim_num_blocks=11, **config)).profile_memory(16, 4)


def test_profile_memory_host_blocks_are_what_the_swap_space_holds():
    def host_blocks(swap_space):
        return SimBackend(SimBackendConfig(swap_space=swap_space)).profile_memory(64, 4).num_host_blocks

    assert [host_blocks(size) for size in (0, 127, 128, 1 << 20)] == [0, 0, 1, 8192]
    assert host_blocks(1 << 60) == 2**31 - 1


def test_execute_greedy_ignores_the_seed():
    assert Sim().tokens(Row(PROMPT, [1, 2, 3], seed=1)) == Sim().tokens(Row(PROMPT, [1, 2, 3], seed=2))


def test_execute_suppressed_tokens_are_not_produced():
    (best,) = oracle(PROMPT, 1)
    banned = [best, (best + 1) % VOCAB]
    produced = Sim().tokens(Row(PROMPT, [1, 2, 3], params=greedy(suppressed_token_ids=banned)))
    assert produced == oracle(PROMPT, 1, suppressed_token_ids=banned) == [(best + 2) % VOCAB]
    assert oracle(PROMPT, 3, suppressed_token_ids=banned, min_tokens=0) == oracle(PROMPT, 3)


def test_execute_all_tokens_suppressed_fails_the_row_alone():
    params = greedy(suppressed_token_ids=range(4))
    result = Sim(vocab_size=4).run(Row([1], [1], params=params), Row([2], [2]))
    assert [(failure.row, failure.reason) for failure in result.failures] == [(0, "ALL_TOKENS_SUPPRESSED")]
    assert result.sampled_token_ids.tolist() == [-1, *expected_tokens([2], 1, vocab_size=4)]


def test_execute_penalty_depends_on_history_and_prompt_length():
    params = greedy(presence_penalty=0.5)

    def first(history):
        return Sim().tokens(Row(PROMPT, [1, 2, 3], params=params, history=history))

    assert first((PROMPT, len(PROMPT))) == oracle(PROMPT, 1, penalised=True) != oracle(PROMPT, 1)
    assert first((PROMPT, len(PROMPT) - 1)) != first((PROMPT, len(PROMPT)))
    assert first((PROMPT[:-1], len(PROMPT) - 1)) != first((PROMPT, len(PROMPT)))


def test_execute_logprob_of_the_produced_token_on_request():
    result = Sim().run(Row(PROMPT, [1, 2, 3], params=greedy(num_logprobs=0)), Row([1], [5]))
    assert list(result.logprobs) == [0]
    assert result.logprobs[0].token_ids.tolist() == result.sampled_token_ids[:1].tolist()
    assert result.logprobs[0].logprobs.tolist() == [0.0]


# One change to the table or to a block's content each; a decode at position 11 reads three blocks through it.
def _wrong_block(sim, table):
    sim.run(Row([7, 7, 7, 7], [50], samples=False))
    return [50, *table[1:]]


def _swapped_blocks(sim, table):
    return [table[1], table[0], *table[2:]]


def _stale_slot(sim, table):
    sim.run(Row([42], [60, 61, table[0]], start=9, samples=False))
    return table


def _stale_slot_of_last_block(sim, table):
    sim.run(Row([42], [60, table[2]], start=5, samples=False))
    return table


def _never_written(sim, table):
    return [table[0], 59, table[2]]


def _evicted_by_other_request(sim, table):
    sim.run(Row([1, 2, 3, 4], [table[1]], samples=False))
    return table


def _half_written_by_same_prompt(sim, table):
    sim.run(Row(PROMPT[:2], [58], samples=False))
    return [58, *table[1:]]


@pytest.mark.parametrize(
    "damage",
    [
        _wrong_block,
        _swapped_blocks,
        _stale_slot,
        _stale_slot_of_last_block,
        _never_written,
        _evicted_by_other_request,
        _half_written_by_same_prompt,
    ],
)
def test_execute_damaged_table_or_block_changes_the_token(damage):
    sim, table = Sim(), [4, 9, 6]
    first, second = oracle(PROMPT, 2)
    assert sim.tokens(Row(PROMPT, table)) == [first]
    assert sim.tokens(Row([first], table, start=11)) == [second]
    assert sim.tokens(Row([first], damage(sim, table), start=11)) != [second]


def test_execute_content_beyond_the_sequence_does_not_matter():
    sim = Sim()
    sim.run(Row(list(range(12)), [4, 9, 6], samples=False))
    assert generate(sim, PROMPT[:5], [4, 9, 6], 3) == oracle(PROMPT[:5], 3)


def test_execute_row_reads_prefix_that_another_row_of_the_step_fills():
    """Rows 0 and 1 wait for row 2; row 0 also shares what row 1 fills."""
    prompt = list(range(200, 212))
    rows = [
        Row(prompt[8:], [1, 2, 3], start=8),
        Row(prompt[4:8], [1, 2], start=4),
        Row(prompt[:4], [1]),
        Row([5, 6], [10, 11]),
    ]
    expected = [oracle(prompt[:end], 1)[0] for end in (12, 8, 4)] + oracle([5, 6], 1)
    assert Sim().tokens(*rows) == expected


def test_execute_rows_that_wait_for_each_other_raise_and_write_nothing():
    sim = Sim()
    sim.run(Row(PROMPT, [1, 2, 3], samples=False))
    before = sim.backend.slots.copy()
    with pytest.raises(BackendError) as refused:
        sim.run(Row([1, 2, 3, 4], [21, 20], start=4), Row([1, 2, 3, 4], [20, 21], start=4))
    assert refused.value.reason == "CIRCULAR_BLOCK_TABLES"
    np.testing.assert_array_equal(sim.backend.slots, before)
    assert sim.tokens(Row(oracle(PROMPT, 1), [1, 2, 3], start=11)) == oracle(PROMPT, 2)[1:]


def test_execute_row_that_waits_for_itself_raises():
    with pytest.raises(BackendError):
        Sim().run(Row([1, 2, 3, 4], [20, 20], start=4))


def test_execute_writes_only_the_steps_slots():
    sim = Sim()
    sim.run(Row(PROMPT, [1, 2, 3], samples=False))
    before = sim.backend.slots.copy()
    sim.run(Row([1, 2], [8, 9], start=3))
    assert np.flatnonzero(sim.backend.slots != before).tolist() == [35, 36]


def test_initialize_kv_cache_again_forgets_everything():
    sim = Sim()
    sim.run(Row(PROMPT, [1, 2, 3], samples=False))
    sim.backend.initialize_kv_cache(64)
    assert not sim.backend.slots.any()
    assert sim.tokens(Row(oracle(PROMPT, 1), [1, 2, 3], start=11)) != oracle(PROMPT, 2)[1:]


def test_profile_memory_reports_blocks_or_what_is_short():
    profile = SimBackend(SimBackendConfig(sim_num_blocks=9, max_model_len=128)).profile_memory(64, 4)
    assert (profile.num_blocks, profile.overridden) == (9, False)
    assert int(profile.utilization * profile.total_bytes - profile.peak_bytes) == profile.available_bytes
    assert profile.available_bytes // profile.bytes_per_block == 9
    overridden = SimBackend(SimBackendConfig(num_blocks_override=20)).profile_memory(64, 4)
    assert (overridden.num_blocks, overridden.overridden) == (20, True)
    with pytest.raises(NotEnoughMemoryError, match="needs 10 blocks"):
        SimBackend(SimBackendConfig(sim_num_blocks=9, max_model_len=129)).profile_memory(64, 4)


def test_load_eos_beyond_vocab_is_refused():
    with pytest.raises(BackendError, match="--sim-eos-token-ids"):
        SimBackend(SimBackendConfig(sim_vocab_size=10, sim_eos_token_ids=(10,))).load()
    assert SimBackend(SimBackendConfig(sim_eos_token_ids=(2, 5))).load().eos_token_ids == (2, 5)


@given(st.data())
@settings(max_examples=60)
def test_execute_any_chunking_and_batching_gives_the_oracles_tokens(data):
    """Several sequences, prefilled in random chunks beside each other's decodes, through random tables."""
    sim = Sim(num_blocks=200)
    free = data.draw(st.permutations(range(1, 200)))
    prompts = data.draw(st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=25), min_size=1, max_size=5))
    tables = [[free.pop() for _ in range(9)] for _ in prompts]
    known, done = [list(prompt) for prompt in prompts], [0] * len(prompts)
    while any(len(known[i]) < len(prompts[i]) + 4 for i in range(len(prompts))):
        chosen = data.draw(st.lists(st.sampled_from(range(len(prompts))), min_size=1, unique=True))
        ends = {i: data.draw(st.integers(done[i] + 1, len(known[i]))) for i in chosen}
        rows = [
            Row(known[i][done[i] : ends[i]], tables[i], start=done[i], samples=ends[i] == len(known[i])) for i in chosen
        ]
        sampled = iter(sim.tokens(*rows))
        for i in chosen:
            done[i] = ends[i]
            if ends[i] == len(known[i]):
                known[i].append(next(sampled))
        if sum(map(len, known)) > 400 or max(map(len, known)) >= 36:
            break
    for prompt, tokens in zip(prompts, known, strict=True):
        assert tokens[len(prompt) :] == oracle(prompt, len(tokens) - len(prompt))
