"""Plant faults in the package, one at a time, and report which of them the tests find. Run by hand.

    python -m tests.mutants --out before.jsonl                        # draws 200, in a copy of the tree
    python -m tests.mutants --again before.jsonl --out after.jsonl    # the same ones, in another commit
    python -m tests.mutants --compare before.jsonl after.jsonl

A stopped run continues where it was. A mutant that survives need not be a fault.
"""

import argparse
import ast
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
CALLS = "tests/test_equivalence.py tests/test_invariants.py tests/test_autograd.py"
CALLS += " tests/hidden/test_peak_memory.py"
SCHEDULES = "tests/hidden/test_schedules.py tests/hidden/test_matmul.py tests/hidden/test_lora_head.py"
OBJECTIVES = "tests/objectives/test_formulas.py tests/objectives/test_promises.py tests/objectives"
MORE_CALLS = "tests/test_selected.py tests/hidden/test_batch_invariance.py tests/test_compile.py"
TEACHERS = "tests/test_distillation.py"
SELECTED = "tests/test_selected.py"
NORMALIZER = "tests/objectives/test_normalizer.py"
ERRORS = "tests/arguments/test_errors.py"
RATIOS = "tests/backends/test_sequence_ratio.py"
OPERATORS = "tests/core/test_operators.py tests/core/test_precision_settings.py"
UPDATES = "tests/trainer/test_updates.py"
ROWS = " ".join(f"tests/backends/test_{name}.py" for name in ("rows", "sequence_ratio", "matrix_products"))
# Beginnings of paths, and the tests of these files, quick ones first. The longest beginning counts.
TESTS = {
    "gspo_kernels/": f"tests/test_structure.py {ERRORS} {CALLS} {MORE_CALLS}",
    "gspo_kernels/advantages.py": f"tests/test_advantages.py {ERRORS} {TEACHERS}",
    "gspo_kernels/cli.py": "tests/trainer/test_cli.py",
    "gspo_kernels/core/operators.py": OPERATORS,
    "gspo_kernels/backends/cpp/": f"{ROWS} {CALLS} tests/backends/cpp",
    "gspo_kernels/demo.py": "tests/trainer/test_cli.py",
    "gspo_kernels/distillation.py": f"{TEACHERS} {ERRORS}",
    "gspo_kernels/core/divergences.py": TEACHERS,
    "gspo_kernels/doctor.py": "tests/test_doctor.py",
    "gspo_kernels/integrations/": "tests/integrations",
    "gspo_kernels/models/": "tests/models tests/models/test_layouts.py",
    "gspo_kernels/backends/triton/": f"tests/backends tests/test_invariants.py {TEACHERS} {SELECTED}",
    "gspo_kernels/hidden/": f"{SCHEDULES} {MORE_CALLS} {TEACHERS} {CALLS} tests/distributed",
    "gspo_kernels/mismatch/": "tests/mismatch",
    "gspo_kernels/objectives/aggregation.py": f"{OBJECTIVES} {NORMALIZER} {CALLS} {ERRORS}",
    "gspo_kernels/objectives/evaluate.py": f"{OBJECTIVES} {RATIOS} {CALLS}",
    "gspo_kernels/objectives/": f"{OBJECTIVES} {ERRORS} {RATIOS}",
    "gspo_kernels/logits/policy_step.py": f"{RATIOS} {OBJECTIVES} {CALLS}",
    "gspo_kernels/off_policy.py": f"tests/test_off_policy.py tests/test_sampling_masks.py {ERRORS}",
    "gspo_kernels/logits/": f"{OPERATORS} tests/test_selected.py {TEACHERS} {CALLS} tests/distributed",
    "gspo_kernels/distributed/": f"tests/distributed {ERRORS}",
    "gspo_kernels/backends/reference/": f"{TEACHERS} {SELECTED} tests/backends/test_rows.py {CALLS}",
    "gspo_kernels/rewards.py": "tests/test_ready_made_rewards.py",
    "gspo_kernels/logprobs.py": f"{SELECTED} {ERRORS} {CALLS} tests/distributed",
    "gspo_kernels/logits/sequence_ratio.py": RATIOS,
    "gspo_kernels/trainer/": f"{UPDATES} tests/trainer tests/examples",
    "csrc/": f"{TEACHERS} tests/test_selected.py {CALLS} {ROWS} tests/backends/cpp",
}
SPACED = {  # operators with spaces around them
    "sign": "+:- -:+ *:/",
    "comparison": "<:<= <=:< >:>= >=:> ==:!= !=:== is:is_not",
    "mask": "&:| |:& and:or or:and &&:|| ||:&&",
    "divisor": "/:* //:* %:*",
}
PATTERNS = {
    "sign": [(r"(?<=[(=, ])-(?=[a-z_(])", "")],
    "mask": [(r"\bnot (?!in\b)", ""), (r"\bTrue\b", "False"), (r"\bFalse\b", "True")],
    "bound": [(r"\bmin(?=\(|imum\(|=)", "max"), (r"\bmax(?=\(|imum\(|=)", "min")],
    "off by one": [(r"(?<![\w.-])0(?![\w.])", "1"), (r"(?<![\w.-])1(?![\w.])", "2")],
    "scale": [
        (r"(?<![\w.])0\.0(?!\w)", "1.0"),
        (r"(?<![\w.])([1-9]\d*\.\d+|0\.\d*[1-9]\d*)(?!\w)", r"(2 * \1)"),
    ],
    "dtype": [(r"\bfloat64\b", "float32"), (r"\bfloat32\b", "bfloat16"), (r"\bdouble\b", "float")],
    "barrier": [(r"tl\.debug_barrier\(\)", "pass"), (r"acq_rel", "relaxed"), (r"_mm_sfence\(\);", "")],
}
RULES = {kind: list(PATTERNS.get(kind, [])) for kind in [*PATTERNS, *SPACED]}
for kind, pairs in SPACED.items():
    for old, new in (pair.split(":") for pair in pairs.split()):
        RULES[kind].append((rf"(?<= ){re.escape(old)}(?= (?!None))", new.replace("_", " ")))


def code_lines(path: Path) -> list[str]:
    """Return a file's lines with comments, strings, imports and directives blanked out."""
    text = path.read_text()
    if path.suffix != ".py":
        blank = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|^ *#[^\n]*|template ?<[^\n]*', re.M)
        return blank.sub(lambda match: "~" * len(match.group()), text).split("\n")
    lines = [list(line) for line in text.split("\n")]
    spans = [
        (*token.start, *token.end)
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type in (tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", -1))
        and "acq_rel" not in token.string
    ]
    spans += [
        (node.lineno, 0, node.end_lineno, node.end_col_offset)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    for first, start, last, end in spans:
        for row in range(first, last + 1):
            here = slice(start if row == first else 0, end if row == last else len(lines[row - 1]))
            lines[row - 1][here] = "~" * len(lines[row - 1][here])
    return ["".join(line) for line in lines]


def without_statement(path: Path, line: str, code: str, last: str) -> str | None:
    """Return the line that replaces a droppable statement of one line, None for any other line."""
    if path.suffix != ".py":
        whole = re.fullmatch(r"\s+[\w.\[\]>():-]+( [-+*|&]?= |\().*;", code) and last.rstrip()[-1:] in ";{}"
        return "" if whole and "return" not in code else None
    try:
        (node,) = ast.parse(line.strip()).body
    except (SyntaxError, ValueError):
        return None
    droppable = isinstance(node, (ast.Expr, ast.Assign, ast.AugAssign))
    if line.endswith(",") or not code.strip("~ ") or not droppable:
        return None
    return line[: len(line) - len(line.lstrip())] + "pass"


def mutants_of(path: Path) -> dict[str, list[dict]]:
    """Return all changes of a single line of a file, by kind."""
    kinds: dict[str, list[dict]] = {}
    lines, codes = path.read_text().split("\n"), code_lines(path)
    for row, (line, code) in enumerate(zip(lines, codes, strict=True)):
        changed = [
            (kind, line[: match.start()] + match.expand(new) + line[match.end() :])
            for kind, rules in RULES.items()
            for pattern, new in rules
            for match in re.finditer(pattern, code)
            if not code.lstrip().startswith("@")
        ]
        if (rest := without_statement(path, line, code, codes[row - 1])) is not None:
            changed.append(("dropped", rest))
        for kind, new in changed:
            mutant = {"file": str(path.relative_to(ROOT)), "line": line, "nth": lines[:row].count(line)}
            kinds.setdefault(kind, []).append({**mutant, "kind": kind, "new": new})
    return kinds


def sources(tree: Path) -> list[Path]:
    """Return all source files, except for both report.py, which plot."""
    files = [*tree.glob("gspo_kernels/**/*.py"), *tree.glob("csrc/*")]
    return sorted(path for path in files if path.name != "report.py")


def draw(seed: int, count: int) -> list[dict]:
    """Draw mutants: a file in proportion to its length, then a kind and a change of it, both uniformly."""
    random.seed(seed)
    every = {path: mutants_of(path) for path in sources(ROOT)}
    weights = {path: len(path.read_text().split("\n")) for path, kinds in every.items() if kinds}
    drawn: list[dict] = []
    while len(drawn) < count:
        kinds = every[random.choices(list(weights), list(weights.values()))[0]]
        mutant = random.choice(kinds[random.choice(sorted(kinds))])
        if mutant not in drawn:
            drawn.append(mutant)
    return drawn


def place(tree: Path, mutant: dict) -> tuple[Path, int] | None:
    """Return file and row of a mutant's line, or of the only equal line elsewhere, or None."""
    found = [
        (path, row)
        for path in sources(tree)
        for row, line in enumerate(path.read_text().split("\n"))
        if line == mutant["line"]
    ]
    here = [where for where in found if where[0] == tree / mutant["file"]]
    return here[min(mutant["nth"], len(here) - 1)] if here else found[0] if len(found) == 1 else None


def run(tree: Path, seconds: float, *arguments: str) -> tuple[int | None, str]:
    """Run Python in a tree. Return its exit status, None after ``seconds``, and the output."""
    ninja = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # compiles what changed
    environment = os.environ | {"PYTHONPATH": str(tree), "PATH": ninja}
    # ``timeout`` ends all processes of the tests, and with them itself
    command = ["timeout", "--signal=KILL", str(seconds), sys.executable, *arguments]
    with tempfile.TemporaryFile("w+") as output:
        status = subprocess.run(command, cwd=tree, env=environment, stdout=output, stderr=output).returncode
        output.seek(0)
        return None if status == -signal.SIGKILL else status, output.read()


def attempt(mutant: dict, tree: Path, seconds: float) -> dict:
    """Plant a mutant and run its tests. Return the outcome and the first test that failed."""
    if (found := place(tree, mutant)) is None:
        return {"outcome": "code gone"}
    path, row = found
    lines = path.read_text().split("\n")
    lines[row] = mutant["new"]
    path.write_text("\n".join(lines))
    name = str(path.relative_to(tree))
    if name.startswith("csrc/"):
        _, said = run(tree, 600, "setup.py", "build_ext", "--inplace")
        if "compiling it failed" in said:
            return {"outcome": "does not compile"}
    tests = TESTS[max((start for start in TESTS if name.startswith(start)), key=len)].split()
    # files alone: if their folder were passed, too, pytest would run them in the folder's order
    files = [file for test in tests for file in sorted((tree / test).rglob("test_*.py")) or [tree / test]]
    tests = [str(file) for file in dict.fromkeys(files) if file.exists()]
    status, output = run(tree, seconds, "-m", "pytest", "-xq", "-p", "no:cacheprovider", *tests)
    first = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.M)
    outcome = {None: "time over", 0: "survived"}.get(status, "caught")
    return {"outcome": outcome, "by": first[1] if first else output.strip()[-200:]}


def read(path: Path | None) -> dict[tuple, dict]:
    lines = path.read_text().splitlines() if path and path.exists() else []
    return {key(mutant): mutant for mutant in map(json.loads, lines)}


def key(mutant: dict) -> tuple:
    return tuple(mutant[name] for name in ("file", "line", "nth", "new"))


def compare(before: dict[tuple, dict], after: dict[tuple, dict]) -> None:
    for mutant in before.keys() & after.keys():
        outcome = after[mutant]["outcome"]
        if before[mutant]["outcome"] == "caught" and outcome not in ("caught", "code gone"):
            print(json.dumps({**before[mutant], "outcome": outcome}))
    for results in (before, after):
        print(dict(Counter(result["outcome"] for result in results.values())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=240.0, help="what the tests of one mutant may take")
    parser.add_argument("--only", default="", help="beginnings of files, with commas between")
    parser.add_argument("--again", type=Path, help="the mutants of these results instead of a draw")
    parser.add_argument("--out", type=Path, help="results, a line of JSON for each mutant")
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    options = parser.parse_args()
    if options.compare:
        return compare(*map(read, options.compare))
    mutants = read(options.again).values() if options.again else draw(options.seed, options.count)
    done, only = read(options.out), tuple(options.only.split(","))
    mutants = [mutant for mutant in mutants if key(mutant) not in done and mutant["file"].startswith(only)]
    with tempfile.TemporaryDirectory() as folder:
        clean, tree = Path(folder) / "clean", Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv*", "build", "runs", "dist"))
        if any(mutant["file"].startswith("csrc/") for mutant in mutants):
            run(tree, 3600, "setup.py", "build_ext", "--inplace")
        shutil.copytree(tree, clean)
        for mutant in mutants:
            start = time.monotonic()
            result = mutant | attempt(mutant, tree, options.seconds)
            result["seconds"] = round(time.monotonic() - start)
            with options.out.open("a") as file:
                file.write(json.dumps(result) + "\n")
            print(result["outcome"], result["seconds"], result["file"], result["new"].strip(), flush=True)
            # the copy keeps times of files: only what the next mutant changes is compiled
            shutil.rmtree(tree)
            shutil.copytree(clean, tree)


if __name__ == "__main__":
    main()
