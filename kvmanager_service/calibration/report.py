"""What a calibration shows and writes.

Station: called by `command`. The document is what `--json` prints and `--output` writes; `replay.cost_model` and
`replay.kv_geometry` read it.
"""

from __future__ import annotations

from typing import Any

from kvplane.executor.v1 import executor_service_pb2 as pb
from rich.table import Table

from kvmanager_service.calibration.fit import Measured, relative_error
from kvmanager_service.calibration.measurement import Measurement
from kvmanager_service.replay.cost_model import TERMS, CostModel

__all__ = ["describe", "steps_table", "summarise"]


def summarise(found: Measurement, model: CostModel, settings: dict[str, Any]) -> dict[str, Any]:
    """The document. Times are microseconds; an error is a share of the measured time."""
    errors = [abs(relative_error(model, step)) for step in found.steps]
    info = found.info
    return {
        "cost_model": {name: getattr(model, name) for name in TERMS},
        "fit": {"mean_error": sum(errors) / len(errors), "worst_error": max(errors)},
        "executor": {
            "model_name": info.model_name,
            "backend": info.backend,
            "device": info.device,
            "dtype": info.dtype,
            "kv_cache_dtype": info.kv_cache_dtype,
            "block_size": info.block_size,
        },
        "kv_cache": {
            "num_blocks": found.num_blocks,
            "block_size": info.block_size,
            "groups": [_group(group) for group in info.kv_groups],
        },
        "settings": settings,
        "steps": [_step(step, model) for step in found.steps],
    }


def _group(group: pb.KvGroup) -> dict[str, Any]:
    kind = pb.KvGroupType.Name(group.type).removeprefix("KV_GROUP_TYPE_").lower()
    sizes = {
        pb.KV_GROUP_TYPE_SLIDING_WINDOW: {"window": group.window},
        pb.KV_GROUP_TYPE_CHUNKED_LOCAL: {"chunk": group.chunk},
    }
    own = {"block_size": group.block_size} if group.block_size else {}
    return {"type": kind, **sizes.get(group.type, {}), **own, "num_layers": group.num_layers}


def _step(step: Measured, model: CostModel) -> dict[str, Any]:
    _, prefill_tokens, decode_rows, context, pairs = step.counts
    return {
        "step": step.name,
        "prefill_tokens": prefill_tokens,
        "decode_rows": decode_rows,
        "context_tokens": round(context, 1),
        "attention_pairs": round(pairs, 1),
        "measured_us": step.microseconds,
        "model_us": round(model.microseconds(step.counts), 1),
    }


def steps_table(document: dict[str, Any]) -> Table:
    """Every step, measured and as the model has it."""
    shown = Table(box=None, padding=(0, 2, 0, 0))
    shown.add_column("step")
    for name in ("measured", "model", "error"):
        shown.add_column(name, justify="right")
    for step in document["steps"]:
        measured, model = step["measured_us"], step["model_us"]
        times = (f"{value / 1000:,.2f} ms" for value in (measured, model))
        shown.add_row(step["step"], *times, f"{model / measured - 1:+.1%}")
    return shown


def describe(document: dict[str, Any]) -> str:
    """The terms as flags of a replay, and how well they fit."""
    executor, fit = document["executor"], document["fit"]
    flags = " ".join(f"--{name.replace('_', '-')} {value:g}" for name, value in document["cost_model"].items())
    return (
        f"{executor['model_name']}: {executor['backend']} on {executor['device']}, {executor['dtype']}\n"
        f"{flags}\n"
        f"error: mean {fit['mean_error']:.1%}, worst {fit['worst_error']:.1%}"
    )
