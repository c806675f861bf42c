"""Every row of the page of errors, provoked: what the user meets has the row's name, its four parts and its way out.

Real parts do it wherever they run here: the server's routes, a pair of connections, forked ranks, a tiny model, a disk
that is full.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import TypeAdapter

from bench.tiny_models import build_qwen3_vl
from learner.config.load import load_config
from learner.config.schema import DataConfig
from learner.data.prompt import check_prompt_prefix
from learner.data.splits import load_split
from learner.policy.parallel import Ranks
from learner.recipe.command import StageProcess
from learner.records import EncodedPrompt, PackedRow, Rollout
from learner.rollout.client import ServerClient, Timeouts
from learner.rollout.replies import error_of, read_reply
from learner.run.callbacks import Callbacks
from learner.run.checkpoint import CheckpointStore, TrainerState
from learner.run.files import AppendedLines
from learner.steps.packing import check_length
from learner.sync.fitness import check_adapter, check_architecture
from learner.sync.server_delivery import check_sent
from learner.tasks.rewards import Rewards
from learner.tasks.supervision import Target, build_segment
from learner.trainer import memory_errors
from rollout_server.config import ServerConfig
from rollout_server.prompts import Renderer
from rollout_server.worker import Receiving
from shared.addresses import free_port
from shared.errors import ProjectError, error_classes
from shared.families import check_folder
from shared.generation import checked_scores
from shared.image_rules import ImageRules
from shared.images import Images
from shared.sync.group import start_join
from shared.sync.loading import CopyMemory, WeightLoad
from shared.wire import Bucket, ErrorBody, RolloutOutput, ServerStatus, TensorSpec
from tests import ranks
from tests.full_disk import no_file_larger_than
from tests.unit.docs.blocks import ROOT
from tests.unit.learner.data.fakes import AnyTask
from tests.unit.learner.policy import rows
from tests.unit.learner.policy import test_optim as optimizers
from tests.unit.learner.rollout import fakes as servers
from tests.unit.learner.rollout import test_hf as hf
from tests.unit.learner.run import test_checkpoint as checkpoints
from tests.unit.learner.steps import test_buffered as windows
from tests.unit.learner.steps import test_exactly_once as ahead
from tests.unit.learner.steps import test_segments as segments
from tests.unit.learner.steps import test_shares as shares
from tests.unit.learner.sync import test_canary as canaries
from tests.unit.rollout_server import test_app as routes
from tests.unit.rollout_server import test_worker as workers
from tests.unit.rollout_server.fakes import FakeEngine
from tests.unit.shared import test_pixels as pixels

PAGE = ROOT / "docs/troubleshooting/errors.md"
URL = "http://127.0.0.1:1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build_qwen3_vl(path)
    return path


@dataclass(frozen=True, kw_only=True)
class Place:
    """The place that a provocation gets: an empty folder, a tiny model, and patches that end with it."""

    folder: Path
    model: Path
    patch: pytest.MonkeyPatch


@dataclass(frozen=True)
class Case:
    """`way_out` stands both in the message and in the row of the page."""

    provoke: Callable[[Place], object]
    way_out: tuple[str, ...]


# ---- your files ----------------------------------------------------------------------------------------------------


def wrong_config(place: Place) -> None:
    (place.folder / "run.yaml").write_text("training: {learning_rate: abc}\n")
    load_config(str(place.folder / "run.yaml"), world_size=1, env={})


def box_outside(place: Place) -> None:
    Image.new("RGB", (40, 40)).save(place.folder / "a.png")
    objects = [{"desc": "x", "bbox_2d": [10, 10, 400, 30]}]
    messages = [{"role": "user", "content": "<image>Detect."}]
    record = {"messages": messages, "images": ["a.png"], "objects": objects, "width": 40, "height": 40}
    (place.folder / "train.jsonl").write_text(json.dumps(record))
    path = str(place.folder / "train.jsonl")
    load_split(DataConfig(train=path), path, AnyTask(), geometry="bbox_2d")


def damaged_checkpoint(place: Place) -> None:
    policy, optimizer = checkpoints.start(place.model)
    store = CheckpointStore(root=place.folder, ranks=Ranks())
    (store.save(policy, optimizer, TrainerState(global_step=1)) / "config.json").write_text("{}")
    store.load("latest", policy, optimizer)


def checkpoint_on_a_full_disk(place: Place) -> None:
    policy, optimizer = checkpoints.start(place.model)
    with no_file_larger_than(1000):
        CheckpointStore(root=place.folder, ranks=Ranks()).save(policy, optimizer, TrainerState(global_step=1))


# ---- requests to a server ------------------------------------------------------------------------------------------


def answered(
    method: str, path: str, body: Any = None, *, headers: dict[str, str] | None = None, times: int = 1, **settings: Any
) -> None:
    """Raise what the learner makes of the server's answer to the last of these calls."""

    async def check(http: httpx.AsyncClient, engine: FakeEngine, service: Any) -> None:
        if settings_of_engine is not None:
            settings_of_engine(engine, service)
        for _ in range(times):
            reply = await http.request(method, path, json=body, headers=headers)
        raise error_of(reply, URL)

    settings_of_engine = settings.pop("prepared", None)
    routes.serve(check, **settings)


def infer(*texts: str, **fields: Any) -> dict[str, Any]:
    return {"infer_requests": [routes.request(text, **fields) for text in texts]}


def used_uuid(place: Place) -> None:
    async def check(http: httpx.AsyncClient, engine: FakeEngine, service: Any) -> None:
        await http.post("/infer/", json=infer("a", uuid="u"))
        raise error_of(await http.post("/infer/", json=infer("b", uuid="u")), URL)

    routes.serve(check)


def read_image(source: str, **rules: Any) -> None:
    Images(ImageRules(keys="the server's ", **rules)).load(source)


def too_long(place: Place) -> None:
    renderer = Renderer(str(place.model), ServerConfig(model=str(place.model)))
    renderer.max_model_len = 16
    try:
        renderer.check_length("no end " * 20_000, renderer.decoders.share())
    finally:
        renderer.decoders.close()


# ---- rollout servers -----------------------------------------------------------------------------------------------


def dead_engine(engine: FakeEngine, service: Any) -> None:
    engine.dead = True


def updating(engine: FakeEngine, service: Any) -> None:
    service.gate.open_group("a")
    service.gate.begin_update("a", 1, "full")


def poisoned(engine: FakeEngine, service: Any) -> None:
    updating(engine, service)
    service.gate.fail("the bytes differ")


def defective(engine: FakeEngine, service: Any) -> None:
    async def fail(*_: Any) -> None:
        raise ZeroDivisionError("a defect")

    engine.generate = fail  # type: ignore[method-assign, assignment]


def nobody_there(place: Place) -> None:
    async def ask() -> None:
        client = ServerClient(f"http://127.0.0.1:{free_port()}", timeouts=Timeouts.of(0.2, None))
        try:
            await client.wait_healthy()
        finally:
            await client.aclose()

    asyncio.run(ask())


def out_of_memory_in_rollouts(place: Place) -> None:
    policy = rows.policy_of(place.model)
    with hf.raising(place.patch, policy, torch.OutOfMemoryError("CUDA out of memory.")):
        hf.answers(hf.backend_of(policy), [rows.sample()])


# ---- weight syncs --------------------------------------------------------------------------------------------------


def old_weights_sent(place: Place) -> None:
    bucket = Bucket(tensors=[TensorSpec(name="w", dtype="float32", shape=[1])], num_bytes=4)
    check_sent([bucket], [torch.tensor(1)], {"w": torch.tensor(2)})


def bytes_that_changed(place: Place) -> None:
    port = free_port()
    joining = [start_join("tcp", "127.0.0.1", port, rank, 2, 10.0, secret=b"a") for rank in (0, 1)]
    worker, learner = (operation.result() for operation in joining)
    sending = workers.in_turn(learner, workers._flipped()[:2])
    try:
        Receiving(workers.update(), worker, workers.RememberingLoad()).advance(5.0)
    finally:
        worker.close()
        learner.close()
        sending.join(5.0)


def nothing_sent(place: Place) -> None:
    config = SimpleNamespace(model_config=SimpleNamespace(model=str(place.model), hf_text_config=SimpleNamespace()))
    WeightLoad(torch.nn.Linear(2, 2), config, torch.device("cpu"), CopyMemory()).finish()


# ---- learning ------------------------------------------------------------------------------------------------------


def gradient_not_finite(place: Place) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = optimizers.Optimizer([("w", weight)], optimizers.config(), total_steps=1)
    weight.grad = torch.tensor([1.0, float("nan")])
    optimizer.update(0)


def target_without_labels(place: Place) -> None:
    target = Target(token_ids=np.arange(3), labels=np.arange(2), loss_weights=np.ones(3, np.float32), prefix_length=0)
    build_segment(EncodedPrompt(token_ids=(1,), vision=None), target, sample_id="s0")


def failing_reward(place: Place) -> None:
    tokens: dict[str, Any] = {"prompt_token_ids": (1,), "response_token_ids": (), "finish_reason": "stop"}
    rollout = Rollout(sample=segments.sample(0), ver=1, seed=0, **tokens)
    Rewards(tokenizer=segments.TOKENIZER, functions={"mine": lambda answer: 1 / 0}).parts(rollout, None)


def failing_stage(place: Place) -> None:
    with StageProcess.listening(1, os.environ) as process:
        process.run(place.folder / "sft.yaml")


def failing_callback(place: Place) -> None:
    place.patch.chdir(place.folder)
    text = "from learner.extensions import Callback\nclass Mine(Callback):\n    def on_step(self, result): 1 / 0\n"
    (place.folder / "errors_page.py").write_text(text)
    callbacks = Callbacks(SimpleNamespace(training=SimpleNamespace(callbacks=["errors_page.py:Mine"])), Ranks())  # type: ignore[arg-type]
    callbacks.make()
    callbacks.step(None)  # type: ignore[arg-type]


def full_disk(place: Place) -> None:
    with no_file_larger_than(10):
        AppendedLines(place.folder / "metrics.jsonl").append("a" * 60)


def row_without_memory(place: Place) -> None:
    with memory_errors(PackedRow(segments=(), capacity=512)):
        torch.empty(2**60)


def other_window(place: Place) -> None:
    script = windows.Script((0, 0, 0), (0, 0, 2))
    buffer, _ = windows.make(script)
    windows.learn(buffer, script)
    script.then((0, 1, 0), (0, 1, 4))
    windows.learn(buffer, script, first_step=1)


def stopped_pipeline(place: Place) -> None:
    queue = shares.one_queue()
    queue.stop()
    queue.check()


def starving() -> ahead.World:
    return ahead.World(ahead.case_of(b_ratio=0.5, num_samples=320, lag=100, evaluated=0.0, ready=2, queue=8))


def absent_rank(place: Place) -> None:
    """Raise what is told where one of two forked ranks leaves."""
    ended = ranks.launch("tests.unit.learner.policy.test_parallel", 2, "one leaves")
    raise ErrorBody.model_validate_json(ended[0].stdout.splitlines()[-1]).to_exception()


STATUS = ServerStatus.model_validate(servers.status(architecture={"hidden_size": "8"}))
CASES: dict[str, tuple[Case, ...]] = {
    "ConfigError": (
        Case(lambda place: check_folder(str(place.folder / "none"), key="model.path", allow_untested=False), ()),
    ),
    "ConfigErrors": (Case(wrong_config, ()),),
    "DataError": (
        Case(box_outside, ("data.on_bad_record",)),
        Case(lambda place: check_length(windows.segment("s"), 4), ("global_max_length",)),
    ),
    "CheckpointError": (Case(damaged_checkpoint, ()), Case(checkpoint_on_a_full_disk, ("space",))),
    "RequestError": (
        Case(lambda place: answered("POST", "/infer/", {"infer_requests": [{"messages": 3}]}), ("same version",)),
        Case(
            lambda place: answered("POST", "/infer/", infer("a", "b"), max_requests_per_call=1),
            ("max_requests_per_call",),
        ),
        Case(lambda place: answered("POST", "/infer/", infer("a" * 99), max_body_bytes=50), ("max_body_bytes",)),
        Case(lambda place: answered("POST", "/infer/", infer("a"), headers={"origin": "http://page"}), ("web page",)),
        Case(lambda place: answered("GET", "/no/such/path"), ("base_url",)),
        Case(used_uuid, ("uuid",)),
    ),
    "UnauthorizedError": (
        Case(lambda place: answered("POST", "/infer/", infer("a"), token="s"), ("ROLLOUT_SERVER_TOKEN",)),
    ),
    "MediaError": (
        Case(lambda place: read_image("/etc/none.png", roots=()), ("allowed_image_roots",)),
        Case(lambda place: read_image("http://elsewhere/a.png"), ("allowed_image_hosts",)),
        Case(lambda place: read_image(rows.image(64, 64), max_bytes=100), ("shrink the image",)),
        Case(lambda place: read_image(rows.image(64, 64), max_pixels=100), ("max_image_pixels",)),
    ),
    "PromptTooLongError": (Case(too_long, ("max_model_len", "max_new_tokens")),),
    "ServerError": (Case(lambda place: answered("GET", "/health/", prepared=dead_engine), ("log", "restart it")),),
    "ServerUnreachableError": (Case(nobody_there, ("start the server", "vllm.server")),),
    "ServerBusyError": (
        Case(
            lambda place: answered("POST", "/infer/", infer("a"), prepared=updating, queue_timeout_s=0.05),
            ("queue_timeout_s",),
        ),
    ),
    "ServerPoisonedError": (
        Case(lambda place: answered("POST", "/infer/", infer("a"), prepared=poisoned), ("restart the server",)),
    ),
    "ServerMismatchError": (
        Case(lambda place: check_architecture(URL, STATUS, {"hidden_size": "7"}), ("learner starts from",)),
        Case(lambda place: check_adapter(URL, STATUS, rank=8), ("max_lora_rank",)),
    ),
    "PromptMismatchError": (Case(lambda place: check_prompt_prefix([5, 6], (5, 7), "s0"), ("min_pixels",)),),
    "ServerMismatchError: the vision tower is fed other pixels": (
        Case(
            lambda place: pixels.check(
                pixels.look(place.model, pixels.photograph()),
                pixels.look(place.model, pixels.photograph(), do_normalize=False),
            ),
            ("min_pixels", "max_pixels"),
        ),
    ),
    "RolloutError": (
        Case(
            lambda place: read_reply(b"[{}]", TypeAdapter(list[RolloutOutput]), URL, "/infer/"),
            ("same version", "server's log"),
        ),
        Case(out_of_memory_in_rollouts, ("decode_batch_size",)),
    ),
    "NotFiniteError": (Case(lambda place: checked_scores([1], [float("nan")]), ("learning_rate",)),),
    "SyncError": (Case(old_weights_sent, ()),),
    "CommunicatorError": (
        Case(
            lambda place: start_join("tcp", "192.0.2.1", free_port(), 0, 2, 1.0, secret=b"a").result(), ("group_port",)
        ),
        Case(
            lambda place: start_join("nccl", "127.0.0.1", free_port(), 0, 2, 1.0, secret=b"a").result(),
            ("both sides",),
        ),
    ),
    "DigestError": (Case(bytes_that_changed, ("sync again", "memory of both machines")),),
    "CoverageError": (Case(nothing_sent, ("the model that the server serves",)),),
    "CanaryError": (
        Case(
            lambda place: canaries.canary(0.1).compare([[-1.0] * 2] * 2, canaries.reply([[-1.0, -9.0]] * 2), URL),
            ("dtype", "model.dtype", "canary_tolerance"),
        ),
    ),
    "LossError": (
        Case(gradient_not_finite, ("learning_rate", "float32")),
        Case(target_without_labels, ()),
    ),
    "RewardError": (Case(failing_reward, ("correct",)),),
    "CallbackError": (Case(failing_callback, ("correct", "resume")),),
    "OutputError": (Case(full_disk, ("space", "training.output_dir")),),
    "OutOfMemoryError": (Case(row_without_memory, ("global_max_length", "gradient_checkpointing: true")),),
    "WindowMismatchError": (Case(other_window, ("rollout_buffer.enabled: false", "report it")),),
    "StageError": (Case(failing_stage, ("the same command",)),),
    "PipelineStoppedError": (Case(stopped_pipeline, ()),),
    "DeadlineError": (
        Case(lambda place: start_join("tcp", "127.0.0.1", free_port(), 1, 2, 0.2, secret=b"a").result(), ()),
    ),
    "CollectiveError": (Case(absent_rank, ("learner_rank",)),),
    "StarvedError": (Case(lambda place: ahead.starve(starving(), 1, place.patch), ()),),
    "ProjectError": (
        Case(lambda place: answered("POST", "/infer/", infer("a"), prepared=defective), ("see the server's log",)),
    ),
}


def page() -> dict[str, str]:
    """Return the whole of each row, without backticks, by what stands in its first column."""
    lines = [line.replace("`", "") for line in PAGE.read_text(encoding="utf-8").splitlines()]
    found = [line for line in lines if re.match(r"\| \w+Errors?\b", line)]
    return {line.split("|")[1].strip(): line for line in found}


def test_every_row_has_a_provocation() -> None:
    assert CASES.keys() == page().keys()


@pytest.mark.parametrize(
    ("row", "case"),
    [
        pytest.param(row, case, id=f"{row.split(':')[0]}-{list(CASES).index(row)}.{i}")
        for row, cases in CASES.items()
        for i, case in enumerate(cases)
    ],
)
def test_the_error_of_a_row_comes_with_its_way_out(
    row: str, case: Case, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ProjectError) as caught:
        case.provoke(Place(folder=tmp_path, model=model, patch=monkeypatch))
    error, line = caught.value, page()[row]
    assert type(error) is error_classes()[row.split(":")[0]], error
    assert error.what
    mistakes = getattr(error, "mistakes", [error])
    for one in mistakes:
        assert one.found, one
        assert one.wanted, one
        assert one.remedy, one
    for words in case.way_out:
        assert words in str(error), (words, str(error))
        assert words in line, (words, line)
