"""Small random LoRA adapters in peft's files, and what they add to the reference model's weights.

Station: `adapter_sources` writes them, `reference_model` adds them up. Needs NumPy and safetensors, never peft.

Source: LoRA is Hu et al. 2021: y = W x + alpha / r * B A x. Names and files are peft's: `adapter_config.json`, and
`adapter_model.safetensors` with A (r, inputs) and B (outputs, r) of each linear layer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

__all__ = ["ALPHA", "CONFIG_FILE", "RANK", "WEIGHTS_FILE", "adapter_deltas", "write_adapter"]

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
RANK, ALPHA = 4, 8

_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"

Float64 = npt.NDArray[np.float64]


def write_adapter(
    folder: Path,
    layers: Mapping[str, tuple[int, int]],
    seed: int,
    rank: int = RANK,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Writes an adapter, the same bytes for the same arguments.

    Args:
        folder: Is made where it is not there.
        layers: Outputs and inputs of each linear layer that it is for, by the name that the model has for it.
        seed: In [0, 2**32).
        rank: Of all matrices.
        settings: Of adapter_config.json, in the place of what fits the matrices.

    Raises:
        OSError: It cannot be written.
    """
    draw = np.random.RandomState(seed)
    tensors: dict[str, npt.NDArray[np.float32]] = {}
    for name, (outputs, inputs) in layers.items():
        # As large as the weights' own products: what an adapter does shows in the output.
        tensors[f"{_PREFIX}{name}{_A}"] = _matrix(draw, rank, inputs)
        tensors[f"{_PREFIX}{name}{_B}"] = _matrix(draw, outputs, rank)
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": ALPHA,
        "target_modules": sorted({name.rpartition(".")[2] for name in layers}),
        "bias": "none",
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / CONFIG_FILE).write_text(json.dumps(config | dict(settings or {}), indent=2) + "\n")


def adapter_deltas(folder: Path) -> dict[str, Float64]:
    """Reads what an adapter adds to each weight: alpha / r * B A. Shape: each (outputs, inputs)."""
    config = json.loads((folder / CONFIG_FILE).read_text())
    tensors = {name: tensor.astype(np.float64) for name, tensor in load_file(folder / WEIGHTS_FILE).items()}
    scale = config["lora_alpha"] / config["r"]
    names = [name.removeprefix(_PREFIX).removesuffix(_A) for name in tensors if name.endswith(_A)]
    return {name: scale * tensors[f"{_PREFIX}{name}{_B}"] @ tensors[f"{_PREFIX}{name}{_A}"] for name in names}


def _matrix(draw: np.random.RandomState, rows: int, columns: int) -> npt.NDArray[np.float32]:
    values: Float64 = draw.standard_normal((rows, columns)) / np.sqrt(columns)
    return values.astype(np.float32)
