"""A real server with real vLLM on CPU: what it generates, what it takes in, and how it ends (R03 R06 R09 R10 R11 R13).

One server for the module, its weights replaced test by test: each test puts the weights it needs there itself. The
model is tiny and random; transformers, in the same dtype, says what is right.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

from bench import demo_model
from bench.listening import tcp_listeners, unix_listeners
from learner.rollout.hf import repeats
from shared.addresses import free_port
from shared.errors import CommunicatorError, DeadlineError
from shared.sync import buckets as weights
from shared.sync.group import Communicator, start_join
from shared.wire import NDJSON, Bucket
from tests.servers import RunningServer, running_server, wait_gone
from tests.tiers import slow
from tests.waits import wait_until

pytestmark = pytest.mark.integration

NUM_NEW = 12
SECRET = bytes(range(32))
TEXT = [{"role": "user", "content": "name every digit"}]
ANSWER = [5, 400, 1000]  # the canary's, on TEXT
PICTURE = [{"role": "user", "content": "<image>name every digit"}]


class Learner:
    """The other side: a transformers model, and a sync of it by hand."""

    def __init__(self, folder: Path, server: RunningServer) -> None:
        self.model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self.processor = AutoProcessor.from_pretrained(folder)
        self.http = httpx.Client(base_url=server.base_url, timeout=60.0, trust_env=False)
        self.incarnation = ""
        self.communicator: Communicator | None = None
        self.others: list[Communicator] = []  # workers of other servers in the same group

    def encode(self, messages: list[dict[str, Any]], *images: Image.Image | None) -> dict[str, torch.Tensor]:
        """None is no image."""
        text = messages[0]["content"].replace("<image>", "")
        parts: list[dict[str, Any]] = [{"type": "text", "text": text}]
        given = [image for image in images if image is not None]
        turns = [{"role": "user", "content": [*({"type": "image"} for _ in given), *parts] if given else text}]
        prompt = self.processor.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        return self.processor(text=[prompt], images=given or None, return_tensors="pt")

    def generate(self, messages: list[dict[str, Any]], *images: Image.Image) -> list[int]:
        """Return what the learner's model generates greedily, up to a stop token."""
        inputs = self.encode(messages, *images)
        ids = self.model.generate(**inputs, max_new_tokens=NUM_NEW, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        stops = set(self.model.generation_config.eos_token_id)
        return [i for n, i in enumerate(ids.tolist()) if not stops & set(ids.tolist()[: n + 1])]

    def logprobs(self, messages: list[dict[str, Any]], image: Image.Image | None, response: list[int]) -> list[float]:
        inputs = self.encode(messages, image)
        whole = torch.cat([inputs["input_ids"], torch.tensor([response])], dim=1)
        extra = {key: value for key, value in inputs.items() if key in {"pixel_values", "image_grid_thw"}}
        if "mm_token_type_ids" in inputs:
            types = torch.zeros((1, len(response)), dtype=inputs["mm_token_type_ids"].dtype)
            extra["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], types], dim=1)
        with torch.no_grad():
            logits = self.model(input_ids=whole, **extra).logits[0, -len(response) - 1 : -1]
        return logits.log_softmax(-1)[torch.arange(len(response)), torch.tensor(response)].tolist()

    def randomize(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.dim() > 1:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in self.model.state_dict().items() if name != "lm_head.weight"}

    def join(self, timeout_s: float = 20.0, *, num_others: int = 0) -> httpx.Response:
        """Join a group with the server. `num_others`: workers of another server, which have the first ranks."""
        self.leave()
        self.incarnation, port, world_size = uuid.uuid4().hex, free_port(), num_others + 2
        here = (*range(num_others), world_size - 1)
        joins = [start_join("tcp", "127.0.0.1", port, i, world_size, timeout_s, secret=SECRET) for i in here]
        body = {"incarnation": self.incarnation, "secret": SECRET.hex(), "group_port": port, "first_rank": num_others}
        body |= {"world_size": world_size, "backend": "tcp", "timeout_s": timeout_s}
        reply = self.http.post("/init_communicator/", json=body)
        if not reply.is_success:
            for operation in joins:
                operation.cancel(CommunicatorError("the server refused"))
        else:
            *self.others, self.communicator = [operation.result() for operation in joins]
        return reply

    def leave(self) -> None:
        if self.communicator is not None:
            for one in (*self.others, self.communicator):
                one.close()
            self.others, self.communicator = [], None

    def sync(
        self,
        tensors: dict[str, torch.Tensor],
        *,
        wrong_seal: bool = False,
        stop_after: int | None = None,
        expected: dict[str, Any] | None = None,
        **call: Any,
    ) -> httpx.Response:
        """Make one `/update_weights/` call in several buckets; `stop_after` buckets the learner sends no more.
        `expected`: of an `ExpectScoresCall`, sent after the last bucket; None: what the learner's model gives."""
        expected = expected or {"logprobs": [self.logprobs(TEXT, None, ANSWER)], "tolerance": 0.002}
        body = self.update(**call)
        buffers, body["buckets"] = self.buckets(tensors, body["ver"])
        if wrong_seal:
            buffers[1][5] ^= 1
        replies: list[httpx.Response] = []
        calling = threading.Thread(target=lambda: replies.append(self.http.post("/update_weights/", json=body)))
        calling.start()
        assert self.communicator is not None
        src = self.communicator.rank
        with suppress(CommunicatorError, DeadlineError):  # the server gave up; its answer says why
            for buffer in buffers[:stop_after]:
                copies = [(other, torch.empty_like(buffer)) for other in self.others]
                receiving = [other.start_broadcast(copy, src, 20.0) for other, copy in copies]
                self.communicator.broadcast(buffer, src, timeout_s=20.0)
                assert all(operation.done(20.0) for operation in receiving)
                assert all(torch.equal(copy, buffer) for _, copy in copies)
        said = {"incarnation": self.incarnation, "ver": body["ver"], **expected}
        assert self.http.post("/expect_scores/", json=said).status_code == 200
        calling.join(60)
        return replies[0]

    def update(self, **call: Any) -> dict[str, Any]:
        """Return an `UpdateWeightsCall` for the next version, without buckets."""
        canary = [{"request": {"messages": TEXT}, "response_token_ids": ANSWER}]
        body = {"incarnation": self.incarnation, "ver": self.ver() + 1, "timeout_s": 20.0, "canary": canary}
        return {**body, "buckets": [], **call}

    def buckets(self, tensors: dict[str, torch.Tensor], ver: int) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
        """Return sealed buckets, and what a call says of them."""
        specs = [weights.spec_of(name, tensor) for name, tensor in tensors.items()]
        buffers, buckets = [], []
        for index, bucket_specs in enumerate(weights.plan_buckets(specs, 1 << 20)):
            buffers.append(weights.pack(bucket_specs, tensors, "cpu"))
            buckets.append(Bucket(tensors=bucket_specs, num_bytes=weights.num_bucket_bytes(bucket_specs)).model_dump())
            weights.seal(buffers[-1], key=weights.seal_key(SECRET), ver=ver, index=index)
        assert len(buckets) > 2
        return buffers, buckets

    def status(self) -> dict[str, Any]:
        return dict(self.http.get("/status/").json())

    def ver(self) -> int:
        return int(self.status()["ver"])

    def infer(self, requests: list[dict[str, Any]], **config: Any) -> httpx.Response:
        body = {"infer_requests": requests, "request_config": {"max_tokens": NUM_NEW, **config}}
        return self.http.post("/infer/", json=body)

    def ids(self, messages: list[dict[str, Any]], images: list[str] | None = None) -> list[int]:
        reply = self.infer([{"messages": messages, "images": images or []}])
        assert reply.status_code == 200, reply.text
        return list(reply.json()[0]["response_token_ids"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("server")
    demo_model.build(path / "model", size="tiny")
    (path / "images").mkdir()
    picture().save(path / "images" / "scene.png")
    picture().save(path / "outside.png")
    (path / "images" / "link.png").symlink_to(path / "outside.png")
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    config = {
        "model": str(folder / "model"),
        "url_prefix": "/rollout",
        "allowed_image_roots": [str(folder / "images")],
        "max_image_pixels": 20_000,
        "max_body_bytes": 8 << 20,
        "max_model_len": 512,
        "shutdown_timeout_s": 60.0,  # an answer of 300 tokens takes more than five seconds of a busy machine
    }
    (folder / "t").mkdir()
    with running_server(config, folder, env={"TMPDIR": str(folder / "t")}) as running:
        yield running


@pytest.fixture(scope="module")
def learner(folder: Path, server: RunningServer) -> Iterator[Learner]:
    learner = Learner(folder / "model", server)
    yield learner
    learner.leave()
    learner.http.close()


def picture(size: tuple[int, int] = (96, 64)) -> Image.Image:
    noise = torch.randint(0, 256, (size[1], size[0], 3), dtype=torch.uint8, generator=torch.manual_seed(3))
    return Image.fromarray(noise.numpy())


def as_base64(image: Image.Image) -> str:
    out = io.BytesIO()
    image.save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


def test_endpoints_answer_with_and_without_a_slash(learner: Learner) -> None:
    """R06"""
    for path in ("/health", "/ready", "/status", "/get_world_size", "/metrics"):
        for spelling in (path, path + "/"):
            assert learner.http.get(spelling).status_code == 200, spelling
    assert learner.http.get("/get_world_size/").json() == {"world_size": 1}
    missing = learner.http.get("/nowhere/")
    assert (missing.status_code, missing.json()["error"]) == (404, "RequestError")


def test_greedy_tokens_and_prompt_ids_equal_transformers(learner: Learner, folder: Path) -> None:
    """R03, R13: text, and the same image by path, base64 and data URL, in the order of the requests."""
    image, text64 = picture(), as_base64(picture())
    sources = [str(folder / "images" / "scene.png"), text64, f"data:image/png;base64,{text64}"]
    requests = [{"messages": TEXT}, *({"messages": PICTURE, "images": [source]} for source in sources)]
    outputs = learner.infer(requests).json()
    of_text, of_picture = learner.generate(TEXT), learner.generate(PICTURE, image)
    assert of_text != of_picture
    assert [output["response_token_ids"] for output in outputs] == [of_text, of_picture, of_picture, of_picture]
    assert outputs[0]["prompt_token_ids"] == learner.encode(TEXT, None)["input_ids"][0].tolist()
    assert outputs[1]["prompt_token_ids"] == learner.encode(PICTURE, image)["input_ids"][0].tolist()
    assert outputs[1]["response"]["choices"][0]["message"]["content"] == learner.processor.decode(of_picture)


def test_an_answer_that_repeats_itself_is_ended(learner: Learner) -> None:
    """`stop_repetitions`: the same answers, each up to its third equal part, counted as cut off."""
    long = {"max_tokens": 160, "temperature": 0.0}
    requests = [{"messages": [{"role": "user", "content": f"name digit {i}"}]} for i in range(8)]
    whole = [output["response_token_ids"] for output in learner.infer(requests, **long).json()]
    expected = [next((ids[:n] for n in range(len(ids)) if repeats(ids[:n], 3)), ids) for ids in whole]
    assert any(len(cut) < len(ids) for cut, ids in zip(expected, whole, strict=True)), "nothing repeats itself"
    found = learner.infer(requests, stop_repetitions=3, **long).json()
    assert [output["response_token_ids"] for output in found] == expected
    for output, cut, ids in zip(found, expected, whole, strict=True):
        if len(cut) < len(ids):
            assert output["response"]["choices"][0]["finish_reason"] == "length"


def test_pictures_of_other_shapes_are_other_pictures_to_the_caches(learner: Learner, folder: Path) -> None:
    """CVE-2025-46722: vLLM's hash of an image left out its shape, so that 96x64 and 64x96 were one."""
    for size in ((96, 64), (64, 96)):
        image = Image.new("RGB", size)
        reply = learner.infer([{"messages": PICTURE, "images": [as_base64(image)]}]).json()[0]
        assert reply["prompt_token_ids"] == learner.encode(PICTURE, image)["input_ids"][0].tolist()
        assert reply["response_token_ids"] == learner.generate(PICTURE, image)


def test_a_request_may_have_several_images(learner: Learner) -> None:
    """R03, R13: in the order of the placeholders, as transformers has them."""
    pages = [picture(), Image.new("RGB", (96, 64)), Image.new("RGB", (64, 96), "white")]
    asked = [{"role": "user", "content": "<image><image><image>name every digit"}]
    reply = learner.infer([{"messages": asked, "images": list(map(as_base64, pages))}]).json()[0]
    assert reply["prompt_token_ids"] == learner.encode(asked, *pages)["input_ids"][0].tolist()
    assert reply["response_token_ids"] == learner.generate(asked, *pages)


def test_seeds_belong_to_requests(learner: Learner) -> None:
    """R11: request `i` draws with `seed + i`, whatever else is in the call."""
    requests = [{"messages": TEXT}] * 4
    together = learner.infer(requests, temperature=1.0, seed=7).json()
    alone = [learner.infer(requests[:1], temperature=1.0, seed=7 + i).json()[0] for i in range(4)]
    tokens = [output["response_token_ids"] for output in together]
    assert tokens == [output["response_token_ids"] for output in alone]
    assert len({tuple(ids) for ids in tokens}) > 1
    assert [output["rollout_infos"]["seed"] for output in together] == [7, 8, 9, 10]


def test_several_answers_with_their_log_probabilities(learner: Learner, folder: Path) -> None:
    """R39: `n` answers are those of `n` copies of the request; the log-probabilities are those of transformers."""
    picture_request = {"messages": PICTURE, "images": [str(folder / "images" / "scene.png")]}
    copies = learner.infer([picture_request] * 3, temperature=1.0, seed=7, logprobs=True).json()
    (together,) = learner.infer([picture_request], temperature=1.0, seed=7, n=3, logprobs=True).json()
    choices = together["response"]["choices"]
    assert [choice["token_ids"] for choice in choices] == [output["response_token_ids"] for output in copies]
    assert len({tuple(choice["token_ids"]) for choice in choices}) > 1
    for choice, logprobs in zip(choices, together["rollout_logprobs"], strict=True):
        assert [one["logprob"] for one in choice["logprobs"]["content"]] == logprobs
        assert "".join(one["token"] for one in choice["logprobs"]["content"]) == choice["message"]["content"]
        ended = [choice["stop_token_id"]] if choice["finish_reason"] == "stop" else []
        wanted = learner.logprobs(PICTURE, picture(), choice["token_ids"] + ended)
        got = [*logprobs, choice["stop_logprob"]] if ended else logprobs
        assert got == pytest.approx(wanted, abs=2e-3)


@pytest.fixture(scope="module")
def openai_client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with httpx.Client(trust_env=False, timeout=60.0) as http:
        yield openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", http_client=http, max_retries=0)


def test_openai_client_chats_as_infer_does(openai_client: openai.OpenAI, learner: Learner, folder: Path) -> None:
    """R13, R39: the same tokens, prompt ids and log-probabilities, with an image, at once and streamed."""
    (model,) = [one.id for one in openai_client.models.list()]
    source = str(folder / "images" / "scene.png")
    asked = {"messages": PICTURE, "images": [source]}
    (wanted,) = learner.infer([asked], logprobs=True).json()
    parts = [{"type": "image_url", "image_url": {"url": source}}, {"type": "text", "text": "name every digit"}]
    call: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": parts}]}
    call |= {"max_tokens": NUM_NEW, "temperature": 0.0, "logprobs": True}
    call["extra_body"] = {"return_token_ids": True, "skip_special_tokens": False}
    answer = openai_client.chat.completions.create(**call)
    choice = answer.choices[0]
    assert answer.prompt_token_ids == wanted["prompt_token_ids"]  # type: ignore[attr-defined]
    num_kept = len(wanted["response_token_ids"])  # vLLM's own answer has the stop token, too
    assert choice.token_ids[:num_kept] == wanted["response_token_ids"]  # type: ignore[attr-defined]
    assert choice.logprobs is not None
    got = [one.logprob for one in choice.logprobs.content or ()][:num_kept]
    assert got == pytest.approx(wanted["rollout_logprobs"][0], abs=1e-4)
    events = list(openai_client.chat.completions.create(**call, stream=True))
    assert len(events) > 3
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert text == choice.message.content
    spans = [{"version": str(answer.ver), "start": 0, "end": len(choice.token_ids)}]  # type: ignore[attr-defined]
    assert choice.weight_versions == spans  # type: ignore[attr-defined]
    said = [getattr(event.choices[0], "weight_versions", None) for event in events if event.choices]
    assert said == [None] * (len(said) - 1) + [spans], "with the event that ends the answer"
    by_tokens = openai_client.completions.create(
        model=model, prompt=learner.encode(TEXT, None)["input_ids"][0].tolist(), max_tokens=NUM_NEW, temperature=0.0
    )
    text_only = openai_client.chat.completions.create(model=model, messages=TEXT, max_tokens=NUM_NEW, temperature=0.0)  # type: ignore[call-overload]
    assert by_tokens.choices[0].text == text_only.choices[0].message.content
    several: dict[str, Any] = {"model": model, "prompt": ["name", "name every digit"], "n": 2, "temperature": 1.0}
    several |= {"max_tokens": NUM_NEW, "seed": 3, "extra_body": {"return_token_ids": True}}
    counted = [len(one.token_ids) for one in openai_client.completions.create(**several).choices]  # type: ignore[attr-defined]
    streamed = openai_client.completions.create(**several, stream=True)
    ends = {}
    for event in streamed:
        ends |= {one.index: one.weight_versions[0]["end"] for one in event.choices if one.finish_reason}
    assert [ends[i] for i in range(4)] == counted
    assert learner.status()["in_flight"] == 0


def test_openai_calls_obey_the_image_rules(openai_client: openai.OpenAI, folder: Path) -> None:
    """R13: nothing is fetched or opened for /v1/ that would not be for /infer/; vLLM's own loader never runs."""
    large = f"data:image/png;base64,{as_base64(picture((200, 200)))}"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/x.png"
        outside = str(folder / "outside.png")
        for source in (url, outside, f"file://{outside}", large):
            parts: Any = [{"type": "image_url", "image_url": {"url": source}}]
            with pytest.raises(openai.UnprocessableEntityError) as refused:
                openai_client.chat.completions.create(model="", messages=[{"role": "user", "content": parts}])
            assert refused.value.body["type"] == "MediaError"  # type: ignore[index]
        with pytest.raises(BlockingIOError):
            listener.accept()
    with pytest.raises(openai.NotFoundError):
        openai_client.chat.completions.create(model="another", messages=TEXT)  # type: ignore[arg-type]
    with pytest.raises(openai.APIStatusError) as too_long:
        openai_client.chat.completions.create(model="", messages=TEXT, max_tokens=100_000)  # type: ignore[arg-type]
    assert (too_long.value.status_code, too_long.value.body["type"]) == (413, "PromptTooLongError")  # type: ignore[index]


def test_ms_swifts_own_client_is_answered(learner: Learner, server: RunningServer, folder: Path) -> None:
    """R13: its clients in an environment of their own, if MS_SWIFT_PYTHON names its interpreter. A weight sync by its
    trainer's client is refused, and leaves the server as it was."""
    python = os.environ.get("MS_SWIFT_PYTHON")
    if python is None:
        pytest.skip("MS_SWIFT_PYTHON: the interpreter of an environment with ms-swift and vLLM")
    program = Path(__file__).with_name("ms_swift_client.py")
    source = str(folder / "images" / "scene.png")
    ran = subprocess.run([python, program, server.base_url, source], capture_output=True, text=True, timeout=170)
    assert ran.returncode == 0, ran.stderr[-3000:]
    answers = json.loads(ran.stdout.splitlines()[-1])
    assert answers["greedy"] == learner.ids(PICTURE, [source])
    assert [len(ids) for ids in answers["logprobs"]] == [len(ids) for ids in answers["sampled"]]
    assert "RequestError" in answers["refused"]
    assert learner.http.get("/status/").json()["gate"] == "serving"


def test_streamed_answers_come_as_they_end_and_are_the_same(learner: Learner, folder: Path) -> None:
    """D9: greedy answers, byte for byte but for what names the request; short ones are not held up by long ones."""
    source = str(folder / "images" / "scene.png")
    asked = [{"messages": TEXT}, {"messages": PICTURE, "images": [source]}, {"messages": TEXT}]

    def told(output: dict[str, Any]) -> bytes:
        output["response"] |= {"id": "", "created": 0}
        output["rollout_infos"]["uuid"] = ""
        return json.dumps(output).encode()

    whole = [told(output) for output in learner.infer(asked).json()]
    body = {"infer_requests": asked, "request_config": {"max_tokens": NUM_NEW}}
    with learner.http.stream("POST", "/infer/", json=body, headers={"Accept": NDJSON}) as reply:
        assert (reply.status_code, reply.headers["content-type"]) == (200, NDJSON)
        lines = [json.loads(line) for line in reply.iter_lines()]
    assert sorted(line["index"] for line in lines) == [0, 1, 2]
    assert [told(line["output"]) for line in sorted(lines, key=lambda line: line["index"])] == whole
    # A request that would take 400 tokens, and one that the server has answered before.
    short = {"messages": TEXT, "uuid": uuid.uuid4().hex}
    body = {"infer_requests": [{"messages": TEXT}, short], "request_config": {"max_tokens": 400, "temperature": 1.0}}
    learner.http.post("/infer/", json={**body, "infer_requests": [short]})
    begin, arrived = time.monotonic(), dict[int, float]()
    with learner.http.stream("POST", "/infer/", json=body, headers={"Accept": NDJSON}) as reply:
        for line in reply.iter_lines():
            arrived[json.loads(line)["index"]] = time.monotonic() - begin
    assert arrived[1] < arrived[0]


def test_a_repeated_uuid_gets_the_same_rollout(learner: Learner) -> None:
    """R12: a retry after a lost reply makes no second rollout; the uuid of another request is refused."""
    request = {"messages": TEXT, "uuid": uuid.uuid4().hex}
    first, second = (learner.infer([request], temperature=1.0).json() for _ in range(2))
    assert first == second
    other = learner.infer([request], temperature=0.5)
    assert (other.status_code, other.json()["error"]) == (400, "RequestError")


@pytest.mark.slow
def test_a_caller_that_hangs_up_costs_the_next_one_nothing(learner: Learner) -> None:
    """vLLM's cache of processed images may believe that the engine has one whose request was given up on its way. The
    next request with that image then ends at once, with nothing. The server asks again, with the image."""
    for i in range(6):
        images = [as_base64(Image.new("RGB", (128, 128), (i, j, 0))) for j in range(16)]
        requests = [{"messages": PICTURE, "images": [image]} for image in images]
        body = {"infer_requests": requests, "request_config": {"max_tokens": NUM_NEW}}
        with suppress(httpx.TimeoutException):
            httpx.post(f"{learner.http.base_url}infer/", json=body, timeout=0.08 * (1 + i), trust_env=False)
        if i % 3 == 0:
            outputs = learner.infer(requests).json()
            assert {output["response"]["choices"][0]["finish_reason"] for output in outputs} <= {"stop", "length"}, i
        elif i % 3 == 1:
            items = [{"request": request, "response_token_ids": ANSWER} for request in requests]
            reply = learner.http.post("/score/", json={"items": items})
            assert reply.status_code == 200, (i, reply.text)
        else:
            for image in images:
                parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}]
                chat = {"messages": [{"role": "user", "content": parts}], "max_tokens": 4, "stream": image < images[8]}
                reply = learner.http.post("/v1/chat/completions", json=chat)
                assert reply.status_code == 200, (i, reply.text)
                assert re.search(r'"finish_reason": ?"(stop|length)"', reply.text), reply.text


def test_media_rules(learner: Learner, folder: Path) -> None:
    """R13: only images in allowed folders, of allowed hosts, of allowed sizes."""
    refused = {
        str(folder / "outside.png"): "no such file in an allowed folder",
        str(folder / "images" / "link.png"): "no such file in an allowed folder",
        str(folder / "images" / ".." / "outside.png"): "no such file in an allowed folder",
        "http://127.0.0.1:9/x.png": "host '127.0.0.1' over http",
        as_base64(picture((200, 200))): "200x200 = 40000 pixels",
    }
    for source, found in refused.items():
        reply = learner.infer([{"messages": PICTURE, "images": [source]}])
        assert (reply.status_code, reply.json()["error"]) == (422, "MediaError")
        assert found in reply.json()["found"]
        assert len(reply.text) < 800


def test_wrong_requests_are_told_what_is_wrong(learner: Learner) -> None:
    too_long = learner.infer([{"messages": TEXT}], max_tokens=600)
    assert (too_long.status_code, too_long.json()["error"]) == (413, "PromptTooLongError")
    assert "request_config.max_tokens 600" in too_long.json()["found"]
    assert too_long.json()["what"].startswith("infer_requests.0: ")
    long_prompt = learner.infer([{"messages": [{"role": "user", "content": "name every digit " * 300}]}])
    assert (long_prompt.status_code, long_prompt.json()["error"]) == (413, "PromptTooLongError")
    assert "tokens of messages and images" in long_prompt.json()["found"]
    # vLLM's own refusals are the request's, not the server's (R16).
    for fields, status in (
        ({"min_tokens": 9, "max_tokens": 8}, 400),
        ({"prompt": [10**6]}, 400),
        ({"prompt": [1] * 600}, 413),
    ):
        refused = learner.http.post("/v1/completions", json={"prompt": "a", **fields})
        assert refused.status_code == status, refused.text
    ids = {"items": [{"request": {"messages": TEXT}, "response_token_ids": [1] * 600}]}
    long_answer = learner.http.post("/score/", json=ids)
    assert (long_answer.status_code, long_answer.json()["error"]) == (413, "PromptTooLongError")
    malformed = learner.http.post("/infer/", json={"infer_requests": [{"messages": []}], "typo": 1})
    assert (malformed.status_code, malformed.json()["error"]) == (400, "RequestError")
    assert "typo" in malformed.json()["found"]
    assert learner.http.post("/infer/", json="x" * (9 << 20)).status_code == 413


def test_full_update_serves_the_new_weights(learner: Learner, folder: Path) -> None:
    """R09, R10: in-memory sync, and the served tokens and log-probabilities are the learner's, images included."""
    image, source = picture(), str(folder / "images" / "scene.png")
    before = learner.ids(PICTURE, [source])
    learner.randomize(seed=1)
    assert learner.join().status_code == 200
    said = [learner.http.get("/status/").json()["weights"]]
    for seed in (2, 3):  # the second finds caches filled under the first
        learner.randomize(seed)
        reply = learner.sync(learner.tensors())
        assert reply.status_code == 200, reply.text
        assert reply.json()["num_tensors"] == len(learner.tensors())
        after = learner.ids(PICTURE, [source])
        assert after == learner.generate(PICTURE, image) != before
        (output,) = learner.infer([{"messages": TEXT}], max_tokens=1).json()
        said.append(output["rollout_infos"]["weights"])
        assert output["rollout_infos"]["incarnation"] == learner.incarnation
        assert learner.ids(TEXT) == learner.generate(TEXT)
    assert len(set(said)) == 3, "the digests of the weights that answered"
    response = [5, 400, 1000, 17, 1300]
    items = [
        {"request": {"messages": TEXT}, "response_token_ids": response},
        {"request": {"messages": PICTURE, "images": [source]}, "response_token_ids": response},
    ]
    scores = learner.http.post("/score/", json={"items": items}).json()
    assert scores["ver"] == learner.ver()
    for got, of in zip(scores["logprobs"], (None, image), strict=True):
        wanted = learner.logprobs(PICTURE if of else TEXT, of, response)
        assert got == pytest.approx(wanted, abs=2e-3)
    assert scores["prompt_token_ids"][1] == learner.encode(PICTURE, image)["input_ids"][0].tolist()


@pytest.mark.parametrize(
    ("how", "error"), [("digest", "DigestError"), ("missing", "CoverageError"), slow("gone", "DeadlineError")]
)
def test_a_failed_update_poisons_until_a_full_sync(learner: Learner, how: str, error: str) -> None:
    """R09, R10: wrong bytes, a missing tensor, a learner that stops sending; then the next sync heals."""
    learner.randomize(seed=4)
    tensors = learner.tensors()
    assert learner.join().status_code == 200
    if how == "missing":
        name = next(name for name in tensors if name.endswith("1.self_attn.k_proj.weight"))
        failed = learner.sync({key: tensor for key, tensor in tensors.items() if key != name})
        assert name.rpartition("layers")[2] in failed.json()["found"]
    elif how == "gone":
        failed = learner.sync(tensors, stop_after=1, timeout_s=1.5)
    else:
        failed = learner.sync(tensors, wrong_seal=True)
    assert (failed.status_code >= 500, failed.json()["error"]) == (True, error)
    refused = learner.infer([{"messages": TEXT}])
    assert (refused.status_code, refused.json()["error"]) == (503, "ServerPoisonedError")
    assert learner.http.get("/ready/").status_code == 503
    assert learner.http.get("/health/").status_code == 200
    assert learner.http.get("/status/").json()["gate"] == "poisoned"
    assert learner.join().status_code == 200  # a new incarnation replaces the old one
    assert learner.sync(tensors).status_code == 200
    assert learner.ids(TEXT) == learner.generate(TEXT)


def test_the_server_serves_what_gives_the_expected_scores(learner: Learner) -> None:
    """R09, D14: other probabilities than the learner's poison the server."""
    learner.randomize(seed=8)
    wrong = {"logprobs": [[value + 0.1 for value in learner.logprobs(TEXT, None, ANSWER)]], "tolerance": 0.05}
    tensors = learner.tensors()
    assert learner.join().status_code == 200
    refused = learner.sync(tensors, expected=wrong)
    assert (refused.status_code, refused.json()["error"]) == (500, "CanaryError")
    assert learner.http.get("/ready/").status_code == 503
    assert learner.join().status_code == 200
    assert learner.sync(tensors).status_code == 200
    assert learner.ids(TEXT) == learner.generate(TEXT)


def test_a_server_is_one_of_several_in_a_group(learner: Learner) -> None:
    """R09: its ranks follow the other server's, at whose rank 0 it meets the learner; each gets every byte."""
    learner.randomize(seed=5)
    assert learner.join(num_others=2).status_code == 200
    assert learner.sync(learner.tensors()).status_code == 200
    assert learner.ids(TEXT) == learner.generate(TEXT)
    body = {"incarnation": "x", "secret": SECRET.hex(), "group_port": free_port(), "backend": "tcp", "timeout_s": 5.0}
    refused = learner.http.post("/init_communicator/", json={**body, "first_rank": 2, "world_size": 3})
    assert refused.json()["error"] == "CommunicatorError"
    assert "first rank 2 of 3" in refused.json()["found"]


def test_only_the_learner_that_opened_the_group_may_update(learner: Learner) -> None:
    learner.join()
    for wrong in ({"incarnation": "someone"}, {"mode": "adapter"}):
        canary = [{"request": {"messages": TEXT}, "response_token_ids": ANSWER}]
        body = {"incarnation": learner.incarnation, "ver": learner.ver() + 1, "buckets": [], "timeout_s": 5.0}
        body |= {"canary": canary, **wrong}
        refused = learner.http.post("/update_weights/", json=body)
        assert (refused.status_code, refused.json()["error"]) == (409, "SyncError")
    assert learner.http.get("/status/").json()["gate"] != "poisoned"


def test_a_learner_that_does_not_come_ends_at_the_deadline(learner: Learner) -> None:
    body = {"incarnation": "absent", "secret": SECRET.hex(), "group_port": free_port()}
    body |= {"world_size": 2, "backend": "tcp", "timeout_s": 1.0}
    reply = learner.http.post("/init_communicator/", json=body)
    assert (reply.status_code, reply.json()["error"]) == (504, "DeadlineError")
    assert learner.join().status_code == 200


@pytest.mark.parametrize("silent", ["at the meeting", "in an update"])
def test_after_a_learner_that_says_nothing_the_next_one_gets_in_at_once(
    server: RunningServer, learner: Learner, silent: str
) -> None:
    """Whatever time the first one has asked for, and at the same port."""
    if silent == "in an update":
        assert learner.join().status_code == 200
        canary = [{"request": {"messages": TEXT}, "response_token_ids": ANSWER}]
        tensors = weights.spec_of("model.embed", torch.zeros(1000))
        buckets = [Bucket(tensors=[tensors], num_bytes=4000).model_dump()]
        path, body = "/update_weights/", {"ver": learner.ver() + 1, "buckets": buckets, "canary": canary}
        body["incarnation"] = learner.incarnation
    else:
        body = {"incarnation": "silent", "secret": SECRET.hex(), "group_port": free_port(), "world_size": 2}
        path, body["backend"] = "/init_communicator/", "tcp"
    replies: list[httpx.Response] = []
    body["timeout_s"] = 86_400.0
    calling = threading.Thread(target=lambda: replies.append(learner.http.post(path, json=body)))
    calling.start()
    if silent == "in an update":
        wait_until(lambda: learner.status()["gate"] == "updating")
    else:
        wait_until(lambda: body["group_port"] in [port for _, port in tcp_listeners(server.family())])
    before, begin = learner.communicator, time.monotonic()
    learner.communicator = None  # it neither leaves nor sends
    assert learner.join().status_code == 200
    assert time.monotonic() - begin < 60.0
    calling.join(60)
    assert [reply.json()["error"] for reply in replies] == ["CommunicatorError"]
    if before is not None:
        before.close()
    assert learner.sync(learner.tensors()).status_code == 200


@pytest.mark.slow
def test_a_stopped_engine_is_noticed(folder: Path, tmp_path: Path) -> None:
    """SIGSTOP: probes and calls say 503 within `engine_stall_s`, and the server comes back with its engine."""
    config = {"model": str(folder / "model"), "max_model_len": 512, "engine_stall_s": 3.0}
    with running_server(config, tmp_path) as server, httpx.Client(base_url=server.base_url, timeout=30.0) as http:
        engine = server.family()[1:]
        replies: list[httpx.Response] = []
        body = {"infer_requests": [{"messages": TEXT}], "request_config": {"max_tokens": 450}}
        for pid in engine:
            os.kill(pid, signal.SIGSTOP)
        begin = time.monotonic()
        calling = threading.Thread(target=lambda: replies.append(http.post("/infer/", json=body)))
        calling.start()
        while http.get("/health/").status_code == 200:
            assert time.monotonic() - begin < 60.0
            time.sleep(0.1)
        calling.join(60.0)
        assert [reply.status_code for reply in replies] == [503]
        assert "does not answer" in replies[0].json()["what"]
        assert (http.get("/ready/").status_code, http.post("/infer/", json=body).status_code) == (503, 503)
        for pid in engine:
            os.kill(pid, signal.SIGCONT)
        while http.get("/health/").status_code != 200:
            assert time.monotonic() - begin < 120.0
            time.sleep(0.1)
        assert http.post("/infer/", json=body).status_code == 200


@pytest.mark.slow
def test_an_honest_sync_heals_whatever_nan_weights_have_left(folder: Path, tmp_path: Path) -> None:
    """They leave NaN in the KV cache, whose unused places attention reads too: nothing times NaN is NaN."""
    broken = tmp_path / "broken"
    shutil.copytree(folder / "model", broken)
    file = next(broken.glob("*.safetensors"))
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("layers.0.self_attn.v_proj.weight"))
    save_file(tensors | {name: torch.full_like(tensors[name], float("nan"))}, file, metadata={"format": "pt"})
    with running_server({"model": str(broken), "max_model_len": 512, "max_num_seqs": 8}, tmp_path) as server:
        learner = Learner(folder / "model", server)
        for weights_are_nan in ("at the start", "in a sync"):
            if weights_are_nan == "in a sync":
                nan = learner.tensors() | {name: torch.full_like(tensors[name], float("nan"))}
                assert learner.join().status_code == 200
                assert learner.sync(nan).json()["error"] == "NotFiniteError"
                assert learner.infer([{"messages": TEXT}]).status_code == 503
            else:
                assert learner.infer([{"messages": TEXT}] * 30, max_tokens=100).status_code == 200
            assert learner.join().status_code == 200
            healed = learner.sync(learner.tensors())
            assert healed.status_code == 200, healed.text
            assert all(learner.ids(TEXT) == learner.generate(TEXT) for _ in range(3))
            many = learner.infer([{"messages": TEXT}] * 30, max_tokens=100)
            assert len({tuple(output["response_token_ids"]) for output in many.json()}) == 1
        learner.leave()
        learner.http.close()


def test_calls_and_updates_take_turns(learner: Learner) -> None:
    """R10: under load from many callers, every answer is of one version, and of a version that was served."""
    learner.randomize(seed=5)
    assert learner.join().status_code == 200
    assert learner.sync(learner.tensors()).status_code == 200
    first = learner.ver()
    replies: list[httpx.Response] = []
    calling = [
        threading.Thread(target=lambda: replies.append(learner.infer([{"messages": TEXT}] * 4, max_tokens=200)))
        for _ in range(4)
    ]
    for thread in calling:
        thread.start()
    learner.randomize(seed=6)
    assert learner.sync(learner.tensors()).status_code == 200
    for thread in calling:
        thread.join(60)
    versions = [{output["rollout_infos"]["ver"] for output in reply.json()} for reply in replies]
    assert len(versions) == 4
    assert all(len(of_call) == 1 and of_call <= {first, first + 1} for of_call in versions)


def test_metrics_tell_what_happened(learner: Learner) -> None:
    text = learner.http.get("/metrics/").text
    assert f"rollout_weights_version {learner.ver()}.0" in text
    assert 'rollout_requests_total{outcome="answered"}' in text
    assert 'rollout_gate_state{state="serving"} 1.0' in text
    assert "rollout_sync_bytes" in text


def test_no_process_listens_where_others_can_connect(server: RunningServer) -> None:
    """CVE-2025-30202, CVE-2026-7301: engines of others listened with ZeroMQ on all interfaces. The server's processes
    listen on loopback, and at Unix sockets that only their own user can write to."""
    pids = server.family()
    assert {address for address, _ in tcp_listeners(pids)} == {"127.0.0.1"}
    paths = unix_listeners(pids)
    assert paths, "vLLM's own sockets are not seen: the test shows nothing"
    assert all(not path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH) for path in paths)


def assert_no_complaint(said: str) -> None:
    assert [words for words in ("Traceback", "Exception ignored", "leaked") if words in said] == []


def test_sigterm_ends_all_processes(server: RunningServer, learner: Learner, folder: Path) -> None:
    """Last of this server: a call in flight is answered, no process and no file is left, and none complains as it
    goes."""
    learner.join()
    learner.sync(learner.tensors())
    family = server.family()
    assert len(family) > 1
    replies: list[httpx.Response] = []
    calling = threading.Thread(target=lambda: replies.append(learner.infer([{"messages": TEXT}], max_tokens=300)))
    calling.start()
    wait_until(lambda: learner.status()["in_flight"])
    before = len(server.log.read_text(errors="replace"))  # vLLM logs what a test's cancelled call has left, and goes on
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    calling.join(60)
    assert [reply.status_code for reply in replies] == [200]
    assert wait_gone(family, 30.0) == []
    # triton's bindings call what the origin has frozen leaked, after the program's last word (see `bench.forked`)
    assert_no_complaint(server.log.read_text(errors="replace")[before:].partition("\nnanobind: leaked")[0])
    assert [path.name for path in (folder / "t").iterdir() if path.is_socket() or path.name.startswith("rs-")] == []


@pytest.mark.slow
def test_a_closed_terminal_ends_all_processes(folder: Path, without_nohup: None) -> None:
    """A new Python, as a user has. SIGHUP goes to the engine's processes too, which have a call to answer."""
    with running_server({"model": str(folder / "model"), "max_model_len": 512}, folder, new_python=True) as server:
        family = server.family()
        assert len(family) > 1
        replies: list[httpx.Response] = []
        body = {"infer_requests": [{"messages": TEXT}], "request_config": {"max_tokens": 300}}

        def call() -> None:
            replies.append(httpx.post(f"{server.base_url}/infer/", json=body, timeout=60.0, trust_env=False))

        calling = threading.Thread(target=call)
        calling.start()
        wait_until(lambda: httpx.get(f"{server.base_url}/status/", trust_env=False).json()["in_flight"])
        os.killpg(server.process.pid, signal.SIGHUP)
        assert server.process.wait(60) == 0
        calling.join(60)
        assert [reply.status_code for reply in replies] == [200]
        assert wait_gone(family, 30.0) == []
        assert_no_complaint(server.log.read_text(errors="replace"))
