"""Rollout matching, the whole loop on one screen: `python examples/loop.py` in a clone, after `make setup`.

    serve -> [ sync -> roll out -> parse -> match -> target -> pack -> learn ] x STEPS -> sync -> evaluate

Two CPU cores are enough: a rollout server (vLLM) in a process of its own, and a learner here, with the demo's model of
5M parameters on scenes of handwritten digits. The learner knows labels, the server only photographs and weights.
docs/concepts/loop-line-by-line.md explains each line. `rollout-learner train` is this loop with ranks, checkpoints,
resume, failover, overlap and a report.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from deploy.demo.build_data import Build, build
from deploy.launch import start_server, supervised, wait_ready
from learner.config.load import config_of
from learner.config.schema import RunConfig
from learner.data.splits import load_samples
from learner.extensions import Task, make_task
from learner.policy.load import Policy, load_policy
from learner.policy.optim import Optimizer
from learner.policy.parallel import Ranks
from learner.records import Rollout, Sample, Segment
from learner.rollout.backend import RolloutBackend
from learner.steps.evaluation import evaluate
from learner.steps.packing import pack_all
from learner.tasks.supervision import build_segment
from learner.wiring.connect import connect_backend, connect_sync
from shared.addresses import free_ports
from shared.config.parse import write_yaml

MODEL = "deploy/demo/checkpoint"
STEPS, SCENES_PER_STEP, ROW_TOKENS = 6, 16, 4096


def main(out: Path = Path("runs/loop"), steps: int = STEPS) -> dict[str, float]:
    """Train for `steps` steps; print a line for each. Returns the metrics of the last evaluation by name."""
    build(Build(train=SCENES_PER_STEP * steps, val=0, test=32), out / "data")
    with serving(out) as (url, group_port), ExitStack() as stack:
        config = configuration(out, url, group_port, steps)
        policy = load_policy(config.model, device=torch.device("cpu"))
        task = make_task(config.task, policy.tokenizer)
        train, test = (load_samples(config.data, str(out / f"data/{name}.jsonl"), task) for name in ("train", "test"))

        backend = connect_backend(config, policy)  # fails here, by name, if the server is not ready
        stack.callback(backend.close)
        # fails too if it serves another model or other prompts
        sync = connect_sync(config, policy, backend, task, train)
        stack.callback(sync.close)
        optimizer = Optimizer(policy.trainable, config.training, total_steps=steps)

        scores = {}
        for step in range(steps):
            receipt = sync.sync()  # the server answers nobody until it has shown that it has these weights
            if step == 0:
                scores["before"] = score(backend, test, task, step)
            batch = train[step * SCENES_PER_STEP : (step + 1) * SCENES_PER_STEP]
            rollouts = backend.generate(batch, global_step=step, micro_step_idx=0, first_req_idx=0)
            segments = [taught(rollout, policy, task, config) for rollout in rollouts]
            loss, tokens = learn(segments, policy, optimizer, step)
            missed = sum(segment.stats["missed"] for segment in segments)
            print(f"step {step + 1}/{steps}  loss {loss:.3f}  missed {missed:.0f}  {tokens} tokens  ver {receipt.ver}")
        sync.sync()
        scores["after"] = score(backend, test, task, steps)
        print(f"F1@0.5 on {len(test)} other scenes: {scores['before']:.3f} before, {scores['after']:.3f} after")
        return scores


def taught(rollout: Rollout, policy: Policy, task: Task, config: RunConfig) -> Segment:
    """Return what is learned of one answer: its own prefix, corrected, every object it missed, and the end."""
    assignment = task.match(task.parse(rollout))
    target = task.target(assignment, config.loss)
    prompt = policy.encoder.encode(rollout.sample)
    sample_id = rollout.sample.sample_id
    return build_segment(prompt, target, sample_id=sample_id, ver=rollout.ver, stats=task.stats(assignment))


def learn(segments: list[Segment], policy: Policy, optimizer: Optimizer, step: int) -> tuple[float, int]:
    """Make one update: the weighted mean loss over all supervised tokens of the step, and how many tokens were
    learned."""
    rows = pack_all(segments, ROW_TOKENS)
    losses = [policy.backward(row) for row in rows]
    weight = sum(loss.weight_sum for loss in losses)
    policy.reduce_gradients(Ranks(), weight_sum=weight)  # divides once, so packing does not change the gradient
    optimizer.update(step)
    return sum(loss.loss_sum for loss in losses) / weight, sum(row.num_tokens for row in rows)


def score(backend: RolloutBackend, samples: list[Sample], task: Task, step: int) -> float:
    """F1 at IoU 0.5 of greedy answers by the weights that were synced last."""
    return evaluate(backend, samples, task, Ranks(), global_step=step).metrics["f1@0.5"]


@contextmanager
def serving(out: Path) -> Iterator[tuple[str, int]]:
    """Yield a rollout server in a process of its own: its URL, and the port of its weight sync. Stopped at the end."""
    port, group_port = free_ports(2)
    with supervised() as processes:
        settings = {"model": MODEL, "port": port, "max_model_len": 1024, "enforce_eager": True, "cpu_threads": 1}
        write_yaml(out / "server.yaml", {**settings, "allowed_image_roots": [str(out / "data")]})
        server, url = start_server(processes, str(out / "server.yaml"), log=out / "server.log")
        print(f"server ready after {wait_ready(server, url, timeout_s=240.0):.0f} s")
        yield url, group_port


def configuration(out: Path, url: str, group_port: int, steps: int) -> RunConfig:
    """Return the keys of a run's YAML, in Python: checked in the same way. Raises ConfigErrors."""
    server = {"servers": [{"base_url": url, "group_port": group_port}]}
    rollouts = {
        "decode_batch_size": 16,
        "decoding": {"max_new_tokens": 256},
        "vllm": {"mode": "server", "server": server},
    }
    return config_of(
        {
            "model": {"path": MODEL},
            "data": {"train": str(out / "data/train.jsonl")},
            "loss": {"prefix_end": "first_miss", "matched_desc_weight": 1.0},
            "training": {
                "output_dir": str(out),
                "max_steps": steps,
                "effective_batch_size": SCENES_PER_STEP,
                "learning_rate": 5.0e-5,
            },
            "custom": {"trainer_variant": "rollout_matching_sft", "extra": {"rollout_matching": rollouts}},
            "global_max_length": ROW_TOKENS,
        }
    )


if __name__ == "__main__":
    main()
