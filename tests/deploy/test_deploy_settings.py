"""What the deploy files say must exist: environment twins in the services' settings, pins for each dependency."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from executor_service.config import ExecutorConfig
from kvmanager_service.config import ManagerConfig

ROOT = Path(__file__).parents[2]
DEPLOY_FILES = ["docker-compose.yml", "deploy/Dockerfile.kvmanager", "deploy/Dockerfile.executor"]
SETTINGS = {"KVPLANE_MANAGER_": ManagerConfig, "KVPLANE_EXECUTOR_": ExecutorConfig}


@pytest.mark.parametrize("name", DEPLOY_FILES)
def test_deploy_file_service_variables_are_settings_of_the_service(name):
    given = re.findall(r"^ +(KVPLANE_(?:MANAGER|EXECUTOR)_)(\w+)[:=]", (ROOT / name).read_text(), re.MULTILINE)
    assert given, f"{name} sets no service variable: has its form changed?"
    unknown = [prefix + field for prefix, field in given if field.lower() not in SETTINGS[prefix].model_fields]
    assert unknown == []


@pytest.mark.parametrize(
    ("name", "settings"),
    [("deploy/Dockerfile.kvmanager", ManagerConfig), ("deploy/Dockerfile.executor", ExecutorConfig)],
)
def test_dockerfile_port_is_the_services_default(name, settings):
    port = str(settings.model_fields["port"].default)
    text = (ROOT / name).read_text()
    assert re.findall(r"^EXPOSE (\d+)$|_PORT=(\d+)$", text, re.MULTILINE) == [("", port), (port, "")]


def test_manager_image_is_made_of_what_its_build_stage_compiles():
    """What can be said without a container engine; `deploy/test_compose.sh` asks the running manager."""
    text = re.sub(r"\\\n\s*", "", (ROOT / "deploy/Dockerfile.kvmanager").read_text())  # one line an instruction
    build, final = (stage.splitlines() for stage in text.split("\nFROM ")[1:])
    (install,) = [line for line in build if line.endswith(" --no-deps .")]
    assert "HATCH_BUILD_HOOK_ENABLE_CUSTOM=1 /opt/kvplane/bin/python -m pip " in install
    assert "COPY --from=build /opt/kvplane /opt/kvplane" in final
    hooks = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]
    assert hooks["custom"]["path"] == "hatch_build.py"
    assert "!hatch_build.py" in (ROOT / ".dockerignore").read_text().splitlines()


def test_constraints_pin_every_dependency_within_its_range():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    for requirement in map(Requirement, wanted):
        name = canonicalize_name(requirement.name)
        if name != "kvplane":
            assert name in pins, f"{name} is not pinned: run `make constraints`"
            assert requirement.specifier.contains(pins[name]), f"{requirement} does not admit {pins[name]}"
