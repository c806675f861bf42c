#!/usr/bin/env bash
# The rollout servers of all your own running jobs with one name, one URL a line, for vllm.server.discovery of the learner:
#   discovery: [deploy/slurm/servers.sh, rollout-server]
# Start more of them while the run goes on, with the run's ROLLOUT_SERVER_TOKEN in the environment:
#   sbatch --job-name=rollout-server --nodes=1 --gpus-per-node=8 --wrap '.venv/bin/python -m rollout_server --config server.yaml'
# and end one with scancel once `rollout-learner servers list` no longer shows it. To keep its URL out of the list before
# that, rename its job: scontrol update jobid=JOB jobname=leaving
set -euo pipefail
name=${1:-rollout-server} port=${2:-8000}

nodes=$(squeue --me --noheader --states=RUNNING --name="$name" --format=%N)
for list in $nodes; do
  for node in $(scontrol show hostnames "$list"); do echo "http://$node:$port"; done
done
