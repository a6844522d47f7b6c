"""Finds a backend by name and builds it from the executor's configuration.

Station: called by `server`. A backend is a class registered under the entry-point group `kvplane.backends`, whose
constructor takes one dataclass; the dataclass's fields that are named like fields of `ExecutorConfig` get its values,
others keep their defaults. Where it has no `kv_cache_dtype`, any but auto is refused, and without
`max_loras` any but 0. Nothing is imported but the
backend asked for: `sim` runs without torch. A class that is not registered, as one that is being written, is named by
its place: "module:class".
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import typing
from importlib.metadata import entry_points

from executor_service.backends.base import Backend, BackendError, SettingError
from executor_service.config import ExecutorConfig

__all__ = ["ENTRY_POINT_GROUP", "create_backend", "known_backends"]

ENTRY_POINT_GROUP = "kvplane.backends"

# The same as in pyproject.toml, for a source tree whose distribution is not installed.
_BUILT_IN = {
    "torch": "executor_service.backends.torch_backend:TorchBackend",
    "triton": "executor_service.backends.triton_backend:TritonBackend",
    "sim": "executor_service.backends.sim_backend:SimBackend",
}


def known_backends() -> dict[str, str]:
    """Return where each backend's class is, as "module:class", by name."""
    return _BUILT_IN | {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}


def create_backend(config: ExecutorConfig) -> Backend:
    """Build the backend that the configuration names; it loads nothing yet.

    Raises:
        BackendError: no such backend, it cannot be imported, or it is not built as the module docstring says.
    """
    known = known_backends()
    place = known.get(config.backend, config.backend)
    if ":" not in place:
        message = f'backend: expected one of {sorted(known)}, or "module:class", got {config.backend!r}'
        raise SettingError("UNKNOWN_BACKEND", message, got=config.backend)
    module, _, name = place.partition(":")
    try:
        backend_class = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        message = f"backend {config.backend!r} cannot be imported: {error}; install what it needs"
        raise BackendError("BACKEND_NOT_INSTALLED", message, module=module) from error
    if config.tensor_parallel_size > 1:
        return _tensor_parallel(backend_class, config)
    backend = backend_class(_backend_config(backend_class, config))
    if not isinstance(backend, Backend):
        raise BackendError("NOT_A_BACKEND", f"{module}:{name}: expected a subclass of Backend, got {type(backend)}")
    return backend


def _tensor_parallel(backend_class: type, config: ExecutorConfig) -> Backend:
    """One backend of several processes, this one's among them.

    Raises:
        BackendError: backends of this class compute in one process, or a rank's cannot be built.
    """
    if not hasattr(backend_class, "join"):
        raise SettingError(
            "TENSOR_PARALLEL_NOT_SUPPORTED",
            f"backend {config.backend!r} computes in one process: expected --tensor-parallel-size 1, got"
            f" {config.tensor_parallel_size}; torch and triton have ranks",
            backend=config.backend,
        )
    # Only now: it imports torch.
    from executor_service.tensor_parallel import backend as tensor_parallel  # noqa: PLC0415

    return tensor_parallel.TensorParallelBackend.of(config)


def _backend_config(backend_class: type, config: ExecutorConfig) -> object:
    """Fill the dataclass that the backend's constructor takes."""
    hints = [taken.annotation for taken in inspect.signature(backend_class, eval_str=True).parameters.values()]
    if len(hints) != 1 or not dataclasses.is_dataclass(hints[0]):
        message = f"{backend_class.__qualname__}: expected a constructor that takes one dataclass, got {hints}"
        raise BackendError("NOT_A_BACKEND", message)
    names = {field.name for field in dataclasses.fields(hints[0])} & set(ExecutorConfig.model_fields)
    if config.kv_cache_dtype != "auto" and "kv_cache_dtype" not in names:
        # Silently left out, it would be believed in: the memory planned with it is half of what is needed.
        message = (
            f"backend {config.backend!r} has one type of its own for K/V: expected --kv-cache-dtype auto, got"
            f" {config.kv_cache_dtype!r}; leave it out, or use another backend"
        )
        raise SettingError("BAD_KV_CACHE_DTYPE", message, backend=config.backend, kv_cache_dtype=config.kv_cache_dtype)
    if config.max_loras and "max_loras" not in names:
        message = (
            f"backend {config.backend!r} runs no adapters: expected --max-loras 0, got {config.max_loras}; leave it"
            " out, or use another backend"
        )
        raise SettingError("BAD_MAX_LORAS", message, backend=config.backend, max_loras=config.max_loras)
    config_class = typing.cast("type[object]", hints[0])
    return config_class(**{name: getattr(config, name) for name in names})
