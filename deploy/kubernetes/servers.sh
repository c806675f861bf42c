#!/usr/bin/env bash
# The pods of StatefulSets behind their headless services, one URL a line, for vllm.server.discovery of the learner:
#   discovery: [deploy/kubernetes/servers.sh, rollout-server]
# `kubectl scale statefulset rollout-server --replicas=3` adds a server, and removes the last one. It names pods as
# the learner's configuration does, so that no server has two URLs. `rollout-launch --to kubernetes` puts it there.
set -euo pipefail
port=${PORT:-8000}

for name in "${@:-rollout-server}"; do
  # Ordinals have no gaps, but a pod that is being replaced has no address for a while.
  missing=0
  for ((i = 0; missing < 3; i++)); do
    if getent hosts "$name-$i.$name" > /dev/null; then
      echo "http://$name-$i.$name:$port"
    else
      missing=$((missing + 1))
    fi
  done
done
