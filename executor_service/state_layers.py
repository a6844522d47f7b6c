"""Layers that keep a state in place of K/V: transformers' own modules, run row by row on states out of blocks.

Station: installed by `backends.torch_loading` when a model is loaded; `model_runner` says what step it is before it
calls the model. Reads and writes pages of `kv_cache`, by the plan that `state_plan` made. It knows no block table.

How: the model sees all rows of a step end to end as one sequence. What is done token by token (norms, projections,
experts) may; what mixes a token with those before it must not. Such a layer's module has its `forward` replaced: the
original one is called for each of a plan's runs, with rows as its batch and, for transformers' cache, the rows' states,
read from their blocks and, after it, written to them. Who wants to know whose tokens a module then has (adapters on the
linear layers in it) is told: `tell`.

Exact: a segment of several tokens goes the way that transformers goes with a prompt, one of one token that of its
decode step; both are the same function of state and tokens but for rounding. Not so in Mamba's first form, whose code
begins anew wherever it has several tokens: there all tokens but those at a sequence's start go one by one. What a model
of another type does has to be seen, so only those types run that have been held to transformers' tokens: STATE_MODELS.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from executor_service.backends.base import STATE, BackendError
from executor_service.kv_cache import PagedKvCache
from executor_service.layer_groups import LayerGroups, layer_windows
from executor_service.state_layout import StateLayout, StatePart
from executor_service.state_plan import StateRun

__all__ = ["StateLayers", "StateStep", "install_state_layers"]

_NAMES = ("mixer", "mamba", "linear_attn")
"""What the modules that keep a state are called in their layers."""
_STATELESS_PROMPTS = ("jamba", "mamba")
"""Types of models whose code takes no state with several tokens."""

WhileRows = Callable[[npt.NDArray[np.int64], int], AbstractContextManager[None]]
"""Opened while a module computes so many tokens of each of these rows, by their places in the step."""


@dataclass(frozen=True)
class StateStep:
    """What these layers need of a step: by KV group the runs of a plan."""

    runs: Mapping[int, Sequence[StateRun]]
    cache: PagedKvCache
    groups: LayerGroups


class _RowStates:
    """The states of rows that run as one batch, in the words of transformers' cache.

    Shape:
        conv: (B, channels, kernel), the newest inputs of the convolution; recurrent: (B, ...).
    """

    def __init__(self, conv: torch.Tensor, recurrent: torch.Tensor) -> None:
        self.conv = conv
        self.recurrent = recurrent

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        """What a module that has one token changes in place."""
        return self.conv

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        """What a module that has one token may change in place."""
        return self.recurrent

    def update_conv_state(
        self, states: torch.Tensor, layer_idx: int, *, conv_kernel_size: int, **_: object
    ) -> torch.Tensor:
        """Take the convolution's new inputs. Returns them behind those before. Shape: (B, channels, T)."""
        inputs = torch.cat([self.conv, states], dim=-1)
        self.conv = inputs[..., -conv_kernel_size:]
        return inputs

    def update_recurrent_state(self, states: torch.Tensor, layer_idx: int, **_: object) -> torch.Tensor:
        """Take the state after the last token."""
        self.recurrent = states
        return states

    def is_recording_past(self, layer_idx: int) -> bool:
        """No: nothing is taken back."""
        return False


class _StateProbe:
    """Stands in for `_RowStates` in the probe: no state yet, and notes what a layer keeps."""

    def __init__(self) -> None:
        self.conv: StatePart | None = None
        self.recurrent: StatePart | None = None

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """There is none."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """There is none."""

    def update_conv_state(
        self, states: torch.Tensor, layer_idx: int, *, conv_kernel_size: int, **_: object
    ) -> torch.Tensor:
        """Note the shape of the newest inputs."""
        self.conv = StatePart((*states.shape[1:-1], conv_kernel_size), states.dtype)
        return pad(states, (conv_kernel_size, 0))

    def update_recurrent_state(self, states: torch.Tensor, layer_idx: int, **_: object) -> torch.Tensor:
        """Note its shape."""
        self.recurrent = StatePart(tuple(states.shape[1:]), states.dtype)
        return states

    def is_recording_past(self, layer_idx: int) -> bool:
        """No."""
        return False


class StateLayers:
    """A model's layers that keep a state, each with its module's `forward` replaced.

    Args:
        modules: by layer, the module that keeps its state.
        one_by_one: whether several tokens that have a state before them have to be run one by one.

    Attributes:
        layers: which they are, in order.
    """

    def __init__(self, modules: Mapping[int, nn.Module], *, one_by_one: bool = False) -> None:
        self._one_by_one = one_by_one
        self._step: StateStep | dict[int, StateLayout] | None = None
        self._layout: StateLayout | None = None
        self._while_rows: WhileRows = lambda rows, length: nullcontext()
        for layer, module in modules.items():
            module.forward = functools.partial(self._forward, layer, module.forward)  # type: ignore[method-assign]
        self.layers = sorted(modules)

    @property
    def layout(self) -> StateLayout:
        """What a layer keeps; known once the model was probed."""
        assert self._layout is not None, "the probe comes first"
        return self._layout

    def tell(self, while_rows: WhileRows) -> None:
        """From now on, have this open while a module computes rows apart from the others."""
        self._while_rows = while_rows

    @contextmanager
    def probing(self) -> Iterator[None]:
        """While it is open the model runs without states, and what its layers would keep is noted.

        Raises:
            BackendError: a layer keeps none, or layers keep different ones.
        """
        seen: dict[int, StateLayout] = {}
        with self._during(seen):
            yield
        layouts = set(seen.values())
        if sorted(seen) != self.layers or len(layouts) != 1:
            raise BackendError(
                "MODEL_NOT_SUPPORTED",
                f"expected layers {self.layers} to keep states of one layout, got {sorted(map(str, layouts))} in layers"
                f" {sorted(seen)}",
                layers=self.layers,
            )
        (self._layout,) = layouts

    @contextmanager
    def running(self, step: StateStep) -> Iterator[None]:
        """While it is open the model runs a step."""
        with self._during(step):
            yield

    def are_finite(self, cache: PagedKvCache, page: int, block_ids: torch.Tensor) -> torch.Tensor:
        """Whether the states in these blocks are numbers. Shape: block_ids (B,) int64; returns (B,)."""
        parts = self.layout.unpack(cache.read_pages(page, block_ids))
        finite = [torch.isfinite(part).flatten(1).all(dim=1) for part in parts]
        return torch.stack(finite).all(dim=0)

    @contextmanager
    def _during(self, step: StateStep | dict[int, StateLayout]) -> Iterator[None]:
        self._step = step
        try:
            yield
        finally:
            self._step = None

    def _forward(
        self, layer: int, original: Callable[..., torch.Tensor], hidden_states: torch.Tensor, **_: object
    ) -> torch.Tensor:
        """In place of a module's own. Shape: hidden_states (1, T, hidden); returns the same."""
        step = self._step
        assert step is not None, "a model with states runs within `probing` or `running` only"
        if isinstance(step, dict):
            probe = _StateProbe()
            out = original(hidden_states, cache=probe)
            if probe.conv is not None and probe.recurrent is not None:
                step[layer] = StateLayout((probe.conv, probe.recurrent))
            return out
        page = step.groups.page_of[layer]
        out = torch.empty_like(hidden_states)
        for run in step.runs[step.groups.group_of[layer]]:
            rows = hidden_states[0].index_select(0, run.tokens).view(len(run.targets), run.length, -1)
            states = self._read(step.cache, page, run)
            length = 1 if self._one_by_one and run.starts is None else run.length
            with self._while_rows(run.rows, length):
                mixed = torch.cat([original(part, cache=states) for part in rows.split(length, dim=1)], dim=1)
            out[0].index_copy_(0, run.tokens, mixed.reshape(len(run.tokens), -1).to(out.dtype))
            self._write(step.cache, page, run, states)
        return out

    def _read(self, cache: PagedKvCache, page: int, run: StateRun) -> _RowStates:
        pages = cache.read_pages(page, run.sources)
        if run.starts is not None:
            pages[run.starts] = 0  # zeros in every type of number
        return _RowStates(*self.layout.unpack(pages))

    def _write(self, cache: PagedKvCache, page: int, run: StateRun, states: _RowStates) -> None:
        num_bytes = cache.layout.bytes_per_block // cache.layout.num_layers
        pages = torch.zeros((len(run.targets), num_bytes), dtype=torch.uint8, device=run.targets.device)
        self.layout.pack((states.conv, states.recurrent), pages)
        cache.write_pages(page, run.targets, pages)


def install_state_layers(model: PreTrainedModel) -> StateLayers | None:
    """Replace the `forward` of the modules that keep a state, as the configuration names their layers.

    Returns:
        None where no layer keeps one.

    Raises:
        BackendError: a layer that should keep a state has no module of a known name.
    """
    layers = [layer for layer, window in enumerate(layer_windows(model.config)) if window == STATE]
    if not layers:
        return None
    modules: dict[int, nn.Module] = {}
    for name, module in model.named_modules():
        layer: Any = getattr(module, "layer_idx", None)
        if layer in layers and name.rpartition(".")[2] in _NAMES:
            modules[layer] = module
    if sorted(modules) != layers:
        raise BackendError(
            "MODEL_NOT_SUPPORTED",
            f"expected a module named {', '.join(_NAMES)} in layers {layers} of {model.config.model_type}, got one in"
            f" {sorted(modules)}",
            model_type=model.config.model_type,
        )
    return StateLayers(modules, one_by_one=model.config.model_type in _STATELESS_PROMPTS)
