"""Every number that a run writes, with its unit and its meaning. `make docs` makes docs/reference/metrics.md from it.

Tests compare these lists with what runs write, so a new metric is declared here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from learner.records import DropReason


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    unit: str
    meaning: str


# Fields of the event `step` itself.
STEP_FIELDS = (
    Metric("global_step", "optimizer steps", "the step's number; the first one is 1"),
    Metric("channel", "A or B", "A: ground truth was learned; B: rollouts were"),
    Metric("loss", "nats per token", "weighted mean over all supervised tokens of the step, on all ranks"),
    Metric("grad_norm", "", "norm of the gradient before clipping"),
    Metric("learning_rate", "", "of this step"),
    Metric("num_segments", "samples", "samples learned; sum over ranks"),
    Metric("num_rows", "rows", "packed rows learned; sum over ranks"),
    Metric("num_tokens", "tokens", "tokens in those rows, prompts included; sum over ranks"),
    Metric("num_supervised", "tokens", "tokens with a loss; sum over ranks"),
    Metric("ver", "weight version", "version of the weights that the servers had; 0 without rollouts"),
)

# The wall time of a step by its parts, on rank 0. It is in `metrics` of the events `step` and `eval`.
SECONDS = (
    Metric("step_s", "s", "the whole step, with what came before it since the last one"),
    Metric("learn_s", "s", "forward, backward, update, and waits for other ranks"),
    Metric("rollout_s", "s", "the learner waited for a whole generation call (no overlap)"),
    Metric("wait_s", "s", "the learner waited for rollouts, or for a call in flight"),
    Metric("sync_s", "s", "weights on their way, checks included"),
    Metric("eval_s", "s", "evaluation"),
    Metric("labels_s", "s", "answers to all training samples, to complete their labels"),
    Metric("save_s", "s", "writing a checkpoint"),
    Metric("data_s", "s", "waiting for encoded prompts"),
    Metric("target_s", "s", "parsing, matching, building targets"),
    Metric("pack_s", "s", "laying segments in rows"),
    Metric("other_s", "s", "the rest"),
)

# These are in `metrics` of every event `step`.
LEARNING = (
    Metric("tokens_per_s", "tokens/s", "tokens learned, over the whole step"),
    Metric(
        "learn_tflops",
        "TFLOP/s",
        "of a GPU while it learns: operations in the decoder's weights, at least, over `learn_s`. Compare it with the "
        "GPU's matmul rate",
    ),
    Metric("packing_fill", "share of a row", "how full the rows were"),
    Metric("underfilled", "rows", "rows below `training.packing_min_fill_ratio`"),
    Metric("batch_share", "share", "only on an epoch's short step: what part of an update it makes"),
)

# Steps on a GPU.
GPU = (
    Metric(
        "gpu_peak_gib",
        "GiB",
        "most memory that torch had allocated at once since the last step, on the rank that had most; what other "
        "processes have there, and what torch has set aside, is not in it",
    ),
)

# Steps that learn rollouts; sums over ranks.
ROLLOUTS = (
    Metric("match_rate", "share", "true objects that the rollouts found"),
    Metric("matched", "objects", "pairs of a prediction and a true object"),
    Metric("missed", "objects", "true objects that no prediction matched"),
    Metric("spurious", "objects", "predictions that match no true object"),
    Metric("unusable", "answers", "answers of which nothing could be read"),
    Metric("truncated", "answers", "answers that ended before their container did"),
    Metric("rollout_tokens", "tokens", "length of the answers, summed"),
    Metric("drop/REASON", "objects", "predicted objects that were dropped, by reason (list below)"),
)

# Runs with rewards: means over the rollouts of a step, or of an evaluation.
REWARDS = (
    Metric("reward", "", "weighted sum of all rewards; mean over rollouts"),
    Metric("reward/NAME", "", "one reward; mean over rollouts"),
    Metric("scored", "rollouts", "of a step: how many have rewards; sum over ranks"),
)

# Steps of `grpo`. Means are over the tokens that were reinforced.
GRPO = (
    Metric("grpo/reward_std", "", "standard deviation of the rewards in a group; mean over groups"),
    Metric("grpo/no_signal", "share", "groups without signal: no token has an advantage"),
    Metric("grpo/groups", "groups", "groups that were learned; sum over ranks"),
    Metric("grpo/drawn_elsewhere", "tokens", "tokens whose log-probability the engine gave; sum over ranks"),
    Metric("grpo/tokens", "tokens", "tokens that were reinforced; sum over ranks"),
    Metric("grpo/entropy", "nats", "entropy of the policy at a token; mean"),
    Metric("grpo/gap", "nats", "|log-probability by the learner - by the engine| before the update; mean"),
    Metric("grpo/importance", "", "probability by the learner over that of the rollout, not truncated; mean"),
    Metric("grpo/truncated", "share", "tokens whose importance exceeds 2"),
    Metric("grpo/ratio", "", "probability now over that before the first update on the rollout; mean"),
    Metric("grpo/clipped", "share", "tokens that have moved too far to be learned further"),
    Metric("grpo/kl", "nats", "divergence from the model without its adapter; mean; 0 without `kl_weight`"),
)

# Steps with `rollout_buffer`.
BUFFER = (
    Metric("rollout_buffer/window", "windows", "number of the window whose rollouts are learned"),
    Metric("rollout_buffer/m_step", "optimizer steps", "which of the window's `m_steps` this is, from 0"),
    Metric("rollout_buffer/rollout_age", "optimizer updates", "updates since the rollouts were made"),
)

# Steps of `stage2_ab_training`. Those under `async/` need `async_actor_learner`.
STAGE2 = (
    Metric("stage2_ab/channel_b", "0 or 1", "1: the step ran Channel-B"),
    Metric("stage2_ab/executed_b_share", "share of steps", "Channel-B steps that ran, of all steps so far"),
    Metric("stage2_ab/calls", "calls", "generation calls that ended since the last step; mean over ranks"),
    Metric("stage2_ab/rollout_s", "s", "how long those calls took, hidden behind learning or not; mean over ranks"),
    Metric(
        "stage2_ab/async/b_step_skipped_due_to_queue",
        "0 or 1",
        "1: the schedule wanted Channel-B, and no share was ready on all ranks",
    ),
    Metric(
        "stage2_ab/async/share",
        "number",
        "the share that the step learned, counted from 0 since the beginning of training: of an epoch's order, the "
        "n-th `effective_batch_size` samples. Events `rollout_call` have it too",
    ),
    Metric("stage2_ab/async/starved_steps", "steps", "Channel-B steps in a row that were skipped, this one included"),
    Metric("stage2_ab/async/queue_depth", "packs", "packs that waited when the step began; mean over ranks"),
    Metric(
        "stage2_ab/async/age_versions",
        "syncs",
        "syncs between making and learning a pack, without those for evaluations; mean over the step's packs",
    ),
    Metric(
        "stage2_ab/async/age_updates",
        "optimizer updates",
        "updates between the weights that made a pack and the step that learned it; mean over the step's packs",
    ),
    Metric("stage2_ab/async/packs_made", "packs", "made since the last step; sum over ranks"),
    Metric("stage2_ab/async/packs_learned", "packs", "learned in the step; sum over ranks"),
    Metric(
        "stage2_ab/async/packs_dropped_stale",
        "packs",
        "dropped because of `version_window` or `max_update_lag`; sum over ranks",
    ),
    Metric(
        "stage2_ab/async/packs_dropped_oldest", "packs", "dropped because over `queue_limit` waited; sum over ranks"
    ),
    Metric(
        "stage2_ab/async/packs_dropped_unwanted",
        "packs",
        "dropped because no scheduled Channel-B step is left that may learn them; sum over ranks",
    ),
    Metric(
        "stage2_ab/async/samples_returned",
        "samples",
        "of dropped packs: each costs a rollout, none is lost; sum over ranks",
    ),
)

# The event `sync`.
SYNC = (
    Metric("ver", "weight version", "what the servers have since this sync; it rises by one"),
    Metric("mode", "", "`full` or `adapter`"),
    Metric("seconds", "s", "the whole sync, all checks included"),
    Metric("num_bytes", "bytes", "of the weights"),
    Metric("num_tensors", "tensors", "of the weights"),
    Metric("canary_gap", "nats per token", "mean difference between the learner's and the server's log-probabilities"),
    Metric("canary_gap_max", "nats", "largest difference at one token"),
    Metric("merge_gap", "nats per token", "effect of merging and rounding: weights as trained against weights as sent"),
    Metric(
        "pause_s",
        "s",
        "a server's longest time without rollouts, from the end of the last call in flight until it served again; 0: "
        "not measured, as in colocated runs",
    ),
    Metric("fallback", "", "why adapter syncs ended with this sync; else empty"),
    Metric("repeated", "", "why each try before this one failed, in words; empty: the first one succeeded"),
    Metric(
        "parts",
        "s",
        "colocated: the host's time for the learner's `scores` (to begin them, and to wait for them once the engine "
        "has scored), to `wake` the engine, to `merge` adapters, to `load`, "
        "for the engine's `canary`, and to `sleep`; what the device still has to do counts for the next part. "
        "Servers: the learner's `scores`, before any server pauses; its `send`, the host's time to merge, pack and "
        "send; and of the server that paused longest, `drain` until the last call in flight had ended, and of its "
        "pause `load`, `canary`, and the rest, mostly a wait for the learner's `verdict`",
    ),
)

# These are in `metrics` of the event `eval` for the detection task. A true positive has IoU >= t and the same
# description.
DETECTION = (
    Metric("f1@0.5", "share", "F1 at IoU 0.5"),
    Metric("precision@0.5", "share", "precision at IoU 0.5"),
    Metric("recall@0.5", "share", "recall at IoU 0.5"),
    Metric(
        "fm@0.5",
        "share",
        "square root of precision times recall at IoU 0.5: labels that are missing at random, and only these, lower it "
        "by the same factor for every model",
    ),
    Metric(
        "estimated_f1@0.5",
        "share",
        "F1 at IoU 0.5 where labels of data.val have gaps: boxes without a label are right as probably as they look, "
        "and the number of objects is in the middle of a range, the same in the whole run",
    ),
    Metric("estimated_f1_low@0.5", "share", "the same for the most objects of the range"),
    Metric("estimated_f1_high@0.5", "share", "the same for the fewest objects of the range"),
    Metric("f1@miou", "share", "mean of F1 at IoU 0.50, 0.55, ..., 0.95"),
    Metric("mean_iou", "IoU", "over the true positives at 0.5"),
    Metric("f1_any@0.5", "share", "F1 at IoU 0.5, whatever the description"),
    Metric("precision_any@0.5", "share", "precision at IoU 0.5, whatever the description"),
    Metric("recall_any@0.5", "share", "recall at IoU 0.5, whatever the description"),
    Metric("f1_any@miou", "share", "`f1@miou`, whatever the description"),
    Metric("parse_rate", "share of answers", "one closed container, nothing dropped, nothing after it"),
    Metric("usable_rate", "share of answers", "the container was opened"),
    Metric("unclosed_rate", "share of answers", "the container was not closed"),
    Metric("truncation_rate", "share of answers", "reached the token limit"),
    Metric("object_parse_rate", "share of objects", "valid objects over valid and dropped ones"),
    Metric("duplicate_rate", "share of objects", "repeat an earlier prediction: same description, IoU of 0.9 or more"),
    Metric("objects_per_rollout", "objects", "valid predictions per answer"),
    Metric("truth_per_sample", "objects", "ground-truth objects per sample"),
    Metric("drop/REASON", "objects per answer", "predicted objects that were dropped, by reason (list below)"),
    Metric(
        "coco/ap",
        "share",
        "COCO's AP (pycocotools) by the boxes' scores: calibrated, or ranked by the probabilities of their tokens",
    ),
    Metric("coco/ap50", "share", "the same at IoU 0.5"),
    Metric("coco/ap75", "share", "the same at IoU 0.75"),
    Metric("coco/ar100", "share", "COCO's AR with 100 detections"),
    Metric(
        "coco/calibrated",
        "0 or 1",
        "1: the scores are probabilities that a box is right, fitted on other images; 0: there is no `data.val`, or it"
        " has too few boxes",
    ),
)

# These are in `metrics` of the event `eval` for `task.type: key_value`.
KEY_VALUE = (
    Metric("f1", "share", "F1 over pairs: right ones, valid ones, the document's"),
    Metric("precision", "share", "right pairs of the valid ones"),
    Metric("recall", "share", "right pairs of the document's"),
    Metric("key_recall", "share", "the document's keys that were answered, with whatever value"),
    Metric("exact_match", "share of answers", "right and whole"),
    Metric("parse_rate", "share of answers", "one closed object, nothing dropped, nothing after it"),
    Metric("truncation_rate", "share of answers", "reached the token limit"),
    Metric("drop/REASON", "pairs per answer", "dropped pairs: `not_text`, `blank`, `repeated_key`, `unreadable`"),
)

DROPS: dict[DropReason, str] = {
    "key_invalid": "its key is not `object_N`, or `N` came before; or one of its fields came twice",
    "missing_desc": "no description, or one that is empty or not a text",
    "unknown_geom": "a field that is neither description nor geometry, or two geometries",
    "missing_geom": "no geometry that is a flat list",
    "non_coord_token": "something in the list is no coordinate as the task spells it",
    "wrong_arity": "not 4 numbers for a box; fewer than 6 or an odd number for a polygon",
    "bbox_invalid": "x2 <= x1 or y2 <= y1; for a polygon, of its bounding box",
    "image_invalid": "the sample has several images, and the object does not name one of them",
    "truncated": "the answer ended inside it",
}
assert set(DROPS) == set(get_args(DropReason))

# Every event of metrics.jsonl, and its fields where no list above has them.
EVENTS: dict[str, str] = {
    "plan": "once: the derived sizes of the run, its servers and seeds, as `rollout-learner check` prints them",
    "model": "once: `compiled`, and `why_not`",
    "data": "once: numbers of samples (`train`, `evaluation`, `test` that is scored at the end), and `bad_records`",
    "step": "an optimizer step",
    "timeline": "a step's spans, [lane, name, begin, end] in seconds after `origin`, of all ranks and servers",
    "rollout_call": "a generation call of rank 0: its step, or the `share` that it runs ahead for, `num_requests`, "
    "`ver`, `seconds`, and `calls` to servers; colocated: `parts`, the seconds to make `prompts` and in the `engine`",
    "sync": "a weight sync",
    "eval": "an evaluation; metrics of `data.retain` are `retain/NAME/METRIC`",
    "labels": "a completion of labels: how many were `added`, `min_votes` or `why` nothing was, and the `estimate`",
    "test": "`data.test`, scored once at the end; its metrics are those of `eval`",
    "begin": "training begins, or goes on after a resume: after which step, and `total_steps`",
    "end": "how it ended: `finished`, `stopped` or `failed` (`how`), and `because`; missing if the process was killed",
    "early_stop": "`early_stop_patience` ended the run: `best_step`",
    "server": "a server was `lost`, `joined`, `added`, `removed`, or `refused` while out (`what`), `because`, and "
    "how many are `serving`",
    "warning": "the run goes on but cannot learn: `what`, in how many `steps` in a row, and the `remedy`",
    "spike": "`loss` or `grad_norm` (`metric`) leapt: its `value`, the `usual` one, and up to 8 `samples` of the step, "
    "those first whose packed row had the highest `row_loss`",
    "note": "once, at the end: samples that were carried over and not learned",
    "trackers": "once, at the end: calls that did not reach a tracker (`failed`, `dropped`, `unfinished`), if any",
}

GROUPS: tuple[tuple[str, str, tuple[Metric, ...]], ...] = (
    ("A step", "Fields of the event `step`. In TensorBoard: `step/NAME`.", STEP_FIELDS),
    ("Where its time went", "Under `metrics` of `step`, of rank 0. In TensorBoard: `step/metrics/NAME`.", SECONDS),
    ("What was learned", "Under `metrics` of `step`.", LEARNING),
    ("Memory", "Under `metrics` of `step`, on GPUs.", GPU),
    ("Rollouts", "Under `metrics` of a `step` that learned rollouts. Sums over ranks.", ROLLOUTS),
    ("Rewards", "Under `metrics` of `step` and `eval`, with `reward.functions` or `reward.weights`.", REWARDS),
    ("Policy gradients", "Under `metrics` of `step`, with `grpo`.", GRPO),
    ("Buffered rollouts", "Under `metrics` of `step`, with `rollout_buffer`.", BUFFER),
    ("Stage 2", "Under `metrics` of `step`, with `stage2_ab_training`. `async/`: with `async_actor_learner`.", STAGE2),
    ("A sync", "Fields of the event `sync`. In TensorBoard: `sync/NAME`.", SYNC),
    (
        "An evaluation of detection",
        "Under `metrics` of the event `eval`. In TensorBoard: `eval/metrics/NAME`. A true positive needs the IoU and "
        "the same description. A ratio with a denominator of 0 is 0.",
        DETECTION,
    ),
    ("An evaluation of key-value pairs", "The same, with `task.type: key_value`.", KEY_VALUE),
)
