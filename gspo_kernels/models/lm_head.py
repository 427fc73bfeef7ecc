"""The head of a causal language model: how it is found, and how its product is turned into logits."""

from __future__ import annotations

import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module

from gspo_kernels.core.types import LoRAHead
from gspo_kernels.models import IntegrationError
from gspo_kernels.models.calls import replaced_calls, view_of

# names of the only child in modules that wrap a model: DDP, torch.compile, FSDP1, checkpointing
_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
# packages whose hooks on a head gather, move, split or count tensors, and change no logits
_TRUSTED = ("torch.distributed.", "torch.utils.", "deepspeed.", "accelerate.", "transformers.")


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
        IntegrationError: there is no linear head, it carries an adapter other than one plain LoRA, it is
            quantized, or its module computes more than the product with its weight; or the model has PEFT's
            prompt learning.
    """
    model = causal_lm_of(model)
    return describe_head(model, head_module(model))


def describe_head(model: Any, head: Any) -> LMHead:
    """Return a causal language model's head, given its module from ``head_module``."""
    config, scale = model.config.get_text_config(), 1.0
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if getattr(config, name, None) is not None:
            scale = float(getattr(config, name))
    scaling = getattr(config, "logits_scaling", None)
    if scaling is not None and config.model_type != "minicpm3":  # MiniCPM3 divides hidden states by it
        scale *= float(scaling) if config.model_type == "hyperclovax" else 1 / float(scaling)
    softcap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
    softcap = float(softcap) if softcap else None
    return LMHead(weight_of(head), getattr(head, "bias", None), scale, softcap)


def causal_lm_of(model: Any) -> Any:
    """Return the transformers model inside PEFT, data-parallel wrappers and torch.compile's.

    Raises:
        IntegrationError: the model has PEFT's prompt learning, which puts virtual tokens before the prompt.
    """
    while isinstance(model, nn.Module) and len(model._modules) == 1:
        (name,) = model._modules
        if name not in _WRAPPERS:
            break
        model = model._modules[name]
    if not (hasattr(model, "peft_config") and hasattr(model, "get_base_model")):
        return model
    for config in model.peft_config.values():
        if getattr(config, "is_prompt_learning", False):
            raise IntegrationError(
                f"model: {type(config).__name__} is prompt learning, which is not supported, because virtual "
                "tokens have no labels; expected LoRA, or another adapter without them"
            )
    return causal_lm_of(model.get_base_model())


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
    if getattr(head, "weight", None) is None or getattr(model.config, "is_encoder_decoder", False):
        raise IntegrationError(f"model: {name} is not a causal language model with a linear lm_head")
    weight = weight_of(head)
    weight = weight.weight if isinstance(weight, LoRAHead) else weight
    if reason := unknown_part(head):
        raise IntegrationError(
            f"model: the lm_head of {name} {reason}; expected an nn.Linear that multiplies by its weight and "
            "does nothing else: leave it out of quantization and conversions, and remove what was put on it"
        )
    if not weight.is_floating_point() or (weight.dim() != 2 and weight.numel()):
        raise IntegrationError(
            f"model: the lm_head of {name} holds a {weight.dtype} weight of shape {tuple(weight.shape)}, "
            "expected [V, H] in floating point; leave it out of quantization, and of FSDP1's units"
        )
    return head


def unknown_part(head: Any) -> str | None:
    """Return what a head has that may give other logits than the product with its weight, or None."""
    for module, cls in _parts(head):
        kind, forward = type(module), vars(module).get("forward")
        if kind.forward is not cls.forward:
            return f"is a {kind.__module__}.{kind.__qualname__}, whose forward is not that of {cls.__name__}"
        if forward is not None:
            # accelerate's moves the weight, TRL's casts to fp32, and transformers' tensor parallelism splits
            inner = module._old_forward if _origin(forward).startswith("accelerate.hooks.") else forward
            known = _origin(inner).startswith(("trl.", "transformers.distributed."))
            if module is not head or not (known or getattr(inner, "__func__", None) is kind.forward):
                return f"has its own forward, {_origin(forward)}"
        hooks = [*module._forward_hooks.values(), *every_module._global_forward_hooks.values()]
        hooks += [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]
        accelerate = vars(module).get("_hf_hook")
        hooks += getattr(accelerate, "hooks", [accelerate] if accelerate is not None else [])
        if module is not head:  # only the outermost module is called, after its own hooks
            hooks += module._forward_pre_hooks.values()
        if strange := [name for name in map(_origin, hooks) if not name.startswith(_TRUSTED)]:
            return f"has a hook, {strange[0]}"
        for name in ("weight", "bias") if cls is nn.Linear else ():
            tensor = getattr(module, name, None)
            tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
            if tensor is not None and type(tensor) not in (Tensor, nn.Parameter):
                return f"holds a {name} of type {type(tensor).__name__}"
    return None


def _parts(head: Any) -> list[tuple[Any, Any]]:
    """Return the modules that compute a head's product, each with the class whose forward it must have."""
    if "peft" in sys.modules:
        other, lora = sys.modules["peft.utils.other"], sys.modules["peft.tuners.lora"].Linear
        tokens = sys.modules.get("peft.tuners.trainable_tokens.layer")  # since PEFT 0.15
        if isinstance(head, other.ModulesToSaveWrapper):
            on = head.active_adapters and not head.disable_adapters
            inner = head.modules_to_save[head.active_adapters[0]] if on else head.original_module
            return [(head, other.ModulesToSaveWrapper), *_parts(inner)]
        if tokens is not None and isinstance(head, other.TrainableTokensWrapper):
            layer = head.token_adapter  # their weight is the one that is multiplied
            inner = [(layer, tokens.TrainableTokensLayer), *_parts(layer.get_base_layer())]
            return [(head, other.TrainableTokensWrapper), *inner]
        if isinstance(head, lora):
            adapters = [x[name] for x in (head.lora_A, head.lora_B) for name in _active_adapters(head)]
            return [(head, lora), *((each, nn.Linear) for each in (head.get_base_layer(), *adapters))]
    return [(head, nn.Linear)]


def _origin(function: Any) -> str:
    """Return the module and name of a function, of what a partial calls, or of an object's class."""
    function = function.func if isinstance(function, functools.partial) else function
    function = function if hasattr(function, "__qualname__") else type(function)
    return f"{function.__module__}.{function.__qualname__}"


def _active_adapters(head: Any) -> list[str]:
    """Return the adapters of a LoRA module that its forward adds to the product of its base layer."""
    used = [] if head.disable_adapters or head.merged else head.active_adapters
    return [name for name in used if name in getattr(head, "lora_A", ())]


def weight_of(head: Any) -> Tensor | LoRAHead:
    """Return the weight of a head's module; a ``LoRAHead`` if PEFT's LoRA is active and not merged.

    Raises:
        IntegrationError: an adapter other than one plain LoRA without bias and dropout.
    """
    tuners = sys.modules.get("peft.tuners.tuners_utils")  # without PEFT there are no adapters
    if tuners is None or not isinstance(head, tuners.BaseTunerLayer):
        return head.weight  # type: ignore[no-any-return]
    active, base = _active_adapters(head), head.get_base_layer()
    if not isinstance(head, sys.modules["peft.tuners.lora"].Linear):
        reason = f"an adapter ({type(head).__name__}), whose product is not part of its weight"
    elif not active:
        return base.weight  # type: ignore[no-any-return]
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
    head: Any, product: Callable[[Any, Tensor], Any], stand_in: Callable[[Any], Tensor]
) -> Iterator[list[Any]]:
    """Let the head compute ``product(head, hidden)``, and give the model's forward ``stand_in`` of it.

    This holds for calls in the context's thread alone. Hooks that gather the weight (FSDP2, ZeRO-3,
    accelerate's offload) get the result of ``product`` as well, and attach to its gradient. ``product`` gets
    a copy of the module that shares its parameters; hooks may put a weight there. The context's value is the
    list of results, as changed by the hooks, one for each call of the head.
    """
    outputs: list[Any] = []

    def call(*args: Any, **kwargs: Any) -> Tensor:
        copy = view_of(head, _compiled_call_impl=None)
        attributes: dict[str, Any] = {"forward": functools.partial(product, copy)}
        if hasattr(head, "_hf_hook"):  # accelerate's forward moves the weight, and calls _old_forward
            attributes["_old_forward"] = attributes["forward"]
            attributes["forward"] = functools.partial(head.forward.func, copy)
        if getattr(head, "_distribute_module_applied", False):
            # hooks of parallelize_module would make DTensors of a result that isn't logits
            for name in ("_forward_pre_hooks", "_forward_hooks"):
                attributes[name] = OrderedDict(
                    (key, hook)
                    for key, hook in vars(head)[name].items()
                    if not _origin(hook).startswith("torch.distributed.tensor")
                )
        vars(copy).update(attributes)
        outputs.append(copy(*args, **kwargs))
        for name in ("forward", "_old_forward"):  # they refer to the copy, and would keep the graph alive
            vars(copy).pop(name, None)
        return stand_in(outputs[-1])

    with replaced_calls({head: call}):
        yield outputs
