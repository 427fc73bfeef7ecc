"""Study whether GSPO collapses, and what it needs against stale data: ``python -m examples.stability``.

Every run adds one JSON line to the results; runs that are already there are not repeated. Several processes
may share the work: ``--part 0/2`` and ``--part 1/2``.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import torch

from examples.stability import report
from examples.stability.study import Setting, run, setting_of

HERE = Path(__file__).parent
FACTORS = {
    "objective": ("GSPO-token", "GRPO", "CISPO", "M2PO"),
    "old": ("engine",),
    "head": ("bf16",),
    "updates": (1, 16),
    "correction": ("token TIS", "sequence mask"),
    "replay": (True,),
}
"""Factors that are varied one at a time, from the defaults of ``Setting``; replay only with experts."""
INTERACTIONS = (
    {"old": "engine", "updates": 16},
    {"objective": "GRPO", "updates": 16},
    {"old": "engine", "learning_rate": 4e-3},
)
"""Factors that are varied together: the two that cost reward, another clip on stale data, and a learning rate
at which a wrong ratio can do more damage."""
SMALLER_STEPS = ({"updates": 1, "warm_up": 20}, {"updates": 1, "learning_rate": 5e-4})
"""Runs added later, dense only, to find out why one update per rollout learns more slowly than four."""


def settings(seeds):
    """Yield the setting of every run of the study, seed by seed."""
    for seed in range(seeds):
        for model in ("dense", "moe"):
            baseline = Setting(model=model, seed=seed)
            yield baseline
            for name, values in FACTORS.items():
                for value in values if model == "moe" or name != "replay" else ():
                    yield replace(baseline, **{name: value})
            for changes in INTERACTIONS:
                yield replace(baseline, **changes)
            if model == "dense":
                yield replace(baseline, learning_rate=4e-3)
                for changes in SMALLER_STEPS:
                    yield replace(baseline, **changes)


def main(argv=None):
    """Run the settings that have no result yet, or renew the page from the results."""
    parser = argparse.ArgumentParser(prog="python -m examples.stability", description=__doc__)
    parser.add_argument("--results", type=Path, default=HERE / "results.jsonl")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--part", default="0/1", help="which of how many parts of the runs this process does")
    parser.add_argument("--report", action="store_true", help="run nothing, renew the page")
    options = parser.parse_args(argv)
    if options.report:
        return report.write(read(options.results))
    part, parts = map(int, options.part.split("/"))
    torch.set_num_threads(1)
    done = [setting_of(record) for record in read(options.results)]
    for index, setting in enumerate(settings(options.seeds)):
        if index % parts == part and setting not in done:
            record = run(setting)
            with options.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(rounded(record)) + "\n")
            print(
                report.varied(record),
                f"reward {record['reward'][-1]:.3f}, {record['cpu_seconds']:.0f} s",
                flush=True,
            )


def read(results):
    """Return the records of a results file, an empty list if there is no file."""
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def rounded(record):
    """Return the record with curves of four significant digits, which keeps the file small."""
    return {k: [float(f"{x:.4g}") for x in v] if isinstance(v, list) else v for k, v in record.items()}


if __name__ == "__main__":
    main()
