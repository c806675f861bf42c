#!/usr/bin/env bash
# Written by `rollout-launch --to compose` from deploy/qwen3vl_4b/launch.yaml. Do not edit: change that file and write it again.
# The whole run: it builds the images, starts servers and learner, and shows what they say. It ends with the
# learner, and returns the learner's exit code. Ctrl-C: the learner saves a checkpoint first. With ROLLOUT_JOB=NAME
# the next start with this name goes on from there. A rootless engine needs RUN_AS=0:0.
set -euo pipefail
cd "$(dirname "$0")"
: "${VLLM_IMAGE:?name the image of vLLM by its digest: export VLLM_IMAGE=vllm/vllm-openai@sha256:...}"
export ROLLOUT_SERVER_TOKEN=${ROLLOUT_SERVER_TOKEN:-$(od -An -tx1 -N32 /dev/urandom | tr -d ' \n')}
[ "$(id -u)" = 0 ] || RUN_AS=${RUN_AS:-$(id -u):$(id -g)}
export RUN_AS=${RUN_AS:-10001:10001}
# prepare FOLDER: the containers write there.
prepare() {
  [ -d "$1" ] || mkdir -p "$1"
  [ "$(id -u)" != 0 ] || chown "$RUN_AS" "$1"
}
prepare "${RUNS_DIR:-../../runs}"
trap 'docker compose down --timeout 60' EXIT
docker compose up --build --attach-dependencies --exit-code-from learner learner || status=$?
if [ "${status:-0}" != 0 ] && [ -z "$(docker compose ps --all --quiet --status exited learner)" ]; then
  echo "The learner did not start. If a server was downloading its model, run this again: what is there stays." >&2
fi
exit "${status:-0}"
