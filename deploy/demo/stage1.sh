#!/usr/bin/env bash
# Train the demo's stage-1 model from nothing: random weights, sparsely labelled scenes, plain teacher forcing (`sft`).
# Minutes on one GPU; what came out is in deploy/demo/checkpoint, its numbers in deploy/demo/checkpoint/README.md.
#   deploy/demo/stage1.sh [key=value in YAML, merged over stage1.yaml's training section, e.g. "{max_steps: 20}"]
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}

"$python" -m deploy.demo.model --size demo --out runs/stage1/init
"$python" -m deploy.demo.build_data --out runs/stage1/data --train 40000 --val 200 --test 200 --annotation-dropout 0.55
config=runs/stage1/config.yaml
printf 'base: ../../deploy/demo/stage1.yaml\ntraining: %s\n' "${1:-{\}}" > "$config"
"$python" -m torch.distributed.run --standalone --nproc-per-node 1 -m learner --config "$config"
