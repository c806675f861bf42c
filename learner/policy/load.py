"""The policy: a transformers model with its processor, and the learner's operations on them.

In: `ModelConfig`. Out: a `Policy` that learns packed rows, scores tokens, and lists its merged weights under checkpoint
names. Supported are text-only causal language models and image-text-to-text models of the Qwen-VL kind.
`shared/families.py` lists the families that were tested.

Invariants: before `reduce_gradients`, a gradient is the gradient of the sum (not the mean) of this rank's weighted
losses. If the model is sharded, a gradient is this rank's part of the gradient of the sum over all ranks. `logprobs`
and `named_weights` do not affect training. If the model is sharded, `logprobs` and `named_weights` are collective.

The patch embedding of Qwen-VL vision towers is a convolution, and each of its inputs is a single patch. The policy
computes the patch embedding as a matrix product, which has the same weights, the same names of weights and the same
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from learner.config.sections.grpo import GrpoConfig
from learner.config.sections.model import ModelConfig
from learner.data.prompt import PromptEncoder
from learner.extensions import LossFunction
from learner.policy import lora
from learner.policy.attention import use_segment_attention
from learner.policy.compiled import compile_layers, compiling, uncompiled
from learner.policy.lora import AdapterWeights
from learner.policy.loss import (
    RowLoss,
    check_finite,
    logprobs_and_entropy,
    token_logprobs,
    weighted_loss,
)
from learner.policy.packed import PackedInputs, hidden_states, pack_inputs
from learner.policy.parallel import Ranks, broadcast_parameters, reduce_gradients
from learner.policy.policy_gradient import PREFIX, SUMS, policy_loss, write_first_logprobs
from learner.policy.sharding import ShardedForward, collective_errors, shard
from learner.policy.weights import CheckpointWeights
from learner.records import EncodedPrompt, PackedRow, Segment
from shared.errors import ConfigError
from shared.families import check_family, check_path
from shared.images import ImageRules
from shared.wire import TensorSpec

if TYPE_CHECKING:
    from peft import PeftModel


def use_linear_patch_embedding(model: torch.nn.Module) -> None:
    """Make the model's convolutions whose stride equals their kernel (patch embeddings) compute a matrix product."""
    for module in model.modules():
        if not isinstance(module, torch.nn.Conv3d):
            continue
        if module.kernel_size == module.stride and set(module.padding) == {0} and module.groups == 1:
            # Convolution kernels on CUDA take tens of times as long.
            module.forward = partial(_linear_patch, module)  # type: ignore[method-assign]


def _linear_patch(conv: torch.nn.Conv3d, patches: torch.Tensor) -> torch.Tensor:
    """Return the convolution's output `[P, hidden, 1, 1, 1]` for P patches `[P, C, t, h, w]` of the kernel's size."""
    assert patches.shape[2:] == conv.kernel_size, "the vision tower is fed one patch at a time"
    return F.linear(patches.flatten(1), conv.weight.flatten(1), conv.bias)[..., None, None, None]


# If a model's configuration has one of these keys, its logits are not simply head(hidden).
_LOGIT_TRANSFORMS = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")


class Policy:
    """One rank's copy of the trained model. `model`: the transformers model, adapters included. `adapter`: peft's model
    around `model`; None without adapters. `bf16`: passes compute in bfloat16 (autocast). `why_not_compiled`: "" if the
    layers are compiled."""

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        adapter: PeftModel | None,
        encoder: PromptEncoder,
        device: torch.device,
        bf16: bool,
        why_not_compiled: str,
        sharded: ShardedForward | None = None,
        loss: LossFunction | None = None,
        grpo: GrpoConfig | None = None,
    ) -> None:
        self.model, self.adapter, self.encoder = model, adapter, encoder
        self.device, self.bf16, self.why_not_compiled = device, bf16, why_not_compiled
        self._sharded, self._loss, self._grpo = sharded, loss, grpo
        # The parameters are listed once: ranks reduce exactly their gradients, even if something changes
        # `requires_grad` later.
        self._trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]

    @property
    def is_sharded(self) -> bool:
        """True if each rank has only a part of every weight. Every use of sharded weights is collective: all ranks must
        take part (`sharding.py`)."""
        return self._sharded is not None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.encoder.tokenizer

    @property
    def trainable(self) -> list[tuple[str, torch.nn.Parameter]]:
        """(name, parameter) of each trained parameter, in the same order on all ranks. The list was made when the
        policy was made, and ranks reduce the gradients of exactly these parameters."""
        return list(self._trainable)

    @cached_property
    def flops_per_token(self) -> float:
        """Floating-point operations for learning one token. Only the decoder's weights are counted, so this is a lower
        bound. A weight needs 2 operations in the forward pass, 2 for the gradient of its input, 2 more if it is
        trained, and 2 more if gradient checkpointing computes the layer again. Attention, head and vision tower are
        left out."""
        decoder = self.model.get_decoder()
        looked_up = {id(p) for p in decoder.get_input_embeddings().parameters()}
        weights = [p for p in decoder.parameters() if id(p) not in looked_up]
        again = 2 if self.model.is_gradient_checkpointing else 0
        return float(sum((4 + again + 2 * p.requires_grad) * p.numel() for p in weights))

    def peak_gib(self) -> float | None:
        """Return the peak of the GPU memory that torch allocated since the last call, in GiB; None without a GPU."""
        if self.device.type != "cuda":
            return None
        peak = torch.cuda.max_memory_allocated(self.device) / 2**30
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak

    def set_training(self, training: bool) -> None:
        """Set the training mode of all modules, as `model.train(training)` does, but faster."""
        if self.model.training == training:
            return
        for module in self._modules:
            # torch's own method takes 0.1 s for a 4B model with adapters, and the mode changes at every row and every
            # sync.
            module.__dict__["training"] = training

    @cached_property
    def _modules(self) -> list[torch.nn.Module]:
        return list(self.model.modules())

    # ---- learning --------------------------------------------------------------------------------------------------

    def _forward_row(self, row: PackedRow) -> tuple[torch.Tensor, PackedInputs, torch.Tensor | None]:
        """Return the row's summed weighted loss (float32 scalar, with gradient), the row's inputs, and the sums of
        `policy_loss` for the metrics (None if the row has no policy gradient).

        Raises LossError if a supervised token is outside the assistant span.
        """
        # An empty row has no policy tokens, but is computed like the other rows of this run.
        if not row.segments and self._grpo is not None:
            row = replace(row, share_prompts=True)
        inputs = pack_inputs(row, self.model, self.device, always_image=self.is_sharded)
        sums: list[torch.Tensor] = []

        def row_loss() -> torch.Tensor:
            hidden = hidden_states(self.model, inputs)
            if inputs.policy is not None and len(inputs.targets):
                loss, counted = self._policy_loss(hidden, inputs, row)
                sums.append(counted)
                return loss
            return weighted_loss(
                hidden,
                self._head,
                inputs.predict_at,
                inputs.targets,
                inputs.weights,
                compiled=not self.why_not_compiled,
                function=self._loss,
            )

        return self._forward(row_loss), inputs, sums[0] if sums else None

    def _policy_loss(
        self, hidden: torch.Tensor, inputs: PackedInputs, row: PackedRow
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert inputs.policy is not None
        assert self._grpo is not None, "a segment has advantages, but the policy has no section grpo"
        now, entropy = logprobs_and_entropy(
            hidden[inputs.predict_at], self._head, inputs.targets, compiled=not self.why_not_compiled
        )
        write_first_logprobs(row.segments, inputs.supervised, now)
        kl_weight = self._grpo.kl_weight
        reference = self._reference_logprobs(inputs) if kl_weight else None
        return policy_loss(
            now, inputs.weights, inputs.policy, entropy=entropy, reference=reference, kl_weight=kl_weight
        )

    @torch.no_grad()
    def _reference_logprobs(self, inputs: PackedInputs) -> torch.Tensor:
        """Return the log-probabilities [N] of the targets under the reference: the model without its adapter."""
        assert self.adapter is not None, "refused by learner/config/sections/grpo.py"
        with uncompiled(), lora.without_adapter(self.adapter):
            return token_logprobs(hidden_states(self.model, inputs)[inputs.predict_at], self._head, inputs.targets)

    def backward(self, row: PackedRow) -> RowLoss:
        """Learn one row: add the gradients of its summed loss to the parameters' gradients. An empty row adds zeros
        (D5).

        Raises LossError if the loss is not finite, before the gradients change, and ConfigError if the layers cannot be
        compiled, which shows when the first row is learned.
        """
        self.set_training(True)
        with compiling():
            loss, inputs, sums = self._forward_row(row)
            loss_sum = loss.item()
            # The loss is checked before the backward pass, because gradients of a loss that is not finite would spoil
            # the gradients of earlier rows.
            check_finite(loss_sum, [s.sample_id for s in row.segments])
            with collective_errors() if self.is_sharded else nullcontext():
                # The host does not wait for the device here, and packs the next row meanwhile.
                loss.backward()
        return RowLoss(
            loss_sum=loss_sum,
            weight_sum=inputs.weight_sum,
            num_supervised=len(inputs.targets),
            counts={} if sums is None else {PREFIX + name: v for name, v in zip(SUMS, sums.tolist(), strict=True)},
        )

    def reduce_gradients(self, ranks: Ranks, *, weight_sum: float) -> None:
        """Turn the gradients of this rank's summed losses into gradients of the weighted mean loss over all ranks.
        `weight_sum`: sum of the step's loss weights over all ranks. Call this once per step, on every rank."""
        now = [name for name, p in self.model.named_parameters() if p.requires_grad]
        assert now == [name for name, _ in self._trainable], "something changed which parameters are trained"
        # The backward passes of a sharded model have already summed gradients over ranks.
        summed_by = Ranks() if self.is_sharded else ranks
        reduce_gradients([p for _, p in self.trainable], summed_by, weight_sum=weight_sum)

    def broadcast(self, ranks: Ranks) -> None:
        """Overwrite every rank's weights with rank 0's. Call this on every rank before the first step. For a sharded
        model it does nothing, because sharding has distributed rank 0's weights."""
        if not self.is_sharded:
            broadcast_parameters(self.model, ranks)

    # ---- scoring ---------------------------------------------------------------------------------------------------

    def logprobs(self, answers: Sequence[tuple[EncodedPrompt, Sequence[int]]]) -> list[list[float]]:
        """Return for each answer the natural log-probabilities of its tokens, each given all tokens before it, computed
        in the precision of training. All answers are scored in one packed forward pass."""
        return self.split(self.answer_logprobs(self.answer_inputs(answers)), answers)

    def answer_inputs(self, answers: Sequence[tuple[EncodedPrompt, Sequence[int]]]) -> PackedInputs:
        """Return the inputs of the forward pass that scores these answers, for `answer_logprobs`."""
        segments = tuple(_response_segment(prompt, response) for prompt, response in answers)
        row = PackedRow(segments=segments, capacity=sum(map(len, segments)))
        return pack_inputs(row, self.model, self.device, always_image=self.is_sharded)

    @torch.no_grad()
    def answer_logprobs(self, inputs: PackedInputs) -> torch.Tensor:
        """Return the answers' natural log-probabilities as one tensor `[N]` on the device, one answer after the
        other. `inputs`: the result of `answer_inputs`."""
        was_training = self.model.training
        self.set_training(False)
        try:
            with uncompiled():
                return self._forward(
                    lambda: token_logprobs(
                        hidden_states(self.model, inputs)[inputs.predict_at], self._head, inputs.targets
                    )
                )
        finally:
            self.set_training(was_training)

    @staticmethod
    def split(logprobs: torch.Tensor, answers: Sequence[tuple[EncodedPrompt, Sequence[int]]]) -> list[list[float]]:
        """Split the result of `answer_logprobs` into one list per answer."""
        return [part.tolist() for part in logprobs.cpu().split([len(response) for _, response in answers])]

    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (checkpoint name, tensor) of all weights, adapters merged, in `dtype` (None: the type of training)."""
        return self._checkpoint.named_weights(dtype)

    def weight_specs(self, dtype: torch.dtype | None = None) -> list[TensorSpec]:
        """Return the name, dtype and shape of each tensor of `named_weights(dtype)`, in the same order."""
        return self._checkpoint.weight_specs(dtype)

    @cached_property
    def _checkpoint(self) -> CheckpointWeights:
        return CheckpointWeights(self.model, device=self.device)

    def adapter_weights(self) -> AdapterWeights | None:
        """Return the adapter's weights and the base weights that it is applied to, for the adapter sync. Return None
        without an adapter."""
        return AdapterWeights(self.model) if self.adapter is not None else None

    def _forward(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        # Autocast caches 16-bit copies of weights. A sharded model runs without this cache: it would keep copies of
        # weights that sharding has freed.
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16, cache_enabled=not self.is_sharded):
            return self._sharded.run(work) if self._sharded else work()

    @property
    def _head(self) -> torch.nn.Module:
        return self.model.get_output_embeddings()


def load_policy(
    config: ModelConfig,
    *,
    device: torch.device,
    bf16: bool = False,
    shard_over: Ranks | None = None,
    image_rules: ImageRules | None = None,
    loss: LossFunction | None = None,
    grpo: GrpoConfig | None = None,
) -> Policy:
    """Load model and processor from `config.path`, add an adapter, freeze parameters, and put the model on `device`.
    `shard_over`: the model is sharded over these ranks, which must all call this. `loss`: the user's loss function.
    `grpo`: the settings of a policy gradient.

    The path may also be an adapter's folder (a checkpoint of a LoRA/DoRA run): then its base model is loaded too.
    Raises ConfigError if there is no model at the path, or its family is untested or known not to work. Also raises
    ConfigError if packed rows or sharding do not support the model, or if `compile: true` fails.
    """
    base_path = lora.base_model_path(config) or config.path
    # A sharded model may not fit one device, so it is loaded into host memory.
    place = torch.device("cpu") if shard_over else device
    model = _load_model(base_path, getattr(torch, config.dtype), place, allow_untested=config.allow_untested_family)
    _refuse_logit_transforms(model)
    use_segment_attention(model)
    use_linear_patch_embedding(model)
    adapter = lora.attach_adapter(model, config)
    # Parameters are frozen after the adapter was attached, because `model.freeze` may name the adapter's parameters.
    lora.freeze(model, config.freeze)
    if config.gradient_checkpointing:
        # Reentrant checkpointing would lose the gradients of a layer whose input has no gradient. With adapters, the
        # first layer's input has no gradient.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    sharded = shard(model, shard_over) if shard_over else None
    if sharded is None:
        # `to` moves the adapters too, because they are modules inside the model.
        model.to(device)
    encoder = PromptEncoder.load(
        base_path, rules=image_rules, min_pixels=config.min_pixels, max_pixels=config.max_pixels
    )
    return Policy(
        model=model,
        adapter=adapter,
        encoder=encoder,
        device=device,
        bf16=bf16,
        why_not_compiled=compile_layers(model, config.compile, device, sharded=sharded is not None),
        sharded=sharded,
        loss=loss,
        grpo=grpo,
    )


def _load_model(path: str, dtype: torch.dtype, device: torch.device, *, allow_untested: bool) -> PreTrainedModel:
    """Load and return the model on `device`. With a GPU, no copy of all weights is made in host memory. Raises
    ConfigError if there is no such model, or if its family is not supported."""
    check_path(path, key="model.path")
    try:
        settings = AutoConfig.from_pretrained(path)
        check_family(settings.to_dict(), key="model.path", allow_untested=allow_untested)
        loader = AutoModelForImageTextToText if hasattr(settings, "vision_config") else AutoModelForCausalLM
        place = None if device.type == "cpu" else device
        return loader.from_pretrained(path, dtype=dtype, attn_implementation="sdpa", device_map=place)
    except (OSError, ValueError) as error:
        found = "a folder" if Path(path).is_dir() else "no folder of that name"
        raise ConfigError(
            "the model cannot be loaded",
            found=f"model.path: {path} ({found}); {str(error).splitlines()[0]}",
            wanted="a Hugging Face checkpoint of a causal or an image-text-to-text model",
            remedy="correct model.path",
        ) from error


def _refuse_logit_transforms(model: PreTrainedModel) -> None:
    settings = model.config.get_text_config()
    found = {key: value for key in _LOGIT_TRANSFORMS if (value := getattr(settings, key, None)) not in (None, 1, 1.0)}
    if found:
        raise ConfigError(
            "this model changes its logits after the output head",
            found=f"{found} in the configuration of {type(model).__name__}",
            wanted="a model without logit scaling or soft caps",
            remedy="choose another model",
        )


def _response_segment(prompt: EncodedPrompt, response_token_ids: Sequence[int]) -> Segment:
    ids = np.array([*prompt.token_ids, *response_token_ids], np.int64)
    is_response = np.arange(len(ids)) >= len(prompt.token_ids)
    return Segment(
        sample_id="",
        input_ids=ids,
        labels=np.where(is_response, ids, -100),
        loss_weights=is_response.astype(np.float32),
        prompt_length=len(prompt.token_ids),
        vision=prompt.vision,
    )
