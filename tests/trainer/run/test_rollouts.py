"""Rollouts that a run keeps: what is in them, and that both formats say the same."""

import json

import pytest
from pyarrow import parquet

from gspo_kernels.trainer.input_errors import ConfigError
from gspo_kernels.trainer.run import metrics as kept_metrics
from gspo_kernels.trainer.run.metrics import read_metrics, write_rollout
from tests.trainer.conftest import small_config
from tests.trainer.test_trainer import make_trainer


def some(prompts, completions, completion_ids, **columns):
    return [None if index % 2 else float(len(ids)) for index, ids in enumerate(completion_ids)]


def test_rollouts_are_kept_with_their_rewards_and_logprobs(tmp_path, tokenizer, rows):
    veripo = {"grpo_steps": 2, "dpo_steps": 1}
    config = small_config(tmp_path, save_rollouts=True, update={"steps": 3}, veripo=veripo)
    make_trainer(tokenizer, rows, some, config).train()
    files = sorted((tmp_path / "rollouts").iterdir())
    assert [path.name for path in files] == ["step_000001.jsonl", "step_000002.jsonl"], "DPO samples nothing"
    for path, metrics in zip(files, read_metrics(tmp_path / "metrics.jsonl")[1:], strict=False):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(records) == 12
        assert metrics["reward/mean"] == pytest.approx(sum(r["reward"] for r in records[::2]) / 6)
        for index, record in enumerate(records):
            assert record["prompt"] == rows[record["row"]]["prompt"]
            assert (
                record["rewards"]["some"]
                == record["reward"]
                == (None if index % 2 else len(record["token_ids"]))
            )
            assert len(record["logprobs"]) == len(record["token_ids"]) and max(record["logprobs"]) <= 0
            assert record["completion"] == tokenizer.decode(record["token_ids"], skip_special_tokens=True)
    make_trainer(tokenizer, rows, some, small_config(tmp_path, update={"steps": 1})).train(overwrite=True)
    assert not (tmp_path / "rollouts").exists()


def test_both_formats_hold_the_same(tmp_path, tokenizer, rows, reward):
    kept = {}
    for form in ("jsonl", "parquet"):
        options = {"save_rollouts": True, "rollouts_format": form, "update": {"steps": 1}}
        make_trainer(tokenizer, rows, [some, reward], small_config(tmp_path / form, **options)).train()
        (kept[form],) = (tmp_path / form / "rollouts").iterdir()
    lines = [json.loads(line) for line in kept["jsonl"].read_text().splitlines()]
    assert kept["parquet"].name == "step_000001.parquet"
    assert parquet.read_table(kept["parquet"]).to_pylist() == lines
    assert {type(line["reward"]) for line in lines} == {float}
    assert {type(line["rewards"]["some"]) for line in lines} == {float, type(None)}


def test_a_step_without_any_reward_has_the_columns_of_the_others(tmp_path):
    record = {"row": 3, "prompt": "a", "completion": "", "token_ids": [7], "logprobs": [-0.5]}
    record["sampling_mask"] = [[7, 9]]
    with_reward = record | {"reward": 1.0, "rewards": {"a": 1.0, "b": None}}
    without = record | {
        "reward": None,
        "rewards": {"a": None, "b": None},
        "logprobs": None,
        "sampling_mask": None,
    }
    for step, records in enumerate([[with_reward, without], [without]]):
        write_rollout(tmp_path / "kept", step, records, "parquet")
    first, second = (parquet.read_table(tmp_path / "kept" / f"step_00000{step}.parquet") for step in (0, 1))
    assert first.schema == second.schema
    assert second.to_pylist() == [without]


def test_a_format_that_cannot_be_written_is_refused_before_any_work(
    tmp_path, tokenizer, rows, reward, monkeypatch
):
    monkeypatch.setattr(kept_metrics, "find_spec", lambda name: None)
    config = small_config(tmp_path / "run", save_rollouts=True, rollouts_format="parquet")
    with pytest.raises(ConfigError, match="rollouts_format: parquet needs pyarrow"):
        make_trainer(tokenizer, rows, reward, config)
    assert not (tmp_path / "run").exists()
