"""``python -m benchmarks.hidden`` times a GSPO loss from hidden states, forward and backward, on CPU.

Contestants: the three matrix products alone (logits, dHidden, dWeight, in the inputs' dtype, to memory that
exists), which are the floor; the same where each result takes fresh memory, as ``a @ b`` does; ours with each
schedule; naive PyTorch; TRL's chunked log-probs with the formula in PyTorch; Liger's fused GRPO loss. Where
16-bit products are slower than fp32 ones, products of operands raised beforehand are the floor: "x GEMMs" is
against the faster.

Situations: every sequence active; half of them at zero advantage, which only ours makes use of, so that the
others' times are those of "all active"; a head without gradient, as under LoRA; on-policy.

No time without a right answer (see ``judge``): "wrong" and the error stand where the time would. Ours with
``logits_dtype="float32"`` (its default) is held against fp32 logits of 16-bit inputs; "input" and the peers
round such logits to 16 bits.

Contestants take turns, in alternating direction, after one round that does not count. Peak memory is measured
elsewhere (``tests/test_memory.py``). On CPUs without 16-bit products whatever computes in bf16 takes minutes
at the larger shape; leave it out with ``--dtypes`` or ``--contestants``.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import gspo_kernels as gk
from benchmarks import problem as gspo
from benchmarks.judge import Contestant, Judge, Outcome
from benchmarks.problem import Problem, Result
from gspo_kernels.schedule import SCHEDULES

FLOOR = "three GEMMs alone"
FRESH = "the same, to fresh memory"
SHAPES = ((2048, 32000, 512), (1024, 151936, 896))
PACKAGES = ("torch", "trl", "liger_kernel", "transformers", "triton")


class ThreeGemms:
    """The floor: given its operands in some dtype, dLoss/dlogits too, and its outputs unless ``fresh``."""

    def __init__(self, problem: Problem, dtype: torch.dtype, fresh: bool = False):
        self.fresh = fresh
        self.weight, self.hidden = problem.weight.to(dtype), problem.hidden.flatten(0, 1).to(dtype)
        self.logits = torch.empty(len(self.hidden), len(self.weight), dtype=self.weight.dtype)
        self.gradients = torch.empty_like(self.logits)
        _, coefficients = gspo.exact_losses(problem)
        raised = self.weight.double()
        for rows in gspo.row_chunks(*self.logits.shape):
            self.gradients[rows] = gspo.logit_gradients(problem, rows, raised, coefficients)
        self.grad_hidden, self.grad_weight = torch.empty_like(self.hidden), torch.empty_like(self.weight)

    def __call__(self, problem: Problem) -> Result:
        if self.fresh:
            torch.mm(self.hidden, self.weight.t())
            hidden = torch.mm(self.gradients, self.weight)
            return Result(None, hidden.view(problem.hidden.shape), torch.mm(self.gradients.t(), self.hidden))
        torch.mm(self.hidden, self.weight.t(), out=self.logits)
        torch.mm(self.gradients, self.weight, out=self.grad_hidden)
        torch.mm(self.gradients.t(), self.hidden, out=self.grad_weight)
        return Result(None, self.grad_hidden.view(problem.hidden.shape), self.grad_weight)


@dataclass(frozen=True)
class Ours:
    """The fused loss with some options."""

    schedule: str
    skip_inactive: str
    logits_dtype: str

    def __call__(self, problem: Problem) -> Result:
        hidden, weight = gspo.leaves(problem)
        out = gk.fused_linear_policy_loss(
            hidden, weight, problem.labels, problem.old_logprobs, problem.advantages, **asdict(self)
        )
        return gspo.differentiate(out.loss, hidden, weight)

    def plan(self, problem: Problem) -> str:
        """What the schedule says of itself."""
        operands = (*gspo.leaves(problem), problem.labels, problem.old_logprobs, problem.advantages)
        return str(gk.explain_schedule(*operands, **asdict(self)))


def _trl() -> Callable[[Problem], Result]:
    """TRL's log-probs as ``GRPOTrainer`` computes them, entropy included, with its chunk size."""
    kernels = importlib.import_module("trl.kernels")
    chunk = importlib.import_module("trl.trainer.utils")._CHUNKED_LOGPROB_CHUNK_SIZE

    def call(problem: Problem) -> Result:
        hidden, weight = gspo.leaves(problem)
        labels = problem.labels.flatten()
        logprobs, *_ = kernels.ChunkedLogProbFunction.apply(
            hidden.flatten(0, 1), weight, None, labels, 1.0, chunk, None, 1.0, ("log_probs", "entropy")
        )
        shaped = logprobs.view(problem.labels.shape)
        losses = gspo.gspo(shaped, problem.old_logprobs, problem.advantages)
        return gspo.differentiate(losses.mean(), hidden, weight)

    return call


def _liger() -> Callable[[Problem], Result]:
    """Liger's loss; ``compiled`` would only compile arithmetic on per-token values."""
    loss = importlib.import_module("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss(
        beta=0.0,
        compiled=False,
        use_ref_model=False,
        epsilon_low=gspo.CLIP_LOW,
        epsilon_high=gspo.CLIP_HIGH,
        loss_type="grpo",
        importance_sampling_level="sequence",
    )

    def call(problem: Problem) -> Result:
        hidden, weight = gspo.leaves(problem)
        mask = torch.ones_like(problem.labels)
        value, _ = loss(
            hidden,
            weight,
            problem.labels,
            mask,
            problem.advantages,
            old_per_token_logps=problem.old_logprobs,
        )
        return gspo.differentiate(value, hidden, weight)

    return call


PEERS = {"TRL chunked log-probs": _trl, "Liger fused GRPO": _liger}


def peers(situation: str) -> list[Contestant]:
    """The other packages, or why they are missing."""
    found = []
    for name, load in PEERS.items():
        try:
            found.append(Contestant(name, situation, "input", load()))
        except (ImportError, AttributeError) as error:
            found.append(Contestant(name, situation, "input", None, f"{type(error).__name__}: {error}"))
    return found


def contestants(situation: str, dtype: torch.dtype) -> list[Contestant]:
    """Everyone in a situation but the floor."""
    skips = ("backward", "all") if situation == "half inactive" else ("backward",)
    schedules = {"all active": ("auto", *SCHEDULES), "frozen head": ("auto", "frozen")}.get(
        situation, ("auto",)
    )
    precisions = ("float32", "input") if dtype == torch.bfloat16 else ("float32",)
    entrants = []
    for logits, schedule, skip in itertools.product(precisions, schedules, skips):
        name = f"ours, {schedule}{f', skip {skip}' if len(skips) > 1 else ''}, {logits} logits"
        entrants.append(Contestant(name, situation, logits, Ours(schedule, skip, logits)))
    if situation in ("all active", "frozen head"):
        for logits in precisions:
            naive = functools.partial(gspo.plain, logits=logits)
            entrants.append(Contestant(f"naive PyTorch, {logits} logits", situation, logits, naive))
        entrants += peers(situation)
    return entrants


def floors(problem: Problem, wanted: Sequence[str]) -> list[Contestant]:
    """The products alone, of operands as they are and raised to fp32; the latter are never left out."""
    dtype = problem.weight.dtype
    names = (
        {dtype: FLOOR}
        if dtype == torch.float32
        else {dtype: FLOOR, torch.float32: f"{FLOOR}, raised to fp32"}
    )
    raised = ThreeGemms(problem, torch.float32, fresh=True)
    fresh = Contestant(FRESH, "all active", "float32", raised, has_loss=False)
    return [
        Contestant(
            name,
            "all active",
            "float32" if operands == torch.float32 else "input",
            ThreeGemms(problem, operands),
            has_loss=False,
        )
        for operands, name in names.items()
        if operands == torch.float32 or not wanted or any(word in name for word in wanted)
    ] + [fresh]


def measure(
    entrants: Sequence[Contestant],
    outcomes: Sequence[Outcome],
    problems: dict[str, Problem],
    repeats: int,
    patience: float,
) -> None:
    """Fill in the seconds of those with a right answer, all in turn."""
    running = [pair for pair in zip(entrants, outcomes, strict=True) if pair[1].status == "right"]
    for repeat in range(repeats + 1):
        for contestant, outcome in running[:: 1 if repeat % 2 else -1]:
            assert contestant.call is not None
            if outcome.first_seconds > patience and repeat != 1:
                continue
            start = time.perf_counter()
            result = contestant.call(problems[contestant.situation])
            seconds = time.perf_counter() - start
            del result
            if repeat > 0:
                outcome.seconds.append(seconds)
    floor = [statistics.median(o.seconds) for o in outcomes if o.name.startswith(FLOOR) and o.seconds]
    for outcome in outcomes:
        if floor and outcome.seconds:
            outcome.to_floor = statistics.median(outcome.seconds) / min(floor)


def run(
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    sequences: int = 8,
    repeats: int = 5,
    patience: float = 60.0,
    wanted: Sequence[str] = (),
    extra: Sequence[Contestant] = (),
) -> list[Outcome]:
    """Judge and time the floor and everyone else; only those that ``wanted`` names in part, unless empty."""
    tokens, vocabulary, width = shape
    problem = gspo.draw(tokens, vocabulary, width, sequences, dtype)
    problems = {name: problem.situation(name) for name in gspo.SITUATIONS}
    entrants, outcomes = [], []
    for situation, case in problems.items():
        here = [*contestants(situation, dtype), *(e for e in extra if e.situation == situation)]
        if wanted:
            here = [e for e in here if any(word in f"{e.name} ({e.situation})" for word in wanted)]
        if situation == "all active":
            here = [*floors(case, wanted), *here]
        if not here:
            continue
        judge = Judge(case)
        for entrant in here:
            outcome = Outcome(entrant.name, situation, entrant.logits)
            judge.judge(entrant, outcome)
            if isinstance(entrant.call, Ours) and outcome.status == "right":
                outcome.reason = entrant.call.plan(case)
            entrants.append(entrant)
            outcomes.append(outcome)
        del judge
    gc.collect()
    measure(entrants, outcomes, problems, repeats, patience)
    return outcomes


def table(outcomes: Sequence[Outcome]) -> str:
    """Lines of text, a block per situation; errors as a share of what was allowed."""
    width = max(len(outcome.name) for outcome in outcomes)
    header = f"{'':<{width}}{'median s':>10}{'lowest':>9}{'highest':>9}{'x GEMMs':>9}{'error/allowed':>15}"
    lines = []
    for situation in dict.fromkeys(outcome.situation for outcome in outcomes):
        plans = set()
        lines += ["", situation.ljust(width) + header[width:]]
        for o in (outcome for outcome in outcomes if outcome.situation == situation):
            if not o.seconds:
                lines.append(f"{o.name:<{width}}  {o.status}: {o.reason}")
                continue
            times = (statistics.median(o.seconds), min(o.seconds), max(o.seconds))
            share = max(error / o.budgets[name] for name, error in o.errors.items())
            lines.append(
                f"{o.name:<{width}}{times[0]:>10.3f}{times[1]:>9.3f}{times[2]:>9.3f}"
                f"{o.to_floor or float('nan'):>9.2f}{share:>15.2f}"
            )
            plan = o.reason.split("\n", 1)[0]
            if o.name.startswith("ours, auto") and plan not in plans:
                plans.add(plan)
                lines.append(f"    {plan}")
    return "\n".join(lines)


def versions() -> dict[str, str]:
    found = {"gspo_kernels": gk.__version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def main(argv: Sequence[str] | None = None, extra: Sequence[Contestant] = ()) -> dict[str, Any]:
    """Run the command line; returns what ``--json`` writes."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.hidden", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--shape", nargs=3, type=int, action="append", metavar=("N", "V", "H"))
    parser.add_argument("--sequences", type=int, default=8, help="of equal length, together N tokens")
    parser.add_argument("--dtypes", nargs="+", default=list(gspo.DTYPES), choices=list(gspo.DTYPES))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--patience",
        type=float,
        default=60,
        help="who takes longer to be judged is timed once, not warmed up",
    )
    parser.add_argument(
        "--contestants",
        nargs="+",
        default=[],
        help="parts of names or situations; the fp32 floor always runs",
    )
    parser.add_argument("--json", type=Path, help="also write device, versions, shapes and all times there")
    arguments = parser.parse_args(argv)

    record: dict[str, Any] = {
        "benchmark": "hidden",
        "device": f"{platform.machine()} CPU, {torch.get_num_threads()} threads",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "versions": versions(),
        "repeats": arguments.repeats,
        "runs": [],
    }
    print(f"{record['device']} ({record['cpu_capability']}); {record['versions']}")
    for shape in arguments.shape or SHAPES:
        for name in arguments.dtypes:
            outcomes = run(
                shape,
                gspo.DTYPES[name],
                sequences=arguments.sequences,
                repeats=arguments.repeats,
                patience=arguments.patience,
                wanted=arguments.contestants,
                extra=extra,
            )
            tokens, vocabulary, width = shape
            print(
                f"\n{name}: {arguments.sequences} sequences of {tokens // arguments.sequences} tokens, "
                f"V={vocabulary}, H={width}\n{table(outcomes)}"
            )
            record["runs"].append(
                {
                    "tokens": tokens,
                    "vocabulary": vocabulary,
                    "width": width,
                    "sequences": arguments.sequences,
                    "dtype": name,
                    "contestants": [asdict(outcome) for outcome in outcomes],
                }
            )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    return record


if __name__ == "__main__":
    main()
