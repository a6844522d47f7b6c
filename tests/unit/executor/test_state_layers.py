"""Steps written by hand on models that keep states: logits are those of transformers' model on the whole sequence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from executor_service.backends.base import STATE, BackendError
from executor_service.backends.torch_backend import TorchBackend, TorchBackendConfig
from executor_service.model_loader import load_model
from executor_service.model_runner import probe
from executor_service.state_layers import install_state_layers
from tests.unit.executor.step_builder import VOCAB_SIZE, Row, build_step, prompt_of, save_tiny_model

KINDS = ("mamba", "mamba2", "bamba", "granitemoehybrid", "jamba", "qwen3_next")
CPU = torch.device("cpu")
NUM_BLOCKS = 200
TOLERANCE = {"rtol": 1e-3, "atol": 1e-3}


class Harness:
    """A backend whose steps are written by hand, and transformers' model beside it."""

    def __init__(self, folder: Path) -> None:
        config = TorchBackendConfig(
            str(folder),
            device="cpu",
            block_size=4,
            state_interval=4,
            max_model_len=128,
            memory_limit=8 << 30,
            num_blocks_override=NUM_BLOCKS,
        )
        self.backend = TorchBackend(config)
        info = self.backend.load()
        self.num_groups = len(info.kv_groups)
        self.block_size = info.block_size
        self.backend.initialize_kv_cache(NUM_BLOCKS)
        self.free = np.random.default_rng(1).permutation(np.arange(1, NUM_BLOCKS)).tolist()
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @property
    def layers(self) -> list[torch.Tensor]:
        return self.backend._ready_memory().cache.layers

    def take(self, tokens: int) -> list[list[int]]:
        """Shuffled blocks for this many tokens, for each group."""
        count = -(-tokens // self.block_size)
        return [[self.free.pop() for _ in range(count)] for _ in range(self.num_groups)]

    def row(self, tokens: list[int], start: int, stop: int, tables: list[list[int]]) -> Row:
        return Row(tokens[start:stop], start, tables[0], more_blocks=tables[1:])

    def step(self, *rows: Row) -> torch.Tensor:
        """Logits after each row's last token."""
        return self.backend.forward(build_step(rows, self.block_size))

    @torch.inference_mode()
    def expected(self, tokens: list[int]) -> torch.Tensor:
        return self.model(torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.fixture(scope="module", params=KINDS)
def harness(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(save_tiny_model(tmp_path_factory.mktemp(request.param), request.param))


@pytest.fixture(autouse=True)
def _all_blocks_are_free_and_hold_garbage(harness: Harness) -> None:
    harness.free = np.random.default_rng(1).permutation(np.arange(1, NUM_BLOCKS)).tolist()
    for layer in harness.layers:
        layer.fill_(float("nan"))


@pytest.mark.parametrize("seed", range(3))
def test_state_rows_cut_anywhere_and_mixed_give_the_logits_of_the_whole_sequence(harness: Harness, seed: int) -> None:
    """Rows of one and of several tokens in steps together, chunks that end inside, at and behind blocks' ends."""
    rng = np.random.default_rng(seed)
    sequences = [prompt_of(length, seed + length) for length in (1, 9, 40, 55)]
    tables = [harness.take(len(tokens)) for tokens in sequences]
    expected = [harness.expected(tokens) for tokens in sequences]
    done = [0] * len(sequences)
    while any(place < len(tokens) for place, tokens in zip(done, sequences, strict=True)):
        chosen = [row for row, tokens in enumerate(sequences) if done[row] < len(tokens) and rng.random() < 0.8]
        if not chosen:
            continue
        stops = {row: min(len(sequences[row]), done[row] + int(rng.choice([1, 1, 2, 7, 25]))) for row in chosen}
        logits = harness.step(*(harness.row(sequences[row], done[row], stops[row], tables[row]) for row in chosen))
        for place, row in enumerate(chosen):
            done[row] = stops[row]
            torch.testing.assert_close(logits[place], expected[row][done[row] - 1], **TOLERANCE)


def test_state_checkpoint_is_resumed_by_two_sequences_and_never_written(harness: Harness) -> None:
    size = harness.block_size
    root = prompt_of(2 * size, 5)
    tables = harness.take(2 * size)
    harness.step(harness.row(root, 0, 2 * size, tables))
    blocks = [block for table in tables for block in table]
    before = [layer[:, blocks].clone() for layer in harness.layers]
    rows = []
    for seed, shared in ((6, size), (7, 2 * size)):
        tokens = [*root[:shared], *prompt_of(3, seed)]
        own = [[*table[: shared // size], *harness.take(1)[0]] for table in tables]
        rows.append((tokens, harness.row(tokens, shared, len(tokens), own)))
    logits = harness.step(*(row for _, row in rows))
    for place, (tokens, _) in enumerate(rows):
        torch.testing.assert_close(logits[place], harness.expected(tokens)[-1], **TOLERANCE)
    for layer, kept in zip(harness.layers, before, strict=True):
        torch.testing.assert_close(layer[:, blocks], kept, rtol=0, atol=0, equal_nan=True)


def test_state_of_another_sequence_gives_other_logits(harness: Harness) -> None:
    """A test of these tests: what a row starts from matters."""
    size = harness.block_size
    tokens, other = prompt_of(size + 1, 8), prompt_of(size, 9)
    tables, wrong = harness.take(size + 1), harness.take(size)
    harness.step(harness.row(tokens, 0, size, tables), harness.row(other, 0, size, wrong))
    mixed = [[theirs[0], own[1]] for own, theirs in zip(tables, wrong, strict=True)]
    if harness.num_groups > 1:
        mixed[0] = tables[0]  # K/V are its own: only states are wrong
    right = harness.step(harness.row(tokens, size, size + 1, tables))
    torch.testing.assert_close(right[0], harness.expected(tokens)[-1], **TOLERANCE)
    assert (harness.step(harness.row(tokens, size, size + 1, mixed))[0] - right[0]).abs().max() > 0.01


def test_state_that_is_not_a_number_fails_the_row_that_computed_it_and_no_other(harness: Harness) -> None:
    model = harness.backend._ready().loaded.model
    poison = 2
    embedding = model.get_input_embeddings().weight
    with torch.inference_mode():
        kept = embedding[poison].clone()
        embedding[poison] = float("nan")
    try:
        bad, good = prompt_of(9, 10), prompt_of(9, 11)
        bad[3] = poison
        rows = [
            Row(tokens, 0, tables[0], params=None, more_blocks=tables[1:])
            for tokens, tables in ((good, harness.take(9)), (bad, harness.take(9)))
        ]
        result = harness.backend.execute(build_step(rows, harness.block_size))
    finally:
        with torch.inference_mode():
            embedding[poison] = kept
    assert [(failure.row, failure.reason) for failure in result.failures] == [(1, "NON_FINITE_KV")]


def test_install_state_layers_of_a_model_that_attends_only_finds_none(tmp_path: Path) -> None:
    model = load_model(str(save_tiny_model(tmp_path, "llama")), device=CPU, dtype="float32").model
    assert install_state_layers(model) is None


def test_install_state_layers_module_of_another_name_is_refused(tmp_path: Path) -> None:
    model = load_model(str(save_tiny_model(tmp_path, "mamba2")), device=CPU, dtype="float32", max_model_len=64).model
    block = model.backbone.layers[1]
    block.another = block.mixer
    del block.mixer
    with pytest.raises(BackendError, match=r"in layers \[0, 1, 2\] of mamba2, got one in \[0, 2\]") as caught:
        install_state_layers(model)
    assert caught.value.reason == "MODEL_NOT_SUPPORTED"


def test_probe_layers_with_states_of_other_sizes_are_refused(tmp_path: Path) -> None:
    model = load_model(str(save_tiny_model(tmp_path, "mamba2")), device=CPU, dtype="float32", max_model_len=64).model
    model.backbone.layers[2].mixer.conv_kernel_size = 3
    states = install_state_layers(model)
    with pytest.raises(BackendError, match="to keep states of one layout") as caught:
        probe(model, VOCAB_SIZE, states)
    assert caught.value.reason == "MODEL_NOT_SUPPORTED"


def test_probe_layer_that_keeps_no_state_is_refused(tmp_path: Path) -> None:
    model = load_model(str(save_tiny_model(tmp_path, "mamba2")), device=CPU, dtype="float32", max_model_len=64).model
    model.backbone.layers[0].mixer.forward = lambda hidden_states, **_: hidden_states
    with pytest.raises(BackendError, match=r"in layers \[1, 2\]"):
        probe(model, VOCAB_SIZE, install_state_layers(model))


def test_probe_learns_states_and_the_heads_of_the_layers_that_attend(tmp_path: Path) -> None:
    model = load_model(str(save_tiny_model(tmp_path, "bamba")), device=CPU, dtype="float32").model
    states = install_state_layers(model)
    assert probe(model, VOCAB_SIZE, states) == (
        [STATE, 0, STATE, STATE, 0],
        [(0, 0), (3, 16), (0, 0), (0, 0), (3, 16)],
    )
    assert states is not None
    conv, recurrent = states.layout.parts
    assert (conv.shape, recurrent.shape) == ((2 * 96 + 2 * 2 * 4, 4), (8, 24, 4))
