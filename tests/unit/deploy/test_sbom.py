"""`make sbom`: the software list has every installed package in its version."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path
from sysconfig import get_path

import pytest

from tests.unit.deploy.manifests import DEPLOY

SCRIPT = DEPLOY / "sbom.sh"


def name_of(text: str) -> str:
    return re.sub(r"[-_.]+", "-", text).lower()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_package_is_listed_with_its_version(tmp_path: Path) -> None:
    out = tmp_path / "sbom.json"
    environment = {**os.environ, "SBOM_TOOL": str(tmp_path / "tool")}
    command = [str(SCRIPT), sys.executable, str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode and "No matching distribution" in done.stderr:
        pytest.skip("cyclonedx-bom cannot be installed: no package index")
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["bomFormat"] == "CycloneDX"
    components = [found["metadata"]["component"], *found["components"]]
    listed = {name_of(one["name"]): one["version"] for one in components}
    # This is not all of sys.path: setuptools puts the packages that it carries there, in a process that has imported
    # it.
    installed = {name_of(one.metadata["Name"]): one.version for one in distributions(path=[get_path("purelib")])}
    assert {name: listed.get(name) for name in installed} == installed
    assert {"rollout-matching", "torch", "transformers"} <= listed.keys()
    assert all(one["purl"].startswith("pkg:pypi/") for one in found["components"] if name_of(one["name"]) == "torch")


def test_it_says_how_it_is_called() -> None:
    done = subprocess.run([str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: deploy/sbom.sh PYTHON FILE")
