"""A rank other than 0: `python -m executor_service.tensor_parallel.worker FD`, started by `workers` only.

Station: it takes calls from rank 0 over the socket FD, in order, and does with its shard what rank 0 does with its own;
`calls` is their form. It serves no port, registers nowhere and samples nothing.

Its end: rank 0 holds the other end of its standard input, so that it ends with rank 0 whatever ends that
(`parent_watch`), also in the middle of an exchange. The signals that stop an executor are rank 0's
to obey: it starts the others with them blocked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import structlog

from executor_service.backends.base import BackendError
from executor_service.backends.registry import create_backend
from executor_service.backends.torch_backend import TorchBackend
from executor_service.devices import resolve_device
from executor_service.logging import configure_logging
from executor_service.parent_watch import exit_with_parent
from executor_service.tensor_parallel.calls import Answer, Failure, RankConfig
from executor_service.tensor_parallel.group import RankGroup
from executor_service.tensor_parallel.sharding import ModelShard

_log = structlog.get_logger(__name__)


class Rank:
    """One rank's backend, and its place in the group once it has met the others.

    Args:
        told: its settings.
    """

    def __init__(self, told: RankConfig) -> None:
        self._told = told
        backend = create_backend(told.config)
        assert isinstance(backend, TorchBackend)
        self._backend = backend
        self._group: RankGroup | None = None
        self.calls: dict[str, Callable[..., Any]] = {
            "join": self._join,
            "load": backend.load,
            "profile_memory": backend.profile_memory,
            "initialize_kv_cache": backend.initialize_kv_cache,
            "copy_blocks": backend.copy_blocks,
            "follow": backend.follow,
            "load_adapter": backend.load_adapter_part,
            "unload_adapter": backend.unload_adapter,
        }

    def answer(self, name: str, arguments: tuple[Any, ...]) -> Answer:
        """Do a call. If it fails this rank leaves the group: the others may be waiting for it in an exchange."""
        try:
            return Answer(self.calls[name](*arguments))
        except Exception as error:  # noqa: BLE001 - told to rank 0, which decides
            known = isinstance(error, (BackendError, RuntimeError))  # the latter is what torch raises
            _log.warning("rank_call_failed", call=name, error=str(error), exc_info=None if known else error)
            if name in ("load", "profile_memory", "follow"):
                self.leave()
            return Answer(failure=Failure.of(error))

    def leave(self) -> None:
        """Leave the group, if it is in one."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _join(self) -> None:
        told = self._told
        device = resolve_device(told.config.device)
        self._group = RankGroup(told.rank, told.size, Path(told.store), device, told.timeout_s)
        self._backend.join(ModelShard(self._group))


def main() -> None:
    """Take calls until rank 0 says close, or is gone."""
    exit_with_parent()
    connection = Connection(int(sys.argv[1]))
    told: RankConfig = connection.recv()
    config = told.config
    configure_logging(config.log_level, config.log_format, executor_id=config.executor_id, rank=str(told.rank))
    rank = Rank(told)
    connection.send(Answer())
    with suppress(EOFError, ConnectionError):  # rank 0 has ended, and so do we
        while (call := connection.recv())[0] != "close":
            connection.send(rank.answer(*call))
    rank.leave()


if __name__ == "__main__":
    main()
