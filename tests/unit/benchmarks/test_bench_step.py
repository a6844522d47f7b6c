"""Steps of benchmarks are what a manager would send, and both sides of `bench_step` compute the same model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import bench_step
from benchmarks.steps import BLOCK_SIZE, StepRow, make_step
from executor_service.backends.torch_backend import TorchBackend, TorchBackendConfig
from executor_service.fused_layers import FusedLayer
from tests.unit.executor.step_builder import Row, build_step, save_tiny_model


def test_make_step_is_the_step_of_its_rows() -> None:
    rows = [([5, 6, 7], 30, [4, 2, 9]), ([8], 0, [1]), ([9] * 17, 0, [3, 7])]
    got = make_step([StepRow(*row) for row in rows])
    expected = build_step([Row(*row) for row in rows], BLOCK_SIZE)
    for name in ("query_indptr", "token_ids", "positions", "seq_lens"):
        assert getattr(got, name).tolist() == getattr(expected, name).tolist()
    assert got.slot_mappings[0].tolist() == expected.slot_mappings[0].tolist()
    for name in ("block_indptr", "block_ids", "last_block_len"):
        assert getattr(got.tables[0], name).tolist() == getattr(expected.tables[0], name).tolist()


def test_workload_step_shares_the_blocks_it_says() -> None:
    step = bench_step.workload_step(3, 1, 40, 32)
    assert step.tables[0].block_ids.tolist() == [1, 2, 3, 1, 2, 6, 1, 2, 9]
    assert step.seq_lens.tolist() == [40, 40, 40]


def test_measure_leaves_the_stack_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_step, "WORKLOADS", {"short": (2, 1, 9, 0)})
    monkeypatch.setattr(bench_step, "_FIRST_TOKEN", 7)
    folder = save_tiny_model(tmp_path, "llama")
    backend = TorchBackend(TorchBackendConfig(str(folder), dtype="bfloat16", block_size=BLOCK_SIZE, num_threads=1))
    backend.load()
    backend.initialize_kv_cache(3)
    layers = [module for module in backend._ready().loaded.model.modules() if isinstance(module, FusedLayer)]
    stacks = [layer.stack for layer in layers]
    (times,) = bench_step.measure(backend, layers, 1).values()
    assert set(times) == ({"together", "apart"} if stacks[0] is not None else {"together"})
    assert [layer.stack for layer in layers] == stacks
    torch.testing.assert_close(*(backend.forward(bench_step.workload_step(2, 1, 9, 0)) for _ in range(2)))
