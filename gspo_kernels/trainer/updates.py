"""From a scored rollout to new weights: old log-probs once, then one optimizer update per minibatch.

Old, new and reference log-probs come from one path: the same module, layout, kernel and sampling mask. What
the clip range sees is then the policy's change and not the difference between two code paths.

Every process holds the whole rollout and takes the same decisions about it; each one runs its share of the
micro-batches, and as many of them as the others. So the number of collectives never depends on what a process
got, and one process or several take the same step.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import gspo_kernels as gk
from gspo_kernels.trainer.config import TrainConfig, UpdateConfig
from gspo_kernels.trainer.engines.lesson import Lesson, lesson_of
from gspo_kernels.trainer.engines.teacher import ServedTeacher
from gspo_kernels.trainer.rollout import sampling_mismatch
from gspo_kernels.trainer.rows.experience import Experience, micro_batches
from gspo_kernels.trainer.rows.policy import Policy
from gspo_kernels.trainer.run.arrangement import Arrangement, set_aside
from gspo_kernels.trainer.run.checkpoint import WEIGHTS, check_weights, read_tensors, saved_tensors
from gspo_kernels.trainer.run.processes import is_sharded, shard_again

Metrics = dict[str, float]


class PolicyUpdater:
    """Owns the optimizer, the learning rate's schedule and the objective.

    The accelerator wraps the policy for its devices, unless FSDP2 holds it already; the optimizer gets its
    trainable parameters. The log-probs of a teacher, prepared and frozen, become advantages; a teacher behind
    a server adds a divergence to the loss. KL terms compare with the reference, a frozen copy that is
    prepared already, or where there is none with the policy itself inside ``reference_mode()``, which
    switches its adapter off. The arrangement says which processes share what; by default the configuration
    does.
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
        trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        kinds: dict[Any, list[Tensor]] = {}
        for p in trained:
            kinds.setdefault(getattr(p, "device_mesh", None), []).append(p)
        optimizer = torch.optim.AdamW(
            [{"params": kind} for kind in kinds.values()],  # no operation takes two at once
            lr=update.learning_rate,
            betas=(update.adam_beta1, update.adam_beta2),
            weight_decay=update.weight_decay,
            fused=True,  # the plain one makes temporary copies of every weight
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda number: learning_rate_factor(number, update)
        )
        self.accelerator = accelerator
        self.layout = policy.layout
        self.sharded = is_sharded(policy)
        if not self.sharded and self.arrangement.tensor == 1:
            self.policy, self.optimizer = accelerator.prepare(policy, optimizer)
        elif not self.sharded:  # DDP takes no DTensors
            self.policy = accelerator.prepare_model(policy, evaluation_mode=True)
            self.optimizer = accelerator.prepare_optimizer(optimizer)
        else:
            self.policy, self.optimizer = policy, accelerator.prepare_optimizer(optimizer)
            # FSDP takes the first module that runs for the root of all; an engine would run a layer.
            token = torch.ones(1, dtype=torch.int64, device=accelerator.device)
            with torch.no_grad():
                self.policy([token], [token])
            shard_again(self.policy)
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
        minibatches = self._minibatches(experience, step)
        first_epoch = minibatches[: self.config.update.minibatches]
        terms = self._terms(experience, first_epoch)
        taught, lesson = self._taught(experience, terms, first_epoch), None
        if self.served_teacher is not None:
            config, micros = self.config.distillation, self._micros(experience, first_epoch)
            terms["advantages"] = config.reward_coef * experience.advantages
            lesson = lesson_of(self.served_teacher, self.accelerator, config, experience, micros)
        each = [
            self._update_minibatch(
                experience, terms, rows, lesson=lesson, on_policy=number == 0 and not self.scores_first
            )
            for number, rows in enumerate(minibatches)
        ]
        scored = [number for number, rows in enumerate(minibatches) if len(self._active(experience, rows))]
        clipped = {n: each[n]["clip_fraction/low"] + each[n]["clip_fraction/high"] for n in scored if n > 0}
        measured = [each[n] for n in scored] or each
        metrics = {name: sum(values[name] for values in measured) / len(measured) for name in each[0]}
        metrics["ratio/min"] = min(values["ratio/min"] for values in measured)
        metrics["ratio/max"] = max(values["ratio/max"] for values in measured)
        metrics["clip_fraction/after_first"] = sum(clipped.values()) / max(len(clipped), 1)
        metrics["learning_rate"] = float(self.scheduler.get_last_lr()[0])
        for number, values in enumerate(each, start=1):
            metrics |= {f"minibatch_{number}/{name}": value for name, value in values.items()}
        return metrics | taught | self._off_policy(experience, terms)

    def current_logprobs(self, experience: Experience, step: int) -> Tensor:
        """Return [N] log-probs under the weights of now, cut as the update of this step will cut them."""
        minibatches = self._minibatches(experience, step)[: self.config.update.minibatches]
        return self.score(self.policy, experience, self._micros(experience, minibatches)).logprobs

    @torch.no_grad()
    def score(self, policy: Any, experience: Experience, micro_batches: Sequence[Tensor]) -> gk.TokenLogprobs:
        """Return log-probs and entropy of the rows in all processes' micro-batches, [N], 0 elsewhere.

        Cut into the micro-batches of the update, because results may depend on a batch's shape in the last
        bit.
        """
        return self._pass(policy, experience, micro_batches)

    def _pass(
        self,
        policy: Any,
        experience: Experience,
        micro_batches: Sequence[Tensor],
        terms: Mapping[str, Any] | None = None,
        lesson: Lesson | None = None,
    ) -> gk.TokenLogprobs:
        """Return what `score` does; with terms of the loss, [B] or [N], add its gradient to the weights.

        With a lesson the gradient of the divergence from its teacher is added, too, and there is no entropy.
        """
        found = torch.zeros(2, len(experience.loss_mask), device=experience.loss_mask.device)
        earlier: dict[Tensor, Tensor] = {}
        for number, micro in enumerate(micro_batches, start=1):
            # An empty micro-batch runs only to keep step with other processes: the first row, uncounted.
            rows, own = micro if len(micro) else micro.new_zeros(1), None
            more, waiting = number < len(micro_batches), nullcontext()
            if terms is not None:
                own = experience.pick(terms, rows)
                own["loss_mask"] &= len(micro) > 0
                if lesson is not None:
                    own["teacher"] = lesson.teacher(experience.places(rows))
                if more and not self.sharded:  # FSDP reduces each gradient, to keep only shards
                    waiting = self.accelerator.no_sync(self.policy)
            with waiting:
                output = policy(
                    *experience.tokens(rows), own, experience.mask(rows), return_entropy=lesson is None
                )
                if own is not None:
                    self.accelerator.backward(output.loss)
                    if lesson is not None:
                        lesson.note(output.metrics, own["loss_mask"])
                    if more and self.arrangement.tensor > 1:
                        set_aside(policy, earlier)
            if len(micro):
                found[0, experience.places(micro)] = output.logprobs
                if output.entropy is not None:
                    found[1, experience.places(micro)] = output.entropy
        for p, grad in earlier.items():
            p.grad = grad if p.grad is None else p.grad.add_(grad)
        if terms is not None:
            self.arrangement.sum_gradients(policy)
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
                of_parameter = tensor.shape == p.shape
                empty = torch.zeros_like(p.detach() if of_parameter else tensor, device=p.device)
                self.optimizer.state[p][key] = empty
        read_tensors(checkpoint, self.tensors())
        scheduler, updates = self.scheduler, state["updates"]
        scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": updates})
        for group in self.optimizer.param_groups:
            group["lr"] = scheduler.base_lrs[0] * scheduler.lr_lambdas[0](updates)

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
        """Return the rows that can have a gradient; the others cost no forward pass but count."""
        counted = experience.counted[rows] > 0
        beyond = self.looks_around or self.config.kl.beta > 0 or self.config.update.entropy_coef != 0
        beyond = beyond or self.teacher is not None or self.served_teacher is not None
        if self.objective.zero_advantage_is_inactive and not beyond:
            counted &= experience.advantages[rows] != 0
        return rows[counted]

    def _cut(self, experience: Experience, rows: Tensor) -> list[Tensor]:
        """Return this process's micro-batches of a minibatch."""
        processes = self.arrangement.parts, self.arrangement.part
        budget, active = self.config.update.micro_batch_tokens, self._active(experience, rows)
        return micro_batches(experience, active, self.layout, budget, *processes)

    def _micros(self, experience: Experience, minibatches: Sequence[Tensor]) -> list[Tensor]:
        """Return this process's micro-batches of some minibatches."""
        return [micro for rows in minibatches for micro in self._cut(experience, rows)]

    def _terms(self, experience: Experience, first_epoch: Sequence[Tensor]) -> dict[str, Any]:
        """Return the terms of the loss that stay the same for all minibatches; tensors are [B] or [N]."""
        config = self.config
        cut = [self._cut(experience, rows) for rows in first_epoch]
        unscored = [micro for micros in cut[0 if self.scores_first else 1 :] for micro in micros]
        terms: dict[str, Any] = {
            "old_logprobs": self.score(self.policy, experience, unscored).logprobs,
            "advantages": experience.advantages,
            "loss_mask": experience.loss_mask,
            "entropy_coef": config.update.entropy_coef,
        }
        if config.needs_reference():
            terms["ref_logprobs"] = experience.ref_logprobs
            if experience.ref_logprobs is None:
                everything = [micro for micros in cut for micro in micros]
                with self.reference_mode():
                    terms["ref_logprobs"] = self.score(self.reference, experience, everything).logprobs
            terms |= {"kl_beta": config.kl.beta, "kl_estimator": config.kl.estimator}
        if config.off_policy.level != "none":
            assert experience.rollout_logprobs is not None
            terms["rollout_weights"] = config.off_policy.weights(
                terms["old_logprobs"],
                experience.rollout_logprobs,
                experience.loss_mask,
                experience.offsets(torch.arange(len(experience.completions))),
            )
        if "group_ids" in self.objective.needs:
            terms["group_ids"] = experience.group_ids
        if "turn_ids" in self.objective.needs:
            one_turn = torch.zeros_like(experience.loss_mask, dtype=torch.int64)
            terms["turn_ids"] = one_turn if experience.turn_ids is None else experience.turn_ids
        return terms

    def _taught(
        self, experience: Experience, terms: dict[str, Any], first_epoch: Sequence[Tensor]
    ) -> Metrics:
        """Make the teacher's log-probs minus the policy's the advantages, [N]; return how far they are."""
        if self.teacher is None:
            return {}
        config, mask = self.config.distillation, experience.loss_mask
        micros = self._micros(experience, first_epoch)
        theirs = self.score(self.teacher, experience, micros).logprobs
        far = gk.advantages.reverse_kl(terms["old_logprobs"], theirs, loss_mask=mask)
        terms["advantages"] = config.coef * far
        if config.reward_coef > 0:
            terms["advantages"] += config.reward_coef * experience.by_token(experience.advantages)
        # of sampled tokens the mean of log p - log q estimates the reverse KL
        return {"distillation/reverse_kl": -float(far.sum() / mask.sum().clamp(min=1))}

    def _update_minibatch(
        self,
        experience: Experience,
        terms: dict[str, Any],
        rows: Tensor,
        *,
        on_policy: bool,
        lesson: Lesson | None = None,
    ) -> Metrics:
        active = self._active(experience, rows)
        micro_batches = self._cut(experience, rows)
        objective, world = self._objective(), self.arrangement.averaged
        if self.looks_around:
            current = self.score(self.policy, experience, micro_batches)
            whole, coefficients = _coefficients(experience, terms, current, rows, objective)
            # Gradients are averaged over the processes, and each of them has its own share of the sum.
            own: dict[str, Any] = {name: world * value for name, value in coefficients.items()}
            own |= {"loss_mask": terms["loss_mask"], "old_logprobs": None, "advantages": None}
            self._pass(self.policy, experience, micro_batches, own | {"objective": gk.Linear()}, lesson)
        else:
            mask = experience.loss_mask[experience.places(rows)]
            divisor = float(gk.normalizer(objective, mask, cu_seqlens=experience.offsets(rows)))
            own = terms | {"objective": objective, "normalizer": divisor / world}
            if on_policy:
                own["old_logprobs"] = None
            current = self._pass(self.policy, experience, micro_batches, own, lesson)
            if on_policy:
                terms["old_logprobs"] += current.logprobs
            # Over the whole minibatch, so that metrics do not depend on how it was cut.
            places = experience.places(active)
            whole = gk.policy_loss(
                current.logprobs[places],
                **experience.pick(terms, active),
                entropy=None if lesson is not None or current.entropy is None else current.entropy[places],
                cu_seqlens=experience.offsets(active),
                normalizer=divisor,
                objective=objective,
            )
        values = {name: float(value) for name, value in whole.metrics.items()}
        values["loss"] = float(whole.loss.detach())
        if lesson is not None:
            learned = lesson.metrics(self.accelerator)
            values["loss"] += learned["distillation/loss"]
            values |= learned
        return values | self._step()

    def _step(self) -> Metrics:
        norm = self.accelerator.clip_grad_norm_(self.policy.parameters(), self.config.update.max_grad_norm)
        norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if math.isfinite(norm):
            self.optimizer.step()
            self.scheduler.step()
        self.optimizer.zero_grad()
        return {"grad_norm": norm, "updates_left_out": float(not math.isfinite(norm))}

    def _objective(self) -> Any:
        """Return the objective, with a seed of its own for each update where it draws."""
        if not hasattr(self.objective, "seed"):
            return self.objective
        return dataclasses.replace(self.objective, seed=self.objective.seed + self.updates)

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


def learning_rate_factor(update: int, config: UpdateConfig) -> float:
    """Return what the learning rate is multiplied by in the optimizer update of this index, from 0."""
    warmup = config.warmup_updates
    if update < warmup:
        return (update + 1) / (warmup + 1)
    rest = max(config.steps * config.epochs * config.minibatches - warmup, 1)
    done = min((update - warmup) / rest, 1.0)
    factors = {"none": 1.0, "linear": 1.0 - done, "cosine": 0.5 + 0.5 * math.cos(math.pi * done)}
    return factors[config.learning_rate_decay]


def _coefficients(
    experience: Experience, terms: Mapping[str, Any], current: gk.TokenLogprobs, rows: Tensor, objective: Any
) -> tuple[gk.LossOutput, dict[str, Tensor]]:
    """Return the loss of a whole minibatch, and its gradient as `gk.Linear` takes it, [N]."""
    assert current.entropy is not None
    places = experience.places(rows)
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
    token_weights, entropy_coef = torch.zeros(2, len(current.logprobs), device=rows.device)
    token_weights[places], entropy_coef[places] = gradients[0], -gradients[1]
    coefficients = {"token_weights": token_weights}
    if terms["entropy_coef"] != 0:
        coefficients["entropy_coef"] = entropy_coef
    return whole, coefficients
