"""From the end of an optimizer step to the first token that the new weights make, for every rollout backend.

In: a model folder and scenes. Out: a figure per backend. Real runs of `rollout_matching_sft` whose steps roll out one
sample and one token: what a step spends before it has that token is reading the sample, the sync with all its checks
(none where the trained model itself generates), and the rollout. The first steps warm up and do not count. Called by
`run.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from bench.figures import Figure, median
from bench.runs import serve, start_learner
from bench.training import learner_config
from deploy.launch import supervised
from shared.addresses import free_ports

Backend = Literal["hf", "colocate", "server"]
WARM_UP_STEPS = 3
_BEFORE_THE_TOKEN = ("data_s", "sync_s", "rollout_s")


def measure(model: Path, data: Path, folder: Path, *, num_steps: int = 15) -> list[Figure]:
    """One run per backend, one after the other; their files go into `folder`."""
    ports = free_ports(2)
    found: list[Figure] = []
    for backend in get_args(Backend):
        with supervised() as processes:
            if backend == "server":
                config = {"model": str(model), "port": ports[0], "allowed_image_roots": [str(data)]}
                serve(processes, config, folder, "first_token_server")
            name = f"first_token_{backend}"
            steps = WARM_UP_STEPS + num_steps
            learner = start_learner(processes, _config(backend, model, data, folder, name, ports, steps), folder, name)
            found.append(figure(backend, learner.events()))
    return found


def figure(backend: Backend, events: Sequence[Mapping[str, Any]]) -> Figure:
    """Of a run's events, after the warm-up."""
    steps = [event["metrics"] for event in events if event["event"] == "step"][WARM_UP_STEPS:]
    seconds = [sum(step.get(phase, 0.0) for phase in _BEFORE_THE_TOKEN) for step in steps]
    name = f"from step end to first rollout token, {backend}"
    return Figure(name=name, value=median(seconds), unit="s", samples=seconds)


def _config(
    backend: Backend, model: Path, data: Path, folder: Path, name: str, ports: Sequence[int], steps: int
) -> dict[str, Any]:
    config = learner_config(model, data, folder, ports[0], ports[1], steps=steps, batch_size=1)
    matching = config["custom"]["extra"]["rollout_matching"]
    matching |= {"decode_batch_size": 1, "decoding": {"temperature": 0.0, "max_new_tokens": 1}}
    if backend == "hf":
        del matching["vllm"]
        matching["rollout_backend"] = "hf"
    elif backend == "colocate":
        matching["vllm"] = {"mode": "colocate", "max_model_len": 1024}
    config["training"] |= {"output_dir": str(folder / name), "save_on_end": False}
    return config
