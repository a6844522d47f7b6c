"""The backend as the shell drives it: load, profile, cache, steps, refusals; and once with a real model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from tokenizers import Tokenizer

from executor_service.backends import torch_backend, torch_memory
from executor_service.backends.base import STATE, BackendError, BlockCopies, CopyDirection, NotEnoughMemoryError
from executor_service.backends.torch_backend import TorchBackend, TorchBackendConfig
from executor_service.block_copies import parse_copies
from executor_service.devices import resolve_device
from executor_service.kernels import reference
from executor_service.kernels.attention_plan import AttentionLimits
from executor_service.memory_profiler import resident_bytes
from executor_service.profile_batch import SCRATCH_BLOCKS, worst_batch
from tests.unit.executor.native_builds import native_ops
from tests.unit.executor.step_builder import (
    Row,
    build_step,
    prompt_of,
    reference_tokens,
    sampling,
    save_tiny_model,
)
from tests.unit.executor_shell.executor_builders import copies_of, make_copies

GIB = 1 << 30


@pytest.fixture(scope="module")
def loaded(folder: Path) -> TorchBackend:
    """A backend that tests share; each starts with a cache of its own."""
    made = backend(folder)
    made.load()
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny-llama", "llama")


def backend(folder: Path, **changes: object) -> TorchBackend:
    values: dict[str, object] = {"model": str(folder), "device": "cpu", "memory_limit": 8 * GIB} | changes
    return TorchBackend(TorchBackendConfig(**values))  # type: ignore[arg-type]


def test_load_model_info_tells_geometry_and_identity(folder: Path) -> None:
    info = backend(folder, block_size=8, model_name="shown").load()
    assert (info.model_name, info.device, info.dtype, info.kv_cache_dtype) == ("shown", "cpu", "float32", "float32")
    assert (info.block_size, info.max_model_len, info.eos_token_ids, info.max_logprobs) == (8, 256, (3,), 20)
    (group,) = info.kv_groups
    assert (group.num_layers, group.num_kv_heads, group.head_dim) == (3, 2, 16)
    assert group.bytes_per_block == 2 * 3 * 2 * 16 * 8 * 4


@pytest.mark.parametrize(
    ("kind", "block_size", "interval", "expected"),
    [
        # 192 x 4 numbers of a state and (192 + 2 * 2 * 4) x 4 of a convolution, of four bytes: 6,400 bytes.
        ("mamba2", 8, 1, 8),
        ("mamba2", 8, 20, 24),
        # A token's K/V takes 2 x 3 x 16 numbers: 17 tokens hold a state.
        ("bamba", 4, 1, 20),
        ("bamba", 16, 1, 32),
        ("bamba", 16, 40, 48),
    ],
)
def test_load_blocks_of_a_model_with_states_are_long_enough_for_interval_and_state(
    tmp_path: Path, kind: str, block_size: int, interval: int, expected: int
) -> None:
    model = save_tiny_model(tmp_path, kind)
    info = backend(model, block_size=block_size, state_interval=interval, max_model_len=128).load()
    assert info.block_size == expected
    (block_bytes,) = {group.bytes_per_block for group in info.kv_groups}
    assert block_bytes >= 6400 * max(group.num_layers for group in info.kv_groups)
    assert [(group.window, group.num_kv_heads) for group in info.kv_groups if group.window == STATE] == [(STATE, 0)] * (
        1 if kind == "mamba2" else 2
    )


def test_load_fp8_cache_for_a_model_of_states_only_is_refused(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, "mamba2")
    with pytest.raises(BackendError, match="expected a model with layers that attend") as caught:
        backend(model, kv_cache_dtype="fp8", max_model_len=64).load()
    assert caught.value.reason == "KV_CACHE_DTYPE_NOT_SUPPORTED"


def test_profile_memory_of_a_model_with_states_says_what_its_longest_sequence_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 tokens in blocks of 9; of each of two groups of states the one before a step of 20 tokens and 3 of it."""
    made = backend(save_tiny_model(tmp_path, "bamba", num_key_value_heads=6), block_size=1, state_interval=1)
    assert made.load().block_size == 9
    monkeypatch.setattr(torch_memory, "total_memory", lambda device, limit: 1)
    with pytest.raises(NotEnoughMemoryError) as caught:
        made.profile_memory(20, 4)
    assert caught.value.metadata["needed_blocks"] == str(1 + 29 + 2 * 4)


def test_profile_memory_every_term_is_measured_and_logged_once(folder: Path) -> None:
    made = backend(folder)
    made.load()
    with capture_logs() as logs:
        profile = made.profile_memory(128, 16)
    assert profile.total_bytes == 8 * GIB
    assert 0 < profile.weights_bytes <= profile.peak_bytes
    assert profile.available_bytes == int(8 * GIB * 0.9) - profile.peak_bytes
    assert profile.num_blocks == profile.available_bytes // profile.bytes_per_block
    assert not profile.overridden
    (line,) = [entry for entry in logs if entry["event"] == "memory_profile"]
    for term in ("total_bytes", "utilization", "weights_bytes", "peak_bytes", "available_bytes", "num_blocks"):
        assert line[term] == getattr(profile, term)


@pytest.mark.parametrize(("limit", "warned"), [(8 * GIB, 0), (1 << 20, 1)])
def test_load_peak_is_logged_and_warned_of_over_the_limit(folder: Path, limit: int, warned: int) -> None:
    with capture_logs() as logs:
        backend(folder, memory_limit=limit).load()
    (line,) = [entry for entry in logs if entry["event"] == "weights_loaded"]
    assert 0 < line["held_bytes"] <= line["load_peak_bytes"]
    warnings = [entry for entry in logs if entry["event"] == "load_peak_over_limit"]
    assert [entry["load_peak_bytes"] for entry in warnings] == [line["load_peak_bytes"]] * warned


def test_native_kernels_and_torch_give_the_same(folder: Path) -> None:
    """In bfloat16, what is as close to float32: either rounds, in places of its own."""
    native_ops()  # skips where there is no compiler
    prompts = [prompt_of(length, length) for length in (1, 30, 77)]
    tables = [list(range(1 + 8 * index, 9 + 8 * index)) for index in range(len(prompts))]
    steps = [
        build_step([Row(prompt, 0, table) for prompt, table in zip(prompts, tables, strict=True)], 16),
        build_step([Row([9], len(prompt), table) for prompt, table in zip(prompts, tables, strict=True)], 16),
    ]

    def logits(dtype: str, *, native: bool) -> torch.Tensor:
        made = backend(folder, dtype=dtype, native_kernels=native)
        with capture_logs() as logs:
            made.load()
        assert ("native_kernels_loaded" in [entry["event"] for entry in logs]) == native
        assert [entry["fused_layers"] for entry in logs if entry["event"] == "weights_loaded"] == [3]
        made.initialize_kv_cache(32)
        return torch.cat([made.forward(step) for step in steps]).float()

    exact = logits("float32", native=False)
    assert exact.shape[0] == 2 * len(prompts)
    torch.testing.assert_close(logits("float32", native=True), exact, atol=1e-3, rtol=1e-4)
    errors = [(logits("bfloat16", native=native) - exact).norm() for native in (False, True)]
    assert errors[1] <= 1.2 * errors[0] <= 0.5 * exact.norm()


def test_load_weights_over_the_limit_are_refused_with_numbers(folder: Path) -> None:
    weights = (folder / "model.safetensors").stat().st_size
    with pytest.raises(NotEnoughMemoryError, match=r"--memory-limit.*--gpu-memory-utilization.*--dtype") as caught:
        backend(folder, memory_limit=weights).load()
    assert caught.value.reason == "NOT_ENOUGH_MEMORY"
    assert 0 < int(caught.value.metadata["weights_bytes"]) < weights  # the file has a head too
    assert caught.value.metadata["total_bytes"] == str(weights)
    backend(folder, memory_limit=weights, dtype="bfloat16").load()
    backend(folder, memory_limit=weights, num_blocks_override=7).load()


def test_profile_memory_override_wins_and_is_logged(folder: Path) -> None:
    made = backend(folder, num_blocks_override=7, memory_limit=1 << 20)
    made.load()
    with capture_logs() as logs:
        profile = made.profile_memory(32, 4)
    assert (profile.num_blocks, profile.overridden) == (7, True)
    (line,) = [entry for entry in logs if entry["event"] == "memory_profile"]
    assert (line["num_blocks"], line["measured_num_blocks"], line["overridden"]) == (7, 0, True)


def test_profile_memory_too_little_memory_is_refused_with_numbers(folder: Path) -> None:
    made = backend(folder, memory_limit=100 << 20)
    made.load()
    with pytest.raises(NotEnoughMemoryError, match=r"max_model_len=256 tokens needs 17 KV blocks") as caught:
        made.profile_memory(32, 4)
    assert caught.value.metadata["total_bytes"] == str(100 << 20)


def test_profile_memory_swap_space_is_part_of_the_cpus_memory_and_logged(folder: Path) -> None:
    made = backend(folder, swap_space=2 * GIB, memory_limit=4 * GIB)
    made.load()
    with capture_logs() as logs:
        profile = made.profile_memory(32, 4)
    assert profile.num_host_blocks == 2 * GIB // profile.bytes_per_block > 0
    host_bytes = profile.num_host_blocks * profile.bytes_per_block
    assert profile.available_bytes == int(4 * GIB * 0.9) - profile.peak_bytes - host_bytes
    assert profile.num_blocks == profile.available_bytes // profile.bytes_per_block
    (line,) = [entry for entry in logs if entry["event"] == "memory_profile"]
    assert (line["num_host_blocks"], line["host_bytes"]) == (profile.num_host_blocks, host_bytes)


@pytest.mark.parametrize("override", [None, 7])
def test_profile_memory_swap_space_beyond_the_memory_is_refused_with_numbers(
    folder: Path, override: int | None
) -> None:
    made = backend(folder, swap_space=4 * GIB, memory_limit=4 * GIB, num_blocks_override=override)
    made.load()
    with pytest.raises(NotEnoughMemoryError, match=r"host blocks of --swap-space take \d+ bytes") as caught:
        made.profile_memory(32, 4)
    numbers = {name: int(value) for name, value in caught.value.metadata.items()}
    assert numbers["missing_bytes"] == numbers["host_bytes"] - numbers["left_bytes"]
    assert str(4 * GIB) in str(caught.value)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_profile_memory_swap_space_that_cannot_fit_is_refused_before_a_step_is_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    made = backend(folder, swap_space=4 * GIB, memory_limit=4 * GIB)
    made.load()
    monkeypatch.setattr(made._budget, "_run_worst_step", lambda *_: pytest.fail("a step was run"))
    monkeypatch.setattr(made._budget, "_device", torch.device(device))
    monkeypatch.setattr(torch_memory, "release_free_memory", lambda _: None)
    monkeypatch.setattr(torch_memory, "host_memory_left", lambda: GIB)
    with pytest.raises(NotEnoughMemoryError, match=r"host blocks of --swap-space take \d+ bytes"):
        made.profile_memory(32, 4)


def test_drop_memory_that_stays_locked_is_an_error_of_the_backend_and_the_cache_is_gone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = backend(folder)
    made.load()
    made.initialize_kv_cache(9, 3)
    assert made._memory is not None

    def fail() -> None:
        raise RuntimeError("page-locked host memory could not be given back, CUDA error 1")

    monkeypatch.setattr(made._memory.host, "close", fail)
    with pytest.raises(BackendError, match=r"CUDA error 1; start the executor anew") as caught:
        made.initialize_kv_cache(9, 2)
    assert caught.value.reason == "HOST_MEMORY_NOT_FREED"
    assert made._memory is None
    made.initialize_kv_cache(9, 2)
    made.close()


class OneGib:
    """In place of the meter, whose measurements are never twice the same: the peak is 1 GiB."""

    peak_bytes = GIB

    def __init__(self, _: torch.device) -> None:
        pass

    def __enter__(self) -> OneGib:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_profile_memory_swap_space_that_leaves_no_sequence_is_named_in_the_refusal(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_memory, "PeakMeter", OneGib)
    # So is what the process holds: here it is pytest's, with all that tests before this one have left.
    monkeypatch.setattr(torch_memory, "resident_bytes", lambda: GIB // 2)
    left = 4 * GIB - GIB
    sequence = 17 * 2 * 3 * 2 * 16 * 16 * 4  # 256 tokens in blocks of 16, and the null block
    fits = backend(folder, memory_limit=4 * GIB, gpu_memory_utilization=1.0, swap_space=left - sequence)
    fits.load()
    assert fits.profile_memory(32, 4).num_blocks >= 17
    made = backend(folder, memory_limit=4 * GIB, gpu_memory_utilization=1.0, swap_space=left - sequence // 2)
    made.load()
    with pytest.raises(NotEnoughMemoryError, match=r"KV blocks of .* host blocks \d+ \(swap_space\).*--swap-space"):
        made.profile_memory(32, 4)


def test_load_swap_space_below_one_block_is_refused_with_numbers(folder: Path) -> None:
    with pytest.raises(BackendError, match=r"--swap-space of at least one block, \d+ bytes, .* got 1000") as caught:
        backend(folder, swap_space=1000).load()
    assert caught.value.reason == "BAD_SWAP_SPACE"


def test_initialize_kv_cache_other_host_blocks_are_allocated_anew_and_the_same_are_cleared(folder: Path) -> None:
    made = backend(folder)
    made.load()
    made.initialize_kv_cache(9, 3)
    memory = made._memory
    assert memory is not None
    memory.host.blocks.fill_(7.0)
    made.initialize_kv_cache(9, 3)
    assert made._memory is memory
    assert not memory.host.blocks.any()
    made.initialize_kv_cache(9, 2)
    assert made._memory is not memory
    assert memory.host.num_bytes == 0
    made.close()
    assert made._memory is None


def test_initialize_kv_cache_without_room_for_host_blocks_says_how_many(folder: Path) -> None:
    made = backend(folder)
    made.load()
    with pytest.raises(NotEnoughMemoryError, match=r"room for 1000000000000 host blocks \(\d+ bytes\)"):
        made.initialize_kv_cache(9, 10**12)
    with pytest.raises(BackendError, match="expected initialize_kv_cache before a step"):
        made.execute(build_step([Row([5], 0, [1])], 16))


@settings(max_examples=30)
@given(st.lists(copies_of(num_blocks=6, num_host_blocks=3), min_size=1, max_size=12))
def test_copy_blocks_equals_a_naive_loop_over_all_layers(loaded: TorchBackend, copies: list[tuple[int, ...]]) -> None:
    loaded.initialize_kv_cache(6, 3)
    memory = loaded._memory
    assert memory is not None
    tensors = [*memory.cache.layers, memory.host.blocks]
    for number, tensor in enumerate(tensors):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 0.25 * number)
    *layers, host = [tensor.clone() for tensor in tensors]
    reference.copy_blocks(layers, host, [(CopyDirection(way), source, target) for way, source, target in copies])
    loaded.copy_blocks(parse_copies(make_copies(copies), 6, 3).runs)
    for tensor, expected in zip(tensors, [*layers, host], strict=True):
        assert torch.equal(tensor, expected)


def test_copy_blocks_that_torch_fails_is_a_backend_error(loaded: TorchBackend) -> None:
    loaded.initialize_kv_cache(6, 3)
    beyond = np.array([77], dtype=np.int32)
    with pytest.raises(BackendError, match="copying blocks failed in torch") as caught:
        loaded.copy_blocks([BlockCopies(CopyDirection.DEVICE_TO_DEVICE, beyond, beyond)])
    assert caught.value.reason == "COPY_FAILED"


def test_execute_prefill_and_decode_equal_generate(folder: Path) -> None:
    made = backend(folder)
    made.load()
    made.initialize_kv_cache(20)
    prompt = prompt_of(50, 1)
    table = [9, 3, 17, 5, 11]
    tokens = made.execute(build_step([Row(prompt, 0, table)], 16)).sampled_token_ids.tolist()
    for step in range(20):
        row = Row(tokens[-1:], 50 + step, table)
        tokens += made.execute(build_step([row], 16, step_id=step + 2)).sampled_token_ids.tolist()
    assert tokens == reference_tokens(folder, prompt, 21)


def test_execute_same_seed_gives_same_tokens_in_any_company(folder: Path) -> None:
    made = backend(folder)
    made.load()
    made.initialize_kv_cache(20)
    warm = sampling(temperature=1.0, top_p=0.95)
    lonely = Row(prompt_of(20, 2), 0, [4, 5], params=warm, seed=77)
    crowd = [Row(prompt_of(9, 3), 0, [7], params=sampling()), Row(lonely.tokens, 0, [8, 9], params=warm, seed=77)]
    alone = made.execute(build_step([lonely], 16)).sampled_token_ids
    assert made.execute(build_step(crowd, 16)).sampled_token_ids[1] == alone[0]


def test_initialize_kv_cache_same_size_reuses_and_clears(folder: Path) -> None:
    made = backend(folder)
    made.load()
    made.initialize_kv_cache(9)
    memory = made._memory
    assert memory is not None
    made.execute(build_step([Row(prompt_of(20, 2), 0, [4, 5])], 16))
    assert memory.cache.layers[0].any()
    made.initialize_kv_cache(9)
    assert made._memory is memory
    assert not memory.cache.layers[0].any()
    made.initialize_kv_cache(11)
    assert made._memory is not memory


def test_execute_out_of_order_calls_are_refused(folder: Path) -> None:
    made = backend(folder)
    step = build_step([Row([5], 0, [1])], 16)
    with pytest.raises(BackendError, match=r"expected load\(\) first"):
        made.execute(step)
    made.load()
    with pytest.raises(BackendError, match="expected initialize_kv_cache before a step"):
        made.execute(step)
    with pytest.raises(BackendError, match="expected initialize_kv_cache before a step"):
        made.copy_blocks([])
    made.initialize_kv_cache(3)
    made.execute(step)
    made.close()
    with pytest.raises(BackendError, match=r"expected load\(\) first"):
        made.execute(step)


@pytest.mark.parametrize(
    "change",
    [
        {"block_size": 0},
        {"state_interval": 0},
        {"gpu_memory_utilization": 0.0},
        {"gpu_memory_utilization": 1.1},
        {"memory_limit": 0},
        {"swap_space": -1},
        {"num_blocks_override": 1},
        {"num_threads": 0},
    ],
)
def test_config_value_out_of_range_is_refused(change: dict[str, float]) -> None:
    with pytest.raises(BackendError, match=f"expected {next(iter(change))} "):
        TorchBackendConfig(model="m", **change)  # type: ignore[arg-type]


def test_load_makes_its_gpu_the_one_of_its_thread_before_anything_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton launches on the thread's device, not on that of the tensors it is given."""
    chosen: list[torch.device] = []
    made = backend(folder)
    monkeypatch.setattr(made, "_device", torch.device("cuda:1"))
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch_backend, "PeakMeter", lambda device: 1 / 0)  # the first that would ask for a GPU
    with pytest.raises(ZeroDivisionError):
        made.load()
    assert chosen == [torch.device("cuda:1")]


@pytest.mark.parametrize("name", ["gpu", "cpu:0", "cuda:x", "cuda:99", ""])
def test_resolve_device_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(BackendError) as caught:
        resolve_device(name)
    assert caught.value.reason == "BAD_DEVICE"


@pytest.mark.parametrize(
    ("tokens", "seqs", "length"),
    [(2048, 256, 8192), (64, 64, 8192), (5, 17, 100), (1, 1, 16), (100, 3, 32), (2048, 2, 100), (7, 9, 8)],
)
def test_worst_batch_reaches_every_limit_and_passes_none(tokens: int, seqs: int, length: int) -> None:
    limits = AttentionLimits(gather_tokens=20_000)
    batch = worst_batch(
        max_num_batched_tokens=tokens,
        max_num_seqs=seqs,
        max_model_len=length,
        vocab_size=50,
        block_sizes=(16, 32),
        max_logprobs=5,
        limits=limits,
    )
    query_lens = np.diff(batch.query_indptr)
    assert batch.num_rows == min(seqs, tokens)
    assert len(batch.token_ids) == min(tokens, seqs * length)
    assert query_lens.min() >= 1
    assert batch.seq_lens.max() == length
    assert np.all(batch.seq_lens >= query_lens)
    assert batch.sampling is not None
    assert len(batch.sampling.rows) == len(batch.sampling.histories) == seqs  # forked rows sample more than once
    assert set(batch.sampling.rows.tolist()) == set(range(batch.num_rows))
    assert np.all(np.diff(batch.sampling.rows) >= 0)
    assert batch.tables[0].block_ids.max() < SCRATCH_BLOCKS
    assert batch.tables[0].block_ids.min() >= 1
    assert batch.slot_mappings[0].max() < SCRATCH_BLOCKS * 16
    assert np.all(np.diff(batch.tables[0].block_indptr) == -(-batch.seq_lens // 16))


_UNDER_LIMIT = """
import sys
import numpy as np
from executor_service.backends.torch_backend import TorchBackend, TorchBackendConfig
from executor_service.memory_profiler import high_water_mark, resident_bytes
from tests.unit.executor.step_builder import Row, build_step, sampling

limit = int(sys.argv[2])
made = TorchBackend(TorchBackendConfig(model=sys.argv[1], device="cpu", memory_limit=limit, gpu_memory_utilization=1.0))
info = made.load()
profile = made.profile_memory(256, 32)
made.initialize_kv_cache(profile.num_blocks)
rng = np.random.default_rng(0)
hot = sampling(temperature=1.0, top_p=0.9999, repetition_penalty=1.1, num_logprobs=20)
for step in range(60):
    rows, left = [], 256
    for row in range(int(rng.integers(1, 33))):
        start = int(rng.integers(0, info.max_model_len - 64))
        count = int(min(rng.choice([1, 1, 1, 17, 64]), left))
        if not count:
            break
        left -= count
        table = rng.integers(1, profile.num_blocks, -(-(start + count) // 16)).tolist()
        rows.append(Row([5] * count, start, table, params=hot, seed=step))
    made.execute(build_step(rows, 16, step_id=step + 1))
print(high_water_mark(), profile.num_blocks * profile.bytes_per_block)
"""


def test_memory_limit_holds_over_many_ragged_steps(tmp_path: Path) -> None:
    # Logits of 32 rows and K/V of whole contexts are large against this model, as they are in life.
    folder = save_tiny_model(tmp_path, "llama", vocab_size=40_000, max_position_embeddings=4096)
    limit = resident_bytes() // 2 + GIB
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", _UNDER_LIMIT, str(folder), str(limit)],
        check=True,
        capture_output=True,
        text=True,
        env=env,
    )
    peak, cache = (int(number) for number in done.stdout.split()[-2:])
    assert cache > 100 << 20
    assert peak <= limit


@pytest.mark.model
@pytest.mark.parametrize("converted", [False, True])
def test_model_over_the_limit_is_refused_before_it_is_read_or_converted(tmp_path: Path, converted: bool) -> None:
    source = os.environ.get("KVPLANE_TEST_MODEL")
    if not source:
        pytest.skip("KVPLANE_TEST_MODEL names no model")
    cache = None if converted else tmp_path
    config = TorchBackendConfig(model=source, device="cpu", memory_limit=1 << 20, cache_dir=cache, native_kernels=False)
    before = resident_bytes()
    with pytest.raises(NotEnoughMemoryError, match="the weights alone take") as caught:
        TorchBackend(config).load()
    assert resident_bytes() - before < int(caught.value.metadata["weights_bytes"]) // 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.model
def test_smollm2_from_gguf_equals_generate_and_has_its_tokenizer(tmp_path: Path) -> None:
    source = os.environ.get("KVPLANE_TEST_MODEL")
    if not source:
        pytest.skip("KVPLANE_TEST_MODEL names no model")
    made = TorchBackend(TorchBackendConfig(model=source, device="cpu", dtype="float32", max_model_len=512))
    info = made.load()
    tokenizer = Tokenizer.from_str(info.tokenizer_files["tokenizer.json"].decode())
    assert tokenizer.get_vocab_size() <= info.vocab_size
    assert all(tokenizer.id_to_token(token) is not None for token in info.eos_token_ids)
    prompt = tokenizer.encode("The capital of France is").ids
    made.initialize_kv_cache(8)
    table = [5, 2, 7]
    tokens = made.execute(build_step([Row(prompt, 0, table)], 16)).sampled_token_ids.tolist()
    for step in range(15):
        row = Row(tokens[-1:], len(prompt) + step, table)
        tokens += made.execute(build_step([row], 16, step_id=step + 2)).sampled_token_ids.tolist()
    assert "Paris" in tokenizer.decode(tokens)
    if source.endswith(".gguf"):
        from executor_service.gguf_conversion import converted_folder, default_cache_dir

        folder = converted_folder(Path(source), default_cache_dir())
        assert tokens == reference_tokens(folder, prompt, 16)
        assert tokenizer.encode("a  12").tokens == ["a", "ĠĠ", "1", "2"]
        assert b"<|im_start|>" in info.tokenizer_files["chat_template.jinja"]
        assert [tokenizer.id_to_token(token) for token in info.eos_token_ids] == ["<|im_end|>"]
    assert torch.get_num_threads() >= 1
