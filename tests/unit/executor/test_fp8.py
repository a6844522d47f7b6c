"""What a value becomes in eight bits, and what every byte is read as."""

from __future__ import annotations

import math

import pytest
import torch

from executor_service.kernels.fp8 import FP8_TYPES, Fp8Codec, layer_codecs

EVERY_BYTE = torch.arange(256, dtype=torch.uint8).view(1, 256)
COMPUTE_TYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("scale", [2.0**-5, 1.0, 0.0371])
@pytest.mark.parametrize("dtype", COMPUTE_TYPES)
@pytest.mark.parametrize("stored", FP8_TYPES.values(), ids=FP8_TYPES)
@pytest.mark.parametrize("width", [256, 255])
def test_decode_every_byte_is_stored_times_scale_rounded_once(
    stored: torch.dtype, dtype: torch.dtype, scale: float, width: int
) -> None:
    """An even width goes by the table of pairs, an odd one by torch's conversion."""
    every = EVERY_BYTE[:, :width].contiguous()
    actual = Fp8Codec(stored, scale).decode(every, torch.empty(1, width, dtype=dtype))
    torch.testing.assert_close(actual, (every.view(stored).float() * scale).to(dtype), rtol=0, atol=0, equal_nan=True)


def test_decode_pairs_with_each_neighbour_read_alike() -> None:
    pairs = torch.cartesian_prod(EVERY_BYTE[0], EVERY_BYTE[0])
    actual = Fp8Codec(torch.float8_e4m3fn, 0.5).decode(pairs, torch.empty(1 << 16, 2))
    expected = pairs.view(torch.float8_e4m3fn).float() * 0.5
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("scale", [2.0**-5, 0.0371])
@pytest.mark.parametrize("stored", FP8_TYPES.values(), ids=FP8_TYPES)
def test_encode_what_was_decoded_gives_the_same_bytes(stored: torch.dtype, scale: float) -> None:
    """So what is computed again from what was read is stored as before. NaN has several bytes, infinity becomes max."""
    codec = Fp8Codec(stored, scale)
    read = codec.decode(EVERY_BYTE, torch.empty(1, 256))
    finite = torch.isfinite(read)
    assert torch.equal(codec.encode(read)[finite], EVERY_BYTE[finite])


@pytest.mark.parametrize("dtype", COMPUTE_TYPES)
@pytest.mark.parametrize(("stored", "largest"), [(torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57_344.0)])
def test_encode_saturates_out_of_range_and_infinity_and_keeps_nan(
    stored: torch.dtype, largest: float, dtype: torch.dtype
) -> None:
    scale = 2.0**-6
    beyond = torch.tensor([[largest * scale * 1.25, math.inf, -math.inf, -3e38, math.nan, 0.0]], dtype=dtype)
    codec = Fp8Codec(stored, scale)
    read = codec.decode(codec.encode(beyond), torch.empty(1, 6))
    top = largest * scale
    torch.testing.assert_close(read, torch.tensor([[top, top, -top, -top, math.nan, 0.0]]), equal_nan=True)


def test_layer_codecs_equal_scales_share_one_codec() -> None:
    layers = layer_codecs(torch.float8_e5m2, [0.5, 0.25, 0.5], [0.25, 0.125, 2.0])
    assert [(layer.keys.scale, layer.values.scale) for layer in layers if layer.keys and layer.values] == [
        (0.5, 0.25), (0.25, 0.125), (0.5, 2.0),
    ]  # fmt: skip
    assert layers[0].keys is layers[2].keys
    assert layers[0].values is layers[1].keys
