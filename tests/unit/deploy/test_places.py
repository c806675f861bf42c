"""R46: one launch file for every place. What is written fits together; what a place cannot do is refused by its key."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from deploy import launch
from deploy.launch_file import NO_IMAGE
from deploy.places import WRITERS, Place, read_plan, write_place
from deploy.places.plan import READ, WRITTEN
from learner.config.load import load_config
from learner.config.schema import RunConfig
from rollout_server.config import ServerConfig, load_server_config
from shared.config.model import ConfigErrors, Section, describe_field, walk_keys
from shared.config.parse import write_yaml
from tests.unit.deploy.manifests import ROOT
from tools.docs import EXAMPLES, examples

DIGEST = "sha256:" + "0" * 64
IMAGES = tuple(f"cluster.{side}_image=registry.example/{side}@{DIGEST}" for side in ("server", "learner"))
STORAGE = {Place.SKYPILOT: ("cluster.storage=s3://mine",)}
CLUSTER, ONE = "deploy/qwen3vl_4b/launch-cluster.yaml", "deploy/qwen3vl_4b/launch.yaml"
LAUNCH = {place: ONE if place == Place.COMPOSE else CLUSTER for place in Place}


@pytest.fixture
def clone(workdir: Path) -> Path:
    """Return a working directory with deploy/ and data/, as the repository's root has them."""
    (workdir / "deploy").symlink_to(ROOT / "deploy")
    return workdir


def write(place: Place, out: Path, *overrides: str, path: str = "") -> dict[str, str]:
    images = IMAGES if place == Place.KUBERNETES else ()
    write_place(place, path or LAUNCH[place], (*images, *STORAGE.get(place, ()), *overrides), out)
    return {file.name: file.read_text() for file in out.iterdir()}


def embedded(place: Place, files: dict[str, str]) -> dict[str, str]:
    """The configurations of both programs by their file names, wherever the place has them."""
    if place == Place.KUBERNETES:
        return {name: text for name, text in yaml.safe_load(files["config.yaml"])["data"].items() if "yaml" in name}
    return {name: text for name, text in files.items() if name.startswith(("server-", "learner"))}


@pytest.mark.parametrize("place", Place)
def test_both_programs_read_what_is_written(place: Place, clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Self-contained, without the files that the launch file names; the learner's servers are those that start."""
    configs = embedded(place, write(place, Path("out")))
    (clone / "deploy").unlink()
    for i in range(4):
        monkeypatch.setenv(f"ADDRESS_{i}", f"10.0.0.{i}")
    monkeypatch.setenv("POD_IP", "10.0.0.9")
    for name, text in configs.items():
        Path(name).write_text(text)
    servers = [load_server_config(name) for name in sorted(configs) if name.startswith("server-")]
    learner = load_config("learner.yaml", world_size=1 if place == Place.COMPOSE else 16)
    asked = [entry.base_url for entry in learner.rollout_matching.vllm.server.servers or ()]
    assert all(server.host == "0.0.0.0" and server.is_public for server in servers)
    assert all("base" not in yaml.safe_load(text) for text in configs.values())
    if place == Place.KUBERNETES:  # pods of one StatefulSet share a file
        assert [server.group_host for server in servers] == ["10.0.0.9"]
        assert asked == [f"http://qwen3vl-4b-server-{i}.qwen3vl-4b-server:8000" for i in range(2)]
    else:
        assert asked == [server.base_url_for(server.group_host) for server in servers]
    assert {server.world_size for server in servers} == {3 if place == Place.COMPOSE else 8}


@pytest.mark.parametrize("place", Place)
def test_secrets_stay_names(place: Place, clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other variables are filled in; where secrets come from, the place says."""
    monkeypatch.setenv("MY_API_KEY", "very secret")
    monkeypatch.setenv("ROLLOUT_SERVER_TOKEN", "the token itself")
    monkeypatch.setenv("MODEL", "some/model")
    own = {"base": "deploy/qwen3vl_4b/learner.yaml", "model": {"path": "${MODEL}"}, "data": {"prompt": "${MY_API_KEY}"}}
    Path("own.yaml").write_text(yaml.safe_dump(own))
    values = yaml.safe_load((ROOT / ONE).read_text())
    write_yaml(Path("launch.yaml"), {**values, "learner": {**values["learner"], "config": "own.yaml"}})
    files = write(place, Path("out"), path="launch.yaml")
    assert not any("very secret" in text or "the token itself" in text for text in files.values())
    learner = yaml.safe_load(embedded(place, files)["learner.yaml"])
    assert (learner["model"]["path"], learner["data"]["prompt"]) == ("some/model", "${MY_API_KEY}")
    if place != Place.SLURM:  # Slurm's jobs inherit the environment
        assert sum(text.count("MY_API_KEY") for text in files.values()) >= 2


@pytest.mark.parametrize(
    ("place", "path", "overrides", "keys"),
    [
        (Place.SLURM, CLUSTER, ["cluster.storage=mine"], ["cluster.storage"]),
        (Place.SLURM, CLUSTER, ["cluster.time_limit=a day"], ["cluster.time_limit"]),
        (Place.SLURM, CLUSTER, ["learner.via=[srun]"], ["learner.via"]),
        (Place.SLURM, CLUSTER, ["cluster.name=Not a name"], ["cluster.name"]),
        (Place.SLURM, CLUSTER, ['cluster.sbatch=["--x\\ntouch /tmp/own"]'], ["cluster.sbatch[0]"]),
        (Place.SLURM, CLUSTER, ['cluster.sbatch=["--x\\rtouch y"]'], ["cluster.sbatch[0]"]),
        (Place.SLURM, CLUSTER, ["cluster.sbatch=[touch]"], ["cluster.sbatch[0]"]),
        (Place.KUBERNETES, CLUSTER, [], ["cluster.server_image", "cluster.learner_image"]),
        (Place.KUBERNETES, CLUSTER, [IMAGES[0], "cluster.learner_image=learner:latest"], ["cluster.learner_image"]),
        (Place.KUBERNETES, CLUSTER, [IMAGES[0], f"cluster.learner_image={NO_IMAGE}"], ["cluster.learner_image"]),
        (Place.SKYPILOT, CLUSTER, [], ["cluster.storage"]),
        (Place.SKYPILOT, CLUSTER, ["cluster.storage=a-folder"], ["cluster.storage"]),
        (Place.COMPOSE, CLUSTER, [], ["learner.nodes", "servers[0].count"]),
        (Place.COMPOSE, ONE, IMAGES[:1], ["cluster.learner_image"]),
    ],
)
def test_what_a_place_cannot_do_is_named(
    place: Place, path: str, overrides: list[str], keys: list[str], clone: Path
) -> None:
    with pytest.raises(ConfigErrors) as raised:
        write_place(place, path, overrides, Path("out"))
    assert [mistake.path for mistake in raised.value.mistakes] == keys
    assert not Path("out").exists()


FOLDERS = [(Place.SKYPILOT, "/tmp/x"), (Place.SKYPILOT, "../x"), (Place.SLURM, "a b"), (Place.SLURM, "-rf")]


@pytest.mark.parametrize(("place", "out"), [*FOLDERS, (Place.COMPOSE, "--out"), (Place.SLURM, "a\nb")])
def test_a_folder_that_the_place_would_not_find(place: Place, out: str, clone: Path) -> None:
    with pytest.raises(ConfigErrors) as raised:
        write_place(place, CLUSTER, STORAGE.get(place, ()), Path(out))
    assert [mistake.path for mistake in raised.value.mistakes] == ["--out"]


@pytest.mark.parametrize("place", list(Place))
@pytest.mark.parametrize("break_", ["\n", "\r", "\u2028", "\x85"])
def test_the_name_of_a_launch_file_is_no_command(place: Place, break_: str, clone: Path) -> None:
    named = ONE if place == Place.COMPOSE else CLUSTER
    path = f"a{break_}touch own: 1 #.yaml"
    Path(path).write_text(Path(named).read_text())
    writer = WRITERS[place]
    plain = writer.files(read_plan(named, STORAGE.get(place, ())), Path("out"))
    for name, text in writer.files(read_plan(path, STORAGE.get(place, ())), Path("out")).items():
        assert len(text.splitlines()) == len(plain[name].splitlines())


def test_a_learner_that_needs_no_servers_is_refused(clone: Path) -> None:
    colocated = {"custom": {"extra": {"rollout_matching": {"vllm": {"mode": "colocate"}}}}}
    Path("own.yaml").write_text(yaml.safe_dump({"base": "deploy/qwen3vl_4b/learner.yaml", **colocated}))
    with pytest.raises(ConfigErrors) as raised:
        read_plan(ONE, ["learner.config=own.yaml"])
    assert [mistake.path for mistake in raised.value.mistakes] == ["learner.config"]


def test_the_command_writes_says_how_to_submit_and_refuses(clone: Path) -> None:
    def said(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(launch.app, ["--config", CLUSTER, *arguments])
        return done.exit_code, done.output

    code, output = said("--to", "slurm", "--out", "jobs/mine")
    assert code == 0, output
    assert "sbatch jobs/mine/run.sh" in output
    assert Path("jobs/mine/run.sh").exists()
    assert said("--to", "slurm")[0] == 2
    assert said("--to", "nowhere", "--out", "x")[0] == 2
    code, output = said("--to", "kubernetes", "--out", "x")
    assert (code, "cluster.server_image" in output, "Traceback" in output) == (2, True, False)
    Path("file").touch()
    code, output = said("--to", "slurm", "--out", "file")
    assert (code, "file cannot be written" in output) == (2, True)


def test_the_shipped_files_are_all_that_is_there() -> None:
    """`tests/unit/docs/test_generated.py` compares their texts."""
    written = set(examples())
    by_hand = {"deploy/slurm/servers.sh"}
    for folder in EXAMPLES:
        there = {str(path.relative_to(ROOT)) for path in (ROOT / folder).iterdir() if path.is_file()}
        assert there - written <= by_hand
        assert {name for name in written if str(Path(name).parent) == folder} <= there


def test_two_kinds_of_servers_have_names_of_their_own(clone: Path) -> None:
    entries: list[dict[str, Any]] = [
        {"config": "deploy/qwen3vl_4b/server-8.yaml", "count": 2},
        {"config": "deploy/qwen3vl_4b/server.yaml"},
    ]
    values = yaml.safe_load((ROOT / CLUSTER).read_text())
    write_yaml(Path("launch.yaml"), {**values, "servers": entries})
    files = write(Place.KUBERNETES, Path("out"), path="launch.yaml")
    objects = list(yaml.safe_load_all(files["server.yaml"]))
    sets = {item["metadata"]["name"]: item["spec"] for item in objects if item["kind"] == "StatefulSet"}
    assert {name: spec["replicas"] for name, spec in sets.items()} == {
        "qwen3vl-4b-server0": 2,
        "qwen3vl-4b-server1": 1,
    }
    learner = yaml.safe_load(embedded(Place.KUBERNETES, files)["learner.yaml"])
    hosts = [entry["base_url"] for entry in learner["custom"]["extra"]["rollout_matching"]["vllm"]["server"]["servers"]]
    assert hosts[-1] == "http://qwen3vl-4b-server1-0.qwen3vl-4b-server1:8000"
    assert len(set(hosts)) == 3


def test_it_was_written_for_this_folder(clone: Path) -> None:
    """Paths of this machine do not get into files for another one."""
    for place in Place:
        files = write(place, Path("out") / place)
        assert not any(os.getcwd() in text or str(ROOT) in text for text in files.values())  # noqa: PTH109
        shutil.rmtree("out")


@pytest.fixture
def of_init(workdir: Path) -> Path:
    """Return a launch file of a run as `init` writes it, of photographs beside the working directory, and elsewhere."""
    elsewhere = workdir / "elsewhere"
    for folder in ("photos/val", "elsewhere/photos", "model"):
        (workdir / folder).mkdir(parents=True)
    (workdir / "model" / "config.json").write_text("{}")
    (workdir / "photos" / "train.json").touch()
    (elsewhere / "photos" / "test.json").touch()
    base = str(ROOT / "deploy/qwen3vl_4b")
    data = {"train": "photos/train.json[:90%]", "val": "photos:val", "test": f"{elsewhere}/photos/test.json"}
    learner = {
        "base": f"{base}/learner.yaml",
        "model": {"path": "./model"},
        "data": {**data, "image_root": None},
        "training": {"output_dir": "mine/run"},
    }
    server = {"base": f"{base}/server.yaml", "model": "./model", "allowed_image_roots": ["photos", str(elsewhere)]}
    launch_file = yaml.safe_load((ROOT / ONE).read_text())
    launch_file["servers"][0]["config"], launch_file["learner"]["config"] = "server.yaml", "run.yaml"
    for name, values in (("run", learner), ("server", server), ("launch", launch_file)):
        write_yaml(Path(f"{name}.yaml"), values)
    return workdir


def test_containers_see_what_the_configurations_name(of_init: Path) -> None:
    """Compose mounts all of it where the programs look for it, and what they write so that they can."""
    compose = yaml.safe_load(write(Place.COMPOSE, Path("out"), *IMAGES, path="launch.yaml")["compose.yaml"])
    binds = [volume for volume in compose["services"]["learner"]["volumes"] if volume["type"] == "bind"]
    elsewhere = str(of_init / "elsewhere")
    assert {bind["target"]: (bind["source"], bind.get("read_only", False)) for bind in binds} == {
        "/app/photos": ("../photos", True),
        "/app/model": ("../model", True),
        "/app/mine": ("../mine", False),
        elsewhere: (elsewhere, True),
        f"{elsewhere}/photos": (f"{elsewhere}/photos", True),
    }


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        ({"data": {"train": "nowhere/train.json"}}, ["data.train"]),
        ({"data": {"train": "gone.json", "val": {"path": "gone:val"}}}, ["data.train", "data.val.path"]),
        ({"model": {"path": "./gone"}}, ["model.path"]),
        ({"model": {"path": "/gone/model"}}, ["model.path"]),
        ({"model": {"path": "some/name-on-the-hub"}}, []),
    ],
)
def test_compose_names_each_path_that_is_not_here(overrides: dict[str, Any], keys: list[str], of_init: Path) -> None:
    write_yaml(Path("other.yaml"), {"base": "run.yaml", **overrides})
    arguments = [*IMAGES, "learner.config=other.yaml"]
    if not keys:
        write(Place.COMPOSE, Path("out"), *arguments, path="launch.yaml")
        return
    with pytest.raises(ConfigErrors) as raised:
        write(Place.COMPOSE, Path("out"), *arguments, path="launch.yaml")
    assert [(mistake.path, mistake.at) for mistake in raised.value.mistakes] == [(key, "other.yaml") for key in keys]


def test_kubernetes_names_each_path_that_pods_do_not_have(of_init: Path) -> None:
    with pytest.raises(ConfigErrors) as raised:
        write(Place.KUBERNETES, Path("out"), path="launch.yaml")
    assert [(mistake.at, mistake.path) for mistake in raised.value.mistakes] == [
        *(("server.yaml", key) for key in ("model", "allowed_image_roots[0]", "allowed_image_roots[1]")),
        *(("run.yaml", key) for key in ("model.path", "data.train", "data.val", "data.test", "training.output_dir")),
    ]


def test_compose_without_images_needs_a_clone(of_init: Path) -> None:
    """It could not build them."""
    with pytest.raises(ConfigErrors) as raised:
        write(Place.COMPOSE, Path("out"), path="launch.yaml")
    assert [mistake.path for mistake in raised.value.mistakes] == ["cluster.server_image"]


@pytest.mark.parametrize("model", [RunConfig, ServerConfig])
def test_every_key_that_is_a_path_is_known(model: type[Section]) -> None:
    """What a key's description calls a file, a folder or annotations is mounted, or it is named here."""
    no_paths = {"format", "prompt", "on_bad_record", "retain", "name", "overwrite", "function", "callbacks"}
    no_paths |= {"served_model_name"}
    for path, field in walk_keys(model):
        said = re.search(r"\b(file|folder|annotations)\b", field.description or "")
        if said and path[-1] not in READ | WRITTEN | no_paths:
            assert "str" not in describe_field(field), f"{path}: {field.description}"
