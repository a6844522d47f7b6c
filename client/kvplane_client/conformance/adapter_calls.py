"""What cases ask of an executor about LoRA adapters.

Station: used by the cases about them.
"""

from __future__ import annotations

from kvplane.executor.v1 import executor_service_pb2 as pb

from kvplane_client.conformance.bench import Bench
from kvplane_client.conformance.outcome import CaseSkippedError
from kvplane_client.conformance.steps import Adapter

__all__ = ["listed", "load", "named", "require_room", "unload"]


def require_room(bench: Bench, count: int) -> None:
    """Raises CaseSkippedError for an executor that does not take so many adapters."""
    most = bench.info.max_adapters
    if most < count:
        wanted = "adapters" if count == 1 else f"{count} adapters"
        raise CaseSkippedError(f"needs an executor that takes {wanted}, got max_adapters {most}")


async def load(bench: Bench, number: int, name: str = "", *, revision: str = "") -> pb.LoraAdapter:
    """Has one of the kit's adapters loaded; a second number is other content."""
    return await bench.target.load_adapter(name or f"adapter {number}", bench.sources.good(number), revision)


def named(adapter: pb.LoraAdapter) -> Adapter:
    """What rows are computed with."""
    return Adapter(adapter.name, adapter.source, adapter.revision, adapter.adapter_id)


async def unload(bench: Bench, name: str) -> None:
    """Has an adapter unloaded that is loaded."""
    await bench.call(bench.stub.UnloadAdapter(pb.UnloadAdapterRequest(name=name)))


async def listed(bench: Bench) -> list[pb.LoraAdapter]:
    """What is loaded."""
    return list((await bench.call(bench.stub.ListAdapters(pb.ListAdaptersRequest()))).adapters)
