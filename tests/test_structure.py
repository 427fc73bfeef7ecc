"""The public contract, and imports that stay light and point downwards. `make lint` checks the rest."""

import ast
import inspect
import operator
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.ops.backends import why_not
from release.version import tomllib
from tests.frames import calls, frames

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "gspo_kernels").rglob("*.py"))

# --- signatures

TERMS = (
    "ref_logprobs kl_beta kl_estimator kl_ratio_weighted entropy_coef rollout_weights token_weights lengths "
    "group_ids turn_ids normalizer"
)
"""Terms that ``policy_loss`` describes for all losses."""
FUNCTIONS = [name for name in gk.__all__ if inspect.isfunction(getattr(gk, name))]
FUNCTIONS += ["advantages.group_normalized"]
OPTIONAL_INPUTS = {"teacher_logits", "teacher_hidden", "teacher_weight"}
OF_PREFETCH = {"loss_mask", "advantages"}
DEFAULTS = {
    "kl_beta": 0.0, "kl_estimator": "k3", "kl_ratio_weighted": False, "entropy_coef": 0.0,
    "temperature": 1.0, "logit_scale": 1.0, "ignore_index": -100, "return_entropy": False,
    "inplace_backward": False, "logits_dtype": "float32", "schedule": "auto", "normalize_within": False,
    "memory": "auto",
    "top_k": 0, "top_p": 1.0, "min_p": 0.0, "engine": "transformers", "skip_inactive": "backward",
    "backend": "auto", "objective": gk.GSPO(), "parallel": gk.Parallel(), "scale": "group", "eps": 1e-4,
    "level": "token", "reduce": "mean", "mode": "truncate", "beta": 0.5, "top_k_of": "teacher",
    "add_tail": True, "aggregation": "token_mean", "teacher_logit_scale": 1.0,
}  # fmt: skip
"""Defaults of keywords; all other keywords have None."""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_options_are_keywords_with_one_default_everywhere_and_are_described(name):
    function = operator.attrgetter(name)(gk)
    parameters, text = inspect.signature(function).parameters.values(), function.__doc__
    for each in parameters:
        assert each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY), f"{name} takes {each}"
        required = each.default is each.empty
        if each.kind is each.POSITIONAL_OR_KEYWORD:
            optional = OF_PREFETCH if name == "prefetch" else OPTIONAL_INPUTS
            assert required or each.name in optional, each
        else:
            assert required or each.default == DEFAULTS.get(each.name), each
    if name in ("policy_coefficients", "explain_schedule"):  # both name a function whose arguments they share
        assert re.search("policy_loss|fused_linear_policy_loss", text)
    elif name not in ("is_batch_invariant", "set_batch_invariant"):
        assert "Returns:" in text and "Raises:" in text
        elsewhere = () if name == "policy_loss" else TERMS.split()
        for each in parameters:
            assert each.name in elsewhere or re.search(rf"\b{each.name}\b", text.split("Args:")[1]), each


@pytest.mark.parametrize("name", gk.objectives.__all__)
def test_objectives_take_clip_bounds_alone_by_position_and_describe_source_and_options(name):
    text, parameters = getattr(gk, name).__doc__, inspect.signature(getattr(gk, name)).parameters.values()
    own = {each.name for each in parameters} - {"aggregation", "aggregation_constant"}
    assert "arXiv" in text or name == "Linear"
    assert all(option in text.partition("Args:")[2] for option in own)
    positional = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert re.fullmatch(r"(|((log_)?clip|bound)_low \2_high|min_ratio max_ratio)", " ".join(positional))


def test_type_checkers_see_the_public_names():
    """The package's ``__init__`` lists them twice, because it imports everything on first use."""
    tree = ast.parse(Path(gk.__file__).read_text())
    (checked,) = [node for node in tree.body if isinstance(node, ast.If)]
    imported = {
        alias.name: node.module
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    names = set(imported) - {"*"} | set(gk.objectives.__all__)
    assert names == set(gk.__all__) == set(dir(gk))
    for name in names:
        assert getattr(gk, name).__doc__, name
    for name in names - set(gk.objectives.__all__) - {"advantages", "objectives"}:
        assert getattr(gk, name) is getattr(import_module(imported[name]), name)


# --- imports


LIGHT = """
import sys, time, torch
before = set(sys.modules)
start = time.process_time()
import gspo_kernels as gk
took = time.process_time() - start
gk.token_logprobs(torch.zeros(1, 1, 3), torch.zeros(1, 1, dtype=torch.int64))
heavy = {"triton", "transformers", "accelerate", "datasets", "matplotlib", "gspo_kernels.kernels",
         "gspo_kernels.trainer"}
print(took, sorted((heavy - before) & set(sys.modules)))
from gspo_kernels.integrations import skyrl, transformers
from gspo_kernels.models import rows
frameworks = {"transformers", "accelerate", "peft", "trl", "skyrl"}
print(sorted(frameworks & set(sys.modules)))
"""


def test_imports_stay_light():
    """A CPU user pays for neither Triton nor transformers, nor for frameworks that adapters are named after.

    The package takes below 0.3 s of processor time beyond torch. The first process may write bytecode.
    """
    for _ in range(5):
        result = subprocess.run([sys.executable, "-c", LIGHT], cwd=ROOT, capture_output=True, text=True)
        took, *found = result.stdout.split(maxsplit=1)
        assert found == ["[]\n[]\n"], result.stdout + result.stderr
        if float(took) < 0.3:
            return
    raise AssertionError(f"importing gspo_kernels takes {took} s")


def test_no_module_imports_one_above_it_by_a_string():
    """Modules named in strings obey the layers of pyproject.toml, too; import-linter doesn't see them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    order = {name: i for i, layer in enumerate(contracts[0]["layers"]) for name in layer.split(" | ")}
    named = []
    for path in SOURCES:
        here = order.get(path.relative_to(ROOT / "gspo_kernels").with_suffix("").parts[0], -1)
        for name in re.findall(r"""["'](?:gspo_kernels\.|\.\.)([a-z]\w*)[\w.]*["']""", path.read_text()):
            named.append(name)
            assert order.get(name, here) >= here, (path, name)
    assert "kernels" in named


# --- what the design forbids


def test_no_kernel_or_loss_switches_on_an_objectives_name():
    names = "|".join(gk.objectives.__all__)
    for path in SOURCES:
        if "objectives" in path.parts or "trainer" in path.parts or path.name in ("__init__.py", "cli.py"):
            continue
        found = re.search(rf"isinstance\([^)\n]*\b({names})\b|__name__ (==|in)", path.read_text())
        assert not found, (path, found)


def test_the_map_shows_every_folder_and_module():
    """CONTRIBUTING.md names each folder, and each module beside the package's ``__init__.py``."""
    shown = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where things live")[2].partition("\n## ")[0]
    shown = set(re.findall(r"[\w.]+/|\w+\.py", shown))
    tops = ("gspo_kernels", "csrc", "benchmarks", "docs", "examples", "release", "tests")
    folders = [path for top in tops for path in (ROOT / top, *(ROOT / top).rglob("*/")) if path.is_dir()]
    here = {f"{path.name}/" for path in folders if any(path.glob("*.*")) and path.name != "__pycache__"}
    here |= {path.name for path in (ROOT / "gspo_kernels").glob("*.py")} - {"__init__.py"}
    machines = {f"{path.name}/" for path in (ROOT / "benchmarks" / "results").iterdir()}
    assert here - machines - shown == set()
    assert {name for name in shown if name.endswith("/")} <= {f"{path.name}/" for path in folders}


INTEGERS = {"arange", "randint", "randperm", "tril_indices", "triu_indices"}
"""Functions whose results are integers for integers, whatever the default dtype is."""
ALLOCATIONS = {
    "as_tensor", "asarray", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace", "logspace",
    "nested_tensor", "ones", "rand", "randn", "range", "scalar_tensor", "tensor", "zeros", *INTEGERS,
}  # fmt: skip


def test_no_allocation_leaves_dtype_or_device_to_pytorchs_defaults():
    """Scripts set them: ``torch.set_default_dtype(torch.bfloat16)``, ``torch.set_default_device("cuda")``."""
    found, open_ones = 0, []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if name.startswith("torch.") and name.removeprefix("torch.") in ALLOCATIONS:
                found += 1
                needed = {"device"} if name.removeprefix("torch.") in INTEGERS else {"device", "dtype"}
                if not needed <= {keyword.arg for keyword in node.keywords}:
                    open_ones.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
    assert found > 50 and not open_ones, "\n".join(open_ones)


def test_csrc_leaves_the_importing_thread_alone():
    setup = (ROOT / "setup.py").read_text()
    assert not re.search(r'"(-ffast-math|-Ofast|-fopenmp|-funsafe-math-optimizations)"', setup)


MOST = {"logprobs": (34, 8), "logits": (54, 8), "linear": (120, 11)}
"""The most functions of the package that a call enters, and the largest depth."""


@pytest.mark.skipif(why_not("cpp", torch.device("cpu")) is not None, reason="counts functions of C++")
@pytest.mark.parametrize("name", MOST)
def test_the_way_through_a_call_is_short(name):
    seen = frames(calls()[name])
    assert len(seen) <= MOST[name][0] and max(seen.values()) <= MOST[name][1], "\n".join(seen)
