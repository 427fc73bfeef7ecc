"""Warnings of whole runs: a mismatch between sampling and training is told from rounding."""

from dataclasses import replace

import pytest

from gspo_kernels.trainer import GSPOTrainer
from gspo_kernels.trainer.run.health import MISMATCH, PATIENCE
from tests.trainer.conftest import make_accelerator, small_config, tiny_qwen3


def run(output, tokenizer, rows, reward, engine=None, precision="fp32"):
    update = {"steps": PATIENCE, "precision": precision}
    config = small_config(output, update=update, evaluation={"every": 100}, checkpoint={"every": 100})
    model, accelerator = tiny_qwen3(tokenizer), make_accelerator(precision)
    trainer = GSPOTrainer(model, tokenizer, reward, rows, None, config, accelerator=accelerator)
    trainer.engine = trainer.recipe.sampler.engine = engine(trainer.engine) if engine else trainer.engine
    records = []
    for trainer.step in range(1, PATIENCE + 1):
        experience, metrics = trainer.rollout()
        records.append(metrics | trainer.updater.update(experience, trainer.step))
    return [warning for record in records for warning in trainer.run.health.check(record)], records


class OtherTemperature:
    """An engine that does not sample as it was told."""

    def __init__(self, engine):
        self.engine = engine

    def generate(self, prompts, sampling, *, seeds=None):
        return self.engine.generate(prompts, replace(sampling, temperature=0.1), seeds=seeds)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_mismatch_is_told_from_rounding(tmp_path, tokenizer, rows, reward, precision):
    warnings, records = run(tmp_path, tokenizer, rows, reward, precision=precision)
    assert not any("disagree" in warning for warning in warnings)
    # the bound is far from what rounding makes
    assert 0 < max(record["mismatch/mean"] for record in records) < MISMATCH[precision] / 10
    warnings, _ = run(tmp_path, tokenizer, rows, reward, OtherTemperature, precision)
    assert sum("sampling and training disagree" in warning for warning in warnings) == 1
