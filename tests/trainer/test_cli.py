"""The command line: a local model of another family on a jsonl file, and errors a person can act on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import gspo_kernels
from gspo_kernels import cli
from gspo_kernels.trainer import demo
from gspo_kernels.trainer.run import afterwards
from gspo_kernels.trainer.run.files import RunDirectory
from gspo_kernels.trainer.run.metrics import read_metrics
from tests.draws import shifted_seed
from tests.trainer.conftest import letter_share, small_config, tiny_qwen3


@pytest.fixture
def llama(tmp_path, tokenizer):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(shifted_seed(0))
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    path = tmp_path / "llama"
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def reward_file(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(
        "def odd(prompts, completions, completion_ids, *, letter):\n"
        "    return [sum(i % 2 for i in ids) / max(len(ids), 1) for ids in completion_ids]\n"
    )
    return path


def options(model, jsonl, reward_file, output):
    return [
        *("--model", str(model), "--dataset", str(jsonl), "--eval_dataset", str(jsonl)),
        *("--reward", f"{reward_file}:odd", "--output", str(output), "--threads", "1"),
        *("--rollout.prompts_per_rollout", "2", "--rollout.group_size=4", "--rollout.max-new-tokens", "4"),
        *("--update.steps", "2", "--update.minibatches", "2", "--update.learning_rate", "1e-3"),
    ]


def test_all_rewards_in_processes_of_their_own(tmp_path, llama, jsonl, capfd):
    path = tmp_path / "where.py"
    path.write_text(
        "import os\ndef where(completions, **c):\n    return [float(os.getpid())] * len(completions)\n"
    )
    line = options(llama, jsonl, path, tmp_path / "run")
    line[line.index(f"{path}:odd")] = f"{path}:where"
    assert cli.main(["train", *line, "--reward_process", "true", "--update.steps", "1"]) == 0
    (record,) = read_metrics(tmp_path / "run" / "metrics.jsonl")[1:]
    assert 0 < record["reward/where"] != os.getpid()


def test_any_local_model_on_any_jsonl(tmp_path, llama, jsonl, reward_file, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    line = options(llama, jsonl, reward_file, tmp_path / "run")
    assert cli.main(["train", *line]) == 0
    assert "held-out accuracy" in capsys.readouterr().out
    before = AutoModelForCausalLM.from_pretrained(llama)
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert type(after).__name__ == "LlamaForCausalLM"
    assert any(not torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))
    AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert [record["step"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2]

    # the same command again is refused, and nothing is lost
    assert cli.main(["train", *line]) == 1
    assert "--resume" in capsys.readouterr().err
    # the run goes on from its own configuration
    assert cli.main(["train", "--resume", "--output", str(tmp_path / "run"), "--update.steps", "3"]) == 0
    assert [record["step"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2, 3]
    assert cli.main(["train", *line, "--overwrite"]) == 0
    assert [record["step"] for record in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2]


def test_the_attention_of_a_model_can_be_chosen(tmp_path, llama, jsonl, reward_file, tokenizer, monkeypatch):
    from gspo_kernels.trainer import GSPOTrainer
    from gspo_kernels.trainer.input_errors import ModelError

    seen = []
    monkeypatch.setattr(
        GSPOTrainer, "train", lambda self, **_: seen.append(self.model.config._attn_implementation)
    )
    line = options(llama, jsonl, reward_file, tmp_path / "run")
    for name in ("eager", "sdpa"):
        assert cli.main(["train", *line, "--attn_implementation", name]) == 0
    assert seen == ["eager", "sdpa"]
    assert cli.main(["train", *line, "--attn_implementation", "none_such"]) == 1
    config = small_config(tmp_path, attn_implementation="eager")
    with pytest.raises(ModelError, match="attn_implementation"):
        GSPOTrainer(
            tiny_qwen3(tokenizer), tokenizer, letter_share, [{"prompt": "a", "letter": "a"}], None, config
        )


@pytest.mark.parametrize("adapters", [False, True], ids=["weights", "adapters"])
def test_a_model_and_a_plot_of_any_checkpoint(
    tmp_path, llama, jsonl, reward_file, adapters, capsys, real_plots, monkeypatch
):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, line = tmp_path / "run", options(llama, jsonl, reward_file, tmp_path / "run")
    line += ["--checkpoint.every", "1", "--checkpoint.export", "true", "--update.learning_rate", "1e-2"]
    line += ["--lora.rank", "2"] if adapters else []
    assert cli.main(["train", *line]) == 0
    for name, flags in (("newest", []), ("first", ["--step", "1"]), ("half", ["--dtype", "bf16"])):
        assert cli.main(["export", str(run), "--to", str(tmp_path / name), *flags]) == 0
    trained, newest, first, half = (
        AutoModelForCausalLM.from_pretrained(path).state_dict()
        for path in (run / "model", tmp_path / "newest", tmp_path / "first", tmp_path / "half")
    )
    AutoTokenizer.from_pretrained(tmp_path / "first")
    assert all(torch.equal(trained[name], newest[name]) for name in trained)
    assert any(not torch.equal(trained[name], first[name]) for name in trained)
    assert all(torch.equal(trained[name].bfloat16(), half[name]) for name in trained)
    intermediate = AutoModelForCausalLM.from_pretrained(run / "checkpoints" / "step_000001" / "model")
    assert all(torch.equal(first[name], weight) for name, weight in intermediate.state_dict().items())
    alone = ["export", str(run), "--adapters", "--to", str(tmp_path / "adapters")]
    if adapters:
        peft = pytest.importorskip("peft")
        monkeypatch.setattr(afterwards, "load_model", None)  # these need no weight of the model below
        assert cli.main(alone) == 0
        assert cli.main([*alone[:-1], str(tmp_path / "halves"), "--dtype", "bf16"]) == 0
        files = [path.name for path in (tmp_path / "adapters").iterdir()]
        assert "adapter_model.safetensors" in files and "model.safetensors" not in files
        full, half = (
            load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapters", "halves")
        )
        assert {weight.dtype for weight in full.values()} == {torch.float32}
        assert full.keys() == half.keys()
        assert all(torch.equal(full[name].bfloat16(), half[name]) for name in full)
        base = AutoModelForCausalLM.from_pretrained(llama)
        merged = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").merge_and_unload().state_dict()
        assert all(torch.allclose(merged[name], newest[name], rtol=1e-6, atol=1e-8) for name in newest)
    else:
        assert cli.main(alone) == 1
        assert "trains all weights" in capsys.readouterr().err
        assert not (tmp_path / "adapters").exists()
    (run / "progress.png").unlink()
    assert cli.main(["plot", str(run)]) == 0
    assert (run / "progress.png").read_bytes().startswith(b"\x89PNG")
    for words, wrong in (
        ("exists already", ["export", str(run), "--to", str(tmp_path / "first")]),
        ("no checkpoint step_000009", ["export", str(run), "--to", str(tmp_path / "n"), "--step", "9"]),
        ("no run in", ["plot", str(llama)]),
    ):
        assert cli.main(wrong) == 1
        assert words in capsys.readouterr().err


def test_a_configuration_file(tmp_path, llama, jsonl, reward_file):
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model: {llama}\ndataset: {jsonl}\nreward: ['{reward_file}:odd']\noutput: {tmp_path}/run\n"
        "threads: 1\n"
        "rollout: {prompts_per_rollout: 2, group_size: 2, max_new_tokens: 3}\n"
        "update: {steps: 1, minibatches: 2}\nobjective: {name: GRPO, clip_low: 0.1}\n"
    )
    assert cli.main(["train", str(path), "--update.steps", "2"]) == 0
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"--model": "no/such/model"}, ["no/such/model", "cannot be loaded"]),
        ({"--dataset": "no/such/file.jsonl"}, ["there is no dataset file no/such/file.jsonl"]),
        ({"--eval_dataset": "no/such/file.jsonl"}, ["there is no dataset file"]),
        ({"--reward": "no_such_file.py:f"}, ["there is no file no_such_file.py"]),
        ({"--reward": "math:sqrt"}, ["reward function sqrt cannot be called"]),
        ({"--update.minibatches": "9"}, ["update.minibatches", "at most the 8"]),
        ({"--update.learning_rate": "quick"}, ["update.learning_rate", "'quick'"]),
        ({"--rollout.max-new-tokens": "64"}, ["leaves no room for a prompt"]),
        ({"--rollout.max-new-tokens": "61"}, ["row 4", "leaves room for 3"]),
        ({"--model": "nodir"}, ["model 'nodir'", "cannot be loaded", "there is no such directory"]),
        ({"--model": "./no/dir"}, ["./no/dir", "there is no such directory"]),
        ({"--update.minibatches": "-1"}, ["update.minibatches", "at least 1"]),
        ({"--model": None}, ["model is missing"]),
        ({"--dataset": None}, ["dataset is missing"]),
        ({"--reward": None}, ["reward is missing"]),
    ],
    ids=str,
)
def test_errors_are_one_line_that_says_what_to_change(
    tmp_path, llama, jsonl, reward_file, changes, words, capsys
):
    line = options(llama, jsonl, reward_file, tmp_path / "run")
    for key, value in changes.items():
        position = line.index(key)
        line[position : position + 2] = [] if value is None else [key, value]
    assert cli.main(["train", *line]) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("gspo train: error: ")
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("cut", ["cannot be loaded", "llama"]),
        ("nan", ["model.norm.weight", "not finite"]),
        ("surrogate", ["prompts.jsonl, row 2", "half of a surrogate pair"]),
        ("seed", ["seed must be at least 0, got '-1'"]),
        ("exit", ["reward function odd raised SystemExit(0)", "my_rewards.py, line 3"]),
    ],
)
def test_what_gave_a_traceback_is_one_line(tmp_path, llama, jsonl, reward_file, fault, words, capsys):
    line = options(llama, jsonl, reward_file, tmp_path / "run")
    weights = llama / "model.safetensors"
    if fault == "cut":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif fault == "nan":
        from transformers import LlamaForCausalLM

        model = LlamaForCausalLM.from_pretrained(llama)
        with torch.no_grad():
            model.model.norm.weight[0] = torch.nan
        model.save_pretrained(llama)
    elif fault == "surrogate":
        lines = jsonl.read_text().splitlines()
        lines[1] = lines[1].replace('"prompt": "', '"prompt": "\\ud800')
        jsonl.write_text("\n".join(lines))
    elif fault == "seed":
        line += ["--seed", "-1"]
    else:
        reward_file.write_text("import sys\ndef odd(**columns):\n    sys.exit(0)\n")
    assert cli.main(["train", *line]) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("gspo train: error: ")
    for word in words:
        assert word in message


def test_the_demonstration_writes_over_nothing_of_others(tmp_path, capsys):
    (tmp_path / "train.jsonl").write_text("mine")
    for flags in ([], ["--overwrite"]):
        assert cli.main(["demo", "--output", str(tmp_path), "--steps", "1", *flags]) == 1
        assert "holds train.jsonl, and no run wrote that" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["train.jsonl"]


def test_a_killed_run_resumes_to_the_same_weights(tmp_path, llama, jsonl, reward_file):
    """SIGKILL in a process of its own, then --resume here: the weights of a run that was never killed."""
    from transformers import AutoModelForCausalLM

    line = options(llama, jsonl, reward_file, tmp_path / "killed")
    line += ["--checkpoint.every", "1", "--evaluation.every", "100", "--update.steps", "40"]
    environment = os.environ | {"PYTHONPATH": str(Path(gspo_kernels.__file__).parents[1])}
    process = subprocess.Popen([sys.executable, "-m", "gspo_kernels.cli", "train", *line], env=environment)
    try:
        run = RunDirectory(tmp_path / "killed")
        deadline = time.monotonic() + 120
        while run.latest_checkpoint() is None and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert run.latest_checkpoint() is not None
    assert not run.model.exists(), "the run was over before it could be killed"
    reached = int(run.latest_checkpoint().name.removeprefix("step_"))

    # a few steps beyond where the kill struck are enough
    steps = ["--update.steps", str(reached + 2)]
    assert cli.main(["train", *line, *steps, "--resume"]) == 0
    straight = [str(tmp_path / "straight") if word == str(tmp_path / "killed") else word for word in line]
    assert cli.main(["train", *straight, *steps]) == 0
    resumed = AutoModelForCausalLM.from_pretrained(tmp_path / "killed" / "model").state_dict()
    never_killed = AutoModelForCausalLM.from_pretrained(tmp_path / "straight" / "model").state_dict()
    assert all(torch.equal(resumed[name], never_killed[name]) for name in never_killed)


def test_version_doctor_and_help(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert caught.value.code == 0
    assert "gspo_kernels" in capsys.readouterr().out
    assert cli.main(["doctor"]) == 0
    assert "cpp" in capsys.readouterr().out
    for command in ([], ["train"], ["demo"], ["export"], ["plot"], ["doctor"]):
        with pytest.raises(SystemExit) as caught:
            cli.main([*command, "--help"])
        assert caught.value.code == 0
    with pytest.raises(SystemExit) as caught:
        cli.main(["tarin"])
    assert caught.value.code == 2


def test_importing_the_package_imports_no_trainer():
    code = "import sys, gspo_kernels, gspo_kernels.cli; print([m for m in sys.modules if m.split('.')[0] in "
    code += "('transformers', 'accelerate') or m.startswith('gspo_kernels.trainer')])"
    environment = os.environ | {"PYTHONPATH": str(Path(gspo_kernels.__file__).parents[1])}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stderr


def test_the_demonstration_keeps_its_prompts_apart(tmp_path):
    train, held_out = demo.make_rows(0)
    assert len({row["prompt"] for row in train}) == len(train)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}
    assert not {row["answer"] for row in train} & {row["answer"] for row in held_out}
    for row in train[:50] + held_out[:50]:
        assert "".join(sorted(row["prompt"].removesuffix("="))) == row["answer"]
    assert demo.make_rows(1) != (train, held_out)
    texts = ["1234", "12345", "21345", ""]
    assert demo.exact([], texts, [], answer=["12345"] * 4) == [0, 1, 0, 0]


def test_the_demonstration_runs(tmp_path, capsys, real_plots):
    line = ["demo", "--output", str(tmp_path / "demo"), "--steps", "1"]
    assert cli.main(line) == 0
    out = capsys.readouterr().out
    assert "greedy" in out and "sampled" in out and "points" in out
    assert (tmp_path / "demo" / "progress.png").read_bytes().startswith(b"\x89PNG")
    rows = [json.loads(text) for text in (tmp_path / "demo" / "held_out.jsonl").read_text().splitlines()]
    assert rows == demo.make_rows(0)[1]
    assert cli.main(line) == 1
    assert "already holds a run" in capsys.readouterr().err
