"""Models: loading them, adapters, the policy with its fused head, the reference, export."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from operator import eq
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
import transformers
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor

import gspo_kernels as gk
from gspo_kernels.integrations.transformers import check_head
from gspo_kernels.models import IntegrationError
from gspo_kernels.models.lm_head import lm_head_of
from gspo_kernels.models.rows import Tokens, check_rows_of, hidden_states, packed_row, tree_row
from gspo_kernels.trainer.config import InputError, LoraConfig, TrainConfig, check_model_path, reason
from gspo_kernels.trainer.processes import process_state, reshard, seed_everything


def load_model(path: str, half: bool = False, attention: str | None = None, accelerator: Any = None) -> Any:
    """Load a causal language model in fp32: 16-bit weights would lose the small updates of RL.

    ``half`` loads frozen weights in bfloat16. With ``cpu_ram_efficient_loading`` of accelerate's FSDP2
    plugin, only the first process of a node reads weights, and `_prepared` sends the others their shards.
    """
    options = {"dtype": torch.bfloat16 if half else torch.float32, "attn_implementation": attention}
    if accelerator and accelerator.is_fsdp2 and accelerator.state.fsdp_plugin.cpu_ram_efficient_loading:
        options["device_map"] = None if accelerator.is_local_main_process else "meta"
    return load_pretrained("AutoModelForCausalLM", path, "model", **options)


def load_tokenizer(path: Any) -> Any:
    """Load a model's tokenizer from a directory or the Hub."""
    if not isinstance(path, str | Path):
        raise InputError("tokenizer: got None with a model that is already loaded; expected its tokenizer")
    tokenizer = load_pretrained("AutoTokenizer", str(path), "the tokenizer of")
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # transformers makes one without files
        raise InputError(f"the tokenizer of {str(path)!r} has only special tokens: its files are missing")
    return tokenizer


def load_pretrained(kind: str, path: str, what: str, **options: Any) -> Any:
    """Load ``what`` from a directory or the Hub by a class of transformers."""
    check_model_path(path)
    try:
        return getattr(transformers, kind).from_pretrained(path, **options)
    except Exception as error:  # the readers' errors have many types
        has = ", ".join(sorted(file.name for file in Path(path).glob("*")))
        has = shorten(f"; the directory has {has or 'no files'}", 200) if Path(path).is_dir() else ""
        raise InputError(f"{what} {path!r} cannot be loaded: {shorten(reason(error), 1000)}{has}") from error


def end_token_ids(model: Any, tokenizer: Any) -> list[int]:
    """Return the ids that end a completion, of the tokenizer and of the model's generation config."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    end_ids = sorted({int(i) for i in [tokenizer.eos_token_id, *ids] if i is not None})
    if not end_ids:
        raise InputError("neither the tokenizer nor the model's generation config has an end token")
    return end_ids


def padding_token_id(tokenizer: Any) -> int:
    """Return the id of the padding token, or of the end token if there is none; padding is masked."""
    ids = [i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None]
    if not ids:
        raise InputError("the tokenizer has neither a padding nor an end-of-sequence token")
    return int(ids[0])


def add_adapters(model: Any, config: LoraConfig) -> Any:
    """Add LoRA adapters in place; return peft's model around it, for ``disable_adapter``."""
    import peft
    from peft.tuners.tuners_utils import BaseTunerLayer

    names: Any = list(config.target_modules)
    options = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        target_modules=names[0] if names == ["all-linear"] else names,
        task_type="CAUSAL_LM",
    )
    try:
        with warnings.catch_warnings():  # peft uses a deprecated name of transformers
            warnings.filterwarnings("ignore", ".is_gradient_checkpointing", FutureWarning)
            adapted = peft.get_peft_model(model, options)
    except ValueError as error:
        raise InputError(f"lora.target_modules: got {names}: {reason(error)}") from error
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    if any(isinstance(module, BaseTunerLayer) for module in ends):  # which may be tied
        raise InputError(f"lora.target_modules: got {names}, expected neither the embeddings nor the head")
    return adapted


class Policy(nn.Module):
    """A causal language model that scores completions, or computes their loss, without storing all logits.

    The head runs inside ``forward``: DDP and FSDP need one module with all parameters. Completions are scored
    at the sampling temperature, in packed rows, or in tree rows, where shared prefixes occur once.
    """

    def __init__(self, model: Any, *, temperature: float, checkpointing: bool = False) -> None:
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.layout: Any = packed_row
        # FSDP reads this attribute to wrap one module per layer.
        self._no_split_modules = getattr(model, "_no_split_modules", None)
        # Dropout stays off in training: with equal weights, ratios must be 1.
        self.eval()
        self._checkpointed: list[nn.Module] = []
        if checkpointing:
            from transformers.modeling_layers import GradientCheckpointingLayer

            name = "activation_checkpointing_enable"
            enable = getattr(model, name, None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
            self._checkpointed = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
            if not self._checkpointed:
                raise InputError(f"{type(model).__name__} does not support update.gradient_checkpointing")

    def tie_weights(self) -> None:
        """Tie embedding and head after accelerate has replaced both under FSDP2."""
        if self.model.config.tie_word_embeddings:
            self.model.get_output_embeddings().weight = self.model.get_input_embeddings().weight

    @torch.no_grad()
    def check(self) -> None:
        """Run a few tokens; refuse an unsupported head, or sequences that depend on others in their row.

        On a CPU, rows are trees if the model supports them. No GPU has trained with these yet.
        """
        try:
            check_head(self.model)
            if self.model.device.type == "cpu":
                with suppress(IntegrationError):
                    check_rows_of(self.model, tree_row)
                    self.layout = tree_row
            if self.layout is packed_row:
                check_rows_of(self.model, packed_row)
        except Exception as error:  # of the model's own code
            if isinstance(error, InputError | torch.OutOfMemoryError):
                raise
            tried = "cannot be trained: its forward, tried on a few tokens in one row, raised"
            known = isinstance(error, IntegrationError)
            raise InputError(
                str(error) if known else f"{type(self.model).__name__} {tried} {error!r}"
            ) from error

    @contextmanager
    def checkpointed(self) -> Iterator[None]:
        """Enable checkpointing of layers in the body alone: generation needs its cache."""
        for layer in self._checkpointed:
            layer.training = torch.is_grad_enabled()
        yield
        for layer in self._checkpointed:
            layer.training = False

    def forward(
        self, prompts: Tokens, completions: Tokens, terms: Any = None, mask: Any = None
    ) -> gk.TokenLogprobs | gk.LossOutput:
        """Score completions, or return the loss of `gk.fused_linear_policy_loss` with ``terms``.

        Results are packed over the N completion tokens, as is ``mask``, a `SamplingMask`: log-probs and
        entropy are then those of the softmax over its tokens.
        """
        labels, given = torch.cat(list(completions)), terms or {}
        # before the model runs: the loss then needs no sync
        gk.prefetch(
            labels, given.get("loss_mask"), given.get("advantages"), cu_seqlens=given.get("cu_seqlens")
        )
        with self.checkpointed():
            hidden = hidden_states(self.model, prompts, completions, self.layout)
        head = lm_head_of(self.model)
        options = {"temperature": self.temperature, "return_entropy": True, **head.options()}
        if mask is not None:
            options["kept_mask"] = mask.bitmask(head.matrix.shape[0])
        if terms is None:
            return gk.linear_token_logprobs(hidden, head.weight, labels, **options)
        return gk.fused_linear_policy_loss(hidden, head.weight, labels, **options, **terms)


def make_policies(
    model: Any, tokenizer: Any, config: TrainConfig, accelerator: Any, needs_reference: bool
) -> tuple[Any, Policy, Any]:
    """Load the model if it is a path, refuse one that cannot be trained, and make policy and reference.

    Returns the transformers model, with adapters if configured; the policy around it; and the reference if
    needed: a frozen copy, or a function that calls the policy without its adapters.
    """
    adapted, attention = config.lora.rank > 0, config.attn_implementation
    if isinstance(model, str | Path):
        half = adapted and config.update.precision == "bf16"
        model = load_model(str(model), half=half, attention=attention, accelerator=accelerator)
    elif attention is not None:
        raise InputError(f"attn_implementation: got {attention!r} with a loaded model; expected None")
    has_adapters = hasattr(model, "peft_config")  # also of models that peft changed in place
    if has_adapters or not isinstance(model, transformers.PreTrainedModel):
        got = f"{type(model).__name__}{' with adapters' if has_adapters else ''}"
        instead = "merge_and_unload() of peft merges adapters, and lora.rank trains new ones"
        raise InputError(f"model: got {got}, expected a plain PreTrainedModel; {instead}")
    if not adapted:
        model = model.float()
    rows, padding = model.get_input_embeddings().weight.shape[0], padding_token_id(tokenizer)
    if padding >= rows:
        raise InputError(f"the tokenizer's padding token is {padding}, and the model embeds {rows} tokens")
    reference: Any = None
    if adapted:
        seed_everything(config.seed)
        wrapper = add_adapters(model, config.lora)
    elif not any(p.requires_grad for p in model.parameters()):
        none = f"{type(model).__name__} has no weights that require gradients: all are frozen"
        raise InputError(f"{none}; model.requires_grad_(True) trains them")
    elif needs_reference:
        reference = _prepared(copy.deepcopy(model), config, accelerator, frozen=True)
    policy = _prepared(model, config, accelerator)

    def without_adapters(*inputs: Any, **options: Any) -> Any:
        with wrapper.disable_adapter():
            return policy(*inputs, **options)

    return model, policy, without_adapters if adapted and needs_reference else reference


def frozen_policy(path: str, config: TrainConfig, accelerator: Any) -> Any:
    """Load, check and prepare a model that is never trained: a recipe's teacher."""
    half, attention = config.update.precision == "bf16", config.attn_implementation
    model = load_model(path, half=half, attention=attention, accelerator=accelerator)
    return _prepared(model, config, accelerator, frozen=True)


def _prepared(model: Any, config: TrainConfig, accelerator: Any, *, frozen: bool = False) -> Any:
    checkpointing = config.update.gradient_checkpointing and not frozen
    policy = Policy(model, temperature=config.rollout.temperature, checkpointing=checkpointing)
    if not accelerator.is_fsdp2:  # which moves the shards
        with accelerator.autocast():
            policy.to(accelerator.device).check()
    if frozen:
        policy.requires_grad_(False)
    for module in policy.modules() if frozen and accelerator.mixed_precision == "bf16" else ():
        # Store the weights that matmuls would round to bf16 in each call.
        linear = isinstance(module, nn.Linear) and module is not model.get_output_embeddings()
        if linear or accelerator.is_fsdp2:
            module.bfloat16()
    if accelerator.is_fsdp2:
        policy = fsdp2_prepare_model(accelerator, policy)
        register_fsdp_forward_method(policy, "check")
        policy.check()  # in the precision that FSDP sets
        reshard(policy)
    elif frozen:
        policy = accelerator.prepare_model(policy, evaluation_mode=True)
    return policy


@torch.no_grad()
def export_model(model: Any, tokenizer: Any, path: Path, *, dtype: torch.dtype | None = None) -> None:
    """Write a directory for ``from_pretrained``, with adapters merged into the weights.

    All processes must call; the first one gathers shards in its host memory and writes. Weights are as
    trained, or rounded to ``dtype``; the folder ``adapter`` has the trained adapters, for peft.
    """
    original = model.config
    model.config = copy.deepcopy(original)  # save_pretrained changes it
    try:
        weights, writes = exported_weights(model, dtype), process_state().is_main_process
        state = {name: weight.cpu() for name, weight in weights if writes}
        if writes:
            model.save_pretrained(path, state_dict=state, save_original_format=False)
            if dtype is not None:
                model.config.dtype = dtype
                model.config.save_pretrained(path)
            tokenizer.save_pretrained(path)
        if hasattr(model, "peft_config"):  # every process gathers the shards of adapters, which are small
            import peft

            named = peft.get_peft_model_state_dict(model, save_embedding_layers=False).items()
            adapters = {f"base_model.model.{name}": _whole(weight) for name, weight in named}
            if writes:
                model.peft_config["default"].save_pretrained(path / "adapter")
                save_file(adapters, path / "adapter" / "adapter_model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    finally:
        model.config = original


def _merged(model: Any, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Yield all weights, as FSDP2's shards, with adapters merged, by their names without adapters."""
    tied = set(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else set()
    for name, tensor in model.state_dict().items():
        plain, tensor = name.replace(".base_layer.", "."), tensor.detach()
        if ".lora_" in name or plain in tied:
            continue
        if name.endswith(".base_layer.weight"):
            module = model.get_submodule(name.removesuffix(".base_layer.weight"))
            tensor = tensor + module.get_delta_weight("default").to(tensor.dtype)
        yield plain, tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def exported_weights(model: Any, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the gathered weights of `export_model` on their device; all processes must iterate."""
    from transformers.core_model_loading import revert_weight_conversion

    for name, weight in revert_weight_conversion(model, dict(_merged(model, dtype))).items():
        yield name, _whole(weight)


def _whole(weight: Tensor) -> Tensor:
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


@torch.no_grad()
def weights_digest(model: Any) -> str:
    """Return 16 short hashes of a sample of the weights with adapters merged; all processes must call.

    The sample is rounded to bf16, so an export in bf16 has the digest of the trained weights.
    """
    rows = []
    for _, weight in _merged(model, None):
        whole = _whole(weight).flatten()
        values = whole[:: max(1, -(-len(whole) // 256))].bfloat16()
        rows.append(nn.functional.pad(values, (0, 256 - len(values))))
    table = torch.stack(rows).cpu().view(torch.int16).numpy()
    return " ".join(sha256(table[:, part::16].tobytes()).hexdigest()[:4] for part in range(16))


def same_weights(digest: str, other: str) -> bool:
    """Return whether most hashes are equal; a few differ if adapters were merged on another device."""
    return sum(map(eq, digest.split(), other.split())) > 8
