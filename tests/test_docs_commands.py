"""Every shell command of the README and of docs/ runs in a folder with a tiny model, or a list says why not.

A page's commands run as written, one after the other; `gspo` and `python` are this environment's, and options
behind a command make its run short.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.conftest import tiny_qwen3

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    str(page.relative_to(ROOT))
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), ROOT / "CONTRIBUTING.md")
)

NOT_RUN = {
    r"pip install|^make ": "installs or builds",
    r"^pytest|^python -m (tests|release|benchmarks)": "runs other tests, or measures",
    r"vllm serve|--engine\.url|--url http": "needs vLLM; tests/trainer/test_vllm.py has a stand-in",
    r"use_fsdp|num_processes 8|nproc-per-node|7B|seven_billion": "needs GPUs",
    r"^python -m examples\.(five_minutes|paper)": "is tested in tests/examples",
}
"""Commands that are not run here, and why."""

CONFIG = """\
model: DIR
dataset: FILE.jsonl
reward: rewards.py:correct
output: runs/config
rollout: {prompts_per_rollout: 2, group_size: 2, max_new_tokens: 64}
update: {steps: 1, minibatches: 1}
"""
REWARDS = """\
def correct(completions, answer):
    return [float(len(text) % 2) for text in completions]

def form(completions):
    return [float(len(text)) for text in completions]

def higher_or_lower(completions):
    return ["?"] * len(completions)
"""


def commands(page):
    """Every line of a page's shell blocks, with what is continued put together, without comments."""
    text = (ROOT / page).read_text()
    found = []
    for block in re.findall(r"```(?:bash|sh|shell|console)\n(.*?)```", text, flags=re.DOTALL):
        lines = block.replace("\\\n", " ").splitlines()
        found += [line for line in (re.sub(r"\s+#.*", "", line).strip() for line in lines) if line]
    # In running text `gspo mismatch` is a name; with arguments it is a command.
    found += re.findall(
        r"(?<!`)`(gspo doctor|gspo \w+ [^`]+|python -m [^`]+|make \w+|pip install [^`]+)`", text
    )
    return list(dict.fromkeys(" ".join(each.split()) for each in found))


def why_not(command):
    return next((reason for pattern, reason in NOT_RUN.items() if re.search(pattern, command)), None)


RUN = {page: [c for c in commands(page) if why_not(c) is None] for page in PAGES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What the pages take for granted: DIR, FILE.jsonl, rewards.py, config.yaml, examples/, and kept runs."""
    from gspo_kernels.trainer import demo

    path = tmp_path_factory.mktemp("reader")
    tokenizer = demo.make_tokenizer()
    for name in ("DIR", "MODEL"):
        for part in (tiny_qwen3(tokenizer, max_position_embeddings=128), tokenizer):
            part.save_pretrained(path / name)
    rows = [{"prompt": f"{a} + {b} = ", "answer": a + b} for a in range(4) for b in range(4)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    for name in ("FILE.jsonl", "prompts.jsonl"):
        (path / name).write_text(lines)
    for name in ("rewards.py", "verifier.py", "feedback.py"):
        (path / name).write_text(REWARDS)
    (path / "config.yaml").write_text(CONFIG)
    (path / "examples").symlink_to(ROOT / "examples")
    kept = [{"prompt": "a", "token_ids": [1, 2], "logprobs": [-5.0, -5.0]}] * 3
    for name in ("one.jsonl", "other.jsonl", "run/rollouts/step_000001.jsonl"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("".join(json.dumps(row) + "\n" for row in kept))
    return path


def shortened(command):
    """The command, with what makes a run short behind it: all options but these are the page's."""
    if re.search(r"gspo train (?!--help)|gspo_kernels.cli train|examples.recipes", command):
        if "config.yaml" not in command and "--resume" not in command:
            command += " --update.steps 1 --update.minibatches 1 --rollout.prompts_per_rollout 2"
            command += " --rollout.group_size 2 --rollout.max_new_tokens 3"
        command += "" if "--resume" in command else " --overwrite"
    if re.search(r"gspo demo", command):
        command += " --overwrite" + ("" if "--steps" in command else " --steps 1")
    if re.search(r"gspo mismatch", command):
        command += "" if "--max-new-tokens" in command else " --max-new-tokens 4"
        command += "" if "--count" in command or "--against" in command else " --count 2"
    return command


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if RUN[page]])
def test_commands_of_a_page_run(page, folder):
    """In the order of the page, in a shell whose `gspo` and `python` are these."""
    bin_folder = folder / "bin"
    bin_folder.mkdir(exist_ok=True)
    for name, code in (
        ("gspo", "-m gspo_kernels.cli"),
        ("python", ""),
        ("torchrun", "-m torch.distributed.run"),
    ):
        (bin_folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {code} "$@"\n')
        (bin_folder / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{folder}",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "110",
    }
    for command in RUN[page]:
        if command.endswith("--resume --output runs/own_model"):  # as if it had been interrupted
            config = folder / "runs" / "own_model" / "config.yaml"
            config.write_text(config.read_text().replace("  steps: 1\n", "  steps: 2\n"))
        done = subprocess.run(
            shortened(command),
            shell=True,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"


def test_what_is_not_run_says_why():
    """The list above has no reason without a command, and what a user types first is run."""
    every = [command for page in PAGES for command in commands(page)]
    for pattern in NOT_RUN:
        assert any(re.search(pattern, command) for command in every), pattern
    text = " ".join(command for page in PAGES for command in RUN[page])
    for needed in (
        "gspo train examples/own_model.yaml --model DIR --dataset FILE.jsonl",
        "gspo export",
        "gspo plot",
    ):
        assert needed in text, needed
    for needed in (
        "gspo mismatch",
        "gspo doctor",
        "gspo demo",
        "examples.recipes.turns",
        "torchrun --nproc_per_node 2",
    ):
        assert needed in text, needed
