#!/usr/bin/env bash
# Train the demo's stage-1 model from nothing, by plain teacher forcing (`sft`), on scenes in which each label is missing with
# probability 0.55, as in sparsely annotated corpora. Ten minutes on one H200. What came out is in deploy/demo/checkpoint, its
# numbers in deploy/demo/checkpoint/README.md.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}

"$python" -m deploy.demo.model --size demo --out runs/stage1/init
"$python" -m deploy.demo.build_data --out runs/stage1/data --train 40000 --val 200 --test 200 --annotation-dropout 0.55
"$python" -m deploy.torchrun --nproc 1 -- -m learner --config deploy/demo/stage1.yaml
"$python" -m learner export --checkpoint runs/stage1/run/checkpoint-3200 --out deploy/demo/checkpoint
