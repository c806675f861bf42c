#!/usr/bin/env bash
# Train the demo's stage-1 model from nothing, by plain teacher forcing (`sft`) on scenes whose labels are incomplete.
#   part 1: random weights, 40,000 scenes, each label missing with probability 0.55
#   part 2: on from there, labels stop after the first three objects of a scene, as a hurried annotator leaves them
# So the model reads digits well, and stops early: what stage 2 is there to mend. About 20 minutes on one H200. What came
# out is in deploy/demo/checkpoint, its numbers in deploy/demo/checkpoint/README.md: step 1000 of part 2, since by its last
# step the model knows the training scenes by heart (loss 0.0035).
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
train() { "$python" -m torch.distributed.run --standalone --nproc-per-node 1 -m learner --config "$1"; }

"$python" -m deploy.demo.model --size demo --out runs/stage1/init
"$python" -m deploy.demo.build_data --out runs/stage1/data --train 40000 --val 0 --test 0 --annotation-dropout 0.55
train deploy/demo/stage1.yaml
"$python" -m learner export --checkpoint runs/stage1/run/checkpoint-3200 --out runs/stage1/part1
"$python" -m deploy.demo.build_data --out runs/stage1/data_capped --train 40000 --val 0 --test 0 --annotation-cap 3 --seed 1
train deploy/demo/stage1b.yaml
"$python" -m learner export --checkpoint runs/stage1/run_capped/checkpoint-1000 --out deploy/demo/checkpoint
