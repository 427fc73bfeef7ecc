"""Random calls of every entry are right, and a fault among them is found."""

import pytest

import gspo_kernels as gk
from tests.draws import shifted_seed
from tests.fuzz import LARGEST, attempt

CALLS = {"reference": 16, "cpp": 60, "triton": 12}


def test_random_calls(backend):
    served = [attempt(shifted_seed(i), backend, LARGEST[backend]) for i in range(CALLS[backend])]
    assert any(served)


def test_a_fault_is_found(monkeypatch):
    sound = gk.fused_policy_loss

    def faulty(*arguments, **options):
        output = sound(*arguments, **options)
        return output._replace(loss=output.loss * 1.001)

    monkeypatch.setattr(gk, "fused_policy_loss", faulty)
    with pytest.raises(AssertionError, match=r"python -m tests\.fuzz --seconds 0 --backend reference --seed"):
        for seed in range(60):
            attempt(seed, "reference", 61)
