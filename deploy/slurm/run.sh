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
#   LEARNER_RESTARTS=0    how often all ranks are started again after one has failed, from the newest checkpoint
#   MAX_RESTARTS=3        how often a server that ended while the learner runs is started again; then it stays away
# Addresses and replicas are laid over the configurations, in runs/slurm-JOB/, where the logs are too. The learner's exit
# code is the job's. A server that ends before the learner starts ends the job. Slurm's SIGTERM before the time limit (--signal) reaches the
# learner, which writes a checkpoint and stops.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?start this with sbatch}"

SERVER_NODES=${SERVER_NODES:-2}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
SERVER_CONFIG=$(realpath "${SERVER_CONFIG:-deploy/qwen3vl_4b/server.yaml}")
LEARNER_CONFIG=$(realpath "${LEARNER_CONFIG:-deploy/qwen3vl_4b/learner.yaml}")
READY_TIMEOUT_S=${READY_TIMEOUT_S:-1800}
LEARNER_RESTARTS=${LEARNER_RESTARTS:-0} MAX_RESTARTS=${MAX_RESTARTS:-3}
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

# Start server $1. ROLLOUT_SERVER_ID is a name of its own for each start: wait_ready believes no other server.
start_server() {
  local node=${servers[$1]}
  ROLLOUT_SERVER_ID="slurm-$SLURM_JOB_ID-$node-${restarts[$1]}" \
    srun --nodes=1 --ntasks=1 --nodelist="$node" --open-mode=append --output="$folder/server-$node.log" \
    "$PYTHON" -m rollout_server --config "$folder/server-$node.yaml" &
  server_steps[$1]=$!
  started+=($!)
}

# Server $1 ended with exit code $2: fatal before the learner runs; then it is started again, later each time.
server_ended() {
  local node=${servers[$1]}
  if [ -z "$learner" ]; then
    say "the rollout server on $node ended by itself (exit code $2); see $folder/server-$node.log"
    exit 1
  fi
  server_steps[$1]=
  if ((restarts[$1] >= MAX_RESTARTS)); then
    say "the rollout server on $node ended (exit code $2); given up after ${restarts[$1]} restarts (MAX_RESTARTS)"
    return
  fi
  start_at[$1]=$((SECONDS + (1 << restarts[$1])))
  restarts[$1]=$((restarts[$1] + 1))
  say "the rollout server on $node ended (exit code $2); restart ${restarts[$1]} of $MAX_RESTARTS"
}

# Returns when process $1 has ended, with its exit code, and looks after the servers meanwhile. Polls, for `wait -n`
# misses a process that ended before it was called.
wait_beside_servers() {
  local i status
  while kill -0 "$1" 2> /dev/null; do
    for i in "${!servers[@]}"; do
      if [ -n "${start_at[$i]}" ]; then
        if ((SECONDS >= start_at[i])); then start_at[i]= && start_server "$i"; fi
      elif [ -n "${server_steps[$i]}" ] && ! kill -0 "${server_steps[$i]}" 2> /dev/null; then
        status=0
        wait "${server_steps[$i]}" || status=$?
        server_ended "$i" "$status"
      fi
    done
    sleep "$POLL_S"
  done
  wait "$1"
}

# By server: its step (empty: none), restarts so far, and the second at which it is started again (empty: it is not).
server_steps=() restarts=() start_at=()
for i in "${!servers[@]}"; do
  restarts[i]=0 start_at[i]=
  start_server "$i"
done

say "waiting for ${servers[*]}; logs in $folder"
srun --nodes=1 --ntasks=1 --nodelist="${learners[0]}" \
  "$PYTHON" -m deploy.wait_ready --config "$folder/learner.yaml" --timeout-s "$READY_TIMEOUT_S" \
  --server-ids "slurm-$SLURM_JOB_ID-" &
started+=($!)
wait_beside_servers $!

say "learning on ${learners[*]}"
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # a new store for every start: in an old one ranks find addresses of ranks that are gone
srun --nodes="${#learners[@]}" --ntasks="${#learners[@]}" --ntasks-per-node=1 --kill-on-bad-exit=1 \
  --nodelist="$(IFS=, && echo "${learners[*]}")" \
  "$PYTHON" -m torch.distributed.run --nnodes="${#learners[@]}" --nproc-per-node="$GPUS_PER_NODE" \
  --rdzv-backend=c10d --rdzv-endpoint="${learners[0]}:$RENDEZVOUS_PORT" --rdzv-id="$SLURM_JOB_ID" --max-restarts="$LEARNER_RESTARTS" \
  -m learner --config "$folder/learner.yaml" &
learner=$!
started+=("$learner")
wait_beside_servers "$learner"
