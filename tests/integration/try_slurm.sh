#!/usr/bin/env bash
# A whole Slurm on this machine, for the time of this script: five virtual nodes, the generated job, the demo's model, CPU.
#   tests/integration/try_slurm.sh [FOLDER]     default: runs/slurm-try; about four minutes on two cores
# It shows that: servers are found; two ranks on two nodes learn; a server whose step is cancelled is survived and comes
# back; a node is drained and the requeued job goes on from its checkpoint on other nodes; the warning before the time
# limit saves, and requeues the job. It needs the Debian packages slurm-wlm and munge, and .venv (PYTHON: another one).
# Exit code 0: all of it was seen. Nothing is left running.
set -euo pipefail
root=$(realpath "$(dirname "$0")/../..")
PYTHON=$(realpath -s "${PYTHON:-$root/.venv/bin/python}")
NODES=5 DEADLINE_S=${DEADLINE_S:-420}
PATH=$PATH:/usr/sbin:/sbin
for program in slurmctld slurmd munged sbatch; do
  command -v "$program" > /dev/null || { echo "[try] $program is missing: apt-get install slurm-wlm munge" >&2; exit 2; }
done

mkdir -p "${1:-$root/runs/slurm-try}"
cd "${1:-$root/runs/slurm-try}"
rm -rf run logs job slurm slurm-*.out
mkdir -p slurm/state logs
chmod 755 slurm
export PYTHON PYTHONPATH=$root SLURM_CONF=$PWD/slurm/slurm.conf OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
ln -sfn "$root/deploy" deploy
ln -sfn "$root/tests" tests
job='' daemons=()

say() { echo "[try] $SECONDS s: $*"; }
fail() {
  say "FAILED: $*"
  tail -n 25 slurm-*.out logs/*.log slurm/*.log 2> /dev/null
  exit 1
}
# wait_for WHAT COMMAND...: until the command succeeds.
wait_for() {
  local what=$1 until=$((SECONDS + DEADLINE_S))
  shift
  until "$@" > /dev/null 2>&1; do
    ((SECONDS < until)) || fail "$what not seen within $DEADLINE_S s"
    sleep 0.5
  done
  say "$what"
}
stop() {
  [ -z "$job" ] || scancel "$job" 2> /dev/null || true
  for _ in {1..60}; do
    [ -n "$(squeue --noheader 2> /dev/null)" ] || break
    sleep 0.5
  done
  ((${#daemons[@]} == 0)) || kill "${daemons[@]}" 2> /dev/null || true
  wait || true
}
trap stop EXIT

# ---- Slurm ----
read -r -a ports < <("$PYTHON" -c "from shared.addresses import free_ports; print(*free_ports($((NODES + 1))))")
"$PYTHON" -c "import os; print(os.urandom(64).hex(), end='')" > slurm/munge.key
chmod 400 slurm/munge.key
{
  cat << CONF
ClusterName=try
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=${ports[0]}
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
AuthInfo=socket=$PWD/slurm/munge.socket
StateSaveLocation=$PWD/slurm/state
SlurmctldPidFile=$PWD/slurm/slurmctld.pid
SlurmdPidFile=$PWD/slurm/%n.pid
SlurmdSpoolDir=$PWD/slurm/%n
SlurmctldLogFile=$PWD/slurm/slurmctld.log
SlurmdLogFile=$PWD/slurm/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=30
CONF
  for ((i = 1; i <= NODES; i++)); do
    echo "NodeName=n$i NodeHostname=$(hostname -s) NodeAddr=127.0.1.$i Port=${ports[i]} CPUs=1 RealMemory=2048 State=UNKNOWN"
  done
  echo "PartitionName=try Nodes=ALL Default=YES MaxTime=INFINITE State=UP"
} > slurm/slurm.conf

force=()
[ "$(id -u)" != 0 ] || force=(--force)
munged --foreground "${force[@]}" --key-file="$PWD/slurm/munge.key" --socket="$PWD/slurm/munge.socket" \
  --pid-file="$PWD/slurm/munged.pid" --seed-file="$PWD/slurm/munged.seed" --log-file="$PWD/slurm/munged.log" \
  > slurm/munged.out 2>&1 &
daemons+=($!)
wait_for "munge answers" munge --no-input --socket="$PWD/slurm/munge.socket"
slurmctld -D > slurm/slurmctld.out 2>&1 &
daemons+=($!)
for ((i = 1; i <= NODES; i++)); do
  slurmd -D -N "n$i" > "slurm/n$i.out" 2>&1 &
  daemons+=($!)
done
idle() { [ "$(sinfo --noheader --Node --states=idle --format=%N | wc -l)" = "$NODES" ]; }
wait_for "$NODES nodes are idle" idle

# ---- the job ----
"$PYTHON" -m deploy.demo.build_data --out data --train 64 --val 0 --test 0 > /dev/null
"$PYTHON" -m deploy.launch --config tests/integration/slurm/launch.yaml --to slurm --out job
job=$(sbatch --parsable job/run.sh)
out=slurm-$job.out
steps() { grep -c '"event": "step"' run/metrics.jsonl 2> /dev/null || true; }
more_steps() { (($(steps) >= $1)); }
said() { grep -q -- "$1" "$out"; }
wait_for "servers found, two ranks learn" more_steps 2
grep -h "ready after\|learner:" "$out"
scontrol show job "$job" --oneliner | grep -o " NodeList=[^ ]*"

# ---- a server is cancelled ----
before=$(steps)
step=$(squeue --steps --noheader --jobs="$job" --format='%i %N' | awk '$2 == "n1" && $1 !~ /batch|extern/ {print $1; exit}')
scancel "$step"
say "scancel $step, the server on n1, after step $before"
wait_for "the launcher starts it again" said "server 0 .*Restart 1 of 3"
wait_for "three more steps meanwhile" more_steps $((before + 3))
wait_for "it is ready again" said "server 0 ready again"

# ---- a node is drained, the job requeued ----
wait_for "a checkpoint is there" compgen -G "run/checkpoint-*/manifest.json"
scontrol update NodeName=n3 State=DRAIN Reason=try
scontrol requeue "$job"
say "n3, where rank 0 was, is drained; job $job is requeued at step $(steps)"
pending() { [ "$(squeue --noheader --jobs="$job" --format=%T)" = PENDING ]; }
wait_for "it is pending" pending
scontrol update JobId="$job" StartTime=now # Slurm would wait two minutes
resumed() { grep -qh "resumed at step" run/*.log "$out"; }
wait_for "it runs again, and goes on from its checkpoint" resumed
grep -h "resumed at step" run/*.log "$out" | tail -n 1
scontrol show job "$job" --oneliner | grep -o " Restarts=[^ ]*\| NodeList=[^ ]*"
! scontrol show hostnames "$(squeue --noheader --jobs="$job" --format=%N)" | grep -qx n3 || fail "n3 was used again"
after=$(steps)
wait_for "two more steps" more_steps $((after + 2))

# ---- the warning before the time limit ----
scancel --batch --signal=USR1 "$job"
again() { scontrol show job "$job" --oneliner | grep -q " Restarts=2 "; }
wait_for "the warning before the time limit: the job requeues itself" again
[ -f "run/checkpoint-$(steps)/manifest.json" ] || fail "the last step, $(steps), was not saved"
say "all of it was seen; the last step, $(steps), was saved"
