"""From a scored rollout to new weights: old log-probs once, then one optimizer update per minibatch.

Old, new and reference log-probs come from the same code path, so only changes of the policy change a ratio.
Every process has the whole rollout, makes the same decisions about it, and runs its share of the
micro-batches, the same number as the others. One process and several take the same step.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor
from torch.distributed import all_reduce
from torch.distributed.fsdp import FSDPModule
from torch.optim.lr_scheduler import LambdaLR

import gspo_kernels as gk
from gspo_kernels.core.exact import exact
from gspo_kernels.core.layout import copy_async
from gspo_kernels.logits.centering import ScoreCentering, require_weight
from gspo_kernels.models.rows import offsets_from_list, ranges, token_budget_batches, tree_row
from gspo_kernels.off_policy import SamplingMask
from gspo_kernels.trainer.checkpoint import load_tensors
from gspo_kernels.trainer.config import InputError, TrainConfig, UpdateConfig, near_matches
from gspo_kernels.trainer.model import Policy
from gspo_kernels.trainer.processes import AutoSize, reshard, whole_weights
from gspo_kernels.trainer.vllm import VLLMEngine, sync_weights

Metrics = dict[str, float]
Terms = dict[str, Any]  # of a loss; tensors are [B] or [N]


@dataclass(frozen=True)
class Batch:
    """The input of an update: B completions with N tokens in total, groups consecutive, on one device.

    Values per token are packed: one completion after the other, without padding.
    """

    prompts: Sequence[Tensor]  # B of token ids, [P_i]
    completions: Sequence[Tensor]  # B of token ids, [C_i], C_i > 0
    advantages: Tensor  # [B] fp32, or what the objective takes instead (rewards, levels); or [N], per token
    loss_mask: Tensor  # [N] bool, tokens that the loss counts
    group_ids: Tensor  # [B] int64, the group of each row
    rollout_logprobs: Tensor | None = None  # [N] fp32, from the engine that sampled; None: it returned none
    turn_ids: Tensor | None = None  # [N] int64, -1 outside turns; None: every completion is one turn
    old_logprobs: Tensor | None = None  # [N] fp32, by the policy; None: the updater scores them
    ref_logprobs: Tensor | None = None  # [N] fp32, by the reference; None: the updater scores them
    masks: Sequence[SamplingMask] | None = None  # B, log-probs are over the tokens in them; None: over all
    centering: ScoreCentering | None = None  # [N, K], from the engine that sampled; None: it returned none

    @cached_property
    def lengths(self) -> list[int]:
        """Number of tokens of each completion."""
        return [len(completion) for completion in self.completions]

    @cached_property
    def groups_on_host(self) -> list[int]:
        """The group of each row."""
        return list(self.group_ids.tolist())

    @cached_property
    def loss_masks_on_host(self) -> tuple[Tensor, ...]:
        """Each row's part of the loss mask, on the CPU."""
        return self.loss_mask.to("cpu").split(self.lengths)

    @cached_property
    def counted(self) -> Tensor:
        """Number of tokens of each row that the loss counts, [B] int64 on the CPU."""
        return torch.stack([tokens.sum() for tokens in self.loss_masks_on_host])

    def places(self, rows: Tensor) -> Tensor:
        """Return the indices of the tokens of these rows, which are on the CPU, among the N tokens, int64."""
        ends, chosen = list(itertools.accumulate(self.lengths)), rows.tolist()
        lengths = [self.lengths[row] for row in chosen]
        return ranges([ends[row] - self.lengths[row] for row in chosen], lengths, self.loss_mask.device)

    def pick(self, terms: Mapping[str, Any], rows: Tensor) -> dict[str, Any]:
        """Return these rows' part of a loss's terms, tensors of which are [B] or [N], with ``cu_seqlens``."""
        places, B, device = self.places(rows), len(self.completions), self.loss_mask.device
        chosen = copy_async(rows, device)
        part = {
            name: value[chosen if len(value) == B else places] if isinstance(value, Tensor) else value
            for name, value in terms.items()
        }
        if isinstance(centering := terms.get("centering"), ScoreCentering):
            part["centering"] = ScoreCentering(centering.ids[places], centering.logprobs[places])
        return part | {"cu_seqlens": offsets_from_list([self.lengths[row] for row in rows.tolist()], device)}

    def by_token(self, values: Tensor) -> Tensor:
        """Repeat one value per row, [B], for each of its tokens, [N]."""
        return values.repeat_interleave(torch.tensor(self.lengths, dtype=torch.int64, device=values.device))


def micro_batches(batch: Batch, rows: Tensor, grouped: bool, budget: int, accelerator: Any) -> list[Tensor]:
    """Return this process's micro-batches within a token budget, the same number in all, some empty.

    If ``grouped``, a prompt occurs once in a micro-batch, and its completions stay together if they fit.
    """
    rank, world = accelerator.process_index, accelerator.num_processes
    units, lengths = list[list[int]](), list[int]()
    for row in sorted(rows.tolist()) if grouped else rows.tolist():
        more = batch.lengths[row] - 1
        same = grouped and units and batch.groups_on_host[units[-1][0]] == batch.groups_on_host[row]
        if same and lengths[-1] + more <= budget:
            units[-1].append(row)
            lengths[-1] += more
        else:
            units.append([row])
            lengths.append(len(batch.prompts[row]) + more)
    shares = token_budget_batches(lengths, max(sum(lengths), 1), count=world)
    parts = [[lengths[unit] for unit in share] for share in shares]
    count = max(len(token_budget_batches(part, budget)) for part in parts)
    cut = token_budget_batches(parts[rank], budget, count=count)
    chosen = [[row for i in part for row in units[shares[rank][i]]] for part in cut]
    return [torch.tensor(part, dtype=torch.int64, device="cpu") for part in chosen]


def trainable_objectives() -> dict[str, Any]:
    """Return by name the objectives whose inputs a rollout has; it has no token weights."""
    classes: dict[str, Any] = {name: getattr(gk.objectives, name) for name in gk.objectives.__all__}
    served = {"ref_logprobs", "group_ids", "turn_ids", "entropy"}
    return {name: cls for name, cls in classes.items() if served.issuperset(cls.needs)}


def make_objective(config: TrainConfig) -> Any:
    """Return the configured objective, with its own defaults for fields that are not set."""
    classes, name = trainable_objectives(), config.objective.name
    if name not in classes:
        hint = f"{near_matches(name, classes)}; there are {', '.join(classes)}"
        raise InputError(f"objective.name: no objective {name!r}{hint}")
    types = {field.name: str(field.type) for field in dataclasses.fields(classes[name]) if field.init}
    known = sorted(types)
    options = config.objective.model_extra or {}
    for key in sorted(options.keys() - known):
        hint = f"{near_matches(key, known)}; it has {', '.join(known)}"
        raise InputError(f"unknown key objective.{key} for {name}{hint}")
    # null keeps the default of a field that cannot be None
    options = {key: value for key, value in options.items() if value is not None or "None" in types[key]}
    try:
        return TypeAdapter(classes[name]).validate_python(options)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(["objective", *map(str, first["loc"][:1])])
        got = "" if first["type"] == "value_error" else f", got {first['input']!r}"
        raise InputError(f"{place}: {first['msg'].removeprefix('Value error, ')}{got}") from error


def check_config(config: TrainConfig, *, serves_turns: bool = False) -> None:
    """Raise an `InputError` for wrong fields of the objective, bounds or minibatches, and unused options."""
    config.check_unused()
    objective, rollout, update = make_objective(config), config.rollout, config.update
    if "turn_ids" in objective.needs and not serves_turns:
        one = f"{config.objective.name} compares turns, and completions are one turn"
        raise InputError(f"objective.name: {one}; train with python -m examples.recipes.turns")
    if config.objective.centering:
        try:
            require_weight(objective)
        except ValueError as error:
            raise InputError(f"objective.{error}") from error
        if gk.is_batch_invariant():
            raise InputError("objective.centering: not supported in batch-invariant mode")
    if config.off_policy.level != "none":
        token = torch.zeros(1, 1, dtype=torch.float32, device="cpu")
        try:
            gk.rollout_weights(token, token, **off_policy_options(config))
        except ValueError as error:
            raise InputError(f"off_policy: {error}") from error
    if objective.advantages_are != "advantages":
        takes = f"{config.objective.name}, which takes {objective.advantages_are}"
        config.require_defaults(["advantages"], f"with {takes}")
    whole_groups = needs_whole_groups(objective)
    most = rollout.prompts_per_rollout * (1 if whole_groups else rollout.group_size)
    if update.minibatches > most:
        parts = f"the {most} {'prompts' if whole_groups else 'completions'} of a rollout"
        raise InputError(f"update.minibatches must be at most {parts}, got {update.minibatches}")


def needs_whole_groups(objective: Any) -> bool:
    """Return whether a minibatch must consist of whole groups, for their coefficients or their mean."""
    return bool(objective.coefficient_scope == "group" or objective.aggregation == "prompt_mean")


def needs_reference(config: TrainConfig) -> bool:
    """Return whether a term of the loss needs the reference policy."""
    return config.kl.beta > 0 or "ref_logprobs" in make_objective(config).needs


def off_policy_options(config: TrainConfig) -> dict[str, Any]:
    """Return the options of `gk.rollout_weights`; truncation without bounds gets an upper bound of 2."""
    options = config.off_policy.model_dump()
    if options["mode"] == "truncate" and options["low"] is None and options["high"] is None:
        options["high"] = 2.0
    return options


class Minibatch(NamedTuple):
    """The input of one optimizer update."""

    rows: Tensor  # of the batch, all counted by the divisor
    active: Tensor  # the rows that can have a gradient; only these are run
    micro_batches: list[Tensor]  # this process's share of the active rows


class Updater:
    """The owner of optimizer, schedule and objective; ``reference`` is called like the policy."""

    def __init__(self, accelerator: Any, config: TrainConfig, policy: Policy, reference: Any = None) -> None:
        weights = [p for p in policy.parameters() if p.requires_grad]
        rate, decay = config.update.learning_rate, config.update.weight_decay
        # fused: the default allocates temporary copies of all weights
        self.optimizer: Any = torch.optim.AdamW(weights, lr=rate, weight_decay=decay, fused=True)
        self.scheduler = LambdaLR(self.optimizer, partial(learning_rate_factor, config=config.update))
        self.accelerator = accelerator
        self.sharded = isinstance(policy, FSDPModule)
        self.shares_prefixes = policy.layout is tree_row
        self.micro_batch_tokens = AutoSize.of(config, "update.micro_batch_tokens")
        self.policy: Any = policy if self.sharded else accelerator.prepare_model(policy)
        self.reference = reference
        self._sent: int | None = None  # `updates` at which an engine last got the weights
        self.config, self.objective = config, make_objective(config)

    @property
    def needs_full_minibatch(self) -> bool:
        """Whether a sequence's gradient depends on other sequences, which must be scored first."""
        return self.objective.coefficient_scope in ("group", "batch")

    @property
    def updates(self) -> int:
        """Number of optimizer updates since the start of the run."""
        return int(self.scheduler.last_epoch)

    @contextmanager
    def weights_in(self, engine: Any, tokenizer: Any) -> Iterator[None]:
        """Provide the current weights: gathered in the model, or sent to vLLM if they have changed."""
        if not isinstance(engine, VLLMEngine):
            with whole_weights(self.accelerator, self.policy):
                yield
            return
        if self._sent != self.updates:
            reshard(self.policy)
            model = self.accelerator.unwrap_model(self.policy).model
            sync_weights(engine, model, tokenizer, self.config)
            self._sent = self.updates
        yield

    def update(self, batch: Batch, step: int = 0) -> Metrics:
        """Take one optimizer step per minibatch; return the metrics, averaged and by minibatch.

        Metrics are those of completions that can have a gradient, and averages those of minibatches with such
        completions; the average entropy is over tokens, and NaN without any. ``clip_fraction/after_first`` is
        missing if no minibatch after the first has such completions.
        """
        each: list[Metrics] = []
        minibatches: list[Minibatch] = []
        terms: Terms = {}
        scores_first = self.needs_full_minibatch or self.config.off_policy.level != "none"
        given = batch.old_logprobs is not None or self.config.objective.centering > 0
        on_policy = not (scores_first or given)  # the first minibatch's new log-probs are its old ones

        def attempt() -> None:
            """Take the remaining steps; before the first one, compute the terms that they share."""
            nonlocal minibatches, terms
            self.optimizer.zero_grad()  # of an attempt that ran out of memory
            minibatches = self._minibatches(batch, step)
            if not each:
                terms = self._terms(batch, minibatches[: self.config.update.minibatches], on_policy)
            for minibatch in minibatches[len(each) :]:
                each.append(self._learn(batch, terms, minibatch, on_policy and not each))

        self.micro_batch_tokens.fit(attempt)
        tokens = [int(batch.counted[minibatch.active].sum()) for minibatch in minibatches]
        for count, values in zip(tokens, each, strict=True):
            values["entropy"] = values["entropy"] if count else math.nan
        scored = [number for number, count in enumerate(tokens) if count]
        measured = [each[n] for n in scored] or each
        metrics = {name: sum(values[name] for values in measured) / len(measured) for name in each[0]}
        metrics["ratio/min"] = min(values["ratio/min"] for values in measured)
        metrics["ratio/max"] = max(values["ratio/max"] for values in measured)
        entropies = [tokens[n] * each[n]["entropy"] for n in scored]
        metrics["entropy"] = sum(entropies) / sum(tokens) if scored else math.nan
        later = [each[n]["clip_fraction/low"] + each[n]["clip_fraction/high"] for n in scored if n > 0]
        if later:
            metrics["clip_fraction/after_first"] = sum(later) / len(later)
        for number, values in enumerate(each, start=1):
            metrics |= {f"minibatch_{number}/{name}": value for name, value in values.items()}
        return metrics | self._off_policy_metrics(batch, terms)

    def score(self, policy: Any, batch: Batch, step: int = 0) -> gk.TokenLogprobs:
        """Return log-probs and entropy, [N], of the rows that the update of a step uses; 0 elsewhere.

        Micro-batches are those of that update, because the last bit of a result may depend on their shape.
        """

        def attempt() -> gk.TokenLogprobs:
            first_epoch = self._minibatches(batch, step)[: self.config.update.minibatches]
            return self._score(policy, batch, first_epoch)

        return self.micro_batch_tokens.fit(attempt)

    @torch.no_grad()
    def _score(self, policy: Any, batch: Batch, minibatches: Sequence[Minibatch]) -> gk.TokenLogprobs:
        micros = [rows for minibatch in minibatches for rows in minibatch.micro_batches]
        return gk.TokenLogprobs(*self._run(policy, batch, micros)[:2])

    def _run(
        self, policy: Any, batch: Batch, micros: Sequence[Tensor], terms: Terms | None = None
    ) -> tuple[Tensor, Tensor, Any]:
        """Score the rows of micro-batches; with terms of a loss, [B] or [N], also run its backward.

        Returns log-probs and entropy, [N], 0 in other rows; and the last output of this process.
        """
        values = torch.zeros(2, len(batch.loss_mask), dtype=torch.float32, device=batch.loss_mask.device)
        output: Any = None
        for number, rows in enumerate(micros, start=1):
            counts = len(rows) > 0
            rows = rows if counts else rows.new_zeros(1)  # a masked row, for the collectives
            chosen, masks = rows.tolist(), batch.masks
            mask = None if masks is None else SamplingMask.concatenate([masks[row] for row in chosen])
            pairs = batch.prompts, batch.completions
            prompts, completions = ([each[row] for row in chosen] for each in pairs)
            local = None if terms is None else batch.pick(terms, rows)
            reduces = number == len(micros) or self.sharded  # FSDP keeps only shards of gradients
            with nullcontext() if local is None or reduces else self.accelerator.no_sync(self.policy):
                if local is not None:
                    local["loss_mask"] &= counts
                output = policy(prompts, completions, local, mask)
                if local is not None:
                    self.accelerator.backward(output.loss)
            if counts:
                values[:, batch.places(rows)] = torch.stack([output.logprobs, output.entropy]).detach()
        if self.accelerator.num_processes > 1:
            all_reduce(values)
        return *values, output

    def _minibatches(self, batch: Batch, step: int) -> list[Minibatch]:
        """Return the minibatches of every epoch, in an order drawn from seed, step and epoch."""
        update, units = self.config.update, np.array(batch.groups_on_host)
        if len(np.unique(units)) < update.minibatches and not needs_whole_groups(self.objective):
            units = np.arange(len(batch.completions))
        budget, minibatches, active_rows = self.micro_batch_tokens.value, [], self._active(batch)
        for epoch in range(update.epochs):
            order = np.random.default_rng([self.config.seed, step, epoch]).permutation(np.unique(units))
            for part in np.array_split(order, update.minibatches):
                places = (part[:, None] == units).nonzero()[1]
                rows = torch.tensor(places, dtype=torch.int64, device="cpu")
                active = rows[active_rows[rows]]
                micros = micro_batches(batch, active, self.shares_prefixes, budget, self.accelerator)
                minibatches.append(Minibatch(rows, active, micros))
        return minibatches

    def _active(self, batch: Batch) -> Tensor:
        """Return [B] bool on the CPU, the rows that can have a gradient."""
        config, active = self.config, batch.counted > 0
        beyond = self.needs_full_minibatch or config.kl.beta > 0 or config.update.entropy_coef != 0
        one_each = len(batch.advantages) == len(batch.completions)
        if self.objective.zero_advantage_is_inactive and not beyond and one_each:
            active &= batch.advantages.to("cpu") != 0
        return active

    def _terms(self, batch: Batch, first_epoch: Sequence[Minibatch], on_policy: bool) -> Terms:
        """Return the terms that the losses of all minibatches share.

        ``on_policy``: the first minibatch is not scored; its old log-probs, 0 here, are set by its loss.
        """
        config, old, full = self.config, batch.old_logprobs, self.needs_full_minibatch
        if config.objective.centering:
            old = batch.rollout_logprobs
            if old is None or batch.centering is None:
                lacks = "the engine returns no log-probs of its most likely tokens"
                raise InputError(f"objective.centering: {lacks}")
        elif old is None:
            later = first_epoch[1:] if on_policy else first_epoch
            old = self._score(self.policy, batch, later).logprobs
        terms: Terms = {"old_logprobs": old, "advantages": batch.advantages, "loss_mask": batch.loss_mask}
        terms["entropy_coef"] = config.update.entropy_coef
        if needs_reference(config):
            ref = batch.ref_logprobs
            if ref is None:
                ref = self._score(self.reference, batch, first_epoch).logprobs
            terms |= {"ref_logprobs": ref, "kl_beta": config.kl.beta}
        if config.off_policy.level != "none":
            sampled = batch.rollout_logprobs
            if sampled is None:
                raise InputError("off_policy.level: the engine returns no log-probs of the sampled tokens")
            options = off_policy_options(config) | {"loss_mask": batch.loss_mask}
            options["cu_seqlens"] = offsets_from_list(batch.lengths, batch.loss_mask.device)
            terms["rollout_weights"] = gk.rollout_weights(old, sampled, **options)
        if "group_ids" in self.objective.needs or (full and self.objective.aggregation == "prompt_mean"):
            terms["group_ids"] = batch.group_ids
        if "turn_ids" in self.objective.needs:
            one_turn = torch.zeros_like(batch.loss_mask, dtype=torch.int64)
            terms["turn_ids"] = one_turn if batch.turn_ids is None else batch.turn_ids
        return terms

    def _learn(self, batch: Batch, terms: Terms, minibatch: Minibatch, on_policy: bool) -> Metrics:
        """Compute a minibatch's gradient, and take an optimizer step."""
        objective = self.objective
        if hasattr(objective, "seed"):  # random numbers of the objective, new in each update
            objective = replace(objective, seed=objective.seed + self.updates)
        terms = terms | {"objective": objective}
        if self.needs_full_minibatch:
            output = self._learn_full(batch, terms, minibatch)
        else:
            output = self._learn_each(batch, terms, minibatch, on_policy)
        return self._optimizer_step({**output.metrics, "loss": output.loss.detach()})

    def _optimizer_step(self, measured: Mapping[str, Tensor]) -> Metrics:
        """Step if the gradient is finite; return its norm and the measured values, read in one transfer."""
        norm = self.accelerator.clip_grad_norm_(self.policy.parameters(), self.config.update.max_grad_norm)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        norm = norm.to(measured["loss"].device)  # without any gradient, it is a zero on the CPU
        rate = float(self.scheduler.get_last_lr()[0])
        if not self.sharded:  # found_inf skips the step on the device: the host syncs only after it
            self.optimizer.found_inf = (~norm.isfinite()).float()
            self.optimizer.step()
        values = read({**measured, "grad_norm": norm})
        if finite := math.isfinite(values["grad_norm"]):
            if self.sharded:
                self.optimizer.step()
            self.scheduler.step()
        self.optimizer.zero_grad()
        return values | {"updates_left_out": float(not finite), "learning_rate": rate}

    def _learn_each(self, batch: Batch, terms: Terms, minibatch: Minibatch, on_policy: bool) -> gk.LossOutput:
        """Run a loss that each micro-batch computes separately; return the loss of the whole minibatch.

        ``on_policy`` writes the minibatch's new log-probs into the old ones.
        """
        rows, active, micros = minibatch
        divisor, world = self._divisor(batch, rows), self.accelerator.num_processes
        # DDP and FSDP average gradients over the processes.
        micro_terms = terms | {"normalizer": divisor / world}
        if on_policy:
            micro_terms["old_logprobs"] = None
        if centers := self.config.objective.centering > 0:
            micro_terms["centering"] = batch.centering
        logprobs, entropy, output = self._run(self.policy, batch, micros, micro_terms)
        places = batch.places(active)
        if on_policy:
            terms["old_logprobs"][places] = logprobs[places]
        if len(micros) == 1 == world and output is not None and not centers:
            return output
        # Metrics of the whole minibatch do not depend on the micro-batches.
        whole = batch.pick(terms | {"normalizer": divisor}, active)
        return gk.policy_loss(logprobs[places], entropy=entropy[places], **whole)

    def _divisor(self, batch: Batch, rows: Tensor) -> float | Tensor:
        """Return the minibatch's normalizer, a number; for "prompt_mean" [B], one per completion."""
        masks, cpu = [batch.loss_masks_on_host[row] for row in rows.tolist()], torch.device("cpu")
        options: dict[str, Any] = {"cu_seqlens": offsets_from_list(list(map(len, masks)), cpu)}
        if self.objective.aggregation != "prompt_mean":
            return float(gk.normalizer(self.objective, torch.cat(masks), **options))
        ids = batch.group_ids.to("cpu")[rows]
        each = gk.normalizer(self.objective, torch.cat(masks), group_ids=ids, **options)
        divisors = each.new_ones(len(batch.completions)).index_put((rows,), each)
        return copy_async(divisors, batch.loss_mask.device)

    def _learn_full(self, batch: Batch, terms: Terms, minibatch: Minibatch) -> gk.LossOutput:
        """Run the loss of the whole minibatch; the micro-batches then backpropagate its gradient."""
        rows, _, micros = minibatch
        places, world = batch.places(rows), self.accelerator.num_processes
        current: Any = self._score(self.policy, batch, [minibatch])
        logprobs, entropy = (values[places].requires_grad_() for values in current)
        output = gk.policy_loss(logprobs, entropy=entropy, **batch.pick(terms, rows))
        gradients = torch.autograd.grad(output.loss, (logprobs, entropy), materialize_grads=True)
        # DDP and FSDP average gradients, but each process has only its part of the sum: hence the factor.
        token_weights, entropy_coef = current.logprobs.new_zeros(2, len(current.logprobs))
        token_weights[places], entropy_coef[places] = world * gradients[0], -world * gradients[1]
        micro_terms: Terms = {"objective": gk.Linear(), "old_logprobs": None, "advantages": None}
        micro_terms |= {"loss_mask": terms["loss_mask"], "token_weights": token_weights}
        if terms["entropy_coef"] != 0:
            micro_terms["entropy_coef"] = entropy_coef
        self._run(self.policy, batch, micros, micro_terms)
        return output

    def _off_policy_metrics(self, batch: Batch, terms: Terms) -> Metrics:
        """Return metrics of the difference, in nats, between the log-probs of training, before the first
        update, and of the engine, NaN without any token; and metrics of rollout weights.
        """
        if batch.rollout_logprobs is None or self.config.objective.centering:
            return {}
        rows = self._active(batch).nonzero()[:, 0]
        part = batch.pick(terms | {"sampled": batch.rollout_logprobs}, rows)
        gaps = (exact(part["old_logprobs"]) - exact(part["sampled"]))[part["loss_mask"]]
        sizes = gaps.abs()
        largest = sizes.max() if len(sizes) else sizes.new_tensor(math.nan)
        metrics = {
            "mismatch/mean": sizes.mean(),
            "mismatch/ratio": gaps.exp().mean(),
            "mismatch/max": largest,
        }
        if len(rows) > 0 and "rollout_weights" in terms:
            options = {name: part[name] for name in ("advantages", "loss_mask", "cu_seqlens")}
            metrics |= gk.off_policy.weight_metrics(part["rollout_weights"], **options)
        return read(metrics)

    def tensors(self) -> dict[str, Tensor]:
        """Return the trained weights and the optimizer's state by name, without a copy, as FSDP2's shards."""
        reshard(self.policy)
        tensors = {}
        for name, p in self._trained().items():
            tensors[f"weights/{name}"] = p.detach()
            for key, value in self.optimizer.state.get(p, {}).items():
                tensors[f"optimizer/{key}/{name}"] = value
        return tensors

    def load(self, checkpoint: Path, updates: int) -> None:
        """Restore `tensors` from a checkpoint of any number of processes; refuse another model's."""
        for p in self._trained().values():
            p.grad = torch.zeros_like(p)
        self.optimizer.step()  # allocates the state, which is then loaded, as are the weights
        self.optimizer.zero_grad()
        for state in self.optimizer.state.values():
            state["step"].zero_()  # a checkpoint before the first update has no state
        load_tensors(checkpoint, self.tensors())
        self.scheduler.last_epoch = updates - 1
        self.scheduler.step()

    def _trained(self) -> dict[str, Tensor]:
        policy = self.policy if self.sharded else self.accelerator.unwrap_model(self.policy)
        return {name: p for name, p in policy.named_parameters() if p.requires_grad}


def read(metrics: Mapping[str, Tensor]) -> Metrics:
    """Return 0-d tensors of one device as numbers, in one transfer."""
    return dict(zip(metrics, torch.stack([exact(x) for x in metrics.values()]).tolist(), strict=True))


def learning_rate_factor(update: int, config: UpdateConfig) -> float:
    """Return the factor of the learning rate in an optimizer update, counted from 0."""
    warmup = config.warmup_updates
    if update < warmup:
        return (update + 1) / (warmup + 1)
    rest = max(config.steps * config.epochs * config.minibatches - warmup, 1)
    done = min((update - warmup) / rest, 1.0)
    factors = {"none": 1.0, "linear": 1.0 - done, "cosine": 0.5 + 0.5 * math.cos(math.pi * done)}
    return factors[config.learning_rate_decay]
