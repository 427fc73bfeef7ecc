"""The training loop: sample completions, score them, compare within groups, update in minibatches, repeat."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object, set_seed

from gspo_kernels.trainer.config import TrainConfig
from gspo_kernels.trainer.data import Rows, check_rows, column_names, prepare_prompts, tokens_of
from gspo_kernels.trainer.engines.choice import engine_of, server_of, teacher_of
from gspo_kernels.trainer.input_errors import ConfigError, ModelError, RunDirectoryError
from gspo_kernels.trainer.recipes.choice import make_recipe
from gspo_kernels.trainer.recipes.samples import Sampler
from gspo_kernels.trainer.rewards import RewardFunction, RewardSet
from gspo_kernels.trainer.rollout import RolloutEngine, Sampling
from gspo_kernels.trainer.rows.experience import Experience
from gspo_kernels.trainer.run.arrangement import Arrangement
from gspo_kernels.trainer.run.checkpoint import fingerprints, random_state, set_random_state
from gspo_kernels.trainer.run.files import RunDirectory
from gspo_kernels.trainer.run.metrics import Record
from gspo_kernels.trainer.run.models import load_tokenizer, make_policies, make_teacher
from gspo_kernels.trainer.run.processes import check_processes, make_accelerator
from gspo_kernels.trainer.run.run import Run, noted
from gspo_kernels.trainer.updates import PolicyUpdater


class GSPOTrainer:
    """Trains a causal language model on prompts and reward functions, in one process or several.

    Args:
        model: a transformers causal language model, or a directory to load one from.
        tokenizer: its tokenizer, or None to load the one beside the model.
        reward_functions: one function or several, ``f(prompts, completions, completion_ids, **columns)``.
        train_dataset: rows (mappings) with a ``"prompt"``; other columns reach the reward functions.
        eval_dataset: rows that are never trained on, or None.
        config: everything else.
        engine: what completes prompts; by default a vLLM server if ``config.engine`` names one, or else the
            model's own generation.
        accelerator: accelerate's, for what its own environment variables do not say.

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
        *,
        engine: RolloutEngine | None = None,
        accelerator: Any = None,
    ) -> None:
        self.config = config = config or TrainConfig()
        if tokenizer is None and not isinstance(model, str | Path):
            raise ModelError("a model that is already loaded needs its tokenizer")
        self.tokenizer = tokenizer if tokenizer is not None else load_tokenizer(str(model))
        functions = [reward_functions] if callable(reward_functions) else list(reward_functions)
        self.rewards = RewardSet(
            functions, config.reward_weights, config.reward_timeout, own_process=config.reward_process
        )
        self.accuracy_reward = config.evaluation.accuracy or self.rewards.names[0]
        if self.accuracy_reward not in self.rewards.names:
            names = ", ".join(self.rewards.names)
            raise ConfigError(f"evaluation.accuracy: no reward {self.accuracy_reward!r}; there are {names}")
        check_rows(train_dataset, "the training dataset")
        self.rewards.check(column_names(train_dataset))
        if eval_dataset is not None:
            count = min(config.evaluation.prompts, len(eval_dataset))
            eval_dataset = [eval_dataset[index] for index in range(count)]
            check_rows(eval_dataset, "the eval dataset")

        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.accelerator = accelerator or make_accelerator(
            config.update.precision, config.trackers, RunDirectory(config.output).trackers
        )
        check_processes(self.accelerator)
        arrangement = Arrangement.of(self.accelerator, config)
        self.run = Run(config, self.accelerator)
        server = server_of(config, engine, self.accelerator)
        self.model, policy, reference, mode, self.fingerprint = make_policies(
            model, self.tokenizer, config, self.accelerator, arrangement
        )
        self.updater = PolicyUpdater(
            self.accelerator,
            policy,
            config,
            reference=reference,
            reference_mode=mode,
            teacher=make_teacher(self.tokenizer, config, self.accelerator, arrangement),
            served_teacher=teacher_of(config, self.tokenizer, self.model, self.accelerator),
            arrangement=arrangement,
        )
        context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        longest = None if context is None else context - config.rollout.max_new_tokens
        template, embedded = config.data.template_options, self.model.get_input_embeddings().num_embeddings
        options: dict[str, Any] = {"too_long": config.data.too_long, "template_options": template}
        prepared = partial(prepare_prompts, self.tokenizer, longest=longest, embedded=embedded, **options)
        self.train_prompts = prepared(rows=train_dataset, name="the training dataset")
        self.eval_prompts = prepared(rows=eval_dataset, name="the eval dataset") if eval_dataset else None
        self.engine, weights = engine_of(server, engine, self.model, self.tokenizer, self.updater, config)
        parts = self.accelerator, weights, self.engine, self.tokenizer, self.rewards
        # The layers of a model that is cut wait for each other.
        together = arrangement.tensor if server is None else 1
        sampler = Sampler(*parts, config.rollout.truncated, config.seed, together)

        def encode(prompts: Sequence[Any]) -> list[list[int]]:
            return tokens_of(self.tokenizer, prompts, "new prompts", template)

        self.recipe = make_recipe(config, sampler, self.updater, self.train_prompts, encode, longest)
        self.step = 0

    def train(self, *, resume: bool = False, overwrite: bool = False) -> Record:
        """Run to the configured number of steps; return the metrics of the last evaluation.

        Writes ``config.yaml``, ``metrics.jsonl``, ``checkpoints/``, ``progress.png`` and the trained
        ``model/`` into the output directory. SIGTERM, or Ctrl-C once, ends the run after the step in
        progress, with a checkpoint and `SystemExit`.
        """
        config, run = self.config, self.run
        with run.directory:
            state = run.start(resume=resume, overwrite=overwrite)
            if state is None:
                set_seed(config.seed, device_specific=True)
            else:
                self.load_state_dict(state)
            prompts = {"training": self.train_prompts, "eval": self.eval_prompts}
            run.begin(self.step, state is not None, prompts)
            with run.display, noted() as signals:
                if self.step == 0:
                    run.report(0, self.evaluate())
                while self.step < config.update.steps:
                    self._take_step(signals)
            return run.finish(self.step, self.model, self.tokenizer, self.updater.policy)

    def _take_step(self, signals: Sequence[int]) -> None:
        config, run = self.config, self.run
        self.step += 1
        started = time.monotonic()
        experience, metrics = self.rollout()
        sampled = time.monotonic()
        metrics |= self.recipe.update(experience, self.step)
        metrics |= speed(experience, started, sampled, time.monotonic())
        last = self.step == config.update.steps
        if last or self.step % config.evaluation.every == 0:
            metrics |= self.evaluate()
        run.report(self.step, metrics)
        run.keep_rollout(self.step, self.recipe.records())
        if last or "eval/greedy_accuracy" in metrics:
            run.display.samples(self.step, self.recipe.shown)
        stop = max(gather_object([max(signals, default=0)]))
        if last or stop or self.step % config.checkpoint.every == 0:
            run.save(self.step, self.state_dict(), self.updater.tensors(), self.model, self.tokenizer)
        if stop and not last:
            run.display.line(f"ended after step {self.step}; --resume goes on from there")
            raise SystemExit(128 + stop)

    @torch.no_grad()
    def rollout(self) -> tuple[Experience, dict[str, float]]:
        """Sample, score and compare completions, as the recipe does, and return what this step learns from.

        Every process samples for its share of the prompts, and all get the whole.
        """
        return self.recipe.experience(self.step)

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Complete the held-out prompts greedily and sampled; return the mean of every reward.

        Random states are put back afterwards: evaluating more often changes nothing in the training.
        """
        if self.eval_prompts is None:
            return {}
        state, metrics, rollout = random_state(), {}, self.config.rollout
        set_seed(self.config.seed, device_specific=True)
        greedy = Sampling(rollout.max_new_tokens, temperature=0.0)
        sampled = replace(rollout.sampling(), return_mask=False)
        for label, sampling in (("greedy", greedy), ("sampled", sampled)):
            samples, others = self.recipe.evaluate(self.eval_prompts, sampling)
            means = {name: float(values.nanmean()) for name, values in samples.rewards.by_name.items()}
            metrics[f"eval/{label}_accuracy"] = means[self.accuracy_reward]
            metrics |= {f"eval/{label}/{name}": value for name, value in (means | others).items()}
        set_random_state(state)
        return metrics

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """What must be the same when the run goes on."""
        return fingerprints(self.model.config, self.tokenizer, self.train_prompts)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that going on needs but the updater's tensors; all processes must call it."""
        return {
            "step": self.step,
            "fingerprints": self.fingerprints,
            "updater": self.updater.state_dict(),
            "recipe": self.recipe.state_dict(),
            "fingerprint": self.fingerprint,
            "health": self.run.health.streaks,
            "random": gather_object([random_state()]),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned; a `RunDirectoryError` says why that cannot be."""
        path = self.run.directory.path
        for what, found in self.fingerprints.items():
            if state["fingerprints"][what] != found:
                raise RunDirectoryError(f"{what} is another one than the run in {path} was started with")
        begun, now = state["fingerprint"], self.fingerprint
        if begun is not None and now is not None and abs(begun - now) > 1e-6 * begun:
            raise RunDirectoryError(
                f"the model has other weights than the one that the run in {path} was started "
                "with, which it still needs: as the reference, or below its adapters"
            )
        self.updater.load_state_dict(state["updater"], state["checkpoint"])
        self.recipe.load_state_dict(state["recipe"])
        self.run.health.streaks = state["health"]
        self.step = state["step"]
        if len(state["random"]) == self.accelerator.num_processes:
            set_random_state(state["random"][self.accelerator.process_index])
        else:
            set_seed(self.config.seed + self.step, device_specific=True)
            self.run.display.line("another number of processes than before: sampling goes on with new seeds")


def speed(experience: Experience, started: float, sampled: float, ended: float) -> dict[str, float]:
    """Return where the seconds of a step went."""
    return {
        "seconds": ended - started,
        "seconds/rollout": sampled - started,
        "seconds/update": ended - sampled,
        "tokens_per_second": sum(experience.lengths) / (ended - started),
    }
