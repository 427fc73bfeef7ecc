"""The training loop: sample completions, score them, compare within groups, update in minibatches, repeat."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

import gspo_kernels as gk
from gspo_kernels.trainer.checkpoint import RunDirectory, random_state, set_random_state, write_directory
from gspo_kernels.trainer.config import TrainConfig
from gspo_kernels.trainer.config_file import load_config, require_same_run, save_config
from gspo_kernels.trainer.data import PromptOrder, Rows, check_rows, columns_of, encode_prompts
from gspo_kernels.trainer.display import Display
from gspo_kernels.trainer.errors import ConfigError, ModelError, RunDirectoryError
from gspo_kernels.trainer.health import Health
from gspo_kernels.trainer.metrics import Record, append_metrics, finite, keep_until, read_metrics
from gspo_kernels.trainer.models import (
    check_head,
    end_token_ids,
    load_model,
    load_tokenizer,
    padding_token_id,
)
from gspo_kernels.trainer.plot import plot_progress
from gspo_kernels.trainer.rewards import RewardFunction, Rewards, RewardSet
from gspo_kernels.trainer.rollout import Completions, Sampling, left_pad, sample_completions
from gspo_kernels.trainer.updates import Experience, PolicyUpdater


class GSPOTrainer:
    """Trains a causal language model on prompts and reward functions.

    Args:
        model: a transformers causal language model, or a directory to load one from.
        tokenizer: its tokenizer, or None to load the one beside the model.
        reward_functions: one function or several, ``f(prompts, completions, completion_ids, **columns)``.
        train_dataset: rows (mappings) with a ``"prompt"``; other columns reach the reward functions.
        eval_dataset: rows that are never trained on, or None.
        config: everything else.

    Raises:
        ValueError: the model, a dataset, a reward or the configuration cannot be used; nothing was written.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        reward_functions: RewardFunction | Sequence[RewardFunction],
        train_dataset: Rows,
        eval_dataset: Rows | None = None,
        config: TrainConfig | None = None,
    ) -> None:
        self.config = config = config or TrainConfig()
        if tokenizer is None and not isinstance(model, str | Path):
            raise ModelError("a model that is already loaded needs its tokenizer")
        self.tokenizer = tokenizer if tokenizer is not None else load_tokenizer(str(model))
        functions = [reward_functions] if callable(reward_functions) else list(reward_functions)
        self.rewards = RewardSet(functions, config.reward_weights)
        self.accuracy_reward = config.evaluation.accuracy or self.rewards.names[0]
        if self.accuracy_reward not in self.rewards.names:
            names = ", ".join(self.rewards.names)
            raise ConfigError(f"evaluation.accuracy: no reward {self.accuracy_reward!r}; there are {names}")
        self.train_dataset = train_dataset
        self.eval_dataset = (
            eval_dataset if eval_dataset is None else _head_rows(eval_dataset, config.evaluation.prompts)
        )
        check_rows(train_dataset, "the training dataset")
        if self.eval_dataset is not None:
            check_rows(self.eval_dataset, "the eval dataset")

        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.accelerator = Accelerator(mixed_precision="no")
        if self.accelerator.num_processes > 1:
            raise ConfigError("training in several processes is not supported yet; start a single one")
        if isinstance(model, str | Path):
            model = load_model(str(model))
        self.updater = PolicyUpdater(
            self.accelerator, model, config.objective.build(), config.update, config.rollout.temperature
        )
        self.model = self.updater.model
        self.end_ids = end_token_ids(self.model, self.tokenizer)
        self.pad_id = padding_token_id(self.tokenizer)
        context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        longest = None if context is None else context - config.rollout.max_new_tokens
        self.train_prompts = encode_prompts(self.tokenizer, train_dataset, "the training dataset", longest)
        self.eval_prompts = encode_prompts(
            self.tokenizer, self.eval_dataset or [], "the eval dataset", longest
        )
        probe, mask = left_pad([tokens[:64] for tokens in self.train_prompts[:2]], self.pad_id)
        check_head(self.model, probe.to(self.model.device), mask.to(self.model.device))

        self.order = PromptOrder(len(self.train_prompts), config.seed)
        self.directory = RunDirectory(config.output)
        self.health = Health()
        self.display = Display(config.update.steps, log_every=config.log_every)
        self.step = 0

    def train(self, *, resume: bool = False, overwrite: bool = False) -> Record:
        """Run to the configured number of steps; return the metrics of the last evaluation.

        Writes ``config.yaml``, ``metrics.jsonl``, ``checkpoints/``, ``progress.png`` and the trained
        ``model/`` into the output directory.
        """
        config = self.config
        self._start(resume=resume, overwrite=overwrite)
        with self.display:
            if self.step == 0:
                self._report({"step": 0, **self.evaluate()})
            while self.step < config.update.steps:
                started = time.monotonic()
                self.step += 1
                experience = self.rollout()
                metrics = self._rollout_metrics(experience) | self.updater.update(experience)
                seconds = time.monotonic() - started
                metrics["seconds"] = seconds
                metrics["tokens_per_second"] = int(experience.completions.completion_mask.sum()) / seconds
                last = self.step == config.update.steps
                if last or self.step % config.evaluation.every == 0:
                    metrics.update(self.evaluate())
                self._report({"step": self.step, **metrics})
                if last or self.step % config.checkpoint.every == 0:
                    self.directory.save_checkpoint(self.step, self._write_checkpoint, config.checkpoint.keep)
        return self._finish()

    @torch.no_grad()
    def rollout(self) -> Experience:
        """Sample, score and compare the completions of the next prompts, and move on in the data."""
        config = self.config.rollout
        picked = self.order.indices((self.step - 1) * config.prompts_per_rollout, config.prompts_per_rollout)
        repeated = [index for index in picked for _ in range(config.group_size)]
        sampling = Sampling(config.max_new_tokens, config.temperature, config.top_p, config.top_k)
        completions = self._sample([self.train_prompts[index] for index in repeated], sampling)
        rewards = self._score([self.train_dataset[index] for index in repeated], completions)
        advantages = gk.advantages.group_normalized(
            rewards.total, group_size=config.group_size, scale=self.config.advantage_scale
        )
        counts = ~rewards.total.isnan().to(self.model.device)
        if config.truncated == "mask":
            counts &= completions.finished
        loss_mask = completions.completion_mask & counts.unsqueeze(1)
        advantages = advantages.nan_to_num(0.0).to(self.model.device)
        return Experience(completions, rewards, advantages, loss_mask)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Complete the held-out prompts greedily and sampled; return the mean of every reward.

        Random states are put back afterwards: evaluating more often changes nothing in the training.
        """
        if self.eval_dataset is None:
            return {}
        config = self.config.rollout
        state = random_state()
        set_seed(self.config.seed)
        metrics = {}
        for label, sampling in (
            ("greedy", Sampling(config.max_new_tokens, temperature=0.0)),
            ("sampled", Sampling(config.max_new_tokens, config.temperature, config.top_p, config.top_k)),
        ):
            completions = self._sample(self.eval_prompts, sampling)
            rewards = self._score(self.eval_dataset, completions)
            means = {name: float(values.nanmean()) for name, values in rewards.by_name.items()}
            metrics[f"eval/{label}_accuracy"] = means[self.accuracy_reward]
            metrics |= {f"eval/{label}/{name}": value for name, value in means.items()}
        set_random_state(state)
        return metrics

    def _sample(self, prompts: list[list[int]], sampling: Sampling) -> Completions:
        return sample_completions(
            self.model,
            prompts,
            sampling,
            end_ids=self.end_ids,
            pad_id=self.pad_id,
            batch_size=self.config.rollout.batch_size,
        )

    def _score(self, rows: Rows, completions: Completions) -> Rewards:
        ids = completions.token_lists()
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return self.rewards([row["prompt"] for row in rows], texts, ids, columns_of(rows))

    def _rollout_metrics(self, experience: Experience) -> dict[str, float]:
        rewards, completions = experience.rewards, experience.completions
        groups = rewards.total.view(-1, self.config.rollout.group_size)
        lowest, highest = groups.nan_to_num(torch.inf).amin(1), groups.nan_to_num(-torch.inf).amax(1)
        metrics = {"reward/mean": float(rewards.total.nanmean())}
        metrics |= {f"reward/{name}": float(values.nanmean()) for name, values in rewards.by_name.items()}
        metrics["groups_without_variance"] = float((highest <= lowest).float().mean())
        metrics["completions/length"] = float(completions.completion_mask.sum(1).float().mean())
        metrics["completions/finished"] = float(completions.finished.float().mean())
        return metrics

    def _report(self, metrics: dict[str, float]) -> None:
        record = finite(metrics)
        append_metrics(self.directory.metrics, record)
        self.display.step(self.step, record)
        if self.step > 0:
            for warning in self.health.check(record):
                self.display.warn(f"step {self.step}: {warning}")

    def _start(self, *, resume: bool, overwrite: bool) -> None:
        directory = self.directory
        directory.prepare(resume=resume, overwrite=overwrite)
        checkpoint = directory.latest_checkpoint() if resume else None
        if resume and directory.config.exists():
            require_same_run(load_config(directory.config), self.config)
        if checkpoint is not None:
            self._load_checkpoint(checkpoint)
            self.display.line(f"resuming {directory.path} after step {self.step}")
        else:
            set_seed(self.config.seed)
        keep_until(directory.metrics, self.step if checkpoint is not None else -1)
        save_config(self.config, directory.config)
        if self.eval_dataset is None:
            self.display.line("no eval dataset: accuracy on held-out prompts is not measured")

    def _write_checkpoint(self, path: Path) -> None:
        self._export(path / "model")
        state = {
            "step": self.step,
            "prompts": len(self.train_prompts),
            "optimizer": self.updater.optimizer.state_dict(),
            "scheduler": {"last_epoch": self.updater.scheduler.last_epoch},
            "health": self.health.streaks,
            "random": random_state(),
        }
        torch.save(state, path / "state.pt")

    def _load_checkpoint(self, path: Path) -> None:
        state = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
        if state["step"] >= self.config.update.steps and self.directory.model.exists():
            raise RunDirectoryError(
                f"the run in {self.directory.path} is finished ({state['step']} steps); "
                "raise update.steps to train on"
            )
        if state["prompts"] != len(self.train_prompts):
            raise RunDirectoryError(
                f"the training dataset has {len(self.train_prompts)} prompts, but the run "
                f"in {self.directory.path} was started with {state['prompts']}"
            )
        saved = type(self.model).from_pretrained(path / "model", dtype=next(self.model.parameters()).dtype)
        self.model.load_state_dict(saved.state_dict())
        self.updater.optimizer.load_state_dict(state["optimizer"])
        self.updater.scheduler.load_state_dict({**self.updater.scheduler.state_dict(), **state["scheduler"]})
        self.health.streaks = state["health"]
        self.step = state["step"]
        set_random_state(state["random"])

    def _export(self, path: Path) -> None:
        self.model.save_pretrained(path)
        self.tokenizer.save_pretrained(path)

    def _finish(self) -> Record:
        write_directory(self.directory.model, self._export)
        records = read_metrics(self.directory.metrics)
        plot_progress(records, self.directory.plot)
        evaluations = [record for record in records if "eval/greedy_accuracy" in record]
        if evaluations:
            title = f"{self.step} steps of {self.config.objective.name}"
            self.display.accuracy_table(title, evaluations[0], evaluations[-1])
        self.display.line(f"trained model: {self.directory.model}   plot: {self.directory.plot}")
        return evaluations[-1] if evaluations else records[-1]


def _head_rows(rows: Rows, count: int) -> Rows:
    return [rows[index] for index in range(min(count, len(rows)))]
