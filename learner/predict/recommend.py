"""The choice of a method, with its reason: rules over the features of `features.py`.

In: features with their intervals. Out: a method, and the verdict of every rule with its numbers. Rules are tried in the
order below, and the first that holds recommends. An interval must clear a threshold, not only the estimate.

    sft                    the model answers too little to learn from its own words: PARSE_RATE, LEAST_F1
    an earlier checkpoint  it answers training scenes much better than others: OVERFIT_F1. What else was measured, was
                           measured on scenes that it knows by heart
    rollout_matching_sft   labels are missing, and most of what it says without one is invented: MISSING,
                           UNLABELLED_RIGHT
    completed labels, grpo labels are missing, and the best of K is better in places: MISSING, HEADROOM, NO_SIGNAL
    nothing                labels are missing, but the model finds nearly all that is labelled: MISSING, FOUND
    completed labels, sft  labels are missing: MISSING
    sft, then grpo         the best of K is better in places (names ignored), and K answers differ: HEADROOM, NO_SIGNAL.
                           A few steps of sft correct a habit; what it leaves is measured again
    sft                    the best of K is better, but in names or in few scenes: HEADROOM. Labels teach names
    rollout_matching_sft   the model continues its own words worse than the truth's: EXPOSURE
    nothing                there is nothing to gain from these data: the model is right, also on validation scenes, or
                           more sft overfits
    sft                    otherwise: labels still teach

The thresholds are not calibrated. They are chosen by hand, so that the comparisons that were measured come out right
(docs/concepts/which-method.md). Complete labels were estimated at 0.05 missing at most, labels of which 40% were
removed at 0.38 or more; so 0.10 is asked for. There sft on completed labels won by 0.11 to 0.24 F1 over sft, and grpo
on completed labels by 0.14 to 0.28 in four to six times the time; keep_unmatched by 0 to 0.19. Of what the answers say
without a label, 0.48 or more was right there. It was 0.05 (of 4 answers) on digits that the model reads badly; there
keep_unmatched was ahead. It is an estimate from votes, far too low where labels are not missing at random: 0.09 to 0.22
on photographs of blood cells, where 0.43 is right by labels drawn anew and completed labels were ahead. A model of
digits that finds 0.96 of the labelled places, with 40% missing, gained nothing: sft on what it completed lost 0.028,
grpo 0.013. Models that gained find 0.87 or less. An exposure gap of 0.0013 nats went with a tie, so 0.02 is asked for.
0.03 F1 is what is worth training for. With complete labels and much headroom in places, four habits were corrected by
sft alone. The others only name what is obvious.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from learner.predict.features import FeatureEstimate

PARSE_RATE = 0.5
LEAST_F1 = 0.05
MISSING = 0.10
UNLABELLED_RIGHT = 0.40
FOUND = 0.90  # share of the labelled places
HEADROOM = 0.03  # F1
NO_SIGNAL = 0.8  # share of the scenes
EXPOSURE = 0.02  # nats per token
OVERFIT = 0.05  # nats per token
OVERFIT_F1 = 0.10
RIGHT_F1 = 0.97

SFT = "sft"
ROLLOUT_MATCHING = "rollout_matching_sft"
COMPLETED_SFT = "labels.complete, then sft"
COMPLETED_GRPO = f"labels.complete, then grpo; if time is short, {COMPLETED_SFT}"
GRPO = "sft, then measure again; grpo if there still is headroom in places"
KEPT = f"{ROLLOUT_MATCHING} with loss.keep_unmatched"
NOTHING = "nothing to gain"
BY_HEART = "an earlier checkpoint, or more data or augmentation: this model knows its training scenes by heart"


@dataclass(frozen=True, slots=True)
class Rule:
    """A method, whether it is recommended by this rule, and why or why not."""

    method: str
    holds: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Recommendation:
    """`method` is that of the first rule that holds."""

    method: str
    rules: Sequence[Rule]


def recommend(found: Mapping[str, FeatureEstimate]) -> Recommendation:
    """Recommend a method from the estimates of `features.estimates`."""
    rules = [
        _answers_too_little(found),
        _by_heart(found),
        _labels_are_missing_and_it_invents(found),
        _labels_are_missing_and_it_can_do_better(found),
        _labels_are_missing_and_it_finds_all(found),
        _labels_are_missing(found),
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


def _labels_are_missing_and_it_invents(found: Mapping[str, FeatureEstimate]) -> Rule:
    right = found["unlabelled_right"]
    reason = (
        f"of what the answers say without a label {_shown(right)} is right; below {UNLABELLED_RIGHT} completed labels "
        "are too often wrong, or too few"
    )
    return Rule(KEPT, _labels_are_missing(found).holds and right.high < UNLABELLED_RIGHT, reason)


def _labels_are_missing_and_it_can_do_better(found: Mapping[str, FeatureEstimate]) -> Rule:
    reason = (
        "labels are missing, and the best of K is better in places, both as below: on digits grpo on completed labels "
        "had 0 to 4 F1 points more than sft on them, the more the less is labelled"
    )
    return Rule(COMPLETED_GRPO, _labels_are_missing(found).holds and better_places(found).holds, reason)


def _labels_are_missing_and_it_finds_all(found: Mapping[str, FeatureEstimate]) -> Rule:
    places = found["recall_places"]
    reason = (
        f"it finds {_shown(places)} of the labelled places; above {FOUND} it finds nearly all that has no label too, "
        "so completed labels teach what it says already, and the wrong names among it"
    )
    return Rule(NOTHING, _labels_are_missing(found).holds and places.low > FOUND, reason)


def _labels_are_missing(found: Mapping[str, FeatureEstimate]) -> Rule:
    missing = found["missing_labels"]
    reason = (
        f"missing labels {_shown(missing)}; above {MISSING} sft unlearns what has no label. Test labels with the same "
        "gaps count what is found there as wrong, and don't show the gain; fm@0.5 does, if they are missing at random"
    )
    return Rule(COMPLETED_SFT, missing.low > MISSING, reason)


def better_places(found: Mapping[str, FeatureEstimate], *, least_low: float = HEADROOM) -> Rule:
    """Return True if rollouts can still teach: the best of K answers is better in places, and K answers differ. The
    interval must lie above `least_low`, the estimate above HEADROOM."""
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
