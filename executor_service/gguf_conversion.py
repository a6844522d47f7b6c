"""GGUF to a safetensors folder, once: reading a GGUF takes ten times as long as reading its conversion.

Station: called by `model_loader` when the model is a .gguf file. The folder lies in the cache under a key of the file's
content, and appears there whole or not at all.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import structlog
import torch
import transformers
from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from executor_service.backends.base import BackendError

# Part of the key: raise it when the conversion's result changes.
_VERSION = 1
# Names in tokenizer.ggml.pre whose digits are split one by one before GPT-2's own pattern; transformers applies only
# the latter, which tokenises "  12" otherwise than the model was trained. Source: llama.cpp's pre-tokenizer table.
_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})

_log = structlog.get_logger(__name__)


def default_cache_dir() -> Path:
    """The folder `converted` in $KVPLANE_CACHE, or in kvplane below $XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("KVPLANE_CACHE"):
        return Path(own) / "converted"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvplane" / "converted"


def converted_folder(gguf_file: Path, cache_dir: Path) -> Path:
    """The folder with the file's conversion, made now if it is not there.

    Two processes may convert at once; the first to finish wins and the other takes its result.

    Raises:
        BackendError: the file is no GGUF that transformers can read, or the cache can not be written.
    """
    target = cache_dir / content_key(gguf_file)
    if target.is_dir():
        return target
    _log.info("gguf_conversion_started", file=str(gguf_file), folder=str(target))
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        # mkdtemp makes it private to the user, which is right for the finished folder too.
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=cache_dir))
    except OSError as error:
        raise BackendError(
            "CACHE_NOT_WRITABLE",
            f"expected a writable cache for converted models, got {error}; set KVPLANE_CACHE to a writable folder",
            cache_dir=cache_dir,
        ) from error
    try:
        _convert(gguf_file, work)
        try:
            work.rename(target)
        except OSError:
            if not target.is_dir():  # else another process was faster: its result is as good
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def is_converted(gguf_file: Path, cache_dir: Path) -> bool:
    """Whether the file's conversion is there."""
    return (cache_dir / content_key(gguf_file)).is_dir()


def num_weights(gguf_file: Path) -> int:
    """How many numbers the file's tensors hold, from its head.

    Raises:
        BackendError: the file is no GGUF.
    """
    _require_gguf(gguf_file)
    try:
        return sum(int(tensor.n_elements) for tensor in GGUFReader(gguf_file).tensors)
    except (ValueError, KeyError, IndexError, OSError) as error:
        raise BackendError(
            "MODEL_NOT_READABLE",
            f"expected a whole GGUF file, got {gguf_file}, which is cut off or damaged ({error}); fetch it again",
            file=gguf_file,
        ) from error


def content_key(gguf_file: Path) -> str:
    """Name of a file's conversion: a digest of its size, its first MiB (the metadata), samples and its end.

    Sampled, because hashing tens of gigabytes at every start would cost more than it proves.
    """
    size = gguf_file.stat().st_size
    digest = hashlib.sha256(f"{_VERSION}:{transformers.__version__}:{size}".encode())
    with gguf_file.open("rb") as file:
        for offset, length in sample_windows(size):
            file.seek(offset)
            digest.update(file.read(length))
    return f"{gguf_file.stem}-{digest.hexdigest()[:24]}"


def sample_windows(size: int, head: int = 1 << 20, windows: int = 64, length: int = 4096) -> Iterator[tuple[int, int]]:
    """(offset, length) of a file's head, of evenly spaced windows, and of its end. Units: bytes."""
    yield 0, head
    for index in range(windows):
        yield size * index // windows, length
    yield max(0, size - length), length


def _convert(gguf_file: Path, folder: Path) -> None:
    """Write weights, config and tokenizer of a GGUF to a folder."""
    _require_gguf(gguf_file)
    source = {"pretrained_model_name_or_path": str(gguf_file.parent), "gguf_file": gguf_file.name}
    try:
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    except (ValueError, KeyError, OSError, NotImplementedError, ImportError) as error:
        raise BackendError(
            "MODEL_NOT_READABLE",
            f"expected a GGUF of an architecture that transformers {transformers.__version__} reads, got {error!r}; "
            "use the model's safetensors folder instead",
            file=gguf_file,
        ) from error
    # The weights are dequantised now; with these left in place save_pretrained refuses.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    _fix_pre_tokenizer(gguf_file, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _require_gguf(gguf_file: Path) -> None:
    """Refuse a file that does not begin as a GGUF does."""
    with gguf_file.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise BackendError("MODEL_NOT_READABLE", f"expected a GGUF file, got another kind: {gguf_file}", file=gguf_file)


def _fix_pre_tokenizer(gguf_file: Path, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
    """Split digits where the file's pre-tokenizer does and transformers' reading of it does not."""
    field = GGUFReader(gguf_file).get_field("tokenizer.ggml.pre")
    if field is None or field.contents() not in _SINGLE_DIGITS:
        return
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
