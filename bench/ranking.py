"""Are models ranked right by labels with gaps: `python -m bench.ranking --data DIR --study OUT --out FILE`.

In: DIR with `bccd/` and `bccd_redone/`, and what `bench.study real` wrote into OUT (several: later ones add runs). Each
checkpoint's answers for the validation photographs are scored by their published labels, by the estimate from the
photographs (`learner.tasks.detection.ranking`, one range of objects for all), and by the labels that others drew anew.
Out: FILE and lines: Kendall's tau of both orders with the redone labels, over all checkpoints and over the arms' last
steps (means over seeds), and for each run how far the step that each would keep is below its best.
"""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Annotated

import typer
from scipy.stats import kendalltau

from bench.experiment.results import objects_of
from bench.figures import circumstances
from bench.study import Regime, Study, read_rows, write_data
from learner.records import DetectionObject, Sample
from learner.run.files import write_atomically
from learner.tasks.detection.bins import to_bins
from learner.tasks.detection.ranking import GapJudge, rank
from shared.images import ImageRules, Images


def main(
    data: Annotated[Path, typer.Option(help="A folder with bccd/ and bccd_redone/.")],
    study: Annotated[list[Path], typer.Option(help="What bench.study wrote; again for more.")],
    out: Annotated[Path, typer.Option(help="Result file.")],
    work: Annotated[Path, typer.Option(help="Scratch.")] = Path("runs/ranking"),
) -> None:
    """Rank all checkpoints."""
    none = {"photographs": None, "steps": None, "batch_size": None, "max_new_tokens": None}
    regime = Regime.read("real")
    made = Study(out=work, work=work, deadline=0.0, data=data, on_gpu=False, **none)
    write_data(made, regime)
    samples = [
        Sample(
            sample_id=row["id"],
            messages=(),
            images=tuple(row["images"]),
            objects=tuple(objects_of(row)),
            width=row["width"],
            height=row["height"],
        )
        for row in read_rows(made.rows(regime, "score", "gaps"))
    ]
    judge = GapJudge(samples, Images(ImageRules()).load)
    names, scores, boxes, truth, published = [], [], [], [], []
    for file in [file for folder in study for file in sorted((folder / "answers" / "real").glob("*.json"))]:
        result = json.loads((file.parents[2] / "results" / "real" / file.name).read_text())
        by_step = {str(one["step"]): one for one in result["evaluations"]}
        for step, answers in json.loads(file.read_text()).items():
            own = [
                [
                    DetectionObject(name, "bbox_2d", to_bins(box, sample.width, sample.height))
                    for name, *box in answers.get(sample.sample_id, [])
                ]
                for sample in samples
            ]
            score = judge.score(own)
            if score is None:
                raise typer.BadParameter(f"these labels cannot rank models: {judge.why}")
            names.append((result["arm"], result["seed"], int(step)))
            scores.append(score)
            boxes.append(own)
            truth.append(by_step[step]["all"]["f1"])
            published.append(by_step[step]["gaps"]["f1"])
    objects = judge.objects(scores, boxes)
    ranked = rank([str(name) for name in names], scores, objects)
    estimated = [one.f1.estimate for one in ranked]
    ways = {"estimate": estimated, "most objects": [one.low for one in ranked], "least": [one.high for one in ranked]}
    ways["published labels"] = published
    found: dict[str, object] = {"objects": [round(one) for one in objects], "checkpoints": len(names)}
    for way, values in ways.items():
        arms: dict[str, list[tuple[float, float]]] = defaultdict(list)
        runs: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
        for (arm, seed, step), value, true in zip(names, values, truth, strict=True):
            runs[arm, seed].append((value, true))
            if step == max(one for a, s, one in names if (a, s) == (arm, seed)):
                arms[arm].append((value, true))
        means = [tuple(mean(side) for side in zip(*pairs, strict=True)) for pairs in arms.values()]
        lost = {key: max(true for _, true in pairs) - max(pairs)[1] for key, pairs in runs.items()}
        found[way] = {
            "tau of all": round(float(kendalltau(values, truth).statistic), 3),
            "tau of arms": round(float(kendalltau(*zip(*means, strict=True)).statistic), 3),
            "lost by its step, mean": round(mean(lost.values()), 4),
            "lost by its step, most": round(max(lost.values()), 4),
            "runs within 0.01": f"{sum(one <= 0.01 for one in lost.values())} of {len(lost)}",
        }
        print(way, found[way], flush=True)
    rows = zip(names, estimated, published, truth, strict=True)
    found["rows"] = [[*name, round(e, 4), round(p, 4), round(t, 4)] for name, e, p, t in rows]
    write_atomically(out, json.dumps({**circumstances(), **found}) + "\n")


if __name__ == "__main__":
    typer.run(main)
