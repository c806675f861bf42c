"""torchrun for one machine, with readable messages at the end: `python -m deploy.torchrun --nproc N -- -m learner ...`.

In: a number of ranks, and after `--` the module (`-m`) or script that each rank runs. Out: the ranks' output, and an
exit code: 0, or the exit code of the rank that failed first (128 + signal if a signal ended it). One readable line
replaces torchrun's traceback. SIGTERM and SIGINT reach the ranks. Ranks that still run after SHUTDOWN_TIMEOUT_S are
killed. With `--max-restarts N` all ranks are restarted after one has failed, at most N times; a learner then resumes
from its newest checkpoint.

The module runs `torch.distributed.run --standalone` in this process. For several nodes call `torchrun` itself, whose
flags (--nnodes, --rdzv-endpoint, ...) all work with `-m learner`.
"""

from __future__ import annotations

from typing import Annotated

import typer

from learner.run.torchrun import run_ranks
from shared.version import Version

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)


@app.command()
def main(
    command: Annotated[list[str], typer.Argument(help="After `--`: -m MODULE or SCRIPT, and its arguments.")],
    nproc: Annotated[int, typer.Option(help="Number of ranks.")] = 1,
    max_restarts: Annotated[int, typer.Option(min=0, help="How often all ranks are started again.")] = 0,
    version: Version = False,
) -> None:
    """Run the ranks of one machine to their end."""
    if nproc < 1:
        raise typer.BadParameter(f"found {nproc}, wanted 1 or more", param_hint="--nproc")
    raise typer.Exit(run_ranks(nproc, command, max_restarts=max_restarts))


if __name__ == "__main__":
    app(prog_name="deploy.torchrun")
