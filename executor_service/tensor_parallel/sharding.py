"""A rank's part of a model, cut from the whole by transformers' own tensor-parallel plan; with states, by one of ours.

Station: `model_loader` has `ModelShard.take` cut what it has read, before it goes to a device; `backends.torch_backend`
asks it for what a rank's share of other things is, and how layers are cut, for adapters (`adapter_parts`). Calls
`group.RankGroup` while the model computes.

The plan, `model.tp_plan`, says for each linear layer how it is cut:

    colwise   by outputs: each rank has those of its heads, or of its neurons; nothing is exchanged
    rowwise   by inputs: the ranks' outputs are added up, then the bias
    lm_head   by outputs, which are the vocabulary: rank 0 gathers them, since it alone samples

What the plan has return a whole output for a whole input is left whole, in every rank: embeddings, norms, projections
that are sliced afterwards. Only the plan is transformers'. Its application makes DTensors of the weights, which
`packed_linear` could not lay out, and gathers logits in every rank.

Of layers that keep a state transformers' plans leave whole what matters: `mixer_shards` has plans for some models.

Source: Shoeybi et al. 2019, "Megatron-LM", for the two cuts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import structlog
import torch
from torch import nn
from transformers import PreTrainedModel

from executor_service.backends.base import STATE, BackendError
from executor_service.layer_groups import layer_windows
from executor_service.tensor_parallel.adapter_parts import LayerCut, part_range
from executor_service.tensor_parallel.mixer_shards import (
    HALVES,
    MIXER,
    PLANS,
    cut_of_halves,
    mixer_cuts,
    take_mixer,
)

__all__ = ["Exchange", "GatheredHead", "ModelShard", "PartialLinear"]

_BY_OUTPUT, _BY_INPUT = "colwise", "rowwise"
_LEFT_WHOLE = frozenset(
    {
        "colwise_gather_output",
        "colwise_rep",
        "rowwise_split_input",
        "rowwise_rep",
        "embedding_rowwise",
        "embedding_colwise",
        "replicate",
        "replicated_with_grad_allreduce",
    }
)
_HEAD = "lm_head"

_log = structlog.get_logger(__name__)


class Exchange(Protocol):
    """What the ranks do together; see `group.RankGroup`."""

    rank: int
    size: int

    def meet(self) -> None:
        """Wait for all ranks."""

    def add(self, partial: torch.Tensor) -> None:
        """Sum over the ranks, in place."""

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """The ranks' tensors in rank 0, nothing elsewhere."""

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """Maximum over the ranks."""


class PartialLinear(nn.Module):
    """y = Σ_ranks x_rank W_rank^T + b: a layer cut by its inputs.

    Args:
        linear: this rank's part, without a bias.
        bias: the whole layer's, added once to the sum.
        exchange: the ranks.
    """

    def __init__(self, linear: nn.Linear, bias: nn.Parameter | None, exchange: Exchange) -> None:
        super().__init__()
        self.linear = linear
        self.bias = bias
        self._exchange = exchange

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Shape: (..., in_features / ranks) to (..., out_features), the same in all ranks."""
        out = self.linear(states)
        self._exchange.add(out)
        return out if self.bias is None else out + self.bias


class GatheredHead(nn.Module):
    """The output layer, cut by the vocabulary: rank 0 has all logits; elsewhere they are zeros of that shape.

    Args:
        linear: this rank's part.
        vocab_size: outputs of the whole layer.
        exchange: the ranks.
    """

    def __init__(self, linear: nn.Linear, vocab_size: int, exchange: Exchange) -> None:
        super().__init__()
        self.linear = linear
        self._vocab_size = vocab_size
        self._exchange = exchange

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Shape: (..., H) to (..., vocab_size)."""
        shape = (*states.shape[:-1], self._vocab_size)
        if not states.numel():  # no row samples: the same in all ranks
            return states.new_zeros(shape)
        own = self.linear(states)
        widths = [len(part_range(self._vocab_size, rank, self._exchange.size)) for rank in range(self._exchange.size)]
        padded = nn.functional.pad(own, (0, max(widths) - own.shape[-1])).contiguous()
        parts = self._exchange.gather(padded)
        if not parts:
            return states.new_zeros(shape)
        return torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], dim=-1)


class ModelShard:
    """What one rank takes of a model.

    Args:
        exchange: the ranks.

    Attributes:
        rank, size: which of how many this is.
        cuts: how `take` cut the layers between embeddings and output, by name.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.rank, self.size = exchange.rank, exchange.size
        self.cuts: dict[str, LayerCut] = {}

    def take(self, model: PreTrainedModel) -> None:
        """Cut a model to this rank's part, in place, and wait until every rank has done so.

        Raises:
            BackendError: the model has no plan, or none that gives every rank its K/V heads, or something that is to be
                cut does not come in equal parts.
        """
        if STATE in layer_windows(model.config) and model.config.model_type not in PLANS:
            raise BackendError(
                "MODEL_NOT_SUPPORTED",
                "expected a model without layers that keep a state for --tensor-parallel-size, or one of"
                f" {', '.join(PLANS)}, got {model.config.model_type}, whose plan in transformers leaves such layers"
                " whole; leave the flag out",
                model_type=model.config.model_type,
            )
        if any(getattr(model.config.get_text_config(decoder=True), "activation_sparsity_pattern", None) or ()):
            # Which activations are kept follows from the mean and deviation of all of a layer's, not of a rank's.
            raise BackendError(
                "MODEL_NOT_SUPPORTED",
                "expected a model without activation_sparsity_pattern for --tensor-parallel-size, got"
                f" {model.config.model_type}; leave the flag out",
                model_type=model.config.model_type,
            )
        self._require_heads(model)
        head, num_cut = model.get_output_embeddings(), 0
        for name, parent, place, module, style in list(_planned(model)):
            if style == MIXER:
                self._take_mixer(name, module)
            elif module is head:
                setattr(parent, place, self._cut_head(head))
            else:
                assert isinstance(module, nn.Linear)
                setattr(parent, place, self._cut(name, module, style))
            num_cut += 1
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()  # a view of a mapped file keeps all of the file resident
        _log.info("model_sharded", rank=self._exchange.rank, ranks=self._exchange.size, cut_layers=num_cut)
        self._exchange.meet()

    def share(self, amount: int) -> int:
        """This rank's share of what is the executor's as a whole."""
        return amount // self._exchange.size

    def largest(self, values: torch.Tensor) -> torch.Tensor:
        """The maximum over the ranks of values that each has for its own heads. Shape: any; returns the same."""
        return self._exchange.largest(values)

    def require_kv_heads(self, model: PreTrainedModel, found: Sequence[int]) -> None:
        """Check what the ranks are for: that this one computes no more K/V heads than its share.

        Args:
            model: cut.
            found: the heads of each shape of K/V that its layers have.

        Raises:
            BackendError: the plan left attention whole, or layers have K/V of unequal shapes.
        """
        if len(found) != 1:
            raise BackendError(
                "TENSOR_PARALLEL_NOT_SUPPORTED",
                f"expected layers with K/V of one shape for a --tensor-parallel-size of {self._exchange.size}, got"
                f" {len(found)} shapes in {model.config.model_type}. Use --tensor-parallel-size 1.",
                model_type=model.config.model_type,
            )
        _, whole = _head_counts(model)
        (num_kv_heads,) = found
        if num_kv_heads * self._exchange.size != whole:
            raise BackendError(
                "TENSOR_PARALLEL_NOT_SUPPORTED",
                f"expected the tensor-parallel plan of {model.config.model_type} to give each of {self._exchange.size}"
                f" ranks {whole // self._exchange.size} of {whole} K/V heads, got {num_kv_heads} in each: transformers"
                " leaves the attention of such models whole. Use --tensor-parallel-size 1.",
                model_type=model.config.model_type,
            )

    def _require_heads(self, model: PreTrainedModel) -> None:
        size = self._exchange.size
        num_heads, num_kv_heads = _head_counts(model)
        if num_heads % size or num_kv_heads % size:
            common = math.gcd(num_heads, num_kv_heads)
            good = ", ".join(str(number) for number in range(1, common + 1) if common % number == 0)
            raise BackendError(
                "BAD_TENSOR_PARALLEL_SIZE",
                f"expected a --tensor-parallel-size by which the model's {num_kv_heads} K/V heads and {num_heads}"
                f" attention heads can be divided, that is {good}, got {size}",
                tensor_parallel_size=size,
                num_kv_heads=num_kv_heads,
                num_attention_heads=num_heads,
            )

    def _cut(self, name: str, linear: nn.Linear, style: str) -> nn.Module:
        if style == _BY_INPUT:
            return self._cut_inputs(name, linear)
        if style == HALVES:
            return self._cut_outputs(name, linear, cut_of_halves(name, linear, self.size))
        self._require_even(name, "outputs", linear.out_features)
        return self._cut_outputs(name, linear, LayerCut.evenly(linear.out_features, by_outputs=True))

    def _cut_outputs(self, name: str, linear: nn.Linear, cut: LayerCut) -> nn.Linear:
        self.cuts[name] = cut
        return self._rows(linear, cut)

    def _cut_inputs(self, name: str, linear: nn.Linear) -> PartialLinear:
        self._require_even(name, "inputs", linear.in_features)
        cut = self.cuts[name] = LayerCut.evenly(linear.in_features, by_outputs=False)
        part = _linear(cut.take(linear.weight, 1, self.rank, self.size), None)
        return PartialLinear(part, linear.bias, self._exchange)

    def _cut_head(self, linear: nn.Linear) -> GatheredHead:
        rows = self._rows(linear, LayerCut.evenly(linear.out_features, by_outputs=True))
        return GatheredHead(rows, linear.out_features, self._exchange)

    def _take_mixer(self, name: str, mixer: nn.Module) -> None:
        """Cut a module that keeps a state, in place."""
        projected, channels = mixer_cuts(name, mixer, self.size)
        mixer.in_proj = self._cut_outputs(f"{name}.in_proj", mixer.in_proj, projected)  # type: ignore[arg-type]
        mixer.out_proj = self._cut_inputs(f"{name}.out_proj", mixer.out_proj)  # type: ignore[arg-type]
        take_mixer(mixer, channels, self._exchange)

    def _rows(self, linear: nn.Linear, cut: LayerCut) -> nn.Linear:
        bias = None if linear.bias is None else cut.take(linear.bias, 0, self.rank, self.size)
        return _linear(cut.take(linear.weight, 0, self.rank, self.size), bias)

    def _require_even(self, name: str, what: str, number: int) -> None:
        if number % self._exchange.size:
            raise BackendError(
                "BAD_TENSOR_PARALLEL_SIZE",
                f"expected a --tensor-parallel-size by which the {number} {what} of {name} can be divided, got"
                f" {self._exchange.size}",
                tensor_parallel_size=self._exchange.size,
                layer=name,
            )


def _planned(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module, str, nn.Module, str]]:
    """The layers that are cut: full name, parent, name in the parent, layer, style; a mixer is cut as a whole.

    Raises:
        BackendError: there is no plan, or it asks for what is not done here.
    """
    plan = PLANS.get(model.config.model_type) or getattr(model, "tp_plan", None) or {}
    rules = [(_matcher(pattern), style) for pattern, style in plan.items()]
    if _BY_INPUT not in plan.values():
        raise _not_supported(model, "a tensor-parallel plan in transformers", "none")
    modules = dict(model.named_modules())
    head = model.get_output_embeddings()
    for name in [*modules, *(name for name, _ in model.named_parameters())]:
        style = next((style for matches, style in rules if matches(name)), None)
        if style is None:
            continue
        module = modules.get(name)
        if style in _LEFT_WHOLE and module is not head:
            continue
        parent, _, place = name.rpartition(".")
        is_known = style in (_BY_OUTPUT, _BY_INPUT, HALVES) or module is head
        if module is None or not (style == MIXER or (type(module) is nn.Linear and is_known)):
            raise _not_supported(model, "a plan of linear layers, colwise or rowwise", f"{style} for {name}")
        yield name, modules[parent], place, module, style


def _matcher(pattern: str) -> Callable[[str], object]:
    """Whether a name is meant by a plan's pattern, in which * is a layer's number."""
    return re.compile(re.escape(pattern).replace(r"\*", r"\d+")).fullmatch


def _head_counts(model: PreTrainedModel) -> tuple[int, int]:
    """Attention heads and K/V heads, as the configuration has them. Raises BackendError where layers have their own."""
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "is_heterogeneous", False):
        raise BackendError(
            "TENSOR_PARALLEL_NOT_SUPPORTED",
            f"expected layers of one configuration, got per_layer_config in {model.config.model_type}."
            " Use --tensor-parallel-size 1.",
            model_type=model.config.model_type,
        )
    num_heads = int(config.num_attention_heads)
    return num_heads, int(getattr(config, "num_key_value_heads", None) or num_heads)


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """A layer with copies of these, so that nothing keeps the whole."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = _own(weight)
    if bias is not None:
        linear.bias = _own(bias)
    return linear.eval()


def _own(values: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(values.detach().clone(memory_format=torch.contiguous_format), requires_grad=False)


def _not_supported(model: PreTrainedModel, expected: str, got: str) -> BackendError:
    model_type = model.config.model_type
    return BackendError(
        "TENSOR_PARALLEL_NOT_SUPPORTED",
        f"expected {expected} for {model_type}, got {got}. Use --tensor-parallel-size 1.",
        model_type=model_type,
    )
