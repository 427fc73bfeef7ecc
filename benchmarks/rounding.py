"""The suite ``rounding``: what the rounding of log-probs does to GSPO's clip decisions, against length.

With identical weights log s is 0. Whoever computes new log-probs otherwise than old ones has another log s:
the mean over the sequence of the difference. Both sides are held against fp64 on the same bf16 hidden states
and weight, of everyone who computes log-probs from them by default, for random hidden states and for those of
the demonstration's model after its supervised warm-up.

Sequences are stretches of one long row of tokens, each token in one sequence of every length. So a length of
65,536 has only as many of them as there are such stretches, and its numbers rest on these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import gspo_kernels as gk
from benchmarks import fidelity
from benchmarks import problem as gspo
from benchmarks.problem import Problem
from benchmarks.registry import Options, suite

LENGTHS = tuple(4**k for k in range(3, 9))
NEAR = 1e-3
"""Decisions are looked at for sequences whose log s lies at most this far from 0."""
_DRAWS = 100
"""Values of log s for each sequence and sign of the advantage."""
OTHERS = ("ours, float32 logits", "ours, 16-bit logits", "naive PyTorch", "TRL", "Liger", "verl")
"""Parts of the names of those who take part if nobody else is asked for."""


def _bf16_log_softmax(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = gspo.project(hidden, weight, "input", native=False).bfloat16()
    return gspo.picked(logits, labels).float()


def _fp16_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return gspo.picked(gspo.project(hidden.half(), weight.half(), "input", native=False), labels)


PRECISIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "bf16 logits and bf16 log-softmax": _bf16_log_softmax,
    "fp16 logits": _fp16_logits,
}
"""Ways to round that no contestant has as its default."""


def trained(tokens: int, warm_up_steps: int, device: torch.device) -> Problem:
    """Hidden states and head, in bf16, of the demonstration's model, which reads what it could have written.

    Labels are drawn from the model, as they are from its policy.
    """
    from gspo_kernels.trainer import demo

    train, _ = demo.make_rows(0)
    tokenizer = demo.make_tokenizer()
    model = demo.make_model(tokenizer, 0)
    demo.warm_up(model, tokenizer, train, steps=warm_up_steps, seed=0)
    generator = torch.Generator().manual_seed(0)
    digits = torch.tensor(tokenizer(["0123456789"])["input_ids"][0])
    equals = torch.tensor(tokenizer(["="])["input_ids"][0])
    answers = demo.DIGITS + 1  # positions that predict a token of the answer, or its end
    prompts = -(-tokens // answers)
    with torch.no_grad():
        asked = digits[torch.randint(10, (prompts, demo.DIGITS), generator=generator)]
        written = asked.sort(1).values
        ids = torch.cat([asked, equals.expand(prompts, 1), written], 1)
        states = [model.model(input_ids=part).last_hidden_state[:, -answers:] for part in ids.split(1024)]
    hidden = torch.cat(states).flatten(0, 1)[:tokens].bfloat16().to(device)
    weight = model.lm_head.weight.detach().bfloat16().to(device)
    logp = (hidden.double() @ weight.double().T).log_softmax(-1)
    labels = logp.exp().multinomial(1, generator=torch.Generator(device).manual_seed(0))
    return Problem(
        task="scoring",
        inputs=(hidden.unsqueeze(0), weight),
        labels=labels.T,
        old_logprobs=None,
        advantages=torch.ones(1, device=device),
        mask=torch.ones(1, tokens, device=device),
        logprobs=logp.gather(-1, labels).T,
    )


def errors(rows: Problem, options: Options) -> tuple[dict[str, Tensor], dict[str, str]]:
    """[N] errors of log-probs, fp64, by who computes them; and why others can't."""
    found: dict[str, list[Tensor]] = {}
    missing: dict[str, str] = {}
    first, weight = rows.inputs
    chosen = options if options.only else replace(options, only=OTHERS)
    for part in gspo.row_chunks(rows.labels.numel(), rows.vocabulary, first.device):
        hidden, labels = first[:, part], rows.labels[:, part]
        exact = rows.logprobs[:, part]
        some = replace(rows, inputs=(hidden, weight), labels=labels, mask=rows.mask[:, part], logprobs=exact)
        got, missing = fidelity.logprobs(some, chosen)
        for name, compute in PRECISIONS.items():
            got[name] = compute(hidden[0], weight, labels[0]).cpu()
        for name, values in got.items():
            found.setdefault(name, []).append(values.flatten().double() - exact.flatten().cpu())
    return {name: torch.cat(parts) for name, parts in found.items()}, missing


def flipped(moved: Tensor) -> float:
    """Share of clip decisions that differ, of sequences whose log s is moved by [B] and was within NEAR.

    Over both signs of the advantage and true values drawn evenly; only one bound can clip each sign.
    """
    log_s = torch.empty(len(moved) * 2 * _DRAWS, dtype=torch.float64)
    log_s.uniform_(-NEAR, NEAR, generator=torch.Generator().manual_seed(0))
    other = log_s + moved.repeat_interleave(2 * _DRAWS)
    advantages = torch.tensor([1.0, -1.0]).repeat(len(moved) * _DRAWS)
    kept = [
        gk.policy_coefficients(
            each[:, None], torch.zeros_like(each)[:, None], advantages, objective=gk.GSPO()
        )
        != 0
        for each in (log_s, other)
    ]
    return (kept[0] != kept[1]).double().mean().item()


def by_length(found: dict[str, Tensor]) -> dict[str, dict[int, dict[str, float]]]:
    """RMS of log s, shares outside of the clip range and of flipped decisions, by path and length."""
    low, high = fidelity.BOUNDS
    table: dict[str, dict[int, dict[str, float]]] = {}
    for name, values in found.items():
        table[name] = {}
        for length in (length for length in LENGTHS if length <= len(values)):
            moved = values[: len(values) // length * length].view(-1, length).mean(1)
            table[name][length] = {
                "sequences": len(moved),
                "rms": moved.square().mean().sqrt().item(),
                "outside": ((moved < low) | (moved > high)).double().mean().item(),
                "flipped": flipped(moved),
            }
    return table


@suite("rounding", "Rounding against length")
def rounding(options: Options) -> dict[str, Any]:
    """bf16 hidden states and weight, 64 to 65,536 tokens."""
    rows, vocabulary, width, read, steps = (
        (128, 50, 8, 128, 1) if options.tiny else (2**17, 2048, 128, 2**16, 60)
    )
    sources = {
        f"random hidden states, V={vocabulary}, H={width}": fidelity.pool(
            rows, vocabulary, width, options.device
        ),
        "the demonstration's model": trained(read, steps, options.device),
    }
    record: dict[str, Any] = {"sources": {}}
    for name, source in sources.items():
        found, record["missing"] = errors(source, options)
        record["sources"][name] = by_length(found)
        print(f"{name}, {source.labels.numel()} tokens")
        for path, lengths in record["sources"][name].items():
            numbers = (
                f"{length}: {each['rms']:.1e} {each['outside']:.1%}" for length, each in lengths.items()
            )
            print(f"  {path}: {', '.join(numbers)}", flush=True)
    return record
