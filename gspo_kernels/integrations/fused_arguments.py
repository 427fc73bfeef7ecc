"""The arguments of a fused call: what belongs to the loss, labels, and what the model's own forward gets."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

from gspo_kernels.core import checks
from gspo_kernels.core.layout import queued
from gspo_kernels.integrations.errors import IntegrationError
from gspo_kernels.logprobs import linear_token_logprobs
from gspo_kernels.losses import fused_linear_policy_loss

LOW_PRECISION = (torch.float16, torch.bfloat16)
_OF_THE_HEAD = {"hidden", "weight", "labels", "bias", "logit_scale", "softcap"}
SCORING = {*inspect.signature(linear_token_logprobs).parameters, "cu_seqlens"} - _OF_THE_HEAD - {"parallel"}
_POLICY = {*inspect.signature(fused_linear_policy_loss).parameters, "router_aux_loss_coef"} - _OF_THE_HEAD
FUSED = frozenset(SCORING | _POLICY | {"return_logprobs"})
"""Arguments that only a fused call has."""

signature = functools.lru_cache(inspect.signature)


def named(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of a call by name; ``forward`` is the function of the model's class.

    Raises:
        TypeError: an argument is passed twice, or has no name.
    """
    names = [p.name for p in signature(forward).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD][1:]
    if len(args) > len(names):
        raise TypeError(f"forward: got {len(args)} arguments by position, expected at most {len(names)}")
    if twice := kwargs.keys() & {*names[: len(args)]}:
        raise TypeError(f"{min(twice)}: got it by position and by name, expected it once")
    return {**dict(zip(names, args, strict=False)), **kwargs}


def check_options(options: dict[str, Any], scoring: bool) -> None:
    """Raise IntegrationError for options that don't fit the call, and for rounded tensors."""
    if scoring and options.keys() - SCORING:
        raise IntegrationError(
            f"{min(options.keys() - SCORING)}: goes with a policy call (advantages=), not with "
            "return_logprobs=True"
        )
    for name in () if scoring else ("advantages", "old_logprobs"):
        if name not in options:
            raise IntegrationError(
                f"{name}: missing, while {min(options)!r} is passed; a policy call needs advantages= (None "
                "where the objective takes none) and old_logprobs= (None for on-policy), scoring needs "
                "return_logprobs=True"
            )
    for name, value in options.items():
        if isinstance(value, Tensor) and value.dtype in LOW_PRECISION and name != "loss_mask":
            raise IntegrationError(
                f"{name}: arrives as {value.dtype}, too coarse for a policy ratio; pass fp32, and if a "
                "wrapper rounds it (FSDP2: MixedPrecisionPolicy with output_dtype or cast_forward_inputs) "
                "turn that off"
            )


def take_labels(options: dict[str, Any], kwargs: dict[str, Any], shared: bool) -> Tensor:
    """Return the token that each position predicts: [B, T], or [1, N] with ``cu_seqlens``."""
    passed = {name: kwargs.pop(name, None) for name in ("labels", "shift_labels")}  # PEFT passes None
    passed = {name: value for name, value in passed.items() if value is not None}
    if len(passed) != 1:
        raise IntegrationError(
            "labels, shift_labels: expected exactly one of them: labels[t] is the token at "
            "position t, shift_labels[t] the one that position t predicts"
        )
    ((name, value),) = passed.items()
    cu_seqlens = options.get("cu_seqlens")
    labels = checks.tensor(name, value, None, "[B, T] like input_ids", None, checks.INTEGERS)
    if labels.ndim != 2 or (cu_seqlens is not None and labels.shape[0] != 1):
        expected = "[B, T] like input_ids" if cu_seqlens is None else "[1, N] with cu_seqlens"
        raise IntegrationError(f"{name}: got shape {tuple(labels.shape)}, expected {expected}")
    if cu_seqlens is not None:
        checks.layout(name, labels.squeeze(0), cu_seqlens)
    if name == "shift_labels":
        return labels
    if shared:
        raise IntegrationError("labels: the next token may be on another rank of cp_group; pass shift_labels")
    if options.get("loss_mask") is not None:
        raise IntegrationError(
            "loss_mask: belongs to the tokens that positions predict, and labels do not; mark tokens that do "
            "not count by ignore_index in labels, or pass shift_labels"
        )
    ignore_index = options.get("ignore_index", -100)
    shifted = labels.roll(-1, dims=1)
    shifted[:, -1:] = ignore_index
    if cu_seqlens is not None and labels.shape[1]:
        # an empty first sequence gives index -1, the last position of the row, which is ignored anyway
        shifted[0, queued(cu_seqlens, labels.device)[1:].long() - 1] = ignore_index
    return shifted


def complete(forward: Any, kwargs: dict[str, Any], shared: bool) -> None:
    """Set and check arguments that every fused call passes to the model's own forward."""
    accepts = signature(forward).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in accepts.values())
    for name, value in (("use_cache", False), ("return_dict", True)):
        if kwargs.get(name) is None and (anything or name in accepts):
            kwargs[name] = value
    if kwargs.get("return_dict") is False:
        raise IntegrationError("return_dict: got False, expected True: a fused call returns named outputs")
    keep = kwargs.get("logits_to_keep", 0)
    if isinstance(keep, Tensor) or keep:
        raise IntegrationError("logits_to_keep: a fused call scores all positions; mark others in the labels")
    if shared and kwargs.get("position_ids") is None:
        raise IntegrationError(
            "position_ids: got None, expected each token's position in its sequence, of which this rank has "
            "only a part (cp_group)"
        )
