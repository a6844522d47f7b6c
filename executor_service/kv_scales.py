"""What a stored 1 stands for, in each layer's K and in its V, where K/V are kept in fp8.

Station: `backends.torch_loading` asks for the scales once, after the weights are loaded: the checkpoint's, where it has
any, else measured here. `kernels.fp8` computes with them.

Why there are scales at all: fp8_e4m3 ends at 448 and has 15 binary orders of magnitude above its coarsest numbers, and
what K and V hold differs between layers by more than that leaves. Why they are measured on text: a few channels and
the first token of a sequence hold values ten to a hundred times the usual ones, and they come with words, not with
random ids. Why a power of two, the next above max(|x|) / max: it costs no precision, since the types are floating;
multiplying by it is exact; it leaves room for what the text did not show; and machines whose sums differ in the last
bit agree on it, so that their fingerprints do. Why when the model is loaded and not with the memory profile: the scales
belong to the model's fingerprint, which a manager reads before it asks for a profile.

Source: static scales per tensor, called k_scale and v_scale, as llm-compressor and ModelOpt write and vLLM reads them.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from executor_service.backends.base import BackendError, GroupTables, StepBatch
from executor_service.calibration_text import PASSAGES
from executor_service.kernels.fp8 import FP8_TYPES
from executor_service.kv_cache import KvLayout, PagedKvCache
from executor_service.layer_groups import LayerGroups
from executor_service.model_files import weight_files
from executor_service.model_runner import ModelRunner

KV_CACHE_DTYPES = ("auto", "fp8", *FP8_TYPES)

# model.layers.7.self_attn.k_scale, ….attn.k_scale, ….k_proj.k_scale; a weight's own scale is called otherwise.
_SCALE_NAME = re.compile(r"layers\.(\d+)\..*\b([kv])_scale")
_TOKENS_OF_A_PASSAGE = 256
_RANDOM_TOKENS = 192
_NONE = (1.0,)


@dataclass(frozen=True)
class KvScales:
    """One scale for K and one for V of every layer; 1, which nothing is stored by, for a layer that keeps a state.

    A layer that reads an earlier one's K/V has that one's.

    Attributes:
        source: "checkpoint" or "calibration".
    """

    keys: tuple[float, ...]
    values: tuple[float, ...]
    source: str


def fp8_name(kv_cache_dtype: str) -> str | None:
    """The name in FP8_TYPES of a value of `--kv-cache-dtype`; None for auto.

    Raises:
        BackendError: it is no such value.
    """
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise BackendError(
            "BAD_KV_CACHE_DTYPE",
            f"expected --kv-cache-dtype {', '.join(KV_CACHE_DTYPES)}, got {kv_cache_dtype!r}; auto stores K/V in the "
            "type that the model computes in",
            kv_cache_dtype=kv_cache_dtype,
        )
    if kv_cache_dtype == "auto":
        return None
    return "fp8_e4m3" if kv_cache_dtype == "fp8" else kv_cache_dtype


def require_fp8(name: str, device: torch.device) -> None:
    """Refuse a device on which torch does not convert to and from the type.

    The conversion is arithmetic on bits, so any CPU and any CUDA device that this torch was built for has it. Tensor
    cores are not needed: attention computes in the model's type.

    Raises:
        BackendError: it failed there; the message says what to do.
    """
    dtype = FP8_TYPES[name]
    try:
        there_and_back = torch.tensor([448.0, -0.5], device=device).to(dtype).float().cpu()
    except (RuntimeError, TypeError) as error:
        raise BackendError(
            "KV_CACHE_DTYPE_NOT_SUPPORTED",
            f"expected a device on which torch converts to {name} and back, got {device}: {error}. Use "
            "--kv-cache-dtype auto, or a torch that has this conversion for the device.",
            kv_cache_dtype=name,
            device=device,
        ) from error
    if there_and_back.tolist() != [448.0, -0.5]:
        raise BackendError(
            "KV_CACHE_DTYPE_NOT_SUPPORTED",
            f"expected 448 and -0.5 to survive {name} on {device}, got {there_and_back.tolist()}. Use --kv-cache-dtype "
            "auto, or another torch.",
            kv_cache_dtype=name,
            device=device,
        )


def checkpoint_scales(folder: Path, groups: LayerGroups) -> KvScales | None:
    """The scales that come with the weights; None where there are none.

    A layer that reads an earlier one's K/V is computed with that one's scales, whether it comes with the same or none.

    Args:
        folder: the checkpoint's.
        groups: which layers keep K/V, a state, or neither.

    Raises:
        BackendError: they are there for some of the layers that keep K/V only or for others, not one number for each,
            not positive and finite, or other for a layer than for the one whose K/V it reads.
    """
    found: dict[tuple[str, int], list[float]] = {}
    try:
        for file in weight_files(folder):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                    match = _SCALE_NAME.search(name)
                    if match and match.end() == len(name):
                        key = match[2], int(match[1])
                        found.setdefault(key, []).extend(tensors.get_tensor(name).double().view(-1).tolist())
    except (OSError, ValueError, SafetensorError) as error:
        raise BackendError(
            "MODEL_NOT_READABLE", f"expected safetensors files in {folder}, got {error!r}", model=folder
        ) from error
    if not found:
        return None
    attending = {(part, layer) for part in "kv" for layer in groups.attending}
    own = {(part, layer) for part, layer in attending if groups.source_of(layer) == layer}
    if wrong := sorted((own - set(found)) | (set(found) - attending)):
        raise _bad_scales(
            folder, f"{len(wrong)} missing or of no layer, first {wrong[0][0]}_scale of layer {wrong[0][1]}"
        )
    for (part, layer), numbers in sorted(found.items()):
        if len(numbers) != 1 or not (math.isfinite(numbers[0]) and numbers[0] > 0):
            raise _bad_scales(folder, f"{numbers[:4]} as {part}_scale of layer {layer}")
        source = groups.source_of(layer)
        if numbers != found[part, source]:
            raise _bad_scales(
                folder,
                f"{numbers[0]:g} as {part}_scale of layer {layer}, which reads the K/V of layer {source}, and"
                f" {found[part, source][0]:g} as that one's",
            )
    sources = [groups.source_of(layer) for layer in range(len(groups.page_of))]
    keys, values = (tuple(found.get((part, source), _NONE)[0] for source in sources) for part in "kv")
    return KvScales(keys, values, "checkpoint")


def _bad_scales(folder: Path, got: str) -> BackendError:
    return BackendError(
        "BAD_KV_SCALES",
        f"expected one positive k_scale and one v_scale for every layer that keeps K/V in {folder}, or none at all, got"
        f" {got}. Use --kv-cache-dtype auto, or a checkpoint without them: then they are measured.",
        model=folder,
    )


def calibrated_scales(
    runner: ModelRunner,
    layout: KvLayout,
    name: str,
    passages: Sequence[Sequence[int]],
    *,
    groups: LayerGroups,
    device: torch.device,
    of_all_heads: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> KvScales:
    """Scales from the largest K and V that the model makes of some passages.

    Args:
        runner: the model.
        layout: geometry; its type is not used.
        name: the fp8 type.
        passages: token ids of each, from the beginning of a sequence.
        groups: the runner's; each has blocks of its own here, so that layers that share a page are told apart.
        device: where the model computes.
        of_all_heads: makes of the largest values of this process's heads those of all; None where it has all.

    Raises:
        BackendError: what the model computes is not finite.
    """
    plain = KvLayout(layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.block_size, runner.dtype)
    longest, sizes = max(len(tokens) for tokens in passages), groups.block_sizes(plain.block_size)
    counts = [-(-longest // size) for size in sizes]
    *first_blocks, num_blocks = accumulate(counts, initial=1)
    cache = PagedKvCache(plain, num_blocks, device)
    attending = groups.attending
    largest = torch.zeros((len(groups.page_of), 2))
    for tokens in passages:
        runner.forward(_passage_step(tokens, sizes, first_blocks), cache)
        # What earlier passages left in the cache counts once more, which changes no maximum.
        of_layers = [
            cache.layers[page][:, first_blocks[group] :][:, : counts[group]]
            for group, page in ((groups.group_of[layer], groups.page_of[layer]) for layer in attending)
        ]
        seen = torch.stack([layer.abs().flatten(1).amax(dim=1) for layer in of_layers])
        largest[attending] = torch.maximum(largest[attending], seen.float().cpu())
    if of_all_heads is not None:
        largest = of_all_heads(largest)
    if not torch.isfinite(largest).all():
        raise BackendError(
            "NON_FINITE_KV",
            "expected finite K and V of a few sentences, got NaN or infinity; use --dtype float32, or mend the weights",
        )
    limit = torch.finfo(FP8_TYPES[name]).max
    keys, values = ([_power_of_two(number / limit) for number in column] for column in largest.T.tolist())
    return KvScales(tuple(keys), tuple(values), "calibration")


def _power_of_two(number: float) -> float:
    """The smallest power of two that is not below; 1 for 0."""
    if number == 0:
        return 1.0
    mantissa, exponent = math.frexp(number)
    return math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)


def calibration_passages(tokenizer_files: Mapping[str, bytes], vocab_size: int, max_model_len: int) -> list[list[int]]:
    """Token ids to calibrate with: prose, code, tables, several scripts; random ids where there is no tokenizer."""
    most = min(_TOKENS_OF_A_PASSAGE, max_model_len)
    content = tokenizer_files.get("tokenizer.json")
    if content is None:
        ids = np.random.default_rng(0).integers(0, vocab_size, min(_RANDOM_TOKENS, max_model_len))
        return [[int(token) for token in ids]]
    tokenizer = Tokenizer.from_str(content.decode())
    passages = [[token for token in tokenizer.encode(text).ids if token < vocab_size][:most] for text in PASSAGES]
    return [tokens for tokens in passages if tokens]


def _passage_step(tokens: Sequence[int], block_sizes: Sequence[int], first_blocks: Sequence[int]) -> StepBatch:
    """One row that begins and samples nothing, in blocks that follow each group's first one."""
    count = len(tokens)
    positions = np.arange(count, dtype=np.int32)
    tables = []
    for first, block_size in zip(first_blocks, block_sizes, strict=True):
        num_blocks = -(-count // block_size)
        tables.append(
            GroupTables(
                block_indptr=np.array([0, num_blocks], dtype=np.int32),
                block_ids=np.arange(first, first + num_blocks, dtype=np.int32),
                last_block_len=np.array([count - (num_blocks - 1) * block_size], dtype=np.int32),
            )
        )
    return StepBatch(
        step_id=1,
        query_indptr=np.array([0, count], dtype=np.int32),
        token_ids=np.array(tokens, dtype=np.int32),
        positions=positions,
        seq_lens=np.array([count], dtype=np.int32),
        tables=tables,
        slot_mappings=[
            positions.astype(np.int64) + first * block_size
            for first, block_size in zip(first_blocks, block_sizes, strict=True)
        ],
        sampling=None,
    )


def quantized_fingerprint(fingerprint: str, name: str, scales: KvScales) -> str:
    """The fingerprint of a model whose K/V are stored so: with other scales a prompt has other K/V and other tokens."""
    numbers = ",".join(scale.hex() for scale in (*scales.keys, *scales.values))
    return hashlib.sha256(f"{fingerprint}:{name}:{numbers}".encode()).hexdigest()[:32]
