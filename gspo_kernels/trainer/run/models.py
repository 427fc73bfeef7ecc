"""Models and tokenizers: loading them, what a run trains of them, and writing what was trained."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import set_seed

from gspo_kernels.trainer.config import LoraConfig, TrainConfig
from gspo_kernels.trainer.input_errors import ModelError
from gspo_kernels.trainer.rows.policy import Policy, check_head, head_of
from gspo_kernels.trainer.run.processes import prepare_frozen


class Policies(NamedTuple):
    """What is trained, and what it is compared with."""

    model: Any  # transformers', with adapters if there are any
    policy: Policy  # the same, as a module that scores completions
    reference: Any  # a frozen copy, where a term of the loss asks for one and there are no adapters
    reference_mode: Callable[[], AbstractContextManager[Any]]  # in it, the policy is its own reference
    fingerprint: float | None  # of weights that no checkpoint holds and no run may change


def make_policies(model: Any, tokenizer: Any, config: TrainConfig, accelerator: Any) -> Policies:
    """Load the model if it is a directory, refuse what cannot be trained, and make policy and reference."""
    adapted = config.lora.rank > 0
    if isinstance(model, str | Path):
        half = adapted and config.update.precision == "bf16"
        model = load_model(str(model), half=half, attention=config.attn_implementation)
    elif config.attn_implementation is not None:
        raise ModelError("attn_implementation is for a model that is loaded here, and this one was given")
    elif not adapted:
        model = model.float()
    model.to(accelerator.device).eval()  # dropout would hide what the check of the head looks for
    rows, padding = model.get_input_embeddings().weight.shape[0], padding_token_id(tokenizer)
    if padding >= rows:
        raise ModelError(
            f"the tokenizer's padding token is {padding}, and the model embeds only {rows} tokens"
        )
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise ModelError(f"the model's weight {name} holds numbers that are not finite")
    check_head(model)
    options: dict[str, Any] = {"layout": config.update.layout, "temperature": config.rollout.temperature}
    Policy(model, **options).check_layout()
    fixed = adapted or config.needs_reference()
    fingerprint = sum(p.double().abs().sum().item() for p in model.parameters()) if fixed else None
    reference, reference_mode = None, nullcontext
    if adapted:
        set_seed(config.seed)
        reference_mode = add_adapters(model, config.lora).disable_adapter
    elif config.needs_reference():
        reference = prepare_frozen(accelerator, Policy(copy.deepcopy(model), **options))
    policy = Policy(model, gradient_checkpointing=config.update.gradient_checkpointing, **options)
    return Policies(model, policy, reference, reference_mode, fingerprint)


def load_model(path: str, *, half: bool = False, attention: str | None = None) -> Any:
    """Load a causal language model in fp32, as 16-bit weights would lose the small steps of RL.

    With ``half`` in bfloat16, for weights that only adapters change.
    """
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if half else torch.float32
    return _loaded(AutoModelForCausalLM, path, "model", dtype=dtype, attn_implementation=attention)


def load_tokenizer(path: str) -> Any:
    """Load the tokenizer that lies beside the model."""
    from transformers import AutoTokenizer

    return _loaded(AutoTokenizer, path, "the tokenizer of")


def _loaded(kind: Any, path: str, what: str, **options: Any) -> Any:
    if not Path(path).is_dir() and not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path):
        missing = "there is no such directory, and a model on the Hub is called 'organization/name'"
        raise ModelError(f"model {path!r} cannot be loaded: {missing}")
    try:
        return kind.from_pretrained(path, **options)
    except Exception as error:  # transformers lets through what its readers raise
        lines = str(error).strip().splitlines() or [repr(error)]
        raise ModelError(f"{what} {path!r} cannot be loaded: {lines[0]}") from error


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
def export_model(
    model: Any, weights: Mapping[str, Any], tokenizer: Any, path: Path, dtype: torch.dtype | None = None
) -> None:
    """Write a directory that ``from_pretrained`` loads; adapters are added to the weights they adapt."""
    state = dict(weights)
    for prefix, module in model.named_modules():
        if not hasattr(module, "get_delta_weight"):
            continue
        # From the given weights: what the module holds may be shards, or rounded by mixed precision.
        kind = "embedding_" if f"{prefix}.lora_embedding_A.default" in state else ""
        a, b = (state[f"{prefix}.lora_{kind}{x}.default{'' if kind else '.weight'}"] for x in "AB")
        delta, base = module.scaling["default"] * (b @ a), f"{prefix}.base_layer.weight"
        state[base] = state[base] + (delta.T if kind or module.fan_in_fan_out else delta)
    whole = {name.replace(".base_layer.", "."): w for name, w in state.items() if ".lora_" not in name}
    if dtype is not None:
        whole = {name: w.to(dtype) if w.is_floating_point() else w for name, w in whole.items()}
        model.config.dtype = dtype
    model.save_pretrained(path, state_dict=whole)
    tokenizer.save_pretrained(path)


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
