"""``python -m benchmarks``: run suites, report, compare two runs, and the GPU campaign."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.campaign import DEVICE_BROKEN
from benchmarks.measure import SUITES, DeviceBroken, Options, machine, print_peaks

for _module in ("logits", "hidden", "step", "large", "fidelity", "profile", "products"):
    importlib.import_module(f"benchmarks.{_module}")  # these modules register contestants and suites


def run_suite(name: str, options: Options, out: Path | None) -> dict[str, Any]:
    """Run one suite; write and return its record."""
    suite, device = SUITES[name], options.device
    start = time.perf_counter()
    record: dict[str, Any] = {"suite": name, "title": suite.title, "size": options.size, **machine(device)}
    print(f"\n=== {suite.title} ({record['device']})", flush=True)

    def save(known: dict[str, Any]) -> None:
        record.update(known)
        _write({**record, "unfinished": True}, out)

    try:
        record.update(suite.run(replace(options, save=save)))
    except DeviceBroken as broken:
        record["broken"] = dict(zip(("by", "reason"), broken.args, strict=True))
        _write(record, out)
        raise
    record["wall_seconds"] = round(time.perf_counter() - start, 1)
    print(f"({record['wall_seconds']} s)", flush=True)
    _write(record, out)
    return record


def _write(record: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{record['suite']}.json").write_text(json.dumps(_rounded(record), indent=1) + "\n")


def _rounded(value: Any) -> Any:
    """Round numbers to five significant digits; return None for infinity."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _rounded(one) for key, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list | tuple) else value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    everything = ", ".join(one.name for one in SUITES.values() if one.everything)
    run = commands.add_parser("run", help=f"run suites; all: {everything}")
    run.add_argument("suite", nargs="+", choices=["all", *SUITES])
    run.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    run.add_argument("--out", type=Path, help="folder for a JSON file per suite")
    run.add_argument(
        "--size", default="full", choices=("full", "tiny"), help="tiny: a dry run without peak memory"
    )
    run.add_argument("--repeats", type=int, help="interleaved rounds; default: each case's own number")
    run.add_argument("--contestants", nargs="+", default=[], metavar="PART", help="parts of names")
    run.add_argument("--cases", nargs="+", default=[], metavar="PART", help="parts of names")
    run.add_argument("--without", nargs="+", default=[], metavar="NAME=REASON", help="skip these contestants")
    report = commands.add_parser("report", help="write docs/benchmarks.md, its plots and the README's table")
    report.add_argument("--results", type=Path, help="report on this folder instead, into it")
    report.add_argument("--check", action="store_true", help="only check whether they are up to date")
    compare = commands.add_parser("compare", help="compare the ratios of two folders of results")
    compare.add_argument("a", type=Path)
    compare.add_argument("b", type=Path)
    campaign = commands.add_parser("campaign", help="tests and suites on a GPU, in nine minutes")
    campaign.add_argument("--out", type=Path, required=True)
    campaign.add_argument("--device", default="cuda", choices=("cpu", "cuda"), help="cpu: a rehearsal")
    campaign.add_argument("--minutes", type=float, default=9.0)
    peaks = commands.add_parser("peaks")  # a separate process for each measurement of memory
    peaks.add_argument("problem", type=Path)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0 done, 1 stale or different, 2 cannot run, 3 the device is broken."""
    args = _parser().parse_args(argv)
    if args.command == "run":
        return _run(args)
    if args.command == "peaks":
        print_peaks(args.problem)
        return 0
    from benchmarks import campaign, report

    try:
        if args.command == "report":
            return report.main(args.results, args.check)
        if args.command == "compare":
            return report.compare(args.a, args.b)
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    return campaign.main(args.out, args.device, args.minutes)


def _run(args: argparse.Namespace) -> int:
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here: torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    options = Options(
        device, args.size, args.repeats, tuple(args.contestants), tuple(args.cases),
        dict(pair.split("=", 1) for pair in args.without),
    )  # fmt: skip
    everything = [one.name for one in SUITES.values() if one.everything]
    for name in everything if "all" in args.suite else args.suite:
        try:
            run_suite(name, options, args.out)
        except DeviceBroken as broken:
            print(" broke the device: ".join(broken.args), file=sys.stderr)
            return DEVICE_BROKEN
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
