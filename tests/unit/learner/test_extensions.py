"""R38: parts of the user's own, by import path: those of docs/extending.md run as printed, wrong paths are told."""

from __future__ import annotations

import json
import pickle
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from learner.config.load import config_of
from learner.config.schema import RunConfig
from learner.data.check import load_unchecked
from learner.doctor.check import run_check
from learner.extensions import check_extensions, reward_functions
from learner.policy.parallel import Ranks
from shared.config.model import ConfigErrors, Mistake
from shared.config.parse import dump_yaml
from shared.errors import DataError, LossError, RewardError
from tests.unit.learner.config.examples import changed, minimal
from tests.unit.learner.data.fakes import draw
from tests.unit.learner.trainer_world import Seen, make_config, trainer

DOCS = Path(__file__).parents[3] / "docs" / "extending.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCS.read_text(), re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Enter the working directory of a user who has written `my_parts.py` from the page."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_parts.py").write_text("\n".join(blocks("python")))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("my_")]:
        del sys.modules[name]


def settings(changes: dict[str, Any]) -> RunConfig:
    return config_of(changed(minimal(), changes))


def mistakes(changes: dict[str, Any]) -> list[Mistake]:
    with pytest.raises(ConfigErrors) as caught:
        check_extensions(settings(changes))
    return list(caught.value.mistakes)


# ---- the page ------------------------------------------------------------------------------------------------------


def test_every_yaml_block_of_the_page_is_accepted(folder: Path) -> None:
    for block in blocks("yaml"):
        data = minimal()
        for section, values in yaml.safe_load(block).items():
            data.setdefault(section, {}).update(values)
        check_extensions(config_of(data))


def run_hf(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> Seen:
    """Rollouts of the model itself, two steps, and an evaluation."""
    base = make_config(model, folder, max_steps=2, effective_batch_size=2, eval_on_end=True).model_dump()
    base["custom"]["trainer_variant"] = "rollout_matching_sft"
    base["custom"]["extra"]["rollout_matching"] = {
        "rollout_backend": "hf",
        "decode_batch_size": 4,
        "decoding": {"temperature": 1.0, "max_new_tokens": 12},
    }
    with trainer(config_of(changed(base, changes)), Ranks(), monkeypatch, seen := Seen()) as made:
        made.run()
    return seen


def events(folder: Path, event: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == event]


def test_rewards_and_a_loss_of_the_users_own(
    tiny_text: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each step and each evaluation reports their means, and the focal loss is what is learned."""
    rewards = {"reward.functions": ["my_parts:found", "my_parts:brevity"]}
    run_hf(tiny_text, folder, monkeypatch, {**rewards, "loss.function": "my_parts:focal"})
    for step in events(folder, "step"):
        found, brevity = step["metrics"]["reward/found"], step["metrics"]["reward/brevity"]
        assert step["metrics"]["reward"] == pytest.approx(found + brevity)
        assert 0.8 <= brevity <= 1.0, "the mean over rollouts of at most 12 tokens, not the sum"
        assert found == step["metrics"]["matched"] == 0.0
    (evaluation,) = events(folder, "eval")
    assert evaluation["metrics"]["reward"] == pytest.approx(evaluation["metrics"]["reward/brevity"])
    assert re.search(r"step 2/2 .* reward 0\.\d", capsys.readouterr().out)
    focal = [step["loss"] for step in events(folder, "step")]
    (folder / "run" / "metrics.jsonl").unlink()
    run_hf(tiny_text, folder, monkeypatch, rewards)
    plain = [step["loss"] for step in events(folder, "step")]
    assert 0 < focal[0] < plain[0], "a focal term is at most the token's cross-entropy"


def test_a_task_and_a_reader_of_the_users_own(tiny_text: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"words": ["cat", "dog"]}, {"words": ["seven"]}, {"words": []}, {"words": ["two"]}]
    (folder / "captions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"data.train": "captions.jsonl", "data.test": "captions.jsonl"}
    seen = run_hf(tiny_text, folder, monkeypatch, {**data, "task.type": "my_parts:CaptionTask"})
    assert len(seen.learned) == 4
    assert all("missed" in step["metrics"] for step in events(folder, "step"))
    assert 0 <= events(folder, "eval")[0]["metrics"]["recall"] <= 1
    (scene, *_) = map(json.loads, (folder / "run/eval/step_000002.jsonl").read_text().splitlines())
    assert (scene["id"], scene["words"]) == ("1", ["cat", "dog"])


def test_records_of_a_reader_are_checked_as_those_of_built_in_formats(folder: Path) -> None:
    draw(folder, "1.png")  # 200 x 100 pixels
    train = folder / "train.csv"
    keys = {"data.train": str(train), "data.format": "my_parts:boxes_of_csv"}
    train.write_text("1.png,cat,0,0,100,50,dog,20,50,200,100\n1.png\n")
    first, second = load_unchecked(settings(keys), str(train))
    assert [(obj.desc, obj.bins) for obj in first.objects] == [("cat", (0, 0, 500, 500)), ("dog", (100, 500, 999, 999))]
    assert (second.objects, first.images) == ((), (str(folder / "1.png"),))
    train.write_text("1.png,cat,0,0,900,50\nnone.png\n")
    with pytest.raises(DataError, match="line 1") as caught:
        load_unchecked(settings(keys), str(train))
    assert "line 2" in str(caught.value)
    dropped = load_unchecked(settings({**keys, "data.on_bad_record": "drop"}), str(train))
    assert [sample.objects for sample in dropped] == [()]


# ---- what is wrong -------------------------------------------------------------------------------------------------

PARTS = """
import nowhere_to_be_found
"""
OTHERS = """
number = 3
def of_nothing(): ...
class Half:
    def parse(self, rollout): ...
def reward(answer): return 1.0
def reads_numbers(path, data): return [1]
def breaks(path, data): raise RuntimeError("no such table")
"""


@pytest.mark.parametrize(
    ("key", "path", "found", "remedy"),
    [
        ("reward.functions", "my_others", "no colon", "module:name"),
        ("reward.functions", "my_other:reward", "no module my_other", "my_other"),
        ("reward.functions", "my_others:rewart", "no rewart", "reward"),
        ("reward.functions", "my_broken:reward", "nowhere_to_be_found", "module"),
        ("reward.functions", "my_others:number", "a int", "extending.md"),
        ("reward.functions", "my_others:of_nothing", "a function of ()", "extending.md"),
        ("loss.function", "my_others:reward", "a function of (answer)", "extending.md"),
        ("data.format", "my_others:reward", "a function of (answer)", "extending.md"),
        ("reward.functions", "parts/nope.py:reward", "no file parts/nope.py", "working directory"),
        ("task.type", "my_others:reward", "not a class", "extending.md"),
        ("task.type", "my_others:Half", "ground_truth", "extending.md"),
        ("task.type", "detecton", "detecton", "detection"),
    ],
)
def test_a_wrong_path_is_told_with_key_value_and_remedy(
    folder: Path, key: str, path: str, found: str, remedy: str
) -> None:
    (folder / "my_broken.py").write_text(PARTS)
    (folder / "my_others.py").write_text(OTHERS)
    (mistake,) = mistakes({key: [path] if key == "reward.functions" else path})
    assert mistake.path.startswith(key)
    assert path in mistake.found
    assert found in mistake.found
    assert mistake.wanted
    assert remedy in mistake.remedy


def test_a_part_is_named_by_its_file_whatever_the_file_is_called(folder: Path) -> None:
    """A user's `shared/my_rewards.py` could not be found, because this project has a package of that name."""
    (folder / "shared").mkdir()
    (folder / "shared" / "my_rewards.py").write_text(OTHERS)
    config = config_of(changed(minimal(), {"reward.functions": ["shared/my_rewards.py:reward"]}))
    check_extensions(config)
    score = reward_functions(config)["reward"]
    assert score(None) == 1.0  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(score)) is score, "ranks send each other objects of the user's classes"


def test_check_tells_all_of_them_and_starts_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {"task.type": "nope", "reward.functions": ["a:b", "my_parts:found"], "loss.function": "c:d"}
    (folder / "run.yaml").write_text(dump_yaml(changed(minimal(), wrong)))
    assert run_check("run.yaml") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split(": ")[0] for line in err.splitlines()] == ["task.type", "reward.functions[0]", "loss.function"]


def test_options_without_a_reader_are_refused() -> None:
    (mistake,) = mistakes({"task.options": {"words": 3}})
    assert (mistake.path, "words" in mistake.found) == ("task.options", True)


def test_two_rewards_of_one_name_are_refused(folder: Path) -> None:
    (folder / "my_others.py").write_text("def found(answer): return 1.0\n")
    (mistake,) = mistakes({"reward.functions": ["my_parts:found", "my_others:found"]})
    assert mistake.path == "reward.functions[1]"


@pytest.mark.parametrize(("reader", "found"), [("reads_numbers", "int"), ("breaks", "no such table")])
def test_a_reader_that_fails_is_a_data_error(folder: Path, reader: str, found: str) -> None:
    (folder / "my_others.py").write_text(OTHERS)
    config = settings({"data.format": f"my_others:{reader}", "data.train": "some.csv"})
    with pytest.raises(DataError, match=r"data\.format") as caught:
        load_unchecked(config, "some.csv")
    assert found in caught.value.found


FAILING = """
def infinite(answer): return float("inf")
def broken(answer): return {}[answer.text]
def not_a_tensor(logprobs, weights): return 1.0
def per_token(logprobs, weights): return -logprobs
"""


@pytest.mark.parametrize(
    ("key", "name", "error", "found"),
    [
        ("reward.functions", "infinite", RewardError, "inf"),
        ("reward.functions", "broken", RewardError, "my_failing.py:3"),
        ("loss.function", "not_a_tensor", LossError, "float"),
        ("loss.function", "per_token", LossError, "shape"),
    ],
)
def test_a_function_that_fails_ends_the_run_with_its_name(
    tiny_text: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, key: str, name: str, error: type[Any], found: str
) -> None:
    (folder / "my_failing.py").write_text(FAILING)
    path = f"my_failing:{name}"
    with pytest.raises(error) as caught:
        run_hf(tiny_text, folder, monkeypatch, {key: [path] if key == "reward.functions" else path})
    assert found in caught.value.found
