"""Which layers of a model share a block table and which memory of a block is whose.

Station: `layer_windows` reads a model's configuration, for `model_loader` and `model_runner.probe`; `group_layers`
makes groups of it once, when the model is loaded, for `backends.torch_backend` and `model_runner`. It knows no tensor.

All groups take their blocks from one cache, so a block must be the same bytes for each of them: every group has as many
layers, and layer i of a group has page i of each block that the group holds. Two layers of different groups have the
same page of different blocks. Groups that are short of a layer leave its page unused.

    Gemma 3 270M: 3 full layers, 15 sliding ones: 6 groups of 3, block of 3 pages, nothing unused
    Gemma 3 1B:   4 full layers, 22 sliding ones: 7 groups of 4, of which the last leaves 2 pages unused

A layer that keeps a state is in a group of such layers; a page has to hold a state as well as K/V of a block's tokens.

Source for equal groups: the design notes of vLLM's hybrid KV cache manager.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedConfig

from executor_service.backends.base import STATE, BackendError

__all__ = ["STATE_MODELS", "LayerGroups", "group_layers", "layer_windows"]

STATE_MODELS = ("bamba", "granitemoehybrid", "jamba", "mamba", "mamba2", "qwen3_next")
"""Types of models whose layers with a state have been held to transformers' tokens; see `state_layers`."""

_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_UNUSED_FULL_PAGE = 4
"""An unused page of full attention counts as this many others: its tables are by far the longest."""


@dataclass(frozen=True)
class LayerGroups:
    """The KV groups of a model, those of full attention first, those with a state last.

    Shape:
        windows: by group, in tokens, 0 for full attention, STATE for a state; group_of, page_of: by layer.
    """

    windows: tuple[int, ...]
    group_of: tuple[int, ...]
    page_of: tuple[int, ...]

    @property
    def num_pages(self) -> int:
        """Pages of a block: the most layers of a group."""
        return max(self.page_of) + 1

    def num_layers(self, group: int) -> int:
        """How many layers a group has."""
        return self.group_of.count(group)


def layer_windows(config: PreTrainedConfig) -> list[int]:
    """Tokens that a token reads in each layer, itself included; 0 for full attention, STATE where it keeps a state.

    Raises:
        BackendError: a layer is neither of full attention nor of a sliding window, nor keeps a state in a model of
            STATE_MODELS; names the layer types found. Or the model limits the time steps of its states.
    """
    text = config.get_text_config(decoder=True)
    window = getattr(text, "sliding_window", None)
    types = getattr(text, "layer_types", None)
    if not types:
        slides = window and getattr(text, "use_sliding_window", True)
        types = [_SLIDING if slides else _FULL] * int(text.num_hidden_layers)
    found = sorted(set(types))
    known = {_FULL, _SLIDING, _LINEAR} if text.model_type in STATE_MODELS else {_FULL, _SLIDING}
    if not set(found) <= known or (_SLIDING in found and not window):
        raise BackendError(
            "MODEL_NOT_SUPPORTED",
            f"expected {_FULL}, or {_SLIDING} with a sliding_window, in every layer, got {', '.join(found)} and"
            f" sliding_window={window} in {config.model_type}; this backend knows no other attention, and states"
            f" ({_LINEAR}) of {', '.join(STATE_MODELS)} only",
            model_type=config.model_type,
            layer_types=", ".join(found),
        )
    if _LINEAR in found:
        _require_free_time_steps(text)
    of_kind = {_FULL: 0, _SLIDING: int(window or 0), _LINEAR: STATE}
    return [of_kind[kind] for kind in types]


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


def group_layers(windows: Sequence[int]) -> LayerGroups:
    """Make groups of equal numbers of layers with equal windows.

    Args:
        windows: by layer, in tokens; 0 for full attention, STATE for a state.
    """
    alike: dict[int, list[int]] = {}
    for layer, window in enumerate(windows):
        alike.setdefault(window, []).append(layer)
    size = _layers_per_group({window: len(layers) for window, layers in alike.items()})
    of_groups: list[int] = []
    group_of, page_of = [0] * len(windows), [0] * len(windows)
    for window in sorted(alike, key=lambda window: (window == STATE, window)):  # full attention is 0
        for place, layer in enumerate(alike[window]):
            if place % size == 0:
                of_groups.append(window)
            group_of[layer], page_of[layer] = len(of_groups) - 1, place % size
    return LayerGroups(tuple(of_groups), tuple(group_of), tuple(page_of))


def _layers_per_group(counts: dict[int, int]) -> int:
    """The number that leaves least unused: a page of no layer is memory, and every group is a table per row."""

    def cost(size: int) -> int:
        total = 0
        for window, count in counts.items():
            groups = -(-count // size)
            total += groups + (groups * size - count) * (1 if window else _UNUSED_FULL_PAGE)
        return total

    return min(range(1, max(counts.values()) + 1), key=cost)
