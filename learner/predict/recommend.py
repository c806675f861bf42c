"""Recommends a method of training, with its reason: rules over the features of `features.py`.

In: features with their intervals. Out: a method, and the result of every rule, with its numbers. Rules are tried in the
order below, and the first that holds recommends its method. A feature counts as above its threshold only if its whole
interval is above. "Best of K" is the best of K sampled answers to a scene, compared with the greedy answer.

    `sft`                    The model finds too little to learn from its own answers (PARSE_RATE, LEAST_F1).
    `an earlier checkpoint`  The model answers training scenes much better than validation scenes (OVERFIT_F1). The
                             model memorized the training scenes, so features measured on them say little.
    `rollout_matching_sft`   Labels are missing (MISSING), and none could be added with enough certainty.
    `completed labels, grpo` Labels are missing, and the best of K has better boxes (MISSING, HEADROOM, NO_SIGNAL).
    `nothing`                Labels are missing, but the model finds nearly all labelled objects (MISSING, FOUND).
    `completed labels, sft`  Labels are missing (MISSING).
    `sft, then grpo`         The best of K has better boxes (names ignored), and K answers differ (HEADROOM,
                             NO_SIGNAL). First correct systematic errors by a few steps of sft. Then measure again.
    `sft`                    The best of K is better, but only in names or in few scenes (HEADROOM). Labels teach names.
    `rollout_matching_sft`   Labels are predicted worse after the model's own answer than after labels (EXPOSURE).
    `nothing`                The model is right, also on validation scenes, or more sft would overfit.
    `sft`                    No other rule holds, so the labels still teach.

The number of missing labels is estimated as `labels.complete` does it: from the pixels of the objects that the model
finds, if possible. If labels are missing and `labels.complete` would add none, rollout matching is recommended, with
objects without a label kept (`keep_unmatched`). On photographs, judged by labels that were made anew, F1 was 0.664 with
rollout matching, 0.692 after training on completed labels, and 0.611 with sft. With labels missing at random, grpo on
completed labels gained up to 0.04 F1 over sft on the same labels; on the photographs F1 fell by 0.02. So grpo is
recommended only if the best of K is better, and the estimated F1 decides whether to keep its result.

The thresholds are chosen by hand. With these thresholds the rules name the right method in all measured comparisons
(docs/concepts/which-method.md). With complete labels and much better boxes in the best of K, sft alone corrected four
systematic errors. Thresholds without a measured figure only mark obvious cases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from learner.config.sections.training import ESTIMATED
from learner.predict.features import FeatureEstimate
from learner.tasks.detection.completion import MISSING, CompletionEstimate

PARSE_RATE = 0.5  # if a smaller fraction of the answers is readable, sft comes first
LEAST_F1 = 0.05  # if the F1 of greedy answers is lower, sft comes first

# With 40% of the labels missing, a model that detected 96% of the labelled digits gained nothing from completed labels.
# The models that gained had detected 87% or less.
FOUND = 0.90  # a model that finds a larger fraction of the labelled objects gains nothing from completed labels
HEADROOM = 0.03  # min gain worth training for: F1 of the best of K answers minus F1 of the greedy answer
NO_SIGNAL = 0.8  # max fraction of scenes whose K answers all have the same F1, for grpo to be recommended

# With a gap of 0.0013 nats, rollout matching and sft were equally good.
EXPOSURE = 0.02  # nats per token; rollout matching is recommended for a larger exposure gap (`exposure.py`)
OVERFIT = 0.05  # nats per token; if the loss on validation labels is this much higher, sft overfits

# If F1 on training scenes exceeds F1 on validation scenes by more, the model has memorized the training scenes.
OVERFIT_F1 = 0.10
RIGHT_F1 = 0.97  # above this F1 training cannot gain anything

SFT = "sft"
ROLLOUT_MATCHING = "rollout_matching_sft"
COMPLETED_SFT = "labels.complete, then sft"
COMPLETED_GRPO = f"labels.complete, then grpo; if time is short, {COMPLETED_SFT}"
GRPO = "sft, then measure again; grpo if there still is headroom in places"
KEPT = f"{ROLLOUT_MATCHING} with loss.keep_unmatched"
NOTHING = "nothing to gain"
_BOTH = "labels lack objects, and the best of K is better in places, both as below"
BY_HEART = "an earlier checkpoint, or more data or augmentation: this model knows its training scenes by heart"


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule's result: `reason` says, with numbers, why the rule recommends its `method` or not."""

    method: str
    holds: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The recommended method, and the results of all rules in order. The first rule that holds gave the method."""

    method: str
    rules: Sequence[Rule]


def recommend(found: Mapping[str, FeatureEstimate], known: CompletionEstimate) -> Recommendation:
    """Return the recommended method. `found`: the features of `features.estimates`. `known`: the estimate of the labels
    that are missing."""
    gaps = _gaps(found, known)
    rules = [
        _answers_too_little(found),
        _by_heart(found),
        Rule(KEPT, gaps.holds and known.min_votes is None, f"{gaps.reason}. {_completes(known)}"),
        Rule(COMPLETED_GRPO, gaps.holds and better_places(found).holds, _BOTH),
        _finds_all(found, gaps),
        gaps,
        _better_places_now(found),
        _better_names(found),
        _exposed(found),
        _nothing_left(found),
        Rule(SFT, True, f"the labels still teach: they cost {_shown(found['nats_train'])} nats per token"),
    ]
    return Recommendation(next(rule.method for rule in rules if rule.holds), rules)


def _answers_too_little(found: Mapping[str, FeatureEstimate]) -> Rule:
    parsed, f1 = found["parse_rate"], found["f1_greedy"]
    holds = parsed.value < PARSE_RATE or f1.value < LEAST_F1
    return Rule(
        SFT, holds, f"parse rate {_shown(parsed)}, F1 {_shown(f1)}; below {PARSE_RATE} or {LEAST_F1}: sft first"
    )


def _by_heart(found: Mapping[str, FeatureEstimate]) -> Rule:
    if "overfit_f1" not in found:
        return Rule(BY_HEART, False, "without a validation file (data.val) overfitting is not seen")
    reason = (
        f"F1 {_shown(found['f1_greedy'])} on training scenes, {_shown(found['f1_val'])} on validation scenes; a "
        f"difference above {OVERFIT_F1} is what it knows by heart, and the features of training scenes then say little"
    )
    return Rule(BY_HEART, found["overfit_f1"].low > OVERFIT_F1, reason)


def _gaps(found: Mapping[str, FeatureEstimate], known: CompletionEstimate) -> Rule:
    """Return the rule for missing labels. The rule holds if there are signs that labels are not missing at random, or
    if the interval of the fraction of missing labels is above MISSING."""
    missing = found.get("missing_labels")
    seen = [known.not_random] if known.not_random else []
    seen += [f"{_shown(missing)} of the objects found have no label"] if missing is not None else []
    holds = not known.may_be_complete and (bool(known.not_random) or (missing is not None and missing.low > MISSING))
    reason = (
        f"{'; '.join(seen) or known.why}; above {MISSING} sft unlearns what has no label. F1 by validation labels with "
        f"the same gaps does not show the gain; {ESTIMATED} does"
    )
    return Rule(COMPLETED_SFT, holds, reason)


def _completes(known: CompletionEstimate) -> str:
    if known.min_votes is None:
        return f"Nothing would be completed: {known.why}"
    return f"{known.free_right(known.min_votes):.0%} of what labels.complete would add are right, estimated"


def _finds_all(found: Mapping[str, FeatureEstimate], gaps: Rule) -> Rule:
    places = found["recall_places"]
    reason = (
        f"it finds {_shown(places)} of the labelled places; above {FOUND} it finds nearly all that has no label too, "
        "so completed labels teach what it says already, and the wrong names among it"
    )
    return Rule(NOTHING, gaps.holds and places.low > FOUND, reason)


def better_places(found: Mapping[str, FeatureEstimate], *, least_low: float = HEADROOM) -> Rule:
    """Return the rule that recommends grpo. The rule holds if the best of K answers has better boxes than the greedy
    answer: F1 is higher by more than HEADROOM, and with an interval above `least_low`. The K answers must also differ
    in enough scenes."""
    headroom, silent = found["headroom_places"], found["no_signal"]
    reason = (
        f"best of K minus greedy, names ignored: {_shown(headroom)} F1, and {silent.value:.0%} of the scenes have "
        f"answers that are all worth the same; more than {HEADROOM}, an interval above {least_low:g}, and at most "
        f"{NO_SIGNAL:.0%} are asked for"
    )
    holds = headroom.value > HEADROOM and headroom.low > least_low and silent.value <= NO_SIGNAL
    return Rule(GRPO, holds, reason)


def _better_places_now(found: Mapping[str, FeatureEstimate]) -> Rule:
    rule = better_places(found)
    return Rule(rule.method, rule.holds, rule.reason + _when_sft_is_done(found))


def _when_sft_is_done(found: Mapping[str, FeatureEstimate]) -> str:
    if "overfit_nats" not in found:
        return ". Without a validation file: not known whether sft still gains"
    known = (
        "sft overfits here: stop it at its best validation score" if _overfits(found) else "sft is not shown to overfit"
    )
    return (
        f". {known} (validation labels cost {_shown(found['overfit_nats'])} nats per token more than training labels)"
    )


def _better_names(found: Mapping[str, FeatureEstimate]) -> Rule:
    headroom = found["headroom"]
    reason = (
        f"best of K minus greedy: {_shown(headroom)} F1, part of it luck; above {HEADROOM}, and not in places: names"
    )
    return Rule(SFT, headroom.low > HEADROOM, reason)


def _exposed(found: Mapping[str, FeatureEstimate]) -> Rule:
    gap = found["exposure_gap"]
    reason = f"after its own words the truth costs {_shown(gap)} nats per token more; above {EXPOSURE} rollouts mend it"
    return Rule(ROLLOUT_MATCHING, gap.low > EXPOSURE, reason)


def _nothing_left(found: Mapping[str, FeatureEstimate]) -> Rule:
    measured = [found[name] for name in ("f1_greedy", "f1_val") if name in found]
    reason = f"F1 {', '.join(map(_shown, measured))} (training, validation); above {RIGHT_F1} there is little left"
    if "overfit_nats" in found:
        reason += f". Validation minus training nats {_shown(found['overfit_nats'])}; above {OVERFIT} more sft overfits"
    return Rule(NOTHING, all(one.low > RIGHT_F1 for one in measured) or _overfits(found), reason)


def _overfits(found: Mapping[str, FeatureEstimate]) -> bool:
    return "overfit_nats" in found and found["overfit_nats"].low > OVERFIT


def _shown(estimate: FeatureEstimate) -> str:
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"
