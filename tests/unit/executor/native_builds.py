"""The compiled kernels for tests: from the cache of the user, or compiled into it."""

from __future__ import annotations

import functools

import pytest

from executor_service.gguf_conversion import default_cache_dir
from executor_service.native.library import NativeBuildError, native_library
from executor_service.native.ops import NativeOps


@functools.cache
def native_ops() -> NativeOps:
    """The kernels; skips the test where there is no compiler, and fails where one does not take them."""
    try:
        return NativeOps(native_library(default_cache_dir()))
    except NativeBuildError as error:
        if "got none" not in str(error):
            raise
        pytest.skip(str(error))
