"""Queries that grow with their positions: the factors are those of transformers' own module."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention

from executor_service.attention_temperature import take_temperature
from executor_service.model_runner import ATTENTION_NAME, ProbeStep, run_probe
from tests.unit.executor.step_builder import VOCAB_SIZE, tiny_config

NUM_TOKENS = 70


@pytest.fixture
def model() -> PreTrainedModel:
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(tiny_config("llama4"), attn_implementation=ATTENTION_NAME).eval()


def queries(model: PreTrainedModel) -> dict[int, torch.Tensor]:
    """Of a sequence's tokens, by layer. Shape: (T, H_q, D)."""
    step = ProbeStep()
    run_probe(model, VOCAB_SIZE, step, range(NUM_TOKENS))
    return {layer: call.query[0].transpose(0, 1) for layer, call in step.calls.items()}


def test_temperature_gives_the_queries_that_the_module_gives_a_sequence(model: PreTrainedModel) -> None:
    expected = queries(model)
    temperature = take_temperature(model)
    assert temperature is not None
    assert temperature.layers == {2, 4}
    plain, step = queries(model), temperature.at(torch.arange(NUM_TOKENS))
    for layer in range(3):  # what comes after depends on them
        assert torch.equal(step.scaled(layer, plain[layer]), expected[layer])
        assert torch.equal(plain[layer], expected[layer]) is (layer not in temperature.layers)


def test_temperature_of_tokens_follows_their_positions_not_their_places(model: PreTrainedModel) -> None:
    temperature = take_temperature(model)
    assert temperature is not None
    every = temperature.at(torch.arange(NUM_TOKENS)).factors
    assert every[:15].unique().tolist() == [1.0], "the first 16 tokens but one: floor((p + 1) / 16) is 0"
    assert len(every.unique()) == 5
    places = torch.tensor([69, 15, 3, 31])
    assert torch.equal(temperature.at(places).factors, every[places])


def test_take_temperature_of_a_model_without_one_is_none(model: PreTrainedModel) -> None:
    assert take_temperature(AutoModelForCausalLM.from_config(tiny_config("llama"))) is None
    assert take_temperature(model) is not None
    modules = [module for module in model.modules() if isinstance(module, Llama4TextAttention)]
    assert [module.attn_temperature_tuning for module in modules] == [True, True, False, True, False]
    assert take_temperature(model) is None, "taken already"
