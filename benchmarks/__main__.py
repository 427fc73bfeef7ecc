"""``python -m benchmarks``: run suites, report, compare two runs, and the GPU campaign."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import DeviceBroken, machine, print_peaks
from benchmarks.registry import CONTESTANTS, SUITES, Missing, Options, ordered

for _module in (
    *("contestants", "trainers", "suites", "step", "training"),
    *("fidelity", "rounding", "traffic", "static", "rows", "distillation", "trl_memory"),
    *("ranks", "bandwidth", "launches", "tuning"),
):
    importlib.import_module(f"benchmarks.{_module}")  # they register what they have

DEVICE_BROKEN = 3
"""Exit status of a run whose device a contestant broke."""


def run_suite(name: str, options: Options, out: Path | None) -> dict[str, Any]:
    """Run one suite, write its record, return it."""
    suite, device = SUITES[name], options.device
    start = time.perf_counter()
    record: dict[str, Any] = {"suite": name, "title": suite.title, "size": options.size, **machine(device)}
    print(f"\n=== {suite.title} ({record['device']})", flush=True)

    def save(cases: list[dict[str, Any]]) -> None:
        record["cases"] = cases
        _write({**record, "unfinished": True}, out)

    try:
        record.update(suite.run(replace(options, save=save)))
    except DeviceBroken as broken:
        record["broken"] = {"by": broken.name, "reason": broken.reason}
        _write(record, out)
        raise
    record["wall_seconds"] = round(time.perf_counter() - start, 1)
    print(f"({record['wall_seconds']} s)", flush=True)
    _write(record, out)
    return record


def _write(record: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{record['suite']}.json").write_text(json.dumps(_short(record), indent=1) + "\n")


def _short(value: Any) -> Any:
    """Round numbers to five significant digits, which is more than any measurement has."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {str(key): _short(one) for key, one in value.items()}
    return [_short(one) for one in value] if isinstance(value, list | tuple) else value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run suites; 'all' is every one that 'list' marks with *")
    run.add_argument("suite", nargs="+", choices=[*SUITES, "all"], metavar="SUITE")
    run.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    run.add_argument("--out", type=Path, help="folder for a JSON file per suite")
    run.add_argument("--size", default="full", choices=("full", "tiny"), help="tiny: a rehearsal")
    run.add_argument("--repeats", type=int, help="interleaved rounds; default: each case's own number")
    run.add_argument("--contestants", nargs="+", default=[], metavar="PART", help="parts of names")
    run.add_argument("--cases", nargs="+", default=[], metavar="PART", help="parts of names")
    run.add_argument(
        "--without", nargs="+", default=[], metavar="NAME=REASON", help="contestants to leave out"
    )
    run.add_argument("--no-memory", action="store_true", help="don't measure peaks")
    commands.add_parser("list", help="suites and contestants, with what is missing here")
    report = commands.add_parser("report", help="write docs/benchmarks.md, its plots and the README's table")
    report.add_argument("--results", type=Path, help="report on this folder instead, into it")
    report.add_argument("--check", action="store_true", help="only say whether the page is up to date")
    compare = commands.add_parser("compare", help="ratios of two folders of results, and which differ")
    compare.add_argument("a", type=Path)
    compare.add_argument("b", type=Path)
    campaign = commands.add_parser("campaign", help="everything a GPU has to say, in nine minutes")
    campaign.add_argument("--out", type=Path, required=True)
    campaign.add_argument("--device", default="cuda", choices=("cpu", "cuda"), help="cpu: a rehearsal")
    campaign.add_argument("--minutes", type=float, default=9.0)
    verdict = commands.add_parser("verdict", help="whether a campaign is as good as an earlier one")
    verdict.add_argument("folder", type=Path, help="what the campaign wrote")
    verdict.add_argument(
        "--last", type=Path, help="what an earlier one wrote; without it, stages alone count"
    )
    peaks = commands.add_parser("peaks")  # a process of its own for each measurement of memory
    peaks.add_argument("problem", type=Path)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 done, 1 not up to date or different, 3 a contestant broke the device."""
    given = _parser().parse_args(argv)
    if given.command == "run":
        device = torch.device(given.device)
        if device.type == "cuda" and not torch.cuda.is_available():
            print("no CUDA device here: torch.cuda.is_available() is False", file=sys.stderr)
            return 2
        without = dict(pair.split("=", 1) for pair in given.without)
        options = Options(
            device, given.size, given.repeats, tuple(given.contestants), tuple(given.cases), without,
            not given.no_memory,
        )  # fmt: skip
        names = [one.name for one in ordered() if one.everything] if "all" in given.suite else given.suite
        for name in names:
            try:
                run_suite(name, options, given.out)
            except DeviceBroken as broken:
                print(f"{broken.name} broke the device: {broken.reason}", file=sys.stderr)
                return DEVICE_BROKEN
        return 0
    if given.command == "list":
        print(listing())
        return 0
    if given.command == "report":
        from benchmarks import report

        return report.main(given.results, given.check)
    if given.command == "compare":
        from benchmarks import compare

        return compare.main(given.a, given.b)
    if given.command == "campaign":
        from benchmarks import campaign

        return campaign.main(given.out, given.device, given.minutes)
    if given.command == "verdict":
        from benchmarks import verdict

        return verdict.main(given.folder, given.last)
    print_peaks(given.problem)
    return 0


def listing() -> str:
    """All suites and contestants, with the reason where one is missing here."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lines = [f"{'*' if one.everything else ' '} {one.name:<12} {one.title}" for one in ordered()]
    lines.append("")
    for name, one in CONTESTANTS.items():
        try:
            one.get(device)
            reason = ""
        except Missing as missing:
            reason = f"missing: {missing}"
        lines.append(f"{name:<42} {', '.join(one.tasks):<24} {reason}".rstrip())
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
