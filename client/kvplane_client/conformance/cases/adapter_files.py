"""LoRA adapters that cannot be loaded: each is refused with an error that says so, and harms nothing.

Each case spoils one thing in a good adapter's files. A sequence rests in the cache meanwhile; afterwards it goes on,
and the good adapter is loaded. What is in such files must neither end the process nor reach what lies beyond them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from kvplane.executor.v1 import executor_service_pb2 as pb

from kvplane_client.conformance.adapter_calls import listed, load, named, require_room, unload
from kvplane_client.conformance.bench import Bench
from kvplane_client.conformance.outcome import CaseSkippedError
from kvplane_client.conformance.registry import Topic

if TYPE_CHECKING:
    from kvplane_client.conformance.reference_model import ReferenceModel

TOPIC = Topic("adapter_files")

_UNREADABLE = "ExecutorService.LoadAdapter: a source that cannot be read"
_CANNOT_RUN = "ExecutorService.LoadAdapter: an adapter that the model or this executor cannot run"
_RANK = "LoraAdapter.rank: rank is the largest rank of its matrices."

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_LARGE_RANK = 8192
_INVALID = grpc.StatusCode.INVALID_ARGUMENT


@TOPIC.case(_UNREADABLE)
async def sources_that_lead_nowhere(bench: Bench) -> None:
    """Paths that are not there, that climb out of folders, or that are none are refused; a good one is loaded then."""
    require_room(bench, 1)
    if bench.info.backend == "sim":
        raise CaseSkippedError("the sim backend takes any text for an adapter")
    resting = bench.track(bench.block_size + 1)
    await bench.stream().prefill(resting)
    for source in (
        "/kvplane-conformance/nowhere",
        "../" * 64 + "etc",
        "/etc",
        "file:///etc/passwd",
        "a/../../b",
        "~/",
        "~kvplane-conformance/nowhere",
        "\0",
        "/" + "s" * 4000,
    ):
        call = bench.stub.LoadAdapter(pb.LoadAdapterRequest(name="adapter", source=source))
        await bench.refused(call, _INVALID, _UNREADABLE)
    bench.equal(await listed(bench), [], _UNREADABLE)
    await bench.unharmed(resting)


@TOPIC.case(_CANNOT_RUN)
async def rank_beyond_reason(bench: Bench) -> None:
    """An adapter of rank 8,192 is refused, or loaded as what it is; either way the executor goes on."""
    require_room(bench, 1)

    def write(folder: Path, model: ReferenceModel) -> None:
        from kvplane_client.conformance.reference_adapter import write_adapter  # noqa: PLC0415 - needs the extra

        name, shape = next(iter(model.linear_layers.items()))
        write_adapter(folder, {name: shape}, 0, rank=_LARGE_RANK)

    source = bench.sources.spoilt(write)
    resting = bench.track(bench.block_size + 1)
    await bench.stream().prefill(resting)
    call = bench.stub.LoadAdapter(pb.LoadAdapterRequest(name="large", source=source))
    loaded = await bench.target.answered_or_refused(call, _INVALID, _CANNOT_RUN)
    if loaded is not None:
        bench.equal(loaded.adapter.rank, _LARGE_RANK, _RANK)
        await unload(bench, "large")
    await bench.unharmed(resting)
    await bench.stream().prefill(bench.track(3, salt=1, adapter=named(await load(bench, 0))))


def _bad(name: str, contract: str, summary: str, spoil: Callable[[Path, ReferenceModel], None]) -> None:
    """Registers a case for files that cannot be loaded."""

    async def run(bench: Bench) -> None:
        require_room(bench, 1)
        source = bench.sources.spoilt(spoil)
        resting = bench.track(bench.block_size + 1)
        await bench.stream().prefill(resting)
        call = bench.stub.LoadAdapter(pb.LoadAdapterRequest(name="bad", source=source))
        await bench.refused(call, _INVALID, contract)
        bench.equal(await listed(bench), [], contract)
        await bench.unharmed(resting)
        await bench.stream().prefill(bench.track(3, salt=1, adapter=named(await load(bench, 0))))

    TOPIC.add(name, contract, summary, run)


def _setting(name: str, value: object) -> Callable[[Path, ReferenceModel], None]:
    """Changes a setting of adapter_config.json."""

    def spoil(folder: Path, _: ReferenceModel) -> None:
        path = folder / _CONFIG
        path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))

    return spoil


def _content(file: str, change: Callable[[bytes], bytes]) -> Callable[[Path, ReferenceModel], None]:
    """Changes a file's bytes."""

    def spoil(folder: Path, _: ReferenceModel) -> None:
        path = folder / file
        path.write_bytes(change(path.read_bytes()))

    return spoil


def _without(file: str) -> Callable[[Path, ReferenceModel], None]:
    return lambda folder, _: (folder / file).unlink()


def _header(change: Callable[[dict[str, dict[str, list[int]]]], None]) -> Callable[[Path, ReferenceModel], None]:
    """Changes what the file of weights says of its tensors; their bytes stay."""

    def edited(data: bytes) -> bytes:
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        change(header)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + size :]

    return _content(_WEIGHTS, edited)


def _beyond_the_file(header: dict[str, dict[str, list[int]]]) -> None:
    """The last tensor's bytes lie far behind the file's end."""
    tensor = [value for name, value in header.items() if name != "__metadata__"][-1]
    tensor["data_offsets"] = [offset + 2**40 for offset in tensor["data_offsets"]]


def _half_a_pair(header: dict[str, dict[str, list[int]]]) -> None:
    """A matrix has another layer's name, so that neither layer has both."""
    name = next(name for name in header if name.endswith("lora_B.weight"))
    header["base_model.model.kvplane.lora_B.weight"] = header.pop(name)


def _written(
    change: Callable[[str, tuple[int, int]], tuple[str, tuple[int, int]]],
) -> Callable[[Path, ReferenceModel], None]:
    """Writes an adapter for one layer of the model under another name, or of another shape."""

    def spoil(folder: Path, model: ReferenceModel) -> None:
        from kvplane_client.conformance.reference_adapter import write_adapter  # noqa: PLC0415 - needs the extra

        name, shape = change(*next(iter(model.linear_layers.items())))
        write_adapter(folder, {name: shape}, 0)

    return spoil


def _folder_for_weights(folder: Path, _: ReferenceModel) -> None:
    (folder / _WEIGHTS).unlink()
    (folder / _WEIGHTS).mkdir()


_bad("weights_cut_short", _UNREADABLE, "The file of weights ends in the middle.",
     _content(_WEIGHTS, lambda data: data[: len(data) // 2]))  # fmt: skip
_bad("weights_empty", _UNREADABLE, "The file of weights has no bytes.", _content(_WEIGHTS, lambda data: b""))
_bad("weights_no_safetensors", _UNREADABLE, "The file of weights is none.",
     _content(_WEIGHTS, lambda data: b"PK\3\4" + data[::-1]))  # fmt: skip
_bad("weights_of_endless_header", _UNREADABLE, "The header is said to be of 2**62 bytes.",
     _content(_WEIGHTS, lambda data: (2**62).to_bytes(8, "little") + data[8:]))  # fmt: skip
_bad(
    "weights_beyond_the_file", _UNREADABLE, "A tensor is said to lie behind the file's end.", _header(_beyond_the_file)
)
_bad("weights_missing", _UNREADABLE, "There is no file of weights.", _without(_WEIGHTS))
_bad("weights_a_folder", _UNREADABLE, "A folder has the name of the file of weights.", _folder_for_weights)
_bad("config_missing", _UNREADABLE, "There is no adapter_config.json.", _without(_CONFIG))
_bad("config_no_json", _UNREADABLE, "adapter_config.json is cut short.", _content(_CONFIG, lambda data: data[:-9]))
_bad("config_no_object", _UNREADABLE, "adapter_config.json is a list.", _content(_CONFIG, lambda data: b"[]"))
_bad("config_of_another_kind", _CANNOT_RUN, "The adapter is no LoRA.", _setting("peft_type", "KVPLANE"))
_bad("config_of_another_rank", _CANNOT_RUN, "adapter_config.json says another rank than the matrices have.",
     _setting("r", 5))  # fmt: skip
_bad("half_a_pair", _CANNOT_RUN, "A layer has one of two matrices.", _header(_half_a_pair))
_bad("shapes_of_another_model", _CANNOT_RUN, "The matrices are for a layer with one input more.",
     _written(lambda name, shape: (name, (shape[0], shape[1] + 1))))  # fmt: skip
_bad("layer_of_another_model", _CANNOT_RUN, "The matrices are for a layer that the model lacks.",
     _written(lambda name, shape: (name.replace("layers.0", "layers.99"), shape)))  # fmt: skip
