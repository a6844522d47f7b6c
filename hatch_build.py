"""Compiles the core with mypyc into a wheel, when asked to.

Run by hatchling. `make wheel` and the manager's image set HATCH_BUILD_HOOK_ENABLE_CUSTOM=1; without it, and in an
editable install, the same sources run as they are. The modules are built aside: no extension module is left in the
tree, where it would shadow sources that are edited later.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

COMPILED = ("kvmanager_service/core/*.py", "kvmanager_service/step_message.py")
UNCOMPILED = ("__init__.py", "errors.py")
GROUP_NAME = "kvplane_core"
# Only what mypyc needs to know; how strictly the sources are checked is for `make lint`.
MYPY_FLAGS = ["--config-file=", "--ignore-missing-imports", "--follow-imports=silent"]


class CompileCore(BuildHookInterface):
    """Adds the compiled modules to the wheel, beside their sources."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and tell hatchling what to include. Raises SystemExit or CompileError when that fails."""
        self._folder: Path | None = None
        if version == "editable":
            return
        self._folder = Path(tempfile.mkdtemp(prefix="kvplane-mypyc-"))
        built = _compile(Path(self.root), self._folder)
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        build_data["force_include"].update({str(path): str(path.relative_to(self._folder / "lib")) for path in built})

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was built; it is in the wheel."""
        if self._folder is not None:
            shutil.rmtree(self._folder)


def _compile(root: Path, folder: Path) -> list[Path]:
    """Build the extension modules under folder/lib. Returns their paths."""
    from mypyc.build import mypycify  # noqa: PLC0415 - a build dependency only when the hook is on
    from setuptools import Distribution  # noqa: PLC0415

    sources = sorted(path for pattern in COMPILED for path in root.glob(pattern) if path.name not in UNCOMPILED)
    os.environ["MYPYPATH"] = str(root / "proto")
    before = Path.cwd()
    os.chdir(root)  # mypy names a module by its path from here
    try:
        extensions = mypycify(
            [*MYPY_FLAGS, *(str(path.relative_to(root)) for path in sources)],
            opt_level="3",
            target_dir=str(folder / "c"),
            group_name=GROUP_NAME,
        )
        command = Distribution({"name": "kvplane", "ext_modules": extensions}).get_command_obj("build_ext")
        command.build_lib = str(folder / "lib")
        command.build_temp = str(folder / "temp")
        command.ensure_finalized()
        command.run()
    finally:
        os.chdir(before)
    return sorted(path for path in (folder / "lib").rglob("*") if path.is_file())
