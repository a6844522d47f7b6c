"""From layers to groups, on the shapes of real models."""

import pytest

from kvmanager_service.core.errors import GroupLayoutError
from kvmanager_service.core.group_layout import AttentionKind, LayerSpec, plan_groups
from kvmanager_service.core.kv_groups import ChunkedLocal, FullAttention, RecurrentState, SlidingWindow


def full(name: str, heads: int = 8, **values: object) -> LayerSpec:
    return LayerSpec(name, num_kv_heads=heads, head_dim=128, **values)  # type: ignore[arg-type]


def sliding(name: str, heads: int = 8, window: int = 1024, **values: object) -> LayerSpec:
    kind = AttentionKind.SLIDING_WINDOW
    return LayerSpec(name, kind, num_kv_heads=heads, head_dim=128, span=window, **values)  # type: ignore[arg-type]


def state(name: str, size: int) -> LayerSpec:
    return LayerSpec(name, AttentionKind.RECURRENT_STATE, state_bytes=size)


def test_plan_layers_that_are_alike_are_one_group_of_the_size_asked_for() -> None:
    layout = plan_groups([full(f"l{index}") for index in range(32)], block_size=16)
    (group,) = layout.groups
    assert (group.kind, group.block_size, len(group.layers)) == (AttentionKind.FULL, 16, 32)
    assert layout.block_bytes == 32 * 16 * 2 * 8 * 128 * 2
    assert layout.padding_bytes == 0


def test_plan_gemma_3_1b_is_one_full_group_and_six_sliding_that_leave_two_pages_unused() -> None:
    layers = [
        LayerSpec(f"l{index}", num_kv_heads=1, head_dim=256)
        if index % 6 == 5
        else LayerSpec(f"l{index}", AttentionKind.SLIDING_WINDOW, num_kv_heads=1, head_dim=256, span=512)
        for index in range(26)
    ]
    layout = plan_groups(layers, block_size=16)
    assert [len(group.layers) for group in layout.groups] == [4, 4, 4, 4, 4, 4, 2]
    assert layout.groups[0].layers == ("l5", "l11", "l17", "l23")
    assert (layout.page_bytes, layout.block_bytes) == (16 * 1024, 4 * 16 * 1024)
    assert layout.padding_bytes == 2 * 16 * 1024
    groups = [group.make_group() for group in layout.groups]
    assert isinstance(groups[0], FullAttention)
    assert all(isinstance(group, SlidingWindow) and group.window == 512 for group in groups[1:])


def test_plan_nearly_equal_counts_leave_one_page_unused_and_not_a_whole_group() -> None:
    layout = plan_groups([full(f"f{index}") for index in range(25)] + [sliding(f"s{index}") for index in range(24)])
    assert [len(group.layers) for group in layout.groups] == [25, 24]
    assert layout.padding_bytes == layout.page_bytes


def test_plan_fewer_bytes_per_token_get_more_tokens_per_block() -> None:
    layers = [full(f"f{index}", 8) for index in range(4)] + [sliding(f"s{index}", 4) for index in range(4)]
    layout = plan_groups(layers, block_size=16)
    assert [(group.kind, group.block_size) for group in layout.groups] == [
        (AttentionKind.FULL, 16),
        (AttentionKind.SLIDING_WINDOW, 32),
    ]
    assert layout.page_bytes == 16 * 4096 == 32 * 2048
    assert layout.padding_bytes == 0


def test_plan_bytes_per_token_that_do_not_divide_meet_at_a_common_multiple() -> None:
    layout = plan_groups([full("f", 3), sliding("s", 2)], block_size=16)
    assert [group.block_size for group in layout.groups] == [16, 24]
    assert layout.page_bytes == 16 * 3 * 512 == 24 * 2 * 512


def test_plan_pages_that_cannot_be_made_equal_raise_and_say_what_would_help() -> None:
    layers = [LayerSpec("a", num_kv_heads=1, head_dim=1021), LayerSpec("b", num_kv_heads=1, head_dim=1019)]
    with pytest.raises(GroupLayoutError, match=r"at most 1024 tokens per block, got 2042 .* max_block_size to 2042"):
        plan_groups(layers, block_size=1022)
    assert plan_groups(layers, block_size=16).page_bytes == 1021 * 1019 * 4


def test_plan_state_smaller_than_the_page_is_padded() -> None:
    layout = plan_groups([full("f"), state("m", 60_000)], block_size=16, checkpoint_interval=100)
    attention, mamba = layout.groups
    assert layout.page_bytes == 65_536
    assert (attention.page_padding_bytes, mamba.page_padding_bytes) == (0, 5_536)
    assert layout.padding_bytes == 5_536
    assert (attention.block_size, mamba.block_size) == (16, 112), "a checkpoint is where a block of attention ends"


def test_plan_state_larger_than_the_page_makes_attention_blocks_longer() -> None:
    layers = [full(f"f{index}") for index in range(4)] + [state(f"m{index}", 300_000) for index in range(28)]
    layout = plan_groups(layers, block_size=16)
    assert layout.page_bytes == 74 * 4096
    assert [(len(group.layers), group.block_size) for group in layout.groups] == [(4, 74)] + [(4, 518)] * 7
    assert layout.padding_bytes == 28 * (74 * 4096 - 300_000)
    assert isinstance(layout.groups[1].make_group(), RecurrentState)


def test_plan_state_too_large_raises_and_says_what_would_help() -> None:
    with pytest.raises(GroupLayoutError, match=r"got 2442 tokens .* for a state of 10000000 bytes; raise max_block"):
        plan_groups([full("f"), state("m", 10_000_000)])


def test_plan_states_alone_need_no_tokens_to_be_equal() -> None:
    layout = plan_groups([state("a", 1000), state("b", 900)], checkpoint_interval=256)
    assert layout.page_bytes == 1000
    assert [(group.block_size, group.page_padding_bytes) for group in layout.groups] == [(256, 0), (256, 100)]


def test_plan_chunked_local_keeps_its_chunk() -> None:
    layer = LayerSpec("c", AttentionKind.CHUNKED_LOCAL, num_kv_heads=1, head_dim=64, span=8192)
    group = plan_groups([layer]).groups[0].make_group()
    assert isinstance(group, ChunkedLocal)
    assert group.chunk == 8192


def test_plan_layer_that_shares_takes_no_page_and_reads_the_owners() -> None:
    layers = [full("a"), sliding("b"), full("c", shares_with="a"), sliding("d", shares_with="b"), full("e")]
    layers.append(full("f", shares_with="c"))
    layout = plan_groups(layers)
    by_layer = {name: group for group in layout.groups for name in group.layers}
    assert sorted(by_layer) == ["a", "b", "e"]
    assert by_layer["a"].readers == (("c", "a"), ("f", "a"))
    assert by_layer["b"].readers == (("d", "b"),)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], "at least one layer"),
        ([full("a"), full("a")], "a name of its own, got 'a' twice"),
        ([full("a", shares_with="b"), full("b")], "share with an earlier layer, got 'b'"),
        ([full("a", shares_with="a")], "share with an earlier layer, got 'a'"),
        ([full("a"), sliding("b", shares_with="a")], "to be like 'a', whose cache it reads"),
        ([full("a"), full("b", 4, shares_with="a")], "to be like 'a', whose cache it reads"),
        ([state("a", 0)], "'a' to have state_bytes only"),
        ([full("a", state_bytes=5)], "'a' to have KV heads only"),
        ([full("a", span=5)], "span of a sliding window or a local chunk, and of no other"),
        ([sliding("a", window=0)], "span of a sliding window or a local chunk, and of no other"),
    ],
)
def test_plan_layer_that_contradicts_itself_or_another_raises(layers: list[LayerSpec], message: str) -> None:
    with pytest.raises(GroupLayoutError, match=message):
        plan_groups(layers)


@pytest.mark.parametrize("values", [{"block_size": 0}, {"checkpoint_interval": 0}])
def test_plan_size_out_of_range_raises(values: dict[str, int]) -> None:
    with pytest.raises(GroupLayoutError, match="of at least 1 token"):
        plan_groups([full("a")], **values)
