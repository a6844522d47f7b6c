"""A LoRA adapter's files from the hub, within bounds of time and size.

Station: called by `lora_files` for a source that is no folder. What fetches is a process of its own,
`python -m executor_service.lora_hub SOURCE MAX_BYTES FILE...`: a thread that waits for a hub cannot be stopped, and a
process can; and the system lets it write no file that is larger than may be. It ends with the executor, too.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import structlog
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined] # documented, and not in its __all__

from executor_service.backends.base import AdapterError
from executor_service.parent_watch import exit_with_parent

__all__ = ["fetch_adapter"]

# Shorter than a manager waits for an adapter, so that it is told why.
_TIME_LIMIT_S = 600.0
_SAID_CHARS = 500

_log = structlog.get_logger(__name__)


def fetch_adapter(source: str, files: Sequence[str], max_file_bytes: int) -> Path:
    """Fetch some files of a repository of the hub, or find them in its local cache.

    Args:
        source: its id.
        files: names of the files; what is not there is left out.
        max_file_bytes: the most bytes of each.

    Returns:
        The folder that they lie in.

    Raises:
        AdapterError: it is no id, the hub does not have it or does not answer in time, or a file is larger.
    """
    try:
        validate_repo_id(source)
    except HFValidationError as error:
        raise AdapterError(
            "ADAPTER_NOT_FOUND",
            f"source: expected a folder on the executor's machine, or a hub id, got {source!r}: nothing there",
            source=source,
        ) from error
    _log.info("adapter_fetch_started", source=source)
    ours_ends, kept = os.pipe()
    try:
        done = subprocess.run(  # noqa: S603 - this module
            [sys.executable, "-m", __name__, source, str(max_file_bytes), *files],
            stdin=ours_ends,
            capture_output=True,
            text=True,
            # Plain files over HTTP: the limit on a file's size is no limit on what hf_xet logs and caches beside it.
            env=os.environ | {"HF_HUB_DISABLE_XET": "1"},
            timeout=_TIME_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise AdapterError(
            "ADAPTER_NOT_REACHABLE",
            f"source: expected the hub to send {source!r} within {_TIME_LIMIT_S:g} seconds, got no end of it; try"
            " again, or fetch it into a folder on the executor's machine and give that",
            source=source,
        ) from error
    finally:
        os.close(ours_ends)
        os.close(kept)
    if done.returncode != 0:
        got = f"a process that ended with {done.returncode}: {done.stderr.strip()[-_SAID_CHARS:]}"
        raise _not_reachable(source, got)
    answer = json.loads(done.stdout.splitlines()[-1])
    if answer.get("too_large"):
        raise AdapterError(
            "ADAPTER_TOO_LARGE",
            f"source: expected files of at most {max_file_bytes} bytes in {source!r}, as --max-lora-rank allows, got a"
            " larger one; start the executor with a larger one",
            source=source,
            max_file_bytes=max_file_bytes,
        )
    if "error" in answer:
        raise _not_reachable(source, answer["error"])
    return Path(answer["folder"])


def _not_reachable(source: str, got: str) -> AdapterError:
    return AdapterError(
        "ADAPTER_NOT_REACHABLE",
        f"source: {source!r} is no folder on the executor's machine, and as a hub id it could not be fetched ({got});"
        " check the spelling and the network, set HF_TOKEN for a gated one",
        source=source,
    )


def main(source: str, max_file_bytes: int, files: Sequence[str]) -> dict[str, object]:
    """Fetch, in the process that does it. Returns the folder, or what is wrong."""
    exit_with_parent()
    # Python ignores the signal that comes with it: a write beyond it fails.
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
    try:
        return {"folder": snapshot_download(source, allow_patterns=list(files))}
    except Exception as error:  # noqa: BLE001 - told to the executor: the hub's client has errors of several libraries
        return {"too_large": _is_too_large(error), "error": f"{type(error).__name__}: {error}"}


def _is_too_large(error: BaseException | None) -> bool:
    """Whether a write went beyond the limit: this error, or what it came of."""
    while error is not None:
        if isinstance(error, OSError) and error.errno == errno.EFBIG:
            return True
        error = error.__cause__ or error.__context__
    return False


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])))  # the answer
