"""The kit passes on executors that compute: torch, and the example backend of the docs, on the kit's own model."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from kvplane_client.conformance.reference_model import ReferenceModel, write_model

from executor_service.config import ExecutorConfig
from executor_service.server import running_executor
from tests.conformance import broken_adapters as adapters
from tests.conformance.broken_wire import wire_before
from tests.conformance.trial import (
    BLOCK_SIZE,
    COMPUTING,
    NEED_ADAPTERS,
    NEED_CHUNKS,
    NEED_GROUPS,
    NEED_NO_ADAPTERS,
    NEED_NO_STATES,
    NEED_STATES,
    NUM_BLOCKS,
    NUM_HOST_BLOCKS,
    failures,
    skipped,
    tried,
)
from tests.unit.executor.step_builder import save_tiny_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "numpy_backend"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("conformance") / "tiny"
    write_model(folder, 0)
    return folder


def config(backend: str, folder: Path, **values: object) -> ExecutorConfig:
    # K and V of 3 layers with 2 heads of 16 float32.
    swap_space = NUM_HOST_BLOCKS * BLOCK_SIZE * 2 * 3 * 2 * 16 * 4
    defaults = {
        "backend": backend, "model": str(folder), "port": 0, "device": "cpu", "block_size": BLOCK_SIZE,
        "num_blocks_override": NUM_BLOCKS, "memory_limit": "8GiB", "max_model_len": 256, "swap_space": swap_space,
    }  # fmt: skip
    return ExecutorConfig(**(defaults | values))  # type: ignore[arg-type]


@pytest.fixture
def numpy_backend(monkeypatch):
    """The example's place on the path, as `pip install examples/numpy_backend` would put it there."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    assert importlib.util.find_spec("kvplane_numpy") is not None
    return "kvplane_numpy.backend:NumpyBackend"


async def test_conformance_of_numpy_example_passes_with_numerics(model, numpy_backend):
    async with running_executor(config(numpy_backend, model, dtype="float32")) as server:
        judge, results = await tried(server.address, model=ReferenceModel(model))
    assert judge.name == "the reference model in NumPy"
    assert failures(results) == {}
    assert skipped(results) == NEED_GROUPS | NEED_ADAPTERS


async def test_conformance_of_numpy_example_as_its_own_judge_passes(model, numpy_backend):
    async with running_executor(config(numpy_backend, model)) as server:
        _, results = await tried(server.address, COMPUTING)
    assert failures(results) == {}


# What of "sampling/" fails with these faults.
DRAWN = {
    "DrawsWithoutPositions": {"other_positions_other_tokens"},
    "ForgetsFedTokens": {"fed_token_counts_as_output"},
    "RepeatsOutputsOnly": {"repetition_counts_the_prompt"},
    "BiasesWhatIsSuppressed": {"in_the_order_given"},
    "NarrowsBeforeTemperature": {"in_the_order_given"},
}


@pytest.mark.parametrize("fault", DRAWN)
async def test_conformance_of_numpy_example_that_draws_wrong_fails(fault, model, numpy_backend):
    backend = f"tests.conformance.broken_sampling:{fault}"
    async with running_executor(config(backend, model, dtype="float32")) as server:
        _, results = await tried(server.address, ["sampling/"], model=ReferenceModel(model))
    assert failures(results).keys() == {f"sampling/{name}" for name in DRAWN[fault]}


def test_numpy_example_is_as_short_as_the_docs_say():
    assert len((EXAMPLE / "kvplane_numpy" / "backend.py").read_text().splitlines()) < 200


def test_numpy_example_is_what_the_docs_quote():
    text = (EXAMPLE.parents[1] / "docs" / "write-a-backend.md").read_text()
    source = {line.strip() for line in (EXAMPLE / "kvplane_numpy" / "backend.py").read_text().splitlines()}
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    quoted = {line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()} - {"", "..."}
    assert len(quoted) > 15
    assert {line for line in quoted if not line.startswith("...")} <= source


@pytest.mark.filterwarnings("ignore")
async def test_conformance_of_torch_executor_passes_with_numerics(model):
    """The shell around the backend is that of sim, and tried there."""
    async with running_executor(config("torch", model, dtype="float32")) as server:
        _, results = await tried(server.address, COMPUTING, model=ReferenceModel(model))
    assert failures(results) == {}
    assert skipped(results) == NEED_GROUPS


@pytest.mark.filterwarnings("ignore")
async def test_conformance_of_torch_executor_of_two_ranks_passes_with_numerics(model):
    async with running_executor(config("torch", model, dtype="float32", tensor_parallel_size=2)) as server:
        _, results = await tried(server.address, COMPUTING, model=ReferenceModel(model))
    assert failures(results) == {}
    assert skipped(results) == NEED_GROUPS


@pytest.mark.filterwarnings("ignore")
async def test_conformance_of_torch_executor_with_other_weights_fails(model, tmp_path):
    """The reference is no tautology: the same architecture with weights of another seed is found out."""
    write_model(tmp_path, 1)
    async with running_executor(config("torch", tmp_path, dtype="float32")) as server:
        _, results = await tried(server.address, ["numerics/"], model=ReferenceModel(model))
    assert len(failures(results)) == len(results)


@pytest.fixture(scope="module")
def windowed_model(tmp_path_factory):
    """Six layers, of which two read 7 tokens before each that reads all: three KV groups of two layers."""
    folder = tmp_path_factory.mktemp("conformance") / "windowed"
    write_model(folder, 0, window=7)
    return folder


def windowed_config(folder: Path, **values: object) -> ExecutorConfig:
    # Each group has the K and V of 2 layers in a block.
    swap_space = 3 * NUM_HOST_BLOCKS * BLOCK_SIZE * 2 * 2 * 2 * 16 * 4
    sizes = {"num_blocks_override": 3 * NUM_BLOCKS, "swap_space": swap_space, "dtype": "float32"}
    return config("torch", folder, **(sizes | values))


@pytest.mark.filterwarnings("ignore")
async def test_conformance_of_torch_executor_with_several_groups_passes_with_numerics(windowed_model):
    async with running_executor(windowed_config(windowed_model)) as server:
        judge, results = await tried(server.address, COMPUTING, model=ReferenceModel(windowed_model))
    assert judge.name == "the reference model in NumPy"
    assert failures(results) == {}
    assert skipped(results) == NEED_CHUNKS | NEED_STATES


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "changes"), [("llama4", {"attention_chunk_size": 7}), ("gemma3n", {}), ("gemma4", {"sliding_window": 7})]
)
async def test_conformance_of_torch_executor_with_chunks_shared_or_unequal_kv_passes(kind, changes, tmp_path):
    """Two full layers and three of chunks, which do not end with a block; K/V of others; and blocks of two sizes."""
    save_tiny_model(tmp_path, kind, **changes)
    # Of Gemma 4 two blocks of full layers take as many tokens as one of each of two groups of sliding ones.
    sizes = {"num_blocks_override": 4 * NUM_BLOCKS, "swap_space": 4 * NUM_HOST_BLOCKS * BLOCK_SIZE * 2 * 2 * 64 * 4}
    async with running_executor(windowed_config(tmp_path, **sizes)) as server:
        _, results = await tried(server.address, ["groups/", "windows/", "tables/", "cache/", "copies/"])
    assert failures(results) == {}
    assert skipped(results) == (NEED_CHUNKS if kind != "llama4" else set())


@pytest.mark.filterwarnings("ignore")
async def test_conformance_of_torch_executor_with_another_window_fails(windowed_model, tmp_path):
    """The same weights, read one token further back."""
    write_model(tmp_path, 0, window=8)
    async with running_executor(windowed_config(tmp_path)) as server:
        _, results = await tried(
            server.address, ["numerics/after_every", "windows/null_before_the"], model=ReferenceModel(windowed_model)
        )
    assert failures(results).keys() == {"numerics/after_every_length", "windows/null_before_the_window"}


@pytest.mark.filterwarnings("ignore")
async def test_conformance_of_torch_executor_with_several_groups_as_its_own_judge_passes(windowed_model):
    async with running_executor(windowed_config(windowed_model)) as server:
        _, results = await tried(server.address, ["groups/", "windows/", "tables/", "cache/"])
    assert failures(results) == {}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "filters"),
    [("jamba", ["states/", "groups/"]), ("mamba2", ["states/", "tables/", "cache/", "copies/"])],
)
async def test_conformance_of_torch_executor_with_states_passes(kind, filters, tmp_path):
    """A hybrid of attention and states, and one that has nothing but states."""
    save_tiny_model(tmp_path, kind)
    async with running_executor(states_config(tmp_path)) as server:
        judge, results = await tried(server.address, filters)
    assert judge.name.startswith("the executor itself")
    assert failures(results) == {}
    assert skipped(results) == (NEED_NO_STATES if "tables/" in filters else set())


def states_config(folder: Path) -> ExecutorConfig:
    """As many blocks and host blocks as the kit wants of each group, be a block as large as it may."""
    values = {"num_blocks_override": 4 * NUM_BLOCKS, "swap_space": "64MiB", "state_interval": BLOCK_SIZE}
    return config("torch", folder, dtype="float32", **values)


# What is loaded that should be refused, and the cases that find it.
LOADED = {
    adapters.LoadsWhatItCannotRead: {
        "weights_cut_short", "weights_empty", "weights_no_safetensors", "weights_of_endless_header",
        "weights_beyond_the_file", "weights_missing", "weights_a_folder", "config_missing", "config_no_json",
        "config_no_object", "config_of_another_rank", "half_a_pair", "sources_that_lead_nowhere",
    },
    adapters.LoadsWhatIsNotThere: {"sources_that_lead_nowhere"},
    adapters.LoadsOtherShapes: {"shapes_of_another_model"},
    adapters.LoadsOtherLayers: {"layer_of_another_model"},
    adapters.LoadsOtherKinds: {"config_of_another_kind"},
    adapters.ReadsAnyRank: {"rank_beyond_reason"},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
async def test_conformance_of_torch_executor_with_adapters_passes_and_fails_behind_faulty_wires(model):
    """One executor: as it is, compared with NumPy, and behind each wire that says that a bad adapter was loaded."""
    reference = ReferenceModel(model)
    bad = [f"adapter_files/{name}" for name in set().union(*LOADED.values())]
    found = {}
    async with running_executor(config("torch", model, dtype="float32", max_loras=2)) as server:
        _, results = await tried(server.address, ["adapters/", "adapter_files/"], model=reference)
        for fault in LOADED:
            async with wire_before(server.address, fault) as address:
                found[fault] = failures((await tried(address, bad, model=reference))[1]).keys()
    assert failures(results) == {}
    assert skipped(results) == NEED_NO_ADAPTERS
    assert found == {fault: {f"adapter_files/{name}" for name in names} for fault, names in LOADED.items()}


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("judged_by", ["model", "itself"])
async def test_conformance_of_torch_executor_passes_as_a_whole(model, judged_by, ranks):
    async with running_executor(config("torch", model, dtype="float32", tensor_parallel_size=ranks)) as server:
        reference = ReferenceModel(model) if judged_by == "model" else None
        _, results = await tried(server.address, model=reference)
    assert failures(results) == {}
