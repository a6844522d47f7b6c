"""Which layers of a model share a block table and which memory of a block is whose.

Station: `layer_windows` and `layer_sources` read a model's configuration, for `model_loader` and `model_runner.probe`;
`group_layers` makes groups of it once, when the model is loaded, for `backends.torch_loading` and `model_runner`. It
knows no tensor.

All groups take their blocks from one cache, so a block must be the same bytes for each of them: every group has as many
layers, and layer i of a group has page i of each block that the group holds. Two layers of different groups have the
same page of different blocks. Groups that are short of a layer leave its page unused.

    Gemma 3 270M: 3 full layers, 15 sliding ones: 6 groups of 3, block of 3 pages, nothing unused
    Gemma 3 1B:   4 full layers, 22 sliding ones: 7 groups of 4, of which the last leaves 2 pages unused

Layers of one group keep K/V of one shape. Pages are made equal by tokens: a layer that keeps half as much of a token as
another has twice as many tokens in a block, and its group tables of half the length. A page is as many bytes as whole
tokens of every layer take, so it may have more tokens of the largest ones than were asked for.

    Gemma 4, 4 K/V heads of 512 in full layers, of 256 in sliding ones: blocks of 16 tokens of the full layers, 32 of
    the sliding ones
    8 K/V heads of 128 in some layers, 6 in others: 16 tokens of the first are as much as 21 1/3 of the second, so
    blocks of 18 and of 24

A layer that keeps a state is in a group of such layers; a page has to hold a state as well as K/V of a block's tokens.

A layer that attends to the K/V of an earlier one has no page of its own: it has the other's. It writes there, too, what
the other has just written, the same bytes, so that kernels need not know.

Source for equal groups and for equal pages by tokens: the design notes of vLLM's hybrid KV cache manager.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import transformers
from transformers import PreTrainedConfig

from executor_service.backends.base import STATE, BackendError, chunks_of

__all__ = [
    "CHUNKED_MODELS",
    "SHARING_MODELS",
    "STATE_MODELS",
    "KvShape",
    "LayerGroups",
    "group_layers",
    "layer_sources",
    "layer_windows",
    "page_tokens",
]

STATE_MODELS = ("bamba", "granitemoehybrid", "jamba", "mamba", "mamba2", "qwen3_next")
"""Types of models whose layers with a state have been held to transformers' tokens; see `state_layers`."""

CHUNKED_MODELS = ("llama4_text",)
"""Types of models whose layers with chunks have been held to transformers' tokens.

Only their masks tell such layers, which are not made here: that a layer has chunks is the configuration's word.
"""

SHARING_MODELS = ("gemma3n_text", "gemma4_text")
"""Types of models some of whose layers read an earlier one's K/V, held to transformers' tokens."""

_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_CHUNKED = "chunked_attention"
_UNUSED_FULL_PAGE = 4
"""An unused page of full attention counts as this many others: its tables are by far the longest."""


MOST_TOKENS_PER_BLOCK = 4096
"""Of blocks that are longer than was asked for, so that pages are equal: hits, and what a window holds, are blocks."""


class KvShape(NamedTuple):
    """K, and V, of one token in a layer: both 0 where it keeps a state."""

    num_kv_heads: int
    head_dim: int

    @property
    def width(self) -> int:
        """Elements of K."""
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class LayerGroups:
    """The KV groups of a model: those of full attention, with a window, with chunks, with a state.

    Shape:
        windows: by group, as `KvGroupSpec.window`; group_of, page_of: by layer; sources: by layer, the one whose K/V it
        reads, or empty where each reads its own; shapes: by group, or empty where all layers that attend are alike.
    """

    windows: tuple[int, ...]
    group_of: tuple[int, ...]
    page_of: tuple[int, ...]
    sources: tuple[int, ...] = ()
    shapes: tuple[KvShape, ...] = ()

    @property
    def num_pages(self) -> int:
        """Pages of a block: the most layers of a group."""
        return max(self.page_of) + 1

    @property
    def attending(self) -> list[int]:
        """The layers that attend; the others keep a state."""
        return [layer for layer, group in enumerate(self.group_of) if self.windows[group] != STATE]

    @property
    def last_own(self) -> int:
        """The last layer that keeps K/V, or a state, of its own; those behind it read what earlier ones keep."""
        return max(self.sources) if self.sources else len(self.group_of) - 1

    def num_layers(self, group: int) -> int:
        """How many layers a group has that keep K/V, or a state, of their own."""
        return sum(of == group and self.source_of(layer) == layer for layer, of in enumerate(self.group_of))

    def source_of(self, layer: int) -> int:
        """The layer whose K/V a layer reads, in most cases itself."""
        return self.sources[layer] if self.sources else layer

    def block_sizes(self, block_size: int) -> tuple[int, ...]:
        """By group, tokens per block, where the layers that keep most of a token, and states, have block_size."""
        if not self.shapes:
            return (block_size,) * len(self.windows)
        most = block_size * max(shape.width for shape in self.shapes)
        return tuple(most // shape.width if shape.width else block_size for shape in self.shapes)


def layer_windows(config: PreTrainedConfig) -> list[int]:
    """What each layer reads, as `KvGroupSpec.window`: in tokens, 0 for full attention, STATE where it keeps a state.

    Raises:
        BackendError: a layer is neither of full attention nor of a sliding window, nor keeps a state in a model of
            STATE_MODELS, nor attends within chunks in one of CHUNKED_MODELS; names the layer types found. Or the model
            limits the time steps of its states.
    """
    text = config.get_text_config(decoder=True)
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):  # what follows a token changes its K/V
        raise BackendError(
            "MODEL_NOT_SUPPORTED",
            f"expected attention to what is before a token, got use_bidirectional_attention="
            f"{text.use_bidirectional_attention} in {config.model_type}",
            model_type=config.model_type,
        )
    window = getattr(text, "sliding_window", None)
    types = getattr(text, "layer_types", None)
    if not types:
        slides = window and getattr(text, "use_sliding_window", True)
        types = [_SLIDING if slides else _FULL] * int(text.num_hidden_layers)
    found = sorted(set(types))
    chunk = getattr(text, "attention_chunk_size", None)
    known = {_FULL, _SLIDING}
    known |= {_LINEAR} if text.model_type in STATE_MODELS else set()
    known |= {_CHUNKED} if text.model_type in CHUNKED_MODELS else set()
    has_sizes = (_SLIDING not in found or window) and (_CHUNKED not in found or (chunk or 0) >= 2)
    if not set(found) <= known or not has_sizes:
        raise BackendError(
            "MODEL_NOT_SUPPORTED",
            f"expected {_FULL}, or {_SLIDING} with a sliding_window, in every layer, got {', '.join(found)} and"
            f" sliding_window={window}, attention_chunk_size={chunk} in {config.model_type}; this backend knows no"
            f" other attention, states ({_LINEAR}) of {', '.join(STATE_MODELS)} only, and {_CHUNKED}, of at least 2"
            f" tokens, of {', '.join(CHUNKED_MODELS)} only",
            model_type=config.model_type,
            layer_types=", ".join(found),
        )
    if _LINEAR in found:
        _require_free_time_steps(text)
    of_kind = {_FULL: 0, _SLIDING: int(window or 0), _LINEAR: STATE}
    if _CHUNKED in found:
        of_kind[_CHUNKED] = chunks_of(int(chunk))
    return [of_kind[kind] for kind in types]


def layer_sources(config: PreTrainedConfig) -> list[int]:
    """The layer whose K/V each layer reads, in most models itself.

    Raises:
        BackendError: layers share K/V in a model of another type than SHARING_MODELS.
    """
    text = config.get_text_config(decoder=True)
    num_layers = int(text.num_hidden_layers)
    num_shared = getattr(text, "num_kv_shared_layers", None)
    if not num_shared:
        return list(range(num_layers))
    if num_shared >= num_layers:
        raise BackendError(
            "MODEL_NOT_SUPPORTED",
            f"expected layers with K/V of their own before those that share them, got num_kv_shared_layers={num_shared}"
            f" of {num_layers} in {config.model_type}; serve the model whose K/V they read",
            model_type=config.model_type,
        )
    if text.model_type not in SHARING_MODELS:
        raise BackendError(
            "MODEL_NOT_SUPPORTED",
            f"expected layers with K/V of their own, got num_kv_shared_layers={text.num_kv_shared_layers} in"
            f" {config.model_type}; this backend shares K/V between layers of {', '.join(SHARING_MODELS)} only",
            model_type=config.model_type,
        )
    if not hasattr(text, "kv_sharing_modes"):  # the model's code of that age keeps shared K/V in a cache of its own
        raise BackendError(
            "MODEL_NOT_SUPPORTED",
            f"expected transformers 5.24 or later for {text.model_type}, whose layers share K/V, got"
            f" {transformers.__version__}; install a later one",
            model_type=config.model_type,
        )
    sources, last = [], {}
    for layer, (kind, mode) in enumerate(zip(text.layer_types, text.kv_sharing_modes, strict=True)):
        if mode != "reuse":
            last[kind] = layer
        sources.append(last[kind])
    return sources


def _require_free_time_steps(text: PreTrainedConfig) -> None:
    """Refuse limits on a state's time step: transformers keeps them in a prompt and not in a decode step.

    Tokens would depend on how many of them a step has.
    """
    least, most = getattr(text, "time_step_limit", None) or (0.0, math.inf)
    if least > 0 or most < math.inf:
        raise BackendError(
            "MODEL_NOT_SUPPORTED",
            f"expected states without a limit on their time steps, got time_step_limit={[least, most]} in"
            f" {text.model_type}",
            model_type=text.model_type,
        )


def group_layers(windows: Sequence[int], sources: Sequence[int] = (), shapes: Sequence[KvShape] = ()) -> LayerGroups:
    """Make groups of equal numbers of layers with equal windows and shapes that keep K/V, or a state, of their own.

    Args:
        windows: by layer, as `layer_windows` returns them.
        sources: by layer, as `layer_sources` returns them; empty where each layer reads its own.
        shapes: by layer, what it keeps of a token; empty where all that attend are alike.
    """
    sources = tuple(sources) or tuple(range(len(windows)))
    if len({shape for shape in shapes if shape.width}) < 2:
        shapes = ()
    alike: dict[_Kind, list[int]] = {}
    for layer, window in enumerate(windows):
        if sources[layer] == layer:
            alike.setdefault((window, shapes[layer] if shapes else KvShape(0, 0)), []).append(layer)
    size = _layers_per_group({kind: len(layers) for kind, layers in alike.items()})
    of_groups: list[_Kind] = []
    group_of, page_of = [0] * len(windows), [0] * len(windows)
    for kind in sorted(alike, key=_place):
        for place, layer in enumerate(alike[kind]):
            if place % size == 0:
                of_groups.append(kind)
            group_of[layer], page_of[layer] = len(of_groups) - 1, place % size
    for layer, source in enumerate(sources):
        group_of[layer], page_of[layer] = group_of[source], page_of[source]
    return LayerGroups(
        tuple(window for window, _ in of_groups),
        tuple(group_of),
        tuple(page_of),
        sources,
        tuple(shape for _, shape in of_groups) if shapes else (),
    )


def page_tokens(shapes: Sequence[KvShape], block_size: int) -> int:
    """Tokens per block of the layers that keep most of a token, so that every layer has whole tokens in a page.

    Args:
        shapes: of K/V, by layer or by group; states count for nothing.
        block_size: tokens that they have at least.

    Raises:
        BackendError: some layer would have more than MOST_TOKENS_PER_BLOCK, and than block_size.
    """
    widths = {shape.width for shape in shapes if shape.width}
    if len(widths) < 2:
        return block_size
    unit = math.lcm(*widths)
    page = -(-block_size * max(widths) // unit) * unit
    longest = page // min(widths)
    if longest > max(MOST_TOKENS_PER_BLOCK, block_size):
        raise BackendError(
            "MODEL_NOT_SUPPORTED",
            f"expected layers whose pages can be made equal with at most {MOST_TOKENS_PER_BLOCK} tokens in a block, got"
            f" {', '.join(str(width) for width in sorted(widths))} elements in K of a token, which takes {longest};"
            " lower --block-size, if it is above 1",
            longest=longest,
        )
    return page // max(widths)


_Kind = tuple[int, KvShape]
"""What layers of a group have in common: their window and their shape."""


def _place(kind: _Kind) -> tuple[bool, bool, int, int]:
    """Where a group stands: those of full attention first, and of two alike the one with more of a token."""
    window, shape = kind
    return window == STATE, window < 0, abs(window), -shape.width  # full attention is 0


def _layers_per_group(counts: dict[_Kind, int]) -> int:
    """The number that leaves least unused: a page of no layer is memory, and every group is a table per row."""

    def cost(size: int) -> int:
        total = 0
        for (window, _), count in counts.items():
            groups = -(-count // size)
            total += groups + (groups * size - count) * (1 if window else _UNUSED_FULL_PAGE)
        return total

    return min(range(1, max(counts.values()) + 1), key=cost)
