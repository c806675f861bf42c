"""`HfBackend`: what the packed forward says the model would answer, request by request, whatever shares the batch.

The references decode one sample at a time over full logits of the learning forward, without a cache or padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from learner.config.sections.model import LoraConfig
from learner.config.sections.rollout_matching import RolloutMatchingConfig
from learner.data.prompt import PromptEncoder
from learner.policy.load import Policy
from learner.records import EncodedPrompt, RolloutCallLog, Sample
from learner.rollout import hf
from learner.rollout.backend import MicroStep
from learner.rollout.hf import HfBackend, RepetitionPenalty, SeededChoice, repeats, stop_token_ids
from shared.errors import ConfigError, PromptTooLongError, RolloutError
from shared.generation import sampling_params
from shared.seeds import request_seed
from shared.wire import RequestConfig
from tests.tiers import slow
from tests.unit.learner.policy.rows import gradients, image, policy_of, row, segment
from tests.unit.learner.policy.rows import sample as sample_of
from tests.unit.learner.rollout.hf_reference import NUM_NEW, SAMPLE, reference_beam, reference_greedy, reference_sample

PLACE = {"global_step": 4, "micro_step_idx": 1}


@pytest.fixture(scope="module")
def vlm(tiny_vlm: Path) -> Policy:
    return policy_of(tiny_vlm)


@pytest.fixture(scope="module")
def text(tiny_text: Path) -> Policy:
    return policy_of(tiny_text)


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """Return prompts of very different lengths, with no, one and two images."""
    pictures = [image(128, 128, 1), image(64, 96, 2), image(160, 64, 3)]
    made = [
        sample_of([pictures[0]]),
        sample_of(text="hi"),
        sample_of(pictures[1:], "Detect every digit in both of these pictures, please."),
        sample_of([pictures[1]], "x"),
        sample_of(text="name every digit " * 4),
    ]
    return [replace(one, sample_id=f"s{i}") for i, one in enumerate(made)]


def backend_of(policy: Policy, decode_batch_size: int = 8, **decoding: Any) -> HfBackend:
    settings = {"max_new_tokens": NUM_NEW, **decoding}
    keys = {"rollout_backend": "hf", "decode_batch_size": decode_batch_size, "decoding": settings}
    return HfBackend(RolloutMatchingConfig.model_validate(keys), policy, run_seed=7)


def answers(backend: HfBackend, samples: Sequence[Sample], first: int = 0, **options: Any) -> list[tuple[int, ...]]:
    rollouts = backend.generate(samples, **PLACE, first_req_idx=first, **options)
    assert [rollout.sample for rollout in rollouts] == list(samples)
    return [rollout.response_token_ids for rollout in rollouts]


# ---- references ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", [slow(1.0), 1.3])
def test_greedy_is_what_the_learning_forward_says(vlm: Policy, samples: list[Sample], penalty: float) -> None:
    """R03: padded batches with images of any size, cached, at the right multimodal positions."""
    found = answers(backend_of(vlm, repetition_penalty=penalty), samples)
    assert found == [reference_greedy(vlm, one, penalty) for one in samples]
    assert len({token for response in found for token in response}) > len(samples), "too little to compare"


def test_each_beam_is_penalized_for_its_own_prompt_and_answer() -> None:
    """Two beams of each prompt, side by side; the first prompt has a token of padding."""
    token_ids = torch.tensor([[0, 1, 5], [0, 1, 6], [2, 3, 7], [2, 3, 4]])
    found = RepetitionPenalty(2.0, torch.tensor([[0, 1], [1, 1]]))(token_ids, torch.ones(4, 8))
    assert [(row < 1.0).nonzero().flatten().tolist() for row in found] == [[1, 5], [1, 6], [2, 3, 7], [2, 3, 4]]
    assert found.min() == 0.5


def test_a_draw_of_0_takes_no_token_without_a_probability() -> None:
    """Top-k and top-p leave such tokens, also before all others."""
    choice = SeededChoice([1], 0, 1)
    choice._draws = torch.zeros(1, 1)
    found = choice(torch.zeros(1, 0, dtype=torch.int64), torch.tensor([[-torch.inf, 0.0, 0.0]]))
    assert found.tolist() == [[-torch.inf, 0.0, -torch.inf]]


@pytest.mark.slow
def test_greedy_of_another_family(tiny_qwen2_5_vl: Path, samples: list[Sample]) -> None:
    """Qwen2.5-VL."""
    policy = policy_of(tiny_qwen2_5_vl)
    assert answers(backend_of(policy), samples) == [reference_greedy(policy, one) for one in samples]


def test_greedy_of_a_text_model(text: Policy) -> None:
    prompts = [sample_of(text="name " * n) for n in (1, 7, 3)]
    found = answers(backend_of(text, repetition_penalty=1.3), prompts)
    assert found == [reference_greedy(text, one, 1.3) for one in prompts]


@given(
    part=st.lists(st.integers(0, 2), min_size=1, max_size=12),
    times=st.integers(1, 30),
    end=st.lists(st.integers(0, 2), max_size=6),
    count=st.integers(2, 4),
)
def test_repetitions_are_those_that_vllm_ends(part: list[int], times: int, end: list[int], count: int) -> None:
    from vllm.sampling_params import RepetitionDetectionParams
    from vllm.v1.core.sched.utils import check_sequence_repetition

    sampling = sampling_params(RequestConfig(stop_repetitions=count), seed=None)
    asked = sampling.repetition_detection
    assert isinstance(asked, RepetitionDetectionParams)
    answer = [*part * times, *end]
    assert repeats(answer, count) == check_sequence_repetition(answer, asked)
    assert sampling_params(RequestConfig(), seed=None).repetition_detection is None


def test_an_answer_that_repeats_itself_is_ended_and_counts_as_cut_off(vlm: Policy, samples: list[Sample]) -> None:
    """The others go on, and a penalty leaves nothing to end."""
    long = {"max_new_tokens": 120}
    whole = answers(backend_of(vlm, **long), samples)
    expected = [next((a[:n] for n in range(len(a)) if repeats(a[:n], 3)), a) for a in whole]
    assert any(len(cut) < len(a) for cut, a in zip(expected, whole, strict=True)), "nothing repeats: this shows nothing"
    found = backend_of(vlm, stop_repetitions=3, **long).generate(samples, **PLACE, first_req_idx=0, greedy=True)
    assert [rollout.response_token_ids for rollout in found] == expected
    for rollout, cut, one in zip(found, expected, whole, strict=True):
        if len(cut) < len(one):
            assert (rollout.finish_reason, rollout.stop_token_id) == ("length", None)
            assert rollout.logprobs is not None
            assert len(rollout.logprobs) == len(cut)


def test_it_says_how_far_answers_are(vlm: Policy, samples: list[Sample], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU they take minutes."""
    monkeypatch.setattr(hf, "TELL_S", 0.0)
    backend, said = backend_of(vlm, 3), list[str]()
    backend.tell = said.append
    answers(backend, samples)
    assert said[0] == f"answers 1 to 3 of {len(samples)}, token 1 of at most {NUM_NEW}"
    assert said[-1] == f"answers 4 to {len(samples)} of {len(samples)}, token {NUM_NEW} of at most {NUM_NEW}"
    monkeypatch.setattr(hf, "TELL_S", 3600.0)
    answers(backend, samples[:1])
    assert len(said) <= 2 * NUM_NEW


def test_samples_are_drawn_by_the_requests_own_seeds(vlm: Policy, samples: list[Sample]) -> None:
    """R11 R29: temperature, top-k, top-p and penalty, then one draw per token."""
    found = answers(backend_of(vlm, **SAMPLE), samples, first=3)
    seeds = [request_seed(run_seed=7, **PLACE, req_idx=3 + i) for i in range(len(samples))]
    assert found == [reference_sample(vlm, one, seed) for one, seed in zip(samples, seeds, strict=True)]


def test_a_beam_search_gives_its_best_beam(vlm: Policy, samples: list[Sample]) -> None:
    """D7. The answer is likelier than the greedy one for some sample, or this would show nothing."""
    found = answers(backend_of(vlm, decode_mode="beam", num_beams=3), samples)
    assert found == [reference_beam(vlm, one, 3) for one in samples]
    assert found != answers(backend_of(vlm), samples)


def test_beams_count_as_sequences(vlm: Policy, samples: list[Sample], monkeypatch: pytest.MonkeyPatch) -> None:
    """R21, D10: `decode_batch_size: 5` holds one beam search of three beams; evaluations are greedy, and fill it."""
    backend = backend_of(vlm, 5, decode_mode="beam", num_beams=3)
    sizes: list[int] = []
    decode = HfBackend._decode

    def counted(self: HfBackend, prompts: Sequence[EncodedPrompt], *rest: Any) -> Any:
        sizes.append(len(prompts))
        return decode(self, prompts, *rest)

    monkeypatch.setattr(HfBackend, "_decode", counted)
    answers(backend, samples[:3])
    assert sizes == [1, 1, 1]
    answers(backend, samples[:3], greedy=True)
    assert sizes[3:] == [3]
    with pytest.raises(ConfigError, match="decode_batch_size"):
        backend_of(vlm, 2, decode_mode="beam", num_beams=3)


@pytest.mark.parametrize("decoding", [slow({}), SAMPLE, slow({"decode_mode": "beam", "num_beams": 2})])
def test_a_rollout_depends_on_its_prompt_and_place_only(
    vlm: Policy, samples: list[Sample], decoding: dict[str, Any]
) -> None:
    """R11: not on `decode_batch_size`, on what else is in the batch, or on how ranks share the requests."""
    whole = answers(backend_of(vlm, **decoding), samples)
    beams = decoding.get("num_beams", 1)
    for size in (beams, beams + 1, 3 * beams):
        assert answers(backend_of(vlm, size, **decoding), samples) == whole
    shares = [answers(backend_of(vlm, **decoding), samples[i : i + 2], first=i) for i in (0, 2, 4)]
    assert [response for share in shares for response in share] == whole


def test_a_window_s_rollouts_are_those_of_its_micro_steps(vlm: Policy, samples: list[Sample]) -> None:
    """R11, R21: batches hold samples of any micro-step, as many as are configured."""
    backend = backend_of(vlm, 2, **SAMPLE)
    parts = [samples[:1], samples[1:4], [], samples[4:]]
    window = [MicroStep(samples=part, micro_step_idx=i, first_req_idx=5) for i, part in enumerate(parts)]
    alone = [backend.generate(part, global_step=4, micro_step_idx=i, first_req_idx=5) for i, part in enumerate(parts)]
    assert backend.generate_window(window, global_step=4) == alone


def test_another_place_in_the_run_is_another_sample(vlm: Policy, samples: list[Sample]) -> None:
    """R11: seeds follow from run, step, micro-step and request."""
    backend = backend_of(vlm, temperature=1.0)
    places = [(4, 1, 0), (5, 1, 0), (4, 0, 0), (4, 1, 1)]
    found = [
        backend.generate(samples[:1], global_step=step, micro_step_idx=micro, first_req_idx=first)[0]
        for step, micro, first in places
    ]
    assert len({rollout.response_token_ids for rollout in found}) == len(places)
    assert [rollout.seed for rollout in found] == [
        request_seed(run_seed=7, global_step=step, micro_step_idx=micro, req_idx=first) for step, micro, first in places
    ]


def test_evaluation_is_greedy_whatever_the_configuration(vlm: Policy, samples: list[Sample]) -> None:
    plain = answers(backend_of(vlm), samples)
    assert answers(backend_of(vlm, temperature=1.0), samples, greedy=True) == plain
    assert answers(backend_of(vlm, decode_mode="beam", num_beams=3), samples, greedy=True) == plain


def test_a_temperature_draws_from_all_tokens_whatever_the_configuration(vlm: Policy, samples: list[Sample]) -> None:
    """R48: labels are completed by samples, also in a run that learns from greedy rollouts."""
    window = [MicroStep(samples=samples, micro_step_idx=0, first_req_idx=3)]
    plain = backend_of(vlm, temperature=0.7, decode_mode="sample").generate_window(window, global_step=4)
    for decoding in ({}, {**SAMPLE, "repetition_penalty": 1.0}, {"decode_mode": "beam", "num_beams": 3}):
        assert backend_of(vlm, **decoding).generate_window(window, global_step=4, temperature=0.7) == plain


def test_the_checkpoints_generation_settings_do_not_decode(
    vlm: Policy, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real checkpoints ask for sampling and penalties; what counts is the run's configuration."""
    plain = answers(backend_of(vlm), samples)
    for name, value in {"do_sample": True, "temperature": 0.7, "top_k": 5, "repetition_penalty": 1.5}.items():
        monkeypatch.setattr(vlm.model.generation_config, name, value)
    assert answers(backend_of(vlm), samples) == plain


@pytest.mark.parametrize("decoding", [{"repetition_penalty": 1.3}, SAMPLE])
def test_answers_are_cut_before_their_stop_token(
    vlm: Policy, samples: list[Sample], monkeypatch: pytest.MonkeyPatch, decoding: dict[str, Any]
) -> None:
    """R03: neighbours that go on are not cut, and draw what they would have drawn."""
    unstopped = answers(backend_of(vlm, **decoding), samples)
    stop = unstopped[0][2]
    monkeypatch.setattr(vlm.model.generation_config, "eos_token_id", [stop])
    rollouts = backend_of(vlm, **decoding).generate(samples, **PLACE, first_req_idx=0)
    assert {rollout.finish_reason for rollout in rollouts} == {"stop", "length"}
    for rollout, whole in zip(rollouts, unstopped, strict=True):
        assert rollout.response_token_ids == whole[: whole.index(stop) if stop in whole else None]
        assert rollout.finish_reason == ("stop" if stop in whole else "length")


def test_a_beam_that_ends_is_cut_too(vlm: Policy, samples: list[Sample], monkeypatch: pytest.MonkeyPatch) -> None:
    """R03: with half of the vocabulary as stop tokens, some best beams end and some may not; none holds one."""
    stops = range(0, len(vlm.tokenizer), 2)
    monkeypatch.setattr(vlm.model.generation_config, "eos_token_id", list(stops))
    rollouts = backend_of(vlm, decode_mode="beam", num_beams=3).generate(samples, **PLACE, first_req_idx=0)
    assert "stop" in {rollout.finish_reason for rollout in rollouts}
    for rollout in rollouts:
        assert not {*stops} & {*rollout.response_token_ids}
        assert (len(rollout.response_token_ids) == NUM_NEW) == (rollout.finish_reason == "length")


@pytest.mark.parametrize(("listed", "expected"), [(5, {5}), ([5, 9], {5, 9}), (None, set())])
def test_stop_tokens_are_the_servers(
    vlm: Policy, monkeypatch: pytest.MonkeyPatch, listed: Any, expected: set[int]
) -> None:
    """R03: those of the checkpoint's generation settings, and always the tokenizer's own."""
    monkeypatch.setattr(vlm.model.generation_config, "eos_token_id", listed)
    assert set(stop_token_ids(vlm.model, vlm.tokenizer)) == expected | {vlm.tokenizer.eos_token_id}


def test_an_adapter_generates_too(tiny_vlm: Path, samples: list[Sample]) -> None:
    """R02: rollouts of a LoRA run come from the adapted model, without its dropout."""
    policy = policy_of(tiny_vlm, lora=LoraConfig(r=4, dropout=0.5, target_modules="all-linear"))
    with torch.no_grad():
        for name, parameter in policy.trainable:
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    policy.model.train()
    found = answers(backend_of(policy), samples[:3])
    assert found == [reference_greedy(policy, one) for one in samples[:3]]
    assert found != answers(backend_of(policy_of(tiny_vlm)), samples[:3])


@pytest.mark.parametrize("bf16", [slow(False), True])
def test_the_precision_is_that_of_learning(tiny_vlm: Path, samples: list[Sample], bf16: bool) -> None:
    policy = policy_of(tiny_vlm, bf16=bf16)
    seen = set()

    def told(_: Any, __: Any, logits: torch.Tensor) -> None:
        seen.add((logits.dtype, logits.requires_grad))

    policy.model.get_output_embeddings().register_forward_hook(told)
    answers(backend_of(policy), samples)
    assert seen == {(torch.bfloat16 if bf16 else torch.float32, False)}


# ---- records -------------------------------------------------------------------------------------------------------


def test_rollouts_say_where_they_come_from(vlm: Policy, samples: list[Sample]) -> None:
    """R03 R15: prompts are the encoder's ids, `ver` the number of updates; calls are logged with seeds and sizes."""
    heard: list[RolloutCallLog] = []
    backend = backend_of(vlm, 2)
    backend._on_call = heard.append
    rollouts = backend.generate(samples, **PLACE, first_req_idx=6)
    assert [r.prompt_token_ids for r in rollouts] == [vlm.encoder.encode(one).token_ids for one in samples]
    assert {(r.ver, r.server_id) for r in rollouts} == {(PLACE["global_step"], "")}
    (record,) = heard
    assert [(call.first_req_idx, call.num_requests) for call in record.calls] == [(6, 2), (8, 2), (10, 1)]
    assert [call.seed for call in record.calls] == [rollouts[i].seed for i in (0, 2, 4)]
    assert (record.num_requests, record.chunk, record.ver) == (5, 2, PLACE["global_step"])


@pytest.mark.parametrize("temperature", [slow(0.0), 1.0])
def test_log_probabilities_are_those_of_the_learning_forward(
    vlm: Policy, samples: list[Sample], temperature: float
) -> None:
    keys = {"rollout_backend": "hf", "decode_batch_size": 3}
    keys["decoding"] = {"max_new_tokens": NUM_NEW, "temperature": temperature, "repetition_penalty": 1.3}
    backend = HfBackend(RolloutMatchingConfig.model_validate(keys), vlm, run_seed=7, logprobs=True)
    for rollout in backend.generate(samples, first_req_idx=0, **PLACE):
        stop = () if rollout.stop_token_id is None else (rollout.stop_token_id,)
        answer = (*rollout.response_token_ids, *stop)
        (wanted,) = vlm.logprobs([(vlm.encoder.encode(rollout.sample), answer)])
        assert rollout.logprobs == pytest.approx(wanted, abs=2e-4)
    plain = backend_of(vlm)
    assert plain.generate(samples[:1], first_req_idx=0, **PLACE)[0].logprobs is None
    (greedy,) = plain.generate(samples[:1], first_req_idx=0, greedy=True, **PLACE)
    assert greedy.logprobs is not None, "an evaluation scores its boxes with them"
    assert len(greedy.logprobs) == len(greedy.response_token_ids) + (greedy.stop_token_id is not None)


def test_a_group_s_prompt_is_encoded_once(vlm: Policy, samples: list[Sample], monkeypatch: pytest.MonkeyPatch) -> None:
    """R21: a sample that is drawn several times has its images opened once, and its answers stay the same."""
    backend, encode, asked = backend_of(vlm, temperature=1.0), PromptEncoder.encode, []

    def encoded(encoder: PromptEncoder, sample: Sample) -> EncodedPrompt:
        asked.append(sample.sample_id)
        return encode(encoder, sample)

    drawn = [one for one in samples[:2] for _ in range(3)]
    alone = [answers(backend, [one], first)[0] for first, one in enumerate(drawn)]
    monkeypatch.setattr(PromptEncoder, "encode", encoded)
    assert answers(backend, drawn) == alone
    assert asked == ["s0", "s1"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_host_reads_no_value_of_each_sequence(vlm: Policy, samples: list[Sample], temperature: float) -> None:
    """R21: a GPU's host waits at each value that it reads, so their number must not grow with the batch."""

    class Reads(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.number += function is torch.ops.aten._local_scalar_dense.default
            return function(*args, **(kwargs or {}))

    def reads(number: int) -> int:
        with Reads() as counted:
            rollouts = backend.generate([samples[1]] * number, first_req_idx=0, greedy=temperature == 0, **PLACE)
        assert all(len(rollout.logprobs or ()) == NUM_NEW for rollout in rollouts), "each ran to the end"
        return counted.number

    keys = {"rollout_backend": "hf", "decode_batch_size": 8}
    keys["decoding"] = {"max_new_tokens": NUM_NEW, "temperature": temperature}
    backend = HfBackend(RolloutMatchingConfig.model_validate(keys), vlm, run_seed=7, logprobs=True)
    assert reads(6) == reads(2) > 0


def test_no_samples_no_call(vlm: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """R07: nothing is generated for nothing."""
    monkeypatch.setattr(vlm.model, "generate", lambda **_: pytest.fail("generated"))
    assert backend_of(vlm).generate([], **PLACE, first_req_idx=0) == []


def test_no_batch_is_larger_than_configured(
    vlm: Policy, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """R21."""
    sizes, generate = [], vlm.model.generate

    def told(**inputs: Any) -> torch.Tensor:
        sizes.append(len(inputs["input_ids"]))
        return generate(**inputs)

    monkeypatch.setattr(vlm.model, "generate", told)
    answers(backend_of(vlm, 3), samples)
    assert sizes == [3, 2]


# ---- training does not notice --------------------------------------------------------------------------------------


def test_training_goes_on_as_if_nothing_had_been_generated(tiny_vlm: Path, samples: list[Sample]) -> None:
    """Gradients bit for bit, with dropout and gradient checkpointing, and the generators' state behind them."""
    lora = LoraConfig(r=4, dropout=0.5, target_modules="all-linear")
    states = []
    for generates in (False, True):
        policy = policy_of(tiny_vlm, lora=lora, gradient_checkpointing=True)
        rows = [row(segment(policy.encoder.encode(one), 20, i)) for i, one in enumerate(samples[:2])]
        torch.manual_seed(5)
        policy.backward(rows[0])
        if generates:
            answers(backend_of(policy, **SAMPLE), samples)
            answers(backend_of(policy, decode_mode="beam", num_beams=2), samples)
        policy.backward(rows[1])
        states.append((gradients(policy), torch.get_rng_state()))
    (expected, expected_rng), (found, found_rng) = states
    assert torch.equal(found_rng, expected_rng)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("fails", [slow(False), True])
def test_the_model_is_left_as_it_was(
    tiny_vlm: Path, samples: list[Sample], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Mixed training modes, frozen parameters, attention and generation settings; also after an error."""
    policy = policy_of(tiny_vlm, freeze=["model.visual"], gradient_checkpointing=True)
    model = policy.model
    model.train()
    model.base_model.visual.eval()

    def state() -> list[Any]:
        configs = [module.config for module in model.modules() if hasattr(module, "config")]
        return [
            [module.training for module in model.modules()],
            [parameter.requires_grad for parameter in model.parameters()],
            [config._attn_implementation for config in configs],
            model.generation_config,
            torch.is_grad_enabled(),
        ]

    before = state()
    if fails:
        with raising(monkeypatch, policy, RuntimeError("broken")), pytest.raises(RuntimeError, match="broken"):
            answers(backend_of(policy), samples)
    else:
        answers(backend_of(policy), samples)
    assert state() == before
    assert all(parameter.grad is None for parameter in model.parameters())


# ---- faults --------------------------------------------------------------------------------------------------------


@contextmanager
def raising(monkeypatch: pytest.MonkeyPatch, policy: Policy, error: Exception) -> Iterator[None]:
    """The forward pass of the language model fails."""

    def fail(*_: Any, **__: Any) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(policy.model.base_model.language_model, "forward", fail)
        yield


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried ..."),
    ],
)
def test_out_of_memory_names_the_keys_to_turn(
    vlm: Policy, samples: list[Sample], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    heard: list[RolloutCallLog] = []
    backend = backend_of(vlm, 3)
    backend._on_call = heard.append
    with raising(monkeypatch, vlm, error), pytest.raises(RolloutError, match="out of memory") as caught:
        answers(backend, samples)
    assert "decode_batch_size" in caught.value.remedy
    assert "vllm.mode: server" in caught.value.remedy
    assert str(error)[:20] in caught.value.found
    assert heard[0].calls[0].error == str(caught.value)
    assert answers(backend, samples), "usable again once there is memory"


def test_a_request_longer_than_the_context(vlm: Policy, samples: list[Sample], monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before anything is generated, also where only the last of the samples is too long; one that just fits is
    taken."""
    length = max(len(vlm.encoder.encode(one).token_ids) for one in samples)
    monkeypatch.setattr(vlm.model.config.get_text_config(), "max_position_embeddings", length + NUM_NEW)
    assert answers(backend_of(vlm), samples)
    monkeypatch.setattr(vlm.model.config.get_text_config(), "max_position_embeddings", length + NUM_NEW - 1)
    backend = backend_of(vlm)
    monkeypatch.setattr(vlm.model, "generate", lambda **_: pytest.fail("generated"))
    with pytest.raises(PromptTooLongError, match="'s2'") as caught:
        answers(backend, sorted(samples, key=lambda one: one.sample_id == "s2"))
    assert f"{length} prompt tokens and {NUM_NEW}" in caught.value.found
    assert "max_new_tokens" in caught.value.remedy


def test_no_room_for_a_prompt_is_told_at_the_start(vlm: Policy) -> None:
    """R16."""
    with pytest.raises(ConfigError, match=r"decoding\.max_new_tokens: no room") as caught:
        backend_of(vlm, max_new_tokens=2048)
    assert "2048 of the model's 2048" in caught.value.found


def test_a_model_without_an_output_head(vlm: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vlm.model, "can_generate", lambda: False)
    with pytest.raises(ConfigError, match=r"model\.path"):
        backend_of(vlm)


def test_weights_that_are_not_finite_are_told(tiny_text: Path) -> None:
    policy = policy_of(tiny_text)
    with torch.no_grad():
        policy.model.get_output_embeddings().weight.fill_(float("nan"))
    with pytest.raises(RolloutError, match="not finite"):
        answers(backend_of(policy, temperature=1.0), [sample_of()])
