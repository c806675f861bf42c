#!/usr/bin/env bash
# Train the demo's stage-1 model from nothing, by plain teacher forcing (`sft`) on incomplete labels:
#   leg 1: random weights; each label of 40,000 scenes is missing with probability 0.55, as in sparsely annotated corpora
#   leg 2: on from there; in 60% of 60,000 scenes labels stop after the first three objects, as a hurried annotator leaves them
# So the model reads digits well and stops early: what stage 2 is there to mend. Fifteen minutes on one H200. What came out is in
# deploy/demo/checkpoint, its numbers in deploy/demo/checkpoint/README.md.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
scenes() { "$python" -m deploy.demo.build_data --val 0 --test 0 "$@"; }
train() { "$python" -m deploy.torchrun --nproc 1 -- -m learner --config "$1"; }
export_model() { "$python" -m learner export --model "$1" --out "$2"; }

"$python" -m bench.demo_model --size demo --out runs/stage1/init
scenes --out runs/stage1/data --train 40000 --annotation-dropout 0.55
train deploy/demo/stage1.yaml
export_model runs/stage1/run/checkpoint-3200 runs/stage1/leg1
scenes --out runs/stage1/data_capped --train 60000 --annotation-cap 3 --annotation-cap-share 0.6 --seed 1
train deploy/demo/stage1b.yaml
export_model runs/stage1/run_capped/checkpoint-600 runs/stage1/leg2
cp runs/stage1/leg2/* deploy/demo/checkpoint/
