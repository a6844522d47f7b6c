"""What a config.json says of a decoder's layers: which attend within a window or chunks, and which have experts.

Station: called by ``capacity``. It knows JSON objects; no bytes and no blocks. The executor asks transformers' classes;
here there are none, so what those add to a file that leaves it out is in tables, of which tests hold every entry to
the classes. What is not understood is refused by its key: a number that is wrong unnoticed is worse than none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvplane_client.cli.values import MAX_INT32

__all__ = [
    "DEFAULTS",
    "UNGATED",
    "WINDOW_RULES",
    "Experts",
    "PlanError",
    "decoder_config",
    "dense_width",
    "kv_shapes",
    "layer_windows",
    "longest_sequence",
    "not_understood",
    "num_shared",
    "positive",
    "read_experts",
]

Config = Mapping[str, Any]

_FULL, _SLIDING, _CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
_LLAMA4, _JAMBA, _GRANITE4 = "llama4_text", "jamba", "granitemoehybrid"
_MOST_LAYERS = 10_000
_ONLY_STATES = ("mamba", "mamba2")

# Types of models some of whose layers keep a state that no executor here knows; of those it does, see `model_states`.
_WITH_OTHER_STATES = (
    "falcon_h1", "lfm2", "lfm2_moe", "minimax", "nemotron_h", "recurrent_gemma", "zamba", "zamba2",
)  # fmt: skip

# Keys of attention, or of weights, that are other than those of the Llama family.
_OTHER_DECODERS = (
    "H_cycles", "block_configs", "global_head_dim", "hidden_size_per_layer_input",
    "is_encoder_decoder", "keep_window_size", "kv_channels", "kv_lora_rank", "num_global_key_value_heads",
    "num_kv_shared_layers", "per_layer_config", "swa_head_dim", "swa_num_key_value_heads", "type_vocab_size",
    "use_bidirectional_attention",
)  # fmt: skip

_GEMMA3N, _GEMMA4 = "gemma3n_text", "gemma4_text"
# By model type, which of those are understood.
_DECODER_KEYS = {
    _GEMMA3N: ("hidden_size_per_layer_input", "num_kv_shared_layers"),
    _GEMMA4: (
        "global_head_dim", "hidden_size_per_layer_input", "num_global_key_value_heads", "num_kv_shared_layers",
        "per_layer_config",
    ),
}  # fmt: skip

_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
_SHARED_COUNTS = ("n_shared_experts", "num_shared_experts")
_SHARED_WIDTHS = ("shared_expert_intermediate_size", "shared_intermediate_size")
_UNDERSTOOD = {
    *_COUNTS, *_SHARED_COUNTS, *_SHARED_WIDTHS, "decoder_sparse_step", "first_k_dense_replace", "mlp_layer_types",
    "mlp_only_layers", "moe_intermediate_size", "moe_layer_freq",
}  # fmt: skip
# How tokens choose among experts, and how that is trained: no weights worth counting.
_ROUTING = {
    "experts_per_token", "num_experts_per_tok", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise",
    "router_z_loss_coef",
}  # fmt: skip
# Keys that mean other feed-forward networks in some of a mixture's layers, without a name that says so.
_OTHER_LAYERS = ("intermediate_size_mlp", "num_dense_layers")

_NONE_IF_NULL = ("sliding_window", "attention_chunk_size", "num_key_value_heads")
# By model type, more keys of a mixture. Layers without experts of a Llama 4 have a width of their own.
_KEYS_OF = {
    _LLAMA4: {"interleave_moe_layer_step", "intermediate_size_mlp", "moe_layers"},
    _JAMBA: {"expert_layer_period", "expert_layer_offset"},
}

_HYBRID: dict[str, Any] = {
    "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4, "mamba_expand": 2,
    "mamba_conv_bias": True, "mamba_proj_bias": False,
}  # fmt: skip

DEFAULTS: dict[str, dict[str, Any]] = {
    "bamba": {**_HYBRID, "num_key_value_heads": 8},
    "cohere": {"tie_word_embeddings": True},
    "cohere2": {"tie_word_embeddings": True, "sliding_window": 4096, "sliding_window_pattern": 4},
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {"tie_word_embeddings": True, "sliding_window": 4096},
    "gemma3_text": {
        "tie_word_embeddings": True, "sliding_window": 4096, "sliding_window_pattern": 6, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208, "max_position_embeddings": 131_072,
    },
    "gemma3n_text": {
        "tie_word_embeddings": True, "sliding_window": 512, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 256, "vocab_size": 262_400, "max_position_embeddings": 32_768, "hidden_size": 2048,
        "num_hidden_layers": 35, "num_kv_shared_layers": 15, "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144, "altup_num_inputs": 4, "laurel_rank": 64,
    },
    "gemma4_text": {
        "tie_word_embeddings": True, "sliding_window": 512, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256, "global_head_dim": 512, "vocab_size": 262_144, "max_position_embeddings": 131_072,
        "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30, "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
    },
    "gpt_oss": {"sliding_window": 128},
    "granitemoehybrid": {**_HYBRID, "num_local_experts": 8, "shared_intermediate_size": 1024},
    "jamba": {
        "num_key_value_heads": 8, "num_experts": 16, "expert_layer_period": 2, "expert_layer_offset": 1,
        "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2,
        "mamba_conv_bias": True, "mamba_proj_bias": False,
    },
    "llama4_text": {
        "attention_chunk_size": 8192, "no_rope_layer_interval": 4, "interleave_moe_layer_step": 1,
        "num_local_experts": 16, "intermediate_size": 8192, "intermediate_size_mlp": 16384, "hidden_size": 5120,
        "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 202_048, "max_position_embeddings": 131_072,
    },
    "mamba": {
        "tie_word_embeddings": True, "state_size": 16, "conv_kernel": 4, "expand": 2, "use_bias": False,
        "use_conv_bias": True,
    },
    "mamba2": {
        "num_heads": 128, "head_dim": 64, "n_groups": 8, "state_size": 128, "conv_kernel": 4, "expand": 2,
        "use_bias": False, "use_conv_bias": True,
    },
    "mistral": {"sliding_window": 4096},
    "olmo3": {"sliding_window": 4096},
    "qwen2": {"use_sliding_window": False, "max_window_layers": 28},
    "qwen2_moe": {"use_sliding_window": False, "max_window_layers": 28},
    "qwen3": {"use_sliding_window": False, "max_window_layers": 28},
    "qwen3_moe": {"use_sliding_window": False},
    "qwen3_next": {
        "num_key_value_heads": 2, "head_dim": 256, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "num_experts": 512,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "decoder_sparse_step": 1,
    },
    "smollm3": {"tie_word_embeddings": True, "use_sliding_window": False},
    "starcoder2": {"tie_word_embeddings": True},
}  # fmt: skip
"""By model type: what a published config.json may leave out, because transformers' class knows it."""

UNGATED = (
    "apertus", "apertus1p5_text", "arcee", "biogpt", "gpt_neox", "jais2", "nanochat", "nemotron", "persimmon", "phi",
    "starcoder2",
)  # fmt: skip
"""Model types whose feed-forward network has two matrices; others have a third, the gate."""

WINDOW_RULES: dict[str, Callable[[int, Config], bool]] = {
    **dict.fromkeys(("mistral", "mixtral", "phi3", "phimoe", "qwen3_moe", "starcoder2"), lambda layer, config: True),
    **dict.fromkeys(("gemma2", "gpt_oss"), lambda layer, config: layer % 2 == 0),
    **dict.fromkeys(
        ("cohere2", "gemma3_text"), lambda layer, config: (layer + 1) % config["sliding_window_pattern"] != 0
    ),
    "gemma3n_text": lambda layer, config: (layer + 1) % 5 != 0,
    "gemma4_text": lambda layer, config: (layer + 1) % 6 != 0 and layer + 1 != config["num_hidden_layers"],
    "olmo3": lambda layer, config: (layer + 1) % 4 != 0,
    **dict.fromkeys(("qwen2", "qwen3"), lambda layer, config: bool(layer >= config["max_window_layers"])),
    "qwen2_moe": lambda layer, config: layer % 2 == 0 and bool(layer < config["max_window_layers"]),
}
"""By model type: whether a layer, from 0, slides in a model with a window whose config.json has no layer_types."""


class PlanError(Exception):
    """The model or the memory can not be planned with. The message says expected, got and what to do."""


@dataclass(frozen=True, slots=True)
class Experts:
    """The layers that have experts in place of one feed-forward network.

    Attributes:
        num_layers: How many layers have them.
        num_experts: Experts of such a layer, of which a token runs through a few; all of them take memory.
        intermediate_size: Width of an expert.
        shared_size: Width of what every token runs through beside them, 0 where there is none.
        is_shared_gated: Whether a gate says how much of that.
    """

    num_layers: int
    num_experts: int
    intermediate_size: int
    shared_size: int = 0
    is_shared_gated: bool = False


def decoder_config(config: Config, where: str) -> tuple[dict[str, Any], str]:
    """Finds what describes the decoder, with what its class knows beside.

    Args:
        config: The JSON object. One of a model of several parts has the decoder's under ``text_config``.
        where: What errors call it.

    Returns:
        The decoder's values, and what errors are to call them.

    Raises:
        PlanError: It has layers that keep what is not known, or whose K and V are of other sizes.
    """
    text: Config = config
    kind = config.get("model_type")
    if isinstance(config.get("text_config"), dict):
        where = f"{where}, text_config"
        text = {"tie_word_embeddings": config.get("tie_word_embeddings"), **config["text_config"]}
        kind = text.get("model_type") or (kind and f"{kind}_text")
    known = DEFAULTS.get(str(kind), {})
    # A window or chunk that is null is none, and K's heads are Q's; of other keys it is as if they were left out.
    said = {key: value for key, value in text.items() if value is not None or key in _NONE_IF_NULL}
    values = {**known, **said}
    values["model_type"] = kind
    if kind in _WITH_OTHER_STATES:
        raise PlanError(
            f"{where}: expected K and V, or a state of a known size, in every layer, got model_type {kind!r}, of which"
            " layers keep another; no executor here runs it"
        )
    for key in _OTHER_DECODERS:
        is_known = key in _DECODER_KEYS.get(str(kind), ())
        # Of images alone, which no prompt of tokens has.
        is_known = is_known or (
            kind == _GEMMA4 and key == "use_bidirectional_attention" and values.get(key) == "vision"
        )
        if values.get(key) and not is_known:
            raise not_understood(where, key, values[key], "a decoder with equal K and V and no more in every layer")
    return values, where


def positive(config: Config, key: str, where: str, default: int | None = None) -> int:
    """Returns a positive integer of a configuration. Raises PlanError for anything else."""
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{where}: expected {key} to be a positive integer, got {value!r}; name a decoder's")
    most = _MOST_LAYERS if key == "num_hidden_layers" else MAX_INT32
    if value > most:
        raise PlanError(f"{where}: expected {key} to be at most {most}, got {value}; name a decoder's")
    return value


def longest_sequence(config: Config, where: str) -> int | None:
    """Tokens of the longest sequence, as the executor has it: of longrope, those before its factors change.

    Returns:
        None where there is no such length: a model that keeps states alone, and says nothing.

    Raises:
        PlanError: It is missing, or no positive integer.
    """
    if config["model_type"] in _ONLY_STATES and config.get("max_position_embeddings") is None:
        return None
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if isinstance(rope, dict) and "longrope" in (rope.get("rope_type"), rope.get("type")):
        for values in (rope, config):
            if values.get("original_max_position_embeddings") is not None:
                return positive(values, "original_max_position_embeddings", where)
    return positive(config, "max_position_embeddings", where)


def layer_windows(config: Config, where: str) -> tuple[int, ...]:
    """Tokens that a token reads in each layer, itself included; 0 for full attention, the size of chunks negated.

    Args:
        config: Of ``decoder_config``.
        where: What errors call it.

    Raises:
        PlanError: A layer is of another kind, or nothing says which ones slide or are cut into chunks.
    """
    num_layers = positive(config, "num_hidden_layers", where)
    window = 0
    if config.get("sliding_window") and config.get("use_sliding_window", True):
        window = positive(config, "sliding_window", where)
    chunk = positive(config, "attention_chunk_size", where) if config.get("attention_chunk_size") else 0
    if chunk == 1:
        raise not_understood(where, "attention_chunk_size", chunk, "chunks of at least 2 tokens")
    types = config.get("layer_types")
    if types is not None:
        known = {_FULL, _SLIDING, _CHUNKED} if config["model_type"] == _LLAMA4 else {_FULL, _SLIDING}
        if not isinstance(types, list) or len(types) != num_layers or not set(types) <= known:
            raise not_understood(where, "layer_types", types, f"{num_layers} of {_FULL} or {_SLIDING}")
        if _SLIDING in types and not window:
            raise not_understood(where, "sliding_window", config.get("sliding_window"), f"a window of {_SLIDING}")
        if config["model_type"] == _GEMMA4:
            types = [*types[:-1], _FULL]  # whatever it says
        if _CHUNKED in types and not chunk:
            raise not_understood(where, "attention_chunk_size", chunk, f"chunks of {_CHUNKED}")
        return tuple({_FULL: 0, _SLIDING: window, _CHUNKED: -chunk}[kind] for kind in types)
    if chunk:
        return _chunks(config, num_layers, chunk, where)
    if not window:
        return (0,) * num_layers
    rule = WINDOW_RULES.get(str(config["model_type"]))
    if rule is None:
        raise PlanError(
            f"{where}: expected layer_types to say which layers have the sliding_window of {window}, got none for "
            f"model_type {config['model_type']!r}; add it, or start its executor, which measures"
        )
    for key in ("sliding_window_pattern", "max_window_layers"):
        if key in config:
            positive(config, key, where)
    return tuple(window if rule(layer, config) else 0 for layer in range(num_layers))


def _chunks(config: Config, num_layers: int, chunk: int, where: str) -> tuple[int, ...]:
    """Which layers of a Llama 4 are cut into chunks: those with rotary positions."""
    if config["model_type"] != _LLAMA4:
        raise not_understood(where, "attention_chunk_size", chunk, f"chunks in a {_LLAMA4} alone, or layer_types")
    rotary = config.get("no_rope_layers")  # of its name it says the contrary: 1 is with
    if not rotary:
        every = positive(config, "no_rope_layer_interval", where)
        rotary = [int((layer + 1) % every != 0) for layer in range(num_layers)]
    if not isinstance(rotary, list) or len(rotary) < num_layers:
        raise not_understood(where, "no_rope_layers", rotary, f"{num_layers} of 0 or 1")
    return tuple(-chunk if is_rotary else 0 for is_rotary in rotary[:num_layers])


def kv_shapes(config: Config, windows: Sequence[int], where: str) -> tuple[tuple[int, int], ...]:
    """K/V heads of each layer, and their width; empty where they are the same in all.

    Args:
        config: Of ``decoder_config``.
        windows: Of ``layer_windows``.
        where: What errors call it.

    Raises:
        PlanError: Some layer's are no positive integers.
    """
    if config["model_type"] != _GEMMA4:
        return ()
    names = ("num_key_value_heads", "head_dim")
    own = config.get("per_layer_config")  # as transformers writes it; as it was published, full layers have others
    if own is None:
        changed = {"head_dim": config["global_head_dim"]}
        if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
            changed["num_key_value_heads"] = config["num_global_key_value_heads"]
        own = {str(layer): changed for layer, window in enumerate(windows) if not window}
    if not isinstance(own, dict) or not all(
        str(layer).isdecimal() and isinstance(of, dict) and set(of) <= {*names} for layer, of in own.items()
    ):
        raise not_understood(where, "per_layer_config", own, f"by layer no more than {' and '.join(names)}")
    of_layers = {int(layer): of for layer, of in own.items()}  # "05" of twelve
    shapes = []
    for layer in range(len(windows)):
        heads, width = (positive({**config, **of_layers.get(layer, {})}, name, where) for name in names)
        shapes.append((heads, width))
    return tuple(shapes) if len(set(shapes)) > 1 else ()


def num_shared(config: Config, windows: Sequence[int], where: str) -> int:
    """How many layers, the last ones, read the K/V of the last one before them with a window like theirs.

    Raises:
        PlanError: There are as many as layers, or no layer before them has such a window.
    """
    if config["model_type"] not in (_GEMMA3N, _GEMMA4) or not config.get("num_kv_shared_layers"):
        return 0
    shared = positive(config, "num_kv_shared_layers", where)
    if set(windows[:-shared]) != set(windows):
        raise not_understood(
            where, "num_kv_shared_layers", shared, f"for each kind of the {len(windows)} layers one that has K and V"
        )
    return shared


def dense_width(config: Config, where: str) -> int:
    """Width of the feed-forward network in layers without experts; 0 where such layers have none.

    Raises:
        PlanError: It is missing, no positive integer, or not the same in all layers.
    """
    if config["model_type"] in _ONLY_STATES:
        return 0
    keys = {_LLAMA4: "intermediate_size_mlp", _GRANITE4: "shared_intermediate_size"}
    key = keys.get(str(config["model_type"]), "intermediate_size")
    widths = config.get(key, 16_384) if config["model_type"] == _GEMMA3N else None
    if isinstance(widths, list):  # one for each layer
        if len(widths) != positive(config, "num_hidden_layers", where) or len(set(map(repr, widths))) != 1:
            raise not_understood(where, key, widths, "one width in all layers")
        widths = widths[0]
    return positive(config if widths is None else {key: widths}, key, where)


def read_experts(config: Config, where: str) -> Experts | None:
    """Which layers have experts and how many; None where none has.

    Args:
        config: Of ``decoder_config``.
        where: What errors call it.

    Raises:
        PlanError: A key of a mixture of experts is not understood, or has no value that it can have.
    """
    if config["model_type"] == _GEMMA4:
        return _beside_networks(config, where)
    is_llama4 = config["model_type"] == _LLAMA4
    understood = _UNDERSTOOD | _ROUTING | _KEYS_OF.get(str(config["model_type"]), set())
    for key, value in config.items():
        is_mixtures = "expert" in key or "moe" in key.split("_") or key.startswith("router_")
        if value and is_mixtures and key not in understood:
            raise not_understood(where, key, value, f"experts that {', '.join(sorted(_UNDERSTOOD))} describe")
    counts = {key: positive(config, key, where) for key in _COUNTS if config.get(key)}
    if not counts:
        return None
    if config["model_type"] == _JAMBA and set(counts.values()) == {1}:
        return None  # one that all tokens take
    if len(set(counts.values())) > 1:
        raise PlanError(f"{where}: expected one number of experts, got {counts}; keep the one that is meant")
    for key in _OTHER_LAYERS:
        if config.get(key) and key not in understood:
            raise not_understood(where, key, config[key], "experts and one size of layers without any")
    width = positive(config, "moe_intermediate_size", where, positive(config, "intermediate_size", where))
    shared = sum(positive(config, key, where) for key in _SHARED_WIDTHS if config.get(key))
    shared += sum(positive(config, key, where) for key in _SHARED_COUNTS if config.get(key)) * width
    shared += width if is_llama4 else 0
    num_layers = _num_sparse_layers(config, where)
    if not num_layers:
        return None
    is_gated = bool(config.get("shared_expert_intermediate_size"))
    return Experts(num_layers, next(iter(counts.values())), width, shared, is_gated)


def _beside_networks(config: Config, where: str) -> Experts | None:
    """Those of a Gemma 4: in each layer beside its network, which counts as one that every token runs through."""
    if not config.get("enable_moe_block"):
        return None
    num_layers, count = positive(config, "num_hidden_layers", where), positive(config, "num_experts", where)
    width = positive(config, "moe_intermediate_size", where)
    return Experts(num_layers, count, width, shared_size=positive(config, "intermediate_size", where))


def _num_sparse_layers(config: Config, where: str) -> int:
    """How many layers have experts. A condition whose key is missing holds for every layer."""
    num_layers = positive(config, "num_hidden_layers", where)
    if config["model_type"] == _LLAMA4:
        step = positive(config, "interleave_moe_layer_step", where)
        chosen = config.get("moe_layers") or range(step - 1, num_layers, step)
        return sum(layer in chosen for layer in range(num_layers))
    if config["model_type"] == _JAMBA:
        period, offset = positive(config, "expert_layer_period", where), config.get("expert_layer_offset")
        if type(offset) is not int or not 0 <= offset < period:
            raise not_understood(where, "expert_layer_offset", offset, f"an offset below the period of {period}")
        return len(range(offset, num_layers, period))
    types = config.get("mlp_layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != num_layers or not set(types) <= {"dense", "sparse"}:
            raise not_understood(where, "mlp_layer_types", types, f"{num_layers} of dense or sparse")
        return types.count("sparse")
    dense = config.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise not_understood(where, "mlp_only_layers", dense, "a list of layers")
    first = config.get("first_k_dense_replace", 0)
    if type(first) is not int or first < 0:
        raise not_understood(where, "first_k_dense_replace", first, "a number of layers")
    step = positive(config, "decoder_sparse_step", where, 1)
    every = positive(config, "moe_layer_freq", where, 1)
    return sum(
        layer not in dense and layer >= first and (layer + 1) % step == 0 and layer % every == 0
        for layer in range(num_layers)
    )


def not_understood(where: str, key: str, value: object, expected: str) -> PlanError:
    """The error of a key whose value is none that is known."""
    shown = repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return PlanError(f"{where}: expected {expected}, got {key} {shown}; start its executor, which measures")
