"""The example engine: transformers with a loop of its own, in a process of its own, on the manager's block tables."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest

from executor_service.gguf_conversion import converted_folder, default_cache_dir
from tests.e2e.cluster import Cluster

pytestmark = [pytest.mark.model, pytest.mark.timeout(1200)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"


async def test_transformers_with_its_own_loop_gives_exact_tokens(cluster: Cluster) -> None:
    path = os.environ.get("KVPLANE_TEST_MODEL")
    if not path:
        pytest.skip("KVPLANE_TEST_MODEL names no model")
    folder = converted_folder(Path(path), default_cache_dir())
    cluster.start_manager()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(EXAMPLE), "--server", cluster.address, "--model", str(folder), "--max-tokens", "16"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    stdout, stderr = await process.communicate()
    told = stdout.decode()
    assert process.returncode == 0, told + stderr.decode()
    assert told.count("exact") == 6
    assert re.search(r"b: .*, 32 of \d+ prompt tokens cached", told), told
    assert re.search(r"\b1 blocks copied", told), told
    preemptions = re.search(r"(\d+) preemptions, (\d+) of them the manager's choice", told)
    assert preemptions is not None, told
    assert int(preemptions[1]) >= int(preemptions[2]) >= 1, "whom the manager named gave way"
    assert "Warning" not in stderr.decode()
