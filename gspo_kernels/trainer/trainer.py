"""The training loop: sample completions, score them, compare within groups, update in minibatches, repeat."""

from __future__ import annotations

import copy
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object, set_seed
from torch import Tensor

from gspo_kernels.trainer.config import TrainConfig
from gspo_kernels.trainer.data import (
    PromptOrder,
    Prompts,
    Rows,
    check_rows,
    column_names,
    prepare_prompts,
    tokens_of,
)
from gspo_kernels.trainer.policy import Policy
from gspo_kernels.trainer.recipes.plain import recipe_of
from gspo_kernels.trainer.recipes.samples import Sample, Sampler, Samples, experience_of, levels
from gspo_kernels.trainer.recipes.veripo import VeriPO
from gspo_kernels.trainer.rewards import RewardFunction, RewardSet, advantages_of
from gspo_kernels.trainer.rollout import RolloutEngine, Sampling, TransformersEngine, left_pad
from gspo_kernels.trainer.run.config_file import flat, load_config, require_same_run, save_config, to_mapping
from gspo_kernels.trainer.run.display import Display
from gspo_kernels.trainer.run.files import (
    RunDirectory,
    load_state,
    random_state,
    save_state,
    set_random_state,
    write_directory,
)
from gspo_kernels.trainer.run.health import Health
from gspo_kernels.trainer.run.input_errors import ConfigError, ModelError, RunDirectoryError
from gspo_kernels.trainer.run.metrics import Record, append_metrics, finite, keep_until, read_metrics
from gspo_kernels.trainer.run.models import (
    add_adapters,
    check_head,
    end_token_ids,
    export_model,
    load_model,
    load_tokenizer,
    padding_token_id,
)
from gspo_kernels.trainer.run.plot import plot_progress
from gspo_kernels.trainer.run.processes import (
    check_processes,
    make_accelerator,
    on_all,
    peak_memory,
    prepare_frozen,
    whole_weights,
)
from gspo_kernels.trainer.updates import Experience, PolicyUpdater


class GSPOTrainer:
    """Trains a causal language model on prompts and reward functions, in one process or several.

    Args:
        model: a transformers causal language model, or a directory to load one from.
        tokenizer: its tokenizer, or None to load the one beside the model.
        reward_functions: one function or several, ``f(prompts, completions, completion_ids, **columns)``.
        train_dataset: rows (mappings) with a ``"prompt"``; other columns reach the reward functions.
        eval_dataset: rows that are never trained on, or None.
        config: everything else.
        engine: what completes prompts; by default the model's own generation.
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
            eval_dataset = _head_rows(eval_dataset, config.evaluation.prompts)
            check_rows(eval_dataset, "the eval dataset")

        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self.directory = RunDirectory(config.output)
        self.accelerator = accelerator or make_accelerator(
            config.update.precision, config.trackers, self.directory.trackers
        )
        check_processes(self.accelerator)
        self._build(model)
        context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        longest = None if context is None else context - config.rollout.max_new_tokens

        def prepared(rows: Rows, name: str) -> Prompts:
            return prepare_prompts(
                self.tokenizer,
                rows,
                name,
                longest,
                too_long=config.data.too_long,
                template_options=config.data.template_options,
            )

        self.train_prompts = prepared(train_dataset, "the training dataset")
        self.eval_prompts = None if eval_dataset is None else prepared(eval_dataset, "the eval dataset")
        self.engine = engine or TransformersEngine(
            self.model,
            end_ids=end_token_ids(self.model, self.tokenizer),
            pad_id=padding_token_id(self.tokenizer),
            batch_size=config.rollout.batch_size,
        )
        self.sampler = Sampler(
            self.accelerator,
            self.updater.policy,
            self.engine,
            self.tokenizer,
            self.rewards,
            truncated=config.rollout.truncated,
            seed=config.seed,
        )
        self.recipe = recipe_of(config)(
            config,
            self.sampler,
            self._sampling(),
            self.train_prompts,
            lambda prompts: tokens_of(self.tokenizer, prompts, "new prompts", config.data.template_options),
            longest,
        )
        self.order = PromptOrder(len(self.train_prompts.tokens), config.seed)
        self.veripo = VeriPO(config, self.updater, self.train_prompts)
        self.health = Health.of(config)
        self.display = Display(
            config.update.steps, log_every=config.log_every, quiet=not self.accelerator.is_main_process
        )
        self.step = 0
        self.shown: list[tuple[Any, str, float]] = []

    def _build(self, model: Any) -> None:
        """Make the policy and, where a term of the loss asks for it, its reference."""
        config, accelerator = self.config, self.accelerator
        adapted = config.lora.rank > 0
        if isinstance(model, str | Path):
            model = load_model(str(model), half=adapted and config.update.precision == "bf16")
        elif not adapted:
            model = model.float()
        model.to(accelerator.device)
        check_head(model, *left_pad([[1, 2, 3], [4]], 0))
        options: dict[str, Any] = {
            "layout": config.update.layout,
            "temperature": config.rollout.temperature,
        }
        Policy(model, **options).check_layout()
        # What no checkpoint holds and no run may change: weights below adapters, and the reference.
        fixed = adapted or config.needs_reference()
        self.fingerprint = sum(p.double().abs().sum().item() for p in model.parameters()) if fixed else None
        reference, reference_mode = None, nullcontext
        if adapted:
            set_seed(config.seed)
            reference_mode = add_adapters(model, config.lora).disable_adapter
        elif config.needs_reference():
            reference = prepare_frozen(accelerator, Policy(copy.deepcopy(model), **options))
        policy = Policy(model, gradient_checkpointing=config.update.gradient_checkpointing, **options)
        self.model = model
        self.updater = PolicyUpdater(
            accelerator, policy, config, reference=reference, reference_mode=reference_mode
        )

    def train(self, *, resume: bool = False, overwrite: bool = False) -> Record:
        """Run to the configured number of steps; return the metrics of the last evaluation.

        Writes ``config.yaml``, ``metrics.jsonl``, ``checkpoints/``, ``progress.png`` and the trained
        ``model/`` into the output directory. SIGTERM ends the run after the step in progress, with a
        checkpoint and `SystemExit`.
        """
        config = self.config
        self._start(resume=resume, overwrite=overwrite)
        with self.display, _terminated() as terminated:
            if self.step == 0:
                self._report({"step": 0, **self.evaluate()})
            while self.step < config.update.steps:
                started = time.monotonic()
                self.step += 1
                updater = self.updater
                if config.veripo.compares(self.step):
                    updater, self.shown = self.veripo.updater, []
                    experience, metrics = self.veripo.pairs(self.step)
                else:
                    experience, metrics = self.rollout()
                sampled = time.monotonic()
                metrics |= updater.update(experience, self.step)
                metrics |= self._speed(experience, started, sampled)
                last = self.step == config.update.steps
                if last or self.step % config.evaluation.every == 0:
                    metrics.update(self.evaluate())
                self._report({"step": self.step, **metrics})
                if "eval/greedy_accuracy" in metrics or last:
                    self.display.samples(self.step, self.shown)
                stop = any(gather_object([terminated.is_set()]))
                if last or stop or self.step % config.checkpoint.every == 0:
                    self._save_checkpoint()
                if stop and not last:
                    self.display.line(f"terminated after step {self.step}; --resume goes on from there")
                    raise SystemExit(128 + signal.SIGTERM)
        return self._finish()

    @torch.no_grad()
    def rollout(self) -> tuple[Experience, dict[str, float]]:
        """Sample, score and compare the completions of the next prompts, and move on in the data.

        Every process samples for its share of the prompts, and all get the whole.
        """
        config = self.config.rollout
        earlier = self.config.veripo.rollouts_until(self.step - 1)
        picked = self.order.indices(earlier * config.prompts_per_rollout, config.prompts_per_rollout)
        samples, metrics = self.recipe.rollout(picked, self.step)
        experience = experience_of(
            samples, config.group_size, self._advantages(samples), self.accelerator.device
        )
        pairs = list(zip(samples.each, samples.rewards.total.tolist(), strict=True))
        last = pairs[max(len(pairs) - self.config.show_samples, 0) :]
        self.shown = [(self._shown_prompt(sample), sample.text, reward) for sample, reward in last]
        metrics |= self.veripo.keep(self.step, samples, experience)
        return experience, self._rollout_metrics(samples) | metrics

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Complete the held-out prompts greedily and sampled; return the mean of every reward.

        Random states are put back afterwards: evaluating more often changes nothing in the training.
        """
        if self.eval_prompts is None:
            return {}
        state, metrics = random_state(), {}
        set_seed(self.config.seed, device_specific=True)
        for label, sampling in (
            ("greedy", Sampling(self.config.rollout.max_new_tokens, temperature=0.0)),
            ("sampled", self._sampling()),
        ):
            samples, others = self.recipe.evaluate(self.eval_prompts, sampling)
            means = {name: float(values.nanmean()) for name, values in samples.rewards.by_name.items()}
            metrics[f"eval/{label}_accuracy"] = means[self.accuracy_reward]
            metrics |= {f"eval/{label}/{name}": value for name, value in (means | others).items()}
        set_random_state(state)
        return metrics

    def _sampling(self) -> Sampling:
        config = self.config.rollout
        return Sampling(config.max_new_tokens, config.temperature, config.top_p, config.top_k)

    def _advantages(self, samples: Samples) -> Tensor:
        """Return what the objective takes for advantages, [B]."""
        config, kind = self.config, self.updater.objective.advantages_are
        if kind == "rewards":
            return samples.rewards.total
        if kind == "levels":
            return levels(samples.rewards.total, config.rollout.group_size)
        return advantages_of(
            samples.rewards,
            group_size=config.rollout.group_size,
            method=config.advantages,
            scale=config.advantage_scale,
            lengths=torch.tensor([int(sample.counted.sum()) for sample in samples.each]),
        )

    def _shown_prompt(self, sample: Sample) -> Any:
        """Return the prompt as the dataset has it, or what a recipe made of it."""
        if sample.prompt == self.train_prompts.tokens[sample.row]:
            return self.train_prompts.rows[sample.row]["prompt"]
        return self.tokenizer.decode(sample.prompt)

    def _rollout_metrics(self, samples: Samples) -> dict[str, float]:
        rewards = samples.rewards
        groups = rewards.total.view(-1, self.config.rollout.group_size)
        lowest, highest = groups.nan_to_num(torch.inf).amin(1), groups.nan_to_num(-torch.inf).amax(1)
        metrics = {"reward/mean": float(rewards.total.nanmean())}
        metrics |= {f"reward/{name}": float(values.nanmean()) for name, values in rewards.by_name.items()}
        metrics["groups_without_variance"] = float((highest <= lowest).float().mean())
        count = len(samples.each)
        metrics["completions/length"] = sum(len(sample.ids) for sample in samples.each) / count
        metrics["completions/finished"] = sum(sample.finished for sample in samples.each) / count
        return metrics

    def _speed(self, experience: Experience, started: float, sampled: float) -> dict[str, float]:
        now = time.monotonic()
        tokens = sum(len(completion) for completion in experience.completions)
        return {
            "seconds": now - started,
            "seconds/rollout": sampled - started,
            "seconds/update": now - sampled,
            "tokens_per_second": tokens / (now - started),
            "memory/peak_gib": max(gather_object([peak_memory(self.accelerator.device)])) / 2**30,
        }

    def _report(self, metrics: Mapping[str, float]) -> None:
        record = finite(metrics)
        if self.accelerator.is_main_process:
            append_metrics(self.directory.metrics, record)
        self.accelerator.log({name: value for name, value in record.items() if value is not None}, self.step)
        self.display.step(self.step, record)
        if self.step > 0:
            for warning in self.health.check(record):
                self.display.warn(f"step {self.step}: {warning}")

    def _start(self, *, resume: bool, overwrite: bool) -> None:
        directory, main = self.directory, self.accelerator.is_main_process

        def prepare() -> None:
            if main:
                directory.prepare(resume=resume, overwrite=overwrite)
                if resume and directory.config.exists():
                    require_same_run(load_config(directory.config), self.config)

        on_all(self.accelerator, prepare)
        checkpoint = directory.latest_checkpoint() if resume else None
        if checkpoint is not None:
            self._load_checkpoint(checkpoint)
            self.display.line(f"resuming {directory.path} after step {self.step}")
        else:
            set_seed(self.config.seed, device_specific=True)
        if main:
            keep_until(directory.metrics, self.step if checkpoint is not None else -1)
            save_config(self.config, directory.config)
        self.accelerator.init_trackers("gspo", flat(to_mapping(self.config)))
        for warning in self.config.warnings():
            self.display.warn(warning)
        for name, prompts in (("training", self.train_prompts), ("eval", self.eval_prompts)):
            if prompts is not None and prompts.dropped:
                self.display.warn(f"{prompts.dropped} rows of the {name} dataset were dropped: too long")
        if self.eval_prompts is None:
            self.display.line("no eval dataset: accuracy on held-out prompts is not measured")

    def _save_checkpoint(self) -> None:
        state = {
            "step": self.step,
            "prompts": len(self.train_prompts.tokens),
            "updater": self.updater.state_dict(),
            "veripo": self.veripo.state_dict(),
            "fingerprint": self.fingerprint,
            "health": self.health.streaks,
            "random": gather_object([random_state()]),
        }
        config = self.config.checkpoint

        def save() -> None:
            if self.accelerator.is_main_process:
                self.directory.save_checkpoint(self.step, lambda path: save_state(state, path), config.keep)

        on_all(self.accelerator, save)

    def _load_checkpoint(self, path: Path) -> None:
        state = load_state(path)
        if state["step"] >= self.config.update.steps and self.directory.model.exists():
            raise RunDirectoryError(
                f"the run in {self.directory.path} is finished ({state['step']} steps); "
                "raise update.steps to train on"
            )
        if state["prompts"] != len(self.train_prompts.tokens):
            raise RunDirectoryError(
                f"the training dataset has {len(self.train_prompts.tokens)} prompts, but the run "
                f"in {self.directory.path} was started with {state['prompts']}"
            )
        begun, now = state["fingerprint"], self.fingerprint
        if begun is not None and now is not None and abs(begun - now) > 1e-6 * begun:
            raise RunDirectoryError(
                f"the model has other weights than the one that the run in {self.directory.path} was started "
                "with, which it still needs: as the reference, or below its adapters"
            )
        self.updater.load_state_dict(state["updater"])
        self.veripo.load_state_dict(state["veripo"])
        self.health.streaks = state["health"]
        self.step = state["step"]
        if len(state["random"]) == self.accelerator.num_processes:
            set_random_state(state["random"][self.accelerator.process_index])
        else:
            set_seed(self.config.seed + self.step, device_specific=True)
            self.display.line("another number of processes than before: sampling goes on with new seeds")

    def _export(self, path: Path) -> None:
        export_model(self.model, path)
        self.tokenizer.save_pretrained(path)

    def _finish(self) -> Record:
        def write() -> None:
            if self.accelerator.is_main_process:
                write_directory(self.directory.model, self._export)
                plot_progress(read_metrics(self.directory.metrics), self.directory.plot)

        with whole_weights(self.accelerator, self.updater.policy):
            on_all(self.accelerator, write)
        for tracker in self.accelerator.trackers:
            tracker.finish()
        records = read_metrics(self.directory.metrics)
        evaluations = [record for record in records if "eval/greedy_accuracy" in record]
        if evaluations:
            title = f"{self.step} steps of {self.config.objective.name}"
            self.display.accuracy_table(title, evaluations[0], evaluations[-1])
        self.display.line(f"trained model: {self.directory.model}   plot: {self.directory.plot}")
        return evaluations[-1] if evaluations else records[-1]


@contextmanager
def _terminated() -> Iterator[threading.Event]:
    """Note SIGTERM inside instead of dying of it; only where signals arrive, in the main thread."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    previous = signal.signal(signal.SIGTERM, lambda *_: event.set())
    try:
        yield event
    finally:
        signal.signal(signal.SIGTERM, previous)


def _head_rows(rows: Rows, count: int) -> Rows:
    return [rows[index] for index in range(min(count, len(rows)))]
