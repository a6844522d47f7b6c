"""Steps written by hand give, in float32, exactly the greedy tokens of transformers' generate."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from executor_service.backends.base import BackendError, PenaltyHistory
from executor_service.backends.torch_backend import TorchBackend, TorchBackendConfig
from executor_service.kernels.attention_plan import AttentionLimits
from executor_service.kernels.torch_paged import TorchKernels
from executor_service.kv_cache import KvLayout, PagedKvCache
from executor_service.layer_groups import group_layers
from executor_service.model_loader import load_model
from executor_service.model_runner import ATTENTION_NAME, ModelRunner, probe
from tests.unit.executor.step_builder import (
    VOCAB_SIZE,
    Row,
    Sample,
    build_step,
    prompt_of,
    reference_tokens,
    sampling,
    save_tiny_model,
    tiny_config,
)

NEW_TOKENS = 24
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def sharing(tmp_path_factory: pytest.TempPathFactory) -> TorchBackend:
    """A model whose last layers read the K/V of earlier ones; the very last one's are not the last that are kept."""
    folder = save_tiny_model(tmp_path_factory.mktemp("sharing"), "gemma3n")
    backend = TorchBackend(
        TorchBackendConfig(str(folder), device="cpu", dtype="float32", block_size=4, native_kernels=False)
    )
    backend.load()
    backend.initialize_kv_cache(64)
    return backend


class Harness:
    """A runner with a cache, which decodes several sequences through hand-written tables."""

    def __init__(
        self, folder: Path, block_size: int, num_blocks: int = 64, limits: AttentionLimits | None = None
    ) -> None:
        model = load_model(str(folder), device=CPU, dtype="float32").model
        windows, (shape, *_) = probe(model, VOCAB_SIZE)
        groups = group_layers(windows)
        self.block_size = block_size
        self.cache = PagedKvCache(KvLayout(groups.num_pages, *shape, block_size, torch.float32), num_blocks, CPU)
        self.runner = ModelRunner(model, TorchKernels(limits or AttentionLimits(gather_tokens=1 << 16)), groups)
        self.free = np.random.default_rng(block_size).permutation(np.arange(1, num_blocks)).tolist()

    def take(self, tokens: int) -> list[int]:
        """Shuffled blocks for this many tokens."""
        return [self.free.pop() for _ in range(-(-tokens // self.block_size))]

    def step(self, rows: list[Row]) -> list[int]:
        """Run one step; the tokens of the rows that sample."""
        result = self.runner.run(build_step(rows, self.block_size), self.cache)
        assert not result.failures
        return [int(token) for token in result.sampled_token_ids]

    def decode(self, sequences: list[list[int]], tables: list[list[int]], count: int) -> None:
        """Extend the sequences, whose last token is not computed yet, by `count` greedy tokens in common steps."""
        for _ in range(count):
            rows = [Row(seq[-1:], len(seq) - 1, table) for seq, table in zip(sequences, tables, strict=True)]
            for seq, token in zip(sequences, self.step(rows), strict=True):
                seq.append(token)


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_run_ragged_batch_equals_generate(folder: Path, block_size: int) -> None:
    harness = Harness(folder, block_size)
    prompts = [prompt_of(length, seed) for seed, length in enumerate((1, 7, 32, 45, 100))]
    tables = [harness.take(len(prompt) + NEW_TOKENS) for prompt in prompts]
    first = harness.step([Row(prompt, 0, table) for prompt, table in zip(prompts, tables, strict=True)])
    sequences = [[*prompt, token] for prompt, token in zip(prompts, first, strict=True)]
    harness.decode(sequences, tables, NEW_TOKENS - 1)
    for prompt, seq in zip(prompts, sequences, strict=True):
        assert seq[len(prompt) :] == reference_tokens(folder, prompt, NEW_TOKENS)


def test_run_chunked_prefill_mixed_with_decode_equals_generate(folder: Path) -> None:
    harness = Harness(folder, 16, limits=AttentionLimits(gather_tokens=32, mask_elements=64, index_elements=40))
    long, short = prompt_of(90, 5), prompt_of(11, 6)
    long_table, short_table = harness.take(90 + NEW_TOKENS), harness.take(11 + NEW_TOKENS)
    decoding = [*short, *harness.step([Row(short, 0, short_table)])]
    chunks = [(0, 7), (7, 48), (48, 49), (49, 90)]  # one of a single token, none at a block boundary but one
    for start, end in chunks:
        chunk = Row(long[start:end], start, long_table, params=sampling() if end == 90 else None)
        tokens = harness.step([chunk, Row(decoding[-1:], len(decoding) - 1, short_table)])
        decoding.append(tokens[-1])
    sequences = [[*long, tokens[0]], decoding]
    harness.decode(sequences, [long_table, short_table], NEW_TOKENS - 1 - len(chunks))
    for prompt, seq in zip((long, short), sequences, strict=True):
        assert seq[len(prompt) :] == reference_tokens(folder, prompt, len(seq) - len(prompt))


def test_run_rows_sharing_blocks_of_the_same_step_equals_generate(folder: Path) -> None:
    harness = Harness(folder, 8)
    shared = prompt_of(24, 9)
    tails = [prompt_of(5, 10), prompt_of(9, 11)]
    common = harness.take(24)
    tables = [[*common, *harness.take(len(tail) + NEW_TOKENS)] for tail in tails]
    # The second row reads the blocks that the first fills in this very step.
    first = harness.step([Row([*shared, *tails[0]], 0, tables[0]), Row(tails[1], 24, tables[1])])
    sequences = [[*shared, *tail, token] for tail, token in zip(tails, first, strict=True)]
    harness.decode(sequences, tables, NEW_TOKENS - 1)
    for tail, seq in zip(tails, sequences, strict=True):
        assert seq[24 + len(tail) :] == reference_tokens(folder, [*shared, *tail], NEW_TOKENS)


def test_run_stale_nan_in_the_cache_changes_nothing(folder: Path) -> None:
    prompt = prompt_of(21, 3)
    results = []
    for garbage in (0.0, float("nan")):
        harness = Harness(folder, 16)
        for layer in harness.cache.layers:
            layer.fill_(garbage)
        table = harness.take(21 + NEW_TOKENS)
        seq = [*prompt, *harness.step([Row(prompt, 0, table)])]
        harness.decode([seq], [table], NEW_TOKENS - 1)
        results.append(seq)
    assert results[0] == results[1]
    assert results[0][21:] == reference_tokens(folder, prompt, NEW_TOKENS)


@pytest.mark.parametrize("own", [[4, 5, 6, 7], [5]])
def test_run_row_sampled_often_equals_as_many_rows(folder: Path, own: list[int]) -> None:
    """Also with as many samples as there are tokens, or rows, where what is asked for looks like every token's."""
    harness = Harness(folder, 8)
    past = prompt_of(len(own), 3)
    histories = [PenaltyHistory(np.array([*own, *past[:n]], dtype=np.int32), len(own)) for n in (0, 1)]
    ways = [
        Sample(sampling(temperature=0.8, top_p=0.9, num_logprobs=2), 11),
        Sample(sampling(), 12),
        Sample(sampling(presence_penalty=1.5, repetition_penalty=1.3), 13, histories[0]),
        Sample(sampling(temperature=1.3, frequency_penalty=0.7), 14, histories[1]),
    ][: max(2, len(own))]
    other = Row(prompt_of(9, 8), 0, harness.take(9), params=None)
    row = Row(own, 0, harness.take(4), ways[0].params, ways[0].seed, ways[0].history, ways[1:])
    together = harness.runner.run(build_step([row, other] if len(own) == 1 else [row], 8), harness.cache)
    rows = [Row(own, 0, harness.take(4), one.params, one.seed, one.history) for one in ways]
    apart = harness.runner.run(build_step(rows, 8), harness.cache)
    assert together.sampled_token_ids.tolist() == apart.sampled_token_ids.tolist()
    assert list(together.logprobs) == list(apart.logprobs) == [0]
    np.testing.assert_array_equal(together.logprobs[0].token_ids, apart.logprobs[0].token_ids)
    np.testing.assert_allclose(together.logprobs[0].logprobs, apart.logprobs[0].logprobs, rtol=1e-5)
    assert not together.failures


def test_run_row_sampled_twice_does_not_hide_a_bad_row_that_does_not_sample(folder: Path) -> None:
    harness = Harness(folder, 8)
    with torch.inference_mode():
        harness.runner._model.get_input_embeddings().weight[2] = float("nan")
    rows = [
        Row(prompt_of(6, 1), 0, harness.take(6), forks=[Sample(seed=1)]),
        Row([5, 2, 6], 0, harness.take(3), params=None),
    ]
    result = harness.runner.run(build_step(rows, 8), harness.cache)
    assert [(f.row, f.reason) for f in result.failures] == [(1, "NON_FINITE_KV")]


def test_run_without_sampling_writes_kv_and_returns_no_token(folder: Path) -> None:
    harness = Harness(folder, 8)
    table = harness.take(20)
    assert harness.step([Row(prompt_of(20, 1), 0, table, params=None)]) == []
    assert all(bool(layer[:, table[0]].abs().sum() > 0) for layer in harness.cache.layers)
    assert all(bool(layer[:, 0].abs().sum() == 0) for layer in harness.cache.layers)


def test_run_row_with_nan_logits_fails_alone(folder: Path) -> None:
    harness = Harness(folder, 8)
    good, bad = prompt_of(10, 1), prompt_of(10, 2)
    tables = [harness.take(12), harness.take(12)]
    harness.step([Row(good, 0, tables[0]), Row(bad, 0, tables[1])])
    for layer in harness.cache.layers:
        layer[:, tables[1][0]] = float("nan")
    rows = [Row([5], 10, tables[1], params=sampling(num_logprobs=2)), Row([5], 10, tables[0])]
    result = harness.runner.run(build_step(rows, 8), harness.cache)
    assert [(f.row, f.reason) for f in result.failures] == [(0, "NON_FINITE_LOGITS")]
    assert result.sampled_token_ids[0] == -1
    assert result.sampled_token_ids[1] == reference_tokens(folder, [*good, 5], 1)[0]
    assert not result.logprobs


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_run_row_without_sampling_whose_kv_is_not_finite_fails_alone(folder: Path, value: float) -> None:
    harness = Harness(folder, 8)
    poison = 2
    with torch.inference_mode():
        harness.runner._model.get_input_embeddings().weight[poison] = value
    decoding, chunk, bad = prompt_of(10, 1), prompt_of(12, 2), prompt_of(20, 3)
    bad[7] = poison
    tables = [harness.take(12), harness.take(14), harness.take(20)]
    harness.step([Row(decoding, 0, tables[0])])
    rows = [Row(bad, 0, tables[2], params=None), Row([5], 10, tables[0]), Row(chunk, 0, tables[1], params=None)]
    result = harness.runner.run(build_step(rows, 8), harness.cache)
    assert [(f.row, f.reason) for f in result.failures] == [(0, "NON_FINITE_KV")]
    assert result.sampled_token_ids.tolist() == reference_tokens(folder, [*decoding, 5], 1)
    assert harness.step([Row([6], 12, tables[1])]) == reference_tokens(folder, [*chunk, 6], 1)


@pytest.mark.parametrize("projection", ["k_proj", "v_proj"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_run_kv_that_is_not_finite_in_one_layer_fails_the_row(folder: Path, layer: int, projection: str) -> None:
    harness = Harness(folder, 8)
    attention = harness.runner._model.model.layers[layer].self_attn

    def poison_a_token(_module: torch.nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        output[0, 17, 3] = float("nan")  # of the second row, neither its first nor its last
        return output

    hook = getattr(attention, projection).register_forward_hook(poison_a_token)
    tables = [harness.take(12), harness.take(12)]
    rows = [Row(prompt_of(12, seed), 0, table, params=None) for seed, table in enumerate(tables)]
    result = harness.runner.run(build_step(rows, 8), harness.cache)
    hook.remove()
    assert [(f.row, f.reason) for f in result.failures] == [(1, "NON_FINITE_KV")]


@pytest.mark.parametrize("projection", ["k_proj", "v_proj"])
@pytest.mark.parametrize("layer", range(4))
def test_run_kv_that_is_not_finite_where_the_last_layers_keep_none_fails_the_row(
    sharing: TorchBackend, layer: int, projection: str
) -> None:
    model = sharing._ready()
    assert model.groups.source_of(6) < model.groups.last_own == 3
    attention = model.loaded.model.model.layers[layer].self_attn

    def poison_a_token(_module: torch.nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        output[0, 17] = float("nan")  # of the second row, neither its first nor its last
        return output

    hook = getattr(attention, projection).register_forward_hook(poison_a_token)
    free, rows = iter(range(1, 64)), []
    for seed in range(2):
        first, *others = [[next(free) for _ in range(3)] for _ in model.groups.windows]
        rows.append(Row(prompt_of(12, seed), 0, first, params=None, more_blocks=others))
    result = sharing.execute(build_step(rows, 4))
    hook.remove()
    assert [(f.row, f.reason) for f in result.failures] == [(1, "NON_FINITE_KV")]


def test_run_chunk_behind_a_bad_context_fails(folder: Path) -> None:
    harness = Harness(folder, 8)
    prompt, table = prompt_of(30, 1), harness.take(30)
    harness.step([Row(prompt[:16], 0, table, params=None)])
    harness.cache.layers[0][1, table[0], 3] = float("inf")
    result = harness.runner.run(build_step([Row(prompt[16:24], 16, table, params=None)], 8), harness.cache)
    assert [(f.row, f.reason) for f in result.failures] == [(0, "NON_FINITE_KV")]


def test_run_logprobs_equal_log_softmax_of_the_full_model(folder: Path) -> None:
    harness = Harness(folder, 16)
    prompt = prompt_of(30, 4)
    row = Row(prompt, 0, harness.take(31), params=sampling(num_logprobs=3))
    result = harness.runner.run(build_step([row], 16), harness.cache)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        expected = torch.log_softmax(model(torch.tensor([prompt])).logits[0, -1], dim=-1)
    best = expected.topk(3)
    assert result.logprobs[0].token_ids.tolist() == [int(best.indices[0]), *best.indices.tolist()]
    np.testing.assert_allclose(
        result.logprobs[0].logprobs, [best.values[0].item(), *best.values.tolist()], rtol=1e-4, atol=1e-4
    )


def test_forward_two_kv_groups_is_refused(folder: Path) -> None:
    harness = Harness(folder, 16)
    step = build_step([Row([5, 6], 0, harness.take(2))], 16)
    object.__setattr__(step, "tables", [step.tables[0], step.tables[0]])
    with pytest.raises(BackendError, match="one block table per row for each of 1 KV groups, got 2") as caught:
        harness.runner.run(step, harness.cache)
    assert caught.value.reason == "BAD_STEP"


def test_probe_model_with_attention_outside_the_interface_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("llama"), attn_implementation=ATTENTION_NAME).eval()
    layer = model.model.layers[1].self_attn

    def no_attention(hidden_states: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
        return hidden_states, None

    layer.forward = no_attention
    with pytest.raises(BackendError, match=r"expected 3 layers .* got layers \[0, 2\]") as caught:
        probe(model, VOCAB_SIZE)
    assert caught.value.reason == "MODEL_NOT_SUPPORTED"


def test_probe_layers_with_kv_of_unequal_sizes_says_whose_are_which() -> None:
    """One layer has one KV head, the others two."""
    model = AutoModelForCausalLM.from_config(tiny_config("llama"), attn_implementation=ATTENTION_NAME).eval()
    attention = model.model.layers[1].self_attn
    attention.k_proj, attention.v_proj = torch.nn.Linear(96, 16), torch.nn.Linear(96, 16)
    assert probe(model, VOCAB_SIZE) == ([0, 0, 0], [(2, 16), (1, 16), (2, 16)])


def test_probe_layer_that_reads_other_kv_than_its_sources_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("gemma3n"), attn_implementation=ATTENTION_NAME).eval()
    assert probe(model, VOCAB_SIZE) == ([20, 0, 20, 0, 20, 0, 20], [(2, 16)] * 7)
    model.model.layers[1].self_attn.store_full_length_kv = True
    model.model.layers[3].self_attn.store_full_length_kv = False
    with pytest.raises(BackendError, match="expected layer 5 to attend to the K/V of layer 3, got others") as caught:
        probe(model, VOCAB_SIZE)
    assert caught.value.reason == "MODEL_NOT_SUPPORTED"


def test_probe_wrong_vocabulary_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("llama"), attn_implementation=ATTENTION_NAME).eval()
    with pytest.raises(BackendError, match="expected logits of shape"):
        probe(model, VOCAB_SIZE + 1)
