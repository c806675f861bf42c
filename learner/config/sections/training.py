"""The section `training`: the loop, the optimizer, packing, evaluation and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from learner.config.modes import ROLLOUT, Rule
from shared.config.model import Mistake, Section, given, key

if TYPE_CHECKING:
    from learner.config.schema import RunConfig

ESTIMATED = "estimated_f1@0.5"  # name of the metric that estimates F1@0.5 if labels are incomplete


class TrainingConfig(Section):
    """The loop, the optimizer, packing, evaluation and checkpoints."""

    output_dir: str = key(
        "run directory; a run does not start where another one is, unless it resumes it", min_length=1
    )
    overwrite: bool = key(
        "start in an `output_dir` that has a run: that run's own files (configuration, metrics, logs, evaluations, "
        "checkpoints) are removed, others stay. No effect on a run that resumes",
        False,
    )
    seed: int = key("seed of all random choices", 42, req="R11", ge=0, le=(1 << 63) - 1)
    max_steps: int | None = key(
        "length of the run; give this or `num_train_epochs`", None, unit="optimizer steps", ge=1
    )
    num_train_epochs: int | None = key(
        "length of the run; give this or `max_steps`. If an epoch's last step has only n samples of a batch of N, its "
        "gradient and its learning rate are multiplied by n / N (metric `batch_share`)",
        None,
        unit="epochs",
        req="D11",
        ge=1,
    )
    per_device_train_batch_size: int = key("dataloader batch of a rank", 1, unit="samples per micro-step", ge=1)
    effective_batch_size: int | None = key(
        "batch of an optimizer step over all ranks, a multiple of per_device_train_batch_size x ranks. "
        "`stage2_ab_training` requires it: it is the number of samples that a Channel-B step rolls out",
        None,
        unit="samples",
        req="D8 R31 R33",
        ge=1,
    )
    gradient_accumulation_steps: int | None = key(
        "micro-steps per optimizer step; null: derived from `effective_batch_size`, or 1 without it",
        None,
        req="D8 R33",
        ge=1,
    )
    learning_rate: float = key("peak learning rate", 1e-5, gt=0.0)
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = key(
        "decay of the learning rate after the warm-up", "cosine"
    )
    warmup_steps: int = key("linear warm-up of the learning rate", 0, unit="optimizer steps", ge=0)
    weight_decay: float = key("decoupled weight decay of AdamW", 0.0, ge=0.0)
    max_grad_norm: float = key("gradients are clipped to this global norm", 1.0, gt=0.0)
    bf16: bool = key("run the forward pass in bfloat16 autocast", False)
    # Training on packed rows was 3.15 times as fast as on padded rows (4B, one H200).
    packing: bool = key(
        "put several segments into one row of up to `global_max_length` tokens, without padding", True, req="D6 R36"
    )
    packing_buffer: int = key(
        "`rollout_matching_sft`: segments carried to later micro-steps, at most", 64, unit="segments", req="D6", ge=1
    )
    packing_min_fill_ratio: float = key(
        "packed rows filled less than this are counted: metric `underfilled`",
        0.6,
        unit="share of the row",
        req="D6",
        gt=0.0,
        le=1.0,
    )
    deterministic: bool = key(
        "`stage2_ab_training` with rollouts in the step: segments are packed in the order of the samples, so that "
        "equal rollouts are learned in equal rows; false: in the order in which they arrive, which depends on time and "
        "starts learning earlier. The other variants always pack in the order of the samples",
        False,
        req="D9",
    )
    packing_drop_last: bool = key(
        "`rollout_matching_sft`: segments still carried at the end of the run are not learned (their samples are named "
        "in the log); false: the last step learns them too, in rows of its own. Must be true with a `rollout_buffer`",
        True,
        req="D6",
    )
    eval_steps: int | None = key("evaluate every N steps", None, unit="optimizer steps", ge=1)
    eval_on_start: bool = key("evaluate before the first step; a run that is resumed has no other one there", False)
    eval_on_end: bool = key("evaluate after the last step", False)
    eval_samples: int | None = key("evaluate on the first samples only", None, unit="samples", ge=1)
    # If labels have gaps, F1 must not rank models: Kendall's tau with the true ranking was -0.31 for F1, and 0.73 for
    # the estimate `fm@0.5`.
    keep_best: str | None = key(
        "the checkpoint of the evaluation with the largest value of this metric is kept beside the newest ones, as "
        "the link `best` in `output_dir`. `auto`: if `data.val` and `eval_steps` are set, `f1@0.5` (`key_value`: "
        "`f1`), or `fm@0.5` with `labels.complete` or `loss.keep_unmatched`; where the first evaluation shows that the "
        "labels of `data.val` have gaps, `estimated_f1@0.5`, because F1 by such labels favors models that learned the "
        "gaps; null: none",
        "auto",
        min_length=1,
        req="D17",
    )
    early_stop_patience: int | None = key(
        "end the run once this number of evaluations in a row were not better than the best one by `keep_best`; null: "
        "never",
        None,
        unit="evaluations",
        req="D17",
        ge=1,
    )
    max_minutes: float | None = key(
        "end the run, as after its last step, once this time has passed since it was started or resumed. With "
        "`eval_on_end` it ends earlier by the time that its latest evaluation took. A step, an evaluation or a "
        "completion of the labels that has begun is not cut short; null: no limit",
        None,
        unit="min",
        gt=0.0,
    )
    save_steps: int | None = key("write a checkpoint every N steps", None, unit="optimizer steps", ge=1)
    save_minutes: float | None = key(
        "write a checkpoint after the step at which the last one is this old", None, unit="min", gt=0.0
    )
    save_total_limit: int | None = key(
        "number of checkpoints to keep, the newest ones; null: all", None, unit="checkpoints", ge=1
    )
    save_on_end: bool = key("write a checkpoint after the last step", True)
    resume_from_checkpoint: str | None = key(
        "resume from this checkpoint folder, or from the `latest` one in `output_dir`", None, req="R18 R26"
    )
    callbacks: list[str] = key(
        "import paths of classes, `my_package.my_module:MyCallback`, whose methods are called at each step, evaluation "
        "and checkpoint on rank 0, and may end the run",
        [],
        req="R38",
    )
    stop_timeout_s: float = key(
        "time to write a checkpoint and end after Ctrl-C or SIGTERM; torchrun kills ranks after 30 s",
        25.0,
        unit="s",
        gt=0.0,
    )
    collective_timeout_s: float = key("longest wait of a rank for the others", 600.0, unit="s", req="R24", gt=0.0)


def run_length(config: RunConfig) -> Iterator[Mistake]:
    """Exactly one of `training.max_steps` and `training.num_train_epochs` is given."""
    steps, epochs = config.training.max_steps, config.training.num_train_epochs
    wanted = "exactly one of training.max_steps and training.num_train_epochs"
    if steps is None and epochs is None:
        remedy = "set one of them"
        yield Mistake(path="training.max_steps", found="no length of the run", wanted=wanted, remedy=remedy)
    if steps is not None and epochs is not None:
        remedy = "remove one (or set it to null if it comes from a base)"
        yield Mistake(path="training.max_steps", found="both", wanted=wanted, remedy=remedy)


def warmup_fits(config: RunConfig, num_steps: int | None = None) -> Iterator[Mistake]:
    """`training.warmup_steps` is at most the number of the run's steps. `num_steps`: the number that follows from the
    data, if the length is in epochs."""
    warmup, steps = config.training.warmup_steps, config.training.max_steps or num_steps
    if steps is not None and warmup > steps:
        wanted, remedy = f"at most the run's {steps} steps", "lower it, or train longer"
        yield Mistake(path="training.warmup_steps", found=str(warmup), wanted=wanted, remedy=remedy)


NO_DATA = "no evaluation data"


def evaluation_has_data(config: RunConfig) -> Iterator[Mistake]:
    """Evaluations need `data.val` or `data.test`."""
    training, data = config.training, config.data
    asked = [name for name in ("eval_steps", "eval_on_start", "eval_on_end") if getattr(training, name)]
    if asked and data.val is None and data.test is None:
        wanted, remedy = "data.val or data.test to evaluate on", "name the annotations, or remove this key"
        yield Mistake(path=f"training.{asked[0]}", found=NO_DATA, wanted=wanted, remedy=remedy)


def kept_metric(config: RunConfig) -> str | None:
    """Return the name of the metric that decides which evaluation is the best; None if no best checkpoint is kept
    (D17)."""
    training = config.training
    if training.keep_best != "auto":
        return training.keep_best
    # If labels are missing at random, F1 favors models that find little, and `fm@0.5` does not.
    has_gaps = config.labels.complete is not None or config.loss.keep_unmatched
    metric = {"detection": "fm@0.5" if has_gaps else "f1@0.5", "key_value": "f1"}.get(config.task.type)
    return metric if config.data.val is not None and training.eval_steps else None


def chosen_by_test(config: RunConfig) -> str | None:
    """Return a warning, one line, if the run has no `data.val` and therefore `data.test` decides which weights are
    kept, or when the run stops early (D17). None if `data.test` decides neither."""
    training, data = config.training, config.data
    if data.val is not None or data.test is None or not training.eval_steps or kept_metric(config) is None:
        return None
    stops = training.early_stop_patience is not None
    choose = f"training.keep_best {'and training.early_stop_patience choose' if stops else 'chooses'}"
    return (
        f"{choose} by data.test, because data.val is missing: its "
        "scores will be too good; set data.val to other photographs, which then choose, and data.test is scored once "
        "at the end (training.eval_on_end)"
    )


def best_is_measured(config: RunConfig) -> Iterator[Mistake]:
    """`training.keep_best` and `training.early_stop_patience` need evaluations during training (`training.eval_steps`).
    `early_stop_patience` also needs a metric to compare (D17)."""
    training = config.training
    for name in ("keep_best", "early_stop_patience"):
        if getattr(training, name) not in (None, "auto") and not training.eval_steps:
            wanted, remedy = "training.eval_steps, to have evaluations to compare", "set it, or remove this key"
            yield Mistake(path=f"training.{name}", found="no training.eval_steps", wanted=wanted, remedy=remedy)
            return
    if training.early_stop_patience is not None and kept_metric(config) is None:
        wanted, remedy = "training.keep_best: the metric that evaluations are compared by", "name it, or set data.val"
        yield Mistake(path="training.early_stop_patience", found="no metric", wanted=wanted, remedy=remedy)


def carry_packing(config: RunConfig) -> Iterator[Mistake]:
    """`rollout_matching_sft` with packing carries segments over to later steps (D6). Because of the carried segments
    `packing_buffer` is at least `per_device_train_batch_size`, and with a `rollout_buffer` `packing_drop_last` is
    true."""
    training = config.training
    if config.custom.trainer_variant != "rollout_matching_sft" or not training.packing:
        return
    buffer = config.rollout_matching.rollout_buffer
    if not training.packing_drop_last and buffer is not None and buffer.enabled and buffer.m_steps > 1:
        wanted = "true: a run may end with an M-step, which learns what its window learned before and nothing else"
        remedy = f"remove it, or set {ROLLOUT}.rollout_buffer.enabled: false, or training.packing: false"
        yield Mistake(path="training.packing_drop_last", found="false", wanted=wanted, remedy=remedy)
    if training.packing_buffer < training.per_device_train_batch_size:
        wanted = f"at least training.per_device_train_batch_size ({training.per_device_train_batch_size})"
        remedy = "raise it: a micro-step brings that many segments, and one row may take only the first"
        found = given(training, "packing_buffer")
        yield Mistake(path="training.packing_buffer", found=found, wanted=wanted, remedy=remedy)


RULES: tuple[Rule, ...] = (
    run_length,
    warmup_fits,
    evaluation_has_data,
    best_is_measured,
    carry_packing,
)
