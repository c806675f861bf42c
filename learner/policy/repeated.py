"""The same answers' log-probabilities, again after every update of the weights: the learner's half of the canary.

In: a policy and answers that stay the same. Out: a call that gives what `Policy.logprobs` gives. On CUDA, for answers
without images, the forward pass is captured once as a CUDA graph: replayed, a model of 4B takes 10 ms, where launching
every kernel from Python takes several times as long. A vision tower looks at its inputs on the host, which no graph can
hold, and a sharded model's layers are at other places in every pass. Made by `learner/rollout/connect.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from learner.policy.load import Policy
from learner.records import EncodedPrompt

Answers = Sequence[tuple[EncodedPrompt, Sequence[int]]]


class RepeatedLogprobs:
    def __init__(self, policy: Policy, answers: Answers) -> None:
        self._policy, self._answers = policy, answers
        can = policy.device.type == "cuda" and all(prompt.vision is None for prompt, _ in answers)
        self._captures = can and len(answers) > 0 and not policy.is_sharded
        self._addresses: tuple[int, ...] = ()
        if self._captures:
            self._capture()

    def __call__(self) -> list[list[float]]:
        """Natural log-probabilities per answer, under the weights as they are now."""
        if not self._captures:
            return self._policy.logprobs(self._answers)
        if self._addresses != self._addresses_now():  # offloaded weights come back elsewhere
            self._capture()
        self._graph.replay()
        return self._policy.split(self._logprobs, self._answers)

    @torch.no_grad()
    def _capture(self) -> None:
        policy = self._policy
        inputs = policy.answer_inputs(self._answers)
        policy.logprobs(self._answers)  # whatever the first pass sets up must not be captured
        torch.cuda.synchronize(policy.device)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(policy.device):  # torch's own stream for captures is on whichever was current first
            stream = torch.cuda.Stream()
            # thread_local: broadcasts may go on meanwhile, on threads of theirs
            with torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local"):
                self._logprobs = policy.answer_logprobs(inputs)
        self._inputs = inputs  # the graph reads their memory
        self._addresses = self._addresses_now()

    def _addresses_now(self) -> tuple[int, ...]:
        return tuple(tensor.data_ptr() for tensor in self._policy.model.parameters())
