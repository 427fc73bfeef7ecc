"""transformers: a causal language model whose forward returns the policy loss and never builds logits.

``fuse_lm_head(model)`` patches one instance. The model's own forward still runs, whole, so that everything it
does before and after the head stays as it is; only the head's product is replaced while our arguments are
there. The head is called through its module, where FSDP2 and ZeRO-3 gather its weight.
"""

from __future__ import annotations

import functools
import inspect
import types
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gspo_kernels import checks
from gspo_kernels.integrations.errors import IntegrationError, require_package
from gspo_kernels.integrations.head_call import LOW_PRECISION, HeadCall
from gspo_kernels.integrations.lm_head import (
    LMHead,
    causal_lm_of,
    check_causal,
    head_module,
    lm_head_of,
    virtual_tokens_of,
)
from gspo_kernels.integrations.packed_rows import lay_out_packed, score_packed, shares_sequences
from gspo_kernels.logprobs import linear_token_logprobs
from gspo_kernels.losses import fused_linear_policy_loss
from gspo_kernels.ops.library import checked_values

__all__ = ["FusedLMOutput", "IntegrationError", "LMHead", "fuse_lm_head", "lm_head_of", "unfuse_lm_head"]  # noqa: F822

VERSIONS = ">=5.0,<6"
"""The versions of transformers that this adapter serves."""

_OF_THE_HEAD = {"hidden", "weight", "labels", "bias", "logit_scale", "softcap"}
_SCORING = {*inspect.signature(linear_token_logprobs).parameters} - _OF_THE_HEAD - {"parallel"} | {
    "cu_seqlens"
}
_POLICY = {*inspect.signature(fused_linear_policy_loss).parameters} - _OF_THE_HEAD | {"router_aux_loss_coef"}
_OURS = _SCORING | _POLICY | {"return_logprobs"}


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

    This patches ``forward`` of the instance (of the causal LM inside PEFT and DDP wrappers); a second call
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

    Through PEFT's prompt learning pass ``shift_labels`` and padded rows: labels and whatever is per token lie
    at the model's own tokens, and the virtual ones before them have none.

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
    head_module(inner)
    check_causal(inner)
    if "_gspo_fused" in inner.__dict__:
        inner._gspo_fused.fp32_head = fp32_head
        inner._gspo_fused.virtual_tokens |= virtual_tokens_of(model)
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
    inner._gspo_fused = _Fused(earlier, inner.forward, fp32_head, virtual_tokens_of(model))
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
        virtual_tokens: how many each prompt-learning adapter around the model puts before its tokens.
        head_checked: the logit transform that was found to be the model's own, or None.
        packing_checked: packed sequences were found not to see each other.
    """

    earlier: Any
    patched: Any
    fp32_head: bool
    virtual_tokens: set[int]
    head_checked: tuple[float, float | None] | None = None
    packing_checked: bool = False


def _forward(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the model's own forward; for our arguments with the loss in place of the head's product."""
    fused = model._gspo_fused
    own = fused.earlier or functools.partial(type(model).forward, model)
    ours = {name: kwargs[name] for name in kwargs if name in _OURS}
    kwargs = {name: value for name, value in kwargs.items() if name != "return_logprobs"}
    scores = checks.flag("return_logprobs", ours.pop("return_logprobs", False))
    if not scores and not ours.keys() - {"ignore_index"}:  # transformers' own loss takes that one too
        return own(*args, **kwargs)
    for name in ours:
        del kwargs[name]
    _check_terms(ours, scores)
    aux_weight = ours.pop("router_aux_loss_coef", None)
    virtual = _virtual_tokens(fused, ours, kwargs)
    labels = _labels(ours, kwargs)
    if virtual:
        labels = _lengthen(virtual, labels, ours)
    packed = ours.get("cu_seqlens") is not None
    _complete(model, kwargs, packed, shared=shares_sequences(ours))
    if packed:
        labels = lay_out_packed(model, own, labels, ours, kwargs)
    if packed and scores:
        score_packed(ours, labels)
    lm_head = lm_head_of(model)
    transform = lm_head.logit_scale, lm_head.softcap
    call = HeadCall(
        head_module(model),
        lm_head,
        labels,
        ours,
        scores=scores,
        fp32_head=fused.fp32_head,
        compare=fused.head_checked != transform,
    )
    outputs, loss, *per_token = call.run(lambda: own(*args, **kwargs))
    fused.head_checked = transform
    if packed:
        per_token = [None if x is None else x.unsqueeze(0) for x in per_token]
    logprobs, entropy = (None if x is None else x[:, virtual:] for x in per_token)
    aux_loss = getattr(outputs, "aux_loss", None)
    others = ("past_key_values", "hidden_states", "attentions", "router_logits")
    return _output_class()(
        loss=None if loss is None else _with_aux_loss(model, loss, aux_loss, aux_weight),
        logprobs=logprobs,
        entropy=entropy,
        metrics=call.metrics,
        aux_loss=aux_loss,
        **{name: getattr(outputs, name, None) for name in others},
    )


def _check_terms(ours: dict[str, Any], scores: bool) -> None:
    """Refuse what is neither a scoring call nor a policy call, and what was rounded on its way."""
    if scores and ours.keys() - _SCORING:
        raise IntegrationError(
            f"{min(ours.keys() - _SCORING)}: goes with a policy call (advantages=), not with "
            "return_logprobs=True"
        )
    for name in () if scores else ("advantages", "old_logprobs"):
        if name not in ours:
            raise IntegrationError(
                f"{name}: missing beside {min(ours)!r}; a policy call needs advantages= (None where the "
                "objective takes none) and old_logprobs= (None for on-policy), scoring needs "
                "return_logprobs=True"
            )
    for name, value in ours.items():
        if isinstance(value, Tensor) and value.dtype in LOW_PRECISION and name != "loss_mask":
            raise IntegrationError(
                f"{name}: arrives as {value.dtype}, too coarse for a policy ratio; pass fp32, and if a "
                "wrapper rounds it (FSDP2: MixedPrecisionPolicy with output_dtype or cast_forward_inputs) "
                "turn that off"
            )


def _virtual_tokens(fused: _Fused, ours: dict[str, Any], kwargs: dict[str, Any]) -> int:
    """How many positions PEFT's prompt learning has put before the labels' own."""
    embeddings, shifted = kwargs.get("inputs_embeds"), kwargs.get("shift_labels")
    prefixed = kwargs.get("past_key_values") is not None
    if not fused.virtual_tokens or (embeddings is None and not prefixed):
        return 0
    if ours.get("cu_seqlens") is not None:
        raise IntegrationError(
            "cu_seqlens: the virtual tokens of prompt learning come once for each row, so only the first of "
            "the packed sequences would have its own; pass padded rows"
        )
    if embeddings is None:  # prefix tuning: they are in the cache
        return 0
    if not isinstance(shifted, Tensor) or shifted.ndim != 2:
        raise IntegrationError(
            "labels: PEFT puts virtual tokens before the prompt, and as many entries before labels, but not "
            "before what else is per token; pass shift_labels"
        )
    more = embeddings.shape[1] - shifted.shape[1]
    return more if more in fused.virtual_tokens else 0


def _lengthen(virtual: int, labels: Tensor, ours: dict[str, Any]) -> Tensor:
    """Put positions that don't count before the labels and, in place, before every term per token."""
    for name, value in ours.items():
        if isinstance(value, Tensor) and value.shape == labels.shape:
            ours[name] = nn.functional.pad(value, (virtual, 0))
    return nn.functional.pad(labels, (virtual, 0), value=ours.get("ignore_index", -100))


def _labels(ours: dict[str, Any], kwargs: dict[str, Any]) -> Tensor:
    """[B, T], or [1, N] with ``cu_seqlens``: the token that each position predicts."""
    given = {name: kwargs.pop(name) for name in ("labels", "shift_labels") if kwargs.get(name) is not None}
    kwargs.pop("labels", None)  # PEFT passes labels=None
    kwargs.pop("shift_labels", None)
    if len(given) != 1:
        raise IntegrationError(
            "labels, shift_labels: expected exactly one of them, as a keyword: labels[t] is the token at "
            "position t, shift_labels[t] the one that position t predicts"
        )
    name, labels = next(iter(given.items()))
    packed = ours.get("cu_seqlens") is not None
    labels = checks.tensor(name, labels, None, "[B, T] like input_ids", None)
    checks.dtype(name, labels, checks.INTEGERS)
    if labels.ndim != 2 or (packed and labels.shape[0] != 1):
        expected = "[1, N] with cu_seqlens" if packed else "[B, T] like input_ids"
        raise IntegrationError(f"{name}: got shape {tuple(labels.shape)}, expected {expected}")
    if packed:
        checks.layout(name, labels.squeeze(0), ours["cu_seqlens"])
    if name == "shift_labels":
        return labels
    if shares_sequences(ours):
        raise IntegrationError("labels: the next one may lie on another rank of cp_group; pass shift_labels")
    if ours.get("loss_mask") is not None:
        raise IntegrationError(
            "loss_mask: belongs to the tokens that positions predict, and labels do not; mark tokens that do "
            "not count by ignore_index in labels, or pass shift_labels"
        )
    ignore_index = ours.get("ignore_index", -100)
    shifted = labels.roll(-1, dims=1)
    shifted[:, -1:] = ignore_index
    if packed and labels.shape[1]:  # before an empty first sequence this is -1, the last position of the row
        shifted[0, ours["cu_seqlens"][1:].long() - 1] = ignore_index
    return shifted


def _complete(model: Any, kwargs: dict[str, Any], packed: bool, shared: bool) -> None:
    """Arguments that every fused call gives to the model's own forward; ``shared``: other ranks have tokens
    of the same sequences.
    """
    accepts = inspect.signature(type(model).forward).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in accepts.values())
    for name, value in (("use_cache", False), ("return_dict", True)):
        if kwargs.get(name) is None and (anything or name in accepts):
            kwargs[name] = value
    if kwargs.get("return_dict") is False:
        raise IntegrationError("return_dict: a fused call returns named outputs, got False")
    keep = kwargs.get("logits_to_keep", 0)
    if isinstance(keep, Tensor) or keep:
        raise IntegrationError("logits_to_keep: a fused call scores all positions; mark others in the labels")
    positions = kwargs.get("position_ids")
    if shared and positions is None:
        raise IntegrationError(
            "position_ids: got None, expected where in their sequences this rank's tokens are, of which "
            "cp_group has the others"
        )
    if packed or positions is None or kwargs.get("attention_mask") is not None:
        return
    if checked_values(positions.device) and bool((positions.diff() < 0).any()):
        raise IntegrationError(
            "position_ids: restart within a row, which then holds several sequences; pass cu_seqlens with "
            "one row [1, N]"
        )


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
