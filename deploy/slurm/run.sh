#!/usr/bin/env bash
# Written by `rollout-launch --to slurm` from deploy/qwen3vl_4b/launch-cluster.yaml. Do not edit: change that file and write it again.
# The first 2 machine(s) serve, the others learn. Submit it from the folder that has data/,
# runs/ and .venv (PYTHON names another interpreter), on a file system that all machines share:
#   sbatch deploy/slurm/run.sh
#SBATCH --job-name=qwen3vl-4b
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --mem=512G
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --gpus-per-node=8
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?start this with sbatch}"

# Slurm's names and addresses of the machines, for deploy/slurm/*.yaml.
i=0
for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
  address=$(scontrol show node "$node" --oneliner | grep -o ' NodeAddr=[^ ]*')
  export "NODE_$i=$node" "ADDRESS_$i=${address#*=}"
  i=$((i + 1))
done
# A secret of this start. Every step of the job inherits it, and no file has it.
export ROLLOUT_SERVER_TOKEN=${ROLLOUT_SERVER_TOKEN:-$(openssl rand -hex 32)}
export ROLLOUT_JOB=slurm-$SLURM_JOB_ID # a requeued job goes on from its newest checkpoint

"${PYTHON:-.venv/bin/python}" -m deploy.launch --config deploy/slurm/launch.yaml &
launcher=$!
signalled='' limit=''
trap 'signalled=1 && kill -TERM "$launcher"' TERM
# 300 s before the time limit: the learner saves and stops, and the launcher follows. The steps get the signal
# from Slurm, because srun does not forward it: it kills them.
trap 'signalled=1 limit=1 && scancel --signal=TERM "$SLURM_JOB_ID"' USR1
status=0
wait "$launcher" || status=$?
if [ -n "$signalled" ]; then # the signal ended that wait
  status=0
  wait "$launcher" || status=$?
fi
if [ -n "$limit" ] && ((${SLURM_RESTART_COUNT:-0} < 3)); then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$status"
