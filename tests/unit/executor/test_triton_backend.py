"""The triton backend as the shell drives it, interpreted: it is the torch backend but for the kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from executor_service.backends.base import Backend, BackendError, BlockCopies, CopyDirection
from executor_service.backends.registry import create_backend
from executor_service.backends.torch_backend import TorchBackend, TorchBackendConfig
from executor_service.backends.triton_backend import TritonBackend
from executor_service.config import ExecutorConfig
from tests.unit.executor.step_builder import Row, build_step, prompt_of, save_tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton", "ignore::RuntimeWarning:executor_service")

NEW_TOKENS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny-qwen3", "qwen3", num_hidden_layers=2)


def config(folder: Path, **changes: object) -> TorchBackendConfig:
    values: dict[str, object] = {"model": str(folder), "device": "cpu", "memory_limit": 8 << 30, "max_model_len": 64}
    return TorchBackendConfig(**(values | changes))  # type: ignore[arg-type]


def tokens_of(backend: Backend) -> list[int]:
    """Two sequences, one in chunks; then both decode, one of them over blocks copied from where they were."""
    first, second = prompt_of(21, 1), prompt_of(18, 2)
    backend.initialize_kv_cache(9)
    backend.execute(build_step([Row(first[:10], 0, [3, 1]), Row(second, 0, [5, 2])], 16))
    last = backend.execute(build_step([Row(first[10:], 10, [3, 1]), Row([second[-1]], 17, [5, 2])], 16))
    backend.copy_blocks([BlockCopies(CopyDirection.DEVICE_TO_DEVICE, np.int32([5, 2]), np.int32([7, 4]))])
    produced = last.sampled_token_ids.tolist()
    for place in range(NEW_TOKENS):
        rows = [Row([produced[-2]], 21 + place, [3, 1]), Row([produced[-1]], 18 + place, [7, 4])]
        produced += backend.execute(build_step(rows, 16)).sampled_token_ids.tolist()
    return produced


def test_triton_backend_profiles_and_gives_the_torch_backends_tokens(folder: Path) -> None:
    got = []
    for kind in (TorchBackend, TritonBackend):
        backend = kind(config(folder))
        backend.load()
        profile = backend.profile_memory(32, 4)
        assert profile.num_blocks > 9
        got.append(tokens_of(backend))
        backend.close()
    assert got[0] == got[1]
    assert len(set(got[0])) > 2


def test_registry_builds_the_triton_backend(folder: Path) -> None:
    made = create_backend(ExecutorConfig(backend="triton", model=str(folder), device="cpu"))
    assert type(made) is TritonBackend


def test_triton_backend_needs_a_model() -> None:
    with pytest.raises(ValueError, match="as model for the triton backend, got none"):
        ExecutorConfig(backend="triton")


def test_triton_backend_bfloat16_in_the_interpreter_is_refused(folder: Path) -> None:
    with pytest.raises(BackendError, match="computes bfloat16 wrongly") as caught:
        TritonBackend(config(folder, dtype="bfloat16")).load()
    assert caught.value.reason == "BAD_CONFIG"


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would run on the GPU")
def test_triton_backend_without_gpu_and_interpreter_is_refused(folder: Path) -> None:
    """In a process of its own: this one interprets."""
    command = [sys.executable, "-m", "executor_service", "--backend", "triton", "--model", str(folder), "--port", "0"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = Path(__file__).parents[3]
    environment["PYTHONPATH"] = os.pathsep.join(str(root / part) for part in (".", "proto", "client"))
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert (
        "expected a GPU for the triton backend, got device cpu; use --backend torch on a CPU"
        in done.stderr + done.stdout
    )
