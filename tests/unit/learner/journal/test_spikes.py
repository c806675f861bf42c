"""Steps whose loss or gradient norm leaps, and the samples that are written beside them."""

from __future__ import annotations

import math

from learner.journal.spikes import FEWEST, MAX_SAMPLES, METRICS, SpikeWatch, spiking_samples
from learner.records import DetectionObject, LearnedRow, Sample, StepResult


def step(number: int, *, loss: float = 1.0, grad_norm: float = 2.0, channel: str = "A", **metrics: float) -> StepResult:
    numbers = dict.fromkeys(("num_segments", "num_rows", "num_tokens", "num_supervised", "ver"), 1)
    return StepResult(
        global_step=number,
        channel="B" if channel == "B" else "A",
        loss=loss,
        grad_norm=grad_norm,
        learning_rate=1e-4,
        metrics=metrics,
        **numbers,
    )


def wobble(i: int) -> float:
    return 1.0 + 0.1 * math.sin(i)


def test_a_leap_is_a_spike_and_a_wobble_is_none() -> None:
    watch = SpikeWatch()
    assert not [spike for i in range(60) for spike in watch.after(step(i, loss=wobble(i)))]
    (spike,) = watch.after(step(60, loss=4.0))
    assert (spike.metric, spike.value) == ("loss", 4.0)
    assert 0.9 < spike.usual < 1.1
    assert not watch.after(step(61, loss=wobble(61)))
    assert [spike.metric for spike in watch.after(step(62, loss=4.0, grad_norm=99.0))] == list(METRICS)


def test_a_value_that_rises_slowly_or_is_not_finite_is_no_spike() -> None:
    watch = SpikeWatch()
    assert not [s for i in range(200) for s in watch.after(step(i, loss=1 + i / 50, grad_norm=math.nan))]
    assert not watch.after(step(200, loss=math.inf))


def test_the_first_steps_are_no_spikes_and_channels_are_apart() -> None:
    watch = SpikeWatch()
    for i in range(FEWEST):
        assert not watch.after(step(i, loss=100.0 if i == FEWEST - 1 else wobble(i)))
        assert not watch.after(step(i, loss=50 * wobble(i), channel="B"))
    assert watch.after(step(FEWEST, loss=50.0))


def test_the_loss_of_a_policy_gradient_is_no_measure() -> None:
    """It is about 0, whatever is learned."""
    watch, grpo = SpikeWatch(), {"grpo/groups": 2.0}
    for i in range(20):
        watch.after(step(i, loss=0.001 * wobble(i), grad_norm=wobble(i), **grpo))
    assert [spike.metric for spike in watch.after(step(20, loss=1.0, grad_norm=9.0, **grpo))] == ["grad_norm"]


def sample(name: str) -> Sample:
    box = DetectionObject("cat", "bbox_2d", (0, 0, 500, 500))
    return Sample(sample_id=name, messages=(), images=(f"{name}.png",), objects=(box,), width=64, height=48)


def test_the_samples_of_the_worst_row_come_first_with_their_labels() -> None:
    rows = [LearnedRow(0.2, ("a", "b")), LearnedRow(7.0, ("c", "d")), LearnedRow(0.5, ("a",))]
    found = spiking_samples(rows, [sample(name) for name in "abc"])
    assert [(one["id"], one["row_loss"]) for one in found] == [("c", 7.0), ("d", 7.0), ("a", 0.5), ("b", 0.2)]
    assert found[0]["truth"] == [{"desc": "cat", "bbox_2d": [0, 0, 500, 500]}]
    assert (found[0]["images"], found[0]["width"], found[0]["height"]) == (["c.png"], 64, 48)
    assert "images" not in found[1], "nobody knows this sample"
    assert len(spiking_samples([LearnedRow(1.0, tuple(map(str, range(50))))], [])) == MAX_SAMPLES
