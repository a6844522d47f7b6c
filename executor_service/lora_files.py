"""A LoRA adapter as peft saves it: its settings, its matrices, its revision.

Station: called by `lora`; reads files and changes none. It knows shapes and names, and no model.

What is read is `adapter_config.json` and `adapter_model.safetensors`. Settings that change what an adapter computes,
and that `lora` does not do, are refused by name: an adapter that is served must be exactly what peft would compute.

Source: the file formats are peft's (https://github.com/huggingface/peft); LoRA is Hu et al. 2021, the scale by the root
of the rank Kalajdzievski 2023 (rsLoRA).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from executor_service.backends.base import AdapterError
from executor_service.lora_hub import fetch_adapter

__all__ = ["AdapterFiles", "LoraMatrices", "read_adapter_files"]

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"

_MATRIX = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<which>[AB])\.weight")
# Settings that `_settings` reads.
_READ = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"})
# Settings that say how it was trained or where it belongs; the matrices say which modules and layers it is for.
_WITHOUT_EFFECT = frozenset(
    {
        "alora_invocation_tokens_string",
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
    }
)
# Beginnings that leave the base model's weights as they are; others (PiSSA, OLoRA, LoftQ) need a base of their own.
_INITS = (True, False, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True)
class LoraMatrices:
    """What is added to one linear layer: y + scale * (x A^T) B^T.

    Shape:
        a: (r, in_features); b: (out_features, r).
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    @property
    def rank(self) -> int:
        """R, the rank."""
        return self.a.shape[0]


@dataclass(frozen=True)
class AdapterFiles:
    """An adapter as it was read.

    Attributes:
        revision: digest of the settings that count and of the file of weights.
        matrices: by the name of the module as the model has it, such as "model.layers.0.self_attn.q_proj".
    """

    revision: str
    matrices: Mapping[str, LoraMatrices]


def read_adapter_files(source: str, max_file_bytes: int) -> AdapterFiles:
    """Read an adapter.

    Args:
        source: a folder, or a hub id.
        max_file_bytes: what its file of weights may take, so that no mistaken source fills the memory.

    Raises:
        AdapterError: there is none, it cannot be read, is too large, or asks for more than LoRA on linear layers.
    """
    folder = _folder(source, max_file_bytes)
    config = _read_config(folder, source)
    _require_plain_lora(config)
    path = folder / WEIGHTS_FILE
    try:
        size = path.stat().st_size
        if size > max_file_bytes:
            raise AdapterError(
                "ADAPTER_TOO_LARGE",
                f"source: expected {WEIGHTS_FILE} of at most {max_file_bytes} bytes, as --max-lora-rank allows, got"
                f" {size}; start the executor with a larger one",
                source=source,
                size_bytes=size,
            )
        data = path.read_bytes()
        tensors = safetensors.torch.load(data)
    except FileNotFoundError as error:
        raise _not_readable(source, f"{WEIGHTS_FILE} in {folder}", "no such file; have peft save it there") from error
    except (OSError, SafetensorError) as error:
        raise _not_readable(source, f"{WEIGHTS_FILE} that safetensors can read in {folder}", error) from error
    matrices = _matrices(tensors, config)
    settings = {name: config.get(name) for name in sorted(_READ)}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    digest.update(data)
    return AdapterFiles(digest.hexdigest()[:32], matrices)


def _folder(source: str, max_file_bytes: int) -> Path:
    """The folder that a source names, fetched from the hub if there is none of that path. Raises AdapterError."""
    try:
        path = Path(source).expanduser()
        is_folder = path.is_dir()
    except (OSError, RuntimeError) as error:  # a name too long, a user without a home
        raise _not_readable(source, "a folder on the executor's machine, or a hub id", error) from error
    return path if is_folder else fetch_adapter(source, (CONFIG_FILE, WEIGHTS_FILE), max_file_bytes)


def _read_config(folder: Path, source: str) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG_FILE).read_text())
    except (OSError, ValueError) as error:
        raise _not_readable(source, f"{CONFIG_FILE} in {folder}", error) from error
    if not isinstance(config, dict):
        raise _not_readable(source, f"a JSON object in {CONFIG_FILE}", type(config).__name__)
    return config


def _require_plain_lora(config: Mapping[str, Any]) -> None:
    """Refuse settings that change what is computed in a way that is not done here; one not known is such."""
    if config.get("peft_type") != "LORA":
        raise _not_supported("peft_type", "LORA", config.get("peft_type"))
    if config.get("bias", "none") != "none":
        raise _not_supported("bias", "none", config["bias"])
    init = config.get("init_lora_weights", True)
    if init not in _INITS:
        raise _not_supported("init_lora_weights", "one that leaves the base model's weights as they are", init)
    known = _READ | _WITHOUT_EFFECT | {"bias", "init_lora_weights"}
    for name, value in config.items():
        if name not in known and value:
            raise _not_supported(name, "none", value)


def _matrices(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, LoraMatrices]:
    """Pair the matrices of each module. Raises AdapterError for a tensor that is none of a linear layer's two."""
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _MATRIX.fullmatch(name)
        if match is not None and not tensor.is_floating_point():
            raise AdapterError(
                "ADAPTER_NOT_SUPPORTED",
                f"{WEIGHTS_FILE}: expected matrices of floating-point numbers, got {name} of"
                f" {str(tensor.dtype).removeprefix('torch.')}; save the adapter in one of their types",
                tensor=name,
            )
        if match is None or tensor.dim() != 2:
            raise AdapterError(
                "ADAPTER_NOT_SUPPORTED",
                f"{WEIGHTS_FILE}: expected matrices lora_A and lora_B of linear layers, got {name} of shape"
                f" {tuple(tensor.shape)}; train it without what that belongs to",
                tensor=name,
            )
        if not tensor.isfinite().all():
            raise AdapterError(
                "ADAPTER_NOT_READABLE",
                f"{WEIGHTS_FILE}: expected finite numbers, got NaN or infinities in {name}; the training that made it"
                " diverged, or the file is damaged: take an earlier checkpoint, or fetch it again",
                tensor=name,
            )
        pairs.setdefault(match["module"], {})[match["which"]] = tensor
    if not pairs:
        raise AdapterError("ADAPTER_NOT_SUPPORTED", f"{WEIGHTS_FILE}: expected matrices of linear layers, got none")
    matrices = {}
    for module, pair in pairs.items():
        if len(pair) != 2 or pair["A"].shape[0] != pair["B"].shape[1] or not pair["A"].shape[0]:
            shapes = {f"lora_{which}": tuple(tensor.shape) for which, tensor in sorted(pair.items())}
            raise AdapterError(
                "ADAPTER_NOT_READABLE",
                f"{WEIGHTS_FILE}: expected lora_A (r, in) and lora_B (out, r) for {module}, got {shapes}",
                module=module,
            )
        matrices[module] = LoraMatrices(pair["A"], pair["B"], _scale(module, pair["A"].shape[0], config))
    return matrices


def _scale(module: str, rank: int, config: Mapping[str, Any]) -> float:
    """Alpha / r, or alpha / sqrt(r); both may be a module's own."""
    stated = _of_module(config.get("rank_pattern"), module, config.get("r"))
    if stated != rank:
        raise AdapterError(
            "ADAPTER_NOT_READABLE",
            f"{CONFIG_FILE}: expected the rank of the matrices of {module}, {rank}, got {stated};"
            " take both files of one checkpoint",
            module=module,
        )
    alpha = _of_module(config.get("alpha_pattern"), module, config.get("lora_alpha"))
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise AdapterError("ADAPTER_NOT_READABLE", f"{CONFIG_FILE}: expected lora_alpha as a number, got {alpha!r}")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _of_module(patterns: Mapping[str, Any] | None, module: str, otherwise: Any) -> Any:
    """The value of the first pattern that ends a module's name at a dot, as peft matches it."""
    if patterns is not None and not isinstance(patterns, dict):
        message = f"{CONFIG_FILE}: expected an object of patterns, got {patterns!r}; have peft save the adapter anew"
        raise AdapterError("ADAPTER_NOT_READABLE", message)
    for pattern, value in (patterns or {}).items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        except re.error as error:
            message = f"{CONFIG_FILE}: expected regular expressions as patterns of modules, got {pattern!r}: {error}"
            raise AdapterError("ADAPTER_NOT_READABLE", message) from error
    return otherwise


def _not_supported(setting: str, expected: str, got: object) -> AdapterError:
    return AdapterError(
        "ADAPTER_NOT_SUPPORTED",
        f"{CONFIG_FILE}: expected {setting} {expected}, got {got!r}; only LoRA on linear layers is served: merge the"
        " adapter into its model, or train it without",
        setting=setting,
        got=got,
    )


def _not_readable(source: str, expected: str, got: object) -> AdapterError:
    return AdapterError("ADAPTER_NOT_READABLE", f"source: expected {expected}, got {got}", source=source)
