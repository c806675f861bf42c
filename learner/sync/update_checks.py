"""The checks that an update is what it should be: sent as the policy has it, and confirmed as it was sent (R09).

In: buckets and their checksums, the checksums of the weights that the canary was scored with, a server's reply. Out: a
SyncError, or nothing. Invariants: every bucket is compared whose tensors the canary was scored with; version, bytes and
number of tensors must all be the update's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from learner.policy.weights import Checksums
from shared.errors import SyncError
from shared.wire import Bucket, UpdateWeightsReply


def check_sent(buckets: Sequence[Bucket], sums: Sequence[torch.Tensor], scored: Checksums) -> None:
    """Raises SyncError unless the weights that were sent are those that the canary was scored with, bit for bit.

    A stale tensor can change log-probabilities less than kernels do, so the canary alone cannot find it. `sums`: what
    was sent, int64 `[]` per bucket. `scored`: per tensor; a bucket with a tensor that is not in it is not compared.
    """
    known = [(i, bucket) for i, bucket in enumerate(buckets) if all(t.name in scored for t in bucket.tensors)]
    if not known:
        return
    wanted = torch.stack([torch.stack([scored[t.name] for t in bucket.tensors]).sum() for _, bucket in known])
    found = torch.stack([sums[i] for i, _ in known])
    wrong = [known[i] for i in torch.nonzero(wanted.to(found.device) != found).flatten().tolist()]
    if wrong:
        index, bucket = wrong[0]
        names = [tensor.name for tensor in bucket.tensors]
        raise SyncError(
            "the weights that were sent are not the policy's",
            found=f"{len(wrong)} of {len(buckets)} buckets differ; first bucket {index}: {names[0]} to {names[-1]}",
            wanted="in every bucket, bit for bit, the weights that the learner scored the canary with",
            remedy="something changed weights while they were sent, or sent old ones: is the policy used by another "
            "thread? If not, this is a defect of the weight source; the servers serve nothing until the next sync",
        )


def digest_of(seals: Sequence[torch.Tensor]) -> str:
    """Return the digest of whole weights, of the seals of their buckets."""
    return hashlib.blake2b(torch.cat(list(seals)).cpu().numpy().tobytes(), digest_size=16).hexdigest()


def sizes(buckets: Sequence[Bucket]) -> tuple[int, int]:
    """Return the numbers of bytes and of tensors."""
    return sum(bucket.num_bytes for bucket in buckets), sum(len(bucket.tensors) for bucket in buckets)


def check_reply(wanted: tuple[int, int, int], reply: UpdateWeightsReply, base_url: str) -> None:
    """Raises SyncError if the server at `base_url` took another update. `wanted`: version, bytes, tensors."""
    found = (reply.ver, reply.num_bytes, reply.num_tensors)
    if found != wanted:
        raise SyncError(
            f"{base_url}: the server confirmed another update than the one that was sent",
            found=f"(ver, bytes, tensors) {found}",
            wanted=str(wanted),
            remedy="run the same version of this project on both sides",
        )
