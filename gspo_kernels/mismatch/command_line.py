"""The command ``gspo mismatch``."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo_kernels.mismatch import scoring
from gspo_kernels.mismatch.measure import Comparison
from gspo_kernels.mismatch.report import FILES, MismatchReport, make_report
from gspo_kernels.mismatch.scoring import DTYPES, Load, Models, Samples, Setting
from gspo_kernels.trainer.config import EngineConfig, InputError, TrainConfig
from gspo_kernels.trainer.data import load_prompts, prepare_prompts
from gspo_kernels.trainer.model import (
    end_token_ids,
    load_tokenizer,
    padding_token_id,
    same_weights,
    weights_digest,
)
from gspo_kernels.trainer.processes import seed_everything
from gspo_kernels.trainer.rollout import ModelEngine, RolloutEngine, Sampling
from gspo_kernels.trainer.vllm import vllm_engine


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(
        prog="gspo mismatch",
        description="Compare the log-probs of sampling and training on the same tokens and weights: the size "
        "of the difference, its cause, and remedies.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("model", nargs="?", help="model directory or name on the Hub; not with --against")
    source = parser.add_argument_group("samples")
    source.add_argument("--prompts", help="dataset of prompts to sample from, as for gspo train")
    source.add_argument("--rollouts", type=Path, help="completions saved by a run (save_rollouts)")
    source.add_argument("--against", type=Path, help="second file to compare --rollouts with; no model")
    source.add_argument("--count", type=int, default=256, help="maximum number of sequences")
    source.add_argument("--seed", type=int, default=0, help="seed of sampling")
    source.add_argument("--url", help="vLLM server with the same weights to sample from; default: the model")
    source.add_argument("--sampler-dtype", choices=tuple(DTYPES), default="fp32", help="dtype to sample in")
    source.add_argument("--max-new-tokens", type=int, default=256, help="maximum length of completions")
    source.add_argument("--temperature", type=float, default=1.0, help="sampling temperature")
    source.add_argument("--top-p", type=float, default=1.0, help="top-p of sampling")
    source.add_argument("--top-k", type=int, default=0, help="top-k of sampling; 0: all")
    training = parser.add_argument_group("training")
    training.add_argument("--dtype", choices=tuple(DTYPES), default="fp32", help="dtype of the weights")
    training.add_argument("--head", choices=tuple(DTYPES), default="fp32", help="dtype of the logits")
    training.add_argument("--attention", help="attention implementation; default: the model's")
    training.add_argument("--tokens", type=int, default=16384, help="tokens per forward pass")
    training.add_argument("--clip-low", type=float, default=3e-4, help="GSPO's clip range below 1")
    training.add_argument("--clip-high", type=float, default=4e-4, help="GSPO's clip range above 1")
    parser.add_argument("--no-switches", action="store_true", help="only measure the difference")
    parser.add_argument("--output", type=Path, default=Path("mismatch"), help="directory of the report")
    parser.add_argument("--overwrite", action="store_true", help="replace the report in --output")
    return parser


UNUSED = {
    "rollouts": ("seed", "url", "sampler_dtype", "max_new_tokens"),
    "against": ("temperature", "top_p", "top_k", "dtype", "head", "attention", "tokens", "no_switches"),
    "url": ("sampler_dtype",),
}
"""Options without effect, by the option that disables them."""


def run(arguments: Sequence[str]) -> MismatchReport:
    """Compare, write the report, print it, and return it."""
    chosen = make_parser().parse_args(list(arguments))
    _check(chosen)
    about = {k: str(v) if isinstance(v, Path) else v for k, v in vars(chosen).items() if k != "output"}
    if chosen.against is not None:
        samples = scoring.read_samples(chosen.rollouts, None, chosen.count, _tell)
        comparison = _comparison(chosen, samples, scoring.other_logprobs(chosen.against, samples))
        report = make_report(samples, comparison, [], None, about)
    else:
        report = _with_model(chosen, about)
    paths = report.write(chosen.output)
    print(report.text())
    print("\nwritten: " + ", ".join(str(path) for path in paths))
    return report


def _check(chosen: argparse.Namespace) -> None:
    if (chosen.prompts is None) == (chosen.rollouts is None):
        raise InputError("pass either --prompts to sample from, or --rollouts")
    if chosen.against is not None and (chosen.model is not None or chosen.rollouts is None):
        raise InputError("--against compares --rollouts with a second file, without a model")
    if chosen.against is None and chosen.model is None:
        raise InputError("the model is missing; without one, --rollouts and --against compare two files")
    for option, unused in UNUSED.items():
        for name in unused if getattr(chosen, option) is not None else ():
            if (value := getattr(chosen, name)) != make_parser().get_default(name):
                got = f"--{name.replace('_', '-')}: got {value}"
                raise InputError(f"{got}, which has no effect with --{option}")
    EngineConfig(url=chosen.url)
    if not chosen.overwrite and any((chosen.output / name).exists() for name in FILES):
        choices = "replace it with --overwrite, or choose another --output"
        raise InputError(f"{chosen.output} already has a report: {choices}")
    ranges = {
        "count": (1, math.inf),
        "max_new_tokens": (1, math.inf),
        "tokens": (1, math.inf),
        "temperature": (1e-6, math.inf),
        "top_p": (1e-6, 1.0),
        "top_k": (0, math.inf),
        "clip_low": (0.0, 1.0),
        "clip_high": (0.0, 1.0),
    }
    for name, (minimum, maximum) in ranges.items():
        value = getattr(chosen, name)
        if not minimum <= value <= maximum:
            expected = f"at least {minimum:g}" + ("" if maximum == math.inf else f" and at most {maximum:g}")
            raise InputError(f"--{name.replace('_', '-')}: got {value}, expected {expected}")


def _comparison(chosen: argparse.Namespace, samples: Samples, training: Tensor) -> Comparison:
    clip = (chosen.clip_low, chosen.clip_high)
    return Comparison(training, samples.logprobs, samples.cu_seqlens, clip)


def _with_model(chosen: argparse.Namespace, about: dict[str, Any]) -> MismatchReport:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer, load = load_tokenizer(chosen.model), Models(chosen.model, device)
    sampling = Sampling(chosen.max_new_tokens, chosen.temperature, chosen.top_p, chosen.top_k)
    samples = _samples(chosen, tokenizer, load, sampling)
    stale = _stale(chosen, samples.steps, load)
    baseline = Setting(
        weights=chosen.dtype,
        head=chosen.head,
        attention=chosen.attention,
        temperature=chosen.temperature,
        recorded=samples.masks is not None,
    )
    model = load(DTYPES[chosen.dtype], chosen.attention)
    embedded = model.get_input_embeddings().num_embeddings
    scoring.check_vocabulary(samples, embedded, str(chosen.rollouts or chosen.prompts))
    attention = str(model.config.get_text_config()._attn_implementation)
    named = scoring.switches(baseline, sampling, attention, model.get_output_embeddings().weight.shape[0])
    del model
    _tell("scoring as training does")
    comparison = _comparison(chosen, samples, scoring.score(load, samples, baseline, chosen.tokens))
    named = {} if chosen.no_switches or stale else named
    switched = scoring.attribute(load, samples, baseline, comparison, named, chosen.tokens, _tell)
    return make_report(samples, comparison, switched, tokenizer, about, stale)


def _stale(chosen: argparse.Namespace, steps: Mapping[str, int], load: Load) -> str:
    """Return a warning if the weights are not those that sampled in these steps of a run, else ""."""
    if not steps:
        return ""
    dtype = torch.float32 if chosen.dtype == "fp32" else torch.bfloat16  # from fp16 a digest would differ
    digest = weights_digest(load(dtype, chosen.attention))
    before = min([step - 1 for other, step in steps.items() if not same_weights(digest, other)], default=None)
    if before is None:
        return ""
    export = f"`gspo export RUN --step {before} --to DIR` writes those if their checkpoint was kept"
    return (
        f"These weights are not those that sampled, so the differences include training: {chosen.rollouts} "
        f"was sampled by {f'the weights of step {before}; {export}' if before else 'the untrained model'}."
    )


def _samples(chosen: argparse.Namespace, tokenizer: Any, load: Load, sampling: Sampling) -> Samples:
    if chosen.rollouts is not None:
        return scoring.read_samples(chosen.rollouts, tokenizer, chosen.count, _tell)
    rows = load_prompts(chosen.prompts)
    rows = [rows[i] for i in range(min(chosen.count, len(rows)))]
    model = load(DTYPES[chosen.sampler_dtype], None)
    prompts = prepare_prompts(tokenizer, rows, chosen.prompts, longest=None).tokens
    end_ids, pad_id = end_token_ids(model, tokenizer), padding_token_id(tokenizer)
    engine: RolloutEngine = ModelEngine(model, end_ids, pad_id, scoring.DECODED)
    if chosen.url is not None:
        config = TrainConfig(engine=EngineConfig(url=chosen.url))
        longest = max(map(len, prompts)) + sampling.max_new_tokens
        engine = vllm_engine(config, model, chosen.model, end_ids, longest, _tell)
    _tell(f"sampling {len(prompts)} completions")
    seed_everything(chosen.seed)
    drawn = engine.generate(prompts, sampling)
    logprobs = torch.cat([each.logprobs for each in drawn if each.logprobs is not None])
    return Samples(
        [torch.tensor(prompt, dtype=torch.int64, device="cpu") for prompt in prompts],
        [each.ids for each in drawn],
        logprobs.double(),
    )


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
