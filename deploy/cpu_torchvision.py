"""Make PyPI's torchvision importable with a CPU build of torch: `python deploy/cpu_torchvision.py install`.

PyPI has only torchvision's CUDA build. With CPU torch, torchvision's compiled operators do not load, and its import
fails with "operator torchvision::nms does not exist". vLLM's vision models import torchvision without using those
operators. The import works once the operators' schemas are declared. Every process must declare the schemas, also the
processes that vLLM starts. So this file is copied into site-packages, and a `.pth` line there installs an import hook,
which declares them just before torchvision is first imported. If a CPU build of torchvision is installed, nothing is
copied.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_libraries: list[object] = []  # keeps the declaring `Library`: torch undoes the declarations once it is freed


def declare_operators() -> None:
    """Declare the schemas of torchvision's operators if torch is a CPU build."""
    import torch

    if torch.version.cuda is not None or _libraries:
        return
    library = torch.library.Library("torchvision", "DEF")
    for schema in SCHEMAS.values():
        library.define(schema)
    _libraries.append(library)


class TorchvisionHook(importlib.abc.MetaPathFinder):
    """Declares the operators when `torchvision` is first imported, then removes itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            declare_operators()
        return None


def activate() -> None:
    """Runs at interpreter start, from the `.pth` line. Does not import torch."""
    sys.meta_path.insert(0, TorchvisionHook())


def install() -> None:
    """Copy this file into site-packages with the `.pth` line that activates it, if this environment needs it."""
    import shutil
    import subprocess
    import sysconfig
    from pathlib import Path

    check = [sys.executable, "-c", "import torchvision"]
    if subprocess.run(check, capture_output=True, timeout=300).returncode == 0:
        print("torchvision imports as it is")
        return
    site = Path(sysconfig.get_paths()["purelib"])
    shutil.copyfile(__file__, site / "cpu_torchvision.py")
    (site / "cpu_torchvision.pth").write_text("import cpu_torchvision; cpu_torchvision.activate()\n")
    subprocess.run(check, check=True, timeout=300)
    print("torchvision imports, with its operators' schemas declared (CPU build of torch)")


if __name__ == "__main__":
    if sys.argv[1:] != ["install"]:
        sys.exit("usage: python deploy/cpu_torchvision.py install")
    install()
