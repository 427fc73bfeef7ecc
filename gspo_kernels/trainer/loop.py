"""The training loop: sample completions, score them, compare them in groups, update in minibatches, repeat.

`GSPOTrainer.take_step` is the algorithm. The methods after it are the parts of a step, in their order; a
recipe overrides them, and what a checkpoint contains; see ``examples/recipes``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import gather_object
from torch import Tensor

from gspo_kernels.logits.centering import ScoreCentering
from gspo_kernels.models.rope import varying_ropes
from gspo_kernels.trainer import data
from gspo_kernels.trainer.checkpoint import RunDirectory, defer_signals, load_state
from gspo_kernels.trainer.config import InputError, TrainConfig
from gspo_kernels.trainer.model import (
    end_token_ids,
    load_pretrained,
    load_tokenizer,
    make_policies,
    padding_token_id,
    weights_digest,
)
from gspo_kernels.trainer.processes import AutoSize, map_shares, seed_everything, set_up
from gspo_kernels.trainer.report import Metrics, Report, lenient_output
from gspo_kernels.trainer.rewards import RewardFunction, Rewards, RewardSet, advantages_of, levels
from gspo_kernels.trainer.rollout import (
    Completion,
    ModelEngine,
    Rollout,
    RolloutEngine,
    Sample,
    Sampling,
    rollout_metrics,
    sampling_of,
)
from gspo_kernels.trainer.update import Batch, Updater, check_config, needs_reference
from gspo_kernels.trainer.vllm import vllm_engine


class GSPOTrainer:
    """A trainer of a causal language model on prompts and reward functions, in one process or several.

    Args:
        model, tokenizer: a model and a tokenizer of transformers; or a directory, and None for its tokenizer.
        rewards: one function or several, ``f(prompts, completions, completion_ids, **columns)``.
        dataset: rows (mappings) with a ``"prompt"``; other columns reach the reward functions.
        eval_dataset: rows that are never trained on, or None.
        config: all other settings.
        engine: completes prompts; by default the engine that ``config.engine`` names, or the model itself.
        accelerator: accelerate's `Accelerator`, for settings that its environment variables do not cover.
    """

    serves_turns: ClassVar[bool] = False  # whether rollouts have turn_ids, which some objectives need

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        rewards: RewardFunction | Sequence[RewardFunction],
        dataset: data.Rows,
        eval_dataset: data.Rows | None = None,
        config: TrainConfig | None = None,
        *,
        engine: RolloutEngine | None = None,
        accelerator: Any = None,
    ) -> None:
        config = config or TrainConfig()
        self.rewards = self.check_inputs(rewards, dataset, eval_dataset, config)
        self.tokenizer = load_tokenizer(model) if tokenizer is None else tokenizer
        self.directory = RunDirectory(config.output)
        self.accelerator, self.config = set_up(config, self.directory.trackers, accelerator)
        self.report = Report(self.config, self.accelerator, self.directory)
        self.model, *policies = make_policies(
            model, self.tokenizer, self.config, self.accelerator, needs_reference(config)
        )
        self.updater = Updater(self.accelerator, self.config, *policies)
        fixed = needs_reference(config) or not all(p.requires_grad for p in self.model.parameters())
        base = weights_digest(self.model) if fixed else "all are trained"
        self.longest_prompt = data.longest_prompt(self.model.config, config.rollout.max_new_tokens)
        self.train_prompts, self.eval_prompts = data.prepare_datasets(
            self.tokenizer,
            dataset,
            eval_dataset,
            longest=self.longest_prompt,
            embedded=self.model.get_input_embeddings().weight.shape[0],
            options=config.data,
            say=self.report.say,
        )
        rows = self.train_prompts.digest
        self.inputs = {"rows of the dataset, or their order": rows, "weights of the model": base}
        self.batch_size = AutoSize.of(config, "rollout.batch_size")
        every = [*self.train_prompts.tokens, *(self.eval_prompts.tokens if self.eval_prompts else ())]
        length = max(map(len, every)) + config.rollout.max_new_tokens
        end_ids, padding = end_token_ids(self.model, self.tokenizer), padding_token_id(self.tokenizer)
        if engine is not None and config.engine.url is not None:
            raise InputError(
                f"engine.url: got {config.engine.url!r} and an engine; only one of them can sample"
            )
        self.engine: Any = engine
        if config.engine.url is not None:
            say = self.report.say
            self.engine = vllm_engine(self.config, self.model, model, end_ids, length, say)
        elif engine is None:
            self.engine = ModelEngine(self.model, end_ids, padding, self.batch_size.value)
        for rope in varying_ropes(self.model):
            if length > rope.limit:
                other = f"the model's {rope.kind} RoPE changes its frequencies beyond {rope.limit} tokens"
                both = "a longer completion is sampled with both, and scored with the later ones"
                self.report.say(f"{other}: {both}; set off_policy, or sample less", warning=True)
        if self.accelerator.num_processes > 1:
            sizes = ", ".join(f"{size.option} = {size.value}" for size in self.sizes())
            self.report.say(f"several processes: set smaller sizes if memory runs out ({sizes})")
        self.step, self.prompts_used = 0, 0

    @lenient_output()
    @torch.enable_grad()
    def train(self, *, resume: bool = False, overwrite: bool = False, force: bool = False) -> Metrics:
        """Run to the configured number of steps; return the metrics of the last step.

        SIGTERM, SIGHUP or one Ctrl-C ends the run after the step, with a checkpoint and `SystemExit`. An
        error in a reward or an engine leaves a checkpoint. ``force`` resumes with other settings, rows
        or weights.
        """
        with self.directory:
            flags = {"resume": resume, "overwrite": overwrite, "force": force}
            steps = self.config.update.steps
            checkpoint, changed = self.directory.open(self.config, self.inputs, **flags)
            if checkpoint is not None:
                self.load_state_dict(load_state(checkpoint), checkpoint)
            step = None if checkpoint is None else self.step
            last = self.report.begin(step, changed=changed, evaluates=self.eval_prompts is not None)
            with defer_signals() as signals:
                if checkpoint is None:
                    self.report.step(0, self.evaluate())
                elif self.step == steps and self.eval_prompts and "eval/greedy_reward" not in last:
                    self.report.step(self.step, self.evaluate())  # the run was to be longer at this step
                while self.step < steps:
                    self.take_step(signals)
            return self.report.finish(self.step, self.model, self.tokenizer)

    def take_step(self, signals: Sequence[int] = ()) -> None:
        """Take one step of the algorithm; evaluate and save if this step is due for it."""
        config, before, started = self.config, self.state_dict(), time.monotonic()
        self.step += 1
        seed_everything(config.seed, self.step, self.accelerator.process_index)
        with self.saved_if_it_fails(before):
            rollout = self.rollout()  # prompts, a group of completions of each, and their rewards
            batch = self.compare(rollout)  # rewards become advantages
            digest = weights_digest(self.model) if config.save_rollouts else ""
        sampled = time.monotonic()
        metrics = rollout_metrics(rollout) | self.update(batch)  # an optimizer step per minibatch
        ended = time.monotonic()
        metrics |= {"seconds/rollout": sampled - started, "seconds/update": ended - sampled}
        metrics |= {"seconds": ended - started, "tokens_per_second": sum(batch.lengths) / (ended - started)}
        if config.save_rollouts:
            self.report.save_rollout(self.step, rollout, batch, self.train_prompts, self.tokenizer, digest)
        last = self.step == config.update.steps
        evaluates = last or self.step % config.evaluation.every == 0
        try:
            with self.saved_if_it_fails(self.state_dict()):
                metrics |= self.evaluate() if evaluates else {}
        finally:
            self.report.step(self.step, metrics)
        if evaluates:
            self.report.show_rollout(rollout, self.tokenizer)
        stop = max(gather_object([max(signals, default=0)]))
        if last or stop or self.step % config.checkpoint.every == 0:
            self.save(self.state_dict())
        if stop and not last:
            self.report.say(f"stopped after step {self.step}; continue with --resume")
            raise SystemExit(128 + stop)

    # The parts of a step, in their order, which a recipe overrides.

    def rollout(self) -> Rollout:
        """Complete the next prompts in groups and score the completions."""
        samples = self.sample(self.next_rows())
        return Rollout(samples, self.score(samples), self.config.rollout.group_size)

    def next_rows(self) -> list[int]:
        """Return the rows of the next rollout's prompts."""
        start, count = self.prompts_used, self.config.rollout.prompts_per_rollout
        self.prompts_used += count
        return data.prompt_order(len(self.train_prompts.tokens), self.config.seed, start, count)

    @torch.no_grad()
    def sample(
        self,
        rows: Sequence[int],
        group_size: int | None = None,
        *,
        prompts: data.Prompts | None = None,
        sampling: Sampling | None = None,
        tokens: Sequence[list[int]] | None = None,
    ) -> list[Sample]:
        """Complete the prompt of each row ``group_size`` times; groups are consecutive.

        Every process completes its share and gets all samples. ``tokens``, a list of ids for each row,
        replace those of the prompts; the reward functions still get the prompts.
        """
        source, size = prompts or self.train_prompts, group_size or self.config.rollout.group_size
        if sampling is None:
            mask, top = self.config.rollout.keep_sampling_mask, self.config.objective.centering
            sampling = replace(sampling_of(self.config.rollout), return_mask=mask, top_logprobs=top)
        inputs = [source.tokens[row] for row in rows] if tokens is None else tokens

        def complete(share: list[int]) -> list[Sample]:
            each = [place for place in share for _ in range(size)]
            completions = self.generate([list(inputs[place]) for place in each], sampling)
            if sampling.return_mask and any(completion.mask is None for completion in completions):
                name = type(self.engine).__name__
                raise InputError(f"rollout.keep_sampling_mask: {name} returns completions without a mask")
            ids = [completion.ids.tolist() for completion in completions]
            texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
            parts = zip(each, texts, completions, strict=True)
            return [Sample(rows[place], list(inputs[place]), text, done) for place, text, done in parts]

        weights, autocast = self.updater.weights_in(self.engine, self.tokenizer), self.accelerator.autocast()
        with weights, autocast:
            shares = map_shares(len(rows), complete)
        return [sample for share in shares for sample in share]

    def generate(self, prompts: list[list[int]], sampling: Sampling) -> list[Completion]:
        """Complete prompts by the engine; the model's own retries in smaller batches if memory runs out."""
        if not isinstance(self.engine, ModelEngine):
            return list(self.engine.generate(prompts, sampling))
        engine = self.engine

        def attempt() -> list[Completion]:
            engine.batch_size = self.batch_size.value
            return engine.generate(prompts, sampling)

        return self.batch_size.fit(attempt)

    def score(self, samples: Sequence[Sample], prompts: data.Prompts | None = None) -> Rewards:
        """Call the reward functions, in each process for its share of the groups; return all rewards."""
        source = prompts or self.train_prompts
        groups = [list(group) for _, group in groupby(samples, lambda sample: sample.row)]

        def rewards_of(share: list[int]) -> Rewards:
            local = [sample for place in share for sample in groups[place]]
            rows = [source.rows[sample.row] for sample in local]
            texts, ids = [sample.text for sample in local], [sample.ids.tolist() for sample in local]
            columns = data.columns_of(rows, source.columns)
            return self.rewards([row["prompt"] for row in rows], texts, ids, columns)

        return Rewards.concatenate(map_shares(len(groups), rewards_of))

    def compare(self, rollout: Rollout) -> Batch:
        """Turn rewards into advantages, or the objective's other inputs; return the update's input.

        Completions without a reward are masked.
        """
        config, rewards, size = self.config, rollout.rewards, rollout.group_size
        counted = [sample.completion.counted(config.rollout.truncated) for sample in rollout.samples]
        kind = self.updater.objective.advantages_are
        if kind == "rewards":
            advantages = rewards.total
        elif kind == "levels":
            advantages = levels(rewards.total, size)
        else:
            lengths = torch.stack([tokens.sum() for tokens in counted])
            advantages = advantages_of(rewards, group_size=size, method=config.advantages, lengths=lengths)
        device = self.accelerator.device
        completions = [sample.completion for sample in rollout.samples]

        def packed(name: str) -> Tensor | None:
            values = [getattr(completion, name) for completion in completions]
            return None if any(value is None for value in values) else torch.cat(values).to(device)

        tops = [completion.centering for completion in completions if completion.centering is not None]
        centering = None
        if len(tops) == len(completions):
            ids, logprobs = ([getattr(top, name) for top in tops] for name in ("ids", "logprobs"))
            centering = ScoreCentering(torch.cat(ids).to(device), torch.cat(logprobs).to(device))
        masks = [completion.mask for completion in completions]
        rewarded = (~rewards.total.isnan()).tolist()
        mask = torch.cat([tokens & known for tokens, known in zip(counted, rewarded, strict=True)])
        return Batch(
            prompts=[torch.tensor(s.prompt, dtype=torch.int64, device=device) for s in rollout.samples],
            completions=[completion.ids.to(device) for completion in completions],
            advantages=advantages.nan_to_num(0.0).to(device),
            loss_mask=mask.to(device),
            group_ids=torch.arange(len(completions), device=device) // size,
            rollout_logprobs=packed("logprobs"),
            turn_ids=packed("turn_ids"),
            masks=None if None in masks else [mask.to(device) for mask in masks if mask is not None],
            centering=centering,
        )

    def update(self, batch: Batch) -> Metrics:
        """Take one optimizer step for each minibatch."""
        return self.updater.update(batch, self.step)

    def evaluation(self, prompts: data.Prompts, sampling: Sampling) -> Rollout:
        """Complete every eval prompt once and score the completions."""
        samples = self.sample(range(len(prompts.tokens)), 1, prompts=prompts, sampling=sampling)
        return Rollout(samples, self.score(samples, prompts), 1)

    def evaluate(self) -> Metrics:
        """Complete the eval prompts once greedily and once sampled; return mean rewards."""
        if self.eval_prompts is None:
            return {}
        metrics: Metrics = {}
        seed_everything(self.config.seed, 0, self.accelerator.process_index)
        for label in ("greedy", "sampled"):
            sampling = sampling_of(self.config.rollout, greedy=label == "greedy")
            rollout = self.evaluation(self.eval_prompts, sampling)
            means = {name: float(values.nanmean()) for name, values in rollout.rewards.by_name.items()}
            metrics[f"eval/{label}_reward"] = float(rollout.rewards.total.nanmean())
            metrics |= {f"eval/{label}/{k}": value for k, value in {**means, **rollout.metrics}.items()}
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return what resuming needs, except the updater's tensors: numbers, containers, CPU tensors."""
        return {
            "step": self.step,
            "prompts_used": self.prompts_used,
            "updates": self.updater.updates,
            "sizes": {size.option: size.value for size in self.sizes()},
            "inputs": self.inputs,
            "processes": self.accelerator.num_processes,
        }

    def load_state_dict(self, state: Mapping[str, Any], checkpoint: Path) -> None:
        """Restore the state that `state_dict` returned, and the tensors of a checkpoint."""
        self.updater.load(checkpoint, state["updates"])
        self.step, self.prompts_used = state["step"], state["prompts_used"]
        for size in self.sizes():
            if size.shrinks:
                size.value = state["sizes"][size.option]
        if state["processes"] != self.accelerator.num_processes:
            self.report.say("the number of processes changed: sampling has new seeds")

    def sizes(self) -> list[AutoSize]:
        """Return the sizes that shrink when memory runs out, which a resumed run keeps."""
        return [self.batch_size, self.updater.micro_batch_tokens]

    def save(self, state: Mapping[str, Any]) -> None:
        """Write the checkpoint of a state; all processes must call."""
        self.directory.save_checkpoint(state, self.updater.tensors(), self.config.checkpoint.keep)

    @contextmanager
    def saved_if_it_fails(self, state: Mapping[str, Any]) -> Iterator[None]:
        """Write the checkpoint of a state if the body raises an error."""
        try:
            yield
        except (Exception, SystemExit):
            self.save(state)
            raise

    @classmethod
    def check_inputs(
        cls, rewards: Any, dataset: data.Rows, eval_dataset: data.Rows | None, config: TrainConfig
    ) -> RewardSet:
        """Return the rewards; an `InputError` names an option, row or function that cannot be used."""
        check_config(config, serves_turns=cls.serves_turns)
        checked = RewardSet([rewards] if callable(rewards) else list(rewards), config.reward_weights)
        if "mean" in checked.names:
            raise InputError("reward function mean: reward/mean is the metric of all rewards; rename it")
        for name, rows in (("the training dataset", dataset), ("the eval dataset", eval_dataset)):
            if rows is not None:
                data.check_rows(rows, name)
                checked.check(data.column_names(rows), name)
        return checked

    @classmethod
    def dry_run(
        cls, rewards: Any, dataset: data.Rows, eval_dataset: data.Rows | None, config: TrainConfig
    ) -> None:
        """Check configuration, data, rewards and tokenizer as a run does, and print the first prompt.

        Of the model, only its configuration is read, and nothing is written.
        """
        cls.check_inputs(rewards, dataset, eval_dataset, config)
        tokenizer = load_tokenizer(config.model)
        model_config = load_pretrained("AutoConfig", config.model, "model")
        longest = data.longest_prompt(model_config, config.rollout.max_new_tokens)
        data.prepare_datasets(tokenizer, dataset, eval_dataset, longest=longest, options=config.data)
