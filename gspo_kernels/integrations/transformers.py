"""transformers: a causal language model whose forward returns the policy loss and never builds logits.

``fuse_lm_head(model)`` patches one instance. The whole of the model's own forward still runs, so everything
that it does before and after the head stays as it is. Only calls with our arguments replace the head's
product. The head is called through its module, where FSDP2 and ZeRO-3 gather its weight.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gspo_kernels.arguments.lengths import prefetch
from gspo_kernels.core import checks
from gspo_kernels.core.exact import exact
from gspo_kernels.core.layout import queued, segment_ids
from gspo_kernels.core.operators import checked_values
from gspo_kernels.core.types import LoRAHead
from gspo_kernels.distributed.groups import Parallel
from gspo_kernels.integrations.errors import IntegrationError, require_package
from gspo_kernels.integrations.hooks import warn_once
from gspo_kernels.logprobs import linear_token_logprobs
from gspo_kernels.losses import fused_linear_policy_loss
from gspo_kernels.models.lm_head import (
    LMHead,
    causal_lm_of,
    check_causal,
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
_FUSED = _SCORING | _POLICY | {"return_logprobs"}
"""Arguments that only a fused call has."""


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
            hidden_states, attentions, router_logits: as the model's own forward.
            past_key_values: the same; ``cache`` from transformers 5.24 on.
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
    """Let ``model(..., labels=, advantages=, ...)`` return the policy loss without building logits.

    This patches ``forward`` of the instance (of the causal LM inside PEFT and DDP wrappers). A second call
    sets ``fp32_head``, and patches again if a library has taken the patch off. Calls without the arguments
    below run the model's own forward.

    A call with ``return_logprobs=True`` scores: it takes the options of ``linear_token_logprobs`` and
    ``cu_seqlens``, and returns differentiable ``logprobs`` (and ``entropy`` with ``return_entropy=True``).
    A call with ``advantages=`` (None for objectives without) is a policy call. It needs ``old_logprobs=`` too
    (None: on-policy). It takes every term and option of ``fused_linear_policy_loss``, and
    ``router_aux_loss_coef``, a weight of the MoE auxiliary loss that replaces the model's own.

    Both calls need exactly one of ``labels`` and ``shift_labels``, int64 or int32, [B, T] like ``input_ids``
    (with ``cu_seqlens`` [1, N]): ``shift_labels[t]`` is the token that position t predicts; ``labels[t]`` is
    the token at position t, and is shifted here. All values per token (``old_logprobs``, ``ref_logprobs``,
    the returned ``logprobs``, ...) have the labels' shape. In both cases their entry t belongs to the token
    that position t predicts. ``loss_mask`` goes with ``shift_labels`` only: in ``labels`` mark tokens by
    ``ignore_index``.

    A packed batch is one row [1, N] with ``cu_seqlens`` and no 2-D ``attention_mask``. Its ``position_ids``
    restart with every sequence, so transformers keeps the sequences apart; if missing, they are made here.
    Models with M-RoPE take them for each axis, too: [3, B, T], or [3, 1, N] with ``cu_seqlens``.

    Args:
        model: a transformers causal language model, adapters allowed (on the lm_head itself one
            plain LoRA without dropout).
        fp32_head: project in fp32 outside autocast, as TRL's ``cast_lm_head_to_fp32`` does.

    Returns:
        The same model.

    Raises:
        IntegrationError: transformers is missing or too old, or the head is not understood. The first
            fused call also raises this if its product or its logits differ from the model's own.
    """
    require_package("transformers")
    checks.flag("fp32_head", fp32_head)
    inner = causal_lm_of(model)
    head_module(inner)
    check_causal(inner)
    if "_gspo_fused" in inner.__dict__:
        fused, forward = inner._gspo_fused, _forward_of(inner)
        if forward in (None, fused.earlier) or getattr(forward, "__func__", None) is type(inner).forward:
            inner.forward = fused.patched  # somebody took the patch off
        fused.fp32_head = fp32_head
        return model
    of_class = type(inner).forward
    taken = _FUSED & {*inspect.signature(of_class).parameters}
    if taken:
        raise IntegrationError(
            f"model: {type(inner).__name__}.forward has an argument {min(taken)!r} already"
        )
    earlier = inner.__dict__.get("forward")
    inner.forward = bound_forward(inner, _forward)
    inner._gspo_fused = _FusedState(earlier, inner.forward, fp32_head)
    return model


def unfuse_lm_head(model: Any) -> Any:
    """Undo ``fuse_lm_head``; a model that is not fused stays as it is. Returns the model.

    Raises:
        IntegrationError: ``forward`` was patched again after ``fuse_lm_head``.
    """
    inner = causal_lm_of(model)
    fused = inner.__dict__.get("_gspo_fused")
    if fused is None:
        return model
    if _forward_of(inner) != fused.patched:
        raise IntegrationError(
            f"model: {type(inner).__name__}.forward was patched again after fuse_lm_head; undo that first"
        )
    del inner._gspo_fused, inner.forward
    if fused.earlier is not None:
        inner.forward = fused.earlier
    return model


def bound_forward(model: Any, function: Callable[..., Any]) -> Any:
    """Return a method of ``model`` that calls ``function(model, ...)`` and looks like its class's forward.

    generate() reads the signature. ``functools.wraps`` alone would leave ``__wrapped__``, which accelerate's
    ``unwrap_model(..., keep_fp32_wrapper=False)`` takes for the mark of its own wrappers and follows. It also
    binds a method a second time where it finds nothing to follow, so the model may be passed twice. A method
    goes with the model into a deep copy; a closure would keep the original.
    """
    of_class = type(model).forward

    @functools.wraps(of_class)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *(args[1:] if args and args[0] is self else args), **kwargs)

    del forward.__wrapped__
    forward.__signature__ = inspect.signature(of_class)  # type: ignore[attr-defined]
    return types.MethodType(forward, model)


def _forward_of(model: Any) -> Any:
    """Return the ``forward`` that the instance itself has, or None; without a second binding."""
    forward = model.__dict__.get("forward")
    while isinstance(forward, types.MethodType) and isinstance(forward.__func__, types.MethodType):
        forward = forward.__func__
    return forward


@dataclass
class _FusedState:
    """The state of a patched instance.

    Attributes:
        earlier: the ``forward`` that the instance itself had before, or None for its class's.
        patched: the ``forward`` that the instance has now.
        fp32_head: see ``fuse_lm_head``.
        checked_transform: the logit transform that was compared with the model's forward, or None.
        packing_checked: whether packed sequences were checked not to see each other.
    """

    earlier: Any
    patched: Any
    fp32_head: bool
    checked_transform: tuple[float, float | None] | None = None
    packing_checked: bool = False


def _forward(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the model's own forward; in a fused call, the loss replaces the head's product."""
    state = model._gspo_fused
    forward = state.earlier or functools.partial(type(model).forward, model)
    options = {name: kwargs[name] for name in kwargs if name in _FUSED}
    kwargs = {name: value for name, value in kwargs.items() if name != "return_logprobs"}
    scoring = checks.flag("return_logprobs", options.pop("return_logprobs", False))
    if not scoring and not options.keys() - {"ignore_index"}:  # transformers' own loss takes that one too
        return forward(*args, **kwargs)
    for name in options:
        del kwargs[name]
    _check_options(options, scoring)
    aux_weight = options.pop("router_aux_loss_coef", None)
    parallel = options.get("parallel", Parallel())
    Parallel.check(parallel, "a fused call", ("cp_group",), options.get("batch_invariant"))
    shared = parallel.cp_group is not None  # other ranks have tokens of the same sequences
    labels = _labels(options, kwargs, shared)
    packed = options.get("cu_seqlens") is not None
    _complete_arguments(model, kwargs, packed, shared)
    ropes = varying_ropes(model)
    _check_frequencies(model, ropes, labels, options.get("cu_seqlens"), shared)
    if packed:
        labels = _lay_out_packed(model, forward, labels, options, kwargs, shared, scoring)
    lm_head = lm_head_of(model)
    transform = lm_head.logit_scale, lm_head.softcap
    compare = state.checked_transform != transform
    call = functools.partial(forward, *args, **kwargs)
    with own_frequencies(ropes):
        outputs, values = _run_with_loss(
            model, lm_head, call, labels, options, scoring, state.fp32_head, compare
        )
    state.checked_transform = transform
    for name in values.keys() & {"logprobs", "entropy"}:
        values[name] = values[name].unsqueeze(0) if packed else values[name]
    aux_loss = getattr(outputs, "aux_loss", None)
    if "loss" in values:
        values["loss"] = _with_aux_loss(model, values["loss"], aux_loss, aux_weight)
    cache = "cache" if hasattr(outputs, "cache") else "past_key_values"
    others = (cache, "hidden_states", "attentions", "router_logits")
    values |= {name: getattr(outputs, name, None) for name in others}
    return _output_class()(aux_loss=aux_loss, **values)


# The arguments of a fused call.


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


def _labels(options: dict[str, Any], kwargs: dict[str, Any], shared: bool) -> Tensor:
    """Return the token that each position predicts: [B, T], or [1, N] with ``cu_seqlens``."""
    passed = {name: kwargs.pop(name, None) for name in ("labels", "shift_labels")}  # PEFT passes None
    passed = {name: value for name, value in passed.items() if value is not None}
    if len(passed) != 1:
        raise IntegrationError(
            "labels, shift_labels: expected exactly one of them, as a keyword: labels[t] is the token at "
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
        raise IntegrationError("labels: the next one may lie on another rank of cp_group; pass shift_labels")
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


def _complete_arguments(model: Any, kwargs: dict[str, Any], packed: bool, shared: bool) -> None:
    """Set and check arguments that every fused call passes to the model's own forward."""
    accepts = inspect.signature(type(model).forward).parameters
    anything = any(p.kind is p.VAR_KEYWORD for p in accepts.values())
    for name, value in (("use_cache", False), ("return_dict", True)):
        if kwargs.get(name) is None and (anything or name in accepts):
            kwargs[name] = value
    if kwargs.get("return_dict") is False:
        raise IntegrationError("return_dict: got False, expected True: a fused call returns named outputs")
    keep = kwargs.get("logits_to_keep", 0)
    if isinstance(keep, Tensor) or keep:
        raise IntegrationError("logits_to_keep: a fused call scores all positions; mark others in the labels")
    positions = kwargs.get("position_ids")
    if shared and positions is None:
        raise IntegrationError(
            "position_ids: got None, expected each token's position in its sequence, of which this rank has "
            "only a part (cp_group)"
        )
    if packed or positions is None or kwargs.get("attention_mask") is not None:
        return
    counted = _text_positions(model, positions)
    if counted is None:  # rows and columns of images count back, too; only sequences begin at 0 on all axes
        counted = positions.amax(0).clamp(max=1)
    restart = counted.diff() < 0
    if checked_values(positions.device) and bool(restart.any()):
        raise IntegrationError(
            "position_ids: restart within a row, which then holds several sequences; pass cu_seqlens with "
            "one row [1, N]"
        )


def _check_frequencies(
    model: Any, ropes: Sequence[VaryingRope], labels: Tensor, cu_seqlens: Tensor | None, shared: bool
) -> None:
    """Refuse packed sequences that would change each other's RoPE frequencies; warn of padded ones."""
    rope = min(ropes, key=lambda rope: rope.limit, default=None)
    if rope is None or (labels.shape[1] <= rope.limit and not shared):
        return
    reason = (
        f"the RoPE of {type(model).__name__} ({rope.kind}) takes its frequencies from the largest position "
        f"of a call, others beyond {rope.limit} tokens"
    )
    if shared:
        raise IntegrationError(f"parallel: {reason}, and each rank of cp_group sees other positions")
    if cu_seqlens is not None and cu_seqlens.shape[0] > 2:
        raise IntegrationError(
            f"cu_seqlens: {reason}, so packed sequences change each other; pass one sequence per call, or at "
            f"most {rope.limit} tokens"
        )
    if labels.shape[0] > 1:
        warn_once(f"{reason}: log-probs depend on padding and on longer rows; pass rows of one length")


def _lay_out_packed(
    model: Any,
    forward: Any,
    labels: Tensor,
    options: dict[str, Any],
    kwargs: dict[str, Any],
    shared: bool,
    scoring: bool,
) -> Tensor:
    """Check and complete a packed call; labels and per-token terms [1, N] become [N].

    If ranks share sequences, attention spans ranks, and the caller must keep sequences apart. Scoring takes
    no ``cu_seqlens``, so a temperature per sequence becomes one per token.
    """
    cu_seqlens, temperature = queued(options["cu_seqlens"], labels.device), options.get("temperature")
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        raise IntegrationError(
            f"cu_seqlens: {type(model).__name__} takes no position_ids, so it can't keep packed sequences "
            "apart; pass padded rows"
        )
    mask = kwargs.get("attention_mask")
    if (mask is not None and mask.ndim == 2) or kwargs["use_cache"]:
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
    if counted is not None and not shared and checked_values(labels.device):
        inside = segments.diff().unsqueeze(0) == 0
        if not torch.equal(counted.diff() == 1, inside):
            raise IntegrationError("position_ids: do not restart where cu_seqlens says that sequences begin")
    if axes and positions.shape[0] != axes + 1:
        # transformers keeps sequences apart by the places of their tokens, before the positions on each axis
        counted = places if counted is None else counted
        positions = torch.cat([counted.unsqueeze(0), positions.expand(axes, -1, -1)])
    kwargs["position_ids"] = positions
    separated = shared or mask is not None or "cu_seq_lens_q" in kwargs
    if not separated and not model._gspo_fused.packing_checked:
        try:
            check_rows_of(model, _row_of_a_packed_call, call=forward, device=labels.device)
        except IntegrationError as error:
            raise IntegrationError(
                f"cu_seqlens: {error}; pass padded rows, or a 4-D attention_mask"
            ) from None
        model._gspo_fused.packing_checked = True
    for name, value in options.items():
        if isinstance(value, Tensor) and value.shape == labels.shape:
            options[name] = value.squeeze(0)
    if scoring:
        del options["cu_seqlens"]
        if isinstance(temperature, Tensor):
            shape = (cu_seqlens.shape[0] - 1,)
            checks.floats("temperature", temperature, shape, "one per sequence", labels.device)
            options["temperature"] = temperature[segments]
    return labels.squeeze(0)


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


def _row_of_a_packed_call(model: Any, prompts: Tokens, completions: Tokens) -> Row:
    """Lay sequences out as a packed call does, where transformers keeps them apart by their positions."""
    row, axes = plain_row(model, prompts, completions), _rope_axes(model)
    if axes:
        row.inputs["position_ids"] = row.inputs["position_ids"].repeat(axes + 1, 1, 1)
    return row


# The loss in the place of the head's product.


def _run_with_loss(
    model: Any,
    lm_head: LMHead,
    forward: Callable[[], Any],
    labels: Tensor,
    options: dict[str, Any],
    scoring: bool,
    fp32_head: bool,
    compare: bool,
) -> tuple[Any, dict[str, Any]]:
    """Run the model's ``forward`` once; its head computes the loss, or log-probs alone where ``scoring``.

    Args:
        model: the model; its head is replaced during the call.
        lm_head: the head's parameters, and the transform from its product to logits.
        forward: the model's own forward, with its arguments bound.
        labels: [B, T], or [N] for a packed call.
        options: of ``linear_token_logprobs`` where ``scoring``, otherwise of ``fused_linear_policy_loss``.
        scoring: return log-probs and no loss.
        fp32_head: project in fp32 outside autocast.
        compare: check that the head's module is the product with its weight, and that the forward changes a
            row of made-up logits like the transform that the loss applies.

    Returns:
        The outputs of ``forward``, and by name those of loss, logprobs, entropy and metrics that it computed.
    """
    head = head_module(model)
    head_forward, test_logits = head.forward, torch.empty(0, dtype=torch.float32, device="cpu")
    computed: dict[str, Any] = {}

    def product(hidden: Tensor) -> tuple[Tensor, ...]:
        nonlocal test_logits
        weight, lora = head.weight, weight_of(head)
        bias = None if lm_head.bias is None else head.bias
        _check_gathered(head)
        if not _split_by_vocabulary(weight, bias):
            hidden, weight, bias = _full(hidden), _full(weight), _full(bias)
        if weight.dim() != 2 or weight.numel() == 0:
            raise IntegrationError(
                f"model: the weight of its lm_head has shape {tuple(weight.shape)} inside the forward, "
                "expected [V, H]; hooks gather sharded weights, so call the outermost module"
            )
        if compare and not _is_dtensor(head.weight):  # the module's own product takes DTensors
            _compare_product(model, head_forward, hidden, weight, bias, lora)
        made_up = torch.linspace(-30.0, 30.0, len(weight), dtype=torch.float32, device=hidden.device)
        test_logits = made_up.view(1, 1, -1)
        if labels.ndim == 1:
            hidden = hidden.squeeze(0)
        device = hidden.device.type
        autocast = torch.is_autocast_enabled(device) and not fp32_head
        if fp32_head or (weight.dtype == torch.float32 and not autocast):
            hidden, weight, bias = _at_least_fp32(hidden), _at_least_fp32(weight), _at_least_fp32(bias)
        head_options = lm_head.options() | {"bias": bias} | options
        product_of: Any = lora._replace(weight=weight) if isinstance(lora, LoRAHead) else weight
        with nullcontext() if autocast else torch.autocast(device, enabled=False):
            function: Any = linear_token_logprobs if scoring else fused_linear_policy_loss
            result = function(hidden, product_of, labels, **head_options)
        computed.update({name: value for name, value in result._asdict().items() if value is not None})
        return tuple(value for name, value in computed.items() if name != "metrics")

    if labels.is_cuda:
        per_token = () if scoring else ("loss_mask", "advantages", "cu_seqlens")
        terms = {name: options.get(name) for name in per_token}
        prefetch(labels, ignore_index=options.get("ignore_index", -100), **terms)
    with replaced_product(head, product, lambda output: test_logits) as calls:
        outputs = forward()
    if len(calls) != 1:
        raise IntegrationError(f"model: its forward calls the lm_head {len(calls)} times, expected once")
    if compare:
        _compare_logits(model, lm_head, test_logits, outputs.logits)
    names = [name for name in computed if name != "metrics"]
    for name, hooked in zip(names, calls[0], strict=True):
        computed[name] = unrounded(computed[name], hooked)
    return outputs, computed


def unrounded(value: Tensor, returned: Tensor) -> Tensor:
    """Return ``value`` with the gradient of ``returned``, which is ``value`` after a wrapper has rounded it.

    FSDP2's MixedPrecisionPolicy rounds what a module returns to ``output_dtype``, and hooks on the rounded
    tensors gather the weights for the backward. accelerate sets this dtype, for the lm_head too, and no ratio
    of log-probs would survive the rounding.
    """
    return returned if returned.dtype == value.dtype else value.detach() + (returned - returned.detach())


def _is_dtensor(tensor: Any) -> bool:
    return hasattr(tensor, "device_mesh")


def _full(tensor: Any) -> Any:
    """Return a DTensor as a whole, so that all ranks compute the same loss; its gradient is replicated."""
    return tensor.full_tensor() if _is_dtensor(tensor) else tensor


def _at_least_fp32(tensor: Any) -> Any:
    return tensor.float() if tensor is not None and tensor.dtype in _LOW_PRECISION else tensor


def _split_by_vocabulary(weight: Any, bias: Any) -> bool:
    """Return whether ranks split the head's weight [V, H] and bias [V] (or None) by rows."""
    if not _is_dtensor(weight):
        return False
    from torch.distributed.tensor import Shard

    placements = [getattr(x, "placements", ()) for x in (weight, bias) if x is not None]
    return all(placement == (Shard(0),) for placement in placements)


def _check_gathered(head: Any) -> None:
    """Raise IntegrationError if the head's weight is still a shard of data parallelism."""
    if not _is_dtensor(head.weight):
        return
    from torch.distributed.fsdp import FSDPModule

    # hooks of the head have run, hooks of modules inside it have not; a gathered weight has a 1-D mesh
    inside = (module for module in head.modules() if module is not head)
    mesh = head.weight.device_mesh
    if mesh.ndim > 1 or any(isinstance(module, FSDPModule) for module in inside):
        raise IntegrationError(
            f"model: a DTensor over {mesh} reaches the product of its lm_head, where FSDP2 should have "
            "gathered it; shard the lm_head with the root module"
        )


@torch.no_grad()
def check_head(model: Any) -> None:
    """Refuse a model whose head, tried on a few tokens, gives other logits than ``lm_head_of`` describes.

    Raises:
        IntegrationError: its product is not that with its weight and bias, or the forward changes logits in
            another way.
    """
    tokens = torch.arange(1, 4, device=model.device).unsqueeze(0)
    forward, head = functools.partial(model, tokens, use_cache=False), lm_head_of(model)
    _run_with_loss(causal_lm_of(model), head, forward, tokens, {}, True, False, compare=True)


def _compare_product(
    model: Any, forward: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, lora: Tensor | LoRAHead
) -> None:
    row = torch.linspace(-1, 1, weight.shape[1], device=hidden.device, dtype=hidden.dtype).view(1, 1, -1)
    theirs = forward(row).detach().float()
    ours = nn.functional.linear(row.to(weight.dtype), weight, bias).detach().float()
    if isinstance(lora, LoRAHead):
        ours = ours + lora.scale * (row.to(lora.A.dtype) @ lora.A.T @ lora.B.T).detach().float()
    # 1/64: far above bf16 rounding, far below what another product would differ by
    if theirs.shape != ours.shape or not (theirs - ours).abs().max() <= ours.abs().max() / 64:
        raise IntegrationError(
            f"model: the lm_head of {type(model).__name__}, {type(head_module(model)).__name__}, is not the "
            "product with its weight and bias"
        )


def _compare_logits(model: Any, lm_head: LMHead, raw_logits: Tensor, logits: Tensor) -> None:
    expected = lm_head.transform(exact(raw_logits))
    same = logits.shape == expected.shape
    if not same or not (logits - expected).abs().max() <= 1e-4 * expected.abs().max():
        raise IntegrationError(
            f"model: {type(model).__name__} changes logits after the lm_head in an unknown way: "
            f"logit_scale={lm_head.logit_scale:g} and softcap={lm_head.softcap}, read from its config, do "
            "not describe it"
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
