"""Versions from plain PyTorch to the fused loss: all but the first are one loss; each shows its change."""

import re

import torch

from examples import five_minutes


def test_it_runs_and_says_what_changes(capsys):
    small = ["--prompts", "2", "--tokens", "16", "--width", "32", "--vocabulary", "500", "--rounds", "1"]
    five_minutes.main([*small, "--dtype", "bfloat16", "--device", "cpu"])
    said = capsys.readouterr().out
    assert re.findall(r"^## (\w+)", said, re.MULTILINE) == [
        version.__name__ for version in five_minutes.VERSIONS
    ]
    assert len(re.findall(r"loss \S+   [\d,]+ ms, [\d.]+ of the first", said)) == len(five_minutes.VERSIONS)
    for new in (
        '+     skip_inactive="all"',
        "+ return gk.fused_linear_policy_loss(",
        "-     logits,",
        "+     head.weight,",
    ):
        assert new in said


def test_the_versions_are_one_loss(capsys):
    sizes = {"prompts": 4, "completions": 4, "tokens": 24, "width": 48, "vocabulary": 700}
    options = type("Options", (), {**sizes, "device": "cpu", "dtype": "float32"})
    batch, head = five_minutes.make_problem(options)
    assert (batch.advantages == 0).sum() == 8 and (batch.labels == -100).any()
    results = []
    for version in five_minutes.VERSIONS[1:]:
        loss = five_minutes.step(version, batch, head)
        results.append((loss, batch.hidden.grad, head.weight.grad))
    for result in results[1:]:
        for got, want in zip(result, results[0], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-7)
    assert results[0][1].any()
    other = five_minutes.step(five_minutes.plain_grpo, batch, head)
    assert abs(other - results[0][0]) > 1e-6
