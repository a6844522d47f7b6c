"""What a config.json says of layers that keep a state in place of K/V: which they are, its size, and their weights.

Station: called by ``capacity``. It knows JSON objects and numbers of them; no blocks. As in ``model_layers`` the sizes
are those of transformers' classes, which the executor asks and tests hold this to. A layer keeps two things: the newest
inputs of a short convolution, in the type that is computed in, and what it sums up of all before, in float32.

    state-space layer (mamba, jamba)                convolution: inner * kernel      state: inner * state size
    with heads (mamba2, bamba, granitemoehybrid)    (inner + 2 groups * state size)  inner * state size
    gated delta rule (qwen3_next)                   (2 keys + values) * kernel       value heads * key dim * value dim
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvplane_client.cli.model_layers import PlanError, not_understood, positive

__all__ = ["STATE", "STATE_MODELS", "StateLayers", "read_states", "state_windows"]

Config = Mapping[str, Any]

STATE = -1
"""Stands for a layer's window where it keeps a state. A chunk, which is negated, has two tokens at least."""

_ACCUMULATOR_BYTES = 4  # float32
# What older config.json files call the two kinds of layers, and newer ones do.
_ATTENDS = {"attention": True, "full_attention": True, "mamba": False, "linear_attention": False}


@dataclass(frozen=True, slots=True)
class StateLayers:
    """The layers of a model that keep a state, which are alike.

    Attributes:
        num_layers: How many.
        num_inputs: Numbers of a layer's convolution, in the type that is computed in.
        num_sums: Numbers of its state proper, in float32.
        num_weights: Weights of a layer's module, its feed-forward network not included.
    """

    num_layers: int
    num_inputs: int
    num_sums: int
    num_weights: int

    def num_bytes(self, value_bytes: int) -> int:
        """Bytes that a layer keeps of a sequence, with value_bytes for a number that is computed with."""
        return self.num_inputs * value_bytes + self.num_sums * _ACCUMULATOR_BYTES


@dataclass(frozen=True, slots=True)
class _Mixer:
    """Sizes of a layer's module: those of StateLayers."""

    num_inputs: int
    num_sums: int
    num_weights: int


def _selective(config: Config, where: str, prefix: str, state: str, kernel: str) -> _Mixer:
    """Mamba's first form; Jamba has a norm for each of three parts of it."""
    hidden = positive(config, "hidden_size", where)
    inner = positive(config, f"{prefix}expand", where) * hidden
    num_states, width = positive(config, state, where), positive(config, kernel, where)
    rank_key = "mamba_dt_rank" if prefix else "time_step_rank"
    rank = math.ceil(hidden / 16)
    if config.get(rank_key, "auto") != "auto":
        rank = positive(config, rank_key, where)
    weights = 3 * inner * hidden + inner * (rank + 2 * num_states) + inner * rank + inner * num_states
    weights += inner * (width + 2)  # the convolution, the step's bias, and what passes by the state
    weights += inner if config.get("mamba_conv_bias" if prefix else "use_conv_bias") else 0
    weights += 2 * inner + hidden if config.get("mamba_proj_bias" if prefix else "use_bias") else 0
    weights += rank + 2 * num_states if prefix else 0
    return _Mixer(inner * width, inner * num_states, weights)


def _mamba(config: Config, where: str) -> _Mixer:
    return _selective(config, where, "", "state_size", "conv_kernel")


def _jamba(config: Config, where: str) -> _Mixer:
    return _selective(config, where, "mamba_", "mamba_d_state", "mamba_d_conv")


def _with_heads(config: Config, where: str, keys: tuple[str, ...], biases: tuple[str, str]) -> _Mixer:
    """Mamba's second form.

    Args:
        config: Of ``decoder_config``.
        where: What errors call it.
        keys: What it calls the number of heads, their size, groups, the size of a state, and the kernel.
        biases: What it calls that the convolution, and that the projections have one.
    """
    _require_free_time_steps(config, where)
    hidden = positive(config, "hidden_size", where)
    expanded = positive(config, "mamba_expand" if "mamba_expand" in config else "expand", where) * hidden
    num_heads = positive(config, keys[0], where)
    if config.get(keys[1], "auto") == "auto":
        config = {**config, keys[1]: expanded // num_heads}
    _, head_dim, num_groups, num_states, width = (positive(config, key, where) for key in keys)
    inner = num_heads * head_dim
    if inner != expanded:
        raise not_understood(where, keys[0], num_heads, f"{expanded} numbers in heads of {head_dim}")
    mixed = inner + 2 * num_groups * num_states
    projected = inner + mixed + num_heads
    weights = hidden * (projected + inner) + mixed * width + 3 * num_heads + inner
    weights += mixed if config.get(biases[0]) else 0
    weights += projected + hidden if config.get(biases[1]) else 0
    return _Mixer(mixed * width, inner * num_states, weights)


def _mamba2(config: Config, where: str) -> _Mixer:
    keys = ("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel")
    return _with_heads(config, where, keys, ("use_conv_bias", "use_bias"))


def _hybrid(config: Config, where: str) -> _Mixer:
    keys = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
    return _with_heads(config, where, keys, ("mamba_conv_bias", "mamba_proj_bias"))


def _delta(config: Config, where: str) -> _Mixer:
    """Qwen3-Next's gated delta rule."""
    hidden = positive(config, "hidden_size", where)
    key_heads, value_heads = (positive(config, f"linear_num_{part}_heads", where) for part in ("key", "value"))
    key_dim, value_dim = (positive(config, f"linear_{part}_head_dim", where) for part in ("key", "value"))
    width = positive(config, "linear_conv_kernel_dim", where)
    keys, values = key_heads * key_dim, value_heads * value_dim
    mixed = 2 * keys + values
    # Projections of what is mixed, of the gate, of two numbers a head, and back; its decay and bias, its norm.
    weights = hidden * (mixed + values + 2 * value_heads + values) + mixed * width + 2 * value_heads + value_dim
    return _Mixer(mixed * width, value_heads * key_dim * value_dim, weights)


def _none(config: Config, where: str) -> list[bool]:
    return [False] * positive(config, "num_hidden_layers", where)


def _listed(config: Config, where: str) -> list[bool]:
    """Bamba's."""
    indices = config.get("attn_layer_indices") or []
    if not isinstance(indices, list) or not all(type(layer) is int for layer in indices):
        raise not_understood(where, "attn_layer_indices", indices, "a list of layers")
    return [layer in indices for layer in range(positive(config, "num_hidden_layers", where))]


def _periodic(config: Config, where: str) -> list[bool]:
    """Jamba's."""
    period, offset = positive(config, "attn_layer_period", where), config.get("attn_layer_offset")
    if type(offset) is not int or not 0 <= offset < period:
        raise not_understood(where, "attn_layer_offset", offset, f"an offset below the period of {period}")
    return [layer % period == offset for layer in range(positive(config, "num_hidden_layers", where))]


def _typed(config: Config, where: str) -> list[bool]:
    """Granite 4's and Qwen3-Next's; of the latter every fourth layer attends where nothing else is said."""
    num_layers = positive(config, "num_hidden_layers", where)
    types = config.get("layer_types", config.get("layers_block_type"))
    if types is None and config["model_type"] == "qwen3_next":
        every = positive(config, "full_attention_interval", where, 4)
        return [(layer + 1) % every == 0 for layer in range(num_layers)]
    if types is None:
        return [False] * num_layers
    if not isinstance(types, list) or len(types) != num_layers or not all(kind in _ATTENDS for kind in types):
        raise not_understood(where, "layer_types", types, f"{num_layers} of full_attention or linear_attention")
    return [_ATTENDS[kind] for kind in types]


_Attends = Callable[[Config, str], list[bool]]
_FAMILIES: dict[str, tuple[_Attends, Callable[[Config, str], _Mixer]]] = {
    "bamba": (_listed, _hybrid),
    "granitemoehybrid": (_typed, _hybrid),
    "jamba": (_periodic, _jamba),
    "mamba": (_none, _mamba),
    "mamba2": (_none, _mamba2),
    "qwen3_next": (_typed, _delta),
}
STATE_MODELS = tuple(_FAMILIES)
"""Types of models whose layers with a state can be reckoned with."""


def state_windows(config: Config, where: str) -> tuple[int, ...]:
    """What each layer of a model of STATE_MODELS reads: 0 for full attention, STATE where it keeps a state.

    Raises:
        PlanError: What says so is not understood.
    """
    attends, _ = _FAMILIES[config["model_type"]]
    return tuple(0 if it_does else STATE for it_does in attends(config, where))


def read_states(config: Config, windows: tuple[int, ...], where: str) -> StateLayers | None:
    """The layers with a state of a model of STATE_MODELS; None where none has.

    Args:
        config: Of ``decoder_config``.
        windows: Of ``state_windows``.
        where: What errors call it.

    Raises:
        PlanError: A size is missing or no positive integer, or the executor would refuse such states.
    """
    num_layers = windows.count(STATE)
    if not num_layers:
        return None
    _, mixer = _FAMILIES[config["model_type"]]
    sizes = mixer(config, where)
    return StateLayers(num_layers, sizes.num_inputs, sizes.num_sums, sizes.num_weights)


def _require_free_time_steps(config: Config, where: str) -> None:
    """Refuses what the executor refuses: limits on a state's time steps, which transformers forgets as it decodes."""
    limit = config.get("time_step_limit", [0.0, math.inf])
    try:
        # As JSON infinity is a word, or, of newer files, an object with it.
        least, most = (float(end["__float__"] if isinstance(end, dict) else end) for end in limit)
    except (KeyError, TypeError, ValueError) as error:
        raise not_understood(where, "time_step_limit", limit, "the least and the largest time step") from error
    if least > 0 or most < math.inf:
        raise PlanError(
            f"{where}: expected states without a limit on their time steps, got time_step_limit {[least, most]}; no"
            " executor takes it, so there is nothing to plan"
        )
