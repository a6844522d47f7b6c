"""Whether decode steps are recorded as CUDA graphs, and in which sizes; `decode_graphs` records them.

Station: `torch_backend` has them recorded over each new cache, `torch_memory` over the worst step's, since what they
hold they hold beside every step. Sizes are chosen when memory is measured, by the limits that it is measured for.
"""

from __future__ import annotations

import time

import structlog
import torch

from executor_service.backends.base import STATE, BackendError
from executor_service.backends.torch_model import PagedModel
from executor_service.decode_graphs import Recorder, cuda_recorder, graph_sizes
from executor_service.kv_cache import PagedKvCache

__all__ = ["StepRecording"]

_log = structlog.get_logger(__name__)


class StepRecording:
    """Which decode steps are recorded.

    Args:
        device: where steps are computed.
        enforce_eager: record none.

    Attributes:
        sizes: numbers of rows that are recorded, rising; none until `choose_sizes`.
    """

    def __init__(self, device: torch.device, *, enforce_eager: bool) -> None:
        self.sizes: tuple[int, ...] = ()
        self._device = device
        self._enforce_eager = enforce_eager

    def choose_sizes(self, model: PagedModel, max_num_seqs: int) -> None:
        """Choose them for steps of up to so many rows; none where nothing is recorded."""
        self.sizes = graph_sizes(max_num_seqs) if self.recorder(model) is not None else ()

    def record(self, model: PagedModel, cache: PagedKvCache) -> None:
        """Record decode steps over a cache, if at all; where the model does not allow it, the log says why."""
        record = self.recorder(model)
        if record is None or not self.sizes:
            return
        start = time.monotonic()
        loaded, sizes = model.loaded, self.sizes
        try:
            graphs = model.runner.record_graphs(
                cache, sizes, vocab_size=loaded.vocab_size, max_model_len=loaded.max_model_len, record=record
            )
        except BackendError as error:
            # The model is served all the same, kernel by kernel.
            self.sizes = ()
            _log.warning("decode_graphs_not_recorded", why=str(error))
            return
        model.runner.use_graphs(graphs)
        _log.info("decode_graphs_recorded", sizes=len(sizes), most_rows=sizes[-1], seconds=time.monotonic() - start)

    def drop(self, model: PagedModel) -> None:
        """Forget the recorded steps: they know the cache by its addresses, and it goes."""
        model.runner.use_graphs(None)

    def recorder(self, model: PagedModel) -> Recorder | None:
        """What records decode steps; None where they are not, as where layers keep a state: they plan on the host."""
        if STATE in model.groups.windows:
            return None
        if self._enforce_eager or self._device.type != "cuda" or not model.kernels.can_record:
            return None
        return cuda_recorder(self._device)
