"""How many blocks and how many users a memory holds: arithmetic on a model's configuration, nothing measured.

Station: called by ``kvplane plan``. The executor measures the same terms of a loaded model at its start; this says
beforehand about what it will find.

    bytes per block = 2 (K and V) * layers of a group * KV heads * head size * block size * bytes of a KV value
    blocks          = (utilization * memory - weights - overhead) // bytes per block
    users           = (blocks - 1, the null block) // blocks of one context, over all groups

Layers that are alike make one group. Where some have a window and others not, the executor makes groups of equal
numbers of layers, so that a block is as large for each of them, and a sequence has blocks of every group: of full
attention for all its tokens, of a window or chunks for those that can still be read and a row to come. The arithmetic
is that of the executor's ``group_layers`` and ``KvGroupSpec.most_blocks``, which tests hold it to.

A layer that reads the K and V of another has none, and is in no group. Layers that keep less of a token than others are
in groups whose blocks have more tokens, so that all are of the same bytes.

A state lies in a block like K and V of its tokens do, so a block is made long enough for both: the least multiple of
the block size that is no shorter than the interval between states, and that a state fits into.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvplane_client.cli.model_layers import (
    UNGATED,
    Experts,
    PlanError,
    decoder_config,
    dense_width,
    kv_shapes,
    layer_windows,
    longest_sequence,
    num_shared,
    positive,
    read_experts,
)
from kvplane_client.cli.model_states import STATE, STATE_MODELS, StateLayers, read_states, state_windows
from kvplane_client.cli.model_weights import other_weights

__all__ = [
    "DTYPE_BYTES",
    "KV_DTYPE_BYTES",
    "PRESETS",
    "Capacity",
    "KvGroup",
    "ModelShape",
    "PlanError",
    "group_layers",
    "load_shape",
    "plan_capacity",
]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}
# An executor stores K and V in either kind of fp8; which of them changes no size.
KV_DTYPE_BYTES = DTYPE_BYTES | {"fp8_e4m3": 1, "fp8_e5m2": 1}
_UNUSED_FULL_PAGE = 4
"""What the executor counts a page of full attention that no layer uses as, to one of a window."""
_MOST_TOKENS_PER_BLOCK = 4096
"""What the executor makes blocks no longer than, to have pages of equal bytes."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What decides a decoder's memory, as its config.json says.

    Attributes:
        num_layers: Layers; each has K and V, or a state, but for num_shared_layers.
        hidden_size: Width of a token between layers.
        num_heads: Query heads.
        num_kv_heads: Heads that K and V have; 0, as are num_heads and head_dim, where no layer attends.
        head_dim: Width of a head.
        intermediate_size: Width of the feed-forward network, in layers without experts; 0 where there is none.
        vocab_size: Tokens of the vocabulary.
        tied: Whether the output layer is the embedding.
        max_model_len: Longest sequence; None where nothing limits it.
        windows: Tokens that a token reads, itself included, by layer; 0 for all before it, the size of chunks negated,
            STATE where the layer keeps a state. Empty: all, in every layer.
        experts: Those that some layers, or all, have in place of one network.
        gated: Whether a network has a third matrix, its gate.
        states: The layers that keep a state.
        num_shared_layers: Layers, the last ones, that read the K and V of earlier ones.
        other_weights: What its type has beside those of the Llama family.
        kv_shapes: K/V heads of each layer, and their width, where these are not num_kv_heads and head_dim in all.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied: bool
    max_model_len: int | None
    windows: tuple[int, ...] = ()
    experts: Experts | None = None
    gated: bool = True
    states: StateLayers | None = None
    num_shared_layers: int = 0
    other_weights: int = 0
    kv_shapes: tuple[tuple[int, int], ...] = ()

    @property
    def num_kv_layers(self) -> int:
        """Layers that have K and V of their own."""
        return self.num_attending - self.num_shared_layers

    @property
    def num_attending(self) -> int:
        """Layers that attend."""
        return self.num_layers - (self.states.num_layers if self.states else 0)

    @property
    def num_parameters(self) -> int:
        """Weights of a decoder of the Llama family, all experts and their router included.

        Two norms a layer are counted; those of K and Q, and biases, are below a thousandth and are not.
        """
        shapes = self.kv_shapes or ((self.num_kv_heads, self.head_dim),) * self.num_attending
        heads = sum(head_dim * (self.num_heads + kv_heads) for kv_heads, head_dim in shapes)
        norms = 2 if self.intermediate_size else 1
        layers = 2 * self.hidden_size * heads + self.num_layers * norms * self.hidden_size
        if self.states is not None:
            layers += self.states.num_layers * self.states.num_weights
        matrices = 3 if self.gated else 2
        num_dense = self.num_layers
        if self.experts is not None:
            num_dense -= self.experts.num_layers
            width = self.experts.num_experts * self.experts.intermediate_size + self.experts.shared_size
            gates = self.experts.num_experts + self.experts.is_shared_gated
            layers += self.experts.num_layers * self.hidden_size * (matrices * width + gates)
        layers += num_dense * matrices * self.hidden_size * self.intermediate_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return layers + embeddings + self.hidden_size + self.other_weights

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str) -> ModelShape:
        """Reads the configuration that transformers keeps beside weights.

        Of a model of several parts it is the decoder's, under ``text_config``; the others' weights are not counted.

        Args:
            config: The JSON object.
            where: What errors call it.

        Raises:
            PlanError: A field is missing or no positive integer, or the attention, the states or the experts of a layer
                are of a kind that is not understood.
        """
        values, where = decoder_config(config, where)
        hidden = positive(values, "hidden_size", where)
        states: StateLayers | None = None
        if values["model_type"] in STATE_MODELS:
            windows = state_windows(values, where)
            states = read_states(values, windows, where)
        else:
            windows = layer_windows(values, where)
        heads = kv_heads = head_dim = 0
        if any(window != STATE for window in windows):
            heads = positive(values, "num_attention_heads", where)
            kv_heads = positive(values, "num_key_value_heads", where, heads)
            head_dim = positive(values, "head_dim", where, hidden // heads)
        return cls(
            num_layers=len(windows),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=dense_width(values, where),
            vocab_size=positive(values, "vocab_size", where),
            tied=_is_tied(values, where),
            max_model_len=longest_sequence(values, where),
            windows=windows if any(windows) else (),
            experts=read_experts(values, where),
            gated=values["model_type"] not in UNGATED,
            states=states,
            num_shared_layers=num_shared(values, windows, where),
            other_weights=other_weights(values, len(windows) - windows.count(STATE), where),
            kv_shapes=kv_shapes(values, windows, where),
        )


# Source: the models' own config.json.
PRESETS = {
    "llama-3-8b": ModelShape(32, 4096, 32, 8, 128, 14336, 128_256, False, 8192),
    "llama-3.1-70b": ModelShape(80, 8192, 64, 8, 128, 28672, 128_256, False, 131_072),
    "qwen3-0.6b": ModelShape(28, 1024, 16, 8, 128, 3072, 151_936, True, 40_960),
    "smollm2-135m": ModelShape(30, 576, 9, 3, 64, 1536, 49_152, True, 8192),
}


def load_shape(model: str) -> ModelShape:
    """Finds a model's shape.

    Args:
        model: A name in PRESETS, a config.json, or the folder it lies in.

    Raises:
        PlanError: There is none, or it can not be read.
    """
    preset = PRESETS.get(model.lower())
    if preset is not None:
        return preset
    path = Path(model).expanduser()
    if path.is_dir():
        path /= "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        names = ", ".join(PRESETS)
        raise PlanError(f"expected one of {names}, or a config.json; {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path}: expected JSON: {error}") from error
    if not isinstance(config, dict):
        raise PlanError(f"{path}: expected a JSON object, got {type(config).__name__}")
    return ModelShape.from_config(config, str(path))


def _is_tied(config: Mapping[str, Any], where: str) -> bool:
    """Returns whether the output layer is the embedding. Raises PlanError for what says neither."""
    value = config.get("tie_word_embeddings")
    if value is not None and not isinstance(value, bool):
        raise PlanError(f"{where}: expected tie_word_embeddings to be true or false, got {value!r}; correct it")
    return bool(value)


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that share one block table.

    Attributes:
        num_layers: How many.
        window: Tokens that a token reads in them, itself included; 0 for all before it, the size of chunks negated,
            STATE where they keep a state.
        block_size: Tokens per block.
    """

    num_layers: int
    window: int
    block_size: int = 0

    def most_blocks(self, num_tokens: int, block_size: int, longest_chunk: int) -> int:
        """Most blocks that a sequence of num_tokens tokens has of the group at any time.

        Of a window, or a chunk, it is what its last tokens and a row of longest_chunk tokens lie in, wherever in a
        block they begin. Of a state it is the one that the row starts from and those at the ends of blocks it fills.
        """
        length = -(-num_tokens // block_size)
        if not self.window:
            return length
        reach = 1 if self.window == STATE else abs(self.window) - 1
        return min(length, -(-(reach + longest_chunk - 1) // block_size) + 1)


def group_layers(
    windows: Sequence[int], shapes: Sequence[tuple[int, int]] = (), block_size: int = 0
) -> tuple[KvGroup, ...]:
    """Makes groups as the executor does: of equal numbers of layers, but for a window's last, those of full first.

    Args:
        windows: By layer; 0 for full attention, the size of chunks negated, STATE, whose groups are the last.
        shapes: By layer, K/V heads and their width; empty where they are the same in all.
        block_size: Tokens per block of layers that keep most of a token.
    """
    alike = (0, 0)
    counts = Counter(zip(windows, shapes or (alike,) * len(windows), strict=True))
    most = max((math.prod(shape) for shape in shapes), default=0)

    def cost(size: int) -> int:
        total = 0
        for (window, _), count in counts.items():
            groups = -(-count // size)
            total += groups + (groups * size - count) * (1 if window else _UNUSED_FULL_PAGE)
        return total

    size = min(range(1, max(counts.values()) + 1), key=cost)
    return tuple(
        KvGroup(min(size, count - start), window, block_size * most // math.prod(shape) if shapes else block_size)
        for (window, shape), count in sorted(counts.items(), key=_order)
        for start in range(0, count, size)
    )


def _order(item: tuple[tuple[int, tuple[int, int]], int]) -> tuple[bool, bool, int, int]:
    (window, shape), _ = item
    return window == STATE, window < 0, abs(window), -math.prod(shape)


def _page_tokens(shapes: Sequence[tuple[int, int]], block_size: int) -> int:
    """Tokens per block of layers that keep most of a token, so that all layers have whole ones in it."""
    widths = {math.prod(shape) for shape in shapes}
    if len(widths) < 2:
        return block_size
    unit = math.lcm(*widths)
    page = -(-block_size * max(widths) // unit) * unit
    if page // min(widths) > max(_MOST_TOKENS_PER_BLOCK, block_size):
        raise PlanError(
            f"expected layers whose blocks can be made equal with at most {_MOST_TOKENS_PER_BLOCK} tokens, got"
            f" {', '.join(map(str, sorted(widths)))} numbers in K of a token; lower --block-size"
        )
    return page // max(widths)


@dataclass(frozen=True, slots=True)
class Capacity:
    """What fits. Units: bytes, unless the name says otherwise.

    Attributes:
        total_bytes: The memory.
        usable_bytes: Utilization times that.
        weights_bytes: Taken by weights.
        overhead_bytes: Taken by activations and the runtime.
        kv_bytes: Left for K and V, at least 0.
        bytes_per_token: K and V of one token in all layers.
        bytes_per_state: What one layer keeps of a sequence in place of K and V; 0 where none does.
        bytes_per_block: K and V, or states, of one block, which is of one group's layers.
        num_blocks: Blocks that fit, the null block included.
        block_size: Tokens per block: more than were asked for, where layers keep a state. Where layers keep unequal
            amounts of a token, of those that keep most; others are as their groups say.
        num_tokens: Tokens that the usable blocks hold in every layer, as of sequences that left none behind.
        context_len: Tokens of one user.
        blocks_per_user: Blocks of one user, of all groups together.
        num_users: Users at once, each with a context of their own.
        num_groups: Groups of layers, of each of which a sequence has blocks.
        groups: Those groups, of full attention first.
    """

    total_bytes: int
    usable_bytes: int
    weights_bytes: int
    overhead_bytes: int
    kv_bytes: int
    bytes_per_token: int
    bytes_per_state: int
    bytes_per_block: int
    num_blocks: int
    block_size: int
    num_tokens: int
    context_len: int
    blocks_per_user: int
    num_users: int
    num_groups: int
    groups: tuple[KvGroup, ...]


def plan_capacity(
    shape: ModelShape,
    *,
    total_bytes: int,
    utilization: float,
    dtype: str,
    kv_dtype: str,
    overhead_bytes: int,
    block_size: int,
    context_len: int,
    weights_bytes: int | None = None,
    longest_chunk: int = 2048,
    state_interval: int = 512,
) -> Capacity:
    """Reckons what fits.

    Args:
        shape: The model's.
        total_bytes: Memory of the device.
        utilization: Share of it that may be used, in (0, 1].
        dtype: What weights are kept in; a key of DTYPE_BYTES.
        kv_dtype: What K and V are kept in: a key of KV_DTYPE_BYTES, or "auto", which is dtype.
        overhead_bytes: Activations at the largest step, and the runtime.
        block_size: Tokens per block.
        context_len: Tokens of one user's sequence.
        weights_bytes: What weights take; None reckons it from the shape.
        longest_chunk: Most tokens of one sequence in a step; blocks of a window hold as many beside it.
        state_interval: Fewest tokens between states that are kept; a multiple of block_size is made of it.

    Raises:
        PlanError: Layers keep a state, and the types do not say what that is computed in, or no layer has K and V that
            could be in eight bits.
    """
    if weights_bytes is None:
        weights_bytes = shape.num_parameters * DTYPE_BYTES[dtype]
    kv_value_bytes = KV_DTYPE_BYTES[dtype if kv_dtype == "auto" else kv_dtype]
    with_kv = shape.kv_shapes[: shape.num_kv_layers]
    widths = [math.prod(one) for one in with_kv] or [shape.num_kv_heads * shape.head_dim] * shape.num_kv_layers
    token_bytes = 2 * kv_value_bytes * max(widths, default=0)
    block_size = _page_tokens(with_kv, block_size)
    state_bytes = 0
    if shape.states is not None:
        state_bytes = shape.states.num_bytes(_computed_bytes(shape, dtype, kv_dtype))
        block_size = _state_block_size(block_size, state_interval, state_bytes, token_bytes)
    usable_bytes = math.floor(total_bytes * utilization)
    kv_bytes = max(0, usable_bytes - weights_bytes - overhead_bytes)
    # A window, or a chunk, as long as any sequence is none.
    longest = math.inf if shape.max_model_len is None else shape.max_model_len
    read = (shape.windows or (0,) * shape.num_layers)[: shape.num_layers - shape.num_shared_layers]
    windows = [window if window == STATE or abs(window) < longest else 0 for window in read]
    groups = group_layers(windows, with_kv, block_size)
    # Where no layer attends, a block has halves all the same, each of as many numbers for every token.
    page_bytes = token_bytes or 2 * kv_value_bytes * -(-state_bytes // (2 * kv_value_bytes * block_size))
    bytes_per_block = page_bytes * block_size * max(group.num_layers for group in groups)
    num_blocks = kv_bytes // bytes_per_block
    usable_blocks = max(0, num_blocks - 1)
    blocks_per_user = sum(group.most_blocks(context_len, group.block_size, longest_chunk) for group in groups)
    common = math.lcm(*(group.block_size for group in groups))
    return Capacity(
        total_bytes=total_bytes,
        usable_bytes=usable_bytes,
        weights_bytes=weights_bytes,
        overhead_bytes=overhead_bytes,
        kv_bytes=kv_bytes,
        bytes_per_token=2 * kv_value_bytes * sum(widths),
        bytes_per_state=state_bytes,
        bytes_per_block=bytes_per_block,
        num_blocks=num_blocks,
        block_size=block_size,
        num_tokens=usable_blocks // sum(common // group.block_size for group in groups) * common,
        context_len=context_len,
        blocks_per_user=blocks_per_user,
        num_users=usable_blocks // blocks_per_user,
        num_groups=len(groups),
        groups=groups,
    )


def _computed_bytes(shape: ModelShape, dtype: str, kv_dtype: str) -> int:
    """Bytes of a number in the type that is computed in: what a state is kept in, whatever K and V are."""
    of_both = DTYPE_BYTES[dtype], KV_DTYPE_BYTES[dtype if kv_dtype == "auto" else kv_dtype]
    if max(of_both) == 1:
        raise PlanError(
            f"expected a type of 16 or 32 bits, of weights or of K and V, for a model whose layers keep a state, got"
            f" {dtype} and {kv_dtype}: a state is kept in the type that is computed in; use --kv-dtype bfloat16"
        )
    if of_both[1] == 1 and not shape.num_attending:
        raise PlanError(
            f"expected a model with layers that attend for K and V in {kv_dtype}, got one whose layers keep states"
            " only; the executor refuses eight bits there: use --kv-dtype auto"
        )
    return of_both[0] if of_both[1] == 1 else of_both[1]


def _state_block_size(block_size: int, interval: int, state_bytes: int, token_bytes: int) -> int:
    """The least multiple of block_size that is no shorter than interval, and whose K and V, if any, hold a state."""
    if token_bytes:
        interval = max(interval, -(-state_bytes // token_bytes))
    return -(-interval // block_size) * block_size
