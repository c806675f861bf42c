"""What learning costs on one GPU: model FLOPs per second, memory, where the time goes, packed rows against padded ones.

In: a size of model and of rows. Out: figures, and on the screen the 25 dearest kernels of a compiled and an eager row.
Everything runs as the trainer runs it: `Policy.backward` per row, `reduce_gradients`, `Optimizer.update`, weights and
AdamW's moments in bfloat16. A step is ROWS_PER_STEP packed rows and one update; its model FLOPs (`rows.model_flops`) a
second stand against what `torch.matmul` of large square bfloat16 matrices reaches in the same process.

A case that fails (out of memory, no compiler) is told and left out; figures are on disk after every case. Run by
`run.py`, in a process of its own: `python -m bench.gpu.learning --help`; about 150 s on one H200, without a GPU
`--size tiny --row-tokens 1024`.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar, get_args

import torch
import typer
from rich.console import Console
from torch.profiler import ProfilerActivity, profile

from bench.figures import Figure, median, show
from bench.gpu.models import Size, build
from bench.gpu.results import write
from bench.gpu.rows import Lengths, draw_segments, model_flops, packed, padded
from learner.config.schema import ModelConfig, TrainingConfig
from learner.policy.compiled import uncompiled
from learner.policy.load import Policy, load_policy
from learner.policy.optim import Optimizer
from learner.policy.packed import pack_inputs
from learner.policy.parallel import Ranks
from learner.records import PackedRow
from learner.steps.packing import pack_all
from shared.errors import ConfigError

WANTED_SHARE = 0.5  # of the matmul rate
ROWS_PER_STEP, STEPS = 3, 3
COMPARED_SAMPLES = 72
PROFILED_KERNELS = 25
CPU = torch.device("cpu")
T = TypeVar("T")


def main(
    out: Annotated[Path, typer.Option(help="File for the figures.")],
    folder: Annotated[Path, typer.Option(help="For the model; large and fast.")],
    size: Annotated[str, typer.Option(help="0.6B, 4B or tiny.")] = "4B",
    row_tokens: Annotated[int, typer.Option(help="Capacity of a row.")] = 16_384,
) -> None:
    """Measure and write."""
    Learning(out, folder, size, row_tokens).measure()  # type: ignore[arg-type]


class Learning:
    """All cases, one after the other. `figures` grows and is written after each."""

    def __init__(self, out: Path, folder: Path, size: Size, row_tokens: int) -> None:
        self.out, self.model, self.size, self.row_tokens = out, folder / f"model-{size}", size, row_tokens
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.console = Console(highlight=False, width=180)
        self.figures: list[Figure] = []
        self.peak_flops = 0.0

    def measure(self) -> None:
        begin = time.perf_counter()
        self.peak_flops = matmul_rate(self.device)
        self.add(Figure(name="torch.matmul, bfloat16, square", value=self.peak_flops / 1e12, unit="TFLOP/s"))
        num_parameters = build(self.model, self.size, device=self.device)
        free_memory()
        policy = self.policy()
        rows = self.rows(policy)
        self.console.print(f"{num_parameters / 1e9:.2f}B parameters, {time.perf_counter() - begin:.0f} s so far")
        if not policy.why_not_compiled:
            self.cases(policy, rows, "compiled", wanted=WANTED_SHARE)
            for lengths in get_args(Lengths):
                self.attempt(f"padded, {lengths}", partial(self.against_padded, policy, lengths))
        with uncompiled():
            self.cases(policy, rows, "eager")
        self.add(Figure(name="the whole part", value=time.perf_counter() - begin, unit="s"))
        show(self.figures, self.console)

    def policy(self) -> Policy:
        """Compiled where that is possible."""
        config = ModelConfig(path=str(self.model), dtype="bfloat16", compile=True)
        try:
            return self.load(config)
        except ConfigError as error:
            self.console.print(f"only eager: {error}", markup=False, soft_wrap=True)
            return self.load(config.model_copy(update={"compile": False}))

    def load(self, config: ModelConfig) -> Policy:
        return load_policy(config, device=self.device, bf16=self.device.type == "cuda")

    def cases(self, policy: Policy, rows: Sequence[PackedRow], name: str, wanted: float | None = None) -> None:
        """With and without gradient checkpointing, and what is measured only once."""
        model = policy.model
        self.attempt(f"{name}, first row", partial(self.first_row, policy, rows[0], name))
        self.attempt(f"{name}", partial(self.steps, policy, rows, name, wanted))
        self.attempt(f"{name}, parts", partial(self.parts, policy, rows, name))
        self.attempt(f"{name}, profile", partial(self.profile, policy, rows[0], name))
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.attempt(f"{name}, checkpointing", partial(self.steps, policy, rows, f"{name}, gradient checkpointing"))
        model.gradient_checkpointing_disable()

    def rows(self, policy: Policy) -> list[PackedRow]:
        vocab_size = policy.model.config.get_text_config().vocab_size
        samples = 16 * (ROWS_PER_STEP + 2)
        segments = draw_segments("long tail", samples, capacity=self.row_tokens, vocab_size=vocab_size, seed=0)
        return pack_all(segments, self.row_tokens)[:ROWS_PER_STEP]

    # ---- cases -----------------------------------------------------------------------------------------------------

    def first_row(self, policy: Policy, row: PackedRow, name: str) -> None:
        seconds, _ = self.timed(partial(policy.backward, row))
        self.add(Figure(name=f"{name}: the first row, compiling included", value=seconds, unit="s"))

    def steps(self, policy: Policy, rows: Sequence[PackedRow], name: str, wanted: float | None = None) -> None:
        """Whole steps after one that warms up, and the memory of the dearest moment."""
        optimizer = self.optimizer(policy)
        self.step(policy, optimizer, rows)
        self.wait()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        seconds = [self.timed(partial(self.step, policy, optimizer, rows))[0] for _ in range(STEPS)]
        flops = sum(model_flops(policy.model, row) for row in rows)
        rates = [flops / s for s in seconds]
        tokens = sum(row.num_tokens for row in rows)
        self.add(
            Figure(
                name=f"{name}: model FLOPs of the matmul rate",
                value=median(rates) / self.peak_flops,
                unit="share",
                wanted=wanted,
                samples=[rate / self.peak_flops for rate in rates],
            ),
            Figure(name=f"{name}: model FLOPs", value=median(rates) / 1e12, unit="TFLOP/s"),
            Figure(name=f"{name}: tokens", value=tokens / median(seconds), unit="tokens/s"),
        )
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device) / 2**30
            self.add(Figure(name=f"{name}: peak memory", value=peak, unit="GiB"))

    def parts(self, policy: Policy, rows: Sequence[PackedRow], name: str) -> None:
        """Seconds of each part of a step alone, waited for; of rows the median."""
        optimizer = self.optimizer(policy)
        packing = [self.timed(partial(pack_inputs, row, policy.model, CPU))[0] for row in rows]
        forward, backward = [], []
        for row in rows:
            seconds, (loss, _) = self.timed(partial(policy.forward_row, row))
            forward.append(seconds)
            backward.append(self.timed(loss.backward)[0])
            del loss
        reducing, _ = self.timed(partial(policy.reduce_gradients, Ranks(), weight_sum=1000.0))
        updating, _ = self.timed(partial(optimizer.update, 0))
        self.add(
            Figure(name=f"{name}: packing a row, on the host", value=median(packing), unit="s", samples=packing),
            Figure(name=f"{name}: forward of a row", value=median(forward), unit="s", samples=forward),
            Figure(name=f"{name}: backward of a row", value=median(backward), unit="s", samples=backward),
            Figure(name=f"{name}: gradients scaled, once per step", value=reducing, unit="s"),
            Figure(name=f"{name}: clipping and AdamW, once per step", value=updating, unit="s"),
        )

    def against_padded(self, policy: Policy, lengths: Lengths) -> None:
        """The same samples packed and padded: tokens of samples per second, padding not counted."""
        vocab_size = policy.model.config.get_text_config().vocab_size
        segments = draw_segments(lengths, COMPARED_SAMPLES, capacity=self.row_tokens, vocab_size=vocab_size, seed=1)
        tokens = sum(map(len, segments))
        rates = {}
        for way, make in (("packed", packed), ("padded", padded)):
            rows = make(segments, self.row_tokens)
            policy.backward(rows[0])
            seconds, _ = self.timed(partial(list, map(policy.backward, rows)))
            rates[way] = tokens / seconds
            held = tokens / sum(row.num_tokens for row in rows)
            self.add(
                Figure(name=f"{lengths}: {way}", value=rates[way], unit="sample tokens/s"),
                Figure(name=f"{lengths}: {way}, tokens that are no padding", value=held, unit="share"),
            )
        self.add(Figure(name=f"{lengths}: packed over padded", value=rates["packed"] / rates["padded"], unit="times"))

    def profile(self, policy: Policy, row: PackedRow, name: str) -> None:
        """The dearest kernels of one row and one update."""
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

    # ---- how -------------------------------------------------------------------------------------------------------

    def step(self, policy: Policy, optimizer: Optimizer, rows: Sequence[PackedRow]) -> None:
        """As the trainer's: rows, one reduction, one update."""
        weight_sum = sum(policy.backward(row).weight_sum for row in rows)
        policy.reduce_gradients(Ranks(), weight_sum=weight_sum)
        optimizer.update(0)

    def optimizer(self, policy: Policy) -> Optimizer:
        policy.model.zero_grad()
        return Optimizer(policy.trainable, TrainingConfig(output_dir="unused", max_steps=1), total_steps=1)

    def timed(self, work: Callable[[], T]) -> tuple[float, T]:
        """Seconds until `work` is done, on the device too, and what it gave."""
        self.wait()
        begin = time.perf_counter()
        result = work()
        self.wait()
        return time.perf_counter() - begin, result

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def attempt(self, name: str, work: Callable[[], object]) -> None:
        """Run a case; one that fails must not take the others' figures with it."""
        begin = time.perf_counter()
        try:
            work()
        except (
            Exception
        ) as error:  # out of memory, a compiler's own: whatever it is, it is told, and the next case runs
            self.console.print(f"{name} failed: {type(error).__name__}: {error}", markup=False, soft_wrap=True)
        self.console.print(f"[{time.perf_counter() - begin:6.1f} s] {name}", markup=False)
        free_memory()

    def add(self, *figures: Figure) -> None:
        for figure in figures:
            self.console.print(f"{figure.name}: {figure.value:.4g} {figure.unit}", markup=False)
        self.figures += figures
        write(self.out, self.figures)


def matmul_rate(device: torch.device) -> float:
    """FLOPs per second of bfloat16 products of square matrices: the best of two sizes."""
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
        with suppress(RuntimeError):  # after a device error the case that met it has told it already
            torch.cuda.empty_cache()


if __name__ == "__main__":
    typer.run(main)
