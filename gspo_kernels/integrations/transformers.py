"""transformers: a causal language model whose forward returns the policy loss and never builds logits.

``fuse_lm_head(model)`` patches one instance. The model's own forward still runs, whole, so that everything it
does before and after the head stays as it is; only the head's product is replaced while our arguments are
there. The head is called through its module, where FSDP2 and ZeRO-3 gather its weight.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gspo_kernels import checks
from gspo_kernels.integrations.errors import IntegrationError, require_package
from gspo_kernels.layout import segment_ids
from gspo_kernels.logprobs import linear_token_logprobs
from gspo_kernels.losses import fused_linear_policy_loss
from gspo_kernels.ops.library import checked_values

VERSIONS = ">=5.0,<6"
"""The versions of transformers that this adapter serves."""

_OF_THE_HEAD = {"hidden", "weight", "labels", "bias", "logit_scale", "softcap"}
_SCORING = {*inspect.signature(linear_token_logprobs).parameters} - _OF_THE_HEAD | {"cu_seqlens"}
_POLICY = {*inspect.signature(fused_linear_policy_loss).parameters} - _OF_THE_HEAD | {"router_aux_loss_coef"}
_OURS = _SCORING | _POLICY | {"return_logprobs"}


@dataclass(frozen=True)
class LMHead:
    """A language model's head, as arguments of the linear entries.

    Attributes:
        weight: [V, H], the parameter itself (a DTensor where it is sharded).
        bias: [V] or None.
        logit_scale: factor on the raw logits.
        softcap: bound of the tanh soft-capping, or None.
    """

    weight: Tensor
    bias: Tensor | None
    logit_scale: float
    softcap: float | None

    def options(self) -> dict[str, Any]:
        """The keyword arguments beside hidden states and weight."""
        return {"bias": self.bias, "logit_scale": self.logit_scale, "softcap": self.softcap}

    def transform(self, logits: Tensor) -> Tensor:
        """From the head's product to the logits, at temperature 1."""
        logits = self.logit_scale * logits
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def lm_head_of(model: Any) -> LMHead:
    """Find the head of a causal language model, and what its config says about the logits.

    ``final_logit_softcapping`` (Gemma) bounds logits, ``logit_scale`` (Cohere) multiplies and
    ``logits_scaling`` (Granite) divides them. Adapters and data-parallel wrappers are looked through.

    Raises:
        IntegrationError: there is no linear head, it carries an adapter, or it is quantized.
    """
    model = causal_lm_of(model)
    head = _head_module(model)
    scale, softcap = _logit_transform(model.config.get_text_config())
    return LMHead(head.weight, getattr(head, "bias", None), scale, softcap)


def causal_lm_of(model: Any) -> Any:
    """The transformers model inside PEFT and data-parallel wrappers."""
    while isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        for name, config in model.peft_config.items():
            if getattr(config, "is_prompt_learning", False):
                raise IntegrationError(
                    f"model: its adapter {name!r} ({type(config).__name__}) puts virtual tokens before the "
                    "prompt, so that labels no longer lie at their positions"
                )
        model = model.get_base_model()
    return model


def _head_module(model: Any) -> Any:
    name = type(model).__name__
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    weight = getattr(head, "weight", None)
    if weight is None or getattr(model.config, "is_encoder_decoder", False):
        raise IntegrationError(f"model: {name} is no causal language model with a linear lm_head")
    tuners = sys.modules.get("peft.tuners.tuners_utils")  # an adapter can't be there if it was never imported
    if tuners is not None and isinstance(head, tuners.BaseTunerLayer):
        raise IntegrationError(
            f"model: the lm_head of {name} carries an adapter ({type(head).__name__}), whose product is not "
            "part of its weight; leave lm_head out of target_modules, or train it whole with "
            "modules_to_save=['lm_head']"
        )
    if not weight.is_floating_point() or (weight.dim() != 2 and weight.numel()):
        raise IntegrationError(
            f"model: the lm_head of {name} holds a {weight.dtype} weight of shape {tuple(weight.shape)}, "
            "expected [V, H] in floating point; leave it out of quantization"
        )
    return head


def _logit_transform(config: Any) -> tuple[float, float | None]:
    """(factor, softcap or None), from the names that the models of the field use."""
    scale = 1.0
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if getattr(config, name, None) is not None:
            scale = float(getattr(config, name))
    scaling = getattr(config, "logits_scaling", None)
    if scaling is not None and config.model_type != "minicpm3":  # there it divides the hidden states
        scale *= float(scaling) if config.model_type == "hyperclovax" else 1 / float(scaling)
    softcap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
    return scale, float(softcap) if softcap else None


@functools.cache
def _output_class() -> Any:
    from transformers.utils import ModelOutput

    @dataclass
    class FusedLMOutput(ModelOutput):  # type: ignore[misc]
        """What a fused forward returns; fields that were not computed are None.

        Attributes:
            loss: 0-d, carries the gradient; the policy loss plus the weighted MoE auxiliary loss.
            logprobs: the labels' shape, nats; differentiable if asked for with ``return_logprobs=True``,
                otherwise detached. Entry t belongs to the token that position t predicts.
            entropy: as ``logprobs``.
            metrics: detached 0-d tensors by name, of the policy loss.
            aux_loss: the MoE auxiliary loss, unweighted, where the model computes one.
            logits: always None.
            hidden_states, attentions, router_logits, past_key_values: as the model's own forward.
        """

        loss: Tensor | None = None
        logprobs: Tensor | None = None
        entropy: Tensor | None = None
        metrics: dict[str, Tensor] | None = None
        aux_loss: Tensor | None = None
        logits: Tensor | None = None
        past_key_values: Any = None
        hidden_states: Any = None
        attentions: Any = None
        router_logits: Any = None

    FusedLMOutput.__qualname__ = "FusedLMOutput"
    return FusedLMOutput


def __getattr__(name: str) -> Any:
    if name == "FusedLMOutput":
        return _output_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def fuse_lm_head(model: Any, *, fp32_head: bool = False) -> Any:
    """Let ``model(..., labels=, advantages=, ...)`` return the policy loss without building logits.

    Patches ``forward`` of this instance (of the causal LM inside PEFT and DDP wrappers); a second call
    changes nothing but ``fp32_head``. Calls without the arguments below run the model's own forward.

    A call with ``return_logprobs=True`` scores: it takes the options of ``linear_token_logprobs`` and
    ``cu_seqlens``, and returns differentiable ``logprobs`` (and ``entropy`` with ``return_entropy=True``).
    A call with ``advantages=`` (None for objectives without) is a policy call: it needs ``old_logprobs=`` too
    (None: on-policy), takes every term and option of ``fused_linear_policy_loss``, and
    ``router_aux_loss_coef``, the weight of the MoE auxiliary loss where it is not the model's own.

    Both need exactly one of ``labels`` and ``shift_labels``, int64 or int32, [B, T] like ``input_ids`` (with
    ``cu_seqlens`` [1, N]): ``shift_labels[t]`` is the token that position t predicts; ``labels[t]`` is the
    token at position t, and is shifted here. Whatever is per token (``old_logprobs``, ``ref_logprobs``, the
    returned ``logprobs``, ...) has the labels' shape and belongs at t to the token that position t predicts,
    in both cases. ``loss_mask`` goes with ``shift_labels`` only: in ``labels`` mark tokens by
    ``ignore_index``.

    Packed: one row [1, N] with ``cu_seqlens`` and no 2-D ``attention_mask``; ``position_ids`` restart (and
    are made where they are not given), which is how transformers keeps sequences apart.

    Args:
        model: a transformers causal language model, adapters allowed (but not on the lm_head itself).
        fp32_head: project in fp32 outside autocast, as TRL's ``cast_lm_head_to_fp32`` does.

    Returns:
        The same model.

    Raises:
        IntegrationError: transformers is missing or unsupported, or the head is not understood; the first
            fused call compares the head and what follows it with the model's own.
    """
    require_package("transformers", VERSIONS)
    checks.flag("fp32_head", fp32_head)
    inner = causal_lm_of(model)
    _head_module(inner)
    if "_gspo_fused" in inner.__dict__:
        inner._gspo_fused.fp32_head = fp32_head
        return model
    own = type(inner).forward
    taken = _OURS & {*inspect.signature(own).parameters}
    if taken:
        raise IntegrationError(
            f"model: {type(inner).__name__}.forward has an argument {min(taken)!r} already"
        )

    @functools.wraps(own)  # generate() reads the signature
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _forward(self, args, kwargs)

    earlier = inner.__dict__.get("forward")
    inner.forward = types.MethodType(forward, inner)
    inner._gspo_fused = _Fused(earlier, inner.forward, fp32_head)
    return model


def unfuse_lm_head(model: Any) -> Any:
    """Undo ``fuse_lm_head``; a model that is not fused stays as it is. Returns the model.

    Raises:
        IntegrationError: something else has patched ``forward`` since.
    """
    inner = causal_lm_of(model)
    fused = inner.__dict__.get("_gspo_fused")
    if fused is None:
        return model
    if inner.__dict__.get("forward") != fused.patched:
        raise IntegrationError(
            f"model: {type(inner).__name__}.forward was patched again after fuse_lm_head; undo that first"
        )
    del inner._gspo_fused, inner.forward
    if fused.earlier is not None:
        inner.forward = fused.earlier
    return model


@dataclass
class _Fused:
    """What a patched instance remembers.

    Attributes:
        earlier: the ``forward`` that the instance itself had before, or None for its class's.
        patched: the one that it has now.
        fp32_head: see ``fuse_lm_head``.
        checked: the logit transform that was compared with the model's own, or None.
    """

    earlier: Any
    patched: Any
    fp32_head: bool
    checked: tuple[float, float | None] | None = None


def _forward(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The model's own forward, with the head's product replaced if our arguments ask for it."""
    fused = model._gspo_fused
    own = fused.earlier or functools.partial(type(model).forward, model)
    ours = {name: kwargs[name] for name in kwargs if name in _OURS}
    scores = checks.flag("return_logprobs", ours.pop("return_logprobs", False))
    kwargs.pop("return_logprobs", None)
    if not scores and not ours.keys() - {"ignore_index"}:  # transformers' own loss takes that too
        return own(*args, **kwargs)
    for name in ours:
        del kwargs[name]
    _check_names(ours, scores)
    aux_weight = ours.pop("router_aux_loss_coef", None)
    labels = _labels_and_layout(model, ours, kwargs)
    call = _HeadCall(_head_module(model), lm_head_of(model), fused, labels, ours, scores)
    with call.in_place_of_the_product():
        outputs = own(*args, **kwargs)
    call.check_logits(outputs.logits)
    loss, logprobs, entropy = call.result()
    aux_loss = getattr(outputs, "aux_loss", None)
    if loss is not None:
        loss = _with_aux_loss(model, loss, aux_loss, aux_weight)
    return _output_class()(
        loss=loss,
        logprobs=logprobs,
        entropy=entropy,
        metrics=call.metrics,
        aux_loss=aux_loss,
        **{
            name: getattr(outputs, name, None)
            for name in ("past_key_values", "hidden_states", "attentions", "router_logits")
        },
    )


def _check_names(ours: dict[str, Any], scores: bool) -> None:
    """Refuse what is neither a scoring call nor a policy call."""
    if scores:
        wrong = ours.keys() - _SCORING
        if wrong:
            raise IntegrationError(
                f"{min(wrong)}: goes with a policy call (advantages=), not with return_logprobs=True"
            )
        return
    for name in ("advantages", "old_logprobs"):
        if name not in ours:
            raise IntegrationError(
                f"{name}: missing beside {min(ours)!r}; a policy call needs advantages= (None where the "
                "objective takes none) and old_logprobs= (None for on-policy), scoring needs "
                "return_logprobs=True"
            )
    for name, value in ours.items():
        if (
            isinstance(value, Tensor)
            and value.dtype in (torch.float16, torch.bfloat16)
            and name != "loss_mask"
        ):
            raise IntegrationError(
                f"{name}: arrives as {value.dtype}, too coarse for a policy ratio; pass fp32, and if a "
                "wrapper rounds it (FSDP2: MixedPrecisionPolicy with output_dtype or cast_forward_inputs) "
                "turn that off"
            )


def _labels_and_layout(model: Any, ours: dict[str, Any], kwargs: dict[str, Any]) -> Tensor:
    """Labels as the losses take them; brings ``ours`` into their layout, and ``kwargs`` into ours."""
    labels, shifted = kwargs.pop("labels", None), kwargs.pop("shift_labels", None)
    if (labels is None) == (shifted is None):
        raise IntegrationError(
            "labels, shift_labels: expected exactly one of them, as a keyword: labels[t] is the token at "
            "position t, shift_labels[t] the one that position t predicts"
        )
    name, given = ("labels", labels) if shifted is None else ("shift_labels", shifted)
    checks.tensor(name, given, None, "[B, T] like input_ids", None)
    if given.ndim != 2:
        raise IntegrationError(f"{name}: got shape {tuple(given.shape)}, expected [B, T] like input_ids")
    cu_seqlens = ours.get("cu_seqlens")
    if labels is not None and ours.get("loss_mask") is not None:
        raise IntegrationError(
            "loss_mask: belongs to the tokens that positions predict and labels do not; mark tokens that do "
            "not count by ignore_index in labels, or pass shift_labels"
        )
    accepts = inspect.signature(type(model).forward).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in accepts.values())
    for name, value in (("use_cache", False), ("return_dict", True)):
        if kwargs.get(name) is None and (anything or name in accepts):
            kwargs[name] = value
    if kwargs.get("return_dict") is False:
        raise IntegrationError("return_dict: a fused call returns named outputs only, got False")
    if cu_seqlens is None:
        _refuse_packed_positions(kwargs)
        return given if labels is None else _shift(given, None, ours.get("ignore_index", -100))
    _lay_out_packed(model, given, ours, kwargs, "position_ids" in accepts)
    return (given if labels is None else _shift(given, cu_seqlens, ours.get("ignore_index", -100))).squeeze(0)


def _shift(labels: Tensor, cu_seqlens: Tensor | None, ignore_index: int) -> Tensor:
    """``labels[t]``, the token at position t, to the token that position t predicts."""
    shifted = labels.roll(-1, dims=1)
    shifted[:, -1] = ignore_index
    if (
        cu_seqlens is not None
    ):  # the last of a sequence predicts nothing; -1 before an empty first one is that
        shifted[0, cu_seqlens[1:].long() - 1] = ignore_index
    return shifted


def _refuse_packed_positions(kwargs: dict[str, Any]) -> None:
    """Without ``cu_seqlens`` a row is one sequence, so its positions may not restart."""
    positions = kwargs.get("position_ids")
    if not isinstance(positions, Tensor) or kwargs.get("attention_mask") is not None:
        return
    if checked_values(positions.device) and bool((positions.diff(dim=-1) < 0).any()):
        raise IntegrationError(
            "position_ids: restart within a row, which then holds several sequences; pass cu_seqlens with "
            "one row [1, N]"
        )


def _lay_out_packed(
    model: Any, labels: Tensor, ours: dict[str, Any], kwargs: dict[str, Any], takes_positions: bool
) -> None:
    """Check and complete a packed call; per-token terms [1, N] become [N]."""
    name, cu_seqlens = type(model).__name__, ours["cu_seqlens"]
    if labels.shape[0] != 1:
        raise IntegrationError(
            f"labels: got shape {tuple(labels.shape)}, expected one row [1, N] with cu_seqlens"
        )
    layers = getattr(model.config.get_text_config(), "layer_types", None) or ()
    if not takes_positions or getattr(model, "_is_stateful", False) or "linear_attention" in layers:
        raise IntegrationError(
            f"cu_seqlens: {name} carries a state from one packed sequence to the next; pass padded rows"
        )
    mask = kwargs.get("attention_mask")
    if (mask is not None and mask.ndim == 2) or kwargs["use_cache"]:
        raise IntegrationError(
            "cu_seqlens: with a 2-D attention_mask or use_cache=True packed sequences attend to each other; "
            "pass neither"
        )
    checks.layout("labels", labels.squeeze(0), cu_seqlens)
    N = labels.shape[1]
    segments = segment_ids(cu_seqlens, N)
    positions = (torch.arange(N, device=labels.device) - cu_seqlens.long()[segments]).unsqueeze(0)
    if kwargs.get("position_ids") is None:
        kwargs["position_ids"] = positions
    elif mask is None and checked_values(labels.device):
        given = kwargs["position_ids"]
        if given.shape != positions.shape or bool(((given.diff() == 1) != (segments.diff() == 0)).any()):
            raise IntegrationError("position_ids: do not restart where cu_seqlens says that sequences begin")
    for term, value in ours.items():
        if isinstance(value, Tensor) and value.shape == labels.shape:
            ours[term] = value.squeeze(0)
    if "advantages" not in ours and isinstance(ours.get("temperature"), Tensor):
        checks.floats(
            "temperature", ours["temperature"], (cu_seqlens.shape[0] - 1,), "one per sequence", None
        )
        ours["temperature"] = ours["temperature"][segments]


class _HeadCall:
    """One fused call: takes the place of the head's product inside the model's own forward.

    The head's module returns the loss or log-probs, so that hooks which gather its weight (FSDP2, ZeRO-3) see
    them and their gradient. The model's forward then gets one row of made-up logits instead, and what it
    makes of them is compared with the transform that the loss applied.
    """

    def __init__(
        self, head: Any, lm_head: LMHead, fused: _Fused, labels: Tensor, options: dict[str, Any], scores: bool
    ) -> None:
        self.head, self.lm_head, self.fused, self.labels, self.scores = head, lm_head, fused, labels, scores
        self.packed = options.get("cu_seqlens") is not None
        self.options = {n: v for n, v in options.items() if not (scores and n == "cu_seqlens")}
        self.own_forward = head.forward
        self.tensors: list[tuple[Tensor, ...]] = []
        self.metrics: dict[str, Tensor] | None = None
        self.probe: Tensor | None = None

    @contextmanager
    def in_place_of_the_product(self) -> Iterator[None]:
        """Patch the head for the time of one forward."""
        head = self.head
        before = head.__dict__.get("forward")
        hooks = head._forward_pre_hooks, head._forward_hooks
        if getattr(head, "_distribute_module_applied", False):
            # Tensor parallelism: its hooks would make DTensors of what is no logits
            head._forward_pre_hooks, head._forward_hooks = OrderedDict(), OrderedDict()
        head.forward = self._project
        handle = head.register_forward_hook(self._keep)
        try:
            yield
        finally:
            handle.remove()
            head._forward_pre_hooks, head._forward_hooks = hooks
            del head.forward
            if before is not None:
                head.forward = before

    def _project(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """What the head's module returns in this call: the tensors that carry gradients, in order."""
        hidden, weight = _whole(hidden), _whole(self.head.weight)
        bias = getattr(self.head, "bias", None)
        bias = None if bias is None else _whole(bias)
        if weight.dim() != 2 or weight.numel() == 0:
            raise IntegrationError(
                f"lm_head: its weight has shape {tuple(weight.shape)} inside the forward, expected [V, H]; "
                "sharded weights are gathered by hooks, so call the outermost module itself"
            )
        if self.fused.checked is None:
            self._check_product(hidden, weight, bias)
        self.probe = torch.linspace(-30.0, 30.0, weight.shape[0], device=hidden.device).view(1, 1, -1)
        if self.packed:
            hidden = hidden.squeeze(0)
        device = hidden.device.type
        autocast = torch.is_autocast_enabled(device) and not self.fused.fp32_head
        if not autocast and (self.fused.fp32_head or weight.dtype == torch.float32):
            hidden, weight = hidden.float(), weight.float()
            bias = None if bias is None else bias.float()
        options = self.lm_head.options() | {"bias": bias} | self.options
        with nullcontext() if autocast else torch.autocast(device, enabled=False):
            if self.scores:
                scored = linear_token_logprobs(hidden, weight, self.labels, **options)
                return tuple(x for x in scored if x is not None)
            loss, logprobs, entropy, self.metrics = fused_linear_policy_loss(
                hidden, weight, self.labels, **options
            )
        return tuple(x for x in (loss, logprobs, entropy) if x is not None)

    def _check_product(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Compare the module's own product of one row with that of its weight."""
        if weight is not self.head.weight:
            return  # gathered here: its own forward can't run on a plain row
        row = torch.linspace(-1, 1, weight.shape[1], device=hidden.device, dtype=hidden.dtype).view(1, 1, -1)
        theirs = self.own_forward(row).detach().float()
        ours = nn.functional.linear(row.to(weight.dtype), weight, bias).detach().float()
        if theirs.shape != ours.shape or not (theirs - ours).abs().max() <= ours.abs().max() / 64:
            raise IntegrationError(
                f"model: its lm_head ({type(self.head).__name__}) is not the product with its weight and bias"
            )

    def _keep(self, module: Any, inputs: Any, output: tuple[Tensor, ...]) -> Tensor:
        """The last hook of the head: takes what others have made of its output."""
        self.tensors.append(output)
        assert self.probe is not None
        return self.probe

    def check_logits(self, logits: Tensor) -> None:
        """Compare what the model makes of its head's output with the transform that the loss applied."""
        if len(self.tensors) != 1:
            raise IntegrationError(
                f"model: its forward called the lm_head {len(self.tensors)} times, expected once"
            )
        transform = self.lm_head.logit_scale, self.lm_head.softcap
        if self.fused.checked == transform:
            return
        assert self.probe is not None
        expected = self.lm_head.transform(self.probe.double())
        same = logits.shape == expected.shape
        if not same or not (logits - expected).abs().max() <= 1e-4 * expected.abs().max():
            raise IntegrationError(
                "model: its forward changes the logits after the lm_head in a way that is not understood: "
                f"logit_scale={transform[0]:g} and softcap={transform[1]}, read from its config, do not "
                "describe it"
            )
        self.fused.checked = transform

    def result(self) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """(loss or None, log-probs, entropy or None), per token in the layout of the caller."""
        loss, *per_token = ((None,) if self.scores else ()) + self.tensors[0]
        shaped = [x.unsqueeze(0) if self.packed else x for x in per_token if x is not None]
        if any(x.dtype in (torch.float16, torch.bfloat16) for x in shaped):
            raise IntegrationError(
                "lm_head: a wrapper of the lm_head rounds its output (FSDP2: MixedPrecisionPolicy with "
                "output_dtype); turn that off, log-probs need fp32"
            )
        return loss, shaped[0], shaped[1] if len(shaped) > 1 else None


def _whole(tensor: Any) -> Tensor:
    """A DTensor's whole; every rank then computes the same loss, so its gradient is a replicated one."""
    if not hasattr(tensor, "full_tensor"):
        assert isinstance(tensor, Tensor)
        return tensor
    if tensor.device_mesh.ndim > 1:
        raise IntegrationError(
            f"lm_head: a DTensor over {tensor.device_mesh.ndim} mesh dimensions reaches its product, "
            "expected tensor parallelism alone"
        )
    whole: Tensor = tensor.full_tensor()
    return whole


def _with_aux_loss(model: Any, loss: Tensor, aux_loss: Tensor | None, weight: float | None) -> Tensor:
    """Add the MoE auxiliary loss as the model's own forward does."""
    if aux_loss is None:
        if weight:
            raise IntegrationError(
                "router_aux_loss_coef: the forward computed no auxiliary loss; set output_router_logits=True"
            )
        return loss
    text_config = model.config.get_text_config()
    for owner, name in (
        (model, "router_aux_loss_coef"),
        (model, "aux_loss_coef"),
        (text_config, "router_aux_loss_coef"),
    ):
        weight = getattr(owner, name, None) if weight is None else weight
    if weight is None:
        raise IntegrationError(
            f"router_aux_loss_coef: {type(model).__name__} computes an auxiliary loss but names no weight "
            "for it"
        )
    return loss + weight * aux_loss.to(loss.device)
