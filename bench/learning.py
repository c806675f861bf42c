"""Measure what learning costs on one GPU: model FLOPs per second, memory, where the time goes, packed rows against
padded ones.

In: a size of model and of rows. Out: figures, and on the screen the 25 most expensive kernels of a compiled and an
eager row. Everything runs as in the trainer: `Policy.backward` per row, `reduce_gradients`, `Optimizer.update`, weights
and AdamW's moments in bfloat16. A step is ROWS_PER_STEP packed rows and one update. Its model FLOPs per second
(`model_flops` has the formula) are compared with the rate of `torch.matmul` on large square bfloat16 matrices in the
same process. A case that fails (out of memory, no compiler) is reported and left out.

Lengths of segments are drawn as in real work, half of an answer's tokens are supervised:
"long tail": prompts of 300 to 1,200 tokens (text and the tokens of one image, all of them random ids: no vision tower),
answers of 220 tokens in the median, lognormal with sigma 0.9: a mean of 330, 1 in 20 above 970.
"demo": the same prompts, answers of 35 tokens an object (Qwen's JSON with coordinates in digits) and four times the
objects of the demo's rollouts on its 200 test scenes after stage 2 (1 to 8 of them, here 4 to 32): hardly any tail.

`photographs` does the same for a vision-language model, compiled only. The lengths are those of "long tail", and a
prompt's first tokens are those of a photograph: as many as fit, so the sizes differ (up to 1,150 tokens, or 4,600
patches of 16x16 pixels). The tower and its products count as the layers of the language model do.

About 150 s on one H200. To try it without a GPU: `--device cpu`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar, get_args

import numpy as np
import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile
from transformers import PreTrainedModel

from bench.figures import Figure, median, sampled
from bench.models import PhotographSize, Size, photograph_model, text_model
from learner.config.sections.model import ModelConfig
from learner.config.sections.training import TrainingConfig
from learner.policy.compiled import uncompiled
from learner.policy.load import Policy, load_policy
from learner.policy.optim import Optimizer
from learner.policy.packed import pack_inputs
from learner.policy.parallel import Ranks
from learner.records import PackedRow, Segment, VisionInputs
from learner.steps.packing import pack_all
from shared.errors import ConfigError

WANTED_SHARE = 0.5  # share of the matmul rate
WANTED_CHECKPOINTED = 0.42  # the same with gradient checkpointing, of rows with photographs
ROWS_PER_STEP, STEPS = 3, 3
COMPARED_SAMPLES = 72
PROFILED_KERNELS = 25
CPU = torch.device("cpu")
T = TypeVar("T")


def measure(folder: Path, *, size: Size = "4B", row_tokens: int = 16_384) -> Iterator[Figure]:
    """Measure all cases of a text model, one after the other. `row_tokens`: capacity of a row."""
    return Learning(partial(text_model, folder, size), row_tokens).measure()


def photographs(folder: Path, *, size: PhotographSize = "4B", row_tokens: int = 16_384) -> Iterator[Figure]:
    """Measure a vision-language model on rows with photographs, compiled; eager if it cannot be compiled."""
    return Learning(partial(photograph_model, folder, size), row_tokens).with_photographs()


class Learning:
    """One policy, and the cases measured with it."""

    def __init__(self, make_model: Callable[[], Path], row_tokens: int) -> None:
        self.make_model, self.row_tokens = make_model, row_tokens
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.console = Console(highlight=False, width=180)
        self.peak_flops = 0.0

    def measure(self) -> Iterator[Figure]:
        begin = time.perf_counter()
        yield self.matmul()
        policy = self.policy()
        rows = self.rows(policy)
        self.console.print(f"{time.perf_counter() - begin:.0f} s so far")
        if not policy.why_not_compiled:
            yield from self.cases(policy, rows, "compiled", wanted=WANTED_SHARE)
            for lengths in get_args(Lengths):
                yield from self.attempt(f"padded, {lengths}", partial(self.against_padded, policy, lengths))
        with uncompiled():
            yield from self.cases(policy, rows, "eager")
        yield Figure(name="the whole part", value=time.perf_counter() - begin, unit="s")

    def with_photographs(self) -> Iterator[Figure]:
        begin = time.perf_counter()
        yield self.matmul()
        policy = self.policy()
        rows = [with_photographs(row, policy.model, seed=i) for i, row in enumerate(self.rows(policy))]
        self.console.print(f"{time.perf_counter() - begin:.0f} s so far")
        patches = sum(num_patches(row) for row in rows)
        tower = sum(tower_flops(policy.model, row) for row in rows)
        whole = sum(model_flops(policy.model, row) for row in rows)
        yield Figure(name="patches per token of a row", value=patches / sum(r.num_tokens for r in rows), unit="")
        yield Figure(name="the vision tower's part of the model FLOPs", value=tower / whole, unit="share")
        bounds = {"wanted": WANTED_SHARE, "checkpointed": WANTED_CHECKPOINTED}
        yield from self.cases(policy, rows, "eager" if policy.why_not_compiled else "compiled", **bounds)
        yield Figure(name="the whole part", value=time.perf_counter() - begin, unit="s")

    def matmul(self) -> Figure:
        self.peak_flops = matmul_rate(self.device)
        return Figure(name="torch.matmul, bfloat16, square", value=self.peak_flops / 1e12, unit="TFLOP/s")

    def policy(self) -> Policy:
        """Return the policy, compiled where that is possible."""
        config = ModelConfig(path=str(self.make_model()), dtype="bfloat16", compile=True)
        free_memory()
        try:
            policy = self.load(config)
        except ConfigError as error:
            self.console.print(f"only eager: {error}", markup=False, soft_wrap=True)
            policy = self.load(config.model_copy(update={"compile": False}))
        self.console.print(f"{sum(p.numel() for p in policy.model.parameters()) / 1e9:.2f}B parameters")
        return policy

    def load(self, config: ModelConfig) -> Policy:
        return load_policy(config, device=self.device, bf16=self.device.type == "cuda")

    def cases(
        self,
        policy: Policy,
        rows: Sequence[PackedRow],
        name: str,
        *,
        wanted: float | None = None,
        checkpointed: float | None = None,
    ) -> Iterator[Figure]:
        """Measure all cases, with and without gradient checkpointing. `wanted`, `checkpointed`: their bounds."""
        model = policy.model
        yield from self.attempt(f"{name}, first row", partial(self.first_row, policy, rows[0], name))
        yield from self.attempt(f"{name}", partial(self.steps, policy, rows, name, wanted))
        yield from self.attempt(f"{name}, parts", partial(self.parts, policy, rows, name))
        yield from self.attempt(f"{name}, profile", partial(self.profile, policy, rows[0], name))
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        steps = partial(self.steps, policy, rows, f"{name}, gradient checkpointing", checkpointed)
        yield from self.attempt(f"{name}, checkpointing", steps)
        model.gradient_checkpointing_disable()

    def rows(self, policy: Policy) -> list[PackedRow]:
        vocab_size = policy.model.config.get_text_config().vocab_size
        samples = 16 * (ROWS_PER_STEP + 2)
        segments = draw_segments("long tail", samples, capacity=self.row_tokens, vocab_size=vocab_size, seed=0)
        return pack_all(segments, self.row_tokens)[:ROWS_PER_STEP]

    # ---- cases -----------------------------------------------------------------------------------------------------

    def first_row(self, policy: Policy, row: PackedRow, name: str) -> Iterator[Figure]:
        seconds, _ = self.timed(partial(policy.backward, row))
        yield Figure(name=f"{name}: the first row, compiling included", value=seconds, unit="s")

    def steps(
        self, policy: Policy, rows: Sequence[PackedRow], name: str, wanted: float | None = None
    ) -> Iterator[Figure]:
        """Whole steps after one that warms up, and their peak memory."""
        optimizer = self.optimizer(policy)
        self.step(policy, optimizer, rows)
        self.wait()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        seconds = [self.timed(partial(self.step, policy, optimizer, rows))[0] for _ in range(STEPS)]
        flops = sum(model_flops(policy.model, row) for row in rows)
        rates = [flops / s for s in seconds]
        tokens = sum(row.num_tokens for row in rows)
        shares = [rate / self.peak_flops for rate in rates]
        yield sampled(f"{name}: model FLOPs of the matmul rate", shares, "share", at_least=wanted)
        yield Figure(name=f"{name}: model FLOPs", value=median(rates) / 1e12, unit="TFLOP/s")
        yield Figure(name=f"{name}: tokens", value=tokens / median(seconds), unit="tokens/s")
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device) / 2**30
            yield Figure(name=f"{name}: peak memory", value=peak, unit="GiB")

    def parts(self, policy: Policy, rows: Sequence[PackedRow], name: str) -> Iterator[Figure]:
        """Seconds of each part of a step alone, with waits; the median over rows."""
        optimizer = self.optimizer(policy)
        packing = [self.timed(partial(pack_inputs, row, policy.model, CPU))[0] for row in rows]
        sending = [self.timed(partial(pack_inputs, row, policy.model, self.device))[0] for row in rows]
        learning = [self.timed(partial(policy.backward, row))[0] for row in rows]
        reducing, _ = self.timed(partial(policy.reduce_gradients, Ranks(), weight_sum=1000.0))
        updating, _ = self.timed(partial(optimizer.update, 0))
        yield sampled(f"{name}: packing a row, on the host", packing, "s")
        yield sampled(f"{name}: packing a row, onto the device", sending, "s")
        yield sampled(f"{name}: forward and backward of a row", learning, "s")
        yield Figure(name=f"{name}: gradients scaled, once per step", value=reducing, unit="s")
        yield Figure(name=f"{name}: clipping and AdamW, once per step", value=updating, unit="s")

    def against_padded(self, policy: Policy, lengths: Lengths) -> Iterator[Figure]:
        """The same samples packed and padded: tokens of samples per second, padding not counted."""
        vocab_size = policy.model.config.get_text_config().vocab_size
        segments = draw_segments(lengths, COMPARED_SAMPLES, capacity=self.row_tokens, vocab_size=vocab_size, seed=1)
        tokens = sum(map(len, segments))
        rates = {}
        for way, make in (("packed", pack_all), ("padded", padded)):
            rows = make(segments, self.row_tokens)
            policy.backward(rows[0])
            seconds, _ = self.timed(partial(list, map(policy.backward, rows)))
            rates[way] = tokens / seconds
            held = tokens / sum(row.num_tokens for row in rows)
            yield Figure(name=f"{lengths}: {way}", value=rates[way], unit="sample tokens/s")
            yield Figure(name=f"{lengths}: {way}, tokens that are not padding", value=held, unit="share")
        yield Figure(name=f"{lengths}: packed over padded", value=rates["packed"] / rates["padded"], unit="times")

    def profile(self, policy: Policy, row: PackedRow, name: str) -> tuple[Figure, ...]:
        """Show the most expensive kernels of one row and one update, on the screen."""
        optimizer = self.optimizer(policy)
        on_cuda = self.device.type == "cuda"
        with profile(activities=[ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU]) as profiled:
            self.step(policy, optimizer, [row])
            self.wait()
        attribute = "self_device_time_total" if on_cuda else "self_cpu_time_total"
        spent = sorted(((getattr(e, attribute) / 1e3, e.count, e.key) for e in profiled.key_averages()), reverse=True)
        total = sum(ms for ms, _, _ in spent)
        self.console.print(f"\n{name}: one row and one update, {total:.1f} ms in kernels; ms, calls, kernel")
        for ms, count, kernel in spent[:PROFILED_KERNELS]:
            self.console.print(f"{ms:9.2f} {count:6d}  {kernel[:150]}", markup=False, soft_wrap=True)
        return ()

    # ---- how -------------------------------------------------------------------------------------------------------

    def step(self, policy: Policy, optimizer: Optimizer, rows: Sequence[PackedRow]) -> None:
        """Make one step as the trainer does: rows, one reduction, one update."""
        weight_sum = sum(policy.backward(row).weight_sum for row in rows)
        policy.reduce_gradients(Ranks(), weight_sum=weight_sum)
        optimizer.update(0)

    def optimizer(self, policy: Policy) -> Optimizer:
        policy.model.zero_grad()
        return Optimizer(policy.trainable, TrainingConfig(output_dir="unused", max_steps=1), total_steps=1)

    def timed(self, work: Callable[[], T]) -> tuple[float, T]:
        """Return the seconds until `work` is done, on the device too, and its result."""
        self.wait()
        begin = time.perf_counter()
        result = work()
        self.wait()
        return time.perf_counter() - begin, result

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def attempt(self, name: str, case: Callable[[], Iterable[Figure]]) -> Iterator[Figure]:
        """Run a case. If it fails, the others still give their figures."""
        begin = time.perf_counter()
        try:
            yield from case()
        except Exception as error:  # reports no memory and compiler errors; the next case runs
            self.console.print(f"{name} failed: {type(error).__name__}: {error}", markup=False, soft_wrap=True)
        self.console.print(f"[{time.perf_counter() - begin:6.1f} s] {name}", markup=False)
        free_memory()


def matmul_rate(device: torch.device) -> float:
    """Return the FLOPs per second of bfloat16 products of square matrices: the best of two sizes."""
    return max(_matmul_rate(device, side) for side in ((8192, 16_384) if device.type == "cuda" else (512,)))


def _matmul_rate(device: torch.device, side: int) -> float:
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    repeats = 3 if device.type == "cpu" else 20
    for _ in range(3):
        torch.matmul(a, b)
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    wait()
    begin = time.perf_counter()
    for _ in range(repeats):
        torch.matmul(a, b)
    wait()
    return 2.0 * side**3 * repeats / (time.perf_counter() - begin)


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        with suppress(RuntimeError):  # fails after a device error, which its case has reported
            torch.cuda.empty_cache()


# ---- rows -----------------------------------------------------------------------------------------------------------

Lengths = Literal["long tail", "demo"]
PROMPT_TOKENS = (300, 1200)
MEDIAN_ANSWER, SIGMA, LONGEST_ANSWER = 220, 0.9, 4096
DEMO_OBJECTS = {1: 18, 2: 24, 3: 30, 4: 22, 5: 14, 6: 27, 7: 29, 8: 36}  # predicted objects: rollouts
TOKENS_PER_OBJECT, CROWDING = 35, 4
FULL_CAPACITY = 16_384  # the capacity for the lengths above; a smaller one shrinks them


def draw_segments(which: Lengths, count: int, *, capacity: int, vocab_size: int, seed: int) -> list[Segment]:
    """Draw `count` segments; the same seed gives the same ones."""
    rng = np.random.default_rng(seed)
    scale = min(1.0, capacity / FULL_CAPACITY)
    prompts = rng.integers(*PROMPT_TOKENS, count, endpoint=True)
    if which == "long tail":
        answers = np.minimum(rng.lognormal(np.log(MEDIAN_ANSWER), SIGMA, count), LONGEST_ANSWER)
    else:
        objects = np.repeat(list(DEMO_OBJECTS), list(DEMO_OBJECTS.values()))
        answers = rng.choice(objects, count) * CROWDING * TOKENS_PER_OBJECT
    sizes = np.maximum(2, np.stack([prompts, answers]) * scale).astype(int)
    return [_segment(rng, int(prompt), int(answer), vocab_size) for prompt, answer in sizes.T]


def _segment(rng: np.random.Generator, prompt: int, answer: int, vocab_size: int) -> Segment:
    ids = rng.integers(0, vocab_size, prompt + answer)
    supervised = (np.arange(len(ids)) >= prompt) & (rng.random(len(ids)) < 0.5)
    return Segment(
        sample_id="",
        input_ids=ids,
        labels=np.where(supervised, ids, -100),
        loss_weights=supervised.astype(np.float32),
        prompt_length=prompt,
    )


def padded(segments: Sequence[Segment], capacity: int) -> list[PackedRow]:
    """Batches in order of arrival, as many samples as fit when all are as long as the longest, padding at the end.

    Padding is computed as text of its segment, in the same kernels and programs. Nothing before it attends to it, and
    it is not supervised. A rectangular batch would cost the same; a mask would cost more.
    """
    batches: list[list[Segment]] = [[]]
    for segment in segments:
        batch = [*batches[-1], segment]
        if len(batch) * max(map(len, batch)) > capacity:
            batches.append([segment])
        else:
            batches[-1] = batch
    return [_rectangle(batch, capacity) for batch in batches if batch]


def _rectangle(batch: Sequence[Segment], capacity: int) -> PackedRow:
    longest = max(map(len, batch))
    return PackedRow(segments=tuple(_pad(segment, longest) for segment in batch), capacity=capacity)


def _pad(segment: Segment, length: int) -> Segment:
    more = (0, length - len(segment))
    return replace(
        segment,
        input_ids=np.pad(segment.input_ids, more),
        labels=np.pad(segment.labels, more, constant_values=-100),
        loss_weights=np.pad(segment.loss_weights, more),
    )


def with_photographs(row: PackedRow, model: PreTrainedModel, *, seed: int) -> PackedRow:
    """Return the row with a photograph at the beginning of every prompt, in place of as many tokens."""
    rng = np.random.default_rng(seed)
    return replace(row, segments=tuple(_with_photograph(segment, model, rng) for segment in row.segments))


def _with_photograph(segment: Segment, model: PreTrainedModel, rng: np.random.Generator) -> Segment:
    """Put in the largest photograph that leaves the prompt two tokens, about four thirds as wide as high."""
    vision, image_token = model.config.vision_config, model.config.image_token_id
    most = max(1, segment.prompt_length - 2)
    height = max(1, int((most * 3 / 4) ** 0.5))
    width = most // height
    side = vision.spatial_merge_size
    values = rng.standard_normal((height * width * side**2, _patch_dim(model)), dtype=np.float32)
    ids = np.where(segment.input_ids == image_token, 0, segment.input_ids)
    ids[: height * width] = image_token
    grid = torch.tensor([[1, height * side, width * side]])
    return replace(
        segment,
        input_ids=ids,
        labels=np.where(segment.labels == -100, -100, ids),
        vision=VisionInputs(pixel_values=torch.from_numpy(values), image_grid_thw=grid),
    )


def _patch_dim(model: PreTrainedModel) -> int:
    vision = model.config.vision_config
    return int(vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)


def num_patches(row: PackedRow) -> int:
    return sum(_patches(segment) for segment in row.segments)


def _patches(segment: Segment) -> int:
    return len(segment.vision.pixel_values) if segment.vision is not None else 0


def model_flops(model: PreTrainedModel, row: PackedRow) -> float:
    """Return the multiplications and additions that learning this row needs, forward and backward, recomputation not
    counted.

    `6 N T + 6 V h S + 3 layers x sum over segments of 2 L (L + 1) H D`: N weights of the layers' matrices and T tokens;
    V x h weights of the output head and S supervised tokens; L tokens of a segment, each attending to itself and all
    before it, with H query heads of size D. And those of the vision tower.
    """
    settings = model.config.get_text_config()
    layers = model.get_decoder().layers
    weights = sum(p.numel() for p in layers.parameters() if p.ndim == 2)
    supervised = sum(int((segment.labels != -100).sum()) for segment in row.segments)
    pairs = sum(len(segment) * (len(segment) + 1) for segment in row.segments)
    width = settings.num_attention_heads * settings.head_dim
    head = settings.vocab_size * settings.hidden_size
    text = 6.0 * weights * row.num_tokens + 6.0 * head * supervised + 3.0 * len(layers) * 2 * pairs * width
    return text + tower_flops(model, row)


def tower_flops(model: PreTrainedModel, row: PackedRow) -> float:
    """Return the vision tower's part of `model_flops`; 0 without photographs. One photograph a segment.

    `4 E P + 6 N P + 3 layers x sum over photographs of 4 p^2 h + 6 M P / m^2`: E weights of the patch embedding, whose
    input needs no gradient; P patches; N weights of the layers' matrices; p patches of a photograph, each attending to
    all, with h channels; M weights of the mergers' matrices, which see m x m patches at once.
    """
    patches = num_patches(row)
    if not patches:
        return 0.0
    tower, settings = model.base_model.visual, model.config.vision_config
    mergers = [tower.merger, *getattr(tower, "deepstack_merger_list", [])]
    weights = sum(p.numel() for p in tower.blocks.parameters() if p.ndim == 2)
    merging = sum(p.numel() for merger in mergers for p in merger.parameters() if p.ndim == 2)
    embedding = _patch_dim(model) * settings.hidden_size
    pairs = sum(_patches(segment) ** 2 for segment in row.segments)
    products = 4.0 * embedding + 6.0 * weights + 6.0 * merging / settings.spatial_merge_size**2
    return products * patches + 3.0 * len(tower.blocks) * 4 * pairs * settings.hidden_size
