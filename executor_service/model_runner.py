"""Runs one step through transformers' model code, with attention replaced by the paged one.

Station: called by `backends.torch_model`; calls the model, the kernels it was given (`kernels.paged_kernels`) and
`sampler`. It keeps weights and nothing of a request.

How: all rows of a step are laid end to end as one sequence with its own `position_ids`; the model sees no cache and no
mask. Its attention layers call `_attention_interface`, which finds the step's plan and the cache among its keyword
arguments. Layers that keep a state call `state_layers`, which is told of the step before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface, PreTrainedModel

from executor_service.attention_temperature import AttentionTemperature, StepTemperature
from executor_service.backends.base import STATE, BackendError, RowFailure, StepBatch, StepResult, chunk_size
from executor_service.decode_graphs import DecodeGraphs, Recorder
from executor_service.devices import upload
from executor_service.kernels.paged_kernels import GroupStep, PagedKernels, StepAttention
from executor_service.kv_cache import PagedKvCache
from executor_service.layer_groups import KvShape, LayerGroups, layer_sources, layer_windows
from executor_service.sampler import sample
from executor_service.state_layers import StateLayers, StateStep
from executor_service.state_plan import plan_states

ATTENTION_NAME = "kvplane_paged"
# States that one run of decode rows reads: enough for good batches, little beside what a step takes.
_STATE_BYTES = 64 * 1024 * 1024

# Keyword arguments by which models ask for what this attention does not do.
_REFUSED_ARGUMENTS = ("softcap", "s_aux", "position_bias", "attention_mask")


@dataclass(frozen=True)
class PagedStep:
    """What attention needs of a step besides queries, keys and values: a plan for each KV group that attends.

    Attributes:
        wanted: tokens whose last hidden state is looked at, (S,) int64 with repeats; None for all.
    """

    attention: Mapping[int, StepAttention]
    cache: PagedKvCache
    groups: LayerGroups
    temperature: StepTemperature | None = None
    wanted: torch.Tensor | None = None

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Attention of one layer. Shape: query (T, H_q, D); key, value (T, H_kv, D); returns (T, H_q, D)."""
        keys, values = self.cache.rows_of(self.groups.page_of[layer], key.shape[1] * key.shape[2])
        attention = self.attention[self.groups.group_of[layer]]
        if self.temperature is not None:
            query = self.temperature.scaled(layer, query)
        codecs = self.cache.codecs_of(self.groups.source_of(layer))
        return attention.attend(query, key, value, keys, values, scaling=scaling, codecs=codecs)


class AttentionCall(NamedTuple):
    """What a layer asks of attention, over `window` tokens, 0 for all.

    Shape:
        query: (1, H_q, T, D); key, value: (1, H_kv, T, D).
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float
    window: int


@dataclass
class ProbeStep:
    """Stands in for a PagedStep in the probe: notes what each layer passes.

    Shape:
        seen[layer]: of its K/V; windows[layer] in tokens, 0 for full attention; calls: by layer.
    """

    seen: dict[int, KvShape] = field(default_factory=dict)
    windows: dict[int, int] = field(default_factory=dict)
    calls: dict[int, AttentionCall] = field(default_factory=dict)

    def note(self, layer: int, call: AttentionCall, refused: dict[str, Any]) -> None:
        """Check one layer's call.

        Raises:
            BackendError: the layer asks for something else than attention with or without a window, or its K and V
                differ in shape.
        """
        key, value = call.key, call.value
        wanted = sorted(name for name, value in refused.items() if value is not None)
        if wanted:
            raise BackendError(
                "MODEL_NOT_SUPPORTED",
                f"expected full attention or a sliding window, but layer {layer} asks for {', '.join(wanted)}",
                layer=layer,
                arguments=", ".join(wanted),
            )
        if key.shape != value.shape:
            raise BackendError(
                "MODEL_NOT_SUPPORTED",
                f"expected K and V of one shape, got {tuple(key.shape)} and {tuple(value.shape)} in layer {layer}",
                layer=layer,
            )
        if layer in self.seen:
            raise BackendError("MODEL_NOT_SUPPORTED", f"expected one attention call per layer, got two in {layer}")
        self.seen[layer] = KvShape(key.shape[1], key.shape[3])
        self.windows[layer] = call.window
        self.calls[layer] = call


def paged_attention_interface(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    paged_step: PagedStep | ProbeStep | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The function transformers calls in every layer.

    Shape:
        query: (1, H_q, T, D); key, value: (1, H_kv, T, D); returns (1, T, H_q, D) and no weights.
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    if isinstance(paged_step, PagedStep):
        q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
        return paged_step.attend(layer, q, k, v, scaling).unsqueeze(0), None
    if paged_step is None:
        raise BackendError(
            "MODEL_NOT_SUPPORTED",
            f"expected keyword arguments to reach attention, got none in layer {layer}",
            layer=layer,
        )
    refused = {name: kwargs.get(name) for name in _REFUSED_ARGUMENTS} | {"attention_mask": attention_mask}
    paged_step.note(layer, AttentionCall(query, key, value, scaling, sliding_window or 0), refused)
    return query.transpose(1, 2), None


# transformers makes no mask for an attention that has no mask function of its own: rows end to end need none.
AttentionInterface.register(ATTENTION_NAME, paged_attention_interface)


def probe(
    model: PreTrainedModel, vocab_size: int, states: StateLayers | None = None
) -> tuple[list[int], list[KvShape]]:
    """Learn from one forward pass which layers attend, over which windows, and what their K/V look like.

    A configuration can not be trusted for this: every architecture names it otherwise, and layers that keep a state
    (Mamba, linear attention) show only by not calling attention. Of windows and states it must say the same.

    Args:
        model: as `ModelRunner` takes it.
        vocab_size: token ids.
        states: the layers that keep a state, if there are any; they learn their layout.

    Returns:
        What each layer reads, as `layer_windows` returns it, and what it keeps of a token.

    Raises:
        BackendError: a layer neither calls the attention interface nor keeps a state, or layers are others than the
            configuration says.
    """
    step = ProbeStep()
    with nullcontext() if states is None else states.probing():
        logits = run_probe(model, vocab_size, step)
    if logits.shape != (1, 1, vocab_size):
        raise BackendError(
            "MODEL_NOT_SUPPORTED",
            f"expected logits of shape (1, 1, {vocab_size}) for one wanted token, got {tuple(logits.shape)}",
            model_type=model.config.model_type,
        )
    num_layers = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    windows_seen = step.windows | dict.fromkeys(() if states is None else states.layers, STATE)
    if sorted(windows_seen) != list(range(num_layers)):
        raise BackendError(
            "MODEL_NOT_SUPPORTED",
            f"expected {num_layers} layers that call attention, got layers {sorted(step.seen)} in"
            f" {model.config.model_type}",
            model_type=model.config.model_type,
        )
    windows, expected = [windows_seen[layer] for layer in range(num_layers)], layer_windows(model.config)
    # Layers with chunks ask for plain attention: only a mask would tell.
    if windows != [0 if chunk_size(window) else window for window in expected]:
        raise BackendError(
            "MODEL_NOT_SUPPORTED",
            f"expected layers with the windows of the configuration, {expected}, got {windows} in"
            f" {model.config.model_type}",
            model_type=model.config.model_type,
        )
    _require_shared_kv(step, layer_sources(model.config), model.config.model_type)
    return expected, [step.seen.get(layer, KvShape(0, 0)) for layer in range(num_layers)]


def _require_shared_kv(step: ProbeStep, sources: Sequence[int], model_type: str) -> None:
    """Refuse a layer that has other K/V than the one whose it is to read. Of the same tensors there is no doubt."""
    for layer, source in enumerate(sources):
        if layer == source:
            continue
        own, other = step.calls[layer], step.calls[source]
        if own.key is not other.key or own.value is not other.value:
            raise BackendError(
                "MODEL_NOT_SUPPORTED",
                f"expected layer {layer} to attend to the K/V of layer {source}, got others in {model_type}",
                model_type=model_type,
                layer=layer,
            )


@torch.inference_mode()
def run_probe(
    model: PreTrainedModel, vocab_size: int, step: ProbeStep, positions: Sequence[int] = (0, 1)
) -> torch.Tensor:
    """One forward pass in which attention only notes what it is asked. Returns the second token's logits."""
    tokens = torch.arange(len(positions), device=model.device).unsqueeze(0).remainder(vocab_size)
    places = torch.tensor([list(positions)], device=model.device)
    last = torch.ones(1, dtype=torch.int64, device=model.device)
    output = model(input_ids=tokens, position_ids=places, use_cache=False, logits_to_keep=last, paged_step=step)
    return output.logits  # type: ignore[no-any-return]


class ModelRunner:
    """Runs steps on one model.

    Args:
        model: weights, in evaluation mode, with `ATTENTION_NAME` as attention.
        kernels: what writes K/V and attends.
        groups: which layers share a block table, and which page of a block is whose.
        states: the layers that keep a state, probed; None where no layer does.
        temperature: of the attention of some layers; None where no layer has one.

    Attributes:
        dtype: the type that the model computes in.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        kernels: PagedKernels,
        groups: LayerGroups,
        states: StateLayers | None = None,
        temperature: AttentionTemperature | None = None,
    ) -> None:
        self.dtype = model.dtype
        self._model = model
        self._groups = groups
        self._device = model.device
        self._kernels = kernels
        self._states = states
        self._temperature = temperature
        self._attending = [group for group, window in enumerate(groups.windows) if window != STATE]
        self._graphs: DecodeGraphs | None = None

    def use_graphs(self, graphs: DecodeGraphs | None) -> None:
        """From now on, steps that decode are replayed from these recordings; None computes all steps one by one."""
        self._graphs = graphs

    def record_graphs(
        self, cache: PagedKvCache, sizes: Sequence[int], *, vocab_size: int, max_model_len: int, record: Recorder
    ) -> DecodeGraphs:
        """Record decode steps over a cache.

        Args:
            cache: its addresses become part of the recordings.
            sizes: numbers of rows, rising.
            vocab_size: logits of a row.
            max_model_len: tokens of the longest row.
            record: how.

        Raises:
            BackendError: the model cannot be recorded.
        """
        return DecodeGraphs(
            lambda tokens, positions, attention: self._compute(tokens, positions, 0, attention, cache),
            self._kernels,
            windows=self._groups.windows,
            sizes=sizes,
            vocab_size=vocab_size,
            dtype=self.dtype,
            max_model_len=max_model_len,
            block_sizes=self._groups.block_sizes(cache.layout.block_size),
            device=self._device,
            record=record,
        )

    @torch.inference_mode()
    def run(self, batch: StepBatch, cache: PagedKvCache) -> StepResult:
        """One step: K/V of all rows written, then attention, then sampling."""
        logits = self.forward(batch, cache)
        check = KvCheck.launch(batch, cache, self._groups, self._states)
        if batch.sampling is None:
            return StepResult(np.zeros(0, dtype=np.int32), failures=check.failures())
        result = sample(logits, batch.sampling)
        failures = check.failures() + [
            RowFailure(
                int(batch.sampling.rows[index]),
                "NON_FINITE_LOGITS",
                "the row's logits hold NaN or +inf, or its parameters leave no token to choose",
            )
            for index in result.failed
        ]
        return StepResult(result.token_ids, result.logprobs, failures)

    @torch.inference_mode()
    def follow(self, batch: StepBatch, cache: PagedKvCache) -> list[RowFailure]:
        """One step without sampling, for a rank that another one samples for. Returns rows with K/V not finite here."""
        self.forward(batch, cache)
        return KvCheck.launch(batch, cache, self._groups, self._states).failures()

    @torch.inference_mode()
    def forward(self, batch: StepBatch, cache: PagedKvCache) -> torch.Tensor:
        """Raw logits of the sampling rows. Shape: (S, V) in the model's type; S is 0 without sampling."""
        windows = self._groups.windows
        if len(batch.tables) != len(windows):
            raise BackendError(
                "BAD_STEP",
                f"expected one block table per row for each of {len(windows)} KV groups, got {len(batch.tables)}",
                step_id=batch.step_id,
            )
        if self._graphs is not None:
            replayed = self._graphs.forward(batch)
            if replayed is not None:
                return replayed
        sizes = self._groups.block_sizes(cache.layout.block_size)
        attention = self._kernels.plan(
            batch.query_indptr,
            batch.seq_lens,
            [
                GroupStep(windows[group], batch.tables[group], batch.slot_mappings[group], sizes[group])
                for group in self._attending
            ],
            device=self._device,
        )
        tokens, positions = self._to_device(batch.token_ids), self._to_device(batch.positions)
        with self._running_states(batch, cache):
            return self._compute(tokens, positions, self._last_tokens(batch), attention, cache)

    def _compute(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        wanted: torch.Tensor | int,
        attention: Sequence[StepAttention],
        cache: PagedKvCache,
    ) -> torch.Tensor:
        """The model's forward pass; attention is that of the groups that attend, in order.

        Shape:
            tokens, positions: (1, T); returns (S, V).
        """
        of_groups = dict(zip(self._attending, attention, strict=True))
        temperature = self._temperature.at(positions[0]) if self._temperature is not None else None
        output = self._model(
            input_ids=tokens,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=wanted,
            paged_step=PagedStep(
                of_groups, cache, self._groups, temperature, wanted if isinstance(wanted, torch.Tensor) else None
            ),
        )
        return output.logits[0]

    def _running_states(self, batch: StepBatch, cache: PagedKvCache) -> AbstractContextManager[None]:
        """Within it the layers that keep a state know the step."""
        if self._states is None:
            return nullcontext()
        most_rows = max(1, _STATE_BYTES // self._states.layout.num_bytes)
        runs = {
            group: plan_states(
                batch.query_indptr,
                batch.seq_lens,
                batch.tables[group],
                block_size=cache.layout.block_size,
                most_rows=most_rows,
                device=self._device,
            )
            for group, window in enumerate(self._groups.windows)
            if window == STATE
        }
        return self._states.running(StateStep(runs, cache, self._groups))

    def _last_tokens(self, batch: StepBatch) -> torch.Tensor | int:
        """Indices of the tokens whose logits are wanted, repeats included; 0 means each once, without a copy."""
        if batch.sampling is None:
            return torch.zeros(0, dtype=torch.int64, device=self._device)
        last = batch.query_indptr[batch.sampling.rows + 1].astype(np.int64) - 1
        if len(last) == len(batch.token_ids) and (last[1:] > last[:-1]).all():
            return 0
        return upload(last, self._device)

    def _to_device(self, column: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> torch.Tensor:
        """One sequence of int64. Shape: (T,) to (1, T)."""
        return upload(column.astype(np.int64), self._device).unsqueeze(0)


@dataclass(frozen=True)
class KvCheck:
    """Whether rows without sampling have finite K/V, or state: no logits would tell, and their blocks would be hits.

    The K/V of the last layer that keeps its own tells of the others: each token attends to itself and to those before
    it, so what is not finite in one layer makes the hidden state, and with it the K/V of every later layer, NaN. (An
    infinite key all of whose scores are -inf is ignored by attention, and here.) A state that is not finite never is
    again: a row's newest one tells. Where every row samples, as in decoding, there is nothing to do.

    It is launched behind the step and read behind the sampling, so that the host waits for the device once.

    Shape:
        rows: (n,), the row of each token, or state, that is looked at; finite: (n,) bool, on the device.
    """

    rows: npt.NDArray[np.int64]
    finite: torch.Tensor | None

    @classmethod
    def launch(cls, batch: StepBatch, cache: PagedKvCache, groups: LayerGroups, states: StateLayers | None) -> KvCheck:
        """Look at what a step has written; the step need not be done."""
        silent_row = np.ones(batch.num_rows, dtype=bool)
        if batch.sampling is not None:
            silent_row[batch.sampling.rows] = False
        chosen = np.flatnonzero(silent_row)
        if not len(chosen):
            return cls(chosen, None)
        group, page = groups.group_of[groups.last_own], groups.page_of[groups.last_own]
        device = cache.keys[page].device
        if groups.windows[group] == STATE:
            assert states is not None
            table = batch.tables[group]
            newest = table.block_ids[table.block_indptr[chosen + 1] - 1].astype(np.int64)
            return cls(chosen, states.are_finite(cache, page, upload(newest, device)))
        rows = np.repeat(np.arange(batch.num_rows), np.diff(batch.query_indptr))
        silent = silent_row[rows]
        slots = upload(batch.slot_mappings[group][silent], device)
        return cls(rows[silent], cache.is_finite(page, slots, groups.shapes[group].width if groups.shapes else 0))

    def failures(self) -> list[RowFailure]:
        """A failure for each row that has something not finite; waits for the device."""
        if self.finite is None:
            return []
        message = "what the row computed for the last layer's own K/V or state is NaN or infinite"
        bad = np.unique(self.rows[~self.finite.cpu().numpy()]).tolist()
        return [RowFailure(row, "NON_FINITE_KV", message) for row in bad]
