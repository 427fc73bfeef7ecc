"""The public contract, the arrows between modules, and clean tools."""

import ast
import contextlib
import importlib.util
import inspect
import operator
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gspo_kernels as gk

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent

LAYOUT = "loss_mask cu_seqlens"
TERMS = (
    "ref_logprobs kl_beta kl_estimator kl_ratio_weighted entropy_coef rollout_weights token_weights lengths "
    "group_ids turn_ids normalizer"
)
LOGITS = "temperature logit_scale softcap kept_ids kept_mask ignore_index backend parallel"
HIDDEN = "bias logits_dtype max_chunk_bytes batch_invariant"
POLICY = f"{LAYOUT} {TERMS} parallel"

# positional parameters | keyword-only parameters
SELECTED = f"normalize_within {LOGITS}".replace("ignore_index ", "")
DISTILLED = (
    f"{LAYOUT} beta top_k top_k_of add_tail ids teacher_logprobs aggregation aggregation_constant "
    "token_weights lengths normalizer temperature logit_scale softcap teacher_temperature "
    "teacher_logit_scale teacher_softcap backend parallel"
)
CONTRACT = {
    "token_logprobs": ("logits labels", f"{LOGITS} return_entropy inplace_backward"),
    "linear_token_logprobs": ("hidden weight labels", f"{LOGITS} {HIDDEN} return_entropy"),
    "policy_loss": ("logprobs old_logprobs advantages", f"{POLICY} entropy objective"),
    "policy_coefficients": ("logprobs old_logprobs advantages", f"{POLICY} entropy objective"),
    "fused_policy_loss": (
        "logits labels old_logprobs advantages",
        f"{POLICY} {LOGITS} return_entropy inplace_backward objective",
    ),
    "fused_linear_policy_loss": (
        "hidden weight labels old_logprobs advantages",
        f"{POLICY} {LOGITS} {HIDDEN} return_entropy schedule skip_inactive objective",
    ),
    "selected_logprobs": ("logits ids", f"{SELECTED} inplace_backward"),
    "linear_selected_logprobs": (
        "hidden weight ids",
        f"{HIDDEN} {SELECTED}",
    ),
    "distillation_loss": ("logits teacher_logits", f"{DISTILLED} inplace_backward"),
    "fused_linear_distillation_loss": (
        "hidden weight teacher_hidden teacher_weight",
        f"{DISTILLED} bias teacher_bias logits_dtype max_chunk_bytes batch_invariant",
    ),
    "sampling_mask": ("logits", "temperature top_k top_p min_p labels engine"),
    "normalizer": ("objective loss_mask", "cu_seqlens lengths advantages group_ids group parallel"),
    "rollout_weights": ("old_logprobs rollout_logprobs", f"{LAYOUT} level reduce mode low high"),
    "advantages.group_normalized": ("rewards", "group_size group_ids scale eps"),
    "explain_schedule": ("hidden weight labels old_logprobs advantages", None),
}

DEFAULTS = {
    "kl_beta": 0.0, "kl_estimator": "k3", "kl_ratio_weighted": False, "entropy_coef": 0.0,
    "temperature": 1.0, "logit_scale": 1.0, "softcap": None, "kept_ids": None, "kept_mask": None,
    "ignore_index": -100, "return_entropy": False, "inplace_backward": False, "logits_dtype": "float32",
    "max_chunk_bytes": None, "batch_invariant": None, "schedule": "auto", "normalize_within": False,
    "top_k": 0, "top_p": 1.0, "min_p": 0.0, "engine": "transformers", "skip_inactive": "backward",
    "backend": "auto",
    "objective": gk.GSPO(), "loss_mask": None, "cu_seqlens": None, "normalizer": None, "lengths": None,
    "parallel": gk.Parallel(),
    "bias": None, "entropy": None, "scale": "group", "eps": 1e-4, "level": "token", "reduce": "mean",
    "mode": "truncate", "beta": 0.5, "top_k_of": "teacher", "add_tail": True, "aggregation": "token_mean",
    "teacher_logit_scale": 1.0,
}  # fmt: skip


def test_signatures_and_docstrings():
    for name, (positional, keywords) in CONTRACT.items():
        target = operator.attrgetter(name)(gk)
        parameters, text = inspect.signature(target).parameters, target.__doc__
        kinds = {key: parameter.kind for key, parameter in parameters.items()}
        keyed = inspect.Parameter.POSITIONAL_OR_KEYWORD
        assert [key for key, kind in kinds.items() if kind is keyed] == positional.split(), name
        named = {key for key, kind in kinds.items() if kind is inspect.Parameter.KEYWORD_ONLY}
        assert len(named) + len(positional.split()) == len(kinds), f"{name} takes *args or **kwargs"
        assert keywords is None or named == set(keywords.split()), name
        for key in named:
            required = name == "policy_coefficients" and key == "objective"
            expected = inspect.Parameter.empty if required else DEFAULTS.get(key)
            assert parameters[key].default == expected, (name, key)
        if name in ("policy_coefficients", "explain_schedule"):  # these two say whose arguments they share
            assert re.search("policy_loss|fused_linear_policy_loss", text)
            continue
        assert "Returns:" in text and "Raises:" in text
        # terms are described once, where the other docstrings refer to
        for key in kinds.keys() - (set() if name == "policy_loss" else set(TERMS.split())):
            assert re.search(rf"\b{key}\b", text.split("Args:")[1]), (name, key)


def test_named_outputs():
    assert gk.TokenLogprobs._fields == ("logprobs", "entropy")
    assert gk.LossOutput._fields == ("loss", "logprobs", "entropy", "metrics")
    assert gk.types.METRICS == (
        "ratio/mean", "ratio/min", "ratio/max", "clip_fraction/low", "clip_fraction/high",
        "clip_fraction/tokens", "kl/old", "active_fraction",
    )  # fmt: skip


POSITIONAL = {
    "clip_low clip_high": "BNPO ClipCov DAPO DHPO DrGRPO EGSW ESPO FIPO GRPO GSPO GSPOToken LUSPO TLGRPO",
    "bound_low bound_high": "DPPO",
    "log_clip_low log_clip_high": "CTPO FSPO GMPO",
    "min_ratio max_ratio": "CISPO",
    "": "ABCGRPO AGRO DPO DRO GPG KLCov Linear M2PO PrimeIPO REAL REBEL SAPO SSPO TOPR TRPA VESPO",
}


def test_clip_bounds_alone_are_positional():
    stated = {name: fields.split() for fields, names in POSITIONAL.items() for name in names.split()}
    assert stated.keys() == set(gk.objectives.__all__)
    for name, fields in stated.items():
        parameters = inspect.signature(getattr(gk, name)).parameters.values()
        kinds = {True: [], False: []}
        for parameter in parameters:
            assert parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
            kinds[parameter.kind is parameter.KEYWORD_ONLY].append(parameter.name)
        assert kinds[False] == fields, name
        if name in ("GSPO", "GSPOToken", "GRPO"):
            assert {*kinds[True]} == {"dual_clip", "aggregation", "aggregation_constant"}
        assert {"aggregation", "aggregation_constant"} <= set(kinds[True]), name


def test_public_names_are_documented_and_the_same_for_type_checkers():
    """They stand twice in the package's ``__init__``, as everything is imported on first use."""
    assert len(set(gk.__all__)) == len(gk.__all__)  # ruff keeps the order
    tree = ast.parse(Path(gk.__file__).read_text())
    (checked,) = [node for node in tree.body if isinstance(node, ast.If)]
    imported = {
        alias.name: node.module
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    names = set(imported) - {"*"} | set(gk.objectives.__all__)
    assert names == set(gk.__all__)
    for name in names:
        assert getattr(gk, name).__doc__, name
    for name in names - set(gk.objectives.__all__) - {"advantages", "objectives"}:
        assert getattr(gk, name) is getattr(importlib.import_module(imported[name]), name)


# --- imports


def run(*command, **options):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, **options)


def test_importing_and_using_the_package_stays_light():
    """A CPU user pays for neither Triton nor transformers."""
    code = (
        "import sys, torch; before = set(sys.modules); import gspo_kernels as gk\n"
        "gk.token_logprobs(torch.zeros(1, 1, 3), torch.zeros(1, 1, dtype=torch.int64))\n"
        "heavy = ('triton', 'transformers', 'accelerate', 'datasets', 'matplotlib', 'gspo_kernels.kernels', "
        "'gspo_kernels.trainer')\n"
        "assert 'gspo_kernels' not in before\n"
        "print([name for name in heavy if name in sys.modules and name not in before])"
    )
    result = run(sys.executable, "-c", code)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_importing_the_package_is_quick():
    """Below 0.3 s of processor time beyond torch; one pass of the collector over torch takes half of it."""
    code = "import time, torch; a = time.process_time(); import gspo_kernels; print(time.process_time() - a)"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    took = []
    while len(took) < 5 and (len(took) < 2 or min(took[1:]) >= 0.3):  # the first one writes bytecode
        took.append(float(run(sys.executable, "-c", code, env=environment).stdout))
    assert min(took[1:]) < 0.3, took


def tool(name):
    """The path of a development tool; they come with the extra "test", so they are never skipped."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    assert found, f'{name} is missing: pip install "gspo_kernels[test]"'
    return found


PLANTED = {
    "kernels/rows.py": "from gspo_kernels.objectives import GSPO",
    "ops/values.py": "from gspo_kernels.terms import Terms",
    "objectives/gspo.py": "from gspo_kernels.ops import values",
    "linear/planted.py": "import gspo_kernels.trainer",
    "trainer/loop.py": "import gspo_kernels.mismatch",
    "integrations/verl.py": "import gspo_kernels.cli",
    "linear/head.py": "from gspo_kernels.linear import scores",
    "parallel/groups.py": "from gspo_kernels.ops import values",
}


def test_import_contracts_hold_and_fail_for_what_they_forbid(tmp_path):
    result = run(tool("lint-imports"), "--no-cache")
    assert result.returncode == 0, result.stdout + result.stderr
    package = tmp_path / "gspo_kernels"
    shutil.copytree(ROOT / "gspo_kernels", package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)

    def lint():
        path = {**os.environ, "PYTHONPATH": str(tmp_path)}
        command = [tool("lint-imports"), "--no-cache"]
        found = subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True)
        assert found.returncode != 0 and "BROKEN" in found.stdout, found.stdout + found.stderr
        return found.stdout

    (package / "stray.py").touch()  # in no layer
    assert "stray" in lint()
    (package / "stray.py").unlink()
    for where, line in PLANTED.items():
        with (package / where).open("a", encoding="utf-8") as file:
            file.write(f"\n{line}\n")
    report = lint()
    for where, line in PLANTED.items():
        importer = "gspo_kernels." + where.removesuffix(".py").replace("/", ".")
        imported = re.search(r"gspo_kernels(\.\w+)+", line)[0]
        assert re.search(rf"{importer} -> {imported}", report), (where, report)


def named_in_strings(path, source):
    """The modules of the package that strings of one of its files name, as ``import_module`` takes them."""
    package = ".".join(path.relative_to(ROOT).parent.parts)
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value
            if re.fullmatch(r"\.+\w+(\.\w+)*", name):
                with contextlib.suppress(ImportError):  # beyond the package
                    name = importlib.util.resolve_name(name, package)
            file = ROOT.joinpath(*name.split(".")) if re.fullmatch(r"gspo_kernels(\.\w+)+", name) else None
            if file is not None and (file.is_dir() or file.with_suffix(".py").exists()):
                found.add(name)
    return found


def upwards(path, source):
    """Those of them that are in a layer above the file's, by the first contract."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = enumerate(contracts[0]["layers"])
    order = {module: place for place, layer in layers for module in layer.split(" | ")}
    here = order.get(path.relative_to(ROOT / "gspo_kernels").with_suffix("").parts[0], -1)
    return {name for name in named_in_strings(path, source) if order[name.split(".")[1]] < here}


def test_no_module_imports_one_above_it_by_a_string():
    for path in (ROOT / "gspo_kernels").rglob("*.py"):
        assert upwards(path, path.read_text(encoding="utf-8")) == set(), path
    backends = ROOT / "gspo_kernels" / "ops" / "backends.py"
    assert "gspo_kernels.cpp" in named_in_strings(backends, backends.read_text(encoding="utf-8"))
    for name in ("..linear.call", "gspo_kernels.linear.call"):
        planted = f"import importlib\n\nimportlib.import_module({name!r}, __package__)\n"
        assert upwards(backends, planted) == {"gspo_kernels.linear.call"}


def test_objectives_may_not_import_layers(tmp_path):
    package = tmp_path / "gspo_kernels" / "objectives"
    package.mkdir(parents=True)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    planted = package / "planted.py"
    planted.write_text('"""Planted."""\n\nimport torch.nn\n\nprint(torch.nn)\n', encoding="utf-8")
    result = subprocess.run(
        [tool("ruff"), "check", "--no-cache", "."], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode != 0 and "TID251" in result.stdout, result.stdout + result.stderr


@pytest.mark.parametrize("command", [("check",), ("format", "--check")], ids=" ".join)
def test_ruff(command):
    folders = [name for name in ("gspo_kernels", "tests", "benchmarks", "release") if (ROOT / name).exists()]
    result = run(tool("ruff"), *command, "--no-cache", *folders)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
def test_types():
    assert importlib.util.find_spec("mypy"), 'mypy is missing: pip install "gspo_kernels[test]"'
    result = run(sys.executable, "-m", "mypy")
    assert result.returncode == 0, result.stdout + result.stderr


# --- what the design forbids


SOURCES = sorted((ROOT / "gspo_kernels").rglob("*.py"))


def test_no_kernel_or_loss_switches_on_an_objectives_name():
    names = "|".join(gk.objectives.__all__)
    for path in SOURCES:
        if "objectives" in path.parts or "trainer" in path.parts or path.name in ("__init__.py", "cli.py"):
            continue
        for line in path.read_text().splitlines():
            assert not re.search(rf"isinstance\([^)]*\b({names})\b|__name__ (==|in)", line), (path, line)


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


def test_the_changelog_has_a_section_for_this_version():
    assert f"\n## {gk.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_csrc_leaves_the_importing_thread_alone():
    flags = (ROOT / "setup.py").read_text()
    arguments = flags.split("COMPILE_ARGS = [")[1].split("]")[0]
    options = re.findall(r'"(-[^"]+)"', arguments)
    assert not {"-ffast-math", "-Ofast", "-fopenmp", "-funsafe-math-optimizations"} & set(options)
