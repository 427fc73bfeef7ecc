"""Models and tokenizers: loading them, and what a run trains of them."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.utils import set_seed
from torch.distributed.tensor import DTensor

from gspo_kernels.trainer.config import LoraConfig, TrainConfig
from gspo_kernels.trainer.input_errors import ModelError
from gspo_kernels.trainer.rows.policy import Policy, head_of
from gspo_kernels.trainer.run.arrangement import Arrangement
from gspo_kernels.trainer.run.sharding import check_policy, shard_policy, sharded_weights


class Policies(NamedTuple):
    """What is trained, and what it is compared with."""

    model: Any  # transformers', with adapters if there are any
    policy: Policy  # the same, as a module that scores completions
    reference: Any  # a frozen copy, where a term of the loss asks for one and there are no adapters
    reference_mode: Callable[[], AbstractContextManager[Any]]  # in it, the policy is its own reference
    fingerprint: float | None  # of weights that no checkpoint holds and no run may change


def make_policies(
    model: Any, tokenizer: Any, config: TrainConfig, accelerator: Any, arrangement: Arrangement
) -> Policies:
    """Load the model if it is a directory, refuse what cannot be trained, and make policy and reference.

    Under FSDP2 they come back sharded; of a directory no process ever holds more than its shards, or, of
    matrices that are cut over processes, its part before it is sharded.
    """
    adapted = config.lora.rank > 0
    load: Callable[[], Any] | None = None
    if isinstance(model, str | Path):
        load = partial(_load, str(model), config, accelerator, arrangement, frozen=adapted)
        model = load()
    elif arrangement.tensor > 1 or config.attn_implementation is not None:
        name = "parallel.tensor" if arrangement.tensor > 1 else "attn_implementation"
        raise ModelError(f"{name} is for a model that is loaded here, and this one was given")
    elif not adapted:
        model = model.float()
    model.to(accelerator.device).eval()  # dropout would hide what the check of the head looks for
    rows, padding = model.get_input_embeddings().weight.shape[0], padding_token_id(tokenizer)
    if padding >= rows:
        raise ModelError(
            f"the tokenizer's padding token is {padding}, and the model embeds only {rows} tokens"
        )
    sums = sums_of_weights(model)
    for name, value in sums.items():
        if not math.isfinite(value):
            raise ModelError(f"the model's weight {name} holds numbers that are not finite")
    fingerprint = sum(sums.values()) if adapted or config.needs_reference() else None
    reference: Any = None
    reference_mode: Any = nullcontext
    if adapted:
        set_seed(config.seed)
        reference_mode = add_adapters(model, config.lora).disable_adapter
    if config.needs_reference() and not adapted:
        # the modules of a model that is cut are bound to the weights that they were made with
        other = copy.deepcopy(model) if arrangement.tensor == 1 or load is None else load()
        reference = _policy(other, config, arrangement).requires_grad_(False)
    policy = _policy(model, config, arrangement, config.update.gradient_checkpointing)
    check_policy(accelerator, policy)
    if reference is not None:
        reference = _frozen(accelerator, reference)
    if accelerator.is_fsdp2:
        policy = shard_policy(accelerator, policy)
    return Policies(model, policy, reference, reference_mode, fingerprint)


def make_teacher(
    tokenizer: Any, config: TrainConfig, accelerator: Any, arrangement: Arrangement
) -> Policy | None:
    """Load the model whose log-probs are learned from, frozen, where the configuration names one.

    One with another tokenizer is refused: its log-probs are those of the policy's own tokens.
    """
    path = config.distillation.teacher
    if path is None:
        return None
    if load_tokenizer(path).get_vocab() != tokenizer.get_vocab():
        raise ModelError(f"distillation.teacher: {path} has another tokenizer than the model that is trained")
    model = _load(path, config, accelerator, arrangement, frozen=True).to(accelerator.device)
    teacher = _policy(model, config, arrangement).requires_grad_(False)
    check_policy(accelerator, teacher)
    return _frozen(accelerator, teacher)


def _load(path: str, config: TrainConfig, accelerator: Any, arrangement: Arrangement, frozen: bool) -> Any:
    """Load a model as a run has it, in bf16 where that is asked for and the weights stay as they are."""
    half = frozen and config.update.precision == "bf16"
    attention, tensor = config.attn_implementation, arrangement.tensor
    return load_model(path, half=half, attention=attention, accelerator=accelerator, tensor=tensor)


def _policy(model: Any, config: TrainConfig, arrangement: Arrangement, checkpointing: bool = False) -> Policy:
    return Policy(
        model,
        layout=config.update.layout,
        temperature=config.rollout.temperature,
        batch_invariant=config.update.batch_invariant,
        gradient_checkpointing=checkpointing,
        context=arrangement.context,
    )


def _frozen(accelerator: Any, policy: Policy) -> Policy:
    """Prepare a policy that is never trained."""
    if accelerator.is_fsdp2:
        return shard_policy(accelerator, policy)
    prepared: Policy = accelerator.prepare_model(policy, evaluation_mode=True)
    return prepared


def load_model(
    path: str, *, half: bool = False, attention: str | None = None, accelerator: Any = None, tensor: int = 1
) -> Any:
    """Load a causal language model in fp32, as 16-bit weights would lose the small steps of RL.

    With ``half`` in bfloat16, for weights that only adapters change. With an accelerator that runs FSDP2
    every process reads its shards of the weights, onto its device, and with ``tensor`` above 1 its part of
    each weight matrix, as the model's ``tp_plan`` cuts them over so many.
    """
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if half else torch.float32
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention}
    if tensor > 1:
        options["distributed_config"] = _copies(accelerator.num_processes // tensor, tensor)
        model = _loaded(AutoModelForCausalLM, path, "model", **options)
        model.config.distributed_config = None  # by which saving would wait for all; one process writes
        return model
    if accelerator is None or not accelerator.is_fsdp2:
        return _loaded(AutoModelForCausalLM, path, "model", **options)
    with sharded_weights(accelerator):
        model = _loaded(AutoModelForCausalLM, path, "model", device_map={"": accelerator.device}, **options)
    if whole := [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]:
        raise ModelError(f"FSDP needs transformers 5.20 or later, to read shards: {whole[0]} was read whole")
    return model


def _copies(count: int, tensor: int) -> Any:
    """Have transformers load so many copies of a model, each cut over ``tensor`` processes."""
    from transformers.distributed import DistributedConfig

    class Copies(DistributedConfig):
        dp_size = 1  # above that transformers gives the copies to FSDP

    try:
        return Copies(tp_size=tensor, **({"dp_replicate_size": count} if count > 1 else {}))
    except TypeError as error:
        raise ModelError(
            f"parallel.tensor {tensor} of {tensor * count} processes needs transformers 5.23 or later; "
            "an earlier one cuts a model over all of them"
        ) from error


def load_skeleton(path: str) -> Any:
    """Return a model as `load_model` does, with weights that have shapes and no content."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = _loaded(AutoConfig, path, "the configuration of")
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@torch.no_grad()
def sums_of_weights(model: Any) -> dict[str, float]:
    """Return the sum of the sizes of every parameter's numbers; all processes must call it."""
    sums = {n: torch.linalg.vector_norm(p, 1, dtype=torch.float64) for n, p in model.named_parameters()}
    return {n: float(s.full_tensor() if isinstance(s, DTensor) else s) for n, s in sums.items()}


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
