"""Configuration: how options are read, errors before torch is imported, and messages that name the key."""

import re
import subprocess
import sys

import pytest

import gspo_kernels as gk
from gspo_kernels.cli import parse_arguments
from gspo_kernels.trainer.config import (
    InputError,
    TrainConfig,
    changed_settings,
    flat,
    from_mapping,
    load_config,
)
from gspo_kernels.trainer.update import check_config, make_objective

MINIBATCHES = {"update": {"minibatches": 9}, "rollout": {"prompts_per_rollout": 1, "group_size": 8}}
KEPT = {"top_p": 0.9, "keep_sampling_mask": True}
CENTRED = {"name": "CISPO", "centering": 20}
WRONG = [
    ({"group_size": 4}, ["unknown key group_size", "did you mean", "rollout.group_size"]),
    ({"rolout": {"group_size": 4}}, ["unknown key rolout", "did you mean rollout"]),
    ({"update": {"lr": 1e-4}}, ["unknown key update.lr", "update.learning_rate"]),
    ({"rollout": {"group_size": 1}}, ["rollout.group_size", "greater than or equal to 2", "1"]),
    ({"rollout": {"group_size": True}}, ["rollout.group_size must be a number, got True"]),
    ({"rollout": {"temperature": 0.0}}, ["rollout.temperature", "greater than 0"]),
    ({"rollout": {"temperature": "nan"}}, ["rollout.temperature", "finite"]),
    ({"rollout": {"top_p": 1.5}}, ["rollout.top_p", "less than or equal to 1"]),
    ({"rollout": {"keep_sampling_mask": True}}, ["rollout.keep_sampling_mask", "top_p"]),
    ({"update": {"gradient_checkpointing": "perhaps"}}, ["update.gradient_checkpointing", "'perhaps'"]),
    ({"update": {"learning_rate": "fast"}}, ["update.learning_rate", "a valid number", "'fast'"]),
    ({"engine": {"url": "localhost:8000"}}, ["engine.url", "http://localhost:8000"]),
    ({"engine": {"url": "http://localhost:8000/v1"}}, ["engine.url", "without a path"]),
    ({"engine": {"weights": "shared"}}, ["engine.weights", "engine.url"]),
    ({"engine": {"url": "local"}, "rollout": KEPT}, ["engine.url must be null with rollout.keep_sampling"]),
    ({"off_policy": {"level": "token", "mode": "mask"}}, ["off_policy", "at least one bound"]),
    ({"off_policy": {"level": "token", "low": 3, "high": 2}}, ["off_policy", "low"]),
    ({"off_policy": {"mode": "typo"}}, ["off_policy.mode", "off_policy.level", "'typo'"]),
    ({"off_policy": {"low": 0.5}}, ["off_policy.low", "off_policy.level"]),
    ({"off_policy": {"high": 0.5}}, ["off_policy.high", "off_policy.level"]),
    ({"lora": {"alpha": 8}}, ["lora.alpha", "lora.rank", "got 8"]),
    ({"lora": {"target_modules": "q_proj"}}, ["lora.target_modules", "lora.rank"]),
    ({"engine": {"url": "http://localhost:8000", "memory": 0.5}}, ["engine.memory", "engine.url local"]),
    *(
        ({"objective": {"name": name}, "advantages": "gdpo"}, ["advantages", f"{name}, which takes {kind}"])
        for name, kind in (("DPO", "levels"), ("REBEL", "rewards"))
    ),
    (MINIBATCHES, ["update.minibatches", "at most the 8 completions"]),
    (MINIBATCHES | {"objective": {"name": "DPO"}}, ["update.minibatches", "at most the 1 prompts"]),
    ({"objective": {"centering": 20}}, ["objective.centering: GSPO can't be centered", "the sequence"]),
    ({"objective": CENTRED, "off_policy": {"level": "token"}}, ["off_policy.level must be none"]),
    ({"objective": CENTRED, "update": {"entropy_coef": 0.1}}, ["update.entropy_coef must be 0", "got 0.1"]),
    ({"objective": CENTRED, "rollout": {"top_k": 9}}, ["rollout.keep_sampling_mask must be true"]),
    ({"objective": {"name": "gspo"}}, ["objective.name", "did you mean GSPO"]),
    ({"objective": {"name": "Linear"}}, ["objective.name", "Linear"]),
    ({"objective": {"name": "TLGRPO"}}, ["TLGRPO", "examples.recipes.turns"]),
    ({"objective": {"clip_lo": 0.1}}, ["objective.clip_lo", "did you mean clip_low"]),
    ({"objective": {"clip_low": -0.1}}, ["objective", "clip_low"]),
    ({"objective": {"clip_low": "low"}}, ["objective.clip_low", "valid number", "'low'"]),
]


@pytest.mark.parametrize(("values", "words"), WRONG, ids=str)
def test_wrong_values_are_refused_by_name(values, words):
    with pytest.raises(InputError) as caught:
        check_config(from_mapping(values))
    assert all(word in str(caught.value) for word in words), caught.value


def test_saved_configs_may_have_unused_options():
    """Those of a subclass with other defaults, for example, which `gspo eval` reads as a plain one."""
    config = from_mapping({"off_policy": {"mode": "mask"}, "lora": {"alpha": 16}})
    with pytest.raises(InputError, match=r"off_policy\.mode must be 'truncate' without off_policy\.level"):
        check_config(config)


def test_wrong_keys_are_found_without_torch(tmp_path):
    (tmp_path / "run.yaml").write_text("rollout: {gruop_size: 4}\n")
    code = (
        "import sys, json\nfrom gspo_kernels.cli import main\nfor line in json.loads(sys.argv[1]):\n"
        "    print(main(['train', *line]), 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    data = ["--dataset", str(tmp_path / "none.jsonl"), "--reward", "gspo_kernels.rewards:exact_match"]
    lines = {
        "unknown key rollout.gruop_size": [str(tmp_path / "run.yaml")],
        "unknown option --rolout.group_size (did you mean": ["--rolout.group_size", "4"],
        "there is no configuration file no_such_file.yaml": ["no_such_file.yaml"],
        "there is no dataset file": ["--model", str(tmp_path), *data],
        "model 'nodir' cannot be loaded": ["--model", "nodir", *data],
    }
    command = [sys.executable, "-c", code, str([*lines.values()]).replace("'", '"')]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["1", "False", "False"] * len(lines)
    assert all(words in run.stderr for words in lines) and "Traceback" not in run.stderr


def test_saved_configuration_reads_back_equal():
    objective = {"name": "GRPO", "clip_low": 0.1}
    values = {"model": "m", "output": "runs", "reward": ["a:f"], "reward_weights": 2, "objective": objective}
    for each in (from_mapping(values), TrainConfig(output="runs")):
        assert from_mapping(each.model_dump(mode="json")) == each


@pytest.mark.parametrize("decay", ["none", "linear", "cosine"])
def test_a_run_may_become_longer(decay):
    before, after = (TrainConfig(update={"steps": n, "learning_rate_decay": decay}) for n in (2, 4))
    expected = [] if decay == "none" else [f"update.steps: 2 -> 4, where the {decay} decay ends"]
    assert changed_settings(before, after) == expected
    other = TrainConfig(update={"steps": 4, "learning_rate_decay": "linear" if decay == "none" else "none"})
    assert any("learning_rate_decay" in each for each in changed_settings(before, other))


@pytest.mark.parametrize("free", [True, False])
def test_some_settings_may_change_on_resume(free):
    matter = "seed=1 data.split=test rollout.temperature=0.5 kl.beta=0.1 lora.rank=2 update.weight_decay=0.1"
    others = (
        "evaluation.every=3 checkpoint.keep=1 trackers=wandb update.micro_batch_tokens=5 data.eval_split=a"
    )
    for word in (others if free else matter).split():
        config, _ = parse_arguments([f"--{word}"])
        assert [text.split(":")[0] for text in changed_settings(TrainConfig(), config)] == (
            [] if free else [word.split("=")[0]]
        )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a: [", "not valid YAML"),
        (b"model: \xff", "not valid YAML"),
        (b"- a\n", "mapping"),
        (b"rollout: 3\n", "rollout must be a valid dictionary"),
    ],
)
def test_unreadable_files(tmp_path, content, words):
    (tmp_path / "run.yaml").write_bytes(content)
    with pytest.raises(InputError, match=words):
        load_config(tmp_path / "run.yaml")


FILE = """
reward: ["a.py:f", "b.py:g"]
reward-weights: 3
trackers: [wandb]
seed: 5
rollout: {group_size: 4, top-k: 3, top_p: null}
update: {learning_rate: 3e-5}
data: {split: test, template_options: {a-b: 1}}
objective: {name: GSPO, clip-low: 0.1, centering: 0}
"""


def test_the_command_line_replaces_the_file(tmp_path):
    """YAML reads 3e-5 as text, and one value stands for a list of one."""
    path = tmp_path / "config.yaml"
    path.write_text(FILE)
    line = ["--reward", "c.py:h", "--rollout.group-size", "2", "--data.template_options", '{"thinks": false}']
    config, flags = parse_arguments([str(path), *line, "--objective.clip_high", "5e-4", "--overwrite"])
    assert [name for name, value in flags.items() if value] == ["overwrite"]
    assert (config.reward, config.reward_weights, config.trackers) == (("c.py:h",), (3.0,), ("wandb",))
    assert (config.rollout.group_size, config.rollout.top_k, config.rollout.top_p) == (2, 3, 1.0)
    assert config.data.template_options == {"thinks": False} and config.update.learning_rate == 3e-5
    assert make_objective(config) == gk.GSPO(clip_low=0.1, clip_high=5e-4)
    # A run that resumes has the configuration in its directory.
    for output in (["--output", str(tmp_path)], [f"--output={tmp_path}"]):
        for other in ("force", "dry_run"):
            config, flags = parse_arguments(["--resume", f"--{other}", *output])
            assert [name for name, value in flags.items() if value] == ["resume", other]
        assert (config.seed, config.output) == (5, str(tmp_path))


@pytest.mark.parametrize("null", ["null", "None", ""])
def test_null_restores_the_default(tmp_path, null):
    path = tmp_path / "config.yaml"
    path.write_text(FILE)
    names = (
        "data.split data.template_options rollout.top-k rollout.group-size reward_weights trackers reward "
    )
    names += "seed update.learning_rate objective.clip_low"
    unset, _ = parse_arguments([str(path), *(f"--{name}={null}" for name in names.split())])
    assert make_objective(unset) == gk.GSPO()
    assert flat(unset.model_dump(exclude={"objective"})) == flat(
        TrainConfig().model_dump(exclude={"objective"})
    )
    path.write_text("seed: null\noutput: ''\ndata: {split: ''}\nrollout: {top_k: '', top_p: null}\n")
    assert load_config(path) == TrainConfig()


def test_another_objective_drops_old_options(tmp_path, capsys):
    path = tmp_path / "config.yaml"
    path.write_text("objective: {name: GSPO, clip_high: 0.3, centering: 20}")
    config, _ = parse_arguments([str(path), "--objective.max-ratio=2", "--objective.name", "CISPO"])
    assert make_objective(config) == gk.objectives.CISPO(max_ratio=2.0) and config.objective.centering == 0
    said = capsys.readouterr().err
    assert "clip_high" in said and "centering" in said
    config, _ = parse_arguments([str(path), "--objective.name", "GSPO"])
    assert make_objective(config).clip_high == 0.3 and not capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["--rolout.top_k", "3"], "did you mean rollout.top_k"),
        (["--model"], "--model has no value"),
        (["--model", "a", "b.yaml"], "unexpected argument 'b.yaml'; a configuration file comes first"),
        (["--data.template_options", "{"], "not valid YAML"),
        *(
            (["--dry-run", f"--{name}"], f"--{name} has no effect with --dry-run")
            for name in ("force", "overwrite")
        ),
        (["--seed", "x"], "seed must be a valid integer"),
        *((line, "must be true or false, got") for line in (["--save_rollouts=1"], ["--resume", "a.yaml"])),
    ],
    ids=str,
)
def test_wrong_words_are_refused_by_name(line, words):
    with pytest.raises(InputError, match=re.escape(words)):
        parse_arguments(line)


@pytest.mark.parametrize("value", [True, False])
def test_a_flag_is_written_alone_or_with_its_value(tmp_path, value):
    (tmp_path / "config.yaml").write_text(f"save_rollouts: {value}\n")
    forms = {"--save_rollouts": True, "--save-rollouts true": True, "--save_rollouts=false": False, "": value}
    for words, expected in forms.items():
        line = [str(tmp_path / "config.yaml"), *words.split(), "--resume", "false"]
        config, flags = parse_arguments(line)
        assert config.save_rollouts == expected and not flags["resume"]


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_arguments(["--help"])
    text = capsys.readouterr().out
    assert caught.value.code == 0
    assert all(f"--{key} " in text for key in [*flat(TrainConfig().model_dump()), "resume", "dry_run"])
