"""``gspo mismatch``: its options, and what they ask for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gspo_kernels.mismatch.measure import Comparison
from gspo_kernels.mismatch.report import Report, make_report
from gspo_kernels.mismatch.samples import (
    Samples,
    check_vocabulary,
    draw_samples,
    other_logprobs,
    read_samples,
)
from gspo_kernels.mismatch.scoring import DTYPES, Load, Setting, score
from gspo_kernels.mismatch.switches import Models, attribute, switches
from gspo_kernels.trainer.config import EngineConfig
from gspo_kernels.trainer.data import load_prompts, prepare_prompts
from gspo_kernels.trainer.engines.embedded import TransformersEngine
from gspo_kernels.trainer.engines.server import VLLMServer
from gspo_kernels.trainer.engines.vllm import VLLMEngine
from gspo_kernels.trainer.input_errors import ConfigError
from gspo_kernels.trainer.rollout import RolloutEngine, Sampling
from gspo_kernels.trainer.run.models import end_token_ids, load_tokenizer, padding_token_id

_MOST = 256
"""Completions of a file that are compared if not told otherwise."""


def parser() -> argparse.ArgumentParser:
    """Return what reads the options."""
    made = argparse.ArgumentParser(
        prog="gspo mismatch",
        description="Compare the log-probs of sampling and training on the same tokens and the same weights: "
        "how far they lie apart, where that comes from, what to do about it.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    made.add_argument("model", nargs="?", help="model directory, or a name on the Hub; none with --against")
    source = made.add_argument_group("what was sampled")
    source.add_argument("--prompts", help="dataset of prompts to sample from, as for gspo train")
    source.add_argument(
        "--rollouts", type=Path, help="or a file of completions that a run kept (save_rollouts)"
    )
    source.add_argument("--against", type=Path, help="a second such file, in place of a model")
    source.add_argument("--count", type=int, default=_MOST, help="sequences at most")
    source.add_argument("--seed", type=int, default=0, help="of what is sampled")
    source.add_argument("--url", help="vLLM server that samples and holds the same weights; none: generate")
    source.add_argument(
        "--sampler-dtype", choices=tuple(DTYPES), default="fp32", help="its weights in generate"
    )
    source.add_argument("--max-new-tokens", type=int, default=256, help="longest completion that is sampled")
    source.add_argument("--temperature", type=float, default=1.0, help="that was or is sampled with")
    source.add_argument("--top-p", type=float, default=1.0, help="that was or is sampled with")
    source.add_argument("--top-k", type=int, default=0, help="that was or is sampled with; 0: all")
    training = made.add_argument_group("how training computes")
    training.add_argument("--dtype", choices=tuple(DTYPES), default="fp32", help="of the weights")
    training.add_argument("--head", choices=tuple(DTYPES), default="fp32", help="of the logits")
    training.add_argument("--attention", help="transformers' implementation; none: the model's default")
    training.add_argument(
        "--layout", choices=("packed", "padded"), default="packed", help="rows of the model"
    )
    training.add_argument("--tokens", type=int, default=16384, help="in one pass of the model")
    training.add_argument("--clip-low", type=float, default=3e-4, help="GSPO's range below 1")
    training.add_argument("--clip-high", type=float, default=4e-4, help="GSPO's range above 1")
    made.add_argument("--no-switches", action="store_true", help="measure only, attribute nothing")
    made.add_argument("--output", type=Path, default=Path("mismatch"), help="directory of the report")
    return made


def run(arguments: Sequence[str]) -> Report:
    """Compare, write the report, print it, and return it."""
    chosen = parser().parse_args(list(arguments))
    _check(chosen)
    report = _against(chosen) if chosen.against is not None else _with_model(chosen)
    paths = report.write(chosen.output)
    print(report.text())
    print("\nwritten: " + ", ".join(str(path) for path in paths))
    return report


def _check(chosen: argparse.Namespace) -> None:
    if (chosen.prompts is None) == (chosen.rollouts is None):
        raise ConfigError("give either --prompts to sample from, or --rollouts that were sampled")
    if chosen.against is not None and (chosen.model is not None or chosen.rollouts is None):
        raise ConfigError("--against compares --rollouts with a second file, without a model")
    if chosen.against is None and chosen.model is None:
        raise ConfigError("the model is missing; without one, --rollouts and --against compare two files")
    if chosen.rollouts is not None and (chosen.url is not None or chosen.sampler_dtype != "fp32"):
        raise ConfigError("--url and --sampler-dtype are for sampling, and --rollouts were sampled already")
    if chosen.url is not None:
        EngineConfig(url=chosen.url)
        if chosen.sampler_dtype != "fp32":
            raise ConfigError("--sampler-dtype is for the model's own generate, and --url samples elsewhere")
    for name in ("count", "max_new_tokens", "tokens", "temperature"):
        if not getattr(chosen, name) > 0:
            raise ConfigError(
                f"--{name.replace('_', '-')}: got {getattr(chosen, name)}, expected more than 0"
            )
    if not 0.0 < chosen.top_p <= 1.0 or chosen.top_k < 0:
        raise ConfigError(
            f"--top-p, --top-k: got {chosen.top_p} and {chosen.top_k}, expected up to 1, and 0 or more"
        )
    for name in ("clip_low", "clip_high"):
        if not 0.0 <= getattr(chosen, name) <= 1.0:
            raise ConfigError(f"--{name.replace('_', '-')}: got {getattr(chosen, name)}, expected 0 to 1")


def _about(chosen: argparse.Namespace) -> dict[str, Any]:
    return {
        name: str(v) if isinstance(v, Path) else v for name, v in vars(chosen).items() if name != "output"
    }


def _against(chosen: argparse.Namespace) -> Report:
    samples = read_samples(chosen.rollouts, None, chosen.count)
    other = other_logprobs(chosen.against, samples)
    clip = (chosen.clip_low, chosen.clip_high)
    comparison = Comparison(other, samples.logprobs, samples.cu_seqlens, clip)
    return make_report(samples, comparison, None, [], None, _about(chosen))


def _with_model(chosen: argparse.Namespace) -> Report:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer, load = load_tokenizer(chosen.model), Models(chosen.model, device)
    sampling = Sampling(chosen.max_new_tokens, chosen.temperature, chosen.top_p, chosen.top_k)
    baseline = Setting(
        weights=chosen.dtype,
        head=chosen.head,
        attention=chosen.attention,
        layout=chosen.layout,
        temperature=chosen.temperature,
    )
    samples = _samples(chosen, tokenizer, load, sampling)
    baseline = replace(baseline, recorded=samples.masks is not None)
    embedded = load(DTYPES[chosen.dtype], chosen.attention).get_input_embeddings().num_embeddings
    check_vocabulary(samples, embedded, str(chosen.rollouts or chosen.prompts))
    _tell("scoring as training does")
    scored = score(load, samples, baseline, chosen.tokens)
    assert scored.entropy is not None
    clip = (chosen.clip_low, chosen.clip_high)
    comparison = Comparison(scored.logprobs, samples.logprobs, samples.cu_seqlens, clip)
    switched = []
    if not chosen.no_switches:
        model = load(DTYPES[chosen.dtype], chosen.attention)
        attention = str(model.config.get_text_config()._attn_implementation)
        named = switches(baseline, sampling, attention, model.get_output_embeddings().weight.shape[0])
        switched = attribute(load, samples, baseline, comparison, named, chosen.tokens, _tell)
    return make_report(samples, comparison, scored.entropy, switched, tokenizer, _about(chosen))


def _samples(chosen: argparse.Namespace, tokenizer: Any, load: Load, sampling: Sampling) -> Samples:
    if chosen.rollouts is not None:
        return read_samples(chosen.rollouts, tokenizer, chosen.count)
    rows = load_prompts(chosen.prompts)
    rows = [rows[i] for i in range(min(chosen.count, len(rows)))]
    model = load(DTYPES[chosen.sampler_dtype], None)
    prompts = prepare_prompts(tokenizer, rows, chosen.prompts, None).tokens
    end_ids = end_token_ids(model, tokenizer)
    engine: RolloutEngine
    if chosen.url is None:
        engine = TransformersEngine(model, end_ids, padding_token_id(tokenizer), batch_size=64)
    else:
        server = VLLMServer(chosen.url, model=None, timeout=1800.0, at_once=64)
        server.check()
        engine = VLLMEngine(server, end_ids, model.get_input_embeddings().num_embeddings)
    _tell(f"sampling {len(prompts)} completions")
    return draw_samples(engine, prompts, sampling, seed=chosen.seed)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
