"""Which LoRA adapters an executor has loaded, and what steps call them.

Station: held by `kv_session`; called by `servicer` and, for whether a step's adapters are there, by `step_runner`.
Calls the backend, which holds the weights. Knows no gRPC.

Adapters are no part of the cache: they outlive its epochs, and a step names them by an id that no other adapter has in
this run, so that a step that comes late finds its adapter or none.
"""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from executor_service.backends.base import AdapterContent, Backend, Int32
from executor_service.errors import (
    AdapterExistsError,
    AdapterLimitError,
    FailedPreconditionError,
    InvalidFieldError,
    RefusedAdapterError,
    UnknownAdapterError,
)

__all__ = ["LoadedAdapter", "LoadedAdapters"]

MAX_NAME_CHARS = 256
MAX_SOURCE_CHARS = 4096

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """One adapter; `LoraAdapter` on the wire. Units: size_bytes in bytes."""

    name: str
    revision: str
    source: str
    adapter_id: int
    rank: int
    size_bytes: int


class LoadedAdapters:
    """The adapters of one executor.

    Args:
        backend: what computes.

    Attributes:
        max_adapters: most at once; 0 until the model is loaded, and where the backend has no room for any.

    Ownership:
        `load`, `unload` and `list` are the compute thread's. `_ids` is replaced whole, so that the event loop may look.
    """

    def __init__(self, backend: Backend) -> None:
        self.max_adapters = 0
        self._backend = backend
        self._by_name: dict[str, LoadedAdapter] = {}
        self._ids: frozenset[int] = frozenset((0,))
        self._next_id = 1

    def check_request(self, name: str, source: str, revision: str) -> None:
        """Check what needs no files.

        Raises:
            InvalidFieldError: a field is too short or too long.
            FailedPreconditionError: there is room for no adapter.
            AdapterLimitError: there is room for no more.
        """
        for field, value, least, most in (
            ("name", name, 1, MAX_NAME_CHARS),
            ("source", source, 1, MAX_SOURCE_CHARS),
            ("revision", revision, 0, MAX_NAME_CHARS),
        ):
            if not least <= len(value) <= most:
                raise InvalidFieldError(field, f"{least} to {most} characters", f"{len(value)} characters")
        if not self.max_adapters:
            raise FailedPreconditionError(
                "NO_ADAPTERS",
                "expected an executor with room for LoRA adapters, got one without; start it with --max-loras 4, or as"
                " many as are to be loaded at once",
            )
        self._require_room(name)

    def read(self, source: str) -> AdapterContent:
        """Read an adapter; any thread may. Raises AdapterError."""
        return self._backend.read_adapter(source)

    def load(self, name: str, source: str, revision: str, content: AdapterContent) -> LoadedAdapter:
        """Have steps name what was read; a name that is loaded with the same content keeps its id.

        Raises:
            RefusedAdapterError: the content is not of the revision asked for.
            AdapterExistsError: the name is loaded with other content.
            AdapterLimitError: there is room for no more.
        """
        if revision not in ("", content.revision):
            raise RefusedAdapterError(
                "ADAPTER_REVISION_MISMATCH",
                f"revision: expected {revision}, as adapter {name!r} was loaded before, got {content.revision} at"
                f" {source!r}; bring the earlier files back, or unload it and load it anew",
                expected=revision,
                got=content.revision,
                source=source,
            )
        known = self._by_name.get(name)
        if known is not None:
            if known.revision == content.revision:
                return known
            raise AdapterExistsError(
                "ADAPTER_EXISTS",
                f"name: expected one that is not loaded, or the content that is loaded as {name!r}, {known.revision},"
                f" got {content.revision}; unload it first",
                name=name,
                revision=known.revision,
            )
        self._require_room(name)
        loaded = LoadedAdapter(name, content.revision, source, self._next_id, content.rank, content.size_bytes)
        self._next_id += 1  # whatever becomes of it: no id is used twice
        self._backend.load_adapter(loaded.adapter_id, content)
        self._by_name[name] = loaded
        self._ids |= {loaded.adapter_id}
        _log.info(
            "adapter_loaded",
            adapter=name,
            revision=loaded.revision,
            adapter_id=loaded.adapter_id,
            rank=loaded.rank,
            size_bytes=loaded.size_bytes,
        )
        return loaded

    def unload(self, name: str) -> None:
        """Give an adapter's memory back. Raises UnknownAdapterError."""
        known = self._by_name.get(name)
        if known is None:
            raise UnknownAdapterError(
                "UNKNOWN_ADAPTER", f"name: expected a loaded adapter's, got {name!r}; ListAdapters has them", name=name
            )
        self._ids -= {known.adapter_id}
        del self._by_name[name]
        self._backend.unload_adapter(known.adapter_id)
        _log.info("adapter_unloaded", adapter=name, revision=known.revision, adapter_id=known.adapter_id)

    def list(self) -> list[LoadedAdapter]:
        """All of them, in the order they were loaded."""
        return list(self._by_name.values())

    def _require_room(self, name: str) -> None:
        if name not in self._by_name and len(self._by_name) >= self.max_adapters:
            raise AdapterLimitError(
                "TOO_MANY_ADAPTERS",
                f"expected fewer than {self.max_adapters} loaded adapters, got as many; unload one, or start the"
                " executor with a larger --max-loras",
                max_adapters=self.max_adapters,
            )

    def require_loaded(self, adapter_ids: Int32 | None) -> None:
        """Check the adapters that a step names; None names none.

        Raises:
            FailedPreconditionError: one of them is not loaded.
        """
        if adapter_ids is None:
            return
        missing = set(adapter_ids.tolist()) - self._ids
        if missing:
            raise FailedPreconditionError(
                "UNKNOWN_ADAPTER",
                f"adapter_ids: expected 0 or ids of loaded adapters, got {min(missing)}; load the adapter, and name it"
                " by the id that it then has",
                adapter_id=min(missing),
            )
