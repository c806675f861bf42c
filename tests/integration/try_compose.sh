#!/usr/bin/env bash
# Compose on this machine, for the time of this script: images built, the run of deploy/demo/launch.yaml in containers, CPU.
#   tests/integration/try_compose.sh [--quick] [FOLDER]     default: runs/compose-try
# It shows that: everything runs as a user without rights on a root that is read-only; a server that is killed comes back
# with the same shared memory; the run's exit code is the learner's; nothing is left. The long form also builds the images,
# stops the learner, and resumes the run from its checkpoint. --quick takes a stub in place of both programs (tests/unit/deploy/compose_stub.py), in
# an image of this machine's Python: no network, less than a minute.
# It uses the engine that answers. If none does, it starts dockerd (as root), in a network of its own, which slirp4netns
# connects if it is installed. The long form's base is PYTHON_IMAGE; if that cannot be pulled, debootstrap makes one. WHEELS: a
# folder with torch for CPU, for machines that do not reach PyTorch's index.
# Exit code 0: all of it was seen. 77: no engine here, with the reason. Nothing is left running.
set -euo pipefail
root=$(realpath "$(dirname "$0")/../..")
PYTHON=$(realpath -s "${PYTHON:-$root/.venv/bin/python}")
DEADLINE_S=${DEADLINE_S:-900}
quick=''
if [ "${1:-}" = --quick ]; then quick=1 && shift; fi
work=$(realpath -m "${1:-$root/runs/compose-try}")
engine='' run='' results=$work/results.txt
mkdir -p "$work"
: > "$results"

say() { echo "[try] $SECONDS s: $*"; }
record() { say "$*" && echo "$*" >> "$results"; }
skip() { echo "[try] skipped: $*" && exit 77; }
fail() {
  say "FAILED: $*"
  tail -n 40 "$work"/*.log 2> /dev/null
  exit 1
}
# wait_for WHAT COMMAND...: until the command succeeds.
wait_for() {
  local what=$1 until=$((SECONDS + DEADLINE_S))
  shift
  until "$@" > /dev/null 2>&1; do
    ((SECONDS < until)) || fail "$what not seen within $DEADLINE_S s"
    [ -z "$run" ] || kill -0 "$run" 2> /dev/null || "$@" > /dev/null 2>&1 || fail "$what not seen: the run has ended"
    sleep 0.5
  done
  say "$what"
}
stop() {
  if [ -n "$run" ]; then kill "$run" 2> /dev/null && wait "$run" || true; fi
  if [ -d "${job:-}" ]; then (cd "$job" && docker compose down --volumes --timeout 5 > /dev/null 2>&1) || true; fi
  [ -n "$engine" ] || return 0
  kill "$(cat "$engine/ns.pid")" 2> /dev/null || true
  for _ in {1..100}; do
    [ -e "/proc/$(cat "$engine/ns.pid")" ] || break
    sleep 0.2
  done
  if [ -s "$engine/slirp.pid" ]; then kill "$(cat "$engine/slirp.pid")" 2> /dev/null || true; fi
  rm -rf "$engine" "$work/engine"
}
trap stop EXIT

# ---- the engine ----
command -v docker > /dev/null || skip "no Docker engine: docker is not installed"
docker compose version > /dev/null 2>&1 || skip "no Docker engine: Compose, docker's plugin, is not installed"
if ! docker info > /dev/null 2>&1; then
  { command -v dockerd && command -v containerd && command -v runc && command -v iptables; } > /dev/null \
    || skip "no Docker engine answers, and dockerd, containerd, runc or iptables is not installed"
  [ "$(id -u)" = 0 ] || skip "no Docker engine answers, and only root can start dockerd"
  unshare --net --mount true 2> /dev/null || skip "no Docker engine answers, and this machine has no namespaces of a network"
  engine=$(mktemp -d /tmp/try.XXXXXX) # its sockets lie there: their paths must be short
  mkdir -p "$work/engine"
  cat > "$engine/inside.sh" << I
set -e
ip link set lo up
echo \$\$ > $engine/ns.pid
[ -z "\$1" ] || while ! ip link show tap0 > /dev/null 2>&1; do sleep 0.1; done
exec dockerd --data-root $work/engine --exec-root $engine/exec --pidfile $engine/dockerd.pid -H unix://$engine/docker.sock \
  --group 0 --dns 10.0.2.3
I
  slirp=$(command -v slirp4netns || true)
  setsid unshare --net --mount bash "$engine/inside.sh" "$slirp" > "$work/dockerd.log" 2>&1 < /dev/null &
  for _ in {1..50}; do [ -s "$engine/ns.pid" ] || sleep 0.1; done
  if [ -n "$slirp" ]; then
    setsid slirp4netns --configure --mtu=65520 "$(cat "$engine/ns.pid")" tap0 > "$work/slirp.log" 2>&1 < /dev/null &
    echo $! > "$engine/slirp.pid"
  fi
  export DOCKER_HOST=unix://$engine/docker.sock
  for _ in {1..300}; do
    ! docker info > /dev/null 2>&1 || break
    [ -e "/proc/$(cat "$engine/ns.pid")" ] || break
    sleep 0.1
  done
  docker info > /dev/null 2>&1 || skip "dockerd does not start: $(tail -n 1 "$work/dockerd.log")"
fi
record "Docker $(docker version --format '{{.Server.Version}}'), Compose $(docker compose version --short)"

# ---- a clone of what is here ----
clone=$work/clone job=$work/clone/deploy/compose/cpu
rm -rf "$clone" && mkdir -p "$clone"/{data/compose-demo,runs}
cp -r "$root"/{Makefile,pyproject.toml,README.md,LICENSE,shared,rollout_server,learner,deploy} "$clone"
cd "$job"
export COMPOSE_PROJECT_NAME=try-$$
compose_log=$work/run.log
metrics=$clone/runs/compose-demo/metrics.jsonl
steps() { grep -c '"event": "step"' "$metrics" 2> /dev/null || true; }
more_steps() { (($(steps) >= $1)); }
said() { grep -q -- "$1" "$compose_log"; }
start() {
  "$@" > "$compose_log" 2>&1 &
  run=$!
}
# ended CODE: the run has ended, with this exit code, and nothing of it is there.
ended() {
  local code=0
  wait "$run" || code=$?
  run=''
  [ "$code" = "$1" ] || fail "exit code $code, wanted $1"
  [ -z "$(docker compose ps --all --quiet)" ] || fail "containers are left"
  [ -z "$(docker network ls --quiet --filter "name=try-$$")" ] || fail "a network is left"
  say "exit code $code, and no container is left"
}
kill_server() { docker compose exec -T server-0 python3 -c 'import os; os.kill(-1, 9)' 2> /dev/null || true; }
restarts() { docker inspect --format '{{.RestartCount}}' "$(docker compose ps --all --quiet server-0)"; }
restarted() { [ "$(restarts)" = 1 ]; }

if [ -n "$quick" ]; then
  # ---- a stub in an image of this machine's Python ----
  rm -rf "$work/image" && mkdir -p "$work/image/app/runs" "$work/image/app/data" "$work/image/app/deploy/demo/checkpoint" "$work"/image/{cache,tmp}
  chmod 1777 "$work"/image/{cache,tmp} # a tmpfs gets the mode of its place in the image when its container is started again
  "$PYTHON" - "$work/image" "$root/tests/unit/deploy/compose_stub.py" << 'P'
import pathlib, re, shutil, subprocess, sys, sysconfig
image, stub = map(pathlib.Path, sys.argv[1:])
python, library = pathlib.Path(sys.executable).resolve(), pathlib.Path(sysconfig.get_paths()["stdlib"])
left_out = shutil.ignore_patterns("site-packages", "dist-packages", "test", "__pycache__", "idlelib", "tkinter", "config-*", "ensurepip", "lib2to3")
shutil.copytree(library, image / library.relative_to("/"), ignore=left_out)
programs = [python, *library.glob("lib-dynload/*.so")]
said = subprocess.run(["ldd", *map(str, programs)], capture_output=True, text=True).stdout
for file in {str(python), *re.findall(r"(/\S+) \(0x", said)}:
    to = image / file.lstrip("/")
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(file, to)
(image / "usr/bin").mkdir(parents=True, exist_ok=True)
(image / "usr/bin/python3").symlink_to(python)
packages = image / library.relative_to("/") / "site-packages"
(packages / "deploy").mkdir(parents=True)
shutil.copy(stub, packages / "rollout_server.py")
shutil.copy(stub, packages / "deploy/torchrun.py")
P
  tar -C "$work/image" --owner=0 --group=0 --mode=a+rX -c . | docker import --change 'WORKDIR /app' \
    --change 'ENTRYPOINT ["/usr/bin/python3", "-m"]' - "try-$$" > /dev/null
  rm -rf "$work/image"
  record "the stub's image: $(docker image inspect --format '{{.Size}}' "try-$$") bytes"
  echo '{}' > "$clone/data/compose-demo/train.jsonl"
  printf 'services:\n' > compose.override.yaml
  for name in server-0 learner; do printf '  %s:\n    build: !reset null\n    image: try-%s\n    pull_policy: never\n' "$name" "$$"; done >> compose.override.yaml

  start bash run.sh
  wait_for "the stubs talk" more_steps 2
  said "stub server ready" || fail "the output of the server is not shown"
  kill_server
  say "the server is killed"
  wait_for "it is started again" restarted
  ended 0
  mkdir -p "$clone/runs/compose-demo"
  echo 3 > "$clone/runs/compose-demo/exit-code"
  start bash run.sh
  wait_for "a second run" more_steps $(($(steps) + 2))
  kill_server
  ended 3
  docker compose down --volumes > /dev/null 2>&1
  docker image rm "try-$$" > /dev/null
  record "all of it was seen, in $SECONDS s"
  exit 0
fi

# ---- the images, on Python's, or on what debootstrap makes of it ----
if [ -z "${PYTHON_IMAGE:-}" ]; then
  PYTHON_IMAGE=$(sed -n 's/.*PYTHON_IMAGE:-\(.*\)}.*/\1/p' compose.yaml | head -n 1)
  if ! timeout 300 docker pull --quiet "$PYTHON_IMAGE"; then
    command -v debootstrap > /dev/null || fail "$PYTHON_IMAGE cannot be pulled, and debootstrap is not installed"
    debootstrap --variant=minbase --include=ca-certificates,python3,python3-pip,python3-dev bookworm "$work/base" > "$work/debootstrap.log"
    cp /etc/ssl/certs/ca-certificates.crt "$work/base/etc/ssl/certs/" # of a proxy on the way, if there is one
    rm -f "$work"/base/usr/lib/python3*/EXTERNALLY-MANAGED
    PYTHON_IMAGE=try-base:bookworm
    tar -C "$work/base" -c . | docker import --change 'ENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt UV_NATIVE_TLS=true' - "$PYTHON_IMAGE"
    rm -rf "$work/base"
  fi
fi
export PYTHON_IMAGE
if [ -n "${WHEELS:-}" ]; then
  printf 'services:\n' > compose.override.yaml
  for name in server-0 learner; do
    printf '  %s: {build: {additional_contexts: {wheels: "%s"}, args: {TORCH: --find-links=/wheels}}}\n' "$name" "$WHEELS"
  done >> compose.override.yaml
fi
before=$SECONDS
docker compose build > "$work/build.log" 2>&1 || fail "the images are not built"
record "images built in $((SECONDS - before)) s, $(grep -c CACHED "$work/build.log" || true) steps of it from the cache"
echo "# changed" >> "$clone/learner/__init__.py"
before=$SECONDS
docker compose build > "$work/build.log" 2>&1 || fail "the images are not built again"
record "built again after a change of a source file in $((SECONDS - before)) s"
for image in "$PYTHON_IMAGE" "try-$$-server-0" "try-$$-learner"; do
  record "$image: $(docker image inspect --format '{{.Size}}' "$image") bytes"
done
docker history --no-trunc=false --format '{{.Size}}  {{.CreatedBy}}' "try-$$-learner" | grep -v '^0B' >> "$results" || true

# ---- the documented command; a server is killed in the middle ----
export ROLLOUT_JOB=try
started=$SECONDS
start make -C "$clone" compose-demo
wait_for "the server is ready" said "server-0-1  | .*ready\|learner-1 "
record "the server was ready, and the learner started, after $((SECONDS - started)) s"
wait_for "two steps" more_steps 2
record "two steps after $((SECONDS - started)) s"
kill_server
say "the server is killed after step $(steps)"
wait_for "it is started again" restarted
wait_for "four steps" more_steps 4
wait_for "a checkpoint" compgen -G "$clone/runs/compose-demo/checkpoint-*/manifest.json"

# ---- the learner is stopped, and the run resumed ----
docker compose stop learner 2> /dev/null
code=0
wait "$run" || code=$?
run=''
[ "$code" != 0 ] || fail "the stopped run ended with 0"
record "stopped at step $(steps): exit code $code"
started=$SECONDS
start bash run.sh
wait_for "it goes on" said "resumed at step"
grep -h "resumed at step" "$compose_log" | tail -n 1
ended 0
record "resumed and ended, at step $(steps), in $((SECONDS - started)) s"
grep -h "f1\|F1" "$compose_log" | tail -n 3 || true
docker compose down --volumes > /dev/null 2>&1
docker image rm "try-$$-server-0" "try-$$-learner" > /dev/null
record "all of it was seen, in $SECONDS s"
