"""transformers: a causal language model whose forward returns the policy loss and never builds logits.

``fuse_lm_head(model)`` gives one instance a subclass of its class, with the same name. The whole of the
model's own forward still runs, so everything before and after the head stays as it is. Only calls with our
arguments replace the head's product. A ``forward`` that is set later is the one that ours calls. The head is
called through its module, where FSDP2, ZeRO-3 and accelerate gather its weight.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from gspo_kernels.arguments.prefetch import prefetch
from gspo_kernels.arguments.values import check_cu_seqlens
from gspo_kernels.core import checks
from gspo_kernels.core.exact import exact
from gspo_kernels.core.layout import copy_async, segment_ids
from gspo_kernels.core.operators import must_check_values
from gspo_kernels.core.types import LoRAHead
from gspo_kernels.distributed.groups import Parallel
from gspo_kernels.integrations.errors import IntegrationError, require_package
from gspo_kernels.integrations.hooks import warn_once
from gspo_kernels.logprobs import linear_token_logprobs
from gspo_kernels.losses import fused_linear_policy_loss
from gspo_kernels.models.calls import subclass
from gspo_kernels.models.lm_head import (
    LMHead,
    causal_lm_of,
    check_causal,
    describe_head,
    head_module,
    lm_head_of,
    replaced_product,
    weight_of,
)
from gspo_kernels.models.rope import VaryingRope, own_frequencies, varying_ropes
from gspo_kernels.models.rows import Row, Tokens, check_rows_of, plain_row

__all__ = ["FusedLMOutput", "IntegrationError", "LMHead", "fuse_lm_head", "lm_head_of", "unfuse_lm_head"]  # noqa: F822


_LOW_PRECISION = (torch.float16, torch.bfloat16)
_OF_THE_HEAD = {"hidden", "weight", "labels", "bias", "logit_scale", "softcap"}
_SCORING = {*inspect.signature(linear_token_logprobs).parameters, "cu_seqlens"} - _OF_THE_HEAD - {"parallel"}
_POLICY = {*inspect.signature(fused_linear_policy_loss).parameters, "router_aux_loss_coef"} - _OF_THE_HEAD
_FUSED = frozenset(_SCORING | _POLICY | {"return_logprobs", "_gspo_box"})
"""Arguments that only a fused call has."""

_signature = functools.lru_cache(inspect.signature)


@functools.cache
def _output_class() -> Any:
    from transformers.utils import ModelOutput

    @dataclass
    class FusedLMOutput(ModelOutput):  # type: ignore[misc]
        """The output of a fused forward; fields that were not computed are None.

        Attributes:
            loss: 0-d, carries the gradient; the policy loss plus the weighted MoE auxiliary loss.
            logprobs: the labels' shape, nats; differentiable if asked for with ``return_logprobs=True``,
                otherwise detached. Entry t belongs to the token that position t predicts.
            entropy: as ``logprobs``.
            metrics: detached 0-d tensors by name, of the policy loss.
            aux_loss: the MoE auxiliary loss, unweighted, where the model computes one.
            logits: always None.
            hidden_states, attentions, router_logits, past_key_values (or ``cache``): as the model's own.
        """

        loss: Tensor | None = None
        logprobs: Tensor | None = None
        entropy: Tensor | None = None
        metrics: dict[str, Tensor] | None = None
        aux_loss: Tensor | None = None
        logits: Tensor | None = None
        if hasattr(ModelOutput, "past_key_values"):  # an alias of cache, from transformers 5.24 on
            cache: Any = None
        else:
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
    """Let ``model(..., labels=, advantages=, ...)`` return the policy loss without logits; return the model.

    This changes the instance (the causal LM inside PEFT, DDP and torch.compile wrappers), also in copies and
    pickles. A second call sets ``fp32_head``. Calls without the arguments below run the model's own forward.

    ``return_logprobs=True`` returns differentiable ``logprobs`` (and ``entropy`` with
    ``return_entropy=True``), with the options of ``linear_token_logprobs`` and ``cu_seqlens``.
    ``advantages=`` and ``old_logprobs=`` (each may be None) return the loss, with the terms and options of
    ``fused_linear_policy_loss`` and ``router_aux_loss_coef``, a weight of the MoE auxiliary loss that
    replaces the model's own. Bias, scale and soft-capping of logits are always the model's.

    Both need exactly one of ``labels`` and ``shift_labels``, int64 or int32, [B, T] like ``input_ids`` (with
    ``cu_seqlens`` [1, N]): ``shift_labels[t]`` is the token that position t predicts; ``labels[t]`` is the
    token at position t, and is shifted here. All values per token have the labels' shape, and their entry t
    belongs to the token that position t predicts. ``loss_mask`` goes with ``shift_labels`` only.

    A packed batch is one row [1, N] with ``cu_seqlens``, no 2-D ``attention_mask``, and ``position_ids`` that
    restart with every sequence (computed by default; M-RoPE: [3, 1, N]).

    Args:
        model: a transformers causal language model, adapters allowed (on the lm_head itself one
            plain LoRA without dropout).
        fp32_head: project in fp32 outside autocast, as TRL's ``cast_lm_head_to_fp32`` does.

    Raises:
        IntegrationError: transformers is missing or too old, or the head is not understood. Fused calls also
            raise this if the head has changed, or if its product or the logits differ from the model's own.
    """
    require_package("transformers")
    checks.flag("fp32_head", fp32_head)
    inner: Any = causal_lm_of(model)
    head_module(inner)
    check_causal(inner)
    if not isinstance(inner, _Fused):
        _check_names(inner, inner.forward)
        inner.__class__ = _fused(type(inner))  # type: ignore[arg-type]
    # a new state, because shallow copies of the model share the one before
    vars(inner)["_gspo_fused"] = replace(_state_of(inner), active=True, fp32_head=fp32_head)
    return model


def unfuse_lm_head(model: Any) -> Any:
    """Undo ``fuse_lm_head``; a model that is not fused stays as it is. Returns the model.

    A ``forward`` that was set in between stays. It may call the one that it has replaced.
    """
    inner: Any = causal_lm_of(model)
    if isinstance(inner, _Fused):
        vars(inner)["_gspo_fused"] = state = replace(_state_of(inner), active=False)
        own = _own_class(type(inner))
        if type(inner) is _fused(own):  # otherwise a library has made a subclass of ours
            inner.__class__ = own
            if not state.forwards:
                del vars(inner)["_gspo_fused"]
    return model


# The forward of a fused model.


@dataclass
class _State:
    """The state of a fused model."""

    active: bool = True  # unfuse_lm_head has not been called
    fp32_head: bool = False
    forwards: list[Any] = field(default_factory=list)  # those set on the instance, in order
    compared: Any = (None, None)  # head, transform and forward that were last compared, and their test logits
    packing_checked: Any = None  # forward and attention that were last seen to keep packed sequences apart

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "compared": (None, None), "packing_checked": None}


def _state_of(model: Any) -> _State:
    """Return the state of a fused model; instances that were made from its class get one here."""
    if "_gspo_fused" not in vars(model):
        vars(model)["_gspo_fused"] = _State()
    return vars(model)["_gspo_fused"]  # type: ignore[no-any-return]


class _ForwardAttribute:
    """The attribute ``forward``: reading gives ours, and setting sets the one that ours calls.

    A library that wraps ``model.forward`` has read ours, and sets a function that calls it. So each forward
    that is set has its own one of ours around it, and the one that was read before still calls what was there
    before. Setting one that was read restores that state.
    """

    def __get__(self, model: Any, owner: Any = None) -> Any:
        if model is None:
            return super(_Fused, owner).forward  # type: ignore[misc]
        forward, state = vars(model).get("forward"), _state_of(model)
        if not state.active:
            return super(_Fused, model).forward if forward is None else forward  # type: ignore[misc]
        if forward is None:
            return model._gspo_forward
        if not any(each is forward for each in state.forwards):
            state.forwards.append(forward)
        number = next(n for n, each in enumerate(state.forwards, 1) if each is forward)
        around: Any = _forward_around(number)
        around.__signature__ = _signature(type(model).forward)
        if getattr(forward, "__self__", None) is model:
            # accelerate's unwrap_model follows this, and binds what it finds to the model
            around.__wrapped__ = forward.__func__
        return MethodType(around, model)

    def __set__(self, model: Any, forward: Any) -> None:
        function: Any = forward
        owner = model
        while isinstance(function, MethodType):  # accelerate binds a method a second time
            function, owner = function.__func__, function.__self__
        if getattr(function, "__code__", None) is not _CODE or owner is not model:
            _check_names(model, forward)
            vars(model)["forward"] = forward
        elif function.number:
            vars(model)["forward"] = _state_of(model).forwards[function.number - 1]
        else:
            vars(model).pop("forward", None)

    def __delete__(self, model: Any) -> None:
        if "forward" not in vars(model):
            raise AttributeError("forward")
        del vars(model)["forward"]


def _forward_around(number: int) -> Any:
    """Return a ``forward`` that calls the ``number``-th one of `_State.forwards`; 0: that of the class.

    It finds them in the model, so that a copy of the model calls its own ones.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if number:
            inner = _state_of(self).forwards[number - 1]
        elif isinstance(self, _Fused):
            inner = super(_Fused, self).forward  # type: ignore[misc]
        else:  # unfused, but a wrapper of this function is still there
            inner = MethodType(type(self).forward, self)
        return inner(*args, **kwargs) if _FUSED.isdisjoint(kwargs) else _call(self, inner, args, kwargs)

    forward.number = number  # type: ignore[attr-defined]
    return forward


_CODE = _forward_around(0).__code__


class _FusedClass(type):
    """The class of fused classes. Setting ``forward`` of one sets that of the model's own class."""

    def __setattr__(cls, name: str, value: Any) -> None:
        type.__setattr__(_own_class(cls) if name == "forward" else cls, name, value)


class _Fused(metaclass=_FusedClass):
    """A mixin of fused models."""

    forward = _ForwardAttribute()


def _own_class(cls: type) -> Any:
    """Return the class of a model before it was fused."""
    return cls.__mro__[cls.__mro__.index(_Fused) + 1]


@functools.cache
def _fused(cls: type) -> Any:
    """Return the subclass of a model's class that its fused instances have."""
    forward, of_class = _forward_around(0), cls.forward  # type: ignore[attr-defined]
    functools.update_wrapper(forward, of_class)
    del forward.__wrapped__
    forward.__signature__ = _signature(of_class)
    metaclass = type("_FusedClass", (_FusedClass, type(cls)), {})
    return subclass(metaclass, (_Fused, cls), _new, _gspo_forward=forward)


def _new(cls: Any) -> Any:
    """Return a fused instance without attributes, which pickle fills in."""
    return cls.__new__(_fused(cls))


def _check_names(model: Any, forward: Any) -> None:
    """Raise IntegrationError if a ``forward`` has an argument with the name of one of ours."""
    for name in sorted(_FUSED.intersection(_parameters(forward))):
        raise IntegrationError(
            f"model: a forward of {type(model).__name__} ({getattr(forward, '__module__', forward)}) has an "
            f"argument {name!r} already, which fused calls would take away from it"
        )


def _parameters(forward: Any) -> Any:
    with suppress(TypeError, ValueError):  # some callables have no signature
        return inspect.signature(forward).parameters
    return ()


# A fused call.


def _call(model: Any, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``forward``, which is the model's own; in a fused call, the loss replaces the head's product."""
    if (box := kwargs.pop("_gspo_box", None)) is not None:
        box.output = _call(model, forward, args, kwargs | box.arguments)
        return box.output
    options = {name: kwargs[name] for name in kwargs if name in _FUSED}
    kwargs = {name: value for name, value in kwargs.items() if name != "return_logprobs"}
    scoring = checks.flag("return_logprobs", options.pop("return_logprobs", False))
    if not scoring and not options.keys() - {"ignore_index"}:  # transformers' own loss takes that one too
        return forward(*args, **kwargs)
    state = _state_of(model) if isinstance(model, _Fused) else _State(active=False)
    if not state.active:
        raise IntegrationError("model: unfuse_lm_head has been called on it; call fuse_lm_head again")
    for name in options:
        del kwargs[name]
    kwargs = _own_arguments(type(model).forward, args, kwargs)
    _check_others(model, forward, kwargs, scoring)
    _check_options(options, scoring)
    aux_weight = options.pop("router_aux_loss_coef", None)
    parallel = options.get("parallel", Parallel())
    Parallel.check(parallel, "a fused call", ("cp_group",), options.get("batch_invariant"))
    across_ranks = parallel.cp_group is not None  # other ranks have tokens of the same sequences
    labels = _take_labels(options, kwargs, across_ranks)
    if across_ranks and kwargs.get("position_ids") is None:
        raise IntegrationError(
            "position_ids: got None, expected each token's position in its sequence, of which this rank has "
            "only a part (cp_group)"
        )
    ropes, cu_seqlens = varying_ropes(model), options.get("cu_seqlens")
    _check_frequencies(model, ropes, labels, cu_seqlens, across_ranks)
    if cu_seqlens is None:
        _check_one_per_row(model, kwargs)
    else:
        labels = _lay_out_packed(model, labels, options, kwargs, across_ranks)
        told_apart = across_ranks or any(
            kwargs.get(x) is not None for x in ("attention_mask", "cu_seq_lens_q")
        )
        by = forward, model.config.get_text_config()._attn_implementation
        if not told_apart and state.packing_checked != by:
            _check_packing(model, forward, labels.device)
            state.packing_checked = by
    with own_frequencies(ropes):
        call = functools.partial(forward, **kwargs)
        outputs, values = _run_with_loss(model, call, labels, options, state)
    for name in values.keys() & {"logprobs", "entropy"}:
        values[name] = values[name] if cu_seqlens is None else values[name].unsqueeze(0)
    aux_loss = getattr(outputs, "aux_loss", None)
    if "loss" in values:
        values["loss"] = _with_aux_loss(model, values["loss"], aux_loss, aux_weight)
    cache = "cache" if hasattr(outputs, "cache") else "past_key_values"
    others = (cache, "hidden_states", "attentions", "router_logits")
    values |= {name: getattr(outputs, name, None) for name in others}
    return _output_class()(aux_loss=aux_loss, **values)


# The arguments of a fused call.


def _own_arguments(forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the model's own forward by name, with named outputs and without a cache.

    ``forward`` is the function of the model's class.
    """
    accepted = _signature(forward).parameters
    names = [each.name for each in accepted.values() if each.kind is each.POSITIONAL_OR_KEYWORD][1:]
    if len(args) > len(names):
        raise TypeError(f"forward: got {len(args)} arguments by position, expected at most {len(names)}")
    if twice := kwargs.keys() & {*names[: len(args)]}:
        raise TypeError(f"{min(twice)}: got it by position and by name, expected it once")
    kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    anything = any(each.kind is each.VAR_KEYWORD for each in accepted.values())
    for name, value in (("use_cache", False), ("return_dict", True)):
        if kwargs.get(name) is None and (anything or name in accepted):
            kwargs[name] = value
    if kwargs.get("return_dict") is False:
        raise IntegrationError("return_dict: got False, expected True: a fused call returns named outputs")
    for name in ("past_key_values", "cache"):
        if kwargs.get(name) is not None:
            raise IntegrationError(
                f"{name}: got a cache, expected None: a fused call takes whole sequences, without virtual "
                "tokens of PEFT's prefix tuning"
            )
    keep = kwargs.get("logits_to_keep", 0)
    if isinstance(keep, Tensor) or keep:
        raise IntegrationError("logits_to_keep: a fused call scores all positions; mark others in the labels")
    return kwargs


def _check_others(model: Any, forward: Any, kwargs: dict[str, Any], scoring: bool) -> None:
    """Raise IntegrationError for keywords that the forward's ``**kwargs`` would accept and ignore."""
    if not scoring and kwargs.get("num_items_in_batch") is not None:
        raise IntegrationError(
            "num_items_in_batch: got a value, which the policy loss does not divide by; with transformers' "
            "Trainer set trainer.model_accepts_loss_kwargs = False, or call the model in your own "
            "compute_loss, with normalizer= (gspo_kernels.normalizer)"
        )
    for name in kwargs.keys() - _signature(type(model).forward).parameters:
        meant = _similar_argument(name)
        if (meant or name in _OF_THE_HEAD - {"labels"}) and name not in _parameters(forward):
            hint = f"did you mean {meant!r}?" if meant else "the model's own head and config describe it"
            raise IntegrationError(f"{name}: not an argument of a fused call; {hint}")


@functools.cache
def _similar_argument(name: str) -> str | None:
    """Return the argument of fused calls that ``name`` may be a typo of; None for transformers' own."""
    from transformers.utils import TransformersKwargs

    known = TransformersKwargs.__annotations__
    return None if name in known else next(iter(get_close_matches(name, _FUSED, 1, 0.8)), None)


def _check_options(options: dict[str, Any], scoring: bool) -> None:
    """Raise IntegrationError for options that don't fit the call, and for rounded tensors."""
    if scoring and options.keys() - _SCORING:
        raise IntegrationError(
            f"{min(options.keys() - _SCORING)}: goes with a policy call (advantages=), not with "
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
        if isinstance(value, Tensor) and value.dtype in _LOW_PRECISION and name != "loss_mask":
            raise IntegrationError(
                f"{name}: arrives as {value.dtype}, too coarse for a policy ratio; pass fp32, and if a "
                "wrapper rounds it (FSDP2: MixedPrecisionPolicy with output_dtype or cast_forward_inputs) "
                "turn that off"
            )


def _take_labels(options: dict[str, Any], kwargs: dict[str, Any], across_ranks: bool) -> Tensor:
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
    if across_ranks:
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
        shifted[0, copy_async(cu_seqlens, labels.device)[1:].long() - 1] = ignore_index
    return shifted


# Packed rows: several sequences in one row [1, N], with ``cu_seqlens`` and positions.


def _check_one_per_row(model: Any, kwargs: dict[str, Any]) -> None:
    """Raise IntegrationError if positions of a call without ``cu_seqlens`` say that its rows are packed."""
    positions = kwargs.get("position_ids")
    if positions is None or kwargs.get("attention_mask") is not None:
        return
    counted = _text_positions(model, positions)
    if counted is None:  # rows and columns of images count back, too; only sequences begin at 0 on all axes
        counted = positions.amax(0).clamp(max=1)
    if must_check_values(positions.device) and bool((counted.diff() < 0).any()):
        raise IntegrationError(
            "position_ids: restart within a row, which then holds several sequences; pass cu_seqlens with "
            "one row [1, N]"
        )


def _check_frequencies(
    model: Any, ropes: Sequence[VaryingRope], labels: Tensor, cu_seqlens: Tensor | None, across_ranks: bool
) -> None:
    """Refuse packed sequences that would change each other's RoPE frequencies; warn of padded ones."""
    rope = min(ropes, key=lambda rope: rope.limit, default=None)
    if rope is None or (labels.shape[1] <= rope.limit and not across_ranks):
        return
    reason = (
        f"the RoPE of {type(model).__name__} ({rope.kind}) takes its frequencies from the largest position "
        f"of a call, others beyond {rope.limit} tokens"
    )
    if across_ranks:
        raise IntegrationError(f"parallel: {reason}, and each rank of cp_group sees other positions")
    if cu_seqlens is not None and cu_seqlens.shape[0] > 2:
        raise IntegrationError(
            f"cu_seqlens: {reason}, so packed sequences change each other; pass one sequence per call, or at "
            f"most {rope.limit} tokens"
        )
    if labels.shape[0] > 1:
        warn_once(f"{reason}: log-probs depend on padding and on longer rows; pass rows of one length")


def _lay_out_packed(
    model: Any, labels: Tensor, options: dict[str, Any], kwargs: dict[str, Any], across_ranks: bool
) -> Tensor:
    """Check and complete a packed call; labels and per-token terms [1, N] become [N].

    If ranks share sequences, the caller must keep them apart. Scoring, where no advantages are passed, takes
    no ``cu_seqlens``, so a temperature per sequence becomes one per token.
    """
    cu_seqlens, temperature = copy_async(options["cu_seqlens"], labels.device), options.get("temperature")
    if "position_ids" not in _signature(type(model).forward).parameters:
        raise IntegrationError(
            f"cu_seqlens: {type(model).__name__} takes no position_ids, so it can't keep packed sequences "
            "apart; pass padded rows"
        )
    mask = kwargs.get("attention_mask")
    if (mask is not None and mask.ndim == 2) or kwargs.get("use_cache"):
        raise IntegrationError(
            "cu_seqlens: with a 2-D attention_mask or use_cache=True packed sequences attend to each other; "
            "pass neither"
        )
    N, axes = labels.shape[1], _rope_axes(model)
    segments, positions = segment_ids(cu_seqlens, N), kwargs.get("position_ids")
    places = (torch.arange(N, device=labels.device) - cu_seqlens.long()[segments]).unsqueeze(0)
    positions = places if positions is None else positions
    shapes = [tuple(labels.shape), *((n, *labels.shape) for n in (axes, axes + 1) if axes)]
    if tuple(positions.shape) not in shapes:
        raise IntegrationError(
            f"position_ids: got shape {tuple(positions.shape)}, expected {' or '.join(map(str, shapes))}"
        )
    counted = _text_positions(model, positions)
    if counted is not None and not across_ranks and must_check_values(labels.device):
        inside = segments.diff().unsqueeze(0) == 0
        if not torch.equal(counted.diff() == 1, inside):
            raise IntegrationError("position_ids: do not restart where cu_seqlens says that sequences begin")
    if axes and positions.shape[0] != axes + 1:
        # transformers keeps sequences apart by the places of their tokens, before the positions on each axis
        counted = places if counted is None else counted
        positions = torch.cat([counted.unsqueeze(0), positions.expand(axes, -1, -1)])
    kwargs["position_ids"] = positions
    for name, value in options.items():
        if isinstance(value, Tensor) and value.shape == labels.shape:
            options[name] = value.squeeze(0)
    if "advantages" not in options:
        check_cu_seqlens(cu_seqlens, labels)
        del options["cu_seqlens"]
        if isinstance(temperature, Tensor):
            shape = (cu_seqlens.shape[0] - 1,)
            checks.floats("temperature", temperature, shape, "one per sequence", labels.device)
            options["temperature"] = temperature[segments]
    return labels.squeeze(0)


def _check_packing(model: Any, forward: Any, device: torch.device) -> None:
    """Run a few tokens packed and one by one; raise IntegrationError if their hidden states differ."""
    axes = _rope_axes(model)

    def row_of_a_packed_call(model: Any, prompts: Tokens, completions: Tokens) -> Row:
        row = plain_row(prompts, completions)
        if axes:
            row.inputs["position_ids"] = row.inputs["position_ids"].repeat(axes + 1, 1, 1)
        return row

    try:
        check_rows_of(model, row_of_a_packed_call, call=forward, device=device)
    except IntegrationError as error:
        raise IntegrationError(f"cu_seqlens: {error}; pass padded rows, or a 4-D attention_mask") from None


def _rope_axes(model: Any) -> int:
    """Return the number of axes of a model's M-RoPE (Qwen-VL: time, row, column), or 0 for other models."""
    sections = (vars(module).get("mrope_section") for module in model.modules())
    return next((len(each) for each in sections if each), 0)


def _text_positions(model: Any, positions: Tensor) -> Tensor | None:
    """Return the positions that count tokens, [B, T]; None for M-RoPE's [axes, B, T], which have none.

    transformers takes [1 + axes, B, T] too, where those that count tokens come first.
    """
    if positions.ndim < 3:
        return positions
    return positions[0] if positions.shape[0] == _rope_axes(model) + 1 else None


# The loss in the place of the head's product.


def _run_with_loss(
    model: Any, forward: Any, labels: Tensor, options: dict[str, Any], state: _State
) -> tuple[Any, dict[str, Any]]:
    """Run a ``functools.partial`` of the model's own ``forward``, whose head computes the loss.

    The first call compares the head with the product with its weight, and what the forward makes of made-up
    logits with the transform that the loss applies. Calls on CPUs compare these logits again.

    Labels are [B, T], or [N] for a packed call. Options are those of ``fused_linear_policy_loss``, or without
    advantages those of ``linear_token_logprobs``. Returns the outputs of ``forward``, and by name those of
    loss, logprobs, entropy and metrics that the head computed.
    """
    module, scoring = head_module(model), "advantages" not in options
    lm_head = describe_head(model, module)
    vocabulary, device = 0, labels.device
    seen = (lm_head.logit_scale, lm_head.softcap, forward.func, type(model).forward, module)
    before, logits_before = state.compared
    compare, fp32_head = before != seen, state.fp32_head
    computed: dict[str, Any] = {}

    def product(head: Any, hidden: Tensor) -> tuple[Tensor, ...]:
        nonlocal vocabulary, device
        weight: Any = weight_of(head)
        lora = weight if isinstance(weight, LoRAHead) else None
        weight = weight if lora is None else lora.weight
        bias = None if lm_head.bias is None else head.bias
        sharded = hasattr(weight, "device_mesh")  # the module's own product takes DTensors
        hidden, weight, bias = _gathered(head, hidden, weight, bias)
        if weight.dim() != 2 or weight.numel() == 0 or weight.is_meta:
            raise IntegrationError(
                f"model: the weight of its lm_head has shape {tuple(weight.shape)} on {weight.device} inside "
                "the forward, expected [V, H] with values; hooks gather sharded and offloaded weights, so "
                "call the outermost module"
            )
        if compare and not sharded:
            own = vars(module).get("forward")  # TRL's cast to fp32; accelerate's has done its work
            own = MethodType(type(head).forward, head) if own is None or hasattr(head, "_hf_hook") else own
            _compare_product(model, own, hidden, weight, bias, lora)
        vocabulary, device = len(weight), hidden.device
        if labels.ndim == 1:
            hidden = hidden.squeeze(0)
        autocast = torch.is_autocast_enabled(device.type) and not fp32_head
        if fp32_head or (weight.dtype == torch.float32 and not autocast):
            hidden, weight, bias = _at_least_fp32(hidden), _at_least_fp32(weight), _at_least_fp32(bias)
        head_options = lm_head.options() | {"bias": bias} | options
        weight_or_lora = weight if lora is None else lora._replace(weight=weight)
        with nullcontext() if autocast else torch.autocast(device.type, enabled=False):
            function: Any = linear_token_logprobs if scoring else fused_linear_policy_loss
            result = function(hidden, weight_or_lora, labels, **head_options)
        computed.update({name: value for name, value in result._asdict().items() if value is not None})
        return tuple(value for name, value in computed.items() if name != "metrics")

    def made_up(result: Any) -> Tensor:  # a new tensor each time, because the forward may change its own
        logits = torch.linspace(-30.0, 30.0, vocabulary, dtype=torch.float32, device=device)
        return logits.view(1, 1, -1)

    if labels.is_cuda:
        per_token = () if scoring else ("loss_mask", "advantages", "cu_seqlens")
        terms = {name: options.get(name) for name in per_token}
        prefetch(labels, ignore_index=options.get("ignore_index", -100), **terms)
    with replaced_product(module, product, made_up) as results:
        outputs = forward()
    if len(results) != 1:
        raise IntegrationError(f"model: its forward calls the lm_head {len(results)} times, expected once")
    logits, names = outputs.logits, [name for name in computed if name != "metrics"]
    if not isinstance(results[0], tuple) or len(results[0]) != len(names) or not names:
        raise IntegrationError(
            f"model: the lm_head of {type(model).__name__} changes what its forward returns"
        )
    # on a CPU the second comparison needs no sync; it reads V numbers, and the loss reads a matrix [V, H]
    if compare or (must_check_values(logits.device) and not torch.equal(logits, logits_before)):
        expected = lm_head.transform(exact(made_up(None)))
        same = logits.shape == expected.shape
        if not same or not (logits - expected).abs().max() <= 1e-4 * expected.abs().max():
            raise IntegrationError(
                f"model: {type(model).__name__} changes logits after the lm_head in an unknown way: "
                f"logit_scale={lm_head.logit_scale:g} and softcap={lm_head.softcap}, read from its config, "
                "do not describe it"
            )
        state.compared = seen, logits.detach()
    for name, hooked in zip(names, results[0], strict=True):
        computed[name] = _unrounded(computed[name], hooked)
    return outputs, computed


class _Box:
    """A box for arguments and the output of a fused call, into which FSDP does not look."""

    def __init__(self, arguments: dict[str, Any]):
        self.arguments = arguments
        self.output: Any = None


def unrounded_call(model: Any, arguments: dict[str, Any], **inputs: Any) -> Any:
    """Return the output of a fused call with ``arguments`` under any mixed precision of FSDP.

    FSDP rounds every tensor that enters or leaves the outermost forward, at any depth of tuples, dicts and
    dataclasses. A ratio of log-probs does not survive that.
    """
    box = _Box(arguments)
    returned = model(**inputs, _gspo_box=box)
    for name in ("loss", "logprobs", "entropy", "aux_loss"):
        if (value := getattr(box.output, name)) is not None:
            setattr(box.output, name, _unrounded(value, getattr(returned, name)))
    return box.output


def _unrounded(value: Tensor, returned: Tensor) -> Tensor:
    """Return ``value`` with the gradient of ``returned``, which is ``value`` after a wrapper has rounded it.

    FSDP2's MixedPrecisionPolicy rounds what a module returns to ``output_dtype``, which accelerate sets for
    the lm_head too, and hooks on the rounded tensors gather the weights for the backward.
    """
    return returned if returned.dtype == value.dtype else value.detach() + (returned - returned.detach())


def _at_least_fp32(tensor: Any) -> Any:
    return tensor.float() if tensor is not None and tensor.dtype in _LOW_PRECISION else tensor


def _gathered(head: Any, hidden: Any, weight: Any, bias: Any) -> tuple[Any, Any, Any]:
    """Return DTensors as a whole, so that all ranks compute the same loss; their gradients are replicated.

    A weight [V, H] and bias [V] (or None) that ranks split by rows stay split, for a loss of each shard.
    """
    if mesh := getattr(weight, "device_mesh", None):
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.tensor import Shard

        # hooks of the head have run, hooks of modules inside it have not; a gathered weight has a 1-D mesh
        inside = (module for module in head.modules() if module is not head)
        if mesh.ndim > 1 or any(isinstance(module, FSDPModule) for module in inside):
            raise IntegrationError(
                f"model: a DTensor over {mesh} reaches the product of its lm_head, where FSDP2 should have "
                "gathered it; shard the lm_head with the root module"
            )
        if all(getattr(x, "placements", ()) == (Shard(0),) for x in (weight, bias) if x is not None):
            return hidden, weight, bias
    whole = (x.full_tensor() if hasattr(x, "device_mesh") else x for x in (hidden, weight, bias))
    return tuple(whole)


@torch.no_grad()
def check_head(model: Any) -> None:
    """Raise IntegrationError if a few tokens have other logits than ``lm_head_of`` describes."""
    tokens = torch.arange(1, 4, device=model.device).unsqueeze(0)
    forward = functools.partial(model, tokens, use_cache=False)
    _run_with_loss(causal_lm_of(model), forward, tokens, {}, _State())


def _compare_product(
    model: Any, own: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, lora: LoRAHead | None
) -> None:
    """Compare the head's ``own`` forward with the product, on one row; they may differ by rounding alone.

    A dot product of H terms in precision u, rounded to precision v, is off by at most v |x . w| +
    4 sqrt(H) u |x| . |w| (Higham and Mary, 2019), on either side. LoRA rounds more often.
    """
    H, linear = weight.shape[1], nn.functional.linear
    row = torch.linspace(-1, 1, H, dtype=torch.float32, device=hidden.device)
    row = row.bfloat16().to(hidden.dtype).view(1, 1, -1)  # exact in any precision
    of_head, base = own(row.clone()).detach(), linear(row.to(weight.dtype), weight, bias).detach()
    dtypes = {of_head.dtype, base.dtype}
    ours, size = exact(base), exact(linear(row.abs().to(weight.dtype), weight.abs()).detach())
    rounded = ours.abs()
    if lora is not None:
        A, B, x = exact(lora.A.detach()), exact(lora.B.detach()), exact(row)
        ours = ours + lora.scale * (x @ A.T @ B.T)
        rounded = rounded + 4 * abs(lora.scale) * (x.abs() @ A.abs().T @ B.abs().T)
        dtypes.add(lora.A.dtype)
    u = torch.finfo(torch.float64 if dtypes == {torch.float64} else torch.float32).eps
    bound = max(torch.finfo(dtype).eps for dtype in dtypes) * rounded + 4 * H**0.5 * u * size
    if of_head.shape != ours.shape or not bool(((exact(of_head) - ours).abs() <= bound).all()):
        raise IntegrationError(
            f"model: the lm_head of {type(model).__name__}, {type(head_module(model)).__name__}, is not the "
            "product with its weight and bias"
        )


def _with_aux_loss(model: Any, loss: Tensor, aux_loss: Tensor | None, weight: float | None) -> Tensor:
    """Add the MoE auxiliary loss as the model's own forward does."""
    if aux_loss is None:
        if weight:
            raise IntegrationError(
                "router_aux_loss_coef: the forward computed no auxiliary loss; set output_router_logits=True"
            )
        return loss
    config = model.config.get_text_config()
    owners = ((model, "router_aux_loss_coef"), (model, "aux_loss_coef"), (config, "router_aux_loss_coef"))
    for owner, name in owners:
        weight = getattr(owner, name, None) if weight is None else weight
    if weight is None:
        raise IntegrationError(
            f"router_aux_loss_coef: {type(model).__name__} computes an auxiliary loss but names no weight "
            "for it"
        )
    return loss + weight * aux_loss.to(loss.device)
