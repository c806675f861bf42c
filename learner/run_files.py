"""The run directory's own files: where logs go, and which run is the newest.

In: the run directory and this process's rank. Out: `learner_rank{r}.log`, with everything that libraries would have put
on the console, and `latest` beside the run directory. Called by `build` before anything is loaded.
"""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path

import huggingface_hub.utils
import transformers

LATEST = "latest"
_LOGGERS = ("learner", "shared", "transformers", "huggingface_hub", "peft", "torch", "vllm", "py.warnings")

log = logging.getLogger(__name__)


def log_to_file(run_dir: Path, rank: int) -> Path:
    """From now on, logs and warnings of this process go to a file; the console is for the run itself."""
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / f"learner_rank{rank}.log"
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        for other in list(logger.handlers):  # libraries bring handlers of their own, which write to the console
            logger.removeHandler(other)
        logger.addHandler(handler)
        logger.propagate = False
    logging.getLogger("learner").setLevel(logging.INFO)
    logging.captureWarnings(True)
    warnings.simplefilter("default")  # each place once
    transformers.utils.logging.disable_progress_bar()
    huggingface_hub.utils.disable_progress_bars()
    return path


def point_latest(run_dir: Path) -> None:
    """Make `latest`, beside `run_dir`, a link to it: the old one or the new one stands there at any time.

    Something else of that name (a folder, a run called so) is left alone.
    """
    link = run_dir.absolute().parent / LATEST
    if run_dir.name == LATEST or (link.exists() and not link.is_symlink()):
        log.warning("%s is not a link: it will not point to the newest run", link)
        return
    work = link.with_name(f".{LATEST}.{os.getpid()}")
    work.unlink(missing_ok=True)
    work.symlink_to(run_dir.absolute().name)
    work.replace(link)
