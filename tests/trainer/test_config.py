"""Configuration: what is read, what is refused, and that the message says which key."""

import dataclasses
import typing

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.trainer.config import TrainConfig
from gspo_kernels.trainer.input_errors import ConfigError
from gspo_kernels.trainer.run.command_line import parse_train_arguments
from gspo_kernels.trainer.run.config_file import (
    from_mapping,
    load_config,
    options,
    require_same_run,
    save_config,
    to_mapping,
)

WRONG = [
    ({"rollot": {}}, ["unknown key rollot", "rollout"]),
    ({"group_size": 4}, ["unknown key group_size", "did you mean", "rollout.group_size"]),
    ({"rollout": {"gruop_size": 4}}, ["unknown key rollout.gruop_size", "rollout.group_size"]),
    ({"update": {"lr": 1e-4}}, ["unknown key update.lr"]),
    ({"rollout": [1, 2]}, ["rollout", "mapping"]),
    ({"rollout": 0}, ["rollout", "mapping"]),
    ({"rollout": {"group_size": 1}}, ["rollout.group_size", "at least 2", "1"]),
    ({"rollout": {"group_size": 2.5}}, ["rollout.group_size", "valid integer", "2.5"]),
    ({"rollout": {"group_size": True}}, ["rollout.group_size", "valid integer", "True"]),
    ({"rollout": {"group_size": "many"}}, ["rollout.group_size", "'many'"]),
    ({"rollout": {"group_size": None}}, ["rollout.group_size", "None"]),
    ({"rollout": {"prompts_per_rollout": 0}}, ["rollout.prompts_per_rollout"]),
    ({"rollout": {"max_new_tokens": 0}}, ["rollout.max_new_tokens"]),
    ({"rollout": {"temperature": 0.0}}, ["rollout.temperature"]),
    ({"rollout": {"temperature": "nan"}}, ["rollout.temperature"]),
    ({"rollout": {"top_p": 1.5}}, ["rollout.top_p"]),
    ({"rollout": {"top_k": -1}}, ["rollout.top_k"]),
    ({"rollout": {"truncated": "drop"}}, ["rollout.truncated", "'keep' or 'mask'"]),
    ({"update": {"steps": 0}}, ["update.steps"]),
    ({"update": {"minibatches": 0}}, ["update.minibatches"]),
    ({"update": {"epochs": 0}}, ["update.epochs"]),
    ({"update": {"micro_batch_tokens": 0}}, ["update.micro_batch_tokens"]),
    ({"update": {"layout": "ragged"}}, ["update.layout", "'packed', 'padded' or 'shared_prefix'"]),
    ({"update": {"precision": "fp16"}}, ["update.precision", "bf16"]),
    ({"update": {"entropy_coef": "nan"}}, ["update.entropy_coef"]),
    (
        {"update": {"gradient_checkpointing": "perhaps"}},
        ["update.gradient_checkpointing", "valid boolean", "'perhaps'"],
    ),
    ({"kl": {"beta": -0.1}}, ["kl.beta"]),
    ({"kl": {"estimator": "k4"}}, ["kl.estimator"]),
    ({"off_policy": {"level": "word"}}, ["off_policy.level"]),
    ({"off_policy": {"level": "token", "mode": "mask"}}, ["off_policy", "at least one bound"]),
    ({"off_policy": {"level": "token", "mode": "drop"}}, ["off_policy", "mode", "'truncate'"]),
    ({"off_policy": {"level": "token", "low": 3, "high": 2}}, ["off_policy", "low"]),
    ({"lora": {"rank": -1}}, ["lora.rank"]),
    ({"lora": {"alpha": 0}}, ["lora.alpha"]),
    ({"objective": {"name": "ESPO"}}, ["objective.name", "ESPO"]),
    (
        {"update": {"minibatches": 9}, "rollout": {"prompts_per_rollout": 1, "group_size": 8}},
        ["update.minibatches", "at most the 8 completions"],
    ),
    (
        {"update": {"minibatches": 9}, "rollout": {"prompts_per_rollout": 8}, "objective": {"name": "DPO"}},
        ["update.minibatches", "at most the 8 prompts"],
    ),
    ({"update": {"learning_rate": -1}}, ["update.learning_rate"]),
    ({"update": {"learning_rate": "fast"}}, ["update.learning_rate", "valid number", "'fast'"]),
    ({"update": {"adam_beta2": 1.0}}, ["update.adam_beta2"]),
    ({"update": {"max_grad_norm": 0}}, ["update.max_grad_norm"]),
    ({"objective": {"name": "GPSO"}}, ["objective.name", "GPSO", "did you mean GSPO"]),
    ({"objective": {"name": "Linear"}}, ["objective.name", "Linear"]),
    ({"objective": {"clip_lo": 0.1}}, ["objective.clip_lo", "did you mean clip_low"]),
    ({"objective": {"clip_low": -0.1}}, ["objective GSPO", "clip_low"]),
    ({"objective": {"clip_low": "low"}}, ["objective.clip_low", "valid number", "'low'"]),
    ({"evaluation": {"every": 0}}, ["evaluation.every"]),
    ({"checkpoint": {"keep": 0}}, ["checkpoint.keep"]),
    ({"advantage_scale": "std"}, ["advantage_scale", "'group'"]),
    ({"output": 5}, ["output", "valid string", "5"]),
    ({"seed": "none"}, ["seed", "valid integer", "'none'"]),
    ({"reward_weights": True}, ["reward_weights", "True"]),
    ({"reward": [1]}, ["reward", "valid string"]),
    ({"reward": ["a:b"], "reward_weights": [1.0, 2.0]}, ["reward_weights", "1 rewards"]),
    ({"reward_timeout": 0}, ["reward_timeout", "above 0"]),
    ({"advantages": "grpo"}, ["advantages", "group_normalized", "gdpo"]),
    ({"advantages": "gdpo", "advantage_scale": "batch"}, ["advantage_scale", "gdpo"]),
    ({"data": {"too_long": "cut"}}, ["data.too_long", "'error' or 'drop'"]),
    ({"show_samples": -1}, ["show_samples"]),
    ({"threads": 0}, ["threads"]),
    ({"log_every": 0}, ["log_every"]),
]


@pytest.mark.parametrize(("values", "words"), WRONG, ids=[str(values)[:60] for values, _ in WRONG])
def test_wrong_values_are_refused_by_name(values, words):
    with pytest.raises(ConfigError) as caught:
        from_mapping(values, TrainConfig)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("update", "name", "warns"),
    [({"minibatches": 1}, "GSPO", True), ({"minibatches": 1, "epochs": 2}, "GSPO", False),
     ({"minibatches": 2}, "GSPO", False), ({"minibatches": 1}, "GRPO", False)],
)  # fmt: skip
def test_a_ratio_that_never_moves_is_warned_about(update, name, warns):
    config = from_mapping({"update": update, "objective": {"name": name}}, TrainConfig)
    assert isinstance(config.objective.build(), getattr(gk, name))
    assert [("nothing is ever clipped" in warning) for warning in config.warnings()] == [True] * warns


def test_yaml_and_overrides(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: m\nupdate:\n  learning_rate: 3e-5\n  steps: 7\nobjective: {clip_low: 2e-4}\nrollout:\n"
    )
    config = load_config(path, {"update.steps": "9", "rollout.top_p": "0.9", "reward": ["a:f", "b:g"]})
    # YAML reads 3e-5 as text
    assert config.update.learning_rate == 3e-5
    assert config.update.steps == 9
    assert config.rollout.top_p == 0.9
    assert config.reward == ("a:f", "b:g")
    assert config.objective.build() == gk.GSPO(clip_low=2e-4)


def test_text_becomes_what_an_option_is():
    """YAML reads some numbers as text, and a command line has nothing else."""
    values = {
        "reward": "a.py:f",
        "reward_weights": "0.5",
        "reward_timeout": "NONE",
        "eval_dataset": "none",
        "output": "none",
        "off_policy": {"low": None, "high": "1e1"},
        "update": {"gradient_checkpointing": "true", "steps": "7"},
        "objective": {"name": "DHPO", "mix": "0.25", "aggregation_constant": "none"},
    }
    config = from_mapping(values, TrainConfig)
    assert (config.reward, config.reward_weights) == (("a.py:f",), (0.5,))
    assert (config.reward_timeout, config.eval_dataset, config.output) == (None, None, "none")
    assert (config.off_policy.low, config.off_policy.high) == (None, 10.0)
    assert (config.update.gradient_checkpointing, config.update.steps) == (True, 7)
    assert config.objective.build() == gk.objectives.DHPO(mix=0.25)
    values["objective"]["mix"] = "entropy"
    assert from_mapping(values, TrainConfig).objective.build() == gk.objectives.DHPO(mix="entropy")


def test_toml_says_the_same_as_yaml(tmp_path):
    (tmp_path / "run.yaml").write_text("model: m\nreward: ['a:f']\nupdate: {steps: 7, learning_rate: 3e-5}\n")
    (tmp_path / "run.toml").write_text(
        'model = "m"\nreward = ["a:f"]\n[update]\nsteps = 7\nlearning_rate = 3e-5\n'
    )
    assert load_config(tmp_path / "run.toml") == load_config(tmp_path / "run.yaml")
    (tmp_path / "run.toml").write_text("[update\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(tmp_path / "run.toml")
    (tmp_path / "run.toml").write_text("[update]\nlr = 1\n")
    with pytest.raises(ConfigError, match=r"unknown key update\.lr"):
        load_config(tmp_path / "run.toml")


def test_mappings_are_given_as_json(tmp_path):
    chosen = parse_train_arguments(["--data.template_options", '{"enable_thinking": false}'])
    assert chosen.config.data.template_options == {"enable_thinking": False}
    save_config(chosen.config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == chosen.config
    for wrong in ("{", "[1]"):
        with pytest.raises(ConfigError, match=r"data\.template_options"):
            parse_train_arguments(["--data.template_options", wrong])


def test_saved_configuration_reads_back_equal(tmp_path):
    config = from_mapping(
        {
            "model": "m",
            "reward": ["a:f"],
            "reward_weights": [2],
            "objective": {"name": "GRPO", "clip_low": 0.1},
        },
        TrainConfig,
    )
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config
    assert from_mapping(to_mapping(TrainConfig()), TrainConfig) == TrainConfig()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a: [", "not valid YAML"),
        (b"model: \xff", "not valid YAML"),
        (b"- a\n", "mapping"),
        (b"rollout: 3\n", "rollout must be a mapping"),
        (b"rollout: [3]\n", "rollout must be a mapping"),
        (None, "there is no configuration file"),
    ],
)
def test_unreadable_files(tmp_path, content, words):
    path = tmp_path / "run.yaml"
    if content is not None:
        path.write_bytes(content)
    for overrides in ({}, {"rollout.group_size": "4", "model": "m"}):
        with pytest.raises(ConfigError, match=words):
            load_config(path, overrides)


def test_resuming_with_other_settings_is_refused():
    started = TrainConfig()
    longer = from_mapping({"update": {"steps": 999}, "log_every": 3, "evaluation": {"every": 7}}, TrainConfig)
    require_same_run(started, longer)
    other = from_mapping({"update": {"learning_rate": 0.5}}, TrainConfig)
    with pytest.raises(ConfigError, match=r"update\.learning_rate: 1e-06 -> 0\.5"):
        require_same_run(started, other)


def test_command_line(tmp_path):
    line = ["--model", "m", "--dataset=d.jsonl", "--reward", "a.py:f", "--reward", "b.py:g"]
    line += ["--rollout.group-size", "4", "--update.learning_rate=2e-4", "--objective.clip_high", "5e-4"]
    chosen = parse_train_arguments([*line, "--overwrite"])
    assert (chosen.resume, chosen.overwrite) == (False, True)
    config = chosen.config
    assert (config.model, config.dataset, config.reward) == ("m", "d.jsonl", ("a.py:f", "b.py:g"))
    assert (config.rollout.group_size, config.update.learning_rate) == (4, 2e-4)
    assert config.objective.build() == gk.GSPO(clip_high=5e-4)


def test_the_command_line_comes_on_top_of_the_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("reward: ['a.py:f', 'b.py:g']\ntrackers: [wandb]\nrollout: {group_size: 4, top_k: 3}\n")
    line = ["--reward", "c.py:h", "--rollout.group_size", "2", "--off_policy.high=none"]
    config = parse_train_arguments([str(path), *line]).config
    assert (config.reward, config.trackers) == (("c.py:h",), ("wandb",))
    assert (config.rollout.group_size, config.rollout.top_k, config.off_policy.high) == (2, 3, None)


def test_every_default_can_be_given_as_the_help_shows_it():
    line = []
    for key, _, default, kind in options():
        if not key.startswith("objective.") and (default is not None or type(None) in typing.get_args(kind)):
            line += [] if default == () else [f"--{key}={default}"]
    assert parse_train_arguments(line).config == TrainConfig()


def test_resume_takes_the_configuration_of_the_run(tmp_path):
    save_config(from_mapping({"model": "m", "seed": 5}, TrainConfig), tmp_path / "config.yaml")
    chosen = parse_train_arguments(["--resume", "--output", str(tmp_path)])
    assert chosen.resume
    assert (chosen.config.seed, chosen.config.output) == (5, str(tmp_path))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["--rolout.group_size", "4"], ["--rolout.group_size", "rollout.group_size"]),
        (["--learning_rate", "1"], ["--learning_rate", "update.learning_rate"]),
        (["--update.steps"], ["--update.steps", "Missing value"]),
        (["--resume", "--overwrite"], ["--resume", "--overwrite", "not allowed together"]),
        (["a.yaml", "b.yaml"], ["b.yaml"]),
    ],
)
def test_wrong_command_lines(capsys, line, words):
    with pytest.raises(SystemExit) as caught:
        parse_train_arguments(line)
    assert caught.value.code == 2
    message = capsys.readouterr().err
    for word in words:
        assert word in message


@pytest.mark.parametrize("columns", [80, 120])
def test_help_documents_every_option(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as caught:
        parse_train_arguments(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= columns
    words = " ".join(text.replace("│", " ").split())
    for key, help, default, _ in options():
        shown = f" (default: {default})" if default not in (None, "", ()) else ""
        assert f"--{key} " in words
        assert " ".join(f"{help}{shown}".split()) in words, key
    for section in dataclasses.fields(TrainConfig):
        if isinstance(section.default_factory, type):
            assert f"{section.name} options" in words
            assert " ".join(section.default_factory.__doc__.split()) in words


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.25, 1.0, 2.0, 2.0]),
        ({"high": 8.0}, [0.25, 1.0, 4.0, 8.0]),
        ({"low": 0.5}, [0.5, 1.0, 4.0, 16.0]),
        ({"mode": "icepop"}, [0.0, 1.0, 4.0, 0.0]),
        ({"mode": "icepop", "high": 2.0}, [0.0, 1.0, 0.0, 0.0]),
        ({"mode": "mask", "high": 2.0}, [0.25, 1.0, 0.0, 0.0]),
    ],
)
def test_every_mode_of_off_policy_has_its_own_bounds(options, expected):
    config = from_mapping({"off_policy": {"level": "token", **options}}, TrainConfig).off_policy
    ours, theirs = torch.tensor([0.25, 1.0, 4.0, 16.0]).log(), torch.zeros(4)
    weights = config.weights(ours, theirs, torch.ones(4, dtype=torch.bool), torch.tensor([0, 4]))
    torch.testing.assert_close(weights, torch.tensor(expected))
