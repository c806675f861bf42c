"""The engine that answers for `predict`, `evaluate` and `find-missing`: the run's own settings of it."""

from __future__ import annotations

from dataclasses import replace

from bench.models import CHECKPOINT
from learner.config.load import config_of
from learner.detector.answers import Answers, AnswerSettings
from learner.detector.model import find_model
from tests.unit.learner.config.examples import ROLLOUT, changed, minimal


def test_the_engine_starts_as_the_run_s_engine_does() -> None:
    own = {"compile": False, "enforce_eager": True, "cpu_kv_cache_gib": 3, "max_model_len": 700}
    run = config_of(changed(minimal(), {f"{ROLLOUT}.vllm.{name}": value for name, value in own.items()}))
    vllm = Answers(replace(find_model(CHECKPOINT), run=run), AnswerSettings())._config().vllm
    assert vllm.model_dump(include=set(own)) == own
