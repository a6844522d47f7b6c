import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint

import pytest

from executor_service.backends import registry
from executor_service.backends.base import BackendError
from executor_service.backends.sim_backend import SimBackend, SimBackendConfig
from executor_service.config import ExecutorConfig


@dataclass(frozen=True)
class OtherConfig:
    block_size: int
    own_option: str = "default"


class OtherBackend(SimBackend):
    def __init__(self, config: OtherConfig) -> None:
        super().__init__(SimBackendConfig(block_size=config.block_size))
        self.own_option = config.own_option


class NoBackend:
    def __init__(self, config: OtherConfig) -> None:
        self.config = config


class TwoArguments(SimBackend):
    def __init__(self, config: OtherConfig, more: int) -> None:
        super().__init__(SimBackendConfig(block_size=config.block_size + more))


def _registered(monkeypatch, value):
    point = EntryPoint("other", value, registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    return ExecutorConfig(backend="other", block_size=7)


def test_create_backend_sim_gets_the_configuration():
    info = registry.create_backend(ExecutorConfig(backend="sim", block_size=8, sim_vocab_size=99)).load()
    assert (info.block_size, info.vocab_size, info.model_name) == (8, 99, "sim")


def test_create_backend_entry_point_gets_fields_it_names(monkeypatch):
    backend = registry.create_backend(_registered(monkeypatch, f"{__name__}:OtherBackend"))
    assert isinstance(backend, OtherBackend)
    assert backend.load().block_size == 7
    assert backend.own_option == "default"


def test_create_backend_without_a_choice_of_kv_types_refuses_any_but_auto():
    plain = ExecutorConfig(backend="sim", kv_cache_dtype="auto")
    assert registry.create_backend(plain).load().kv_cache_dtype == "uint64"
    with pytest.raises(
        BackendError, match=r"'sim' has one type .*: expected --kv-cache-dtype auto, got 'fp8'"
    ) as caught:
        registry.create_backend(ExecutorConfig(backend="sim", kv_cache_dtype="fp8"))
    assert caught.value.reason == "BAD_KV_CACHE_DTYPE"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (f"{__name__}:NoBackend", "NOT_A_BACKEND"),
        (f"{__name__}:TwoArguments", "NOT_A_BACKEND"),
        ("no.such.module:Backend", "BACKEND_NOT_INSTALLED"),
    ],
)
def test_create_backend_unusable_entry_point_says_why(monkeypatch, value, reason):
    config = _registered(monkeypatch, value)
    with pytest.raises(BackendError) as refused:
        registry.create_backend(config)
    assert refused.value.reason == reason


def test_create_backend_place_of_a_class_needs_no_entry_point():
    backend = registry.create_backend(ExecutorConfig(backend=f"{__name__}:OtherBackend", block_size=7))
    assert isinstance(backend, OtherBackend)
    assert backend.load().block_size == 7


@pytest.mark.parametrize("place", [f"{__name__}:NoSuchClass", "no.such.module:Backend"])
def test_create_backend_place_without_a_class_says_why(place):
    with pytest.raises(BackendError, match="cannot be imported") as refused:
        registry.create_backend(ExecutorConfig(backend=place))
    assert refused.value.reason == "BACKEND_NOT_INSTALLED"


def test_create_backend_unknown_name_lists_the_known():
    with pytest.raises(BackendError, match=r"expected one of \['sim', 'torch'") as refused:
        registry.create_backend(ExecutorConfig(backend="abacus"))
    assert refused.value.reason == "UNKNOWN_BACKEND"


def test_sim_executor_imports_no_torch():
    code = (
        "import sys; import executor_service.__main__; from executor_service.config import ExecutorConfig; "
        "from executor_service.backends.registry import create_backend; "
        "create_backend(ExecutorConfig(backend='sim')).load(); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'triton')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
