"""What a model loses when it continues its own words: `python -m bench.exposure --model DIR --data FILE`.

In: a model and scenes with complete labels. The model answers each scene greedily. From the first object that it
skipped, the ground truth continues (`loss.prefix_end: first_miss`). Out: nats per token of the continuation, once after
the model's own words and once after the ground truth's, by kind of token, and the difference with a 95% interval over
scenes. The difference is what training after such words can improve beyond teacher forcing. If it is about zero, the
model errs in what it sees, not because it reads its own words.

Only tokens that are the same in both are compared. For models that spell coordinates as tokens. Uses a GPU if there is
one; takes two minutes for 200 crowded scenes with the demo's model on two cores.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from bench.learns_report import Draws
from learner.config.schema import DataConfig, LossConfig, ModelConfig, RolloutMatchingConfig, TaskConfig
from learner.data.readers import load_samples
from learner.policy.load import Policy, load_policy
from learner.records import Assignment, EncodedPrompt, Target
from learner.rollout.hf import HfBackend
from learner.target.target import build_target, ground_truth_target
from learner.tasks.detection.task import DetectionTask
from shared.errors import ProjectError

Kind = Literal["coordinates", "names", "structure", "all"]
KINDS: tuple[Kind, ...] = ("structure", "names", "coordinates", "all")
NAME_WEIGHT = 2.0  # only marks descriptions; nothing is learned
LOSS = LossConfig(prefix_end="first_miss", desc_weight=NAME_WEIGHT)


@dataclass(frozen=True, eq=False)
class Compared:
    """One scene's tokens after the model's first miss."""

    own: np.ndarray  # [N] nats, after the model's own words
    truth: np.ndarray  # [N] nats, after the ground truth's
    kinds: np.ndarray  # [N] of str


def main(
    model: Annotated[Path, typer.Option(help="Folder of the model.")],
    data: Annotated[Path, typer.Option(help="Scenes, JSONL, with complete labels.")],
    scenes: Annotated[int, typer.Option(min=2, help="How many, from the first.")] = 200,
    iou_threshold: Annotated[float, typer.Option(min=0.0, max=1.0, help="From this IoU on, an object is found.")] = 0.3,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 640,
) -> None:
    """Measure and print."""
    try:
        _measure(model, data, scenes, iou_threshold, max_new_tokens)
    except ProjectError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def _measure(model: Path, data: Path, scenes: int, iou_threshold: float, max_new_tokens: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy = load_policy(ModelConfig(path=str(model), dtype="float32"), device=device, bf16=False)
    task = DetectionTask(TaskConfig(iou_threshold=iou_threshold), policy.tokenizer)
    samples = load_samples(DataConfig(train=str(data)), str(data), task)[:scenes]
    section = {"rollout_backend": "hf", "decode_batch_size": 100}
    section |= {"decoding": {"temperature": 0.0, "max_new_tokens": max_new_tokens}}
    backend = HfBackend(RolloutMatchingConfig.model_validate(section), policy, run_seed=0)
    rollouts = backend.generate(samples, global_step=0, micro_step_idx=0, first_req_idx=0, greedy=True)
    assignments = [task.match(task.parse(rollout)) for rollout in rollouts]
    found = list(compare(policy, task, assignments))
    console = Console(highlight=False)
    console.print(f"F1@0.5 {task.evaluate(assignments)['f1@0.5']:.3f} on {len(samples)} scenes, {len(found)} compared")
    if found:
        console.print(table(found))


def compare(policy: Policy, task: DetectionTask, assignments: Sequence[Assignment]) -> Iterator[Compared]:
    """Scene by scene. Scenes are left out if the two ways number objects with different numbers of tokens."""
    for assignment in assignments:
        sample = assignment.parsed.rollout.sample
        prompt = policy.encoder.encode(sample)
        own = build_target(assignment, task, policy.tokenizer, loss=LOSS)
        truth = ground_truth_target(sample, task, policy.tokenizer, desc_weight=NAME_WEIGHT)
        length = len(own.token_ids) - own.prefix_length
        same = own.token_ids[-length:] == truth.token_ids[-length:]
        kinds = _kinds(policy, truth)[-length:]
        if own.prefix_length and (kinds[~same] == "structure").all():  # only object numbers may differ
            yield Compared(
                own=_nats(policy, prompt, own)[-length:][same],
                truth=_nats(policy, prompt, truth)[-length:][same],
                kinds=kinds[same],
            )


def _nats(policy: Policy, prompt: EncodedPrompt, target: Target) -> np.ndarray:
    (logprobs,) = policy.logprobs([(prompt, target.token_ids.tolist())])
    return -np.asarray(logprobs)


def _kinds(policy: Policy, target: Target) -> np.ndarray:
    is_coordinate = [piece.startswith("<|coord_") for piece in policy.tokenizer.convert_ids_to_tokens(target.token_ids)]
    kinds = np.where(target.loss_weights == NAME_WEIGHT, "names", "structure")
    return np.where(is_coordinate, "coordinates", kinds)


def table(found: Sequence[Compared]) -> Table:
    """One line per kind of token; at least one scene."""
    shown = Table("tokens", "number", "after its own words", "after the truth's", "difference, nats per token")
    draws = Draws(len(found))
    for kind in KINDS:
        sums = np.stack([_sums(one, kind) for one in found])  # [S, 3]
        own, truth, number = sums.sum(0)
        drawn = draws.sums(kind, [sums])
        low, high = np.percentile((drawn[:, 0] - drawn[:, 1]) / drawn[:, 2].clip(1), [2.5, 97.5])
        per_token = 1 / max(1, number)
        difference = f"{(own - truth) * per_token:+.4f} [{low:+.4f}, {high:+.4f}]"
        shown.add_row(kind, f"{number:.0f}", f"{own * per_token:.4f}", f"{truth * per_token:.4f}", difference)
    return shown


def _sums(one: Compared, kind: Kind) -> np.ndarray:
    """[3]: nats after its own words, nats after the truth's, and tokens, of one kind."""
    mask = np.full(len(one.kinds), True) if kind == "all" else one.kinds == kind
    return np.array([one.own[mask].sum(), one.truth[mask].sum(), mask.sum()])


if __name__ == "__main__":
    typer.run(main)
