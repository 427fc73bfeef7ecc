"""The kernel for the Hugging Face hub, loaded from its folder by the real ``kernels`` package."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import gspo_kernels as gk
from release import hub
from tests.cases import make_case
from tests.draws import shifted_seed

kernels = pytest.importorskip("kernels")

V, H = 211, 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "kernel"
    hub.build(folder)
    return folder


@pytest.fixture(scope="module")
def kernel(folder):
    return kernels.get_local_kernel(folder, backend="cpu")


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_losses_have_the_bits_of_the_package(kernel, backend):
    if backend == "triton":
        pytest.importorskip("triton")
    case, results = make_case("linear", "padded", masked=False), []
    for package in (kernel, gk):
        leaves = {name: value.clone().requires_grad_() for name, value in case.inputs.items()}
        given = {"labels": case.labels, "old_logprobs": case.old_logprobs, "advantages": case.advantages}
        how = {"objective": package.GSPO(), "backend": backend}
        out = package.fused_linear_policy_loss(**leaves, **given, **how)
        results.append((out.loss.detach(), out.logprobs, *torch.autograd.grad(out.loss, leaves.values())))
    assert all(map(torch.equal, *results)) and results[0][2].any()
    assert kernel.__version__ == gk.__version__ and kernel.__name__ != "gspo_kernels"
    assert hasattr(getattr(torch.ops, kernel.__name__), "linear_policy")


def test_the_kernel_needs_no_install(folder):
    program = f"""
import sys
sys.modules["gspo_kernels"] = None  # an import of it fails
import torch
from pathlib import Path
from kernels import get_local_kernel
gk = get_local_kernel(Path({str(folder)!r}), backend="cpu")
logits = torch.zeros(1, 2, 5, requires_grad=True)
out = gk.fused_policy_loss(
    logits, torch.tensor([[1, 2]]), old_logprobs=torch.zeros(1, 2), advantages=torch.ones(1),
    objective=gk.GRPO(),
)
out.loss.backward()
print(tuple(logits.grad.shape), out.logprobs[0, 0].exp().item())
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    shape, probability = result.stdout.rsplit(" ", 1)
    assert shape == "(1, 2, 5)" and float(probability) == pytest.approx(0.2)


@kernels.use_kernel_forward_from_hub("OutputLogprobs")
class OutputLogprobs(nn.Linear):
    """An output layer as a model may have it: it returns log-probs of labels."""

    def forward(self, hidden, labels, temperature=1.0):
        logits = super().forward(hidden) / temperature
        return logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


@kernels.use_kernel_forward_from_hub("Logprobs")
class Logprobs(nn.Module):
    def forward(self, logits, labels, temperature=1.0):
        return (logits / temperature).log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize(("bias", "compiled"), [(False, False), (True, True)])
def test_layers_replace_those_of_a_model(folder, bias, compiled):
    torch.manual_seed(shifted_seed(2))
    first, second = OutputLogprobs(H, V, bias=bias), Logprobs()
    hidden, labels = torch.randn(2, 5, H), torch.randint(V, (2, 5))
    logits = torch.randn(2, 5, V)
    want = first(hidden, labels, 0.7), second(logits, labels, 0.7)
    mapping = {
        name: {"cpu": kernels.LocalLayerRepository(folder, layer_name=layer)}
        for name, layer in (("OutputLogprobs", "LinearTokenLogprobs"), ("Logprobs", "TokenLogprobs"))
    }
    mode = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE if compiled else kernels.Mode.TRAINING
    both = nn.ModuleList([first, second])
    with kernels.use_kernel_mapping(mapping):
        both = kernels.kernelize(both, mode=mode, device="cpu")

    def run(hidden, logits):
        return both[0](hidden, labels, 0.7), both[1](logits, labels, 0.7)

    got = (torch.compile(run, backend="aot_eager", fullgraph=True) if compiled else run)(hidden, logits)
    torch.testing.assert_close(got, want)
    assert type(got[0].grad_fn).__name__ != type(want[0].grad_fn).__name__
    got[0].sum().backward()
    assert first.weight.grad.any() and (not bias or first.bias.grad.any())


def test_a_folder_of_others_is_kept(folder, tmp_path):
    (folder / "build" / "left_over").touch()
    hub.build(folder)
    (tmp_path / "mine").touch()
    with pytest.raises(FileExistsError):
        hub.build(tmp_path)
    assert (tmp_path / "mine").exists() and not (folder / "build" / "left_over").exists()
