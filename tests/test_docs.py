"""The README and docs/: their Python runs as a reader would paste it, their commands run, their links hold.

Commands run in a folder with a tiny model, in the order of their page. Each runs in a forked copy of this
process, so that nothing is imported twice; added options make it short. What scripts write is up to date.
"""

import ast
import importlib
import inspect
import json
import os
import pkgutil
import re
import runpy
import shlex
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import gspo_kernels as gk
from examples.self_distillation import with_self_distillation
from gspo_kernels.demo import make_tokenizer
from tests import oracle
from tests.cases import call, generator, make_case
from tests.forks import exit_code, forked, in_processes
from tests.trainer.conftest import tiny_qwen3

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = ("README.md", *sorted(str(page.relative_to(ROOT)) for page in DOCS.rglob("*.md")))


def text_of(page):
    return (ROOT / page).read_text(encoding="utf-8")


def run(page, replace=(), **given):
    """Run a page's Python, top to bottom, with ``given`` names and some texts replaced; return its names."""
    namespace = {"__name__": page} | given
    for block in re.findall(r"```python\n(.*?)```", text_of(page), flags=re.DOTALL):
        for old, new in replace:
            block = block.replace(old, new)
        exec(compile(block, page, "exec"), namespace)
    return namespace


# --- pages


ELSEWHERE = {
    "docs/parallel.md": "needs ranks; tests/distributed/test_parallel.py has two",
}


REPLACED = {
    "README.md": [('"runs/trl"', '"runs/readme", use_cpu=True, report_to="none"')],
    "docs/integrations/skyrl.md": [("skyrl.register_all()", "")],  # needs SkyRL: `make skyrl`
    "docs/integrations/trl.md": [('"runs/trl"', '"runs/trl", use_cpu=True, report_to="none"')],
}
"""Texts of pages by what this test runs instead of them."""


@pytest.mark.parametrize("page", sorted(set(PAGES) - set(ELSEWHERE)))
def test_every_page_runs(page, folder, monkeypatch):
    monkeypatch.chdir(folder)
    given = {}
    if page in ("README.md", "docs/integrations/trl.md"):
        pytest.importorskip("trl", reason="needs Python 3.11")
        given["prompts"] = pytest.importorskip("datasets").Dataset.from_dict({"prompt": ["ab", "cd"] * 2})
        given["reward"] = lambda completions, **_: [0.0] * len(completions)
    names = run(page, [("Qwen/Qwen3-0.6B", "DIR"), *REPLACED.get(page, [])], **given)
    if page == "README.md":  # the fused call and the plain code have the same loss and gradients
        inputs = (names["hidden"], names["lm_head"].weight)
        torch.testing.assert_close(names["out"].loss, names["naive"])
        expected = torch.autograd.grad(names["naive"], inputs)
        torch.testing.assert_close(tuple(each.grad for each in inputs), expected)
        assert names["hidden"].grad.abs().sum() > 0 and float(names["out"].metrics["ratio/max"]) == 1.0
    elif given:
        assert abs(names["trainer"].state.log_history[0]["ratio/max"] - 1) < 1e-6


def anchors(path):
    """Return the anchors of a page's headings."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    for page in PAGES:
        path = ROOT / page
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", text_of(page)):
            if not target.startswith("http"):
                found = (path.parent / target).resolve() if target else path
                assert found.exists(), (page, target)
                assert not anchor or anchor in anchors(found), f"{page}: {target}#{anchor}"


@pytest.mark.parametrize("page", PAGES)
def test_calls_in_running_text_exist(page):
    """Functions and arguments of calls such as `gk.normalizer(objective, mask)`; values may be left out."""
    text = re.sub(r"```.*?```", "", text_of(page), flags=re.DOTALL)
    for code in re.findall(r"`([^`]*\bgk\.[^`]*\([^`]*\)[^`]*)`", text):
        whole = f"f({re.sub(r'=(?=[,)])', '=0', code)})".replace("\\|", "|")
        for node in ast.walk(ast.parse(whole, mode="eval")):
            if isinstance(node, ast.Call) and (name := ast.unparse(node.func)).startswith("gk."):
                function = eval(name, {"gk": gk})
                named = {each.arg for each in node.keywords}
                assert named <= set(inspect.signature(function).parameters), (page, code)


def test_self_distillation():
    """Loss and gradients are those of plain log-softmax in fp64, also where a label is among the ids."""
    rng = generator(11)
    shapes = ((3, 5, 8), (20, 8), (3, 5, 8))
    hidden, weight, teacher = (torch.randn(s, generator=rng, dtype=torch.float64) for s in shapes)
    ids = torch.rand(3, 5, 20, generator=rng).topk(6).indices
    labels = torch.randint(20, (3, 5), generator=rng)
    labels[0], ids[1, 0, 2:] = ids[0, :, 3], -100
    mask = torch.arange(5) < torch.tensor([5, 3, 4]).unsqueeze(1)
    old, advantages = torch.full((3, 5), -3.0).double(), torch.tensor([1.0, -1.0, 0.5]).double()
    objective = gk.GRPO(0.1, 0.3)

    def plain(hidden, weight):
        z, teacher_z = hidden @ weight.T, teacher @ weight.T.detach()
        chosen = z.log_softmax(-1).gather(-1, labels[..., None])[..., 0]
        named = torch.cat([labels[..., None], ids], -1)
        divergence = oracle.divergence_over_ids(z, teacher_z, named, beta=1, tail=True)
        policy = oracle.policy_loss(chosen, old, advantages, mask, objective)
        return policy + 0.7 * (divergence * mask).sum() / mask.sum()

    def ours(hidden, weight):
        given = {"mask": mask, "coef": 0.7, "objective": objective}
        return with_self_distillation(hidden, weight, labels, ids, old, advantages, teacher, **given)

    found = []
    for function in (ours, plain):
        leaves = [each.clone().requires_grad_() for each in (hidden, weight)]
        loss = function(*leaves)
        found.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


def test_objectives_of_the_page():
    """The page's ratio of turns is TL-GRPO's. Schedules that ``Damped`` allows have the same gradients."""
    page, case = run("docs/objectives.md"), make_case("linear", "packed", "holes")

    def grads(objective, entry="fused_linear_policy_loss", **options):
        leaves = {name: value.clone().requires_grad_() for name, value in case.inputs.items()}
        call(case, leaves, entry, objective, **options).loss.backward()
        return [leaf.grad for leaf in leaves.values()]

    turns = {"turn_ids": torch.arange(case.labels.numel()) // 2}
    built_in = gk.TLGRPO(clip_low=0.1, clip_high=0.2)
    assert all(map(torch.equal, grads(page["PerTurn"](), **turns), grads(built_in, **turns)))
    whole = grads(page["Damped"](), "linear_token_logprobs", backend="reference")
    for schedule in ("aligned", "deferred", "two_pass"):
        parts = grads(page["Damped"](), schedule=schedule, max_chunk_bytes=4 * 61 * 4)
        torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-6)
    assert all(grad.any() for grad in whole)


# --- commands

NOT_RUN = "|".join([
    r"^pip install|^make ",
    r"^pytest|^python -m (tests|release|benchmarks|examples\.(smollm2|stability))",  # tested elsewhere
    r"--engine\.url|--url http|vllm serve",  # tests/trainer/test_vllm.py has a stand-in
    r"gsm8k\.yaml",  # needs the Hub; tests/trainer/test_cli.py has a folder laid out as the dataset
])  # fmt: skip
"""Commands that are neither run nor parsed here."""


def commands(page):
    """Return a page's commands: joined lines of shell blocks without comments, and those in running text."""
    text, found = text_of(page), []
    for block in re.findall(r"```(?:bash|sh|shell|console)\n(.*?)```", text, flags=re.DOTALL):
        lines = block.replace("\\\n", " ").splitlines()
        found += [line for line in (re.sub(r"\s+#.*", "", line).strip() for line in lines) if line]
    # In running text `gspo mismatch` is a name; with arguments it is a command.
    inline = r"(?<!`)`(gspo doctor|gspo \w+ [^`]+|python -m [^`]+|make \w+|pip install [^`]+)`"
    return list(dict.fromkeys(" ".join(each.split()) for each in found + re.findall(inline, text)))


def shortened(command):
    """Return the command, with options that make its run short. All other options are the page's."""
    trains = re.search(r"gspo train (?!--help)|gspo_kernels.cli train|examples.recipes", command)
    if trains and "--resume" not in command:
        command += "" if "--dry-run" in command else " --overwrite"
        if "config.yaml" not in command:  # which is short
            command += " --update.steps 1 --update.minibatches 1 --rollout.prompts_per_rollout 2"
            command += " --rollout.group_size 2 --rollout.max_new_tokens 3"
    if re.search(r"gspo demo", command):
        command += ("" if "--steps" in command else " --steps 1") + " --overwrite"
    if re.search(r"gspo mismatch", command):
        samples = "--rollouts" not in command and "--max-new-tokens" not in command
        command += " --overwrite" + (" --max-new-tokens 4" if samples else "")
        command += "" if "--count" in command or "--against" in command else " --count 2"
        command += "" if "--against" in command else " --no-switches"
    command = re.sub(r"(?<=--count )128", "2", command)
    return re.sub(r"(?<=--update.steps )120", "3", command)


EVERY = dict.fromkeys(each for page in (*PAGES, "CONTRIBUTING.md") for each in commands(page))
RUN = {shortened(command): command for command in EVERY if not re.search(NOT_RUN, command)}
"""Commands of pages by what is run of them; some are the same once they are short."""
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
    """Make what the pages assume: DIR, FILE.jsonl, rewards.py, config.yaml, examples/, and saved rollouts."""
    path, tokenizer = tmp_path_factory.mktemp("reader"), make_tokenizer()
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


def parse(words):
    """Check that all options exist in a command for six or eight GPUs."""
    from accelerate.commands.launch import launch_command_parser

    from gspo_kernels.cli import parse_arguments

    launch = launch_command_parser().parse_args(words[2:])
    assert launch.module and launch.training_script == "gspo_kernels.cli"
    command, *arguments = launch.training_script_args
    assert command == "train"
    if "seven_billion.yaml" in " ".join(arguments):
        parse_arguments(arguments)


def execute(words):
    """Run a command in this process."""
    from gspo_kernels import cli

    if words[0] == "gspo":
        sys.exit(cli.main(words[1:]))
    assert words[:2] == ["python", "-m"], words
    sys.argv = words[2:]
    runpy.run_module(words[2], run_name="__main__", alter_sys=True)


@pytest.mark.slow
@pytest.mark.parametrize("command", RUN.values())
def test_commands_of_pages_run(command, folder, monkeypatch):
    from torch.distributed.run import get_args_parser as torchrun

    for module in ("gspo_kernels.cli", "gspo_kernels.mismatch.command_line", "matplotlib.figure"):
        importlib.import_module(module)  # forked copies then have this module and all that it imports
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(folder)
    log = folder / "log"

    def copy(words):
        sys.stdout = sys.stderr = log.open("w")
        os.environ |= {"OMP_NUM_THREADS": "1", "COLUMNS": "110"}
        torch.set_num_threads(1)
        execute(words)

    words = shlex.split(shortened(command))
    while "=" in words[0]:
        words = words[1:]
    if words[0] == "accelerate":
        parse(words)
    elif words[0] == "torchrun":
        options = torchrun().parse_args(words[1:])
        assert options.module and options.training_script == "gspo_kernels.cli"
        arguments = ["gspo", *options.training_script_args]
        in_processes(int(options.nproc_per_node), lambda rank: copy(arguments))
    elif "runs/seven_billion" not in words:
        if command.endswith("--resume --output runs/own_model"):  # as if the run had been interrupted
            config = folder / "runs" / "own_model" / "config.yaml"
            config.write_text(config.read_text().replace("  steps: 1\n", "  steps: 2\n"))
        assert exit_code(forked(partial(copy, words))) == 0, log.read_text()[-3000:]


# --- what scripts write into docs/


def script(name):
    """Return what a script of docs/ defines."""
    return SimpleNamespace(**runpy.run_path(str(DOCS / f"{name}.py")))


OBJECTIVES, SCALING, SITE = map(script, ("generate_objectives", "generate_scaling", "mkdocs_hooks"))


def test_pages_are_up_to_date():
    sketch = script("generate_architecture")
    assert sketch.SKETCH.read_text() == sketch.sketch(), "run `python docs/generate_architecture.py`"
    assert OBJECTIVES.PAGE.read_text() == OBJECTIVES.page(), "run `python docs/generate_objectives.py`"
    text = SCALING.PAGE.read_text()
    assert text == SCALING.page(text), "run `python docs/generate_scaling.py`"


# --- the site


def test_the_reference_has_every_public_name():
    shown = [name for _, names in SITE.REFERENCE.values() for name in names.split()]
    assert all(pkgutil.resolve_name(name).__doc__ for name in shown)
    assert set(gk.__all__) - {"objectives"} <= {name.removeprefix("gspo_kernels.") for name in shown}
