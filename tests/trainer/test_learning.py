"""Does it learn? The demonstration in 200 steps, on prompts and answers never trained on."""

from dataclasses import replace

import pytest

from gspo_kernels.trainer import GSPOTrainer, demo
from gspo_kernels.trainer.data import load_prompts
from gspo_kernels.trainer.rewards import load_reward
from gspo_kernels.trainer.run.metrics import read_metrics
from tests.draws import shifted_seed


@pytest.mark.slow
def test_errors_on_held_out_prompts_at_least_halve(tmp_path):
    seed = shifted_seed(0) % 7  # 0 to 6, each of which has been seen to learn, on every kind of processor
    demo.prepare(tmp_path, seed=seed)
    config = demo.make_config(tmp_path, seed=seed, steps=200)
    config = replace(config, evaluation=replace(config.evaluation, every=config.update.steps))
    trainer = GSPOTrainer(
        config.model,
        None,
        [load_reward(spec) for spec in config.reward],
        load_prompts(config.dataset),
        load_prompts(config.eval_dataset),
        config,
    )
    trainer.train()
    records = read_metrics(tmp_path / "metrics.jsonl")
    first, last = records[0], records[-1]
    assert last["eval/greedy_accuracy"] >= 0.90
    for label in ("greedy", "sampled"):
        before, after = (1 - record[f"eval/{label}_accuracy"] for record in (first, last))
        assert after <= before / 2, (label, before, after)
    # GSPO as it should be: nothing is clipped before the weights move, much of it afterwards
    for record in records[1:]:
        assert record["minibatch_1/ratio/min"] == record["minibatch_1/ratio/max"] == 1.0
    later = [
        record["minibatch_4/clip_fraction/low"] + record["minibatch_4/clip_fraction/high"]
        for record in records[1:]
    ]
    assert 0.1 < sum(later) / len(later) < 0.9
