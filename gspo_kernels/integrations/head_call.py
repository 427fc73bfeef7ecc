"""One forward of a causal language model, with the loss in the place of the head's product."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gspo_kernels.integrations.errors import IntegrationError
from gspo_kernels.integrations.lm_head import LMHead
from gspo_kernels.logprobs import linear_token_logprobs
from gspo_kernels.losses import fused_linear_policy_loss

LOW_PRECISION = (torch.float16, torch.bfloat16)


@contextmanager
def replaced_product(
    head: Any, product: Callable[[Tensor], Any], stand_in: Callable[[Any], Tensor]
) -> Iterator[list[Any]]:
    """Let the head's module compute ``product(hidden)``, and the model's forward see ``stand_in`` of it.

    The module's own hooks run: those that gather its weight (FSDP2, ZeRO-3) also see what ``product``
    returned, and attach to its gradient.

    Yields:
        One entry for each call of the head: what its hooks made of ``product(hidden)``.
    """
    outputs: list[Any] = []

    def keep(module: Any, inputs: Any, output: Any) -> Tensor:
        outputs.append(output)
        return stand_in(output)

    before, hooks = head.__dict__.get("forward"), (head._forward_pre_hooks, head._forward_hooks)
    if getattr(head, "_distribute_module_applied", False):
        # hooks of tensor parallelism would make DTensors of a result that isn't logits
        head._forward_pre_hooks, head._forward_hooks = (_but_those_of_layouts(each) for each in hooks)
    handle = head.register_forward_hook(keep)
    head.forward = product
    try:
        yield outputs
    finally:
        del head.forward
        if before is not None:
            head.forward = before
        handle.remove()
        head._forward_pre_hooks, head._forward_hooks = hooks


def _but_those_of_layouts(hooks: OrderedDict[int, Any]) -> OrderedDict[int, Any]:
    """A module's hooks without those by which ``parallelize_module`` lays out what goes in and out."""
    layouts = "torch.distributed.tensor"
    return OrderedDict((key, hook) for key, hook in hooks.items() if not hook.__module__.startswith(layouts))


class HeadCall:
    """The head's part of one fused call.

    Until ``compare`` is done once for a model, the head's module is compared with the product of its weight,
    and what the model's forward does to a row of made-up logits with the transform that the loss applies.

    Args:
        head: the module.
        lm_head: its parameters, and what follows its product.
        labels: [B, T], or [N] for a packed call.
        options: of ``linear_token_logprobs`` where ``scores``, otherwise of ``fused_linear_policy_loss``.
        scores: return log-probs and no loss.
        fp32_head: project in fp32 outside autocast.
        compare: make the comparisons.
    """

    def __init__(
        self,
        head: Any,
        lm_head: LMHead,
        labels: Tensor,
        options: dict[str, Any],
        *,
        scores: bool,
        fp32_head: bool,
        compare: bool,
    ) -> None:
        self.head, self.lm_head, self.labels, self.options = head, lm_head, labels, options
        self.scores, self.fp32_head, self.compare = scores, fp32_head, compare
        self.own_forward = head.forward
        self.metrics: dict[str, Tensor] | None = None
        self._made_up = torch.empty(0)
        self._returned: tuple[Tensor, ...] = ()

    def run(self, forward: Callable[[], Any]) -> tuple[Any, Tensor | None, Tensor, Tensor | None]:
        """(outputs of the model's ``forward``, loss or None, log-probs, entropy or None); labels' shape."""
        with replaced_product(self.head, self._product, lambda output: self._made_up) as calls:
            outputs = forward()
        if len(calls) != 1:
            raise IntegrationError(f"model: its forward calls the lm_head {len(calls)} times, expected once")
        if self.compare:
            self._compare_logits(outputs.logits)
        values = [exact(*pair) for pair in zip(self._returned, calls[0], strict=True)]
        loss = None if self.scores else values.pop(0)
        return outputs, loss, values[0], values[1] if len(values) > 1 else None

    def _product(self, hidden: Tensor) -> tuple[Tensor, ...]:
        self._returned = self._project(hidden)
        return self._returned

    def _project(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """What the head's module returns: (loss unless scoring, log-probs, entropy if computed)."""
        weight, bias = self.head.weight, None if self.lm_head.bias is None else self.head.bias
        self._check_gathered(weight)
        if not cut_by_vocabulary(weight, bias):
            hidden, weight, bias = _whole(hidden), _whole(weight), _whole(bias)
        if weight.dim() != 2 or weight.numel() == 0:
            raise IntegrationError(
                f"model: the weight of its lm_head has shape {tuple(weight.shape)} inside the forward, "
                "expected [V, H]; hooks gather sharded weights, so call the outermost module"
            )
        if self.compare and not hasattr(self.head.weight, "device_mesh"):  # whose own product takes DTensors
            self._compare_product(hidden, weight, bias)
        self._made_up = torch.linspace(-30.0, 30.0, weight.shape[0], device=hidden.device).view(1, 1, -1)
        if self.labels.ndim == 1:
            hidden = hidden.squeeze(0)
        device = hidden.device.type
        autocast = torch.is_autocast_enabled(device) and not self.fp32_head
        if self.fp32_head or (weight.dtype == torch.float32 and not autocast):
            hidden, weight = _at_least_fp32(hidden), _at_least_fp32(weight)
            bias = None if bias is None else _at_least_fp32(bias)
        options = self.lm_head.options() | {"bias": bias} | self.options
        with nullcontext() if autocast else torch.autocast(device, enabled=False):
            if self.scores:
                scored = linear_token_logprobs(hidden, weight, self.labels, **options)
                return tuple(x for x in scored if x is not None)
            out = fused_linear_policy_loss(hidden, weight, self.labels, **options)
        self.metrics = out.metrics
        return tuple(x for x in out[:3] if x is not None)

    def _check_gathered(self, weight: Any) -> None:
        """Refuse a shard of data parallelism."""
        if not hasattr(weight, "device_mesh"):
            return
        from torch.distributed.fsdp import FSDPModule

        # its own hooks have run; those of a module inside have not, and what they gather has no second mesh
        inside = (module for module in self.head.modules() if module is not self.head)
        if weight.device_mesh.ndim > 1 or any(isinstance(module, FSDPModule) for module in inside):
            raise IntegrationError(
                f"model: a DTensor over {weight.device_mesh} reaches the product of its lm_head, where FSDP2 "
                "should have gathered it; shard the lm_head with the root module"
            )

    def _compare_product(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        row = torch.linspace(-1, 1, weight.shape[1], device=hidden.device, dtype=hidden.dtype).view(1, 1, -1)
        theirs = self.own_forward(row).detach().float()
        ours = nn.functional.linear(row.to(weight.dtype), weight, bias).detach().float()
        # 1/64: far above bf16 rounding, far below what another product would differ by
        if theirs.shape != ours.shape or not (theirs - ours).abs().max() <= ours.abs().max() / 64:
            raise IntegrationError(
                f"model: its lm_head, {type(self.head).__name__}, is not the product with its weight and bias"
            )

    def _compare_logits(self, logits: Tensor) -> None:
        expected = self.lm_head.transform(self._made_up.double())
        same = logits.shape == expected.shape
        if not same or not (logits - expected).abs().max() <= 1e-4 * expected.abs().max():
            raise IntegrationError(
                "model: its forward changes logits after the lm_head in a way that is not understood: "
                f"logit_scale={self.lm_head.logit_scale:g} and softcap={self.lm_head.softcap}, read from its "
                "config, do not describe it"
            )


def exact(value: Tensor, seen: Tensor) -> Tensor:
    """``value`` with the gradient of ``seen``, which is what a wrapper made of it.

    FSDP2's MixedPrecisionPolicy rounds what a module returns to ``output_dtype``, and hooks on the rounded
    tensors gather the weights for the backward. accelerate sets it, for the lm_head too, and no ratio of
    log-probs would survive it.
    """
    return seen if seen.dtype == value.dtype else value.detach() + (seen - seen.detach())


def cut_by_vocabulary(weight: Any, bias: Any) -> bool:
    """Whether each rank has some rows of a head, [V, H] and [V] or None: tensor parallelism."""
    if not hasattr(weight, "device_mesh"):
        return False
    from torch.distributed.tensor import Shard

    placements = [getattr(x, "placements", ()) for x in (weight, bias) if x is not None]
    return all(placement == (Shard(0),) for placement in placements)


def _whole(tensor: Any) -> Any:
    """The whole of a DTensor, so that all ranks compute the same loss; its gradient is replicated."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _at_least_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in LOW_PRECISION else tensor
