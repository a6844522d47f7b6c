"""What a model's folder says besides weights: its size, its fingerprint, its end tokens, its tokenizer.

Station: called by `model_loader`; reads files and changes none.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedConfig

from executor_service.backends.base import BackendError
from executor_service.gguf_conversion import sample_windows

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
# What a stored floating type takes; others (quantised integers, fp8) are loaded as they are.
_FLOAT_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
# Keys of a config that say nothing of what the model computes.
_VOLATILE = frozenset({"transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache", "architectures"})
_VOLATILE_OUTPUT = re.compile(r"output_|return_|pad_token_id|_attn_implementation|id2label|label2id")


def fingerprint(folder: Path, config: PreTrainedConfig) -> str:
    """Digest of architecture, vocabulary and weights, equal wherever the same model is loaded.

    It covers the config without what does not change the result (versions, names, the type of the file), the
    vocabulary's size, and of each safetensors file its head (names, types, shapes and offsets of the tensors), 64
    evenly spaced windows of 4 KiB and its end. Sampled: another training run changes every tensor, so samples tell.
    """
    relevant = {k: v for k, v in config.to_dict().items() if k not in _VOLATILE and not _VOLATILE_OUTPUT.match(k)}
    digest = hashlib.sha256(json.dumps(relevant, sort_keys=True, default=str).encode())
    digest.update(f"vocab_size={config.get_text_config().vocab_size}".encode())
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        with file.open("rb") as stream:
            head = 8 + int.from_bytes(stream.read(8), "little")
            digest.update(f"{file.name}:{size}".encode())
            for offset, length in sample_windows(size, head=head):
                stream.seek(offset)
                digest.update(stream.read(length))
    return digest.hexdigest()[:32]


def weight_bytes(folder: Path, config: PreTrainedConfig, dtype: torch.dtype | None) -> int:
    """Bytes that the folder's weights take in memory, from the heads of the files.

    Args:
        folder: with safetensors.
        config: the model's; tied embeddings count once.
        dtype: what floating types are converted to; None leaves them as they are stored.

    Raises:
        BackendError: there are no such files, or one of another format.
    """
    tied = bool(getattr(config.get_text_config(), "tie_word_embeddings", False))
    left_out = {"__metadata__", "lm_head.weight"} if tied else {"__metadata__"}
    try:
        heads = [_head(file) for file in weight_files(folder)]
        return sum(
            _loaded_bytes(tensor, dtype) for head in heads for name, tensor in head.items() if name not in left_out
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BackendError(
            "MODEL_NOT_READABLE", f"expected safetensors files in {folder}, got {error!r}", model=folder
        ) from error


def _loaded_bytes(tensor: dict[str, Any], dtype: torch.dtype | None) -> int:
    """What one tensor of a file's head takes once it is loaded."""
    start, end = tensor["data_offsets"]
    stored = _FLOAT_BYTES.get(tensor["dtype"])
    size: int = end - start
    return size if dtype is None or stored is None else size // stored * dtype.itemsize


def weight_files(folder: Path) -> list[Path]:
    """The files that transformers reads: a hub folder may hold the same weights in another layout beside them."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file() or not index.is_file():
        return [folder / "model.safetensors"]
    return sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})


def _head(file: Path) -> dict[str, Any]:
    """Names, types, shapes and offsets of a safetensors file's tensors."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > file.stat().st_size:
            raise ValueError(f"a head of {length} bytes is longer than its file, {file}")
        head = json.loads(stream.read(length))
    if not isinstance(head, dict):
        raise TypeError(f"the head is no JSON object: {file}")
    return head


def eos_token_ids(folder: Path, config: PreTrainedConfig) -> tuple[int, ...]:
    """Tokens that end a sequence: those of generation_config.json, then those of the config, without repeats."""
    ids: list[int] = []
    generation = folder / "generation_config.json"
    stated: list[Any] = [json.loads(generation.read_text()).get("eos_token_id")] if generation.is_file() else []
    for value in [*stated, getattr(config.get_text_config(), "eos_token_id", None)]:
        ids.extend(value if isinstance(value, list) else [] if value is None else [value])
    return tuple(dict.fromkeys(int(i) for i in ids))


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """The tokenizer's files by name; empty when the folder has no tokenizer.

    tokenizer.json is made where the folder only has an older form, and chat_template.jinja where the template stands in
    tokenizer_config.json, so that readers need to know one form each.
    """
    files = {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()}
    if "tokenizer.json" not in files and (folder / "tokenizer.model").is_file():
        files["tokenizer.json"] = AutoTokenizer.from_pretrained(folder).backend_tokenizer.to_str().encode()
    if "tokenizer.json" not in files:
        return {}
    if "chat_template.jinja" not in files and "tokenizer_config.json" in files:
        template = json.loads(files["tokenizer_config.json"]).get("chat_template")
        if isinstance(template, list):  # several named ones
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        if template:
            files["chat_template.jinja"] = template.encode()
    return files
