"""Compiled layers compute what the layers do, one program serves all rows, and nothing but learning is compiled.

`aot_eager` traces and partitions as inductor does and leaves out its kernels; one test runs inductor itself.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import tests.unit.learner.policy.varlen  # noqa: F401  # the operators on the CPU
from learner.config.sections.grpo import GrpoConfig
from learner.config.sections.model import LoraConfig, ModelConfig
from learner.policy import attention, compiled, loss
from learner.policy.load import Policy
from learner.records import EncodedPrompt, PackedRow
from learner.rollout.hf import generating
from learner.run.stopping import Stopped
from shared.errors import ConfigError
from tests.unit.learner.policy.rows import gradients, image, policy_of, row, sample, segment

# torch's own, from looking at tensors while it traces
pytestmark = [pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"), pytest.mark.slow]
ROWS = [(20, 30, 7), (50, 1, 8, 9), (200,), (33, 33), (7, 150, 9, 40, 1, 1), ()]  # tokens of answers
PROMPT = EncodedPrompt(token_ids=(5, 6, 7), vision=None)


@pytest.fixture(autouse=True)
def _fast_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    monkeypatch.setattr(loss, "LOGITS_CHUNK", 50)  # no size of a tiny model, which torch would take it for
    compiled.compiled_function.cache_clear()
    torch._dynamo.reset()
    counters.clear()
    yield
    compiled.compiled_function.cache_clear()
    torch._dynamo.reset()


@pytest.fixture
def _faster_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace the forward pass alone: for what is broken into many graphs, and where only their number counts."""
    monkeypatch.setattr(compiled, "BACKEND", "eager")


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the varlen operators for 16-bit tensors on the CPU too."""
    monkeypatch.setattr(attention, "_varlen_can", lambda query: query.dtype == torch.bfloat16)


def num_programs() -> int:
    return counters["stats"]["unique_graphs"]


def text_row(answers: Sequence[int]) -> PackedRow:
    return row(*(segment(PROMPT, length, seed=i) for i, length in enumerate(answers)))


def image_row(policy: Policy, sizes: Sequence[tuple[int, int]]) -> PackedRow:
    prompts = [policy.encoder.encode(sample([image(*size)] if size[0] else [])) for size in sizes]
    return row(*(segment(prompt, 15 + 40 * i, seed=i) for i, prompt in enumerate(prompts)))


def assert_same_learning(one: Policy, other: Policy, what: PackedRow, *, rel: float) -> None:
    for policy in (one, other):
        policy.model.zero_grad()
    assert other.backward(what).loss_sum == pytest.approx(one.backward(what).loss_sum, rel=rel)
    expected, found = gradients(one), gradients(other)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert (found[name] - grad).float().norm() <= 10 * rel * grad.float().norm() + 1e-6, name


@pytest.mark.usefixtures("as_on_cuda")
def test_one_program_for_all_layers_and_rows(tiny_text: Path) -> None:
    """No graph breaks, no recompilation: rows of all lengths, long and short chunks of logits, an empty row (D5). With
    gradient checkpointing, where the rows have images: below."""
    eager, policy = (policy_of(tiny_text, compile=wanted, dtype="bfloat16") for wanted in (False, True))
    assert_same_learning(eager, policy, text_row(ROWS[0]), rel=1e-3)
    before = num_programs()
    for answers in ROWS[1:]:
        assert_same_learning(eager, policy, text_row(answers), rel=1e-3)
    assert num_programs() == before
    assert not counters["graph_break"]


@pytest.mark.usefixtures("as_on_cuda")
def test_rows_with_shared_prompts_share_a_program(tiny_text: Path) -> None:
    """R47: groups of all sizes, a group of one, an empty row; and what the kernel learns is what whole segments do."""
    settings: dict[str, Any] = {"dtype": "bfloat16", "grpo": GrpoConfig()}
    eager, policy = (policy_of(tiny_text, compile=wanted, **settings) for wanted in (False, True))
    one_sample = [replace(text_row(answers), share_prompts=bool(answers)) for answers in ROWS]
    rows = [replace(one, segments=tuple(replace(s, sample_id="s") for s in one.segments)) for one in one_sample]
    for one in rows[:1]:
        assert_same_learning(eager, policy, one, rel=1e-3)
    before = num_programs()
    for one in rows[1:]:
        assert_same_learning(eager, policy, one, rel=1e-3)
    assert num_programs() == before
    assert not counters["graph_break"]
    for one in rows[:-1]:
        losses = [eager.backward(replace(one, share_prompts=shared)).loss_sum for shared in (True, False)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-2)


@pytest.mark.usefixtures("_faster_compiler")
def test_one_token_more_than_full_chunks_compiles_nothing() -> None:
    """torch compiles again for a length of 1."""
    head = torch.nn.Linear(8, 60)
    programs = []
    for length in (47, 51, 101):
        hidden, targets = torch.randn(length, 8), torch.randint(0, 60, (length,))
        found, plain = (loss.token_logprobs(hidden, head, targets, compiled=wanted) for wanted in (True, False))
        torch.testing.assert_close(found, plain)
        programs.append(num_programs())
    assert programs == [1, 1, 1]


@pytest.mark.usefixtures("_faster_compiler")
def test_without_the_kernel_in_another_family(tiny_qwen2_5_vl: Path) -> None:
    """float32: attention is SDPA outside of what is compiled. Qwen2.5-VL: windows in the vision tower."""
    eager, policy = (policy_of(tiny_qwen2_5_vl, compile=wanted) for wanted in (False, True))
    for sizes in ([(128, 128), (0, 0)], [(64, 64), (96, 160), (256, 64)]):
        assert_same_learning(eager, policy, image_row(eager, sizes), rel=1e-5)
    before = num_programs()
    assert_same_learning(eager, policy, image_row(eager, [(0, 0), (64, 64), (0, 0), (0, 0)]), rel=1e-5)
    assert num_programs() == before


@pytest.mark.usefixtures("as_on_cuda")
def test_images_of_all_sizes_share_a_program(tiny_vlm: Path) -> None:
    options: dict[str, Any] = {"dtype": "bfloat16", "gradient_checkpointing": True}
    eager, policy = (policy_of(tiny_vlm, compile=wanted, **options) for wanted in (False, True))
    assert_same_learning(eager, policy, image_row(eager, [(64, 64), (0, 0), (128, 96)]), rel=5e-3)
    before = num_programs()
    for sizes in ([(128, 128)], [(96, 160), (256, 64), (64, 64), (0, 0)], [(0, 0), (0, 0)]):
        assert_same_learning(eager, policy, image_row(eager, sizes), rel=5e-3)
    assert num_programs() == before
    assert not counters["graph_break"]


@pytest.mark.usefixtures("as_on_cuda")
def test_adapters_and_frozen_parts(tiny_vlm: Path) -> None:
    """Autocast from float32 weights, LoRA on the language model, the vision tower frozen."""
    options: dict[str, Any] = {"lora": LoraConfig(r=4), "freeze": ["model.visual"], "gradient_checkpointing": True}
    eager, policy = (policy_of(tiny_vlm, bf16=True, compile=wanted, **options) for wanted in (False, True))
    for one in (eager, policy):
        torch.manual_seed(1)
        for name, parameter in one.trainable:
            if "lora_B" in name:  # zero at first, so that no gradient would reach lora_A
                torch.nn.init.normal_(parameter, std=0.1)
    for sizes in ([(64, 64), (0, 0)], [(128, 128), (96, 160)]):
        assert_same_learning(eager, policy, image_row(eager, sizes), rel=5e-3)


@pytest.mark.usefixtures("_faster_compiler", "as_on_cuda")
@pytest.mark.parametrize("freeze", [[], ["model.visual"]])
def test_adapters_compile_no_layer_twice(tiny_vlm: Path, freeze: list[str]) -> None:
    """Everything before the first layer may be frozen, so its input alone would need no gradient. And the input of a
    vision tower's first layer is a view, which no other layer's is."""
    found = []
    for lora in (None, LoraConfig(r=4)):
        options: dict[str, Any] = {"dtype": "bfloat16", "gradient_checkpointing": True, "freeze": freeze}
        policy = policy_of(tiny_vlm, bf16=True, compile=True, lora=lora, **options)
        before = num_programs()
        policy.backward(image_row(policy, [(96, 64), (0, 0)]))
        policy.backward(image_row(policy, [(128, 128)]))
        found.append(num_programs() - before)
        torch._dynamo.reset()
        compiled.compiled_function.cache_clear()
    assert found[0] == found[1]


@pytest.mark.usefixtures("as_on_cuda")
def test_no_graph_is_compiled_for_floats_that_never_change(tiny_vlm: Path) -> None:
    """By default torch takes a layer's epsilon for an input. A kernel wants the number, so torch gave the finished
    graph up and began again, also where a run before had compiled it."""
    policy = policy_of(tiny_vlm, compile=True, dtype="bfloat16", lora=LoraConfig(r=4, alpha=8))
    policy.backward(image_row(policy, [(64, 64)]))
    assert counters["aot_autograd"]["total"] == num_programs() > 2
    assert not torch._dynamo.config.specialize_float, "other parts of this process compile as before"


@pytest.mark.usefixtures("_faster_compiler")
def test_names_and_scores_stay(tiny_text: Path) -> None:
    eager, policy = (policy_of(tiny_text, compile=wanted) for wanted in (False, True))
    policy.backward(text_row(ROWS[0]))
    before = num_programs()
    assert [name for name, _ in policy.trainable] == [name for name, _ in eager.trainable]
    assert policy.weight_specs() == eager.weight_specs()
    assert policy.model.state_dict().keys() == eager.model.state_dict().keys()
    assert policy.logprobs([(PROMPT, [9, 10, 11])]) == eager.logprobs([(PROMPT, [9, 10, 11])])
    assert num_programs() == before


@pytest.mark.usefixtures("_faster_compiler")
def test_generating_compiles_nothing(tiny_text: Path) -> None:
    """Learning goes on with the program that it has."""
    policy = policy_of(tiny_text, compile=True)
    policy.backward(text_row(ROWS[0]))
    policy.backward(text_row(ROWS[1]))
    before = num_programs()
    ids = torch.tensor([PROMPT.token_ids])
    with generating(policy.model):
        said = policy.model.generate(input_ids=ids, max_new_tokens=5, do_sample=False)  # type: ignore[operator]
    assert said.shape[1] > ids.shape[1]
    policy.backward(text_row(ROWS[4]))
    assert num_programs() == before


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++ on CPU")
def test_inductor_itself(tiny_text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "inductor")
    eager, policy = (policy_of(tiny_text, compile=wanted) for wanted in (False, True))
    for answers in ROWS[::2]:
        assert_same_learning(eager, policy, text_row(answers), rel=1e-4)


def broken_backend(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("gcc: command not found")


def test_a_compiler_that_does_not_work(tiny_text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`true` ends with what is missing; `auto`, on a model that is worth it, goes on without."""
    monkeypatch.setattr(compiled, "BACKEND", broken_backend)
    with pytest.raises(ConfigError, match="gcc: command not found"):
        policy_of(tiny_text, compile=True)
    monkeypatch.setattr(compiled, "_not_worth_it", lambda model, device: "")
    policy = policy_of(tiny_text, compile="auto")
    assert "gcc: command not found" in policy.why_not_compiled
    assert policy.backward(text_row(ROWS[0])).num_supervised > 0


def layers_break_it(graph: Any, inputs: Any) -> Any:
    if len(graph.graph.nodes) > 10:
        raise RuntimeError("an operator without a kernel")
    return graph


def test_a_layer_that_can_not_be_compiled(tiny_text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", layers_break_it)
    policy = policy_of(tiny_text, compile=True)
    with pytest.raises(ConfigError, match=r"an operator without a kernel.*set model.compile: false"):
        policy.backward(text_row(ROWS[0]))


def stopped_while_it_compiles(graph: Any, inputs: Any) -> Any:
    if len(graph.graph.nodes) > 10:
        raise Stopped(signal.SIGTERM, agreed=False)
    return graph


def test_a_stop_while_a_layer_is_compiled_is_not_the_compilers_failure(
    tiny_text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ended as failed, by a layer that cannot be compiled."""
    monkeypatch.setattr(compiled, "BACKEND", stopped_while_it_compiles)
    policy = policy_of(tiny_text, compile=True)
    with pytest.raises(Stopped, match="stopped by SIGTERM"):
        policy.backward(text_row(ROWS[0]))


def test_auto_leaves_the_cpu_and_small_models_alone(tiny_text: Path) -> None:
    policy = policy_of(tiny_text)
    assert ModelConfig(path=str(tiny_text)).compile == "auto"
    assert "CUDA" in policy.why_not_compiled
    assert "parameters" in compiled.compile_layers(policy.model, "auto", torch.device("cuda"))
    assert all(module._compiled_call_impl is None for module in policy.model.modules())
