"""TRL: ``FusedGRPOTrainer`` is ``GRPOTrainer`` with log-probs and loss from this package.

TRL keeps generation, rewards, advantages, metrics and its entropy controller. The integration replaces the
head: it computes old, reference and current log-probs and the loss inside the model's forward, so that the
hooks of DDP, FSDP and ZeRO fire.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import warnings
from dataclasses import dataclass, field
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from gspo_kernels.core import checks
from gspo_kernels.integrations.errors import IntegrationError, check_signature, require_package
from gspo_kernels.integrations.hooks import SEQUENCE_RANGE, check_objective
from gspo_kernels.losses import fused_linear_policy_loss, policy_loss
from gspo_kernels.objectives import CISPO, GRPO, GSPO, SAPO, VESPO
from gspo_kernels.objectives.base import Objective, ObjectiveLoss, PolicyBatch

require_package("trl")

from trl import GRPOConfig, GRPOTrainer  # noqa: E402
from trl.trainer.utils import nanmax, nanmin  # noqa: E402

from gspo_kernels.integrations.transformers import fuse_lm_head, unrounded_call  # noqa: E402

_AGGREGATION = {
    "grpo": "sequence_mean",
    "sapo": "sequence_mean",
    "bnpo": "token_mean",
    "dapo": "token_mean",
    "cispo": "token_mean",
    "vespo": "token_mean",
    "dr_grpo": "constant",
    "luspo": "sequence_mean_token_sum",
}
for _name, _parameters in {
    "_compute_loss": "self model inputs",
    "_get_per_token_logps_and_entropies": "self model input_ids attention_mask logits_to_keep batch_size "
    "compute_entropy",
    "get_high_entropy_mask": "self entropies mask threshold",
    "get_off_policy_mask": "advantages per_token_logps sampling_per_token_logps mask off_policy_threshold",
}.items():
    check_signature("trl", f"GRPOTrainer.{_name}", getattr(GRPOTrainer, _name, None), _parameters)
_SCORING = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies)
# GRPOConfig's names of our options
_OPTION = {
    "clip_low": "epsilon",
    "clip_high": "epsilon_high",
    "dual_clip": "delta",
    "max_ratio": "epsilon_high",
    "tau_positive": "sapo_temperature_pos",
    "tau_negative": "sapo_temperature_neg",
    "k_positive": "vespo_k_pos",
    "lambda_positive": "vespo_lambda_pos",
    "k_negative": "vespo_k_neg",
    "lambda_negative": "vespo_lambda_neg",
    "aggregation_constant": "max_completion_length",
    "kl_beta": "beta",
    "kl_ratio_weighted": "use_bias_correction_kl",
}
_FORMULA = {"loss_type", "importance_sampling_level", *_OPTION.values()}
_FORMULA -= {"max_completion_length", "beta", "use_bias_correction_kl"}
"""GRPOConfig's options that describe nothing but the objective."""


def _sequence_ratios(batch: PolicyBatch) -> Tensor:
    """Return each sequence's log-ratio, with its gradient, for every token of the sequence."""
    return batch.per_token(batch.sequence_log_ratio())


class _SequenceRatio:
    """A mixin that gives an objective GSPO's ratio: TRL's ``importance_sampling_level="sequence"``."""

    coefficient_scope: ClassVar[Any] = "sequence"
    needs_token_order = False
    zero_advantage_is_inactive = True
    ratio_only = True
    factorizes = True

    def evaluate(self, batch: PolicyBatch) -> ObjectiveLoss:
        """One value per token."""
        of_sequences = dataclasses.replace(batch, log_ratio=_sequence_ratios(batch))
        return super().evaluate(of_sequences)  # type: ignore[misc, no-any-return]


@dataclass(frozen=True)
class _SequenceCISPO(_SequenceRatio, CISPO):
    """CISPO with one ratio per sequence."""


@dataclass(frozen=True)
class _SequenceSAPO(_SequenceRatio, SAPO):
    """SAPO with one ratio per sequence."""


@dataclass(frozen=True)
class _TrlVESPO(VESPO):
    """VESPO as TRL computes it.

    Rollout weights enter the trajectory's ratio instead of multiplying the loss. The KL is weighted by the
    ratio of ``ratio_level``, not by the trajectory's.
    """

    ratio_level: str = "token"

    coefficient_scope = "sequence"
    needs_token_order = False
    zero_advantage_is_inactive = True
    ratio_only = True
    factorizes = True

    def evaluate(self, batch: PolicyBatch) -> ObjectiveLoss:
        """One value per token."""
        trajectory = batch.log_ratio
        if batch.rollout_weights is not None:
            weights = batch.per_token(batch.rollout_weights).clamp(1e-8, math.exp(20.0))
            trajectory = trajectory + torch.where(batch.mask, weights.log(), 0.0)
        result = super().evaluate(dataclasses.replace(batch, log_ratio=trajectory, rollout_weights=None))
        by_sequence = self.ratio_level == "sequence"
        return result._replace(log_ratio=_sequence_ratios(batch) if by_sequence else batch.log_ratio)


def objective_of(args: Any) -> Objective:
    """Return the objective that a GRPOConfig describes.

    Raises:
        IntegrationError: an option has no counterpart here; the message uses GRPOConfig's name for it.
    """
    kind, level = args.loss_type, args.importance_sampling_level
    high, at_sequence = _epsilon_high(args), level == "sequence"
    try:
        checks.choice("loss_type", kind, tuple(_AGGREGATION))
        checks.choice("importance_sampling_level", level, ("token", "sequence"))
        shared: dict[str, Any] = {"aggregation": _AGGREGATION[kind]}
        if kind == "dr_grpo":
            shared["aggregation_constant"] = args.max_completion_length
        if kind == "cispo":
            return (_SequenceCISPO if at_sequence else CISPO)(max_ratio=high, **shared)
        if kind == "sapo":
            tau = {"tau_positive": args.sapo_temperature_pos, "tau_negative": args.sapo_temperature_neg}
            return (_SequenceSAPO if at_sequence else SAPO)(**tau, **shared)
        if kind == "vespo":
            # TRL raises smaller lambdas to 1e-4
            return _TrlVESPO(
                k_positive=args.vespo_k_pos,
                lambda_positive=max(args.vespo_lambda_pos, 1e-4),
                k_negative=args.vespo_k_neg,
                lambda_negative=max(args.vespo_lambda_neg, 1e-4),
                ratio_level=level,
                **shared,
            )
        # a ratio is never below 1 - 1 = 0, so a wider lower range changes nothing
        low, kind_of = min(args.epsilon, 1.0), GSPO if at_sequence else GRPO
        return kind_of(low, high, dual_clip=args.delta, **shared)
    except (TypeError, ValueError) as error:
        given = f"(loss_type={kind!r}, importance_sampling_level={level!r})"
        raise IntegrationError(f"{_renamed(error)} {given}") from None


def _renamed(error: Exception) -> str:
    """Return an error's message with GRPOConfig's names of our options."""
    option, colon, reason = str(error).partition(": ")
    for name, trl_name in _OPTION.items():
        reason = reason.replace(name, trl_name)
    return f"{_OPTION.get(option, option)}{colon}{reason}"


def _epsilon_high(args: Any) -> float:
    return float(args.epsilon if args.epsilon_high is None else args.epsilon_high)


def _check(args: GRPOConfig, objective: Objective | None, memory: dict[str, Any]) -> Objective:
    """Return the objective of a run; warn about clip ranges of little use.

    Raises:
        IntegrationError: an option without a counterpart here.
        TypeError, ValueError: a wrong option of this package; the message names it.
    """
    if objective is None:
        objective, high = objective_of(args), _epsilon_high(args)
        if isinstance(objective, GSPO) and max(args.epsilon, high) > SEQUENCE_RANGE:
            warnings.warn(
                f"epsilon: a clip range of {max(args.epsilon, high):g} hardly ever clips a sequence's ratio; "
                "GSPO's paper has epsilon=3e-4, epsilon_high=4e-4",
                stacklevel=3,
            )
        if isinstance(objective, CISPO) and high < 1.0:
            warnings.warn(
                f"epsilon_high: {high:g} is with loss_type='cispo' the largest weight of a token: below 1 it "
                "is a factor on nearly every one; TRL recommends 5.0",
                stacklevel=3,
            )
    else:
        check_objective(objective, "TRL")
        defaults = {each.name: each.default for each in dataclasses.fields(GRPOConfig)}
        for name in sorted(_FORMULA):
            if (value := getattr(args, name)) != defaults[name]:
                raise IntegrationError(
                    f"{name}: got {value!r}, expected GRPOConfig's default of {defaults[name]!r} with "
                    "objective=, which is the loss; give the option to the objective"
                )
    if args.use_liger_kernel:
        raise IntegrationError(
            "use_liger_kernel: got True, but Liger patches the model when training starts, when the head of "
            "this trainer is already there; leave it False"
        )
    # one token shows whether the loss takes the options, before any rollout
    token = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    terms: dict[str, Any] = {"temperature": args.temperature, "entropy_coef": args.entropy_coef}
    if args.beta != 0.0:
        terms |= {"kl_beta": args.beta, "kl_ratio_weighted": args.use_bias_correction_kl}
        terms["ref_logprobs"] = -token
    try:
        fused_linear_policy_loss(
            token[None], token, token.long() - 1, -token, token[0], objective=objective, **terms, **memory
        )
    except (TypeError, ValueError) as error:
        raise type(error)(_renamed(error)) from None
    return objective


@dataclass
class _Step:
    """A stand-in for the model while TRL's ``_compute_loss`` runs. Scoring it also stores our loss in it."""

    model: Any
    inputs: dict[str, Any]
    loss: Tensor | None = None
    metrics: dict[str, Tensor] = field(default_factory=dict)
    compare: bool = False  # TRL's loss has a gradient
    scores: list[Tensor] = field(default_factory=list)  # log-probs and entropy, as TRL gets them
    terms: dict[str, Any] = field(default_factory=dict)  # arguments of our loss for ``scores``


class FusedGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """``trl.GRPOTrainer`` with the loss of this package: the same arguments, GRPOConfig and metrics.

    The loss is that of GRPOConfig's ``loss_type`` and ``importance_sampling_level``, or ``objective``; GSPO
    is ``loss_type="grpo", importance_sampling_level="sequence"``. Old, reference and current log-probs all
    come from this package's head, in fp32 from bf16 weights, and logits never exist as a whole. Metrics are
    TRL's, plus ``ratio/min``, ``ratio/max`` and ``active_fraction``.

    Args:
        model, reward_funcs, args, more, named: as ``GRPOTrainer`` takes them.
        objective: the loss, in place of the one that GRPOConfig describes, whose options must then have
            their defaults. A mean over sequences is over those of an optimizer step; one over tokens divides
            by the mean number of tokens per optimizer step of the generation batch. Its metrics
            (``clip_fraction/low``, ``kl/ref``, ...) replace TRL's ``clip_ratio/*``, ``kl`` and
            ``policy_loss``.
        max_chunk_bytes: the most bytes of logits at a time; None: ``fused_linear_policy_loss``'s default.
        memory: "auto" or "least", see ``explain_schedule``.

    Raises:
        IntegrationError: an option or model that would not give TRL's loss; the message names it.
        TypeError, ValueError: a wrong ``objective``, ``max_chunk_bytes`` or ``memory``.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: GRPOConfig | None = None,
        *more: Any,
        objective: Objective | None = None,
        max_chunk_bytes: int | None = None,
        memory: str = "auto",
        **named: Any,
    ):
        self._memory: dict[str, Any] = {"max_chunk_bytes": max_chunk_bytes, "memory": memory}
        if args is not None:  # before the model is loaded
            self._objective = _check(args, objective, self._memory)
        super().__init__(model, reward_funcs, args, *more, **named)
        if args is None:
            self._objective = _check(self.args, objective, self._memory)
        self._custom_objective = objective is not None
        self._gradients_compared = self._custom_objective  # which has no gradient of TRL's to compare with
        for name in ("cp_size", "sp_size"):  # TRL (1.16) checks only its own arguments
            if (size := getattr(self.accelerator.parallelism_config, name, 1)) > 1:
                raise IntegrationError(
                    f"{name}: accelerate's ParallelismConfig has {size}, expected 1: GRPOTrainer generates "
                    "and scores whole sequences in each process"
                )
        for each in (self.model, self.ref_model):
            if each is not None:
                inner = self.accelerator.unwrap_model(each)
                fuse_lm_head(inner, fp32_head=self.args.cast_lm_head_to_fp32)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Compute our loss; TRL's own code gets detached log-probs for its metrics and entropy control."""
        step = _Step(model, inputs, compare=not self._gradients_compared and torch.is_grad_enabled())
        trl_loss = super()._compute_loss(step, inputs)
        assert step.loss is not None
        if step.compare:
            self._gradients_compared = _compare_gradients(step, trl_loss)
            trl_loss = trl_loss.detach()
        metrics = self._metrics["train" if self.model.training else "eval"]
        names = ["ratio/min", "ratio/max", "active_fraction"]
        if self._custom_objective:  # TRL's are those of the loss that GRPOConfig describes
            for name in [x for x in metrics if x in ("kl", "policy_loss") or x.startswith("clip_ratio/")]:
                del metrics[name]
            names += [name for name in step.metrics if "/" in name and name not in names]
        shown = torch.stack([step.metrics[name] for name in names])
        lowest, highest, *others = self.accelerator.gather(shown.unsqueeze(0)).unbind(1)
        values = [nanmin(lowest), nanmax(highest), *(each.mean() for each in others)]
        # one sync for all of them
        *values, our_loss, trl_loss = torch.stack([*values, step.loss.detach(), trl_loss]).tolist()
        for name, value in zip(names, values, strict=True):
            metrics[name].append(value)
        # 1e-2 is far above rounding in fp32
        tolerance = math.inf if self._custom_objective else 1e-2 * max(abs(trl_loss), 1.0)
        if tolerance < abs(our_loss - trl_loss) < math.inf:
            raise _changed(f"returns a different loss ({trl_loss:g}, not {our_loss:g})")
        return step.loss

    def _get_per_token_logps_and_entropies(
        self, model: Any, *call: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Score through our head as TRL scores; if ``model`` is a ``_Step``, also compute its loss."""
        if not isinstance(model, _Step):
            return self._through_head(model, {}, call, options)[0]
        terms, mask = self._terms(model.inputs)
        if self.top_entropy_quantile < 1.0 or self.off_policy_mask_threshold is not None:
            scored, _ = self._through_head(model.model, {}, call, options)
            logprobs, entropy, _ = scored
            assert entropy is not None
            effective = self._apply_masks(terms, mask, logprobs.detach(), entropy.detach(), model.inputs)
            terms["entropy_coef"] = self._entropy_coef(terms, effective)
            output = policy_loss(logprobs, entropy=entropy, **terms)
        else:
            terms["entropy_coef"] = self._entropy_coef(terms, mask)
            terms["router_aux_loss_coef"] = 0.0  # added below, for both branches
            scored, output = self._through_head(model.model, terms, call, options)
        aux_loss = scored[2]
        model.loss = output.loss
        if aux_loss is not None:
            model.loss = output.loss + self.router_aux_loss_coef * aux_loss / self._accumulated()
        model.metrics = output.metrics
        terms.pop("router_aux_loss_coef", None)
        detached = [None if value is None else value.detach() for value in scored]
        model.scores = [value.requires_grad_(model.compare) for value in detached[:2] if value is not None]
        model.terms = terms
        return tuple(detached)  # type: ignore[return-value]

    def _through_head(
        self, model: Any, terms: dict[str, Any], call: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Tensor, Tensor | None, Tensor | None], Any]:
        """Score with our head in the place of TRL's; return the scores and the output of the last model call.

        ``terms`` of the loss, [B] or [B, C] over the completions, need a call of the whole batch.
        """
        output = None
        arguments: dict[str, Any] = {}

        def head(*, input_ids: Tensor, labels: Tensor, fused_lm_head: bool, **inputs: Any) -> SimpleNamespace:
            nonlocal output
            # position t predicts token t + 1; the last one predicts nothing
            shifted = F.pad(labels[:, 1:], (0, 1), value=-100)
            prompt = input_ids.shape[1] - arguments["logits_to_keep"]
            fused: dict[str, Any] = {
                "temperature": self.temperature,
                **self._memory,
                "return_entropy": arguments.get("compute_entropy", False),
            }
            if not terms:
                fused["return_logprobs"] = True
            for name, value in terms.items():
                per_token = isinstance(value, Tensor) and value.ndim == 2
                fused[name] = F.pad(value, (prompt - 1, 1)) if per_token else value
            output = unrounded_call(model, fused, input_ids=input_ids, shift_labels=shifted, **inputs)
            return SimpleNamespace(
                log_probs=output.logprobs[:, :-1],
                entropy=None if output.entropy is None else output.entropy[:, :-1],
                aux_loss=output.aux_loss,
            )

        arguments |= _SCORING.bind(self, head, *call, **options).arguments
        return super()._get_per_token_logps_and_entropies(head, *call, **options), output

    def _terms(self, inputs: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
        """Return the loss terms over the completions, as ``policy_loss`` names them, and TRL's loss mask."""
        mask = inputs["completion_mask"]
        if "tool_mask" in inputs:
            mask = mask * inputs["tool_mask"]
        counted, _ = self._objective.outer_divisor()
        normalizer: float | Tensor
        if counted == "one":
            normalizer = 1.0 / self.accelerator.num_processes
        elif counted == "tokens" and (self._custom_objective or self.loss_type != "bnpo"):
            # TRL counts the generation batch's tokens; this is the share of one accumulation window
            normalizer = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
            if self.model.training:
                steps = self.args.steps_per_generation
                normalizer = normalizer * self.current_gradient_accumulation_steps / steps
        elif counted == "tokens":
            normalizer = mask.sum().clamp(min=1) * self._accumulated()
        else:
            # sequences, those without a counted token included
            normalizer = mask.shape[0] * self._accumulated()
        terms: dict[str, Any] = {
            "old_logprobs": inputs.get("old_per_token_logps"),
            "advantages": inputs["advantages"],
            "loss_mask": mask,
            "normalizer": normalizer,
            "objective": self._objective,
        }
        if self.beta != 0.0:
            terms["ref_logprobs"] = inputs["ref_per_token_logps"]
            terms["kl_beta"] = self.beta
            terms["kl_ratio_weighted"] = self.args.use_bias_correction_kl
        if self.use_vllm and self.vllm_importance_sampling_correction:
            terms["rollout_weights"] = _narrow(inputs["importance_sampling_ratio"])
        return terms, mask

    def _accumulated(self) -> int:
        """Return how many micro-batches share an optimizer step; 1 in evaluation."""
        return self.current_gradient_accumulation_steps if self.model.training else 1

    def _apply_masks(
        self, terms: dict[str, Any], mask: Tensor, logprobs: Tensor, entropy: Tensor, inputs: dict[str, Any]
    ) -> Tensor:
        """Set the policy term's weight to 0 where TRL's masks drop tokens; return the high-entropy mask."""
        kept, effective = torch.ones_like(mask[:, :1]), mask
        if self.off_policy_mask_threshold is not None:
            old = terms["old_logprobs"]
            sampled = inputs.get("sampling_per_token_logps", logprobs if old is None else old)
            kept = self.get_off_policy_mask(
                advantages=_wide(terms["advantages"]),
                per_token_logps=logprobs,
                sampling_per_token_logps=sampled,
                mask=mask,
                off_policy_threshold=self.off_policy_mask_threshold,
            )
        if self.top_entropy_quantile < 1.0:
            high = self.get_high_entropy_mask(entropy, mask, 1 - self.top_entropy_quantile)
            kept, effective = kept * high, mask * high
        # the rollout weights of TRL's VESPO are part of its ratio, so its advantages are weighted
        where = "advantages" if isinstance(self._objective, _TrlVESPO) else "rollout_weights"
        weights = terms.get(where)
        kept = kept.to(terms["advantages"].dtype)
        terms[where] = _narrow(kept if weights is None else _wide(weights) * kept)
        return effective

    def _entropy_coef(self, terms: dict[str, Any], effective: Tensor) -> float | Tensor:
        """Return the entropy coefficients that make the bonus TRL's mean over ``effective`` tokens."""
        unused = self.use_adaptive_entropy and self._last_world_entropy > self.args.entropy_target
        if unused or self.entropy_coef == 0.0:
            return 0.0
        share: Tensor = self.entropy_coef * effective / (effective.sum().clamp(min=1) * self._accumulated())
        objective, mask = terms["objective"], terms["loss_mask"]
        share = share * (terms["normalizer"] * objective.outer_divisor()[1])
        if objective.aggregation == "sequence_mean":
            share = share * mask.sum(1, keepdim=True).clamp(min=1)
        return share


def _compare_gradients(step: _Step, trl_loss: Tensor) -> bool:
    """Raise IntegrationError unless TRL's loss has our gradient with respect to log-probs and entropy. Return
    whether they were compared; not if all advantages are 0, as the policy term then has no gradient.

    On-policy the loss is a mean of advantages, often 0, so comparing losses detects little. In later steps
    rounding may move a ratio across a bound of the clip range, where the gradient jumps.
    """
    if not bool(step.terms["advantages"].any()):
        return False
    logprobs, *entropy = step.scores
    losses = policy_loss(logprobs, entropy=next(iter(entropy), None), **step.terms).loss, trl_loss
    gradients = [torch.autograd.grad(loss, step.scores, materialize_grads=True) for loss in losses]
    for ours, trls in zip(*gradients, strict=True):
        same = (ours - trls).norm() <= 1e-2 * ours.norm()  # False if only TRL's is NaN
        if not (same or ours.isnan().any()):
            raise _changed("has a different gradient with respect to log-probs or entropy")
    return True


def _changed(what: str) -> IntegrationError:
    installed = version("trl")
    return IntegrationError(
        f"trl: GRPOTrainer._compute_loss {what} in version {installed} than this package; install an older "
        f'version: pip install "trl<{installed}"'
    )


def _wide(values: Tensor) -> Tensor:
    """Return [B] as [B, 1]."""
    return values.unsqueeze(1) if values.ndim == 1 else values


def _narrow(values: Tensor) -> Tensor:
    """Return [B, 1] as [B]."""
    return values.squeeze(1) if values.shape[1] == 1 else values
