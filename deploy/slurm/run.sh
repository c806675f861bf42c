#!/usr/bin/env bash
# Servers on some nodes of a Slurm job, the learner on the others: sbatch --nodes=4 deploy/slurm/run.sh
#SBATCH --job-name=rollout-matching
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
#
# From the repository's root, which all nodes see at the same path, with .venv ready (make setup). Variables, with defaults:
#   SERVER_NODES=2        the job's first nodes serve, the others learn
#   GPUS_PER_NODE=8       replicas of the model on a server node, ranks on a learner node
#   SERVER_CONFIG=deploy/qwen3vl_4b/server.yaml   LEARNER_CONFIG=deploy/qwen3vl_4b/learner.yaml
#   READY_TIMEOUT_S=1800  how long the servers may take
# Addresses and replicas are laid over the configurations, in runs/slurm-JOB/, where the logs are too. The learner's exit
# code is the job's; a server that ends first ends the job. Slurm's SIGTERM before the time limit (--signal) reaches the
# learner, which writes a checkpoint and stops.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?start this with sbatch}"

SERVER_NODES=${SERVER_NODES:-2}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
SERVER_CONFIG=$(realpath "${SERVER_CONFIG:-deploy/qwen3vl_4b/server.yaml}")
LEARNER_CONFIG=$(realpath "${LEARNER_CONFIG:-deploy/qwen3vl_4b/learner.yaml}")
READY_TIMEOUT_S=${READY_TIMEOUT_S:-1800}
POLL_S=${POLL_S:-1}
PYTHON=${PYTHON:-$PWD/.venv/bin/python}
HTTP_PORT=8000 GROUP_PORT=51216 RENDEZVOUS_PORT=29400

say() { echo "[slurm] $*" >&2; }

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
if ((SERVER_NODES < 1 || ${#nodes[@]} <= SERVER_NODES)); then
  say "found ${#nodes[@]} node(s) and SERVER_NODES=$SERVER_NODES; wanted at least one server node and one learner node"
  exit 2
fi
servers=("${nodes[@]:0:SERVER_NODES}")
learners=("${nodes[@]:SERVER_NODES}")

# The servers listen on every interface, so they want a token; all steps of the job inherit it.
ROLLOUT_SERVER_TOKEN=${ROLLOUT_SERVER_TOKEN:-$(openssl rand -hex 32)}
export ROLLOUT_SERVER_TOKEN

folder=$PWD/runs/slurm-$SLURM_JOB_ID
mkdir -p "$folder"
for node in "${servers[@]}"; do
  cat > "$folder/server-$node.yaml" <<YAML
base: "$SERVER_CONFIG"
host: 0.0.0.0
port: $HTTP_PORT
communicator_host: $node
data_parallel_size: $GPUS_PER_NODE
YAML
done
{
  echo "base: \"$LEARNER_CONFIG\""
  echo "custom: {extra: {rollout_matching: {vllm: {mode: server, server: {base_url: null, group_port: null, servers: ["
  for node in "${servers[@]}"; do
    echo "  {base_url: \"http://$node:$HTTP_PORT\", group_port: $GROUP_PORT},"
  done
  echo "]}}}}}"
} > "$folder/learner.yaml"

# Every mistake is told here, before anything is loaded.
for node in "${servers[@]}"; do
  "$PYTHON" -m rollout_server --config "$folder/server-$node.yaml" --check > /dev/null
done
"$PYTHON" -m learner --config "$folder/learner.yaml" --check --world-size $((${#learners[@]} * GPUS_PER_NODE)) > /dev/null

started=()
learner=
stop_all() {
  trap '' TERM
  ((${#started[@]} == 0)) || kill -TERM "${started[@]}" 2> /dev/null || true
  # Slurm ends what is left then, for the job ends with this script.
  for _ in {1..60}; do
    if [ -z "$(jobs -rp)" ]; then return; fi
    sleep "$POLL_S"
  done
}
trap stop_all EXIT
on_term() {
  if [ -z "$learner" ]; then exit 143; fi
  say "SIGTERM: the learner writes a checkpoint and stops"
  kill -TERM "$learner" 2> /dev/null || true
}
trap on_term TERM

# Returns when process $1 has ended, with its exit code; exits where one of the servers ends first. Polls, for `wait -n`
# misses a process that ended before it was called.
wait_beside_servers() {
  local step status
  while kill -0 "$1" 2> /dev/null; do
    for step in "${server_steps[@]}"; do
      if ! kill -0 "$step" 2> /dev/null; then
        status=0
        wait "$step" || status=$?
        say "a rollout server ended by itself (exit code $status); see $folder/server-*.log"
        exit 1
      fi
    done
    sleep "$POLL_S"
  done
  wait "$1"
}

server_steps=()
for node in "${servers[@]}"; do
  srun --nodes=1 --ntasks=1 --nodelist="$node" --output="$folder/server-$node.log" \
    "$PYTHON" -m rollout_server --config "$folder/server-$node.yaml" &
  server_steps+=($!)
  started+=($!)
done

say "waiting for ${servers[*]}; logs in $folder"
srun --nodes=1 --ntasks=1 --nodelist="${learners[0]}" \
  "$PYTHON" -m deploy.wait_ready --config "$folder/learner.yaml" --timeout-s "$READY_TIMEOUT_S" &
started+=($!)
wait_beside_servers $!

say "learning on ${learners[*]}"
srun --nodes="${#learners[@]}" --ntasks="${#learners[@]}" --ntasks-per-node=1 --kill-on-bad-exit=1 \
  --nodelist="$(IFS=, && echo "${learners[*]}")" \
  "$PYTHON" -m torch.distributed.run --nnodes="${#learners[@]}" --nproc-per-node="$GPUS_PER_NODE" \
  --rdzv-backend=c10d --rdzv-endpoint="${learners[0]}:$RENDEZVOUS_PORT" --rdzv-id="$SLURM_JOB_ID" \
  -m learner --config "$folder/learner.yaml" &
learner=$!
started+=("$learner")
wait_beside_servers "$learner"
