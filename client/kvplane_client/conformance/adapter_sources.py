"""Where an executor finds adapters to try: text for a sim one, files that the kit writes, or what the user names.

Station: chosen by `runner`, used by `bench`. Imports NumPy only where files are written.
"""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvplane_client.conformance.judges import Judge, ModelJudge, SimJudge
from kvplane_client.conformance.outcome import CaseSkippedError

if TYPE_CHECKING:
    from kvplane_client.conformance.reference_model import ReferenceModel
    from kvplane_client.conformance.target import Target

__all__ = ["AdapterSources", "choose_sources"]

_LOOPBACK = ("localhost", "127.", "[::1]", "unix:")


class AdapterSources(ABC):
    """Adapters by number, each of other content."""

    @abstractmethod
    def good(self, number: int) -> str:
        """The source of one that the executor should load.

        Raises:
            CaseSkippedError: There is none.
        """

    def spoilt(self, spoil: Callable[[Path, ReferenceModel], None]) -> str:
        """The source of a good adapter's files after something was done to them, for one case.

        Raises:
            CaseSkippedError: The executor reads no files that the kit could spoil.
        """
        raise CaseSkippedError("needs adapters in files that the kit writes: --model")

    def close(self) -> None:
        """Takes away what was written."""
        return


class _Texts(AdapterSources):
    """The sim backend's."""

    def good(self, number: int) -> str:
        return f"kvplane-conformance/{number}"

    def spoilt(self, spoil: Callable[[Path, ReferenceModel], None]) -> str:
        raise CaseSkippedError("the sim backend takes any text for an adapter")


class _Named(AdapterSources):
    """Those that the user says fit the model; without any there is nothing to load."""

    def __init__(self, sources: Sequence[str]) -> None:
        self._sources = sources

    def good(self, number: int) -> str:
        if number >= len(self._sources):
            found = "none" if not self._sources else str(len(self._sources))
            raise CaseSkippedError(
                f"needs {number + 1} adapters of the served model, got {found}: give --adapter, or --model where the"
                " executor is on this machine"
            )
        return self._sources[number]


class _Files(AdapterSources):
    """Random ones for the model that the kit knows, in a folder for temporary files.

    Args:
        model: The model.
    """

    def __init__(self, model: ReferenceModel) -> None:
        self._model = model
        self._folder = tempfile.TemporaryDirectory(prefix="kvplane-conformance-")
        self._count = 0

    def good(self, number: int) -> str:
        folder = Path(self._folder.name) / f"good-{number}"
        if not folder.exists():
            self._write(folder, number)
        return str(folder)

    def spoilt(self, spoil: Callable[[Path, ReferenceModel], None]) -> str:
        self._count += 1
        folder = Path(self._folder.name) / f"spoilt-{self._count}"
        self._write(folder, 0)
        spoil(folder, self._model)
        return str(folder)

    def close(self) -> None:
        self._folder.cleanup()

    def _write(self, folder: Path, seed: int) -> None:
        from kvplane_client.conformance.reference_adapter import write_adapter  # noqa: PLC0415 - needs the extra

        write_adapter(folder, self._model.linear_layers, seed)


def choose_sources(target: Target, judge: Judge, named: Sequence[str]) -> AdapterSources:
    """Returns where adapters for an executor come from.

    Args:
        target: The executor.
        judge: Of its outputs; one with a model of its own knows what adapters for it look like.
        named: What the user says are adapters for the served model.
    """
    if isinstance(judge, ModelJudge) and (not named and target.address.startswith(_LOOPBACK)):
        return _Files(judge.model)
    if isinstance(judge, SimJudge):
        return _Texts()
    return _Named(named)
