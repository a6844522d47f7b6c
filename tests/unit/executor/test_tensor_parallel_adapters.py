"""Adapters on two ranks, the second a real process: peft's tokens, and an adapter that all of them have or none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from executor_service.backends.base import AdapterError, BackendError
from executor_service.backends.registry import create_backend
from executor_service.backends.torch_backend import TorchBackend
from executor_service.config import ExecutorConfig
from executor_service.lora_files import LoraMatrices
from executor_service.tensor_parallel.adapter_parts import AdapterPart, LayerCut, part_of
from executor_service.tensor_parallel.backend import TensorParallelBackend, _OfRanks
from tests.unit.executor.lora_builder import ATTENTION, BLOCK_SIZE, COUNT, generate, peft_tokens, save_adapter
from tests.unit.executor.step_builder import Row, build_step, prompt_of, save_tiny_model

PROMPTS = [prompt_of(length, seed) for seed, length in enumerate((5, 17, 1, 9, 30))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With biases, which are added once, and so are adapters."""
    return save_tiny_model(tmp_path_factory.mktemp("tp-lora") / "model", "llama", attention_bias=True, mlp_bias=True)


@pytest.fixture(scope="module")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [
        save_adapter(root / "all", folder, 1),
        save_adapter(root / "attention", folder, 2, r=8, lora_alpha=4, target_modules=list(ATTENTION)),
        save_adapter(root / "down", folder, 3, r=3, target_modules=["down_proj"], layers_to_transform=[1]),
    ]


def config(folder: Path, **values: object) -> ExecutorConfig:
    defaults = {
        "model": str(folder), "device": "cpu", "dtype": "float32", "block_size": BLOCK_SIZE, "memory_limit": "6GiB",
        "num_threads": 2, "max_loras": 3, "max_lora_rank": 8,
    }  # fmt: skip
    return ExecutorConfig(**(defaults | values))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Iterator[TensorParallelBackend]:
    made = create_backend(config(folder, tensor_parallel_size=2))
    assert isinstance(made, TensorParallelBackend)
    lost: list[BackendError] = []
    made.on_lost(lost.append)
    assert made.load().max_adapters == 3
    made.profile_memory(64, 8)
    made.initialize_kv_cache(40)
    yield made
    made.close()
    assert not lost


def test_execute_adapters_on_two_ranks_gives_the_tokens_that_peft_gives(
    ranks: TensorParallelBackend, folder: Path, adapters: list[Path]
) -> None:
    """Three at once, and none; then with one of them gone; then as the model is."""
    for adapter_id, source in enumerate(adapters, start=1):
        ranks.load_adapter(adapter_id, ranks.read_adapter(str(source)))
    sources = [None, *adapters]
    expected = {
        (row, one): peft_tokens(folder, sources[one], PROMPTS[row], COUNT)
        for row, one in ((0, 1), (1, 0), (2, 2), (3, 3), (4, 1), (0, 0))
    }
    assert len({tuple(expected[row, one]) for row, one in ((0, 0), (0, 1))}) == 2
    assert generate(ranks, PROMPTS, [1, 0, 2, 3, 1]) == [expected[row, one] for row, one in enumerate([1, 0, 2, 3, 1])]
    ranks.unload_adapter(1)
    assert generate(ranks, PROMPTS[1:4], [0, 2, 3]) == [expected[1, 0], expected[2, 2], expected[3, 3]]
    ranks.unload_adapter(2)
    ranks.unload_adapter(3)
    assert generate(ranks, PROMPTS[:2], [0, 0]) == [expected[0, 0], expected[1, 0]]


def test_read_adapter_on_two_ranks_tells_what_one_process_does(
    ranks: TensorParallelBackend, folder: Path, adapters: list[Path]
) -> None:
    whole = create_backend(config(folder))
    assert isinstance(whole, TorchBackend)
    whole.load()
    for source in adapters:
        assert ranks.read_adapter(str(source)) == whole.read_adapter(str(source))
    narrow = save_tiny_model(folder.parent / "narrow", "llama", intermediate_size=48)
    other = save_adapter(folder.parent / "other", narrow, 4)
    messages = []
    for made in (whole, ranks):  # the rank that reads has half of each layer, and knows of the whole
        with pytest.raises(AdapterError) as caught:
            made.read_adapter(str(other))
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert "expected matrices for 96 inputs and 96 outputs" in messages[0]
    whole.close()


def test_load_adapter_that_one_rank_cannot_take_is_in_none(
    ranks: TensorParallelBackend, folder: Path, adapters: list[Path]
) -> None:
    content = ranks.read_adapter(str(adapters[0]))
    of_ranks = content.weights
    assert isinstance(of_ranks, _OfRanks)
    broken = replace(of_ranks, others=[replace(part, data=b"no tensors") for part in of_ranks.others])
    with pytest.raises(BackendError, match=r"rank 1 of 2: SafetensorError") as caught:
        ranks.load_adapter(7, replace(content, weights=broken))
    assert caught.value.reason == "RANK_FAILED"
    # Rank 0 took its part: with it in place tokens would be neither the model's nor the adapter's.
    base = peft_tokens(folder, None, PROMPTS[0], COUNT)
    assert generate(ranks, PROMPTS[:1], [7]) == [base]
    ranks.load_adapter(8, content)
    assert generate(ranks, PROMPTS[:1], [8]) == [peft_tokens(folder, adapters[0], PROMPTS[0], COUNT)]
    ranks.unload_adapter(8)


@pytest.mark.parametrize("cause", [MemoryError("no room"), KeyError("layer"), BackendError("STEP_FAILED", "no device")])
def test_load_adapter_that_fails_in_any_way_is_taken_back_and_says_why(
    ranks: TensorParallelBackend,
    folder: Path,
    adapters: list[Path],
    cause: Exception,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where rank 0 fails to let go of it; the other rank has let go of its part."""

    def fail(*_: object) -> None:
        raise cause

    def fail_again(*_: object) -> None:
        raise ValueError("nothing to let go of")

    content = ranks.read_adapter(str(adapters[0]))
    with monkeypatch.context() as patch, capture_logs() as lines:
        patch.setattr(ranks._own, "load_adapter", fail)
        patch.setattr(ranks._own, "unload_adapter", fail_again)
        with pytest.raises(type(cause)) as caught:
            ranks.load_adapter(9, content)
    assert caught.value is cause
    assert [(line["event"], line["adapter_id"], line["log_level"]) for line in lines] == [
        ("adapter_not_taken_back", 9, "error")
    ]
    assert "nothing to let go of" in lines[0]["error"]
    assert generate(ranks, PROMPTS[:1], [9]) == [peft_tokens(folder, None, PROMPTS[0], COUNT)]


def test_profile_memory_while_adapters_are_loaded_leaves_them_at_work(
    ranks: TensorParallelBackend, folder: Path, adapters: list[Path]
) -> None:
    ranks.load_adapter(5, ranks.read_adapter(str(adapters[1])))
    with capture_logs():
        ranks.profile_memory(64, 8)
    ranks.initialize_kv_cache(40)
    assert generate(ranks, PROMPTS[3:4], [5]) == [peft_tokens(folder, adapters[1], PROMPTS[3], COUNT)]
    ranks.unload_adapter(5)


def test_execute_rows_without_sampling_write_their_adapters_kv(
    ranks: TensorParallelBackend, folder: Path, adapters: list[Path]
) -> None:
    """What the other ranks follow has adapters, too: a prompt's first chunk leaves them in K/V."""
    ranks.load_adapter(6, ranks.read_adapter(str(adapters[0])))
    prompt = PROMPTS[1]
    chunks = [Row(prompt[:9], 0, [1, 2], None), Row(prompt[9:], 9, [1, 2])]
    for chunk in chunks:
        step = replace(build_step([chunk], BLOCK_SIZE), adapter_ids=np.array([6], dtype=np.int32))
        sampled = ranks.execute(step).sampled_token_ids.tolist()
    assert sampled == peft_tokens(folder, adapters[0], prompt, 1)
    ranks.unload_adapter(6)


def test_reading_bytes_are_the_file_twice_and_the_parts_that_ranks_have(
    ranks: TensorParallelBackend, folder: Path
) -> None:
    largest = save_adapter(folder.parent / "largest", folder, 6, r=8)
    content, (other,) = ranks._own.read_adapter_parts(str(largest))
    own = sum(one.a.nbytes + one.b.nbytes for one in content.weights.values())
    its = sum(one.a.nbytes + one.b.nbytes for one in other.matrices().values())
    adapters = ranks._own._ready().adapters
    assert adapters is not None
    assert adapters.reading_bytes == 2 * adapters.max_file_bytes + own + its + 2 * its
    assert len(other.data) < 1.5 * its
    # As it is in the second rank.
    assert adapters._part_bytes(1) == its


@pytest.mark.parametrize("size", [2, 3])
def test_parts_of_an_adapter_add_up_to_it(size: int) -> None:
    torch.manual_seed(0)
    whole = LoraMatrices(torch.randn(2, 12), torch.randn(7, 2), 0.5)
    states = torch.randn(5, 12)
    expected = states @ whole.a.T @ whole.b.T
    by_outputs = [part_of(whole, LayerCut.evenly(7, by_outputs=True), rank, size) for rank in range(size)]
    torch.testing.assert_close(torch.cat([states @ one.a.T @ one.b.T for one in by_outputs], dim=-1), expected)
    by_inputs = [part_of(whole, LayerCut.evenly(12, by_outputs=False), rank, size) for rank in range(size)]
    shares = states.chunk(size, dim=-1)
    sums = [share @ one.a.T @ one.b.T for share, one in zip(shares, by_inputs, strict=True)]
    torch.testing.assert_close(torch.stack(sums).sum(dim=0), expected)
    assert part_of(whole, None, 1, size) is whole


def test_part_of_an_adapter_travels_as_bytes() -> None:
    matrices = {"layers.0.x": LoraMatrices(torch.randn(2, 6)[:, 3:], torch.randn(4, 2), 0.25)}
    part = AdapterPart.of(matrices, torch.bfloat16)
    (one,) = part.matrices().values()
    assert (one.scale, one.a.dtype) == (0.25, torch.bfloat16)
    assert torch.equal(one.a, matrices["layers.0.x"].a.bfloat16())
    assert torch.equal(one.b, matrices["layers.0.x"].b.bfloat16())
