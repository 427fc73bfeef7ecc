"""The head of a causal language model: how it is found, and how its product is turned into logits."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gspo_kernels.core.types import LoRAHead
from gspo_kernels.models import IntegrationError


@dataclass(frozen=True)
class LMHead:
    """A language model's head, as arguments of functions such as ``fused_linear_policy_loss``.

    Attributes:
        weight: [V, H], the parameter itself (a DTensor where it is sharded); with PEFT's LoRA a ``LoRAHead``.
        bias: [V] or None.
        logit_scale: factor on the raw logits.
        softcap: bound of the tanh soft-capping, or None.
    """

    weight: Tensor | LoRAHead
    bias: Tensor | None
    logit_scale: float
    softcap: float | None

    @property
    def matrix(self) -> Tensor:
        """The weight [V, H] without its adapter."""
        return self.weight.weight if isinstance(self.weight, LoRAHead) else self.weight

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of such functions, without hidden states and weight."""
        return {"bias": self.bias, "logit_scale": self.logit_scale, "softcap": self.softcap}

    def transform(self, logits: Tensor) -> Tensor:
        """Turn the head's product into the model's logits at temperature 1."""
        logits = self.logit_scale * logits
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def lm_head_of(model: Any) -> LMHead:
    """Find the head of a causal language model, and read from its config how logits are transformed.

    ``final_logit_softcapping`` (Gemma) bounds logits, ``logit_scale`` (Cohere) multiplies and
    ``logits_scaling`` (Granite) divides them. The model may be inside adapters and data-parallel wrappers.

    Raises:
        IntegrationError: there is no linear head, it carries an adapter other than one plain LoRA, or it is
            quantized; or the model has PEFT's prompt learning.
    """
    model = causal_lm_of(model)
    head = head_module(model)
    scale, softcap = _logit_transform(model.config.get_text_config())
    return LMHead(weight_of(head), getattr(head, "bias", None), scale, softcap)


def causal_lm_of(model: Any) -> Any:
    """Return the transformers model inside PEFT and data-parallel wrappers.

    Raises:
        IntegrationError: the model has PEFT's prompt learning, which puts virtual tokens before the prompt.
    """
    while isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    if not (hasattr(model, "peft_config") and hasattr(model, "get_base_model")):
        return model
    for config in model.peft_config.values():
        if getattr(config, "is_prompt_learning", False):
            raise IntegrationError(
                f"model: {type(config).__name__} is prompt learning, which is not supported, because virtual "
                "tokens have no labels; expected LoRA, or another adapter without them"
            )
    return model.get_base_model()


def check_causal(model: Any) -> None:
    """Raise IntegrationError if a model's tokens see later tokens: their labels would be among these."""
    from transformers.models.auto import modeling_auto as auto

    name = type(model).__name__
    masked = {*auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values()}
    masked -= {*auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}
    # check text modules only: an image encoder is bidirectional in a causal language model, too
    of_text = (type(None), type(model.config), type(model.config.get_text_config(decoder=True)))
    causal = [
        value
        for module in model.modules()
        if type(getattr(module, "config", None)) in of_text
        for value in (getattr(module, "is_causal", None), getattr(module, "is_decoder", None))
        if isinstance(value, bool)
    ]
    if name in masked or (causal and not any(causal)):
        raise IntegrationError(
            f"model: {name} is bidirectional: its tokens see those that follow, so its log-probs are not "
            "those of a policy that samples token by token; expected a causal language model (in BERT's "
            "family one with is_decoder=True in its config)"
        )


def head_module(model: Any) -> Any:
    """Return the module that computes a model's logits; raise IntegrationError if it can't be used."""
    name = type(model).__name__
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    weight = getattr(head, "weight", None)
    if weight is None or getattr(model.config, "is_encoder_decoder", False):
        raise IntegrationError(f"model: {name} is no causal language model with a linear lm_head")
    weight_of(head)
    if not weight.is_floating_point() or (weight.dim() != 2 and weight.numel()):
        raise IntegrationError(
            f"model: the lm_head of {name} holds a {weight.dtype} weight of shape {tuple(weight.shape)}, "
            "expected [V, H] in floating point; leave it out of quantization, and of FSDP1's units"
        )
    return head


def weight_of(head: Any) -> Tensor | LoRAHead:
    """Return the weight of a head's module; a ``LoRAHead`` if PEFT's LoRA is active and not merged.

    Raises:
        IntegrationError: an adapter other than one plain LoRA without bias and dropout.
    """
    tuners = sys.modules.get("peft.tuners.tuners_utils")  # where PEFT was never imported there is no adapter
    if tuners is None or not isinstance(head, tuners.BaseTunerLayer):
        return head.weight  # type: ignore[no-any-return]
    lora_linear, base = sys.modules["peft.tuners.lora"].Linear, head.get_base_layer()
    active = [name for name in head.active_adapters if name in getattr(head, "lora_A", ())]
    is_lora = isinstance(head, lora_linear)
    if is_lora and (head.disable_adapters or head.merged or not active):
        return base.weight  # type: ignore[no-any-return]
    if not is_lora:
        reason = f"an adapter ({type(head).__name__}), whose product is not part of its weight"
    elif len(active) > 1:
        reason = f"{len(active)} active adapters"
    elif active[0] in head.lora_variant:
        reason = f"a variant of LoRA ({type(head.lora_variant[active[0]]).__name__})"
    elif head.lora_bias[active[0]]:
        reason = "LoRA with a bias"
    elif head.training and getattr(head.lora_dropout[active[0]], "p", 0.0) > 0:
        reason = "LoRA with dropout"
    else:
        (name,) = active
        return LoRAHead(base.weight, head.lora_A[name].weight, head.lora_B[name].weight, head.scaling[name])
    raise IntegrationError(
        f"model: its lm_head carries {reason}; expected one plain LoRA without dropout, or leave lm_head out "
        "of target_modules and train it whole with modules_to_save=['lm_head']"
    )


@contextmanager
def replaced_product(
    head: Any, product: Callable[[Tensor], Any], stand_in: Callable[[Any], Tensor]
) -> Iterator[list[Any]]:
    """Let the head's module compute ``product(hidden)``, and give the model's forward ``stand_in`` of it.

    The module's own hooks run. Hooks that gather its weight (FSDP2, ZeRO-3) also get the result of
    ``product``, and attach to its gradient.

    Yields:
        A list with one entry for each call of the head: ``product(hidden)``, as changed by the hooks.
    """
    outputs: list[Any] = []

    def keep(module: Any, inputs: Any, output: Any) -> Tensor:
        outputs.append(output)
        return stand_in(output)

    def without_layouts(hooks: OrderedDict[int, Any]) -> OrderedDict[int, Any]:
        layouts = "torch.distributed.tensor"
        return OrderedDict(
            (key, hook) for key, hook in hooks.items() if not hook.__module__.startswith(layouts)
        )

    before, hooks = head.__dict__.get("forward"), (head._forward_pre_hooks, head._forward_hooks)
    if getattr(head, "_distribute_module_applied", False):
        # hooks of parallelize_module would make DTensors of a result that isn't logits
        head._forward_pre_hooks, head._forward_hooks = map(without_layouts, hooks)
    handle = head.register_forward_hook(keep)
    head.forward = product
    try:
        yield outputs
    finally:
        del head.forward
        if before is not None:
            head.forward = before
        handle.remove()
        head._forward_pre_hooks, head._forward_hooks = hooks


def _logit_transform(config: Any) -> tuple[float, float | None]:
    """Return (factor, softcap or None), read under the names that model families use in their configs."""
    scale = 1.0
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if getattr(config, name, None) is not None:
            scale = float(getattr(config, name))
    scaling = getattr(config, "logits_scaling", None)
    if scaling is not None and config.model_type != "minicpm3":  # MiniCPM3 divides hidden states by it
        scale *= float(scaling) if config.model_type == "hyperclovax" else 1 / float(scaling)
    softcap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
    return scale, float(softcap) if softcap else None
