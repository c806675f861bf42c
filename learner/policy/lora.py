"""LoRA and DoRA by peft: adapters, the choice of trained parameters, and the adapter for the adapter sync (R08, R09).

In: a transformers model and the `model` section: `path` (maybe an adapter's folder), `lora`, `freeze`. Out: a peft
model around the transformers model (or None without adapters), with `requires_grad` set.

`AdapterWeights` gives two tensors per adapted layer: `{module}.lora_A.weight` `[rank, in]` and
`{module}.lora_B.weight` `[out, rank]`, with modules named as in the checkpoint. `AdapterWeights.obstacle` says why an
engine that supports only plain LoRA cannot apply this adapter. Invariants: `lora_B` is multiplied with the adapter's
scaling in float32 before it is sent, so servers need not know the scaling. The trained weights do not change.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import peft
import torch
from peft.tuners.lora import LoraLayer
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from learner.config.sections.model import LoraConfig, ModelConfig
from learner.policy.sharding import whole
from learner.policy.weights import CheckpointWeights
from shared.errors import ConfigError
from shared.sync.buckets import spec_of
from shared.wire import TensorSpec

_MOST_NEAR, _MOST_NAMES = 3, 12  # an error shows at most 3 names similar to a wrong one, and at most 12 right names


def base_model_path(config: ModelConfig) -> str | None:
    """Return the path of the base model if `config.path` is an adapter's folder, else None. Raises ConfigError if the
    path is an adapter's folder and `config.lora` asks for another adapter."""
    if not (Path(config.path) / "adapter_config.json").is_file():
        return None
    if config.lora is not None:
        raise ConfigError(
            "model.path already holds an adapter",
            found=f"model.path: {config.path}, and model.lora",
            wanted="one of the two",
            remedy="remove model.lora to train that adapter on, or export the checkpoint first to add a new one",
        )
    return peft.PeftConfig.from_pretrained(config.path).base_model_name_or_path


def attach_adapter(model: PreTrainedModel, config: ModelConfig) -> peft.PeftModel | None:
    """Attach the adapter of `config.path`, or a new adapter by `config.lora`, and freeze the rest of the model. Returns
    None without an adapter.

    Raises ConfigError if no layer has a name in `target_modules`, or if the adapter is on tied weights.
    """
    with warnings.catch_warnings():
        # peft only warns about an adapter on tied weights. `require_untied` below refuses it.
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`")
        if base_model_path(config) is not None:
            adapter = peft.PeftModel.from_pretrained(model, config.path, is_trainable=True)
        else:
            adapter = _new_adapter(model, config.lora) if config.lora else None
    if adapter is not None:
        require_untied(model)
    return adapter


def require_untied(model: PreTrainedModel) -> None:
    """Raises ConfigError if the input embedding and the head share one tensor (tied weights) and one of them has an
    adapter. Merging the adapter would change both, so neither an export nor a sync could write the trained weights."""
    both = {"embed_tokens": model.get_input_embeddings(), "lm_head": model.get_output_embeddings()}
    adapted = [name for name, layer in both.items() if isinstance(layer, LoraLayer)]
    one, other = (layer.get_base_layer() if isinstance(layer, LoraLayer) else layer for layer in both.values())
    if adapted and one is not None and other is not None and one.weight is other.weight:
        raise ConfigError(
            "model.lora.target_modules names a layer whose weights are tied",
            found=f"{' and '.join(adapted)}, one tensor of the model (tie_word_embeddings)",
            wanted="layers with weights of their own",
            remedy='leave lm_head and embed_tokens out, or use "all-linear"',
        )


def _new_adapter(model: PreTrainedModel, config: LoraConfig) -> peft.PeftModel:
    if isinstance(config.target_modules, list):
        _require_layers(model, config.target_modules)
    options = peft.LoraConfig(
        r=config.r,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=config.target_modules,
        use_dora=config.type == "dora",
        task_type="CAUSAL_LM",
    )
    try:
        return peft.get_peft_model(model, options)
    except ValueError as error:
        raise ConfigError(
            "no adapter could be added",
            found=f"model.lora.target_modules: {config.target_modules}; peft says: {error}",
            wanted="names of linear layers of the model",
            remedy='use "all-linear", or names such as q_proj',
        ) from error


def _require_layers(model: PreTrainedModel, names: Sequence[str]) -> None:
    """Raises ConfigError if no layer has one of the `names`. peft reports that only if no name matches a layer."""
    layers = [name for name, _ in model.named_modules()]
    unknown = [name for name in names if not any(f".{layer}".endswith(f".{name}") for layer in layers)]
    if unknown:
        linear = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
        known = dict.fromkeys(name.rpartition(".")[2] for name in linear)
        raise ConfigError(
            "model.lora.target_modules names no layer",
            found=_with_near(unknown, list(known)),
            wanted=f"names of linear layers: {', '.join(list(known)[:_MOST_NAMES])}",
            remedy='correct the name or remove it, or use "all-linear"',
        )


def _with_near(unknown: Sequence[str], known: Sequence[str]) -> str:
    """Return a text for an error: each unknown name, with the known names that are similar to it."""
    told = []
    for name in unknown:
        like = [one for one in known if one.strip(".").endswith(f".{name.strip('.')}")][:_MOST_NEAR]
        like = like or difflib.get_close_matches(name, known, _MOST_NEAR)
        told.append(f"{name!r} (near: {', '.join(like)})" if like else repr(name))
    return ", ".join(told)


@contextmanager
def without_adapter(adapter: peft.PeftModel) -> Iterator[None]:
    """Switch the adapter off inside the `with` block. Afterwards the same parameters have `requires_grad` as before."""
    trained = [(p, p.requires_grad) for p in adapter.parameters()]
    try:
        with adapter.disable_adapter():
            yield
    finally:
        # When peft switches the adapter on again, it sets `requires_grad` on all its parameters, also on frozen ones.
        for parameter, requires_grad in trained:
            parameter.requires_grad_(requires_grad)


def freeze(model: PreTrainedModel, prefixes: Sequence[str]) -> None:
    """Freeze the parameters whose checkpoint name begins with one of `prefixes`, adapters included.

    Raises ConfigError if a prefix matches no parameter, or if no parameter is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    unknown = [prefix for prefix in prefixes if not any(name.startswith(prefix) for name in names)]
    if unknown:
        parts = [name.split(".") for name in names]
        known = dict.fromkeys(".".join(part[:depth]) + "." for part in parts for depth in range(1, len(part)))
        raise ConfigError(
            "model.freeze names no parameter",
            found=_with_near(unknown, list(known)),
            wanted=f"the beginning of a name such as {names[0]}",
            remedy="correct the prefix or remove it",
        )
    for name, parameter in model.named_parameters():
        if name.startswith(tuple(prefixes)):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            "every parameter is frozen",
            found=f"model.freeze: {list(prefixes)}",
            wanted="something to train",
            remedy="remove a prefix from model.freeze",
        )


class AdapterWeights:
    """The adapter's weights, for the adapter sync. `base`: the model's weights without the adapter. Base weights are
    not trained, but servers need them too. `obstacle`: why a server cannot apply this adapter; "" if it can. `rank`:
    the largest rank of a layer."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.base = CheckpointWeights(model, merge=False)
        adapted = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
        layers = {name: layer for name, layer in adapted.items() if not _is_idle(layer)}
        names = _checkpoint_names(model, layers)
        unnamed = layers.keys() - names.keys()
        fused = f"the checkpoint stores {min(unnamed)} fused with others" if unnamed else ""
        self.obstacle = _obstacle(model, layers) or fused
        self._layers = {names[name]: layer for name, layer in layers.items() if name in names}
        self.rank = max((r for layer in layers.values() for r in layer.r.values()), default=0)

    @torch.no_grad()
    def named_weights(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) of the adapter in `dtype` (None: the type of training), detached. Tensors may share
        memory with the model."""
        for module, layer in self._layers.items():
            (adapter,) = layer.active_adapters
            lora_a, lora_b = (whole(half[adapter].weight.detach()) for half in (layer.lora_A, layer.lora_B))
            yield f"{module}.lora_A.weight", lora_a.to(dtype or lora_a.dtype)
            # Servers do not apply the adapter's scaling, so `lora_B` is scaled here. The product is rounded once, from
            # float32.
            yield f"{module}.lora_B.weight", (lora_b.float() * layer.scaling[adapter]).to(dtype or lora_b.dtype)

    def weight_specs(self, dtype: torch.dtype | None = None) -> list[TensorSpec]:
        """Return names, dtypes and shapes of `named_weights(dtype)`, in the same order."""
        return [
            spec_of(f"{module}.lora_{half}.weight", weight, dtype)
            for module, layer in self._layers.items()
            for half, weight in (("A", _only(layer.lora_A).weight), ("B", _only(layer.lora_B).weight))
        ]


def _only(halves: torch.nn.ModuleDict) -> torch.nn.Linear:
    (half,) = halves.values()
    assert isinstance(half, torch.nn.Linear)
    return half


def _is_idle(layer: LoraLayer) -> bool:
    """Return True if the layer's adapter is frozen (`model.freeze`) and its `lora_B` is zero. An adapter with a zero
    `lora_B` has no effect, and an engine does not need it."""
    frozen = not any(p.requires_grad for name, p in layer.named_parameters() if "lora_" in name)
    return frozen and not any(whole(half.weight).any() for half in layer.lora_B.values())


def _obstacle(model: PreTrainedModel, layers: dict[str, LoraLayer]) -> str:
    """Return why the trained weights are not a plain LoRA on linear layers; "" if they are."""
    if not layers:
        return "no layer of the model is adapted"
    for name, layer in layers.items():
        if any(layer.use_dora.values()):
            return "the adapter is a DoRA, which vLLM does not support"
        if not isinstance(layer.get_base_layer(), torch.nn.Linear) or any(layer.lora_bias.values()):
            return f"{name} is not adapted as a linear layer, or with a bias of its own"
        if list(layer.lora_A) != layer.active_adapters or len(layer.lora_A) != 1:
            return f"{name} has adapters {list(layer.lora_A)}, and {layer.active_adapters} of them active"
    served = {
        id(p) for layer in layers.values() for halves in (layer.lora_A, layer.lora_B) for p in halves.parameters()
    }
    others = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in served]
    return f"{others[0]} is trained and is no part of the adapter" if others else ""


def _checkpoint_names(model: PreTrainedModel, layers: dict[str, LoraLayer]) -> dict[str, str]:
    """Return the layers' names in the checkpoint, by their names in the model. Layers whose weights the checkpoint
    fuses or splits are left out."""
    # Tensors without memory are enough, because only their identities are compared.
    weights = {
        f"{name}.weight": torch.empty(layer.get_base_layer().weight.shape, device="meta")
        for name, layer in layers.items()
    }
    stored = {id(tensor): name for name, tensor in revert_weight_conversion(model, dict(weights)).items()}
    return {
        name.removesuffix(".weight"): stored[id(tensor)].removesuffix(".weight")
        for name, tensor in weights.items()
        if id(tensor) in stored
    }
