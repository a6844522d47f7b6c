"""Where the scales of a quantised K/V cache come from, what is refused, and that they are part of the model's name."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from kvplane_client.cli.capacity import ModelShape, plan_capacity
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from executor_service.backends.base import BackendError
from executor_service.backends.registry import create_backend
from executor_service.backends.torch_backend import TorchBackend, TorchBackendConfig
from executor_service.config import parse_config
from executor_service.kernels.fp8 import FP8_TYPES
from executor_service.kv_scales import calibration_passages, checkpoint_scales, fp8_name, require_fp8
from executor_service.layer_groups import group_layers
from tests.unit.executor.step_builder import Row, build_step, prompt_of, save_tiny_model, tiny_config

GIB = 1 << 30
NUM_LAYERS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")


def loaded(folder: Path, kv_cache_dtype: str, **changes: object) -> TorchBackend:
    config = {"device": "cpu", "dtype": "float32", "memory_limit": 4 * GIB} | changes
    made = TorchBackend(TorchBackendConfig(model=str(folder), kv_cache_dtype=kv_cache_dtype, **config))  # type: ignore[arg-type]
    made.load()
    return made


def scales_of(made: TorchBackend) -> list[tuple[float, float]]:
    return [(codec.keys.scale, codec.values.scale) for codec in made._ready().codecs if codec.keys and codec.values]


def with_scales(source: Path, target: Path, scales: dict[str, torch.Tensor]) -> Path:
    """The model of `source` with more tensors in its file."""
    for name in ("config.json", "generation_config.json"):
        (target / name).write_bytes((source / name).read_bytes())
    save_file(load_file(source / "model.safetensors") | scales, target / "model.safetensors", {"format": "pt"})
    return target


def every_scale(pattern: str = "model.layers.{}.self_attn.{}_scale") -> dict[str, torch.Tensor]:
    return {
        pattern.format(layer, part): torch.tensor(0.01 * (layer + 1) + (part == "v"), dtype=torch.float32)
        for layer in range(NUM_LAYERS)
        for part in "kv"
    }


@pytest.mark.parametrize("name", FP8_TYPES)
def test_calibrated_scale_is_the_next_power_of_two_above_the_largest_value(folder: Path, name: str) -> None:
    made = loaded(folder, name)
    plain = loaded(folder, "auto")
    plain.initialize_kv_cache(20)
    (tokens,) = calibration_passages({}, 199, 256)
    plain.execute(build_step([Row(tokens, 0, list(range(1, 14)))], 16))
    assert plain._memory is not None
    largest = [layer.abs().flatten(1).amax(1).tolist() for layer in plain._memory.cache.layers]
    limit = torch.finfo(FP8_TYPES[name]).max
    expected = [tuple(2.0 ** math.ceil(math.log2(number / limit)) for number in layer) for layer in largest]
    assert scales_of(made) == expected


@pytest.mark.parametrize(
    "pattern",
    [
        "model.layers.{}.self_attn.{}_scale",
        "model.layers.{}.self_attn.attn.{}_scale",
        "model.layers.{0}.self_attn.{1}_proj.{1}_scale",
    ],
)
def test_checkpoint_scales_are_used_as_they_are(folder: Path, tmp_path: Path, pattern: str) -> None:
    source = with_scales(folder, tmp_path, every_scale(pattern) | {"model.layers.0.mlp.x.weight_scale": torch.ones(1)})
    with capture_logs() as logs:
        made = loaded(source, "fp8")
    assert [k for k, _ in scales_of(made)] == pytest.approx([0.01, 0.02, 0.03])
    assert [v for _, v in scales_of(made)] == pytest.approx([1.01, 1.02, 1.03])
    (event,) = [log for log in logs if log["event"] == "kv_scales"]
    assert (event["source"], event["kv_cache_dtype"], event["k"]) == ("checkpoint", "fp8_e4m3", "0.01 to 0.03")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model.layers.2.self_attn.v_scale": None}, "1 missing or of no layer, first v_scale of layer 2"),
        ({"model.layers.7.self_attn.k_scale": torch.ones(())}, "first k_scale of layer 7"),
        ({"model.layers.1.self_attn.k_scale": torch.zeros(())}, r"\[0.0\] as k_scale of layer 1"),
        ({"model.layers.1.self_attn.v_scale": torch.tensor(math.inf)}, r"\[inf\] as v_scale of layer 1"),
        ({"model.layers.1.self_attn.v_scale": torch.ones(2)}, r"\[1.0, 1.0\] as v_scale of layer 1"),
    ],
)
def test_checkpoint_scales_that_are_not_one_good_number_a_layer_are_refused(
    folder: Path, tmp_path: Path, change: dict[str, torch.Tensor | None], said: str
) -> None:
    scales = {name: scale for name, scale in (every_scale() | change).items() if scale is not None}
    with pytest.raises(BackendError, match=rf"{said}\. Use --kv-cache-dtype auto") as caught:
        checkpoint_scales(with_scales(folder, tmp_path, scales), group_layers([0] * NUM_LAYERS))
    assert caught.value.reason == "BAD_KV_SCALES"


def test_checkpoint_scales_of_layers_that_read_earlier_kv_may_be_absent_or_the_same(tmp_path: Path) -> None:
    """Layers 5 and 6 read what 3 and 4 keep: which of them come with scales makes no other model."""
    folder = save_tiny_model(tmp_path / "model", "gemma4")
    groups = group_layers([20, 20, 0, 20, 0, 20, 0], [0, 1, 2, 3, 4, 3, 4])
    name = "model.layers.{}.self_attn.{}_scale".format
    own = {name(layer, part): torch.tensor(0.5 * (layer + 1) + (part == "v")) for layer in range(5) for part in "kv"}
    same = own | {name(layer, part): own[name(layer - 2, part)].clone() for layer in (5, 6) for part in "kv"}

    def saved(place: str, scales: dict[str, torch.Tensor]) -> Path:
        (tmp_path / place).mkdir()
        return with_scales(folder, tmp_path / place, scales)

    source = saved("own", own)
    expected = checkpoint_scales(source, groups)
    assert expected is not None
    assert expected.keys == (0.5, 1, 1.5, 2, 2.5, 2, 2.5)
    assert expected.values == tuple(scale + 1 for scale in expected.keys)
    made = loaded(source, "fp8", native_kernels=False)
    assert scales_of(made) == list(zip(expected.keys, expected.values, strict=True))
    assert checkpoint_scales(saved("same", same), groups) == expected
    assert checkpoint_scales(saved("one", own | {name(6, "k"): own[name(4, "k")].clone()}), groups) == expected
    with pytest.raises(
        BackendError, match=r"got 0.25 as k_scale of layer 6, which .* of layer 4, and 2.5 as"
    ) as caught:
        checkpoint_scales(saved("other", own | {name(6, "k"): torch.tensor(0.25)}), groups)
    assert caught.value.reason == "BAD_KV_SCALES"
    del same[name(4, "v")]
    with pytest.raises(BackendError, match="1 missing or of no layer, first v_scale of layer 4"):
        checkpoint_scales(saved("less", same), groups)


def test_load_weights_that_compute_nan_are_refused(folder: Path, tmp_path: Path) -> None:
    nan = torch.full((32, 96), math.nan)
    source = with_scales(folder, tmp_path, {"model.layers.1.self_attn.v_proj.weight": nan})
    with pytest.raises(BackendError, match="expected finite K and V") as caught:
        loaded(source, "fp8")
    assert caught.value.reason == "NON_FINITE_KV"


@pytest.mark.parametrize("name", ["fp4", "FP8", "", "float8_e4m3fn"])
def test_kv_cache_dtype_of_another_name_is_refused(name: str) -> None:
    with pytest.raises(BackendError, match=f"expected --kv-cache-dtype auto, fp8, fp8_e4m3, fp8_e5m2, got {name!r}"):
        TorchBackendConfig(model="m", kv_cache_dtype=name)
    assert (fp8_name("auto"), fp8_name("fp8"), fp8_name("fp8_e5m2")) == (None, "fp8_e4m3", "fp8_e5m2")


def test_require_fp8_where_torch_can_not_convert_says_what_to_do() -> None:
    with pytest.raises(BackendError, match=r"got meta: .*Use --kv-cache-dtype auto") as caught:
        require_fp8("fp8_e4m3", torch.device("meta"))
    assert caught.value.reason == "KV_CACHE_DTYPE_NOT_SUPPORTED"


def test_fingerprint_names_type_and_scales_and_auto_changes_nothing(folder: Path, tmp_path: Path) -> None:
    def name(source: Path, kv_cache_dtype: str) -> str:
        return TorchBackend(
            TorchBackendConfig(model=str(source), device="cpu", kv_cache_dtype=kv_cache_dtype)
        ).load().model_fingerprint  # fmt: skip

    names = [name(folder, kind) for kind in ("auto", "fp8_e4m3", "fp8_e5m2")]
    scaled = with_scales(folder, tmp_path, every_scale())
    assert len({*names, name(scaled, "fp8")}) == 4
    assert name(folder, "fp8") == names[1]
    assert all(len(one) == 32 for one in names)


@pytest.mark.parametrize(("dtype", "times"), [("bfloat16", 2), ("float32", 4)])
def test_profile_in_fp8_has_as_many_times_the_blocks_as_a_block_is_smaller(
    folder: Path, dtype: str, times: int
) -> None:
    """The log says both, so that what the type is worth is seen; `kvplane plan` reckons the same bytes."""
    made = loaded(folder, "fp8", dtype=dtype, swap_space=1 << 20)
    with capture_logs() as logs:
        profile = made.profile_memory(64, 4)
    (event,) = [log for log in logs if log["event"] == "memory_profile"]
    assert event["kv_cache_dtype"] == "fp8_e4m3"
    assert event["num_blocks"] == profile.num_blocks
    assert event["auto_bytes_per_block"] == times * profile.bytes_per_block
    assert event["auto_num_blocks"] == profile.num_blocks // times
    shape = ModelShape.from_config(tiny_config("llama").to_dict(), "tiny")
    for kind, size in (("fp8", profile.bytes_per_block), ("auto", event["auto_bytes_per_block"])):
        capacity = plan_capacity(
            shape, total_bytes=4 * GIB, utilization=0.9, dtype=dtype, kv_dtype=kind, overhead_bytes=0, block_size=16,
            context_len=256,
        )  # fmt: skip
        assert capacity.bytes_per_block == size
    assert profile.num_host_blocks == (1 << 20) // profile.bytes_per_block
    made.initialize_kv_cache(40, profile.num_host_blocks)
    assert made._memory is not None
    assert made._memory.cache.num_bytes == 40 * profile.bytes_per_block
    assert made._memory.host.num_bytes == profile.num_host_blocks * profile.bytes_per_block


def test_info_has_the_type_that_the_flag_names_and_the_block_that_is_stored(folder: Path) -> None:
    for kind, shown, size in (("auto", "float32", 4), ("fp8", "fp8_e4m3", 1), ("fp8_e5m2", "fp8_e5m2", 1)):
        flags = ["--model", str(folder), "--device", "cpu", "--dtype", "float32", "--kv-cache-dtype", kind]
        info = create_backend(parse_config(flags)).load()
        assert (info.kv_cache_dtype, info.dtype) == (shown, "float32")
        assert info.kv_groups[0].bytes_per_block == 2 * NUM_LAYERS * 2 * 16 * 16 * size


def test_execute_in_fp8_nan_in_a_silent_row_is_found(folder: Path) -> None:
    made = loaded(folder, "fp8")
    made.initialize_kv_cache(8)
    made._ready().loaded.model.model.embed_tokens.weight.data[77] = math.nan  # type: ignore[union-attr]
    good, bad = Row(prompt_of(20, 1), 0, [1, 2], params=None), Row([5, 77, 6], 0, [3], params=None)
    failures = made.execute(build_step([good, bad], 16)).failures
    assert [(failure.row, failure.reason) for failure in failures] == [(1, "NON_FINITE_KV")]
