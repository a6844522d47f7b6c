"""Which layers share a block table, from a configuration."""

from __future__ import annotations

import pytest
from transformers import (
    BambaConfig,
    FalconH1Config,
    FalconMambaConfig,
    Gemma3TextConfig,
    JambaConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    Mamba2Config,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3NextConfig,
)

from executor_service.backends.base import STATE, BackendError, KvGroupSpec, chunks_of
from executor_service.layer_groups import KvShape, group_layers, layer_sources, layer_windows, page_tokens
from tests.simulation.harness import kv_group
from tests.unit.executor.step_builder import tiny_config


def test_layer_windows_are_those_of_the_configuration() -> None:
    assert layer_windows(LlamaConfig(num_hidden_layers=2)) == [0, 0]
    assert layer_windows(MistralConfig(num_hidden_layers=2, sliding_window=128)) == [128, 128]
    assert layer_windows(MistralConfig(num_hidden_layers=2, sliding_window=None)) == [0, 0]
    assert layer_windows(Qwen2Config(num_hidden_layers=2, sliding_window=64, use_sliding_window=False)) == [0, 0]
    gemma = Gemma3TextConfig(num_hidden_layers=7, sliding_window=512)
    assert layer_windows(gemma) == [512, 512, 512, 512, 512, 0, 512]


def test_layer_windows_say_which_layers_have_chunks() -> None:
    few = {"num_hidden_layers": 4, "attention_chunk_size": 64}
    assert layer_windows(Llama4TextConfig(**few)) == [-64, -64, -64, 0]
    assert layer_windows(Llama4TextConfig(**few, no_rope_layers=[0, 1, 1, 0])) == [0, -64, -64, 0]
    assert layer_windows(Llama4TextConfig(num_hidden_layers=4, attention_chunk_size=None)) == [0, 0, 0, 0]


def test_layer_windows_say_which_layers_keep_a_state() -> None:
    assert layer_windows(Mamba2Config(num_hidden_layers=2)) == [STATE, STATE]
    assert layer_windows(BambaConfig(num_hidden_layers=3, attn_layer_indices=[1])) == [STATE, 0, STATE]
    assert layer_windows(JambaConfig(num_hidden_layers=3, attn_layer_period=2, attn_layer_offset=1)) == [
        STATE,
        0,
        STATE,
    ]
    assert layer_windows(Qwen3NextConfig(num_hidden_layers=4)) == [STATE, STATE, STATE, 0]


@pytest.mark.parametrize("limit", [(0.0, 0.5), (0.001, float("inf"))])
def test_layer_windows_states_whose_time_steps_have_a_limit_are_refused(limit: tuple[float, float]) -> None:
    with pytest.raises(BackendError, match="without a limit on their time steps, got time_step_limit=") as caught:
        layer_windows(Mamba2Config(num_hidden_layers=1, time_step_limit=limit))
    assert caught.value.reason == "MODEL_NOT_SUPPORTED"


@pytest.mark.parametrize(
    ("types", "window"),
    [
        (["full_attention", "chunked_attention"], None),
        (["linear_attention", "full_attention"], None),
        (["sliding_attention", "full_attention"], None),
    ],
)
def test_layer_windows_other_attention_is_refused_by_name(types: list[str], window: int | None) -> None:
    config = LlamaConfig(num_hidden_layers=2)
    config.layer_types, config.sliding_window = types, window
    with pytest.raises(BackendError, match=types[0] if types[0] != "full_attention" else types[1]) as caught:
        layer_windows(config)
    assert caught.value.reason == "MODEL_NOT_SUPPORTED"


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (FalconMambaConfig(), "linear_attention"),
        (FalconH1Config(), "hybrid"),
        (Lfm2Config(num_hidden_layers=2, full_attn_idxs=[1]), "conv"),
        (Llama4TextConfig(attention_chunk_size=1), "chunked_attention"),
        (Llama4TextConfig(layer_types=["linear_attention"] * 48), "linear_attention"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.model_type,
)
def test_layer_windows_model_with_layers_of_another_kind_is_refused_by_name(
    config: PreTrainedConfig, kind: str
) -> None:
    with pytest.raises(BackendError, match=f"got .*{kind}.* in {config.model_type}; this backend knows no other"):
        layer_windows(config)


def test_layer_sources_are_the_last_of_their_type_with_kv_of_their_own() -> None:
    assert layer_sources(LlamaConfig(num_hidden_layers=3)) == [0, 1, 2]
    assert layer_sources(tiny_config("gemma3n")) == [0, 1, 2, 3, 2, 3, 2]
    assert layer_sources(tiny_config("gemma3n", num_kv_shared_layers=0)) == list(range(7))


def test_layer_sources_of_a_model_that_was_not_tried_are_refused() -> None:
    config = LlamaConfig(num_hidden_layers=3, num_kv_shared_layers=1)
    with pytest.raises(BackendError, match="got num_kv_shared_layers=1 in llama; this backend shares K/V") as caught:
        layer_sources(config)
    assert caught.value.reason == "MODEL_NOT_SUPPORTED"


def test_group_layers_that_read_anothers_have_its_page_and_are_not_counted() -> None:
    groups = group_layers([20, 0, 20, 0, 20, 0, 20], [0, 1, 2, 3, 2, 3, 2])
    assert groups.windows == (0, 20)
    assert list(zip(groups.group_of, groups.page_of, strict=True)) == [
        (1, 0), (0, 0), (1, 1), (0, 1), (1, 1), (0, 1), (1, 1),
    ]  # fmt: skip
    assert (groups.num_pages, groups.num_layers(0), groups.num_layers(1)) == (2, 2, 2)
    assert [groups.source_of(layer) for layer in range(7)] == [0, 1, 2, 3, 2, 3, 2]
    assert (groups.last_own, group_layers([20, 0, STATE]).last_own) == (3, 2)


def test_group_layers_that_keep_a_state_are_in_the_last_groups() -> None:
    groups = group_layers([STATE, 0, STATE, 20, STATE, STATE])
    assert groups.windows == (0, 20, *[STATE] * 4)
    assert (groups.group_of, groups.page_of) == ((2, 0, 3, 1, 4, 5), (0,) * 6)
    bamba = group_layers([STATE if layer not in (9, 18, 27) else 0 for layer in range(32)])  # Bamba 9B
    assert bamba.windows == (0, *[STATE] * 10)
    assert [bamba.num_layers(group) for group in range(11)] == [3] * 10 + [2]


def test_group_layers_with_chunks_come_after_those_with_a_window() -> None:
    groups = group_layers([chunks_of(64), 0, chunks_of(8), 20, STATE])
    assert groups.windows == (0, 20, -8, -64, STATE)
    assert groups.group_of == (3, 0, 2, 1, 4)


def test_group_layers_one_kind_is_one_group_in_model_order() -> None:
    groups = group_layers([0] * 5)
    assert (groups.windows, groups.group_of, groups.page_of) == ((0,), (0,) * 5, (0, 1, 2, 3, 4))
    assert (groups.num_pages, groups.num_layers(0)) == (5, 5)
    assert group_layers([20, 20]).windows == (20,)


def test_group_layers_gemma_3_270m_has_six_groups_and_no_unused_page() -> None:
    windows = ([512] * 5 + [0]) * 3
    groups = group_layers(windows)
    assert groups.windows == (0, 512, 512, 512, 512, 512)
    assert groups.num_pages == 3
    assert [groups.num_layers(group) for group in range(6)] == [3] * 6


def test_group_layers_that_do_not_divide_leave_pages_unused_in_sliding_groups() -> None:
    groups = group_layers(([1024] * 5 + [0]) * 4 + [1024] * 2)  # Gemma 3 1B
    assert groups.windows == (0, 1024, 1024, 1024, 1024, 1024, 1024)
    assert [groups.num_layers(group) for group in range(7)] == [4, 4, 4, 4, 4, 4, 2]


@pytest.mark.parametrize("windows", [[0, 20, 20, 0, 20], [8, 8, 300, 8], [0, 5] * 13 + [0] * 3])
def test_group_layers_every_layer_has_a_page_of_its_own_in_a_group_of_its_window(windows: list[int]) -> None:
    groups = group_layers(windows)
    places = list(zip(groups.group_of, groups.page_of, strict=True))
    assert len(set(places)) == len(windows)
    assert [groups.windows[group] for group in groups.group_of] == windows
    assert list(groups.windows) == sorted(groups.windows)


EIGHT, SIX, FOUR = KvShape(8, 128), KvShape(6, 128), KvShape(4, 128)


def test_group_layers_with_less_of_a_token_have_longer_blocks() -> None:
    """Four full layers of 8 K/V heads, four of 4 with a window: blocks of 16 and of 32 tokens, nothing unused."""
    groups = group_layers([0, 1024] * 4, shapes=[EIGHT, FOUR] * 4)
    assert (groups.windows, groups.shapes) == ((0, 1024), (EIGHT, FOUR))
    assert (groups.num_pages, groups.num_layers(0), groups.num_layers(1)) == (4, 4, 4)
    assert page_tokens(groups.shapes, 16) == 16
    assert groups.block_sizes(16) == (16, 32)


def test_group_layers_bytes_of_a_token_that_do_not_divide_meet_at_a_common_multiple() -> None:
    assert page_tokens([EIGHT, SIX], 16) == 18
    assert group_layers([0, 8], shapes=[EIGHT, SIX]).block_sizes(18) == (18, 24)
    assert page_tokens([KvShape(3, 128), KvShape(2, 128)], 16) == 16
    assert group_layers([0, 8], shapes=[KvShape(2, 128), KvShape(3, 128)]).block_sizes(16) == (24, 16)


def test_group_layers_of_one_kind_and_unequal_shapes_are_apart_the_larger_first() -> None:
    groups = group_layers([0, 0, 0, 20, STATE], shapes=[FOUR, EIGHT, FOUR, FOUR, KvShape(0, 0)])
    assert groups.windows == (0, 0, 0, 20, STATE)
    assert groups.shapes == (EIGHT, FOUR, FOUR, FOUR, KvShape(0, 0))
    assert groups.group_of == (1, 0, 2, 3, 4)
    assert groups.block_sizes(64) == (64, 128, 128, 128, 64)


def test_group_layers_of_equal_bytes_and_other_heads_are_apart_in_blocks_of_one_size() -> None:
    """Gemma 4 with half as many heads, twice as large, in its full layers."""
    groups = group_layers([0, 512], shapes=[KvShape(2, 512), KvShape(4, 256)])
    assert groups.shapes == (KvShape(2, 512), KvShape(4, 256))
    assert (page_tokens(groups.shapes, 16), groups.block_sizes(16)) == (16, (16, 16))


def test_group_layers_that_are_all_alike_have_no_shapes_of_their_own() -> None:
    groups = group_layers([0, 20, STATE], shapes=[EIGHT, EIGHT, KvShape(0, 0)])
    assert groups == group_layers([0, 20, STATE])
    assert groups.block_sizes(48) == (48, 48, 48)
    assert page_tokens([EIGHT, KvShape(0, 0)], 48) == 48


def test_group_layers_that_read_anothers_are_of_its_shape() -> None:
    groups = group_layers([20, 0, 20, 0], [0, 1, 0, 1], [FOUR, EIGHT, FOUR, EIGHT])
    assert (groups.group_of, groups.shapes) == ((1, 0, 1, 0), (EIGHT, FOUR))


def test_page_tokens_of_pages_that_cannot_be_made_equal_are_refused() -> None:
    primes = [KvShape(1, 1021), KvShape(1, 1019)]
    assert page_tokens(primes, 16) == 1019
    with pytest.raises(
        BackendError, match=r"at most 4096 tokens in a block, got 1019, 1021 .* which takes 5105"
    ) as caught:
        page_tokens(primes, 4090)
    assert caught.value.reason == "MODEL_NOT_SUPPORTED"


def test_layer_windows_and_sources_of_gemma_4_are_those_of_its_configuration() -> None:
    config = tiny_config("gemma4")
    assert layer_windows(config) == [20, 20, 0, 20, 0, 20, 0]
    assert layer_sources(config) == [0, 1, 2, 3, 4, 3, 4]


@pytest.mark.parametrize(("kind", "value"), [("gemma3", True), ("gemma4", "all")])
def test_layer_windows_of_a_model_that_reads_what_follows_are_refused(kind: str, value: object) -> None:
    with pytest.raises(BackendError, match=f"got use_bidirectional_attention={value} in {kind}_text") as caught:
        layer_windows(tiny_config(kind, use_bidirectional_attention=value))
    assert caught.value.reason == "MODEL_NOT_SUPPORTED"
    assert layer_windows(tiny_config("gemma4", use_bidirectional_attention="vision"))[:3] == [20, 20, 0]


def test_layer_sources_of_a_model_without_kv_of_its_own_are_refused() -> None:
    config = tiny_config("gemma4")
    config.num_kv_shared_layers = 7
    with pytest.raises(BackendError, match="got num_kv_shared_layers=7 of 7 in gemma4_text") as caught:
        layer_sources(config)
    assert caught.value.reason == "MODEL_NOT_SUPPORTED"


@pytest.mark.parametrize("window", [1, 2, 16, 17, 100, STATE, chunks_of(2), chunks_of(16), chunks_of(50)])
@pytest.mark.parametrize("chunk", [1, 16, 50])
def test_most_blocks_of_a_group_are_those_that_the_manager_reckons_with(window: int, chunk: int) -> None:
    """The executor promises that the longest sequence fits; the manager decides by the same number."""
    spec = KvGroupSpec(1, 1, 1, 1, window)
    group = kv_group(16, window)
    for num_tokens in (1, 16, 17, 60, 300):
        assert spec.most_blocks(num_tokens, 16, chunk) == group.most_blocks(num_tokens, chunk)


def test_layer_windows_of_a_model_with_parts_are_those_of_its_decoder() -> None:
    class Whole(PreTrainedConfig):
        def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None) -> PreTrainedConfig:
            return MistralConfig(num_hidden_layers=1, sliding_window=9)

    assert layer_windows(Whole()) == [9]
