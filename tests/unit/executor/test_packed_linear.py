"""Packing linear layers changes where weights lie, not what the model computes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from executor_service import packed_linear
from executor_service.packed_linear import PackedLinear, pack_linear_layers, padded_rows, warm_up


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 24)
        self.inner = nn.Sequential(nn.Linear(24, 56), nn.SiLU(), nn.Linear(56, 24, bias=False))
        self.head = nn.Linear(24, 40, bias=False)
        self.head.weight = self.embed.weight  # tied

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.embed(tokens)))


class Peeking(Plain):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens).to(self.head.weight.dtype)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 0.0)])
def test_pack_linear_layers_gives_the_same_output(dtype: torch.dtype, atol: float) -> None:
    torch.manual_seed(1)
    model = Plain().to(dtype).requires_grad_(requires_grad=False)
    tokens = torch.arange(7)
    expected = model(tokens)
    assert pack_linear_layers(model, lambda: model(tokens)) == 3
    assert isinstance(model.head, PackedLinear)
    torch.testing.assert_close(model(tokens), expected, atol=atol, rtol=0.0)
    assert [name for name, _ in model.named_parameters()] == ["embed.weight", "inner.0.bias"]


def test_pack_linear_layers_model_that_reads_a_weight_stays_as_it_was() -> None:
    model = Peeking().requires_grad_(requires_grad=False)
    tokens = torch.arange(7)
    expected = model(tokens)
    assert pack_linear_layers(model, lambda: model(tokens)) == 0
    assert isinstance(model.head, nn.Linear)
    assert model.head.weight is model.embed.weight
    assert torch.equal(model(tokens), expected)


def test_pack_linear_layers_other_type_is_left_alone() -> None:
    model = Plain().half().requires_grad_(requires_grad=False)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    assert pack_linear_layers(model, lambda: None) == 0
    assert isinstance(model.head, nn.Linear)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places


@pytest.mark.parametrize("rows", [0, 1, 8, 9, 33, 512, 513, 1100])
def test_packed_linear_any_row_count_gives_the_same_output(rows: int) -> None:
    torch.manual_seed(2)
    linear = nn.Linear(24, 40).requires_grad_(requires_grad=False)
    states = torch.randn(1, rows, 24)
    expected = linear(states)
    packed = PackedLinear(linear)
    packed.pack()
    assert packed(states).shape == (1, rows, 40)
    torch.testing.assert_close(packed(states), expected, atol=1e-5, rtol=1e-5)


def test_padded_rows_are_few_and_waste_at_most_a_quarter() -> None:
    counts = [padded_rows(rows) for rows in range(1, 513)]
    assert len(set(counts)) == 32
    assert all(rows <= count <= rows * 1.25 for rows, count in enumerate(counts, start=1))
    assert all(padded_rows(count) == count for count in counts)


def test_warm_up_meets_every_count_once_per_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Plain().requires_grad_(requires_grad=False)
    assert pack_linear_layers(model, lambda: None) == 3
    met: list[tuple[int, int]] = []

    def note(self: PackedLinear, states: torch.Tensor) -> torch.Tensor:
        met.append((self.out_features, len(states)))
        return states

    monkeypatch.setattr(packed_linear.PackedLinear, "forward", note)
    warm_up(model, 10)
    assert sorted(met) == sorted((out, rows) for out in (24, 40, 56) for rows in (*range(1, 9), 10))
