"""The public signatures, and light imports."""

import inspect
import subprocess
import sys
from pathlib import Path

import gspo_kernels as gk

ROOT = Path(__file__).parent.parent

# --- signatures


def test_options_are_keywords_with_one_default():
    """Some functions take these optional tensors by position, too."""
    tensors = {"teacher_logits", "teacher_hidden", "teacher_weight", "loss_mask", "advantages"}
    public, defaults = [getattr(gk, name) for name in gk.__all__], {}
    for function in [*filter(inspect.isfunction, public), gk.advantages.group_normalized]:
        for each in inspect.signature(function).parameters.values():
            if each.default is not each.empty:
                assert each.kind is each.KEYWORD_ONLY or each.name in tensors, (function, each)
                assert defaults.setdefault(each.name, each.default) == each.default, (function, each)


# --- imports


LIGHT = """
import sys, time, torch
before = set(sys.modules)
start = time.process_time()
import gspo_kernels as gk
took = time.process_time() - start
gk.token_logprobs(torch.zeros(1, 1, 3), torch.zeros(1, 1, dtype=torch.int64))
heavy = {"triton", "transformers", "accelerate", "datasets", "matplotlib", "gspo_kernels.backends.triton",
         "gspo_kernels.trainer"}
print(took, sorted((heavy - before) & set(sys.modules)))
from gspo_kernels.integrations import skyrl, transformers
from gspo_kernels.models import rows
frameworks = {"transformers", "accelerate", "peft", "trl", "skyrl"}
print(sorted(frameworks & set(sys.modules)))
"""


def test_imports_stay_light():
    """Imports take at most 0.3 s of processor time beyond torch; the first process may write bytecode."""
    for _ in range(5):
        result = subprocess.run([sys.executable, "-c", LIGHT], cwd=ROOT, capture_output=True, text=True)
        took, *found = result.stdout.split(maxsplit=1)
        assert found == ["[]\n[]\n"], result.stdout + result.stderr
        if float(took) < 0.3:
            return
    raise AssertionError(f"importing gspo_kernels takes {took} s")


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # an import of it fails, as on macOS
import torch
import gspo_kernels as gk
from gspo_kernels import doctor
doctor.report()
hidden, weight = torch.ones(1, 2, 4, requires_grad=True), torch.eye(5, 4)
gk.fused_linear_policy_loss(hidden, weight, torch.zeros(1, 2).long(), None, torch.ones(1)).loss.backward()
gk.fused_policy_loss(hidden, torch.zeros(1, 2).long(), None, torch.ones(1)).loss.backward()
assert hidden.grad.any()
"""


def test_losses_run_without_triton():
    command = [sys.executable, "-c", WITHOUT_TRITON]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
