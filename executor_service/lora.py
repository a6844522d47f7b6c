"""LoRA adapters beside a model's weights: many in one step, each on its rows' tokens.

Station: made by `backends.torch_loading` where --max-loras is above 0; reads adapters by `lora_files`. Model code stays
as it is: a linear layer that some loaded adapter is for has a forward hook, found by the layer's name, and one that
none is for has nothing. So it does not matter what computes the layer's own product.

How: the tokens of a step lie end to end. `step` sorts them by adapter once; each hooked layer then does two small
matrix products for each adapter of the step,

    y[t] += scale * (x[t] A^T) B^T    for the tokens t of the adapter's rows,

and a token of a row without an adapter is not touched. A module that keeps a state computes some rows at a time
(`state_layers`): while it does, `while_rows` has those in the step's place.

Source: the formula is Hu et al. 2021; serving many adapters on one base at once, Chen et al. 2023 (Punica) and Sheng et
al. 2023 (S-LoRA).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from executor_service.backends.base import AdapterContent, AdapterError, Int32, StepBatch
from executor_service.devices import upload
from executor_service.fused_layers import ProjectionSlice
from executor_service.lora_files import AdapterFiles, LoraMatrices, read_adapter_files
from executor_service.packed_linear import PackedLinear
from executor_service.tensor_parallel.adapter_parts import AdapterPart, LayerCut, part_of

__all__ = ["LoraAdapters", "LoraTargets", "find_targets"]

_LARGEST_FLOAT_BYTES = 4
# Names and offsets of tensors, and whatever else a file's head may hold.
_MAX_HEAD_BYTES = 1024 * 1024
# Of several, each with tokens of its own; a shared one is called otherwise.
_EXPERT = re.compile(r"\bexperts\b")
_NONE = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True)
class LoraTargets:
    """What of a model adapters may be for.

    Attributes:
        layers: linear layers by name, each where its product is computed.
        idle: names of linear layers that are never called: the model's code reads their weights itself.
        cuts: how ranks share the layers that they share, by name.
    """

    layers: Mapping[str, nn.Module]
    idle: frozenset[str]
    cuts: Mapping[str, LayerCut] = field(default_factory=dict)

    def features(self, name: str) -> tuple[int, int]:
        """Inputs and outputs of a layer, of all ranks together."""
        inputs, outputs = _features(self.layers[name])
        cut = self.cuts.get(name)
        if cut is None:
            return inputs, outputs
        return (inputs, cut.number) if cut.by_outputs else (cut.number, outputs)

    def features_of(self, name: str, rank: int, size: int) -> tuple[int, int]:
        """Those of a layer that a rank has."""
        inputs, outputs = self.features(name)
        cut = self.cuts.get(name)
        if cut is None:
            return inputs, outputs
        number = cut.number_of(rank, size)
        return (inputs, number) if cut.by_outputs else (number, outputs)


@dataclass(frozen=True)
class _AdapterTokens:
    """The tokens that one adapter computes in a step: a slice where they lie side by side, else (n,) int64."""

    adapter_id: int
    tokens: slice | torch.Tensor


class _Current:
    """What is being computed, a step or some of its rows; hooks look here.

    Attributes:
        shape: of its tokens: (1, T), or (rows, tokens of each).
        of_adapters: empty between steps, and where no row has an adapter.
    """

    def __init__(self) -> None:
        self.shape = (1, 0)
        self.of_adapters: list[_AdapterTokens] = []


class _LayerHook:
    """What adapters add to one linear layer.

    Args:
        name: the layer's, for errors.
        current: the step.
    """

    def __init__(self, name: str, current: _Current) -> None:
        self.matrices: dict[int, LoraMatrices] = {}
        self._name = name
        self._current = current

    def __call__(self, module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor | None:
        """Add to the layer's output, in place where it is whole.

        Shape:
            args[0]: (B, T, in_features) as `_Current.shape`, or (B * T, in_features); output: the same of out_features.
        """
        del module
        current = self._current
        if not current.of_adapters:
            return None
        states, (rows, tokens) = args[0], current.shape
        if states.shape[:-1] not in ((rows, tokens), (rows * tokens,)):
            # It had all of a step's tokens when the model was probed.
            raise RuntimeError(
                f"expected tokens of shape {current.shape} in {self._name}, got those of {tuple(states.shape)}"
            )
        inputs, outputs = states.reshape(rows * tokens, -1), output.view(rows * tokens, -1)
        for one in current.of_adapters:
            matrices = self.matrices.get(one.adapter_id)
            if matrices is None:
                continue
            delta = functional.linear(functional.linear(inputs[one.tokens], matrices.a), matrices.b)
            delta *= matrices.scale
            if isinstance(one.tokens, slice):
                outputs[one.tokens] += delta
            else:
                outputs.index_add_(0, one.tokens, delta)
        return output


class LoraAdapters:
    """The adapters of one model.

    Args:
        targets: the layers that an adapter may be for; see `find_targets`.
        max_adapters: most adapters at once.
        max_rank: most columns of A.
        dtype: what matrices are converted to.
        device: where they go.
        rank, size: which of how many ranks this is; each has its part of an adapter.

    Invariants:
        A layer has a hook if and only if a loaded adapter is for it.
    """

    def __init__(
        self,
        targets: LoraTargets,
        *,
        max_adapters: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        self._all = targets
        self._targets = targets.layers
        self._rank, self._size = rank, size
        self._max_adapters = max_adapters
        self._max_rank = max_rank
        self._dtype = dtype
        self._device = device
        self._current = _Current()
        self._adapter_ids = _NONE
        self._of_rows: dict[tuple[bytes, int], list[_AdapterTokens]] = {}
        self._hooks: dict[str, tuple[_LayerHook, torch.utils.hooks.RemovableHandle]] = {}

    @property
    def max_file_bytes(self) -> int:
        """What the file of the largest adapter takes, in the widest type."""
        elements = sum(sum(self._all.features(name)) for name in self._targets) * self._max_rank
        return elements * _LARGEST_FLOAT_BYTES + _MAX_HEAD_BYTES

    @property
    def reading_bytes(self) -> int:
        """Host memory that is taken while the largest adapter is read.

        By the first rank: its file, as bytes and as tensors; what each rank has of it, in the type that they compute
        with; and two more copies of one such part while it is packed. A rank other than the first gets its part packed,
        makes tensors of it, and lays them out.
        """
        if self._rank:
            return 3 * self._part_bytes(self._rank)
        parts = [self._part_bytes(rank) for rank in range(self._size)]
        return 2 * self.max_file_bytes + sum(parts) + 2 * max(parts[1:], default=0)

    def read(self, source: str) -> AdapterContent:
        """Read an adapter and lay it out for this model. May be called from any thread.

        Raises:
            AdapterError: it cannot be read, or is not for this model or these limits.
        """
        content, _ = self.read_parts(source)
        return content

    def read_parts(self, source: str) -> tuple[AdapterContent, list[AdapterPart]]:
        """Read an adapter as `read` does: this rank's part of it, and those of the ranks from 1 on."""
        files = read_adapter_files(source, self.max_file_bytes)
        fitting = self._require_fit(files)
        elements = sum(one.a.numel() + one.b.numel() for one in fitting.values())
        content = AdapterContent(
            revision=files.revision,
            rank=max(one.rank for one in fitting.values()),
            size_bytes=elements * self._dtype.itemsize,
            weights=self.laid_out(self._part(fitting, self._rank)),
        )
        return content, [AdapterPart.of(self._part(fitting, rank), self._dtype) for rank in range(1, self._size)]

    def laid_out(self, matrices: Mapping[str, LoraMatrices]) -> dict[str, LoraMatrices]:
        """Copies of these where and as they are computed with: one view of what was read keeps all of it."""

        def own(matrix: torch.Tensor) -> torch.Tensor:
            return matrix.to(self._device, self._dtype, copy=True).contiguous()

        return {name: LoraMatrices(own(one.a), own(one.b), one.scale) for name, one in matrices.items()}

    def add(self, adapter_id: int, matrices: Mapping[str, LoraMatrices]) -> None:
        """Have an adapter's rows computed with what was laid out."""
        for name, one in matrices.items():
            if name not in self._hooks:
                hook = _LayerHook(name, self._current)
                self._hooks[name] = hook, self._targets[name].register_forward_hook(hook)
            self._hooks[name][0].matrices[adapter_id] = one

    def remove(self, adapter_id: int) -> None:
        """Let go of an adapter's matrices, and of hooks that have none left."""
        for name, (hook, handle) in list(self._hooks.items()):
            hook.matrices.pop(adapter_id, None)
            if not hook.matrices:
                handle.remove()
                del self._hooks[name]

    @contextmanager
    def step(self, batch: StepBatch) -> Iterator[None]:
        """While this is open, the model computes this step's tokens."""
        if batch.adapter_ids is not None:
            self._adapter_ids = batch.adapter_ids
            self._current.of_adapters = _by_adapter(batch.adapter_ids, batch.query_indptr, self._device)
            self._current.shape = 1, len(batch.token_ids)
        try:
            yield
        finally:
            self._current.of_adapters = []
            self._of_rows.clear()

    @contextmanager
    def while_rows(self, rows: npt.NDArray[np.int64], length: int) -> Iterator[None]:
        """While this is open within a step, a module computes so many tokens of each of these rows, as a batch.

        Shape:
            rows: (B,), places in the step.
        """
        current = self._current
        whole = current.of_adapters, current.shape
        if whole[0]:
            # Layer after layer asks the same.
            key = rows.tobytes(), length
            if key not in self._of_rows:
                ends = np.arange(len(rows) + 1, dtype=np.int32) * np.int32(length)
                self._of_rows[key] = _by_adapter(self._adapter_ids[rows], ends, self._device)
            current.of_adapters, current.shape = self._of_rows[key], (len(rows), length)
        try:
            yield
        finally:
            current.of_adapters, current.shape = whole

    @contextmanager
    def largest(self) -> Iterator[list[int]]:
        """While this is open, as many adapters are loaded as there may be, each as large as it may be.

        For the memory profile: their matrices are filled, since memory that was never written to takes none. What is
        loaded stands aside meanwhile, and takes its memory beside them.
        """
        aside = self._loaded()
        for adapter_id in aside:
            self.remove(adapter_id)
        ids = list(range(1, self._max_adapters + 1))
        try:
            for adapter_id in ids:
                matrices = {
                    name: LoraMatrices(self._filled(self._max_rank, inputs), self._filled(outputs, self._max_rank), 1.0)
                    for name, (inputs, outputs) in ((name, _features(layer)) for name, layer in self._targets.items())
                }
                self.add(adapter_id, matrices)
            yield ids
        finally:
            for adapter_id in ids:
                self.remove(adapter_id)
            for adapter_id, matrices in aside.items():
                self.add(adapter_id, matrices)

    def _part_bytes(self, rank: int) -> int:
        """What a rank has of the largest adapter, without the names of layers."""
        features = (self._all.features_of(name, rank, self._size) for name in self._targets)
        return sum(map(sum, features)) * self._max_rank * self._dtype.itemsize

    def _part(self, matrices: Mapping[str, LoraMatrices], rank: int) -> dict[str, LoraMatrices]:
        """What a rank has of them."""
        return {name: part_of(one, self._all.cuts.get(name), rank, self._size) for name, one in matrices.items()}

    def _loaded(self) -> dict[int, dict[str, LoraMatrices]]:
        """The matrices of each loaded adapter, by layer."""
        found: dict[int, dict[str, LoraMatrices]] = {}
        for name, (hook, _) in self._hooks.items():
            for adapter_id, matrices in hook.matrices.items():
                found.setdefault(adapter_id, {})[name] = matrices
        return found

    def _require_fit(self, files: AdapterFiles) -> dict[str, LoraMatrices]:
        """Refuse an adapter of other layers, other shapes or a larger rank. Returns the matrices that add something.

        A layer whose weights the model reads itself had no part in training either: there peft leaves B the zeros that
        it starts with, and what adds nothing to nothing is let go.
        """
        fitting = {
            name: one
            for name, one in files.matrices.items()
            if name in self._targets or name not in self._all.idle or one.b.any()
        }
        unknown = sorted(fitting.keys() - self._targets.keys())
        if unknown or not fitting:
            raise AdapterError(
                "ADAPTER_TARGETS_UNKNOWN",
                f"expected linear layers of the served model as {len(self._targets)} of its modules are, got"
                f" {len(unknown)} others, such as {(unknown or sorted(files.matrices))[0]}; is the adapter another"
                " model's? Output and input embeddings, layers that see some of the tokens only, and layers whose"
                " weights the model reads itself take no adapter",
                modules=", ".join(unknown[:8]),
            )
        for name, one in sorted(fitting.items()):
            expected, got = self._all.features(name), (one.a.shape[1], one.b.shape[0])
            if expected != got:
                raise AdapterError(
                    "ADAPTER_SHAPE_MISMATCH",
                    f"expected matrices for {expected[0]} inputs and {expected[1]} outputs in {name}, got {got[0]} and"
                    f" {got[1]}; is the adapter another model's?",
                    module=name,
                )
        rank = max(one.rank for one in fitting.values())
        if rank > self._max_rank:
            raise AdapterError(
                "ADAPTER_RANK_TOO_LARGE",
                f"expected a rank of at most {self._max_rank}, got {rank}; start the executor with --max-lora-rank"
                f" {rank}",
                rank=rank,
                max_lora_rank=self._max_rank,
            )
        return fitting

    def _filled(self, rows: int, columns: int) -> torch.Tensor:
        return torch.full((rows, columns), 1.0, dtype=self._dtype, device=self._device)


def find_targets(
    model: nn.Module, run: Callable[[], object], cuts: Mapping[str, LayerCut] | None = None
) -> LoraTargets:
    """The linear layers that an adapter may be for: those that get all tokens of a step once, as they lie.

    The output layer gets those only that sample, and an expert those only that are routed to it: two may be all, so
    that an expert is known by its name.

    Args:
        model: whose.
        run: runs it once, on two tokens of which one is sampled.
        cuts: how it is shared out among ranks; None where one has it all.
    """
    cuts = cuts or {}
    layers = {_whole_name(name, cuts): module for name, module in model.named_modules() if _is_linear(module)}
    seen: dict[str, list[torch.Size]] = {name: [] for name in layers}

    def note(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...], object], None]:
        return lambda module, args, output: seen[name].append(
            args[0].shape[:-1] if isinstance(output, torch.Tensor) else torch.Size()
        )

    handles = [layer.register_forward_hook(note(name)) for name, layer in layers.items()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    all_tokens = ([torch.Size((1, 2))], [torch.Size((2,))])
    return LoraTargets(
        {name: one for name, one in layers.items() if seen[name] in all_tokens and not _EXPERT.search(name)},
        frozenset(name for name, calls in seen.items() if not calls),
        cuts,
    )


def _whole_name(name: str, cuts: Mapping[str, LayerCut]) -> str:
    """What the model calls a layer: what is cut by inputs lies in what adds up (`sharding.PartialLinear`)."""
    parent, _, place = name.rpartition(".")
    return parent if place == "linear" and parent in cuts else name


def _is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer under its own name: of several that are one product, each is."""
    if isinstance(module, PackedLinear):
        return not module.is_joined
    return isinstance(module, nn.Linear | ProjectionSlice)


def _features(layer: nn.Module) -> tuple[int, int]:
    """Inputs and outputs of a linear layer."""
    assert isinstance(layer, nn.Linear | PackedLinear | ProjectionSlice)
    return layer.in_features, layer.out_features


def _by_adapter(adapter_ids: Int32, query_indptr: Int32, device: torch.device) -> list[_AdapterTokens]:
    """Which tokens of a step each adapter computes; 0 is none.

    Shape:
        adapter_ids: (R,); query_indptr: (R + 1,).
    """
    of_token = np.repeat(adapter_ids, np.diff(query_indptr))
    found = []
    for adapter_id in np.unique(adapter_ids[adapter_ids > 0]).tolist():
        places = np.flatnonzero(of_token == adapter_id)
        first, last = int(places[0]), int(places[-1])
        side_by_side = last - first + 1 == len(places)
        tokens = slice(first, last + 1) if side_by_side else upload(places, device)
        found.append(_AdapterTokens(adapter_id, tokens))
    return found
