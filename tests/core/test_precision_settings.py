"""Calls keep the caller's precision settings, and results don't depend on them, whichever interface set them.

Each setting has a process of its own: PyTorch refuses to read old switches once the new ones were used. Only
a CPU with bf16 instructions computes other products under "medium".
"""

from contextlib import ExitStack, nullcontext

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.core.operators import EXACT_MATMUL
from tests.cases import forward, generator, make_case
from tests.forks import exit_code, forked

matmul, on_cpu = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
OLD, NEW = "matmul.allow_tf32 = True", 'matmul.fp32_precision = "tf32"'
SETTINGS = {
    "old, global": ['torch.set_float32_matmul_precision("high")'],
    "old, global, bf16": ['torch.set_float32_matmul_precision("medium")'],
    "new, global": ['torch.backends.fp32_precision = "tf32"'],
    "new, global, bf16": ['torch.backends.fp32_precision = "bf16"'],
    "old, then new": [OLD, NEW],
    "new, then old": [NEW, OLD],
    "split sums": ["matmul.allow_bf16_reduced_precision_reduction = (False, False)"],
}
SWITCHES = (
    "matmul.fp32_precision", "on_cpu.fp32_precision", "matmul.allow_tf32",
    "torch.get_float32_matmul_precision()",
    "matmul.allow_bf16_reduced_precision_reduction", "matmul.allow_fp16_reduced_precision_reduction",
    "matmul.allow_bf16_reduced_precision_reduction_split_k",
)  # fmt: skip
LINEAR, SIZES = "fused_linear_policy_loss", {"lengths": (9, 12), "vocabulary": 70, "width": 64}
CASE, ADAPTED = make_case("linear", **SIZES), make_case("linear", adapter=3, **SIZES)
WAYS = {
    **{name: (CASE, LINEAR, {"schedule": name}) for name in ("auto", "aligned", "deferred", "frozen")},
    "two_pass": (CASE, LINEAR, {"schedule": "two_pass", "max_chunk_bytes": 4 * 70 * 8}),
    "adapter": (ADAPTED, LINEAR, {}),
    "log-probs": (CASE, "linear_token_logprobs", {}),
    "log-probs, reference": (CASE, "linear_token_logprobs", {"backend": "reference"}),
}
HIDDEN, WEIGHT, TEACHER = (torch.randn(*size, 64, generator=generator(0)) for size in ((2, 9), (70,), (2, 9)))
OTHERS = {
    "selected": lambda *head: gk.linear_selected_logprobs(*head, torch.arange(54).view(2, 9, 3)).logprobs,
    "distillation": lambda *head: gk.fused_linear_distillation_loss(*head, TEACHER, WEIGHT).loss,
}


def results(around):
    """Return outputs and gradients of every way to multiply by a head, with the backward in a context."""
    found = {}
    for name, (case, entry, options) in WAYS.items():
        leaves, output = forward(case, entry, gk.GSPO(0.9, 9.0), **options)
        found[name] = [output.loss, [leaf for leaf in leaves.values() if leaf.requires_grad]]
    for name, function in OTHERS.items():
        leaves = [HIDDEN.clone().requires_grad_(), WEIGHT.clone().requires_grad_()]
        found[name] = [function(*leaves).sum(), leaves]
    with around:
        return {name: [value, *torch.autograd.grad(value, leaves)] for name, (value, leaves) in found.items()}


def assert_same(one, other):
    assert [name for name in one if not all(map(torch.equal, one[name], other[name]))] == []


def state():
    """Return the value of every switch, or why it can't be read."""
    found = {}
    for switch in SWITCHES:
        try:
            found[switch] = eval(switch)
        except (RuntimeError, AttributeError) as error:
            found[switch] = str(error)
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_and_results_are_independent(name):
    def use():
        torch.set_num_threads(1)
        expected = results(nullcontext())
        for setting in ["", *SETTINGS[name]]:
            exec(setting)
            before = state()
            assert_same(results(nullcontext()), expected)
            with ExitStack() as other_thread:
                with EXACT_MATMUL:
                    other_thread.enter_context(EXACT_MATMUL)
                assert matmul.fp32_precision == on_cpu.fp32_precision == "ieee"
                assert not matmul.allow_bf16_reduced_precision_reduction
                assert not matmul.allow_fp16_reduced_precision_reduction
            assert state() == before
        if name.startswith("new, global"):  # what is set for all operations still holds for products
            torch.backends.fp32_precision = "ieee"
            assert matmul.fp32_precision == on_cpu.fp32_precision == "ieee"

    assert exit_code(forked(use)) == 0


def test_autocast_around_the_backward_alone():
    assert_same(results(torch.autocast("cpu", torch.bfloat16)), results(nullcontext()))
