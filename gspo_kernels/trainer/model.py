"""Models: loading them, adapters, shards, the policy with its fused head, the reference, export.

Under FSDP2 no process loads, keeps or writes more than its shards.
"""

from __future__ import annotations

import copy
import itertools
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.modules.module import register_module_module_registration_hook

import gspo_kernels as gk
from gspo_kernels.integrations.errors import IntegrationError
from gspo_kernels.integrations.lm_head import LMHead, lm_head_of
from gspo_kernels.sampling import SamplingMask
from gspo_kernels.trainer.batch import (
    Tokens,
    attention_of,
    check_rows_of,
    offsets_on,
    packed_hidden_states,
    probe,
    rounding_of,
    shared_prefix_hidden_states,
)
from gspo_kernels.trainer.config import InputError, LoraConfig, TrainConfig, check_model_path, reason
from gspo_kernels.trainer.processes import ALONE, reshard, seed_everything


def load_model(
    path: str, *, half: bool = False, attention: str | None = None, accelerator: Any = ALONE
) -> Any:
    """Load a causal language model in fp32, as 16-bit weights would lose the small steps of RL.

    ``half`` loads bfloat16 instead, for weights that are not trained themselves. If the accelerator runs
    FSDP2, every process reads its shards of the weights onto its device.
    """
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if half else torch.float32
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": attention}
    if not accelerator.is_fsdp2:
        return _loaded(AutoModelForCausalLM, path, "model", **options)
    with _sharded_weights(accelerator):
        model = _loaded(AutoModelForCausalLM, path, "model", device_map={"": accelerator.device}, **options)
    if whole := [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]:
        raise InputError(f"FSDP needs transformers 5.20 or later, to read shards: {whole[0]} was read whole")
    return model


def load_tokenizer(path: Any) -> Any:
    """Load the tokenizer of a model's directory or Hub name; anything else is an `InputError`."""
    from transformers import AutoTokenizer

    if not isinstance(path, str | Path):
        raise InputError("tokenizer: got None with a model that is already loaded; expected its tokenizer")
    tokenizer = _loaded(AutoTokenizer, str(path), "the tokenizer of")
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # transformers makes some without any file
        raise InputError(f"the tokenizer of {str(path)!r} has only special tokens: its files are missing")
    return tokenizer


def _loaded(kind: Any, path: str, what: str, **options: Any) -> Any:
    check_model_path(path)
    try:
        return kind.from_pretrained(path, **options)
    except Exception as error:  # transformers passes on whatever its readers raise
        has = ", ".join(sorted(file.name for file in Path(path).glob("*")))
        has = shorten(f"; the directory has {has or 'no files'}", 200) if Path(path).is_dir() else ""
        raise InputError(f"{what} {path!r} cannot be loaded: {shorten(reason(error), 1000)}{has}") from error


def end_token_ids(model: Any, tokenizer: Any) -> list[int]:
    """Return the ids that end a completion: the tokenizer's, and those of the model's generation config."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    end_ids = sorted({int(i) for i in [tokenizer.eos_token_id, *ids] if i is not None})
    if not end_ids:
        raise InputError("neither the tokenizer nor the model's generation config has an end token")
    return end_ids


def padding_token_id(tokenizer: Any) -> int:
    """Return the padding token's id, or the end token's if there is none: padding is masked anyway."""
    ids = [i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None]
    if not ids:
        raise InputError("the tokenizer has neither a padding nor an end-of-sequence token")
    return int(ids[0])


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
        with warnings.catch_warnings():  # peft asks transformers by a name that goes away
            warnings.filterwarnings("ignore", ".is_gradient_checkpointing", FutureWarning)
            adapted = peft.get_peft_model(model, options)
    except ValueError as error:
        raise InputError(f"lora.target_modules: {error}") from error
    head_of(model)
    return adapted


class Policy(nn.Module):
    """A causal language model that scores completions, or computes their loss, without storing all logits.

    The head runs inside ``forward``, with the backbone, so that DDP and FSDP see one module whose parameters
    are all present while it runs. Completions are scored at the sampling temperature, in packed rows; with
    ``shared_prefix``, the prefixes that sequences share are in a row once.
    """

    def __init__(
        self, model: Any, *, temperature: float, shared_prefix: bool = False, checkpointing: bool = False
    ) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.shared_prefix = shared_prefix
        # FSDP reads this attribute to wrap one module per layer.
        self._no_split_modules = getattr(model, "_no_split_modules", None)
        # Dropout would make the ratio differ from 1 with equal weights, so it stays off in training too.
        self.eval()
        self._checkpointed: list[nn.Module] = []
        if checkpointing:
            from transformers.modeling_layers import GradientCheckpointingLayer

            name = "activation_checkpointing_enable"
            enable = getattr(model, name, None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
            self._checkpointed = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
            if not self._checkpointed:
                raise InputError(f"{type(model).__name__} has no layers that could be recomputed")

    @torch.no_grad()
    def check(self) -> None:
        """Run a few tokens; refuse a model with an unknown head, or one that common rows would change."""
        try:
            check_head(self.model)
            check_rows_of(self.model)
            if self.shared_prefix:
                check_rows_of(self.model, shared_prefix=True)
        except Exception as error:  # of the model's own code
            if isinstance(error, InputError | torch.OutOfMemoryError):
                raise
            tried = "cannot be trained: its forward, tried on a few tokens in one row, raised"
            raise InputError(f"{type(self.model).__name__} {tried} {error!r}") from error

    @contextmanager
    def checkpointed(self) -> Iterator[None]:
        """Let layers be recomputed in the body's backward; generation would then run without its cache."""
        for layer in self._checkpointed:
            layer.training = torch.is_grad_enabled()
        yield
        for layer in self._checkpointed:
            layer.training = False

    def forward(
        self,
        prompts: Tokens,
        completions: Tokens,
        terms: Mapping[str, Any] | None = None,
        mask: SamplingMask | None = None,
        return_entropy: bool = False,
    ) -> gk.TokenLogprobs | gk.LossOutput:
        """Score completions, or return the loss of `gk.fused_linear_policy_loss` if its terms are passed.

        Results and mask are packed over the N completion tokens. With a mask, log-probs and entropy are those
        of the softmax over the tokens in it.
        """
        device = completions[0].device
        states = shared_prefix_hidden_states if self.shared_prefix else packed_hidden_states
        labels, cu_seqlens = torch.cat(list(completions)), offsets_on(list(map(len, completions)), device)
        # before the model is queued, for which the loss would wait
        if terms is None:
            gk.prefetch(labels)
        else:
            gk.prefetch(labels, terms.get("loss_mask"), terms.get("advantages"), cu_seqlens=cu_seqlens)
        with self.checkpointed():
            hidden = states(self.model, prompts, completions)
        head = head_of(self.model)
        options = {"temperature": self.temperature, "return_entropy": return_entropy, **head.options()}
        if mask is not None:
            options["kept_mask"] = mask.bitmask(head.matrix.shape[0])
        if terms is None:
            return gk.linear_token_logprobs(hidden, head.weight, labels, **options)
        options |= {"cu_seqlens": cu_seqlens, **terms}
        return gk.fused_linear_policy_loss(hidden, head.weight, labels, **options)


def head_of(model: Any) -> LMHead:
    """Find the head of a causal language model; see `lm_head_of`."""
    try:
        return lm_head_of(model)
    except IntegrationError as error:
        raise InputError(str(error)) from error


@torch.no_grad()
def check_head(model: Any) -> None:
    """Refuse a model whose next-token log-probs differ from those of its backbone and head run separately.

    The steps between raw logits and softmax (soft-capping, logit scaling) are read from the model's config.
    """
    prompts, completions = probe(model, [3], [4])
    hidden, labels = packed_hidden_states(model, prompts, completions), torch.cat(completions)
    head, name = head_of(model), type(model).__name__
    ours = gk.linear_token_logprobs(hidden, head.weight, labels, **head.options()).logprobs
    logits = model(torch.cat([*prompts, *completions]).unsqueeze(0)).logits[0, 2:-1].float()
    if not logits.isfinite().all():
        raise InputError(f"the logits of {name} are not finite: its weights are damaged")
    theirs = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    tolerance = 1e-3 if rounding_of(head.matrix) < 1e-6 else 0.1
    difference = (ours - theirs).abs().max().item()
    if not difference <= tolerance * (1.0 + theirs.abs().max().item()):
        unknown = f"the head of {name} does something that this trainer does not know"
        raise InputError(f"{unknown}: log-probs of hidden states and lm_head differ by {difference:.3g}")


ReferenceMode = Callable[[], AbstractContextManager[Any]]


def make_policies(
    model: Any, tokenizer: Any, config: TrainConfig, accelerator: Any, needs_reference: bool
) -> tuple[Any, Policy, Any, ReferenceMode]:
    """Load the model if it is a path, refuse a model that cannot be trained, and make policy and reference.

    Returns the transformers model, with adapters if configured; the policy around it, sharded under FSDP2;
    the reference, a frozen copy, or None if none is needed or there are adapters; and a function that makes a
    context in which adapters are off, so that the policy is the reference.
    """
    adapted, attention = config.lora.rank > 0, config.attn_implementation
    if isinstance(model, str | Path):
        half = adapted and config.update.precision == "bf16"
        model = load_model(str(model), half=half, attention=attention, accelerator=accelerator)
    elif attention is not None:
        raise InputError(f"attn_implementation: got {attention!r} with a loaded model; expected None")
    elif not adapted:
        model = model.float()
    model.to(accelerator.device)
    rows, padding = model.get_input_embeddings().weight.shape[0], padding_token_id(tokenizer)
    if padding >= rows:
        raise InputError(f"the tokenizer's padding token is {padding}, and the model embeds {rows} tokens")
    reference: Any = None
    reference_mode: Any = nullcontext
    if adapted:
        seed_everything(config.seed)
        reference_mode = add_adapters(model, config.lora).disable_adapter
        if config.engine.url is not None and model.config.tie_word_embeddings and not is_tied(model):
            one = "the model's embedding and head are one weight, and vLLM cannot load them as two"
            raise InputError(f"lora.target_modules: got {config.lora.target_modules!r} and engine.url; {one}")
    elif not any(p.requires_grad for p in model.parameters()):
        raise InputError(f"{type(model).__name__} has no weights that require gradients: all are frozen")
    elif needs_reference:
        reference = _prepared(copy.deepcopy(model), config, accelerator, frozen=True)
    return model, _prepared(model, config, accelerator), reference, reference_mode


def frozen_policy(path: str, config: TrainConfig, accelerator: Any) -> Any:
    """Load, check and prepare a model that is never trained: a recipe's teacher."""
    half, attention = config.update.precision == "bf16", config.attn_implementation
    model = load_model(path, half=half, attention=attention, accelerator=accelerator)
    return _prepared(model.to(accelerator.device), config, accelerator, frozen=True)


def _prepared(model: Any, config: TrainConfig, accelerator: Any, *, frozen: bool = False) -> Any:
    options = {"checkpointing": config.update.gradient_checkpointing and not frozen}
    options["shared_prefix"] = config.update.shared_prefix
    policy = Policy(model, temperature=config.rollout.temperature, **options)
    _check(accelerator, policy)
    if frozen:
        policy.requires_grad_(False)
        for module in model.modules() if accelerator.mixed_precision == "bf16" else ():
            linear = isinstance(module, nn.Linear) and module is not model.get_output_embeddings()
            if linear or accelerator.is_fsdp2:  # products round these weights anyway: log-probs stay
                module.bfloat16()
    if accelerator.is_fsdp2:
        return shard_policy(accelerator, policy)
    return accelerator.prepare_model(policy, evaluation_mode=True) if frozen else policy


@contextmanager
def _sharded_weights(accelerator: Any) -> Iterator[None]:
    """Give models that are built on the meta device in this context FSDP2's shards as parameters.

    transformers (since 5.20) then reads only this process's part of each weight.
    """
    mesh = getattr(accelerator, "torch_device_mesh", None)
    if mesh is None:
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    else:
        mesh = mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)]
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]

    def shard(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        for module in child.modules() if child is not None else ():
            for key, p in module._parameters.items():
                if p is not None and p.is_meta and not isinstance(p, DTensor):
                    shards = distribute_tensor(p.detach(), mesh, placements, src_data_rank=None)
                    module._parameters[key] = nn.Parameter(shards, p.requires_grad)

    hook = register_module_module_registration_hook(shard)
    try:
        yield
    finally:
        hook.remove()


def shard_policy(accelerator: Any, policy: Policy) -> Policy:
    """Hand a policy's weights to FSDP2 as accelerate does; shards that are already loaded are kept."""
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    named = policy.named_parameters(remove_duplicate=False)
    loaded = {n: p for n, p in named if isinstance(p, DTensor)}
    # FSDP splits whole weights. It gets empty ones, on the meta device; the loaded shards then replace these.
    whole = {
        id(p): nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), p.requires_grad)
        for p in loaded.values()
    }
    for module in policy.modules():
        module._parameters.update({n: whole.get(id(p), p) for n, p in module._parameters.items()})
    policy = fsdp2_prepare_model(accelerator, policy)
    policy.load_state_dict(loaded, strict=False, assign=True)
    return policy


def _check(accelerator: Any, policy: Policy) -> None:
    """Run `Policy.check` in the run's precision, and in fp32 where attention can compute in it.

    For shards it runs on a second policy that shares them and has no mixed precision of FSDP.
    """
    if accelerator.is_fsdp2 and any(isinstance(p, DTensor) for p in policy.parameters()):
        plugin = accelerator.state.fsdp_plugin
        policy = copy.deepcopy(policy, {id(p): p for p in policy.parameters()})
        mixed, plugin.mixed_precision_policy = plugin.mixed_precision_policy, None
        policy = shard_policy(accelerator, policy)
        plugin.mixed_precision_policy = mixed
        register_fsdp_forward_method(policy, "check")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)
    if dtype is None or "flash" not in attention_of(policy.model):  # flash-attention has no fp32
        policy.check()  # without rounding, which would hide a small leak
    if dtype is not None:  # accelerator.autocast() would make accelerate forget about FSDP
        with torch.autocast(accelerator.device.type, dtype):
            policy.check()
    reshard(policy)


@torch.no_grad()
def export_model(
    model: Any, tokenizer: Any, path: Path, *, accelerator: Any = ALONE, dtype: torch.dtype | None = None
) -> None:
    """Write a directory that ``from_pretrained`` loads; adapters are added to the weights they adapt.

    All processes must call; each writes its own shards. Weights are as trained, or rounded to ``dtype``. The
    folder ``adapter`` in it has the adapters alone, as trained, for peft's ``PeftModel.from_pretrained``.
    """
    from transformers.utils import logging

    original, bars = model.config, logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    model.config = copy.deepcopy(original)  # save_pretrained changes it
    try:
        model.config.tie_word_embeddings = is_tied(model)
        state = _merged(model, dtype)
        sharded = any(isinstance(weight, DTensor) for weight in state.values())
        if accelerator.is_main_process:
            # Of a sharded model, this writes only the configurations, and the model's code if it has any.
            model.save_pretrained(path, state_dict={} if sharded else state)
            if dtype is not None:
                model.config.dtype = dtype
                model.config.save_pretrained(path)
            tokenizer.save_pretrained(path)
        if sharded:
            _write_shards(model, state, path, accelerator)
        if hasattr(model, "peft_config"):
            _write_adapters(model, path / "adapter", accelerator)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    finally:
        model.config = original
        if bars:
            logging.enable_progress_bar()


def is_tied(model: Any) -> bool:
    """Return whether embedding and head are one weight; an adapter on either of them makes two of it."""
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    return bool(model.config.tie_word_embeddings) and not any(hasattr(end, "base_layer") for end in ends)


def _merged(model: Any, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return all weights (shards under FSDP2) with the adapters added, by the names of the plain model."""
    state = {name: tensor.detach() for name, tensor in model.state_dict().items() if ".lora_" not in name}
    for prefix, module in model.named_modules():
        name = f"{prefix}.base_layer.weight"
        if name in state:
            state[name] = state[name] + module.get_delta_weight("default").to(state[name].dtype)
    state = {name.replace(".base_layer.", "."): tensor for name, tensor in state.items()}
    if dtype is not None:
        state = {n: tensor.to(dtype) if tensor.is_floating_point() else tensor for n, tensor in state.items()}
    tied = set(model._tied_weights_keys or ()) if is_tied(model) else set()
    return {name: tensor for name, tensor in state.items() if name not in tied}


def exported_weights(model: Any, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield whole weights as `export_model` writes them, on their device; all processes must iterate."""
    from transformers.core_model_loading import revert_weight_conversion

    for name, weight in revert_weight_conversion(model, _merged(model, dtype)).items():
        yield name, weight.full_tensor() if isinstance(weight, DTensor) else weight


def _write_adapters(model: Any, path: Path, accelerator: Any) -> None:
    """Write adapters in peft's format; they are small, so that under FSDP2 every process gathers them."""
    import peft

    named = peft.get_peft_model_state_dict(model, save_embedding_layers=False).items()
    state = {f"base_model.model.{n}": x.full_tensor() if isinstance(x, DTensor) else x for n, x in named}
    if accelerator.is_main_process:
        config = copy.copy(model.peft_config["default"])
        config.inference_mode = True
        config.save_pretrained(path)
        save_file(state, path / "adapter_model.safetensors", metadata={"format": "pt"})


LARGEST_FILE = 5 * 10**9
"""About the most bytes of weights in one file of a model that was trained in shards."""


def _write_shards(model: Any, state: dict[str, Tensor], path: Path, accelerator: Any) -> None:
    """Let each process write its shards, and the first process merge the files."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save
    from transformers.core_model_loading import revert_weight_conversion

    (path / "model.safetensors").unlink(missing_ok=True)
    state = revert_weight_conversion(model, state)
    ends = itertools.accumulate(tensor.numel() * tensor.element_size() for tensor in state.values())
    files = {name: end // LARGEST_FILE for name, end in zip(state, ends, strict=True)}
    numbers = {old: new for new, old in enumerate(dict.fromkeys(files.values()), start=1)}
    writer = HuggingFaceStorageWriter(
        str(path),
        fqn_to_index_mapping={name: numbers[file] for name, file in files.items()},
        save_distributed=True,
        enable_consolidation=True,
    )
    save(state, storage_writer=writer)
    if accelerator.is_main_process:
        shutil.rmtree(path / "sharded")
