"""The suite ``ranks``: a loss with its gradients in two processes with one core each, that share the
vocabulary, beside one process with both cores.

Both kinds are there all the time, each process on its own cores, and take turns; who waits sleeps.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import gspo_kernels as gk
from benchmarks.registry import Options, suite
from benchmarks.tables import aligned, number

SEQUENCES, LENGTH, VOCABULARY, WIDTH = 8, 256, 151936, 896
TINY = (2, 8, 300, 16)
RANKS = 2
ROUNDS = 7
KINDS = {"one process": 1, "tensor parallel": RANKS}
"""How many processes each kind has."""
_OFF = 1e-5
"""How far results may be apart, relative: of the loss and of the norms of both gradients."""


class Worker:
    """A process of one kind, which takes a step when it is told to."""

    def __init__(self, ranks: int, rank: int, store: Path, tiny: bool):
        cores = sorted(os.sched_getaffinity(0))[:RANKS]
        own = cores if ranks == 1 else [cores[rank % len(cores)]]
        command = [
            sys.executable,
            "-m",
            "benchmarks.ranks",
            str(ranks),
            str(rank),
            str(store),
            str(int(tiny)),
        ]
        self.process = subprocess.Popen(
            [*command, *map(str, own)],
            cwd=Path(__file__).parents[1],
            env={**os.environ, "OMP_NUM_THREADS": str(len(own))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begin(self) -> None:
        """Let it take a step."""
        assert self.process.stdin
        self.process.stdin.write("step\n")
        self.process.stdin.flush()

    def result(self) -> dict[str, float]:
        """What the step took and gave, once it is done."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of the suite 'ranks' ended with status {self.process.wait()}")
        found: dict[str, float] = json.loads(line)
        return found


def serve(ranks: int, rank: int, store: str, tiny: bool, cores: list[int]) -> None:
    """Take a step for every line that comes in, and write a line about it."""
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    sequences, length, vocabulary, width = TINY if tiny else (SEQUENCES, LENGTH, VOCABULARY, WIDTH)
    group: dict[str, Any] = {}
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        group = {"parallel": gk.Parallel(dist.group.WORLD)}
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(sequences, length, width, generator=generator, requires_grad=True)
    labels = torch.randint(vocabulary, (sequences, length), generator=generator)
    whole = torch.randn(vocabulary, width, generator=generator).mul_(3 / width**0.5)
    weight = whole[vocabulary * rank // ranks : vocabulary * (rank + 1) // ranks].clone().requires_grad_()
    del whole
    advantages = torch.linspace(0.5, 1.5, sequences)
    with torch.no_grad():  # nothing is clipped: ratios lie below 1, advantages above 0
        old = gk.linear_token_logprobs(hidden, weight, labels, **group).logprobs + 1e-3
    for _ in sys.stdin:
        hidden.grad = weight.grad = None
        start = time.perf_counter()
        out = gk.fused_linear_policy_loss(hidden, weight, labels, old, advantages, **group)
        out.loss.backward()
        seconds = time.perf_counter() - start
        # sums of so many squares need fp64
        norms = [float(torch.linalg.vector_norm(x.grad, dtype=torch.float64)) for x in (hidden, weight)]
        found = {"loss": float(out.loss.detach()), "hidden": norms[0], "weight": norms[1] ** 2}
        found["seconds"] = seconds
        print(json.dumps(found), flush=True)


def step(workers: list[Worker]) -> dict[str, float]:
    """One step of a kind: the slowest rank's time, the loss, and norms of the gradients."""
    for worker in workers:
        worker.begin()
    every = [worker.result() for worker in workers]
    return {
        "seconds": max(each["seconds"] for each in every),
        "loss": every[0]["loss"],
        "hidden": every[0]["hidden"],
        "weight": sum(each["weight"] for each in every) ** 0.5,
    }


@suite("ranks", "Two processes that share the vocabulary beside one", everything=False)
def ranks(options: Options) -> dict[str, Any]:
    """On the CPU; on a machine with nothing else to do."""
    if options.device.type != "cpu" or not hasattr(os, "sched_setaffinity"):
        raise SystemExit("the suite 'ranks' gives each process its own cores, on Linux and the CPU only")
    sequences, length, vocabulary, width = TINY if options.tiny else (SEQUENCES, LENGTH, VOCABULARY, WIDTH)
    with tempfile.TemporaryDirectory() as folder:
        running = {
            name: [Worker(count, rank, Path(folder) / "store", options.tiny) for rank in range(count)]
            for name, count in KINDS.items()
        }
        try:
            one, several = (step(workers) for workers in running.values())  # the first does not count
            for what in ("loss", "hidden", "weight"):
                if abs(one[what] - several[what]) > _OFF * abs(one[what]):
                    raise RuntimeError(f"{what}: {several[what]} on {RANKS} ranks, {one[what]} on one")
            seconds: dict[str, list[float]] = {name: [] for name in running}
            for number_of in range(options.repeats or ROUNDS):
                turn = list(running.items())
                for name, workers in turn if number_of % 2 == 0 else reversed(turn):
                    seconds[name].append(step(workers)["seconds"])
        finally:
            for worker in (each for workers in running.values() for each in workers):
                worker.process.kill()
                worker.process.wait()
    ratios = [b / a for a, b in zip(*seconds.values(), strict=True)]
    about = f"{sequences * length} tokens, V={vocabulary:,}, H={width}, fp32"
    table = [[about, "s", "lowest", "highest"]]
    for name, times in seconds.items():
        values = statistics.median(times), min(times), max(times)
        table.append([f"{name}, {RANKS} cores", *(number(value) for value in values)])
    ratio = statistics.median(seconds["tensor parallel"]) / statistics.median(seconds["one process"])
    table.append(["ratio of the medians; of rounds", number(ratio), number(min(ratios)), number(max(ratios))])
    print(aligned(table))
    return {"seconds": seconds, "ratio": ratio, "ratios": ratios, "table": table}


if __name__ == "__main__":
    given = [int(value) for value in (*sys.argv[1:3], *sys.argv[4:])]
    serve(given[0], given[1], sys.argv[3], bool(given[2]), given[3:])
