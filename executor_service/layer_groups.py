"""Which layers of a model share a block table and which memory of a block is whose.

Station: `layer_windows` and `layer_sources` read a model's configuration, for `model_loader` and `model_runner.probe`;
`group_layers` makes groups of it once, when the model is loaded, for `backends.torch_loading` and `model_runner`. It
knows no tensor.

All groups take their blocks from one cache, so a block must be the same bytes for each of them: every group has as many
layers, and layer i of a group has page i of each block that the group holds. Two layers of different groups have the
same page of different blocks. Groups that are short of a layer leave its page unused.

    Gemma 3 270M: 3 full layers, 15 sliding ones: 6 groups of 3, block of 3 pages, nothing unused
    Gemma 3 1B:   4 full layers, 22 sliding ones: 7 groups of 4, of which the last leaves 2 pages unused

A layer that keeps a state is in a group of such layers; a page has to hold a state as well as K/V of a block's tokens.

A layer that attends to the K/V of an earlier one has no page of its own: it has the other's. It writes there, too, what
the other has just written, the same bytes, so that kernels need not know.

Source for equal groups: the design notes of vLLM's hybrid KV cache manager.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import transformers
from transformers import PreTrainedConfig

from executor_service.backends.base import STATE, BackendError, chunks_of

__all__ = [
    "CHUNKED_MODELS",
    "SHARING_MODELS",
    "STATE_MODELS",
    "LayerGroups",
    "group_layers",
    "layer_sources",
    "layer_windows",
]

STATE_MODELS = ("bamba", "granitemoehybrid", "jamba", "mamba", "mamba2", "qwen3_next")
"""Types of models whose layers with a state have been held to transformers' tokens; see `state_layers`."""

CHUNKED_MODELS = ("llama4_text",)
"""Types of models whose layers with chunks have been held to transformers' tokens.

Only their masks tell such layers, which are not made here: that a layer has chunks is the configuration's word.
"""

SHARING_MODELS = ("gemma3n_text",)
"""Types of models some of whose layers read an earlier one's K/V, held to transformers' tokens."""

_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_CHUNKED = "chunked_attention"
_UNUSED_FULL_PAGE = 4
"""An unused page of full attention counts as this many others: its tables are by far the longest."""


@dataclass(frozen=True)
class LayerGroups:
    """The KV groups of a model: those of full attention, with a window, with chunks, with a state.

    Shape:
        windows: by group, as `KvGroupSpec.window`; group_of, page_of: by layer; sources: by layer, the one whose K/V it
        reads, or empty where each reads its own.
    """

    windows: tuple[int, ...]
    group_of: tuple[int, ...]
    page_of: tuple[int, ...]
    sources: tuple[int, ...] = ()

    @property
    def num_pages(self) -> int:
        """Pages of a block: the most layers of a group."""
        return max(self.page_of) + 1

    @property
    def attending(self) -> list[int]:
        """The layers that attend; the others keep a state."""
        return [layer for layer, group in enumerate(self.group_of) if self.windows[group] != STATE]

    def num_layers(self, group: int) -> int:
        """How many layers a group has that keep K/V, or a state, of their own."""
        return sum(of == group and self.source_of(layer) == layer for layer, of in enumerate(self.group_of))

    def source_of(self, layer: int) -> int:
        """The layer whose K/V a layer reads, in most cases itself."""
        return self.sources[layer] if self.sources else layer


def layer_windows(config: PreTrainedConfig) -> list[int]:
    """What each layer reads, as `KvGroupSpec.window`: in tokens, 0 for full attention, STATE where it keeps a state.

    Raises:
        BackendError: a layer is neither of full attention nor of a sliding window, nor keeps a state in a model of
            STATE_MODELS, nor attends within chunks in one of CHUNKED_MODELS; names the layer types found. Or the model
            limits the time steps of its states.
    """
    text = config.get_text_config(decoder=True)
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
    if not getattr(text, "num_kv_shared_layers", None):
        return list(range(num_layers))
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


def group_layers(windows: Sequence[int], sources: Sequence[int] = ()) -> LayerGroups:
    """Make groups of equal numbers of layers with equal windows that keep K/V, or a state, of their own.

    Args:
        windows: by layer, as `layer_windows` returns them.
        sources: by layer, as `layer_sources` returns them; empty where each layer reads its own.
    """
    sources = tuple(sources) or tuple(range(len(windows)))
    alike: dict[int, list[int]] = {}
    for layer, window in enumerate(windows):
        if sources[layer] == layer:
            alike.setdefault(window, []).append(layer)
    size = _layers_per_group({window: len(layers) for window, layers in alike.items()})
    of_groups: list[int] = []
    group_of, page_of = [0] * len(windows), [0] * len(windows)
    for window in sorted(alike, key=lambda window: (window == STATE, window < 0, abs(window))):  # full attention is 0
        for place, layer in enumerate(alike[window]):
            if place % size == 0:
                of_groups.append(window)
            group_of[layer], page_of[layer] = len(of_groups) - 1, place % size
    for layer, source in enumerate(sources):
        group_of[layer], page_of[layer] = group_of[source], page_of[source]
    return LayerGroups(tuple(of_groups), tuple(group_of), tuple(page_of), sources)


def _layers_per_group(counts: dict[int, int]) -> int:
    """The number that leaves least unused: a page of no layer is memory, and every group is a table per row."""

    def cost(size: int) -> int:
        total = 0
        for window, count in counts.items():
            groups = -(-count // size)
            total += groups + (groups * size - count) * (1 if window else _UNUSED_FULL_PAGE)
        return total

    return min(range(1, max(counts.values()) + 1), key=cost)
