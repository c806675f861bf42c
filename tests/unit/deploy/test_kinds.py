"""A configuration that is given to the wrong program is called by its name, in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from deploy.launch_file import load_launch_config
from deploy.places.plan import read_plan
from learner.config.load import load_config
from rollout_server.config import load_server_config
from shared.config.model import ConfigErrors, Mistake
from shared.config.parse import write_yaml
from tests.unit.learner.config.examples import minimal

FILES = {
    "server": {"model": "some/model", "port": 8001},
    "learner": minimal(),
    "launcher": {"servers": [{"config": "server.yaml"}], "learner": {"config": "run.yaml"}, "log_dir": "logs"},
}
READERS = {"server": load_server_config, "learner": load_config, "launcher": load_launch_config}


def mistakes_of(read: Callable[[str], object], path: Path) -> tuple[Mistake, ...]:
    with pytest.raises(ConfigErrors) as caught:
        read(str(path))
    return caught.value.mistakes


@pytest.mark.parametrize("wanted", FILES)
@pytest.mark.parametrize("given", FILES)
def test_r16_the_file_of_another_program_is_called_by_its_name(given: str, wanted: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    write_yaml(path, FILES[given])
    if given == wanted:
        assert given == "launcher" or READERS[given](str(path))
        return
    (mistake,) = mistakes_of(READERS[wanted], path)
    assert mistake.path == str(path)
    assert f"a {given}" in mistake.found
    assert f"a {wanted}" in mistake.wanted
    assert f"--config {path}" in mistake.remedy


def test_r16_files_of_a_launch_may_be_swapped(tmp_path: Path) -> None:
    """For this machine and for a cluster."""
    for name in ("server", "learner"):
        write_yaml(tmp_path / f"{name}.yaml", FILES[name])
    server, learner = str(tmp_path / "server.yaml"), str(tmp_path / "learner.yaml")
    path = tmp_path / "launch.yaml"
    write_yaml(path, {"servers": [{"config": learner}], "learner": {"config": server}, "log_dir": "logs"})
    for read in (load_launch_config, read_plan):
        found = {mistake.path for mistake in mistakes_of(read, path)}
        assert found & {server, learner}


@pytest.mark.parametrize("wanted", ["server", "learner"])
def test_a_misplaced_key_is_a_mistake_of_its_own(wanted: str, tmp_path: Path) -> None:
    other = {"server": {"training": {}}, "learner": {"servers": []}}[wanted]
    path = tmp_path / "a.yaml"
    write_yaml(path, FILES[wanted] | other)
    (mistake,) = mistakes_of(READERS[wanted], path)
    assert mistake.path == next(iter(other))
