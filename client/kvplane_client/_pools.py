"""Pools of block tables as they are opened, listed, used and closed.

Station: owned by ``AsyncClient``; each ``SequencePool`` that it opens calls it.
"""

from __future__ import annotations

import secrets

from kvplane.kvmanager.v1 import sequence_pool_pb2 as pb

from kvplane_client._manager_calls import ManagerCalls
from kvplane_client._sequence_wire import pool_info_from
from kvplane_client._stubs import Stubs
from kvplane_client.errors import AlreadyExistsError
from kvplane_client.sequence_types import SequencePoolInfo
from kvplane_client.sequences import SequencePool

__all__ = ["Pools"]


class Pools:
    """The manager's pools.

    Args:
        calls: How calls are made.
        stubs: Where.
    """

    def __init__(self, calls: ManagerCalls, stubs: Stubs) -> None:
        self._calls = calls
        self._stubs = stubs

    async def open(self, request: pb.OpenPoolRequest) -> SequencePool:
        """Opens a pool. One without a pool_id gets a name that nobody else has.

        Raises:
            KvPlaneError: It was not opened; see ``AsyncClient.open_pool``.
        """
        is_named = bool(request.pool_id)
        while True:
            if not is_named:
                request.pool_id = f"pool-{secrets.token_hex(16)}"
            try:
                info = pool_info_from((await self._calls.unary(self._stubs.manager.OpenPool, request)).pool)
                break
            except AlreadyExistsError:
                if is_named:
                    raise
                # Nobody else has drawn this name: an earlier attempt made the pool, and its answer was lost.
                found = [pool for pool in await self.list() if pool.pool_id == request.pool_id]
                if found:
                    info = found[0]
                    break
                # That attempt has not come to its end: another name.
        return SequencePool(info, self._update, self._close)

    async def list(self) -> list[SequencePoolInfo]:
        """Returns the open pools."""
        response = await self._calls.unary(self._stubs.manager.ListPools, pb.ListPoolsRequest())
        return [pool_info_from(pool) for pool in response.pools]

    async def _update(self, request: pb.UpdateSequencesRequest) -> pb.UpdateSequencesResponse:
        return await self._calls.unary(self._stubs.manager.UpdateSequences, request)

    async def _close(self, pool_id: str) -> None:
        await self._calls.unary(self._stubs.manager.ClosePool, pb.ClosePoolRequest(pool_id=pool_id))
