"""An export has a model card, with the figures of its run."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

from learner.config.inference import InferenceSettings
from learner.config.sections.task import TaskConfig
from learner.detector.card import CARD, notes_of
from shared.config.parse import write_yaml
from tests.unit.learner.config.examples import minimal
from tests.unit.learner.report.fake_run import write_run


def checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    prompt = [{"role": "user", "content": "<image>Find every cell."}]
    settings = InferenceSettings(task=TaskConfig(), messages=prompt, classes=["platelet", "red cell"])
    (folder / "inference.json").write_text(settings.to_json())
    return folder


def checkpoint_of_a_run(tmp_path: Path, model: str) -> Path:
    """Return the checkpoint after step 40 of a run, which improved from step 0 to 40."""
    run = write_run(tmp_path / "runs/cells", num_scenes=6)
    data = {"train": f"{tmp_path}/annotations/train.json", "val": f"{tmp_path}/annotations/val.json"}
    write_yaml(run / "config.yaml", {**minimal(), "model": {"path": model}, "data": data})
    return checkpoint(run / "checkpoint-40")


def test_the_card_has_the_figures_of_the_run(tmp_path: Path) -> None:
    card = notes_of(checkpoint_of_a_run(tmp_path, "owner/base"), "cells")[CARD]
    metadata = yaml.safe_load(card.split("---")[1])
    assert metadata["base_model"] == "owner/base"
    result = metadata["model-index"][0]["results"][0]
    assert result["metrics"][0]["type"] == "f1@0.5"
    row = re.search(r"f1@0\.5 \| (0\.\d+) \[.*?\] \| (0\.\d+) \[", card)
    assert row is not None
    assert 0 < float(row[1]) < float(row[2])
    assert float(row[2]) == pytest.approx(result["metrics"][0]["value"], abs=1e-3)
    wanted = ("annotations/train.json", "rollout matching", "Find every cell.", "red cell", "vllm serve OWNER/cells")
    assert [text for text in (*wanted, "from_pretrained", "rollout-learner predict") if text not in card] == []
    assert str(tmp_path) not in card


def test_a_base_model_on_the_hub_is_named(tmp_path: Path) -> None:
    """Its licence is on its page: nothing is asked over the network. A folder is not named."""
    hub, folder = (notes_of(checkpoint_of_a_run(tmp_path / name, name), "cells")[CARD] for name in ("owner/b", "here"))
    assert "licence" in hub
    assert "base_model" not in folder


def test_without_a_run_the_card_has_no_figures(tmp_path: Path) -> None:
    card = notes_of(checkpoint(tmp_path / "model"), "cells")[CARD]
    assert "f1@0.5" not in card
    assert "Find every cell." in card


def test_what_nobody_can_ask_has_no_card(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    assert notes_of(tmp_path / "model", "cells") == {}


HOSTILE = 'x", "content": [__import__("os").system("touch own")], "y": "'
FENCE = "Find.\n```\n<script>alert(1)</script>\n````\n# Title"


def test_names_are_neither_code_nor_markup(tmp_path: Path) -> None:
    """Whoever copies the program runs it, and the hub renders the page."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    settings = InferenceSettings(
        task=TaskConfig(),
        messages=[{"role": HOSTILE, "content": "be \U0001f600 good"}, {"role": "user", "content": f"<image>{FENCE}"}],
        classes=["<img src=x onerror=alert(1)>", "[a](http://evil.example)", "a\n# b", "a | b"],
    )
    (folder / "inference.json").write_text(settings.to_json())
    card = notes_of(folder, 'm"); import os; ("\n# x; touch own')[CARD]
    blocks = re.findall(r"^(`{3,})(\w+)\n(.*?)\n\1$", card, re.M | re.S)
    assert [kind for _, kind, _ in blocks] == ["text", "python", "bash", "bash"]
    (program,) = [text for _, kind, text in blocks if kind == "python"]
    calls = [ast.unparse(node.func) for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Call)]
    assert not {"__import__", "os.system", "import"} & {*calls}
    (messages,) = [node.value for node in ast.parse(program).body if ast.unparse(node).startswith("messages")]  # type: ignore[attr-defined]
    assert ast.literal_eval(messages.elts[0])["role"] == HOSTILE
    assert ast.literal_eval(messages.elts[0])["content"] == [{"type": "text", "text": "be \U0001f600 good"}]
    prose = re.sub(r"^(`{3,})\w+\n.*?\n\1$", "", card.split("---", 2)[2], flags=re.M | re.S).replace("`<image>`", "")
    assert not re.search(r"(?<!\\)[<|]|(?<!\\)\[a|^# b|^# x", prose, re.M)
    assert all(
        re.fullmatch(r"[\w ./<>:-]+", line) for _, kind, text in blocks if kind == "bash" for line in text.split("\n")
    )
