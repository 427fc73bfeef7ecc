"""Whole training steps: rollout, reward, old log-probs, several optimizer updates, trainer against trainer.

Every contestant trains in a process of its own, for one step at a time, in turn with the others. Before that
it gets a rollout of given completions, and its gradients in two updates, between which everyone's weights are
moved by the same noise, are held against a plain loop in fp64. In the timed steps each samples for itself:
other tokens, but as many, which is counted, as are the updates.
"""

from __future__ import annotations

import gc
import math
import multiprocessing
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from benchmarks.judge import Verdict
from benchmarks.measure import reason, spread
from benchmarks.registry import CONTESTANTS, Contestant, Missing, Options, entrants, suite
from benchmarks.resident import give_memory_back, peak_of_this_process
from benchmarks.tables import case_table
from benchmarks.trainers import OURS, Finished, Setting, Turns, make_model

Train = Callable[[Setting, Any, Turns], None]
Gradients = list[dict[str, Tensor]]
YARDSTICK = OURS.format("packed")
NOISE = 2e-3
"""Standard deviation of the noise between the two updates that are judged, relative to a parameter's own."""
SMALLEST = 1e-30
"""A learning rate that moves no weight in fp32."""
LIBRARIES = [
    "benchmarks.trainers",
    "transformers.models.qwen3.modeling_qwen3",
    "gspo_kernels.trainer.loop",
    "trl.trainer.grpo_trainer",
]
"""Modules that contestants import; a contestant that lacks one says so when it is loaded."""
PEAKS = Path("/proc/self/clear_refs").exists()
"""Whether the system tells the peak of a process's memory."""


# --- the same gradients


def judged(setting: Setting) -> Setting:
    """A few given completions in one minibatch, twice; one prompt is flat, no gradient is scaled down."""
    small: dict[str, Any] = {"prompts": 3, "group": 4, "flat": 1, "minibatches": 1, "epochs": 2}
    return replace(setting, **small, learning_rate=SMALLEST, max_grad_norm=1e9, given=True)


def gradients(train: Train, setting: Setting, dtype: torch.dtype = torch.float32) -> Gradients:
    """Gradients by parameter in each of two updates."""
    model, found = make_model(setting).to(dtype), []
    turns = iter((True, False))

    def before(*step: Any) -> None:
        named = model.named_parameters()
        found.append({name: p.grad.detach().clone() for name, p in named if p.grad is not None})

    @torch.no_grad()
    def after(*step: Any) -> None:
        rng = torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=rng)
            parameter.add_(noise.to(dtype), alpha=NOISE * float(parameter.std()))

    hooks = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)
    try:
        train(setting, model, Turns(lambda done: next(turns)))
    except Finished:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return found


def distance(got: Gradients, exact: Gradients) -> dict[str, float]:
    """By update, the worst parameter's largest error over its largest value; infinite where it has none."""
    if len(got) != len(exact):
        return {f"{len(got)} updates instead of {len(exact)}": math.inf}
    found = {}
    for number, (mine, right) in enumerate(zip(got, exact, strict=True), start=1):
        errors = [
            float((mine[name] - value).abs().max() / value.abs().max()) if name in mine else math.inf
            for name, value in right.items()
        ]
        found[f"update {number}"] = max(math.inf if math.isnan(error) else error for error in errors)
    return found


class TrainingJudge:
    """Holds a contestant's gradients against those of the plain loop in fp64."""

    def __init__(self, setting: Setting) -> None:
        self.setting, train = judged(setting), CONTESTANTS["plain PyTorch loop"].get(torch.device("cpu"))
        self.exact = gradients(train, self.setting, torch.float64)
        plain = distance(gradients(train, self.setting), self.exact)
        eps = torch.finfo(torch.float32).eps
        self.allowed = {update: 2 * error + eps for update, error in plain.items()}

    def verdict(self, found: Gradients) -> Verdict:
        """Judge by the rule of all suites, relative to each parameter's largest gradient."""
        errors = distance(found, self.exact)
        return Verdict(errors, {update: self.allowed.get(update, 0.0) for update in errors})


# --- a process per contestant


class Worker:
    """A contestant in a process of its own.

    Args:
        contestant: who.
        frugal: freed memory goes back to the system at once, so that resident memory is what is in use.
    """

    def __init__(self, contestant: Contestant, *, frugal: bool = False) -> None:
        # forked from a server that has imported what all need, and computed nothing
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(LIBRARIES)
        self.pipe, other = context.Pipe()
        arguments = other, contestant.load, torch.get_num_threads(), frugal
        self.process = context.Process(target=_work, args=arguments, daemon=True)
        self.process.start()
        other.close()

    def send(self, request: str, setting: Setting | None = None) -> None:
        """Ask for something; `receive` gets the answer."""
        with suppress(OSError):  # then there will be no answer
            self.pipe.send((request, setting))

    def receive(self) -> Any:
        """Return the answer.

        Raises:
            RuntimeError: the contestant failed, or its process ended.
        """
        try:
            kind, answer = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(10)
            raise RuntimeError(f"its process ended with status {self.process.exitcode}") from None
        if kind == "error":
            raise RuntimeError(answer)
        return answer

    def ask(self, request: str, setting: Setting | None = None) -> Any:
        """Send a request and return its answer."""
        self.send(request, setting)
        return self.receive()

    def close(self) -> None:
        """End the process."""
        self.pipe.close()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _work(pipe: Any, load: Callable[..., Train], threads: int, frugal: bool) -> None:
    """What a worker's process runs: answers to "judge" and "train" until the pipe is closed."""
    if frugal:
        give_memory_back()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(nowhere, stream.fileno())
    torch.set_num_threads(threads)
    train = load(torch.device("cpu"))
    while True:
        try:
            request, setting = pipe.recv()
        except EOFError:
            return
        try:
            answer: Any = gradients(train, setting) if request == "judge" else _train(pipe, train, setting)
            if request == "judge":
                answer = [{name: value.numpy() for name, value in each.items()} for each in answer]
            pipe.send(("done", answer))
        except EOFError:
            return
        except Exception as error:
            pipe.send(("error", reason(error)))
        gc.collect()


def _train(pipe: Any, train: Train, setting: Setting) -> int | None:
    """Train step by step; return by how many bytes all of it raised resident memory."""

    def wait(done: dict[str, Any] | None) -> bool:
        pipe.send(("step", done))
        return bool(pipe.recv()[0] == "go")

    turns = Turns(wait)

    def count(*step: Any) -> None:
        turns.updates += 1

    model, hook = make_model(setting), register_optimizer_step_post_hook(count)
    try:
        with peak_of_this_process() if PEAKS else nullcontext(lambda: None) as peak:
            try:
                train(setting, model, turns)
            except Finished:
                return peak()
    finally:
        hook.remove()
    raise RuntimeError("it stopped before it was told to")


# --- the suite


class Entrant:
    """A contestant with its processes and what was found in the current case."""

    def __init__(self, contestant: Contestant, options: Options) -> None:
        self.contestant = contestant
        self.record: dict[str, Any] = {}
        self.workers: dict[bool, Worker] = {}
        self.missing = options.without.get(contestant.name, "")
        if not self.missing:
            try:
                contestant.get(options.device)
            except Missing as missing:
                self.missing = str(missing)

    @property
    def name(self) -> str:
        return self.contestant.name

    @property
    def right(self) -> bool:
        return bool(self.record["status"] == "right")

    def begin(self, setting: Setting, *, frugal: bool = False) -> None:
        """Start the process if there is none yet, and ask it for gradients."""
        if not self.missing:
            if frugal not in self.workers:
                self.workers[frugal] = Worker(self.contestant, frugal=frugal)
            self.workers[frugal].send("judge", setting)

    def be_judged(self, judge: TrainingJudge) -> None:
        """Begin a record with what comes of these gradients."""
        about = {
            "contestant": self.name,
            "ours": self.contestant.ours,
            "precision": self.contestant.precision,
        }
        self.record = {**about, "status": "right", "reason": ""}
        if self.missing:
            self.record.update(status="missing", reason=self.missing)
            return
        with self.refusal():
            got = self.workers[False].receive()
            verdict = judge.verdict([{n: torch.from_numpy(v) for n, v in each.items()} for each in got])
            self.record["errors"] = {n: e if math.isfinite(e) else None for n, e in verdict.errors.items()}
            self.record["allowed"] = verdict.allowed
            self.record["share"] = verdict.share if math.isfinite(verdict.share) else None
            if verdict.complaint:
                self.record.update(status="wrong", reason=verdict.complaint)

    @contextmanager
    def refusal(self) -> Iterator[None]:
        """What fails inside is written down, and its process is given up."""
        try:
            yield
        except RuntimeError as error:
            self.record.update(status="refused", reason=str(error))
            self.close()

    def step(self, setting: Setting, *, counts: bool) -> None:
        """One step, which must be the work that was asked for."""
        with self.refusal():
            done = self.workers[False].ask("go")
            if (done["tokens"], done["updates"]) != (setting.tokens, setting.updates):
                text = f"a step had {done['tokens']} tokens and {done['updates']} updates, "
                raise RuntimeError(f"{text}expected {setting.tokens} and {setting.updates}")
            if counts:
                kept = self.record.setdefault("seconds", {phase: [] for phase in done["seconds"]})
                for phase, seconds in done["seconds"].items():
                    kept[phase].append(seconds)

    def peak(self, setting: Setting) -> None:
        """Bytes that training for a step adds to a process that holds the model and its libraries."""
        with self.refusal():
            worker = self.workers[True]
            worker.receive()
            worker.ask("train", setting)
            worker.ask("go")
            self.record["peak_bytes"] = worker.ask("stop")

    def close(self) -> None:
        """End the processes."""
        for worker in self.workers.values():
            worker.close()
        self.workers = {}


def run_case(
    name: str, setting: Setting, repeats: int, found: list[Entrant], options: Options
) -> dict[str, Any]:
    """Judge, time in turn, and measure peaks, which are the highest where every prompt counts."""
    for entrant in found:
        entrant.begin(judged(setting))
    judge = TrainingJudge(setting)
    for entrant in found:
        entrant.be_judged(judge)
    for entrant in found:
        if entrant.right:
            with entrant.refusal():
                entrant.workers[False].ask("train", setting)
    for repeat in range(repeats + 1):
        for entrant in found[:: 1 if repeat % 2 else -1]:
            if entrant.right:
                entrant.step(setting, counts=repeat > 0)
    for entrant in found:
        if entrant.right:
            with entrant.refusal():
                entrant.workers[False].ask("stop")
    if options.memory and PEAKS and not setting.flat:
        for entrant in found:
            if entrant.right:
                entrant.begin(judge.setting, frugal=True)
        for entrant in found:
            if entrant.right:
                entrant.peak(setting)
    running = [entrant for entrant in found if entrant.right]
    for entrant in found:
        if not entrant.right:
            entrant.record.pop("seconds", None)
    for entrant in running:
        mine = entrant.record["seconds"]["both"]
        entrant.record["tokens_per_second"] = spread([setting.tokens / seconds for seconds in mine])
        entrant.record["x_contestants"] = {
            other.name: statistics.median(
                a / b for a, b in zip(mine, other.record["seconds"]["both"], strict=True)
            )
            for other in running
            if other is not entrant
        }
    shape = {
        "dtype": "fp32", "V": setting.V, "H": setting.H, "layers": setting.layers,
        "prompts": setting.prompts, "completions of each": setting.group, "prompt": setting.prompt,
        "completion": setting.completion, "updates": setting.updates,
    }  # fmt: skip
    return {
        "name": name,
        "task": "training",
        "shape": shape,
        "repeats": repeats,
        "yardstick": YARDSTICK,
        "floor": {"name": "", "probes": {}, "seconds": []},
        "rates": {},
        "results": [entrant.record for entrant in found],
    }


@suite("training", "Whole training steps", everything=False)
def training(options: Options) -> dict[str, Any]:
    """Two models, each with every prompt counting and with 40% of them without reward variance."""
    if options.device.type != "cpu":
        raise SystemExit("the suite 'training' runs on the CPU only: its contestants are set up for it")
    sizes = [(Setting(256, 96, 3, prompt=16, completion=16), 9), (Setting(32000, 256, 2, 16, 16), 3)]
    if options.tiny:
        sizes = [(Setting(100, 32, 1, 6, 4, prompts=5, group=2, minibatches=2), 1)]
    cases = []
    for setting, repeats in sizes:
        size, flat = f"V={setting.V:,}", 2 * setting.prompts // 5
        cases.append((f"{size}, every prompt counts", setting, repeats))
        flattened = replace(setting, flat=flat)
        cases.append((f"{size}, {flat} of {setting.prompts} prompts flat", flattened, repeats))
    found = [Entrant(one, options) for one in entrants("training", (".*",), options, torch.float32)]
    records: list[dict[str, Any]] = []
    try:
        for name, setting, repeats in cases:
            if options.cases and not any(part in name for part in options.cases):
                continue
            records.append(run_case(name, setting, options.repeats or repeats, found, options))
            if options.save is not None:
                options.save(records)
            print(case_table(records[-1]), flush=True)
    finally:
        for entrant in found:
            entrant.close()
    return {"cases": records}
