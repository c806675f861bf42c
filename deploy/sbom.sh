#!/usr/bin/env bash
# Write what an environment consists of, as CycloneDX JSON: `deploy/sbom.sh PYTHON FILE`. Every package of PYTHON's
# environment with version, license and package URL. The tool (cyclonedx-py) has an environment of its own, so it is not in
# the list; the first call installs it.
#   SBOM_TOOL=.venv/sbom   the tool's environment
set -euo pipefail
if [ $# != 2 ]; then
  echo "usage: deploy/sbom.sh PYTHON FILE; for example deploy/sbom.sh .venv/bin/python sbom.json" >&2
  exit 2
fi
root=$(realpath "$(dirname "$0")/..")
tool=${SBOM_TOOL:-$root/.venv/sbom}
wanted=cyclonedx-bom==7.5.0
if [ "$(cat "$tool/.ready" 2> /dev/null || true)" != "$wanted" ]; then
  "$1" -m venv "$tool"
  "$tool/bin/python" -m pip --disable-pip-version-check -qq install "$wanted"
  echo "$wanted" > "$tool/.ready"
fi
"$tool/bin/cyclonedx-py" environment --pyproject "$root/pyproject.toml" --output-reproducible --short-PURLs -o "$2" "$1"
echo "wrote $2"
