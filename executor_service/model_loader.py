"""Weights, configuration and tokenizer of a model, from a local folder, a GGUF file or a hub id.

Station: called once by `backends.torch_loading`. It refuses what the paged attention could not run right, as far
as the configuration tells; what only a forward pass tells is `model_runner.probe`'s business.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from executor_service.backends.base import BackendError, SettingError
from executor_service.gguf_conversion import converted_folder, default_cache_dir, is_converted, num_weights
from executor_service.layer_groups import layer_sources, layer_windows
from executor_service.model_files import TOKENIZER_FILES, eos_token_ids, fingerprint, tokenizer_files, weight_bytes
from executor_service.model_runner import ATTENTION_NAME

_HUB_PATTERNS = ["*.safetensors", "*.safetensors.index.json", "config.json", "tokenizer.model", *TOKENIZER_FILES]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# transformers makes modules without memory by changing torch for the whole process: one model at a time.
_READING = threading.Lock()

_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run and what is known of it."""

    model: PreTrainedModel
    name: str
    folder: Path
    fingerprint: str
    dtype: torch.dtype
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    tokenizer_files: dict[str, bytes]


def load_model(
    source: str,
    *,
    device: torch.device,
    dtype: str = "auto",
    max_model_len: int | None = None,
    name: str | None = None,
    cache_dir: Path | None = None,
    admit: Callable[[int], None] = lambda weights_bytes: None,
    take_part: Callable[[PreTrainedModel], None] | None = None,
) -> LoadedModel:
    """Load a model.

    Args:
        source: a local folder, a .gguf file, or a hub id.
        device: where the weights go.
        dtype: "auto", "float32", "bfloat16" or "float16"; auto is the checkpoint's, on CPU float32 for GGUF.
        max_model_len: the most tokens of a sequence; None takes the model's own.
        name: what to call it; None derives it from the source.
        cache_dir: where converted GGUF files lie; None is `default_cache_dir()`.
        admit: told how many bytes the weights will take before they are read; it raises what ends the load.
        take_part: cuts the model, before it goes to the device, to what this process has of it; None keeps all of it.

    Raises:
        BackendError: it can not be found or read, or is of a kind that the paged attention does not run.
    """
    # What transformers has to say goes where all else goes.
    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()
    if dtype != "auto" and dtype not in _DTYPES:
        raise SettingError("BAD_DTYPE", f"expected dtype auto, {', '.join(_DTYPES)}, got {dtype!r}", dtype=dtype)
    folder = resolve_source(source)
    if folder.is_file():
        if dtype == "auto":  # a GGUF's quantised weights have no float type of their own
            dtype = "bfloat16" if device.type == "cuda" else "float32"
        folder = _converted(folder, cache_dir or default_cache_dir(), _DTYPES[dtype], admit)
    config = _read_config(folder)
    check_architecture(config)
    length = resolve_max_model_len(config, max_model_len)
    admit(weight_bytes(folder, config, _DTYPES.get(dtype, config.dtype)))
    model = _read_weights(folder, config, dtype)
    if take_part is not None:
        take_part(model)
    model = model.to(device).eval().requires_grad_(requires_grad=False)
    return LoadedModel(
        model=model,
        name=name or _derived_name(source),
        folder=folder,
        fingerprint=fingerprint(folder, config),
        dtype=model.dtype,
        vocab_size=int(config.get_text_config().vocab_size),
        max_model_len=length,
        eos_token_ids=eos_token_ids(folder, config),
        tokenizer_files=tokenizer_files(folder),
    )


def resolve_source(source: str) -> Path:
    """The folder with safetensors, or the GGUF file.

    Raises:
        BackendError: there is no such file, folder or reachable hub id.
    """
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise BackendError("MODEL_NOT_READABLE", f"expected a .gguf file or a folder, got {path}", model=source)
        return path
    if not path.is_dir():
        path = _download(source)
    if not any(path.glob("*.safetensors")):
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return files[0]
        raise BackendError(
            "MODEL_NOT_READABLE",
            f"expected *.safetensors or one .gguf file in {path}, got {sorted(p.name for p in path.iterdir())}",
            model=source,
        )
    return path


def _converted(gguf_file: Path, cache_dir: Path, dtype: torch.dtype, admit: Callable[[int], None]) -> Path:
    """The folder of a GGUF's conversion; a first conversion reads all weights, so it is admitted like a load."""
    if not is_converted(gguf_file, cache_dir):
        admit(num_weights(gguf_file) * dtype.itemsize)
    return converted_folder(gguf_file, cache_dir)


def _download(source: str) -> Path:
    """A hub id's files, from the hub or its local cache."""
    _log.info("model_fetch_started", model=source)
    try:
        return Path(snapshot_download(source, allow_patterns=_HUB_PATTERNS))
    except HFValidationError as error:
        raise BackendError(
            "MODEL_NOT_FOUND",
            f"expected a folder, a .gguf file or a hub id, got {source!r}: nothing there",
            model=source,
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise BackendError(
            "MODEL_NOT_REACHABLE",
            f"{source!r} is no local folder or .gguf file, and as a hub id it could not be fetched "
            f"({type(error).__name__}: {error}). Check the spelling and the network, set HF_TOKEN for a gated model, "
            "or give a local folder.",
            model=source,
        ) from error


def _read_config(folder: Path) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise BackendError(
            "MODEL_NOT_READABLE",
            f"expected a config.json that transformers knows in {folder}, got {error}",
            model=folder,
        ) from error


def check_architecture(config: PreTrainedConfig) -> None:
    """Refuse what is not a decoder with full attention or a sliding window in every layer.

    Raises:
        BackendError: names what was found.
    """
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise BackendError(
            "MODEL_NOT_SUPPORTED",
            f"expected a decoder-only model, got {config.model_type}",
            model_type=config.model_type,
        )
    layer_windows(config)
    layer_sources(config)
    for key in ("attn_logit_softcapping", "attn_logit_softcap"):
        if getattr(text, key, None):
            raise BackendError(
                "MODEL_NOT_SUPPORTED",
                f"expected attention without a cap on its scores, got {key}={getattr(text, key)}",
                model_type=config.model_type,
            )


def resolve_max_model_len(config: PreTrainedConfig, asked: int | None) -> int:
    """The most tokens of a sequence: what was asked for, within what the model can do.

    Raises:
        BackendError: more than the model's positions, or a length at which its rotary factors would change with the
            longest row of a step, so that a row's tokens would depend on its neighbours.
    """
    text = config.get_text_config(decoder=True)
    positions = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        positions = rope.get("original_max_position_embeddings") or positions
    if positions is None and asked is None:
        raise SettingError(
            "NO_MAX_MODEL_LEN",
            "the model's config has no max_position_embeddings: set --max-model-len",
            model_type=config.model_type,
        )
    if asked is not None and (asked < 1 or (positions is not None and asked > positions)):
        raise SettingError(
            "BAD_MAX_MODEL_LEN",
            f"expected --max-model-len from 1 to {positions}, got {asked}",
            max_model_len=asked,
            max_position_embeddings=positions,
        )
    return int(asked if asked is not None else positions)


def _read_weights(folder: Path, config: PreTrainedConfig, dtype: str) -> PreTrainedModel:
    """Weights through transformers, on the CPU: mapped from the files where their type is the one wanted."""
    with _READING:
        bars = transformers_logging.is_progress_bar_enabled()
        transformers_logging.disable_progress_bar()
        try:
            return AutoModelForCausalLM.from_pretrained(  # type: ignore[no-any-return]
                folder,
                config=config,
                dtype=_DTYPES.get(dtype, "auto"),
                attn_implementation=ATTENTION_NAME,
                use_safetensors=True,
            )
        except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
            raise BackendError(
                "MODEL_NOT_READABLE",
                f"expected a model that transformers can load in {folder}, got {error}",
                model=folder,
            ) from error
        finally:
            if bars:
                transformers_logging.enable_progress_bar()


def _derived_name(source: str) -> str:
    """The file's or folder's name, or the hub id as it is."""
    path = Path(source).expanduser()
    if path.is_file():
        return path.stem
    return path.resolve().name if path.is_dir() else source
