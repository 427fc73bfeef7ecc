"""A short run of the fuzzer."""

import pytest

import gspo_kernels as gk
from tests.draws import shifted_seed
from tests.fuzz import main

SECONDS = {"reference": 1, "cpp": 3, "triton": 2}


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
