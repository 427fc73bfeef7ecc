"""From a scored rollout to new weights: old log-probs once, then one optimizer update per minibatch.

Old, new and reference log-probs come from one path: the same module, layout, kernel and sampling mask. What
the clip range sees is then the policy's change and not the difference between two code paths.

Every process holds the whole rollout and takes the same decisions about it; each one runs its share of the
micro-batches, and as many of them as the others. So the number of collectives never depends on what a process
got, and one process or several take the same step.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

import gspo_kernels as gk
from gspo_kernels.trainer.config import TrainConfig, UpdateConfig
from gspo_kernels.trainer.engines.teacher import ServedTeacher
from gspo_kernels.trainer.input_errors import EngineError
from gspo_kernels.trainer.rollout import sampling_mismatch
from gspo_kernels.trainer.rows.experience import Experience, micro_batches
from gspo_kernels.trainer.rows.policy import Policy
from gspo_kernels.trainer.run.arrangement import Arrangement, set_aside
from gspo_kernels.trainer.run.checkpoint import WEIGHTS, check_weights, read_tensors, saved_tensors
from gspo_kernels.trainer.run.processes import is_sharded, shard_again

Metrics = dict[str, float]


class Minibatch(NamedTuple):
    """What one optimizer update learns from."""

    rows: Tensor  # of the rollout; all count in divisors
    active: Tensor  # those that can have a gradient; the others cost no forward pass
    micro_batches: list[Tensor]  # of these, this process's part


class PolicyUpdater:
    """Owns the optimizer, the learning rate's schedule and the objective.

    Args:
        accelerator: accelerate's, which wraps the policy for its devices, unless FSDP2 holds it already.
        policy: what is trained, where parameters ask for gradients.
        config: of the run.
        reference: what KL terms compare with, frozen and prepared; None: the policy itself inside
            ``reference_mode()``, which switches its adapter off.
        teacher: frozen and prepared; its log-probs become advantages.
        served_teacher: one behind a server, which adds a divergence to the loss.
        arrangement: which processes share what; None: as the configuration says.
    """

    def __init__(
        self,
        accelerator: Any,
        policy: Policy,
        config: TrainConfig,
        *,
        reference: Any = None,
        reference_mode: Callable[[], AbstractContextManager[Any]] = nullcontext,
        teacher: Any = None,
        served_teacher: ServedTeacher | None = None,
        arrangement: Arrangement | None = None,
    ) -> None:
        update = config.update
        self.arrangement = arrangement or Arrangement.of(accelerator, config)
        kinds: dict[Any, list[Tensor]] = {}
        for p in policy.parameters():
            if p.requires_grad:
                kinds.setdefault(getattr(p, "device_mesh", None), []).append(p)
        optimizer = torch.optim.AdamW(
            [{"params": kind} for kind in kinds.values()],  # no operation takes two at once
            lr=update.learning_rate,
            betas=(update.adam_beta1, update.adam_beta2),
            weight_decay=update.weight_decay,
            fused=True,  # the plain one makes temporary copies of every weight
        )
        self.scheduler = LambdaLR(optimizer, partial(learning_rate_factor, config=update))
        self.accelerator = accelerator
        self.layout = policy.layout
        self.sharded = is_sharded(policy)
        if self.sharded:
            self.policy = policy
            # FSDP takes the first module that runs for the root of all; an engine would run a layer.
            token = torch.ones(1, dtype=torch.int64, device=accelerator.device)
            with torch.no_grad():
                policy([token], [token])
            shard_again(policy)
        else:
            # Without DDP where tensors are cut: it takes no DTensors.
            self.policy = accelerator.prepare_model(policy, evaluation_mode=self.arrangement.tensor > 1)
        # A wrapper, which a scaler of fp16 gradients needs; without one it costs more than small updates.
        prepared = accelerator.prepare_optimizer(optimizer)
        self.optimizer = optimizer if accelerator.scaler is None else prepared
        self.reference = self.policy if reference is None else reference
        self.reference_mode = reference_mode
        self.teacher, self.served_teacher = teacher, served_teacher
        self._minimise(config)

    def _minimise(self, config: TrainConfig) -> None:
        self.config = config
        self.objective = config.objective.build()
        # Such gradients look at other sequences: they are known only once all of these are scored.
        self.looks_around = self.objective.coefficient_scope in ("group", "batch")
        # The first minibatch of a rollout needs no old log-probs: they are its new ones.
        self.scores_first = self.looks_around or config.off_policy.level != "none" or self.teacher is not None

    def under(self, config: TrainConfig) -> PolicyUpdater:
        """Return an updater of the same weights, by the same optimizer, with the loss of another config."""
        other = copy.copy(self)
        other._minimise(config)
        return other

    @property
    def updates(self) -> int:
        """How many updates the weights had since the run began."""
        return int(self.scheduler.last_epoch)

    def update(self, experience: Experience, step: int = 0) -> Metrics:
        """Take one optimizer step for each minibatch; return the metrics, averaged and by minibatch.

        Metrics cover the completions that can have a gradient, and averages the minibatches that hold any.
        """
        minibatches = [self._cut(experience, rows) for rows in self._minibatches(experience, step)]
        first_epoch = minibatches[: self.config.update.minibatches]
        terms = self._terms(experience, first_epoch)
        taught = self._taught(experience, terms, first_epoch)
        each = [
            self._update_minibatch(experience, terms, part, on_policy=number == 0 and not self.scores_first)
            for number, part in enumerate(minibatches)
        ]
        scored = [number for number, part in enumerate(minibatches) if len(part.active)]
        later = [each[n]["clip_fraction/low"] + each[n]["clip_fraction/high"] for n in scored if n > 0]
        measured = [each[n] for n in scored] or each
        metrics = {name: sum(values[name] for values in measured) / len(measured) for name in each[0]}
        metrics["ratio/min"] = min(values["ratio/min"] for values in measured)
        metrics["ratio/max"] = max(values["ratio/max"] for values in measured)
        metrics["clip_fraction/after_first"] = sum(later) / max(len(later), 1)
        metrics["learning_rate"] = float(self.scheduler.get_last_lr()[0])
        for number, values in enumerate(each, start=1):
            metrics |= {f"minibatch_{number}/{name}": value for name, value in values.items()}
        return metrics | taught | self._off_policy(experience, terms)

    def current_logprobs(self, experience: Experience, step: int) -> Tensor:
        """Return [N] log-probs under the weights of now, cut as the update of this step will cut them."""
        first_epoch = self._minibatches(experience, step)[: self.config.update.minibatches]
        cut = [self._cut(experience, rows) for rows in first_epoch]
        return self.score(self.policy, experience, all_of(cut)).logprobs

    @torch.no_grad()
    def score(self, policy: Any, experience: Experience, micro_batches: Sequence[Tensor]) -> gk.TokenLogprobs:
        """Return log-probs and entropy of the rows in all processes' micro-batches, [N], 0 elsewhere.

        Cut into the micro-batches of the update, because results may depend on a batch's shape in the last
        bit.
        """
        found = torch.zeros(2, len(experience.loss_mask), device=experience.loss_mask.device)
        for rows, counts in in_step(micro_batches):
            output = policy(*experience.tokens(rows), None, experience.mask(rows), return_entropy=True)
            if counts:
                found[:, experience.places(rows)] = torch.stack(output)
        self.arrangement.sum_(found)
        return gk.TokenLogprobs(*found)

    def tensors(self) -> dict[str, Tensor]:
        """Return trained weights and the optimizer's state by name: shards under FSDP2, and no copies."""
        shard_again(self.policy)
        found = {}
        for name, p in self._trained().items():
            found[WEIGHTS + name] = p.detach()
            for key, value in self.optimizer.state.get(p, {}).items():
                found[f"optimizer/{key}/{name}"] = value
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return what going on needs besides `tensors`."""
        return {"updates": self.updates}

    def load_state_dict(self, state: Mapping[str, Any], checkpoint: Path) -> None:
        """Restore `state_dict`, and `tensors` from a checkpoint of any number of processes.

        That of another model is refused.
        """
        trained, saved = self._trained(), saved_tensors(checkpoint)
        check_weights(saved, trained)
        for name, tensor in saved.items():
            if name.startswith("optimizer/"):
                _, key, name = name.split("/", 2)
                p = trained[name]
                like = p.detach() if tensor.shape == p.shape else tensor  # sums, or the number of steps
                self.optimizer.state[p][key] = torch.zeros_like(like, device=p.device)
        read_tensors(checkpoint, self.tensors())
        self.scheduler.last_epoch = updates = state["updates"]
        for group in self.optimizer.param_groups:
            group["lr"] = self.scheduler.base_lrs[0] * learning_rate_factor(updates, self.config.update)

    def _trained(self) -> dict[str, Tensor]:
        policy = self.policy if self.sharded else self.accelerator.unwrap_model(self.policy)
        return {name: p for name, p in policy.named_parameters() if p.requires_grad}

    def _minibatches(self, experience: Experience, step: int) -> list[Tensor]:
        """Return the rows of every minibatch of every epoch, in an order drawn from seed, step and epoch."""
        B, device = len(experience.completions), experience.advantages.device
        together = self.objective.coefficient_scope == "group" or self.layout == "shared_prefix"
        units = experience.group_ids if together else torch.arange(B, device=device)
        names = units.unique().cpu().numpy()
        minibatches = []
        for epoch in range(self.config.update.epochs):
            order = np.random.default_rng([self.config.seed, step, epoch]).permutation(names)
            for part in np.array_split(order, self.config.update.minibatches):
                chosen = torch.from_numpy(part).to(device).unsqueeze(1) == units
                minibatches.append(chosen.nonzero()[:, 1])
        return minibatches

    def _active(self, experience: Experience, rows: Tensor) -> Tensor:
        """Return the rows that can have a gradient."""
        counted = experience.counted[rows] > 0
        beyond = self.looks_around or self.config.kl.beta > 0 or self.config.update.entropy_coef != 0
        beyond = beyond or self.teacher is not None or self.served_teacher is not None
        if self.objective.zero_advantage_is_inactive and not beyond:
            counted &= experience.advantages[rows] != 0
        return rows[counted]

    def _cut(self, experience: Experience, rows: Tensor) -> Minibatch:
        """Return a minibatch with what of it runs at all, and what of that runs here."""
        active, budget = self._active(experience, rows), self.config.update.micro_batch_tokens
        processes = self.arrangement.parts, self.arrangement.part
        return Minibatch(rows, active, micro_batches(experience, active, self.layout, budget, *processes))

    def _terms(self, experience: Experience, first_epoch: Sequence[Minibatch]) -> dict[str, Any]:
        """Return the terms of the loss that stay the same for all minibatches; tensors are [B] or [N]."""
        config = self.config
        unscored = all_of(first_epoch if self.scores_first else first_epoch[1:])
        terms: dict[str, Any] = {
            "old_logprobs": self.score(self.policy, experience, unscored).logprobs,
            "advantages": experience.advantages,
            "loss_mask": experience.loss_mask,
            "entropy_coef": config.update.entropy_coef,
        }
        if config.needs_reference():
            ref = experience.ref_logprobs
            if ref is None:
                with self.reference_mode():
                    ref = self.score(self.reference, experience, all_of(first_epoch)).logprobs
            terms |= {"ref_logprobs": ref, "kl_beta": config.kl.beta, "kl_estimator": config.kl.estimator}
        if config.off_policy.level != "none":
            mine, theirs = terms["old_logprobs"], experience.rollout_logprobs
            if theirs is None:
                raise EngineError("off_policy.level: the engine gives no log-probs of what it sampled")
            ends = experience.offsets(torch.arange(len(experience.completions)))
            terms["rollout_weights"] = config.off_policy.weights(mine, theirs, experience.loss_mask, ends)
        if "group_ids" in self.objective.needs:
            terms["group_ids"] = experience.group_ids
        if "turn_ids" in self.objective.needs:
            one_turn = torch.zeros_like(experience.loss_mask, dtype=torch.int64)
            terms["turn_ids"] = one_turn if experience.turn_ids is None else experience.turn_ids
        return terms

    def _taught(
        self, experience: Experience, terms: dict[str, Any], first_epoch: Sequence[Minibatch]
    ) -> Metrics:
        """Put what a teacher says into the terms; return how far it is, where that is known by now.

        Its log-probs minus the policy's become the advantages, [N]. One behind a server becomes a term.
        """
        config, mask, micros = self.config.distillation, experience.loss_mask, all_of(first_epoch)
        if self.teacher is None:
            return {}
        theirs = self.score(self.teacher, experience, micros).logprobs
        far = gk.advantages.reverse_kl(terms["old_logprobs"], theirs, loss_mask=mask)
        terms["advantages"] = config.coef * far
        if config.reward_coef > 0:
            terms["advantages"] += config.reward_coef * experience.by_token(experience.advantages)
        # of sampled tokens the mean of log p - log q estimates the reverse KL
        return {"distillation/reverse_kl": -float(far.sum() / mask.sum().clamp(min=1))}

    def _update_minibatch(
        self, experience: Experience, terms: dict[str, Any], part: Minibatch, *, on_policy: bool
    ) -> Metrics:
        objective = self.objective
        if hasattr(objective, "seed"):  # it draws: other numbers in each update
            objective = replace(objective, seed=objective.seed + self.updates)
        if self.looks_around:
            whole, taught = self._learn_around(experience, terms, part, objective)
        else:
            whole, taught = self._learn_alone(experience, terms, part, objective, on_policy)
        values = {name: float(value) for name, value in whole.metrics.items()}
        values["loss"] = float(whole.loss.detach()) + taught.get("distillation/loss", 0.0)
        return values | taught | self._step()

    def _learn_alone(
        self, experience: Experience, terms: dict[str, Any], part: Minibatch, objective: Any, on_policy: bool
    ) -> tuple[gk.LossOutput, Metrics]:
        """Learn by a loss that each micro-batch takes alone; return that of all, and a teacher's metrics."""
        rows, active, micros = part
        world, mask = self.arrangement.averaged, experience.loss_mask[experience.places(rows)]
        divisor = float(gk.normalizer(objective, mask, cu_seqlens=experience.offsets(rows)))
        own = terms | {"objective": objective, "normalizer": divisor / world}
        if on_policy:
            own["old_logprobs"] = None
        logprobs, entropy, taught, whole = self._learn(experience, micros, own)
        if on_policy:
            terms["old_logprobs"] += logprobs
        if whole is not None:
            return whole, taught
        # Over the whole minibatch, so that metrics do not depend on how it was cut.
        places, own = experience.places(active), experience.pick(terms, active)
        own |= {"cu_seqlens": experience.offsets(active), "normalizer": divisor, "objective": objective}
        own["entropy"] = None if entropy is None else entropy[places]
        own.pop("teacher", None)
        return gk.policy_loss(logprobs[places], **own), taught

    def _learn_around(
        self, experience: Experience, terms: dict[str, Any], part: Minibatch, objective: Any
    ) -> tuple[gk.LossOutput, Metrics]:
        """Learn by a loss that looks at the whole minibatch, whose micro-batches then carry its gradient."""
        rows, _, micros = part
        places, world = experience.places(rows), self.arrangement.averaged
        current = self.score(self.policy, experience, micros)
        assert current.entropy is not None
        logprobs = current.logprobs[places].requires_grad_()
        entropy = current.entropy[places].requires_grad_()
        whole = gk.policy_loss(
            logprobs,
            **experience.pick(terms, rows),
            entropy=entropy,
            cu_seqlens=experience.offsets(rows),
            objective=objective,
        )
        gradients = torch.autograd.grad(whole.loss, (logprobs, entropy), materialize_grads=True)
        # Gradients are averaged over the processes, and each of them has its own share of the sum.
        token_weights, entropy_coef = torch.zeros(2, len(current.logprobs), device=rows.device)
        token_weights[places], entropy_coef[places] = world * gradients[0], -world * gradients[1]
        own: dict[str, Any] = {"objective": gk.Linear(), "old_logprobs": None, "advantages": None}
        own |= {"loss_mask": terms["loss_mask"], "token_weights": token_weights}
        if terms["entropy_coef"] != 0:
            own["entropy_coef"] = entropy_coef
        self._learn(experience, micros, own)
        return whole, {}

    def _learn(
        self, experience: Experience, micro_batches: Sequence[Tensor], terms: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor | None, Metrics, gk.LossOutput | None]:
        """Add the gradient of a loss with these terms, [B] or [N], to that of the weights.

        Returns:
            Log-probs and entropy as `score` does; where there is a teacher among the terms no entropy, but
            what its divergence adds to the loss, and its mean over tokens, in nats; without a teacher the
            loss itself, where one micro-batch of one process is all that there is.
        """
        found = torch.zeros(2, len(experience.loss_mask), device=experience.loss_mask.device)
        said = found.new_zeros(3, dtype=torch.float64)
        taught, earlier = "teacher" in terms, dict[Tensor, Tensor]()
        for number, (rows, counts) in enumerate(in_step(micro_batches), start=1):
            last, own = number == len(micro_batches), experience.pick(terms, rows)
            own["loss_mask"] &= counts
            at_once = last or self.sharded  # FSDP reduces each gradient, to keep only shards
            with nullcontext() if at_once else self.accelerator.no_sync(self.policy):
                inputs = *experience.tokens(rows), own, experience.mask(rows)
                output = self.policy(*inputs, return_entropy=not taught)
                self.accelerator.backward(output.loss)
            if self.arrangement.tensor > 1 and not last:
                set_aside(self.policy, earlier)
            if counts:
                found[0, experience.places(rows)] = output.logprobs
                if taught:
                    metrics, tokens = output.metrics, own["loss_mask"].sum()
                    said += torch.stack([metrics["loss/divergence"], metrics["divergence"] * tokens, tokens])
                else:
                    found[1, experience.places(rows)] = output.entropy
        for p, grad in earlier.items():
            p.grad = grad if p.grad is None else p.grad.add_(grad)
        self.arrangement.sum_gradients(self.policy)
        self.arrangement.sum_(found)
        if not taught:
            alone = len(micro_batches) == 1 == self.accelerator.num_processes
            return found[0], found[1], {}, output._replace(loss=output.loss.detach()) if alone else None
        self.arrangement.sum_(said)
        added, distance, count = said.tolist()
        learned = {"distillation/loss": added / self.arrangement.averaged}
        return found[0], None, learned | {"distillation/divergence": distance / max(count, 1.0)}, None

    def _step(self) -> Metrics:
        norm = self.accelerator.clip_grad_norm_(self.policy.parameters(), self.config.update.max_grad_norm)
        norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if math.isfinite(norm):
            self.optimizer.step()
            self.scheduler.step()
        self.optimizer.zero_grad()
        return {"grad_norm": norm, "updates_left_out": float(not math.isfinite(norm))}

    def _off_policy(self, experience: Experience, terms: Mapping[str, Any]) -> Metrics:
        """Return how far the engine's log-probs are from ours, and what weights for that leave of a batch.

        Both are of the completions that were scored.
        """
        sampled = experience.rollout_logprobs
        if sampled is None:
            return {}
        rows = self._active(experience, torch.arange(len(experience.completions), device=sampled.device))
        mine, theirs = experience.pick(terms, rows), sampled[experience.places(rows)]
        found = sampling_mismatch(mine["old_logprobs"], theirs, mine["loss_mask"])
        if len(rows) > 0 and "rollout_weights" in terms:
            masks = {"loss_mask": mine["loss_mask"], "cu_seqlens": experience.offsets(rows)}
            measured = gk.off_policy.weight_metrics(mine["rollout_weights"], mine["advantages"], **masks)
            found |= {name: float(value) for name, value in measured.items()}
        return found


def all_of(minibatches: Sequence[Minibatch]) -> list[Tensor]:
    """Return this process's micro-batches of several minibatches."""
    return [micro for minibatch in minibatches for micro in minibatch.micro_batches]


def in_step(micro_batches: Sequence[Tensor]) -> list[tuple[Tensor, bool]]:
    """Return the rows of each micro-batch and whether they count.

    An empty one runs only to keep step with other processes, on the first row, which does not.
    """
    return [(micro, True) if len(micro) else (micro.new_zeros(1), False) for micro in micro_batches]


def learning_rate_factor(update: int, config: UpdateConfig) -> float:
    """Return what the learning rate is multiplied by in the optimizer update of this index, from 0."""
    warmup = config.warmup_updates
    if update < warmup:
        return (update + 1) / (warmup + 1)
    rest = max(config.steps * config.epochs * config.minibatches - warmup, 1)
    done = min((update - warmup) / rest, 1.0)
    factors = {"none": 1.0, "linear": 1.0 - done, "cosine": 0.5 + 0.5 * math.cos(math.pi * done)}
    return factors[config.learning_rate_decay]
