"""The interface that gloo uses between nodes is the one that leads to the other node."""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from learner.__main__ import _rank_config
from learner.run.environment import (
    COMPILED_VARIABLE,
    GLOO_VARIABLE,
    TRITON_VARIABLE,
    TURN_S,
    collect_as_usual,
    gloo_interface,
    keep_compiled,
)
from shared.config.parse import write_yaml
from shared.private import is_private
from tests.namespaces import Node, network
from tests.unit.learner.config.examples import minimal

ROOT = Path(__file__).parents[4]
CODE = "import json, sys; from learner.run.environment import *; print(gloo_interface(json.loads(sys.argv[1])))"


def seen_from(node: Node, host: str) -> str:
    environment = json.dumps({"MASTER_ADDR": host, "MASTER_PORT": "29400"})
    command = [*node.enter, sys.executable, "-c", CODE, environment]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60.0, check=True).stdout.strip()


def test_nodes_of_one_network_use_the_interface_between_them() -> None:
    """R24: also the node that is the meeting place itself, whose own name may mean its loopback."""
    with network(["first", "second"]) as nodes:
        found = {name: seen_from(node, nodes["first"].address) for name, node in nodes.items()}
        assert found == {"first": "eth0", "second": "eth0"}
        assert seen_from(nodes["second"], "10.0.0.1") == "None", "there is no way there"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_ranks_of_one_machine_are_left_to_torch(host: str) -> None:
    assert gloo_interface({"MASTER_ADDR": host, "MASTER_PORT": "29400"}) is None


def test_a_process_of_its_own_needs_no_interface() -> None:
    assert gloo_interface({}) is None


def test_the_users_choice_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "learner.run.environment._address_towards", lambda host, port: pytest.fail("nothing is to be chosen")
    )
    assert gloo_interface({"MASTER_ADDR": "node", "MASTER_PORT": "1", GLOO_VARIABLE: "eth7"}) is None


def test_a_name_that_nobody_knows_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: object, **kwargs: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert gloo_interface({"MASTER_ADDR": "nobody", "MASTER_PORT": "1"}) is None


def test_what_torch_compiles_is_kept_where_caches_are(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path / "caches")}
    keep_compiled(environment)
    folder = Path(environment[COMPILED_VARIABLE])
    assert folder.is_dir()
    assert tmp_path / "caches" in folder.parents
    assert folder in Path(environment[TRITON_VARIABLE]).parents, "wherever torch leaves Triton's default or not"


def test_a_folder_of_the_user_stays_and_for_one_that_cannot_be_made_there_is_a_private_one(tmp_path: Path) -> None:
    chosen = {"XDG_CACHE_HOME": str(tmp_path), COMPILED_VARIABLE: "/mine", TRITON_VARIABLE: "/kernels"}
    keep_compiled(chosen)
    assert (chosen[COMPILED_VARIABLE], chosen[TRITON_VARIABLE]) == ("/mine", "/kernels")
    (tmp_path / "file").touch()
    impossible = {"XDG_CACHE_HOME": str(tmp_path / "file")}
    keep_compiled(impossible)
    assert is_private(Path(impossible[COMPILED_VARIABLE])), "torch's own is one that others can make first"
    assert not Path(impossible[COMPILED_VARIABLE]).is_relative_to(tmp_path)


def test_a_run_shortens_the_turns_of_its_threads(tmp_path: Path) -> None:
    """The thread that learns beside rollouts waits for the interpreter's lock by turns (D9)."""
    path = tmp_path / "run.yaml"
    write_yaml(path, minimal())
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)  # the default; a test that began a run in this process may have changed it
    try:
        _rank_config(str(path), ())
        assert sys.getswitchinterval() == pytest.approx(TURN_S)
    finally:
        sys.setswitchinterval(before)


def test_collections_are_rare_while_a_run_starts(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    write_yaml(path, minimal())
    collect_as_usual()
    usually, turn = gc.get_threshold(), sys.getswitchinterval()
    try:
        _rank_config(str(path), ())
        assert all(rare > usual for rare, usual in zip(gc.get_threshold(), usually, strict=True))
        assert gc.isenabled()
        collect_as_usual()
        assert gc.get_threshold() == usually
    finally:
        sys.setswitchinterval(turn)


def test_what_is_kept_for_each_shape_of_an_image_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only this variable bounds it, and the user's own value stays."""
    path = tmp_path / "run.yaml"
    write_yaml(path, minimal())
    monkeypatch.setattr(os, "environ", {"LRU_CACHE_CAPACITY": "7"})
    before = sys.getswitchinterval()
    try:
        _rank_config(str(path), ())
    finally:
        sys.setswitchinterval(before)
    assert os.environ["LRU_CACHE_CAPACITY"] == "7"
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "32"
