"""The training loop: sample completions, score them, compare within groups, update in minibatches, repeat.

`GSPOTrainer` reads from top to bottom like the algorithm. A recipe subclasses it and overrides the methods from
`GSPOTrainer.rollout` to `GSPOTrainer.evaluation`, and what a checkpoint contains (``state_dict``);
``examples/recipes`` has several.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import gather_object

from gspo_kernels.trainer.batch import Batch, Rollout, Sample, make_batch, rollout_metrics
from gspo_kernels.trainer.checkpoint import RunDirectory, defer_signals, load_state, open_run, save_state
from gspo_kernels.trainer.config import InputError, TrainConfig
from gspo_kernels.trainer.data import (
    Prompts,
    Rows,
    check_rows,
    column_names,
    columns_of,
    prepare_prompts,
    prompt_order,
)
from gspo_kernels.trainer.model import (
    end_token_ids,
    export_model,
    load_tokenizer,
    make_policies,
    padding_token_id,
)
from gspo_kernels.trainer.processes import (
    check_processes,
    make_accelerator,
    map_shares,
    reshard,
    seed_everything,
    whole_weights,
)
from gspo_kernels.trainer.report import Metrics, Report
from gspo_kernels.trainer.rewards import RewardFunction, Rewards, RewardSet, advantages_of, levels
from gspo_kernels.trainer.rollout import ModelEngine, RolloutEngine, Sampling, sampling_of
from gspo_kernels.trainer.update import Updater, check_config, needs_reference
from gspo_kernels.trainer.vllm import sync_weights, vllm_engine


class GSPOTrainer:
    """Trains a causal language model on prompts and reward functions, in one process or several.

    Args:
        model: a transformers causal language model, or a directory to load one from.
        tokenizer: its tokenizer, or None to load the one beside the model.
        rewards: one function or several, ``f(prompts, completions, completion_ids, **columns)``.
        dataset: rows (mappings) with a ``"prompt"``; other columns reach the reward functions.
        eval_dataset: rows that are never trained on, or None.
        config: everything else.
        engine: what completes prompts; by default what ``config.engine`` names, or the model itself.
        accelerator: accelerate's, for what its own environment variables do not say.

    Raises:
        InputError: the model, a dataset, a reward or the configuration cannot be used; nothing was written.
    """

    serves_turns: ClassVar[bool] = False
    """Whether rollouts have ``turn_ids``, which objectives of turns need."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        rewards: RewardFunction | Sequence[RewardFunction],
        dataset: Rows,
        eval_dataset: Rows | None = None,
        config: TrainConfig | None = None,
        *,
        engine: RolloutEngine | None = None,
        accelerator: Any = None,
    ) -> None:
        self.config = config = config or TrainConfig()
        check_config(config, serves_turns=self.serves_turns)
        if tokenizer is None and not isinstance(model, str | Path):
            raise InputError("a model that is already loaded needs its tokenizer")
        if engine is not None and config.engine.url is not None:
            raise InputError(f"engine.url: got {config.engine.url!r} and an engine; only one can sample")
        self.tokenizer = tokenizer if tokenizer is not None else load_tokenizer(str(model))
        functions = [rewards] if callable(rewards) else list(rewards)
        self.rewards = RewardSet(functions, config.reward_weights, config.reward_timeout)
        check_rows(dataset, "the training dataset")
        self.rewards.check(column_names(dataset))
        self.directory = RunDirectory(config.output)
        self.accelerator = accelerator or make_accelerator(
            config.update.precision, config.trackers, self.directory.trackers
        )
        check_processes(self.accelerator)
        self.report = Report(config, self.accelerator, self.directory)
        path = str(model)
        self.model, policy, reference, reference_mode = make_policies(
            model, self.tokenizer, config, self.accelerator, needs_reference=needs_reference(config)
        )
        self.updater = Updater(
            self.accelerator, policy, config, reference=reference, reference_mode=reference_mode
        )
        vocabulary = self.model.get_input_embeddings().num_embeddings
        context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        self.longest_prompt = None if context is None else context - config.rollout.max_new_tokens
        prepare = partial(
            prepare_prompts,
            self.tokenizer,
            longest=self.longest_prompt,
            embedded=vocabulary,
            template_options=config.data.template_options,
        )
        self.train_prompts: Prompts = prepare(dataset, "the training dataset")
        self.eval_prompts: Prompts | None = None
        if eval_dataset is not None:
            held_out = [eval_dataset[i] for i in range(min(config.evaluation.prompts, len(eval_dataset)))]
            check_rows(held_out, "the eval dataset")
            self.eval_prompts = prepare(held_out, "the eval dataset")
        end_ids = end_token_ids(self.model, self.tokenizer)
        self.engine: Any = engine
        if engine is None and config.engine.url is None:
            pad_id = padding_token_id(self.tokenizer)
            self.engine = ModelEngine(self.model, end_ids, pad_id, config.rollout.batch_size)
        elif engine is None:
            self.engine = vllm_engine(
                config, end_ids=end_ids, vocabulary=vocabulary, model_path=path, accelerator=self.accelerator
            )
        self.step = 0
        self.prompts_used = 0
        self._engine_has: int | None = None  # number of updates in the weights that were sent to it

    def train(self, *, resume: bool = False, overwrite: bool = False, force: bool = False) -> Metrics:
        """Run to the configured number of steps; return the metrics of the last evaluation.

        Writes ``config.yaml``, ``metrics.jsonl``, ``checkpoints/``, ``progress.png`` and the trained
        ``model/`` into the output directory. SIGTERM, or Ctrl-C once, ends the run after the step in
        progress, with a checkpoint and `SystemExit`; so does an error in a reward or an engine, with the
        checkpoint of the step before.
        """
        config, report = self.config, self.report
        with self.directory:
            checkpoint, changed = open_run(
                self.directory, config, self.accelerator, resume=resume, overwrite=overwrite, force=force
            )
            if checkpoint is not None:
                self.load_state_dict(load_state(checkpoint), checkpoint)
            report.begin(self.step, resumed=checkpoint is not None, changed=changed)
            if self.eval_prompts is None:
                report.display.line("no eval dataset: accuracy on held-out prompts is not measured")
            with report.display, defer_signals() as signals:
                if self.step == 0:
                    report.step(0, self.evaluate())
                while self.step < config.update.steps:
                    self.take_step(signals)
            reshard(self.updater.policy)
            return report.finish(self.step, partial(export_model, self.model, self.tokenizer))

    def take_step(self, signals: Sequence[int] = ()) -> None:
        """Sample, score, compare and update once; evaluate and save where that is due."""
        config, report = self.config, self.report
        before, started = self.state_dict(), time.monotonic()
        self.step += 1
        seed_everything(config.seed, self.step, self.accelerator.process_index)
        with self._saved_on_failure(before):
            rollout = self.rollout()
            batch = self.compare(rollout)
        sampled = time.monotonic()
        metrics = rollout_metrics(rollout) | self.update(batch)
        ended = time.monotonic()
        metrics |= {"seconds": ended - started, "seconds/rollout": sampled - started}
        metrics |= {"seconds/update": ended - sampled}
        metrics["tokens_per_second"] = sum(batch.lengths) / (ended - started)
        last = self.step == config.update.steps
        if last or self.step % config.evaluation.every == 0:
            with self._saved_on_failure(self.state_dict()):
                metrics |= self.evaluate()
        report.step(self.step, metrics)
        report.rollout(self.step, rollout, self.tokenizer, show=last or "eval/greedy_accuracy" in metrics)
        stop = max(gather_object([max(signals, default=0)]))
        if last or stop or self.step % config.checkpoint.every == 0:
            self.save(self.state_dict())
        if stop and not last:
            report.display.line(f"ended after step {self.step}; --resume goes on from there")
            raise SystemExit(128 + stop)

    # What a recipe overrides: the parts of a step, in their order.

    def rollout(self) -> Rollout:
        """Complete the next prompts in groups, and score the completions."""
        samples = self.sample(self.next_rows())
        return Rollout(samples, self.score(samples), self.config.rollout.group_size)

    def next_rows(self, count: int | None = None) -> list[int]:
        """Return the rows of the next prompts, by default those of one rollout."""
        count = count or self.config.rollout.prompts_per_rollout
        start, self.prompts_used = self.prompts_used, self.prompts_used + count
        return prompt_order(len(self.train_prompts.tokens), self.config.seed, start, count)

    @torch.no_grad()
    def sample(
        self,
        rows: Sequence[int],
        group_size: int | None = None,
        *,
        prompts: Prompts | None = None,
        sampling: Sampling | None = None,
        tokens: Sequence[list[int]] | None = None,
    ) -> list[Sample]:
        """Complete the prompt of each row ``group_size`` times; groups are consecutive.

        Every process completes its share of the prompts, and all get the whole. ``tokens``, a list for each
        row, are completed in place of the prompts; rewards see these all the same.
        """
        prompts, size = prompts or self.train_prompts, group_size or self.config.rollout.group_size
        how = sampling or sampling_of(self.config.rollout)
        given = [prompts.tokens[row] for row in rows] if tokens is None else tokens

        def complete(places: list[int]) -> list[Sample]:
            each = [place for place in places for _ in range(size)]
            found = self.engine.generate([given[place] for place in each], how)
            if how.return_mask and any(completion.mask is None for completion in found):
                name = type(self.engine).__name__
                raise InputError(f"rollout.keep_sampling_mask: {name} gives completions without a mask")
            texts = self.tokenizer.batch_decode([c.ids.tolist() for c in found], skip_special_tokens=True)
            pairs = zip(each, texts, found, strict=True)
            return [Sample(rows[place], list(given[place]), text, c) for place, text, c in pairs]

        with self._engine_weights(), self.accelerator.autocast():
            shares = map_shares(self.accelerator, len(rows), complete)
        return [sample for share in shares for sample in share]

    def score(self, samples: Sequence[Sample], prompts: Prompts | None = None) -> Rewards:
        """Call the reward functions; each process asks for its share of the groups, and all get the whole."""
        source = prompts or self.train_prompts
        groups = [list(group) for _, group in groupby(samples, lambda sample: sample.row)]

        def rewards_of(share: list[int]) -> Rewards:
            mine = [sample for place in share for sample in groups[place]]
            rows = [source.rows[sample.row] for sample in mine]
            ids = [sample.ids.tolist() for sample in mine]
            columns = columns_of(rows, source.columns)
            return self.rewards([row["prompt"] for row in rows], [s.text for s in mine], ids, columns)

        return Rewards.joined(map_shares(self.accelerator, len(groups), rewards_of))

    def compare(self, rollout: Rollout) -> Batch:
        """Turn rewards into advantages, completions of a group compared with each other."""
        config, rewards, size = self.config, rollout.rewards, rollout.group_size
        kind = self.updater.objective.advantages_are
        if kind == "rewards":
            advantages = rewards.total
        elif kind == "levels":
            advantages = levels(rewards.total, size)
        else:
            advantages = advantages_of(
                rewards,
                group_size=size,
                method=config.advantages,
                scale=config.advantage_scale,
                lengths=torch.tensor([len(sample.ids) for sample in rollout.samples]),
            )
        truncated, device = config.rollout.truncated, self.accelerator.device
        return make_batch(rollout, advantages, truncated=truncated, device=device)

    def update(self, batch: Batch) -> Metrics:
        """Take one optimizer step for each minibatch."""
        return self.updater.update(batch, self.step)

    def evaluation(self, prompts: Prompts, sampling: Sampling) -> Rollout:
        """Complete every held-out prompt once and score the completions."""
        samples = self.sample(range(len(prompts.tokens)), 1, prompts=prompts, sampling=sampling)
        return Rollout(samples, self.score(samples, prompts), 1)

    def evaluate(self) -> Metrics:
        """Complete the held-out prompts greedily and sampled; return the mean of every reward."""
        if self.eval_prompts is None:
            return {}
        metrics: Metrics = {}
        seed_everything(self.config.seed, 0, self.accelerator.process_index)
        for label in ("greedy", "sampled"):
            how = sampling_of(self.config.rollout, greedy=label == "greedy", return_mask=False)
            rollout = self.evaluation(self.eval_prompts, how)
            means = {name: float(values.nanmean()) for name, values in rollout.rewards.by_name.items()}
            metrics[f"eval/{label}_accuracy"] = means[self.rewards.names[0]]
            metrics |= {f"eval/{label}/{name}": value for name, value in {**means, **rollout.metrics}.items()}
        return metrics

    # What goes into a checkpoint.

    def state_dict(self) -> dict[str, Any]:
        """Return everything that going on needs but the updater's tensors: numbers, containers, CPU tensors."""
        return {
            "step": self.step,
            "prompts_used": self.prompts_used,
            "updates": self.updater.updates,
            "streaks": dict(self.report.health.streaks),
            "processes": self.accelerator.num_processes,
        }

    def load_state_dict(self, state: Mapping[str, Any], checkpoint: Path) -> None:
        """Go on from what `state_dict` returned, and from a checkpoint's tensors."""
        self.updater.load(checkpoint, state["updates"])
        self.step, self.prompts_used = state["step"], state["prompts_used"]
        self.report.health.streaks = dict(state["streaks"])
        if state["processes"] != self.accelerator.num_processes:
            self.report.display.line("another number of processes than before: sampling has new seeds")

    def save(self, state: Mapping[str, Any]) -> None:
        """Write the checkpoint of a state; all processes call."""
        write = partial(save_state, state, self.updater.tensors(), accelerator=self.accelerator)
        self.directory.save_checkpoint(state["step"], write, self.config.checkpoint.keep, self.accelerator)

    @contextmanager
    def _saved_on_failure(self, state: Mapping[str, Any]) -> Iterator[None]:
        """Save the state where something inside fails, so that nothing is lost; all processes fail together."""
        try:
            yield
        except Exception:
            latest = self.directory.latest_checkpoint()
            if latest is None or latest.name != f"step_{state['step']:06d}":
                self.save(state)
            raise

    def _engine_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the engine has the weights of now."""
        updater = self.updater
        if not hasattr(self.engine, "load"):
            return whole_weights(self.accelerator, updater.policy)
        if self._engine_has != updater.updates:
            reshard(updater.policy)
            dtype = torch.bfloat16 if self.config.update.precision == "bf16" else torch.float32
            write = partial(export_model, self.model, self.tokenizer, accelerator=self.accelerator, dtype=dtype)
            folder = Path(self.config.engine.weights or self.config.output)
            sync_weights(self.engine, write, folder, self.accelerator)
            self._engine_has = updater.updates
        return nullcontext()
