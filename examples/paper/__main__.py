"""GSPO beside GRPO on two tiny models: ``python -m examples.paper``, from the root of the repository.

Writes one JSON line per training run and per probe as it goes; what is there already is not run again.
``--report`` draws the plots and renews the tables of the page from the committed results, and trains nothing.
"""

import argparse
import json
import os
import platform
import time
from pathlib import Path

import torch

from examples.paper import probe, report
from examples.paper.models import MODELS, make_start
from examples.paper.training import OBJECTIVES, train
from gspo_kernels.trainer import demo

HERE = Path(__file__).parent
SOURCES = {"dense": ("exact", "bf16", "noise=0.02"), "moe": ("exact", "bf16", "routing=0.2")}


def main(argv=None):
    """Run what is missing, then report."""
    parser = argparse.ArgumentParser(prog="python -m examples.paper", description=__doc__)
    parser.add_argument("--output", type=Path, default=HERE, help="directory of results, plots and page")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=50, help="rollouts in a training run, 4 updates each")
    parser.add_argument("--prompts", type=int, default=16, help="prompts in a rollout, 8 completions each")
    parser.add_argument("--held-out", type=int, default=256, help="prompts that are never trained on")
    parser.add_argument("--warm-up", type=int, default=40, help="supervised steps before")
    parser.add_argument("--lengths", type=int, nargs="+", default=[5, 25, 125], help="tokens in the probe")
    parser.add_argument("--report", action="store_true", help="only draw and tabulate what is there")
    options = parser.parse_args(argv)
    results = options.output / "results.jsonl"
    if not options.report:
        options.output.mkdir(parents=True, exist_ok=True)
        torch.set_num_threads(1)
        run(options, results)
    report.write(read(results), options.output)


def run(options, results):
    """Append the records that are missing, exact runs first."""
    done = {key(record) for record in read(results)}

    def append(record):
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(rounded(record)) + "\n")
        print({name: value for name, value in record.items() if not isinstance(value, list)}, flush=True)

    settings = {
        name: getattr(options, name) for name in ("steps", "prompts", "held_out", "warm_up", "lengths")
    }
    if not done:
        append({"kind": "settings", **settings, "torch": torch.__version__, "machine": machine()})
    for seed in options.seeds:
        train_rows, held_out = demo.make_rows(seed)
        held_out = held_out[: options.held_out]
        starts = {}
        for kind in MODELS:
            started = time.process_time()
            starts[kind] = make_start(kind, train_rows, seed=seed, warm_up_steps=options.warm_up)
            seconds = time.process_time() - started
            record = {"kind": "start", "model": kind, "seed": seed, "cpu_seconds": seconds}
            if key(record) not in done:
                append(record)
        for probed in (False, True):
            for kind in MODELS:
                for source in SOURCES[kind][1:] if probed else SOURCES[kind][:1]:
                    for objective in list(OBJECTIVES)[: 2 if probed else 3]:
                        names = {"model": kind, "objective": objective, "old_logprobs": source, "seed": seed}
                        if key({"kind": "run", **names}) in done:
                            continue
                        curves = train(
                            starts[kind],
                            train_rows,
                            held_out,
                            objective=objective,
                            source=source,
                            seed=seed,
                            steps=options.steps,
                            prompts=options.prompts,
                        )
                        append({"kind": "run", "model": kind, **curves})
                if not probed and key({"kind": "probe", "model": kind, "seed": seed}) not in done:
                    append(probe.probe(*starts[kind], kind, train_rows, seed=seed, lengths=options.lengths))


def key(record):
    """Return what names a record."""
    return tuple(record.get(name) for name in ("kind", "model", "objective", "old_logprobs", "seed"))


def read(results):
    """Return the records of a results file, none if there is no file."""
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def rounded(value):
    """Return the record with floats of five significant digits, which keeps the file small."""
    if isinstance(value, dict):
        return {name: rounded(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [rounded(entry) for entry in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def machine():
    """Return the processor's architecture and vector instructions, and how many cores there are."""
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{platform.machine()}, {capability}, {os.cpu_count()} cores, 1 thread"


if __name__ == "__main__":
    main()
