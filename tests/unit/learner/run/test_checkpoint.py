"""Checkpoints resume exactly, load anywhere, and never leave half a folder behind."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import pickle
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import peft
import pytest
import torch
from safetensors.torch import load_file, save
from transformers import AutoModelForImageTextToText, AutoProcessor

from learner.__main__ import main
from learner.config.sections.model import LoraConfig
from learner.config.sections.training import TrainingConfig
from learner.policy import files
from learner.policy.files import export_model, save_model
from learner.policy.load import Policy
from learner.policy.optim import Optimizer
from learner.policy.parallel import Ranks
from learner.run import checkpoint
from learner.run.checkpoint import OPTIMIZER, RNG, Cadence, CheckpointStore, TrainerState
from learner.run.files import write_atomically
from learner.wiring.build import export
from shared.errors import CheckpointError, ConfigError, OutputError
from tests.full_disk import no_file_larger_than
from tests.tiers import slow
from tests.unit.learner.policy.rows import image, policy_of, row, sample, segment
from tests.unit.learner.trainer_world import Meeting, ThreadRanks

T = TypeVar("T")
LORA = LoraConfig(type="dora", r=4, dropout=0.2)  # dropout: the generators must be restored too


def start(path: Path, lora: LoraConfig | None = None) -> tuple[Policy, Optimizer]:
    policy = policy_of(path, lora=lora)
    settings = TrainingConfig(output_dir="out", learning_rate=1e-2, weight_decay=0.1, warmup_steps=1)
    return policy, Optimizer(policy.trainable, settings, total_steps=4)


def train(policy: Policy, optimizer: Optimizer, state: TrainerState, steps: int) -> TrainerState:
    prompt = policy.encoder.encode(sample([image(64, 64)]))
    for _ in range(steps):
        result = policy.backward(row(segment(prompt, 10, seed=state.global_step)))
        policy.reduce_gradients(Ranks(), weight_sum=result.weight_sum)
        optimizer.update(state.global_step)
        state = state.after_step()
    return state


@pytest.mark.parametrize("lora", [slow(None), LORA])
def test_resume_gives_the_uninterrupted_run_bit_for_bit(
    tiny_vlm: Path, tmp_path: Path, lora: LoraConfig | None
) -> None:
    store = CheckpointStore(root=tmp_path, ranks=Ranks())
    policy, optimizer = start(tiny_vlm, lora)
    state = train(policy, optimizer, TrainerState(ver=3, cursor={"epoch": 1}), 2)
    path = store.save(policy, optimizer, state)
    train(policy, optimizer, state, 2)

    resumed, resumed_optimizer = start(tiny_vlm, lora)
    torch.manual_seed(1234)
    found = store.load("latest", resumed, resumed_optimizer)
    assert found == TrainerState(global_step=2, ver=3, cursor={"epoch": 1})
    assert path.name == "checkpoint-2"
    assert train(resumed, resumed_optimizer, found, 2).global_step == 4
    for name, tensor in policy.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], tensor), name
    for name, tensor in optimizer.state().items():
        assert torch.equal(resumed_optimizer.state()[name], tensor), name


def test_a_checkpoint_is_a_hugging_face_folder(tiny_vlm: Path, tmp_path: Path) -> None:
    policy, optimizer = start(tiny_vlm)
    path = CheckpointStore(root=tmp_path, ranks=Ranks()).save(
        policy, optimizer, train(policy, optimizer, TrainerState(), 1)
    )
    model = AutoModelForImageTextToText.from_pretrained(path, dtype="auto")
    for name, tensor in policy.model.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert AutoProcessor.from_pretrained(path).chat_template == policy.encoder.processor.chat_template  # type: ignore[union-attr]


def test_an_adapter_is_saved_as_peft_does(tiny_vlm: Path, tmp_path: Path) -> None:
    policy, optimizer = start(tiny_vlm, LORA)
    train(policy, optimizer, TrainerState(), 1)
    save_model(policy, tmp_path)
    base = AutoModelForImageTextToText.from_pretrained(tiny_vlm, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path)
    for name, tensor in policy.adapter.state_dict().items():  # type: ignore[union-attr]
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_an_adapter_checkpoint_loads_as_a_model_path(tiny_vlm: Path, tmp_path: Path) -> None:
    """It can be trained on, or exported."""
    policy, optimizer = start(tiny_vlm, LORA)
    path = CheckpointStore(root=tmp_path, ranks=Ranks()).save(
        policy, optimizer, train(policy, optimizer, TrainerState(), 2)
    )
    loaded = policy_of(path)
    assert [name for name, _ in loaded.trainable] == [name for name, _ in policy.trainable]
    for (name, tensor), (_, expected) in zip(loaded.named_weights(), policy.named_weights(), strict=True):
        assert torch.equal(tensor, expected), name
    with pytest.raises(ConfigError, match="already holds an adapter"):
        policy_of(path, lora=LORA)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "dora"])
def test_an_export_is_the_merged_model_in_the_wanted_dtype(
    tiny_vlm: Path, tmp_path: Path, lora: LoraConfig | None
) -> None:
    policy, optimizer = start(tiny_vlm, lora)
    train(policy, optimizer, TrainerState(), 1)
    export_model(policy, tmp_path, dtype=torch.bfloat16)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.get_input_embeddings().weight
    stored = model.state_dict()
    for name, tensor in policy.named_weights(torch.bfloat16):
        assert torch.equal(stored[name], tensor), name
    assert AutoProcessor.from_pretrained(tmp_path).tokenizer.eos_token == policy.tokenizer.eos_token


@pytest.mark.parametrize("name", ["nothing", "a/b/c", "run"])
def test_an_export_of_no_model_is_refused_at_once(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """No hub is asked for it. A folder that is only called like a checkpoint is none."""
    (tmp_path / "run/checkpoint-7").mkdir(parents=True)
    assert main(["export", "--model", str(tmp_path / name), "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert (str(tmp_path / name) in told, "--model" in told) == (True, True)
    assert not (tmp_path / "out").exists()


def test_an_export_takes_a_run_as_other_commands_do(
    tiny_vlm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its newest checkpoint, or its best one; and it says which."""
    for step in (3, 20):
        shutil.copytree(tiny_vlm, tmp_path / f"run/checkpoint-{step}")
    (tmp_path / "run/checkpoint-99").mkdir()
    arguments = ["export", "--model", str(tmp_path / "run"), "--dtype", "float32", "--out"]
    assert main([*arguments, str(tmp_path / "newest")]) == 0
    assert "checkpoint-20" in capsys.readouterr().out
    (tmp_path / "run/best").symlink_to("checkpoint-3")
    assert main([*arguments, str(tmp_path / "best")]) == 0
    assert "checkpoint-3" in capsys.readouterr().out
    assert (tmp_path / "best/config.json").is_file()


@pytest.mark.parametrize("name", ["full", "file"])
def test_an_export_goes_into_no_folder_with_files(tmp_path: Path, name: str) -> None:
    checkpoint = tmp_path / "checkpoint-7"
    for folder in (checkpoint, tmp_path / "full"):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(OutputError) as caught:
        export(checkpoint, tmp_path / name, "float32", {})
    assert str(tmp_path / name) in caught.value.found
    assert (tmp_path / "full/config.json").read_text() == "{}"


def test_rotation_keeps_the_newest(tiny_vlm: Path, tmp_path: Path) -> None:
    policy, optimizer = start(tiny_vlm)
    store = CheckpointStore(root=tmp_path, ranks=Ranks(), save_total_limit=2)
    (tmp_path / "checkpoint-99").mkdir()  # no manifest: not a checkpoint of ours
    for step in (8, 9, 10, 11):
        store.save(policy, optimizer, TrainerState(global_step=step))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-11", "checkpoint-99"]
    assert store.latest() == tmp_path / "checkpoint-11"


def _damage(path: Path, how: str) -> None:
    weights = path / "model.safetensors"
    match how:
        case "truncated":
            os.truncate(weights, weights.stat().st_size // 2)
        case "changed":
            content = bytearray(weights.read_bytes())
            content[-1] ^= 1
            weights.write_bytes(content)
        case "missing":
            (path / OPTIMIZER).unlink()
        case "manifest":
            (path / "manifest.json").write_text('{"model.safe')


@pytest.mark.parametrize("how", ["truncated", "changed", "missing", "manifest"])
def test_a_damaged_checkpoint_is_refused_with_a_remedy(tiny_vlm: Path, tmp_path: Path, how: str) -> None:
    policy, optimizer = start(tiny_vlm)
    store = CheckpointStore(root=tmp_path, ranks=Ranks())
    _damage(store.save(policy, optimizer, TrainerState(global_step=1)), how)
    with pytest.raises(CheckpointError, match=r"damaged.*checkpoint-1.*remove the folder"):
        store.load("latest", policy, optimizer)


def rewrite(path: Path, name: str, content: bytes | str) -> None:
    """Change a file and the manifest with it, as no accident does."""
    (path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    if name != "manifest.json":
        manifest = json.loads((path / "manifest.json").read_text())
        manifest[name] = checkpoint._entry(path / name)
        (path / "manifest.json").write_text(json.dumps(manifest))


DAMAGES: list[tuple[str, bytes | str]] = [
    *(("manifest.json", text) for text in ("[]", "{}", "null", "3", '{"a": 1}', "\xff")),
    *(("trainer_state.json", text) for text in ("[]", "{}", "null", "", "x" * 10)),
    ("trainer_state.json", '{"global_step": "1", "ver": 0, "cursor": {}, "config_digest": ""}'),
    ("trainer_state.json", '{"global_step": -1, "ver": 0, "cursor": {}, "config_digest": ""}'),
    ("trainer_state.json", '{"global_step": 1, "ver": 0, "cursor": [], "config_digest": ""}'),
    *((name, text) for name in (OPTIMIZER, RNG) for text in ("", "[]", "{}", "x" * 99)),
    (OPTIMIZER, save({"a.exp_avg": torch.zeros(1)})),
    (RNG, save({"0.cpu": torch.zeros(3)})),
    (RNG, save({"0.cpu": torch.zeros(3, dtype=torch.uint8)})),
    ("model.safetensors", ""),
    ("model.safetensors", "x" * 99),
]


def test_whatever_was_changed_is_a_checkpoint_error(tiny_vlm: Path, tmp_path: Path) -> None:
    """A manifest that agrees with the change does not help: a list, `{}`, other shapes, no file at all. Policy
    and optimizer stay."""
    policy, optimizer = start(tiny_vlm)
    train(policy, optimizer, TrainerState(), 1)
    store = CheckpointStore(root=tmp_path / "run", ranks=Ranks())
    whole = store.save(policy, optimizer, TrainerState(global_step=1))
    moments = load_file(whole / OPTIMIZER)
    first = next(iter(moments))
    shapes = [{**moments, first: torch.zeros(2, 2)}, {name: t for name, t in moments.items() if name != first}]
    for i, (name, content) in enumerate([*DAMAGES, *((OPTIMIZER, save(one)) for one in shapes)]):
        path = tmp_path / f"damaged-{i}"
        shutil.copytree(whole, path)
        rewrite(path, name, content)
        with pytest.raises(CheckpointError) as caught:
            store.load(str(path), policy, optimizer)
        assert caught.value.remedy, (name, content)
    for name, tensor in optimizer.state().items():
        assert torch.equal(moments[name], tensor)


def test_a_pickle_in_a_checkpoint_is_not_read(tiny_vlm: Path, tmp_path: Path) -> None:
    """CVE-2025-32434, CVE-2026-24747: `torch.load` ran code of a checkpoint, with `weights_only` too."""

    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "ran"),)

    policy, optimizer = start(tiny_vlm)
    store = CheckpointStore(root=tmp_path, ranks=Ranks())
    path = store.save(policy, optimizer, TrainerState(global_step=1))
    for name in (OPTIMIZER, "model.safetensors"):
        rewrite(path, name, pickle.dumps(Bomb()))
        with pytest.raises(CheckpointError):
            store.load("latest", policy, optimizer)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    rewrite(path, OPTIMIZER, save({}))
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["model.safetensors"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError):
        store.load("latest", policy, optimizer)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "dora"])
def test_every_file_is_in_the_manifest_with_its_digest(tiny_vlm: Path, tmp_path: Path, lora: LoraConfig | None) -> None:
    policy, optimizer = start(tiny_vlm, lora)
    path = CheckpointStore(root=tmp_path, ranks=Ranks()).save(policy, optimizer, TrainerState(global_step=1))
    manifest = json.loads((path / "manifest.json").read_text())
    files = {str(file.relative_to(path)): file for file in path.rglob("*") if file.is_file()}
    assert manifest.keys() == files.keys() - {"manifest.json"}
    for name, entry in manifest.items():
        content = files[name].read_bytes()
        assert entry == {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def test_a_full_disk_costs_no_checkpoint(tiny_vlm: Path, tmp_path: Path) -> None:
    """Wherever it becomes full: the error names the folder, the one before is whole, and no part of the new one takes
    space. The largest file is the tokenizer's, whose library raises errors of its own."""
    policy, optimizer = start(tiny_vlm, LORA)
    store = CheckpointStore(root=tmp_path, ranks=Ranks())
    first = store.save(policy, optimizer, TrainerState(global_step=1))
    sizes = sorted(file.stat().st_size for file in first.iterdir())
    for limit in (0, sizes[len(sizes) // 2] - 1, sizes[-1] - 1):
        with no_file_larger_than(limit), pytest.raises(CheckpointError) as caught:
            store.save(policy, optimizer, TrainerState(global_step=2))
        assert "checkpoint-2" in caught.value.found
        assert [file.name for file in tmp_path.iterdir()] == ["checkpoint-1"]
    checkpoint.verify(first)
    store.save(policy, optimizer, TrainerState(global_step=2))


def test_a_failed_save_leaves_the_earlier_one_and_no_debris(
    tiny_vlm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, optimizer = start(tiny_vlm)
    store = CheckpointStore(root=tmp_path, ranks=Ranks())
    first = store.save(policy, optimizer, TrainerState(global_step=1))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_entry", full)
        with pytest.raises(CheckpointError, match="No space left"):
            store.save(policy, optimizer, TrainerState(global_step=2))
    assert store.latest() == first
    store.save(policy, optimizer, TrainerState(global_step=3))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-3"]


def test_nothing_to_resume_from_is_an_error(tiny_vlm: Path, tmp_path: Path) -> None:
    policy, optimizer = start(tiny_vlm)
    with pytest.raises(CheckpointError, match="resume_from_checkpoint"):
        CheckpointStore(root=tmp_path, ranks=Ranks()).load("latest", policy, optimizer)


def test_weights_of_another_model_are_refused(tiny_vlm: Path, tiny_text: Path, tmp_path: Path) -> None:
    policy, optimizer = start(tiny_text)
    path = CheckpointStore(root=tmp_path, ranks=Ranks()).save(policy, optimizer, TrainerState())
    other, other_optimizer = start(tiny_vlm)
    with pytest.raises(CheckpointError, match="do not fit"):
        CheckpointStore(root=tmp_path, ranks=Ranks()).load(str(path), other, other_optimizer)


def _write_forever(path: Path) -> None:
    for i in range(10**9):
        write_atomically(path, json.dumps([i] * 2000))


def test_a_killed_writer_never_leaves_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "state.json"
    writer = multiprocessing.get_context("fork").Process(target=_write_forever, args=(path,))
    writer.start()
    while not path.exists():
        assert writer.is_alive()
    for _ in range(200):
        assert len(set(json.loads(path.read_text()))) == 1
    writer.kill()
    writer.join(10)
    assert len(set(json.loads(path.read_text()))) == 1


@pytest.mark.parametrize("fault", [slow("missing"), "damaged", slow("another")])
def test_ranks_resume_from_the_checkpoint_that_rank_0_sees(
    tiny_vlm: Path, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R24: two nodes whose folders differ. Rank 1 has a later step too, which is not taken. If it lacks rank 0's step,
    both ranks fail, and rank 1 is named."""
    monkeypatch.setattr(checkpoint, "load_weights", lambda *_: None)  # transformers loads one model at a time
    meeting = Meeting(2)
    stores = [
        CheckpointStore(root=tmp_path / str(rank), ranks=ThreadRanks(rank=rank, world_size=2, meeting=meeting))
        for rank in range(2)
    ]
    for rank, steps in ((0, [2]), (1, [2, 3])):
        alone = CheckpointStore(root=tmp_path / str(rank), ranks=Ranks())
        for step in steps:
            alone.save(*start(tiny_vlm), TrainerState(global_step=step, ver=1, cursor={}))

    def load(rank: int) -> TrainerState | CheckpointError:
        try:
            return stores[rank].load("latest", *made[rank])
        except CheckpointError as error:
            return error

    made = [start(tiny_vlm) for _ in range(2)]
    folder = tmp_path / "1" / "checkpoint-2"
    if fault == "another":
        found = on_two_threads(load)
        assert [state.global_step for state in found if isinstance(state, TrainerState)] == [2, 2]
        CheckpointStore(root=tmp_path / "1", ranks=Ranks()).save(*made[1], TrainerState(global_step=2, ver=7))
    elif fault == "missing":
        shutil.rmtree(folder)
    else:
        (folder / "config.json").write_text("{}")
    for error in on_two_threads(load):
        assert isinstance(error, CheckpointError)
        assert ("damaged" if fault == "damaged" else "rank 1") in error.what
        assert str(folder) in error.found or str(tmp_path / "0" / "checkpoint-2") in error.found


def on_two_threads(work: Callable[[int], T]) -> list[T]:
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(work, range(2)))


def test_a_checkpoint_is_due_by_steps_and_by_minutes() -> None:
    now = 0.0
    cadence = Cadence(Ranks(), save_steps=4, save_minutes=2, clock=lambda: now)
    due = []
    for step in range(1, 11):
        now += 50
        if cadence.is_due(step):
            due.append(step)
            cadence.saved()
    assert due == [3, 4, 7, 8]
    never = Cadence(Ranks(), save_steps=None, save_minutes=None)
    assert not any(never.is_due(step) for step in range(1, 10))


def test_only_weights_lie_beside_the_configuration(tiny_vlm: Path, tmp_path: Path) -> None:
    """vLLM and transformers load every file of tensors there: a checkpoint can be served as it is."""
    policy, optimizer = start(tiny_vlm)
    train(policy, optimizer, TrainerState(), 1)
    path = CheckpointStore(root=tmp_path, ranks=Ranks()).save(policy, optimizer, TrainerState(global_step=1))
    names = {name for file in path.glob("*.safetensors") for name in load_file(file)}
    assert names
    assert names <= set(load_file(tiny_vlm / "model.safetensors")) | {"lm_head.weight"}


def test_a_checkpoint_of_an_earlier_version_is_resumed(tiny_vlm: Path, tmp_path: Path) -> None:
    """Moments and generators lay beside the weights."""
    policy, optimizer = start(tiny_vlm)
    train(policy, optimizer, TrainerState(), 1)
    store = CheckpointStore(root=tmp_path, ranks=Ranks())
    path = store.save(policy, optimizer, TrainerState(global_step=1))
    moments = {name: tensor.clone() for name, tensor in optimizer.state().items()}
    manifest = json.loads((path / "manifest.json").read_text())
    for name in (OPTIMIZER, RNG):
        (path / name).rename(path / Path(name).name)
        manifest[Path(name).name] = manifest.pop(name)
    (path / OPTIMIZER).parent.rmdir()
    (path / "manifest.json").write_text(json.dumps(manifest))
    train(policy, optimizer, TrainerState(), 1)
    assert store.load("latest", policy, optimizer).global_step == 1
    for name, tensor in optimizer.state().items():
        assert torch.equal(moments[name], tensor)


def test_an_export_is_whole_or_not_there(tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk was a traceback, and half a model stayed, as it did after Ctrl-C: no second export could go there."""
    out = tmp_path / "out"
    with no_file_larger_than(10_000), pytest.raises(OutputError, match="can't be written"):
        export(tiny_text, out, "bfloat16", {})
    assert list(out.iterdir()) == []

    def interrupted(policy: Policy, path: Path, *, dtype: torch.dtype) -> None:
        path.mkdir(parents=True)
        (path / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as once:
        once.setattr(files, "export_model", interrupted)
        with pytest.raises(KeyboardInterrupt):
            export(tiny_text, out, "bfloat16", {})
    assert list(out.iterdir()) == []
    (out / ".unfinished-export").mkdir()  # of one that was killed
    export(tiny_text, out, "bfloat16", {})
    assert {"config.json", "model.safetensors"} <= {path.name for path in out.iterdir()}
    assert not any(path.name.startswith(".") for path in out.iterdir())
