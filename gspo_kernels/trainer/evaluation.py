"""``gspo ask`` and ``gspo eval``: answers and mean rewards of a trained model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from gspo_kernels.trainer import data
from gspo_kernels.trainer.checkpoint import RunDirectory, load_checkpoint, saved_config
from gspo_kernels.trainer.config import InputError, RolloutConfig, TrainConfig, load_config
from gspo_kernels.trainer.model import end_token_ids, load_model, load_tokenizer, padding_token_id
from gspo_kernels.trainer.processes import seed_everything, set_up
from gspo_kernels.trainer.rewards import RewardSet, load_reward
from gspo_kernels.trainer.rollout import Completion, ModelEngine, Sampling, sampling_of
from gspo_kernels.trainer.sizes import Size


class TrainedModel:
    """The model of a run's newest checkpoint, or of a directory, with the options of its run."""

    def __init__(self, run: str, settings: TrainConfig) -> None:
        is_run = RunDirectory(run).holds_a_run()
        self.tokenizer, self.model = (
            load_checkpoint(run) if is_run else (load_tokenizer(run), load_model(run))
        )
        self.accelerator, self.settings = set_up(settings.model_copy(update={"trackers": ()}))
        self.model.to(self.accelerator.device).eval()
        batch_size = Size.of(settings, "rollout.batch_size", self.accelerator).value
        ends, padding = end_token_ids(self.model, self.tokenizer), padding_token_id(self.tokenizer)
        self.engine = ModelEngine(self.model, ends, padding, batch_size)

    def complete(
        self, rows: data.Rows, name: str, sampling: Sampling
    ) -> tuple[data.Prompts, list[Completion], list[str]]:
        """Complete each row's prompt once; return the prompts as tokens, the completions and their texts."""
        prompts = data.prepare_prompts(
            self.tokenizer,
            rows,
            name,
            longest=data.longest_prompt(self.model.config, sampling.max_new_tokens),
            embedded=self.model.get_input_embeddings().weight.shape[0],
            options=self.settings.data,
        )
        with self.accelerator.autocast():
            completions = self.engine.generate(prompts.tokens, sampling)
        ids = [completion.ids.tolist() for completion in completions]
        return prompts, completions, self.tokenizer.batch_decode(ids, skip_special_tokens=True)


def ask(arguments: Sequence[str]) -> None:
    """Print a model's answer to a prompt."""
    parser = _parser("gspo ask", "Print a trained model's answer.")
    parser.add_argument("prompt", help="text that the model is asked")
    parser.add_argument("--temperature", type=float, default=0.0, help="sampling temperature; 0: greedy")
    chosen = parser.parse_args(arguments)
    rows = [{"prompt": chosen.prompt}]
    data.check_rows(rows, "the question")
    settings = _settings(chosen, chosen.temperature or None)
    trained = TrainedModel(chosen.run, settings)
    sampling = sampling_of(settings.rollout, greedy=chosen.temperature == 0, return_mask=False)
    torch.seed()
    print(trained.complete(rows, "the question", sampling)[2][0])


def evaluate(arguments: Sequence[str]) -> None:
    """Print mean rewards of a model's completions, greedy and sampled."""
    parser = _parser("gspo eval", "Print mean rewards of a model's completions, greedy and sampled.")
    parser.add_argument("--dataset", help="prompts and columns (default: the run's eval_dataset)")
    parser.add_argument("--reward", nargs="+", help="reward functions (default: those of the run)")
    parser.add_argument("--count", type=int, help="number of prompts (default: all)")
    chosen = parser.parse_args(arguments)
    settings = _settings(chosen)
    name, specs = str(chosen.dataset or settings.eval_dataset or ""), chosen.reward or settings.reward
    for option, value in (("--dataset", name), ("--reward", specs)):
        if not value:
            raise InputError(f"{option} is missing, and the configuration of {chosen.run} has none")
    if chosen.count is not None and chosen.count < 1:
        raise InputError(f"--count: got {chosen.count}, expected at least 1")
    is_file, options = Path(name).is_file(), settings.data
    rows = data.load_prompts(
        name,
        split=None if is_file and chosen.dataset else options.eval_split,
        subset=None if is_file else options.subset,
        prompt_column=options.prompt_column,
    )
    rows = [rows[place] for place in range(min(chosen.count or len(rows), len(rows)))]
    weights = None if chosen.reward else settings.reward_weights
    rewards = RewardSet([load_reward(spec) for spec in specs], weights)
    rewards.check(data.column_names(rows))
    trained = TrainedModel(chosen.run, settings)
    seed_everything(settings.seed, 0, 0)  # as in an evaluation of the trainer
    for label in ("greedy", "sampled"):
        sampling = sampling_of(settings.rollout, greedy=label == "greedy", return_mask=False)
        prompts, completions, texts = trained.complete(rows, name, sampling)
        ids = [completion.ids.tolist() for completion in completions]
        columns = data.columns_of(prompts.rows, prompts.columns)
        found = rewards([row["prompt"] for row in prompts.rows], texts, ids, columns)
        means = {key: float(values.nanmean()) for key, values in found.by_name.items()}
        means |= {"reward": float(found.total.nanmean())} if len(means) > 1 else {}
        means["finished"] = sum(completion.finished for completion in completions) / len(completions)
        print(f"{label} ({len(texts)} prompts): " + ", ".join(f"{k} {v:.4g}" for k, v in means.items()))


def _parser(prog: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("run", help="directory of a run, for its newest checkpoint, or of a model")
    parser.add_argument("--config", type=Path, help="configuration file (default: that of the run)")
    parser.add_argument("--max-new-tokens", type=int, help="longest completion in tokens")
    return parser


def _settings(chosen: argparse.Namespace, temperature: float | None = None) -> TrainConfig:
    """Return the configuration of a run, or of ``--config``, with options of the command line."""
    directory = RunDirectory(chosen.run)
    if chosen.config is not None:
        settings = load_config(chosen.config)
    else:
        settings = saved_config(directory) if directory.holds_a_run() else TrainConfig()
    changes = {"max_new_tokens": chosen.max_new_tokens, "temperature": temperature}
    changes = {key: value for key, value in changes.items() if value is not None}
    rollout = RolloutConfig(**{**settings.rollout.model_dump(), **changes})
    changed: TrainConfig = settings.model_copy(update={"rollout": rollout})
    return changed
