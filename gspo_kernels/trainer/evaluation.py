"""``gspo ask`` and ``gspo eval``: answers and mean rewards of a trained model."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from gspo_kernels.trainer import data
from gspo_kernels.trainer.checkpoint import RunDirectory, load_checkpoint, saved_config
from gspo_kernels.trainer.config import InputError, RolloutConfig, TrainConfig, load_config
from gspo_kernels.trainer.model import end_token_ids, load_model, load_tokenizer, padding_token_id
from gspo_kernels.trainer.processes import AutoSize, seed_everything, set_up
from gspo_kernels.trainer.rewards import RewardSet, load_reward
from gspo_kernels.trainer.rollout import Completion, ModelEngine, sampling_of


def complete(
    run: str, settings: TrainConfig, rows: data.Rows, name: str, *, greedy: Sequence[bool], seed: int
) -> Iterator[tuple[data.Prompts, list[Completion], list[list[int]], list[str]]]:
    """Complete each row's prompt by the model of a run's newest checkpoint, or of a directory.

    Yields for each item of ``greedy`` the prompts, their completions, and the ids and texts of these.
    """
    is_run = RunDirectory(run).holds_a_run()
    tokenizer, model = load_checkpoint(run) if is_run else (load_tokenizer(run), load_model(run))
    accelerator, settings = set_up(settings.model_copy(update={"trackers": ()}))
    model.to(accelerator.device).eval()
    batch_size = AutoSize.of(settings, "rollout.batch_size").value
    engine = ModelEngine(model, end_token_ids(model, tokenizer), padding_token_id(tokenizer), batch_size)
    prompts = data.prepare_prompts(
        tokenizer,
        rows,
        name,
        longest=data.longest_prompt(model.config, settings.rollout.max_new_tokens),
        embedded=model.get_input_embeddings().weight.shape[0],
        options=settings.data,
    )
    seed_everything(seed, 0, 0)  # as in an evaluation of the trainer
    for each in greedy:
        with accelerator.autocast():
            completions = engine.generate(prompts.tokens, sampling_of(settings.rollout, greedy=each))
        ids = [completion.ids.tolist() for completion in completions]
        yield prompts, completions, ids, tokenizer.batch_decode(ids, skip_special_tokens=True)


def ask(arguments: Sequence[str]) -> None:
    """Print a model's answer to a prompt."""
    parser = _parser("gspo ask", "Print a trained model's answer.")
    parser.add_argument("prompt", help="text that the model is asked")
    parser.add_argument("--temperature", type=float, default=0.0, help="sampling temperature; 0: greedy")
    chosen = parser.parse_args(arguments)
    rows = [{"prompt": chosen.prompt}]
    data.check_rows(rows, "the question")
    settings, greedy = _settings(chosen, chosen.temperature or None), [chosen.temperature == 0]
    seed = torch.seed()  # each call samples another answer
    for *_, texts in complete(chosen.run, settings, rows, "the question", greedy=greedy, seed=seed):
        print(texts[0])


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
    rewards.check(data.column_names(rows), name)
    found = complete(chosen.run, settings, rows, name, greedy=(True, False), seed=settings.seed)
    for label, (prompts, completions, ids, texts) in zip(("greedy", "sampled"), found, strict=True):
        columns = data.columns_of(prompts.rows, prompts.columns)
        values = rewards([row["prompt"] for row in prompts.rows], texts, ids, columns)
        means = {key: float(each.nanmean()) for key, each in values.by_name.items()}
        means |= {"reward/mean": float(values.total.nanmean())} if len(means) > 1 else {}
        finished = [completion.finished for completion in completions]
        means["completions/finished"] = sum(finished) / len(finished)
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
