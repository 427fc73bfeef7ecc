"""The README and docs/: their Python runs as a reader would paste it, their commands run, their links hold.

Commands run in a folder with a tiny model, in the order of their page. A forked copy of this process runs
each, so that nothing is imported twice; options behind a command make its run short.
"""

import importlib
import json
import os
import re
import runpy
import shlex
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.forks import exit_code, forked, in_processes
from tests.trainer.conftest import tiny_qwen3

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")))
NOT_RUN = {
    r"^pip install|^make ": "installs or builds",
    r"^pytest|^python -m (tests|release|benchmarks|examples\.(five_minutes|stability))": "tested elsewhere",
    r"--engine\.url|--url http": "needs vLLM; tests/trainer/test_vllm.py has a stand-in",
}
"""Commands that are neither run nor parsed here, and why."""
VLLM = {
    *("--tensor-parallel-size", "--data-parallel-size", "--gpu-memory-utilization", "--max-model-len"),
    *("--dtype", "--logprobs-mode"),
}
"""Options of `vllm serve`, from its documentation."""


def text_of(page):
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page):
    return re.findall(r"```python\n(.*?)```", text_of(page), flags=re.DOTALL)


def run(page):
    """Run a page's Python, top to bottom; return its names."""
    namespace = {"__name__": page}
    for block in blocks(page):
        exec(compile(block, page, "exec"), namespace)
    return namespace


def test_the_readme_does_what_it_says():
    """Its three lines do what its plain code does: the same loss and the same gradients."""
    names = run("README.md")
    inputs = (names["hidden"], names["lm_head"].weight)
    torch.testing.assert_close(names["out"].loss, names["naive"])
    expected = torch.autograd.grad(names["naive"], inputs)
    torch.testing.assert_close(tuple(each.grad for each in inputs), expected)
    assert names["hidden"].grad.abs().sum() > 0
    assert float(names["out"].metrics["ratio/max"]) == 1.0


def test_the_readme_comes_to_the_point():
    text = text_of("README.md")
    assert len(text.splitlines()) <= 85
    first = text.splitlines()[:40]
    for answer in ("Fused losses", "Why change your loss?", "Three lines", "How much?", "Not measured"):
        assert any(answer in line for line in first), answer
    summary = re.search(r"\*\*How much\?\*\*(.*?)\*\*Not measured", text, re.DOTALL).group(1)
    measured = text[text.index("<!-- measured -->") :]
    figures = re.findall(r"(?<![\w,])\d+(?:\.\d+)?(?![\w,.]*\d)", summary)
    assert len(figures) >= 6 and all(re.search(rf"(?<![\d.]){figure}\b", measured) for figure in figures), (
        figures
    )


@pytest.mark.parametrize("page", PAGES[1:])
def test_every_page_runs(page):
    if page == "docs/integrations/trl.md":
        pytest.importorskip("trl", reason="needs Python 3.11")
    if page == "docs/integrations/hub.md":
        pytest.importorskip("kernels")
    run(page)


def anchors(path):
    """What the headings of a page can be linked by."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_opens_with_a_snippet_and_its_links_lead_somewhere():
    """Python or a command that is run, within the first screen; the index, which has every page, has none."""
    linked = {}
    for page in PAGES:
        path = ROOT / page
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", text_of(page)):
            if not target.startswith("http"):
                found = (path.parent / target).resolve() if target else path
                assert found.exists(), (page, target)
                assert not anchor or anchor in anchors(found), f"{page}: {target}#{anchor}"
                linked.setdefault(page, set()).add(found)
        first = "\n".join(text_of(page).splitlines()[:40])
        index = page in ("docs/README.md", "docs/benchmarks.md")
        assert index or re.search(r"^```(python|bash)$", first, re.MULTILINE), page
    missing = {ROOT / page for page in PAGES[1:]} - {ROOT / "docs/README.md"} - linked["docs/README.md"]
    assert not missing, sorted(str(page.relative_to(ROOT)) for page in missing)


def commands(page):
    """Every line of a page's shell blocks, with what is continued put together, without comments."""
    text, found = text_of(page), []
    for block in re.findall(r"```(?:bash|sh|shell|console)\n(.*?)```", text, flags=re.DOTALL):
        lines = block.replace("\\\n", " ").splitlines()
        found += [line for line in (re.sub(r"\s+#.*", "", line).strip() for line in lines) if line]
    # In running text `gspo mismatch` is a name; with arguments it is a command.
    inline = r"(?<!`)`(gspo doctor|gspo \w+ [^`]+|python -m [^`]+|make \w+|pip install [^`]+)`"
    return list(dict.fromkeys(" ".join(each.split()) for each in found + re.findall(inline, text)))


EVERY = {page: commands(page) for page in (*PAGES, "CONTRIBUTING.md")}
RUN = {
    page: [command for command in each if not any(re.search(pattern, command) for pattern in NOT_RUN)]
    for page, each in EVERY.items()
}

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
        command += " --no-switches" if "--sampler-dtype" in command or "--rollouts" in command else ""
    return re.sub(r"(?<=--update.steps )120", "3", command)


def parse(words):
    """Commands that need eight GPUs: every option is one that the command has."""
    from accelerate.commands.launch import launch_command_parser

    from gspo_kernels.cli import parse_arguments

    if words[:2] == ["vllm", "serve"]:
        assert set(words[3::2]) <= VLLM and not any(value.startswith("--") for value in words[4::2])
        return
    launch = launch_command_parser().parse_args(words[2:])
    assert launch.module and launch.training_script == "gspo_kernels.cli" and launch.num_processes in (6, 8)
    if launch.use_fsdp:
        assert str(launch.fsdp_version) == "2" and launch.fsdp_auto_wrap_policy == "TRANSFORMER_BASED_WRAP"
    command, *arguments = launch.training_script_args
    assert command == "train"
    if "seven_billion.yaml" in " ".join(arguments):
        config, *_ = parse_arguments(arguments)
        assert config.update.gradient_checkpointing and config.update.precision == "bf16"
        assert (config.engine.url is None) == ("--engine.url" not in arguments)


def execute(words):
    """What the shell would start, in this process."""
    from gspo_kernels import cli

    if words[0] == "gspo":
        sys.exit(cli.main(words[1:]))
    assert words[:2] == ["python", "-m"], words
    sys.argv = words[2:]
    runpy.run_module(words[2], run_name="__main__", alter_sys=True)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in RUN if RUN[page]])
def test_commands_of_a_page_run(page, folder, monkeypatch):
    from torch.distributed.run import get_args_parser as torchrun

    for module in ("gspo_kernels.cli", "gspo_kernels.mismatch.command_line", "matplotlib.figure"):
        importlib.import_module(module)  # the copies of this process then have it, and all that it imports
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(folder)
    log = folder / "log"

    def copy(words):
        sys.stdout = sys.stderr = log.open("w")
        os.environ |= {"OMP_NUM_THREADS": "1", "COLUMNS": "110"}
        torch.set_num_threads(1)
        execute(words)

    for command in RUN[page]:
        words = shlex.split(shortened(command))
        while "=" in words[0]:
            words = words[1:]
        if words[0] in ("accelerate", "vllm"):
            parse(words)
        elif words[0] == "torchrun":
            options = torchrun().parse_args(words[1:])
            assert options.module and options.training_script == "gspo_kernels.cli"
            arguments = ["gspo", *options.training_script_args]
            in_processes(int(options.nproc_per_node), lambda rank, arguments=arguments: copy(arguments))
        elif "runs/seven_billion" not in words:
            if command.endswith("--resume --output runs/own_model"):  # as if it had been interrupted
                config = folder / "runs" / "own_model" / "config.yaml"
                config.write_text(config.read_text().replace("  steps: 1\n", "  steps: 2\n"))
            assert exit_code(forked(partial(copy, words))) == 0, f"{command}\n{log.read_text()[-3000:]}"


def test_what_is_not_run_says_why():
    """The list above has no reason without a command, and what a user types first is run."""
    every = [command for each in EVERY.values() for command in each]
    for pattern in NOT_RUN:
        assert any(re.search(pattern, command) for command in every), pattern
    text = " ".join(command for page in RUN for command in RUN[page])
    assert "gspo train examples/own_model.yaml --model DIR --dataset FILE.jsonl" in text
    for name in ("gspo export", "gspo plot", "gspo mismatch", "gspo doctor", "gspo demo", "vllm serve"):
        assert name in text, name
    for name in ("examples.recipes.turns", "torchrun --nproc_per_node 2", "accelerate launch"):
        assert name in text, name
