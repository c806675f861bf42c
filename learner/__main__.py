"""The learner's command line.

    torchrun -m learner --config run.yaml                        train
    python -m learner --config run.yaml                          train, one rank
    python -m learner --config run.yaml --check [--probe]        validate; print the resolved plan as JSON
    python -m learner doctor --config run.yaml [--launch F]      check what usually goes wrong before a run
    python -m learner export --checkpoint DIR --out DIR          write a checkpoint's merged weights, ready to serve

Exit codes: 0 done, 1 failed while running, 2 the user's input is wrong, 130 interrupted. A user error is one message
without a traceback; a bug keeps its traceback. `--check` imports neither torch nor transformers.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

from learner.run.environment import GLOO_VARIABLE, gloo_interface, prepare_for_vllm
from shared.errors import CollectiveError, ProjectError

# A rank that lost another one waits this long, so that torchrun sees the rank that failed first, and ends this one.
CAUSE_GRACE_S = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        if arguments[:1] == ["export"]:
            return _export(arguments[1:])
        if arguments[:1] == ["doctor"]:
            from learner.doctor.command import doctor

            return doctor(arguments[1:], os.environ)
        return _train_or_check(arguments)
    except ProjectError as error:
        rank = os.environ.get("RANK")
        print(f"error{f' (rank {rank})' if rank else ''}: {type(error).__name__}: {error}", file=sys.stderr)
        if isinstance(error, CollectiveError):
            time.sleep(CAUSE_GRACE_S)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _train_or_check(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="learner", description="Train on the policy's own rollouts.")
    parser.add_argument("--config", required=True, help="run.yaml")
    parser.add_argument("--check", action="store_true", help="validate, print the resolved plan as JSON, and stop")
    parser.add_argument("--probe", action="store_true", help="with --check: ask the rollout servers too")
    parser.add_argument("--world-size", type=int, help="with --check: number of learner ranks")
    args = parser.parse_args(arguments)
    if args.check:
        from learner.config.check import run_check

        return run_check(args.config, world_size=args.world_size, probe=args.probe, read_data=True)
    if args.probe or args.world_size is not None:
        parser.error("--probe and --world-size go with --check")
    from learner.config.load import load_config
    from learner.config.rules import colocates

    # A wrong configuration is reported before torch is loaded.
    config = load_config(args.config, world_size=int(os.environ.get("WORLD_SIZE", 1)))
    if colocates(config):
        prepare_for_vllm(os.environ)
    if interface := gloo_interface(os.environ):
        os.environ[GLOO_VARIABLE] = interface
    from learner.build import train

    return train(args.config, environment=os.environ)


def _export(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="learner export", description="Write a checkpoint's merged weights.")
    parser.add_argument("--checkpoint", required=True, help="a checkpoint-STEP folder")
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    args = parser.parse_args(arguments)
    from learner.build import export

    return export(args.checkpoint, args.out, args.dtype)


if __name__ == "__main__":
    sys.exit(main())
