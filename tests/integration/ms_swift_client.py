"""Asks a rollout server with the clients of ms-swift: `python ms_swift_client.py BASE_URL IMAGE`. Prints a JSON object.

It runs in an environment with ms-swift (`pip install ms-swift==4.6.0`) and vLLM, not in this project's: test_server.py
starts it.
"""

import json
import sys

from swift.infer_engine import RequestConfig
from swift.infer_engine.protocol import RolloutInferRequest
from swift.rlhf_trainers.vllm_client import VLLMClient, VLLMInferClient


def main(base_url: str, image: str) -> None:
    client = VLLMInferClient(base_urls=[base_url], connection_timeout=10.0)
    text = {"type": "text", "text": "name every digit"}
    by_list = RolloutInferRequest(messages=[{"role": "user", "content": "<image>name every digit"}], images=[image])
    part = {"type": "image_url", "image_url": {"url": image}}
    by_part = RolloutInferRequest(messages=[{"role": "user", "content": [part, text]}])
    greedy = client.infer([by_list, by_part], RequestConfig(max_tokens=12, temperature=0.0), use_tqdm=False)
    (first,), (second,) = (output.response_token_ids for output in greedy)
    assert first == second
    trainers = VLLMClient(base_urls=[base_url], connection_timeout=10.0)
    (again,) = trainers.infer([by_list], RequestConfig(max_tokens=12, temperature=0.0))
    assert again.response_token_ids == [first]
    try:
        trainers.init_communicator(device="cpu")
    except Exception as error:  # their class: a bare Exception with the server's answer
        refused = str(error)
    client.infer([by_list], RequestConfig(max_tokens=None, stop=["a"]))  # everything else null or a default
    (sampled,) = client.infer([by_list], RequestConfig(max_tokens=12, temperature=1.0, seed=3, n=2, logprobs=True))
    choices = sampled.response.choices
    assert [len(choice.logprobs["content"]) for choice in choices] == [len(choice.token_ids) for choice in choices]
    tokens = [choice.token_ids for choice in choices]
    print(json.dumps({"greedy": first, "sampled": tokens, "logprobs": sampled.rollout_logprobs, "refused": refused}))


if __name__ == "__main__":
    main(*sys.argv[1:])
