"""A short run of the fuzzer, and the faults that random calls found, each by itself."""

import pytest
import torch

import gspo_kernels as gk
from tests.cases import device_of, generator
from tests.draws import shifted_seed
from tests.fuzz import main

SECONDS = {"reference": 5, "cpp": 10, "triton": 5}


@pytest.mark.slow
def test_random_calls(backend, capsys):
    found = main(["--backend", backend, "--seconds", str(SECONDS[backend]), "--seed", str(shifted_seed(0))])
    assert found == 0, capsys.readouterr().out


def test_the_fuzzer_sees_a_fault_and_prints_the_line_that_repeats_it(monkeypatch, capsys):
    sound = gk.fused_policy_loss

    def faulty(*arguments, **options):
        output = sound(*arguments, **options)
        return output._replace(loss=output.loss * 1.001)

    monkeypatch.setattr(gk, "fused_policy_loss", faulty)
    assert main(["--backend", "reference", "--seconds", "60"]) == 1
    *_, line = capsys.readouterr().out.splitlines()
    assert line.startswith("python -m tests.fuzz --backend reference --seed 0 --call ")
    assert main(line.split()[3:]) == 1
    monkeypatch.undo()
    assert main([*line.split()[3:], "--seconds", "0"]) == 0


@pytest.mark.parametrize("scale", [1.0, 65536.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_no_gradient_is_lost_before_the_loss_scale_is_known(dtype, scale, backend):
    """On-policy the coefficients are known in the forward, but not what they will be multiplied by."""
    device, vocabulary = device_of(backend), 700 if backend == "triton" else 4000
    rng = generator(0)
    logits = (2 * torch.randn(4, 6, vocabulary, generator=rng)).to(dtype)
    labels = torch.randint(0, vocabulary, (4, 6), generator=rng)
    advantages = torch.randn(4, generator=rng)

    def gradient(values, backend):
        leaf = values.requires_grad_()
        loss = gk.fused_policy_loss(
            leaf, labels.to(leaf.device), None, advantages.to(leaf.device), backend=backend
        ).loss
        return torch.autograd.grad(loss * scale, leaf)[0].cpu().double()

    got, want = gradient(logits.to(device), backend), gradient(logits.double(), "reference")
    info = torch.finfo(dtype)
    subnormal = info.smallest_normal * info.eps
    representable = want.abs() > subnormal
    assert representable.any() and (got[representable] != 0).all()
    assert ((got - want).abs() <= info.eps * want.abs() + subnormal).all()
