"""Models and tokenizers: loading them, and taking a causal language model apart into backbone and head.

The fused loss needs the hidden states before the head and the head's weight. What lies between raw logits
and softmax (soft-capping, logit scaling) is read from the model's config, and checked once against the
model's own logits, so that a model whose head does something else is refused instead of being trained on
wrong log-probs.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gspo_kernels as gk
from gspo_kernels.integrations.errors import IntegrationError
from gspo_kernels.integrations.lm_head import LMHead, lm_head_of
from gspo_kernels.trainer.config import LoraConfig
from gspo_kernels.trainer.run.input_errors import ModelError

IGNORED = -100
"""Label of positions that do not count."""


def load_model(path: str, *, half: bool = False) -> Any:
    """Load a causal language model in fp32, as 16-bit weights would lose the small steps of RL.

    With ``half`` in bfloat16, for weights that only adapters change.
    """
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16 if half else torch.float32)
    except (OSError, ValueError) as error:
        raise ModelError(f"model {path!r} cannot be loaded: {error}") from error


def add_adapters(model: Any, config: LoraConfig) -> Any:
    """Inject LoRA adapters in place; return peft's model around it, for ``disable_adapter``."""
    import peft

    targets = config.target_modules
    options = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=targets if targets == "all-linear" else [name.strip() for name in targets.split(",")],
        task_type="CAUSAL_LM",
    )
    try:
        adapted = peft.get_peft_model(model, options)
    except ValueError as error:
        raise ModelError(f"lora.target_modules: {error}") from error
    head_of(model)
    return adapted


@torch.no_grad()
def export_model(model: Any, path: Path) -> None:
    """Write a directory that ``from_pretrained`` loads; adapters are added to the weights they adapt."""
    state = dict(model.named_parameters(remove_duplicate=False))
    for prefix, module in model.named_modules():
        kept = module._buffers.keys() - module._non_persistent_buffers_set
        state |= {f"{prefix}.{name}".lstrip("."): module._buffers[name] for name in kept}
    for prefix, module in model.named_modules():
        if hasattr(module, "get_delta_weight"):
            delta = module.get_delta_weight("default")
            state[f"{prefix}.base_layer.weight"] = state[f"{prefix}.base_layer.weight"] + delta
    whole = {name.replace(".base_layer.", "."): w for name, w in state.items() if ".lora_" not in name}
    model.save_pretrained(path, state_dict=whole)


def load_tokenizer(path: str) -> Any:
    """Load the tokenizer that lies beside the model."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"the tokenizer of {path!r} cannot be loaded: {error}") from error


def end_token_ids(model: Any, tokenizer: Any) -> list[int]:
    """Return the ids that end a completion: the tokenizer's, and those of the model's generation config."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    found = sorted({int(i) for i in [tokenizer.eos_token_id, *ids] if i is not None})
    if not found:
        raise ModelError(
            "neither the tokenizer nor the model's generation config has an end-of-sequence token"
        )
    return found


def padding_token_id(tokenizer: Any) -> int:
    """Return the id that fills rows; an end token where there is no padding token, as padding is masked."""
    if tokenizer.pad_token_id is not None:
        return int(tokenizer.pad_token_id)
    if tokenizer.eos_token_id is None:
        raise ModelError("the tokenizer has neither a padding nor an end-of-sequence token")
    return int(tokenizer.eos_token_id)


def head_of(model: Any) -> LMHead:
    """Find the head of a causal language model; see `lm_head_of`."""
    try:
        return lm_head_of(model)
    except IntegrationError as error:
        raise ModelError(str(error)) from error


def hidden_states(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Run the backbone on left-padded rows and return what enters the head, [B, T, H].

    Positions count from each row's first real token, as generation counts them.
    """
    arguments: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask}
    accepted = inspect.signature(model.base_model.forward).parameters
    if "position_ids" in accepted:
        arguments["position_ids"] = (attention_mask.cumsum(1) - 1).clamp_min(0)
    if "use_cache" in accepted or any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
        arguments["use_cache"] = False
    hidden: Tensor = model.base_model(**arguments).last_hidden_state
    return hidden


@torch.no_grad()
def check_head(model: Any, input_ids: Tensor, attention_mask: Tensor) -> None:
    """Refuse a model whose own next-token log-probs differ from those of backbone and head taken apart."""
    last = input_ids[:, -1:]
    hidden = hidden_states(model, input_ids, attention_mask)[:, -1:]
    head = head_of(model)
    ours = gk.linear_token_logprobs(hidden, head.weight, last, **head.options()).logprobs
    arguments: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask}
    if "position_ids" in inspect.signature(model.forward).parameters:
        arguments["position_ids"] = (attention_mask.cumsum(1) - 1).clamp_min(0)
    logits = model(**arguments).logits[:, -1:].float()
    theirs = nn.functional.log_softmax(logits, dim=-1).gather(-1, last.unsqueeze(-1)).squeeze(-1)
    tolerance = 1e-3 if head.weight.dtype == torch.float32 else 0.1
    difference = (ours - theirs).abs().max().item()
    if not difference <= tolerance * (1.0 + theirs.abs().max().item()):
        raise ModelError(
            f"the head of {type(model).__name__} does something that this trainer does not know: "
            f"log-probs from its hidden states and lm_head differ from the model's own by {difference:.3g}"
        )
