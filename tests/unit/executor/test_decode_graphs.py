"""Decode graphs on a CPU: what is recorded is run again, over the arrays that a replay would read.

That a CUDA graph replays what was captured is CUDA's promise; `benchmarks.gpu_check` tries it where a GPU is. All else
is here: padding, sizes, tables overwritten between steps, what is left to the runner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs

from executor_service.backends import torch_graphs, torch_memory
from executor_service.backends.base import STATE, BackendError, StepBatch
from executor_service.backends.torch_backend import TorchBackendConfig
from executor_service.backends.torch_graphs import StepRecording
from executor_service.backends.triton_backend import TritonBackend
from executor_service.decode_graphs import MOST_ROWS, DecodeGraphs, cuda_recorder, graph_sizes
from executor_service.kv_cache import PagedKvCache
from executor_service.layer_groups import group_layers
from tests.unit.executor.step_builder import VOCAB_SIZE, Row, Sample, build_step, prompt_of, save_tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton", "ignore::RuntimeWarning:executor_service")

LENGTHS = (21, 5, 16, 33, 1)


@pytest.fixture(scope="module", params=["qwen3", "gemma3"])
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TritonBackend:
    """A model of one KV group, and one with a sliding window beside full attention."""
    changes: dict[str, object] = {"num_hidden_layers": 2}
    if request.param == "gemma3":
        changes["layer_types"] = ["sliding_attention", "full_attention"]
    folder = save_tiny_model(tmp_path_factory.mktemp("model") / request.param, request.param, **changes)
    made = TritonBackend(
        TorchBackendConfig(model=str(folder), device="cpu", memory_limit=8 << 30, max_model_len=64, swap_space=0)
    )
    made.load()
    made.initialize_kv_cache(64)
    return made


class Recording:
    """Records by keeping the function; notes how often it ran."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        step()

        def replay() -> None:
            self.replays += 1
            step()

        return replay


def recorded(backend: TritonBackend, sizes: Sequence[int], record: Recording) -> tuple[DecodeGraphs, PagedKvCache]:
    runner = backend._ready().runner
    cache = backend._ready_memory().cache
    return runner.record_graphs(cache, sizes, vocab_size=VOCAB_SIZE, max_model_len=64, record=record), cache


def tables(backend: TritonBackend, place: int) -> dict[str, object]:
    """Blocks of the row at this place, in every KV group; none in two."""
    groups = [list(range(1 + 12 * place + 4 * group, 5 + 12 * place + 4 * group)) for group in range(2)]
    more = groups[1:] if len(backend._ready().groups.windows) > 1 else []
    return {"blocks": groups[0], "more_blocks": more}


def prompts(backend: TritonBackend) -> StepBatch:
    rows = [Row(prompt_of(n, n), 0, **tables(backend, place)) for place, n in enumerate(LENGTHS)]  # type: ignore[arg-type]
    return build_step(rows, 16)


def decode(backend: TritonBackend, places: Sequence[int], produced: int = 0) -> StepBatch:
    rows = [
        Row([(7 * place + produced) % VOCAB_SIZE], LENGTHS[place] + produced, **tables(backend, place))  # type: ignore[arg-type]
        for place in places
    ]
    return build_step(rows, 16)


def test_replayed_steps_give_the_logits_and_the_cache_of_computed_ones(backend: TritonBackend) -> None:
    """Steps of one row and of five, of a size and between sizes, one after the other over the same buffers."""
    runner = backend._ready().runner
    record = Recording()
    graphs, cache = recorded(backend, [1, 2, 6], record)
    steps = [([0], 0), ([4, 3, 2, 1, 0], 1), ([3, 1], 2), ([2], 2), ([0, 1, 4], 3)]
    outcomes = []
    for used in (None, graphs):
        cache.clear()
        runner.use_graphs(None)
        backend.forward(prompts(backend))
        runner.use_graphs(used)
        logits = [backend.forward(decode(backend, places, produced)).clone() for places, produced in steps]
        outcomes.append((logits, [layer.clone() for layer in cache.layers]))
    runner.use_graphs(None)
    assert record.replays == len(steps)
    for computed, replayed in zip(outcomes[0][0], outcomes[1][0], strict=True):
        assert computed.shape == replayed.shape
        torch.testing.assert_close(replayed, computed, atol=1e-5, rtol=1e-4)
    for computed, replayed in zip(outcomes[0][1], outcomes[1][1], strict=True):
        torch.testing.assert_close(replayed, computed, atol=1e-5, rtol=1e-4)
        assert not replayed[:, 0].any()  # padding stores nothing, in the null block least of all


def test_steps_that_are_no_plain_decode_are_left_to_the_runner(backend: TritonBackend) -> None:
    record = Recording()
    graphs, _ = recorded(backend, [1, 4], record)
    row = tables(backend, 0)
    left = {
        "prefill": build_step([Row([1, 2], 5, **row)], 16),  # type: ignore[arg-type]
        "too many rows": decode(backend, [0, 1, 2, 3, 4]),
        "samples twice": build_step([Row([1], 5, forks=[Sample()], **row)], 16),  # type: ignore[arg-type]
        "has an adapter": replace(decode(backend, [0, 1]), adapter_ids=np.array([0, 1], dtype=np.int32)),
        "does not sample": build_step([Row([1], 5, params=None, **row)], 16),  # type: ignore[arg-type]
    }
    for why, batch in left.items():
        assert graphs.forward(batch) is None, why
    assert record.replays == 0
    assert graphs.forward(decode(backend, [0, 1, 2, 3])) is not None
    assert record.replays == 1


def test_a_model_that_can_not_be_captured_is_an_error_with_advice(backend: TritonBackend) -> None:
    def refuse(step: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(BackendError, match=r"for 2 rows: operation not permitted .* --enforce-eager") as caught:
        recorded(backend, [1, 2], refuse)  # type: ignore[arg-type]
    assert caught.value.reason == "GRAPHS_NOT_SUPPORTED"


def test_a_backend_serves_a_model_that_can_not_be_captured_without_graphs_and_says_why(
    backend: TritonBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(step: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(backend._recording, "recorder", lambda model: refuse)
    monkeypatch.setattr(backend._recording, "sizes", (1, 2))
    with capture_logs() as logs:
        backend._recording.record(backend._ready(), backend._ready_memory().cache)
    assert [(entry["event"], entry["log_level"]) for entry in logs] == [("decode_graphs_not_recorded", "warning")]
    assert "stream is capturing" in logs[0]["why"]
    assert backend._recording.sizes == (), "nothing is tried again when the cache is made"
    assert backend.forward(decode(backend, [0, 1])).shape == (2, VOCAB_SIZE)


class FakeCuda:
    """What of torch.cuda a recorder uses, as torch 2.13 does it: a capture that fails leaves its stream current."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current = self.own = SimpleNamespace(waits=[])
        self.own.wait_stream = self.own.waits.append
        self.pools: list[object] = []
        for name, fake in {
            "graph_pool_handle": object,
            "Stream": self._new_stream,
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
            "current_stream": lambda device: self.current,
            "stream": self._within,
            "graph": self._capture,
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def _new_stream(self, device: torch.device) -> SimpleNamespace:
        waits: list[object] = []
        return SimpleNamespace(waits=waits, wait_stream=waits.append)

    @contextmanager
    def _within(self, stream: SimpleNamespace) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def _capture(self, graph: object, pool: object, stream: SimpleNamespace, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        self.pools.append(pool)
        before, self.current = self.current, stream
        yield
        self.current = before


def test_recorder_runs_and_captures_on_one_stream_and_comes_back_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    record = cuda_recorder(torch.device("cuda:0"))
    ran: list[object] = []
    record(lambda: ran.append(cuda.current))
    record(lambda: ran.append(cuda.current))
    (stream,) = {id(one): one for one in ran}.values()
    assert stream is not cuda.own
    assert len(ran) == 4, "once before each capture, for what is compiled and made at first use"
    assert stream.waits == [cuda.own] * 2
    assert cuda.own.waits == [stream] * 2
    assert len(cuda.pools) == 2
    assert cuda.pools[0] is cuda.pools[1]

    def refuse() -> None:
        if len(cuda.pools) == 3:
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="stream is capturing"):
        record(refuse)
    assert cuda.current is cuda.own, "else all later steps would be computed on the other stream"


@pytest.mark.parametrize("most", [1, 2, 3, 8, 9, 100, 256, 1000])
def test_graph_sizes_rise_to_the_most_rows_and_pad_little(most: int) -> None:
    sizes = graph_sizes(most)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == min(most, MOST_ROWS)
    rows = np.arange(1, sizes[-1] + 1)
    padded = np.array(sizes)[np.searchsorted(sizes, rows)]
    assert (padded - rows).max() < 16
    assert (padded[rows > 8] <= 2 * rows[rows > 8]).all()


def test_the_profile_is_read_while_recorded_steps_are_held_and_drops_them_then(
    backend: TritonBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a CUDA graph the driver holds memory that torch does not know: gone before the reading, it would be missed."""
    held = []

    class Meter(torch_memory.PeakMeter):
        def __exit__(self, *args: Any) -> None:
            held.append(runner._graphs)
            super().__exit__(*args)

    runner, record = backend._ready().runner, Recording()
    monkeypatch.setattr(torch_memory, "PeakMeter", Meter)
    monkeypatch.setattr(backend._recording, "recorder", lambda model: record)
    assert backend._budget.profile(backend._ready(), backend._recording, 64, 2).num_blocks > 0
    assert [type(graphs) for graphs in held] == [DecodeGraphs]
    assert runner._graphs is None
    monkeypatch.setattr(torch_memory, "worst_batch", lambda **limits: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        backend._budget.profile(backend._ready(), backend._recording, 64, 2)
    assert len(held) == 2
    assert runner._graphs is None, "they know a cache that is gone"


def test_on_a_cpu_nothing_is_recorded(backend: TritonBackend) -> None:
    assert backend._recording.recorder(backend._ready()) is None


def test_on_a_gpu_a_model_whose_layers_keep_a_state_is_not_recorded(
    backend: TritonBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_graphs, "cuda_recorder", lambda device: device)
    recording, model = StepRecording(torch.device("cuda:0"), enforce_eager=False), backend._ready()
    assert recording.recorder(model) is not None
    assert recording.recorder(replace(model, groups=group_layers([0, STATE]))) is None
    assert StepRecording(torch.device("cuda:0"), enforce_eager=True).recorder(model) is None
