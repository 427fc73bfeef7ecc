"""The command line: a model of another family on a jsonl file, errors in one line, export, plot, demo."""

import json
import re
from pathlib import Path

import datasets
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from gspo_kernels import cli, demo
from gspo_kernels.trainer.report import read_metrics
from tests.draws import shifted_seed
from tests.trainer.conftest import ROWS, same, tiny_model, weights

ROOT = Path(__file__).parents[2]


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture
def llama(tmp_path, tokenizer):
    for each in (tiny_model("llama", tokenizer, tie_word_embeddings=True), tokenizer):
        each.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture
def reward_file(tmp_path):
    path = tmp_path / "my_rewards.py"
    path.write_text(
        "def odd(completion_ids, *, letter):\n"
        "    return [sum(i % 2 for i in ids) / max(len(ids), 1) for ids in completion_ids]\n"
        "def reward(completions):\n    return [1.0] * len(completions)\n"
    )
    return path


def options(model, jsonl, reward_file, output):
    return [
        *("--model", str(model), "--dataset", str(jsonl), "--eval_dataset", str(jsonl)),
        *("--reward", f"{reward_file}:odd", "--output", str(output)),
        *("--rollout.prompts_per_rollout", "2", "--rollout.group_size=4", "--rollout.max-new-tokens", "4"),
        *("--update.steps", "2", "--update.minibatches", "2", "--update.learning_rate", "1e-3"),
    ]


def test_a_file_lacks_a_subset_of_the_other_dataset(tmp_path, monkeypatch, llama, jsonl, reward_file):
    seen = []

    def load(source, **options):
        seen.append(options["subset"])
        return [{"prompt": "ab"}]

    monkeypatch.setattr("gspo_kernels.trainer.data.load_prompts", load)
    line = [*options(llama, jsonl, reward_file, tmp_path / "out"), "--data.subset", "main"]
    assert cli.main(["train", *line, "--eval_dataset", "organization/name"]) == 1  # rows have no letter
    assert seen == [None, "main"]


QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
QWEN_PROMPT = (
    "<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    "<think>\n\n</think>\n\n"
)


def test_gsm8k_as_the_readme_says(tmp_path, monkeypatch, capsys):
    """A tiny Qwen3 and a folder laid out as the dataset: its name is where the Hub's would be looked up."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder, chat = tmp_path / "openai" / "gsm8k", demo.make_tokenizer()
    chat.chat_template = QWEN
    for each in (tiny_model("qwen3", chat, max_position_embeddings=1024), chat):
        each.save_pretrained(tmp_path / "Qwen" / "Qwen3-0.6B")
    (folder / "main").mkdir(parents=True)
    files = {split: f"main/{split}-00000-of-00001.parquet" for split in ("train", "test")}
    splits = "".join(f"  - split: {split}\n    path: {file}\n" for split, file in files.items())
    head = f"---\nconfigs:\n- config_name: main\n  data_files:\n{splits}- config_name: socratic\n"
    (folder / "README.md").write_text(head + "  data_files: none*\n---\n")
    for split, file in files.items():
        answer = "48+24=<<48+24=72>>72\n#### 72"
        rows = [{"question": f"{split} {n}: 48 + 24?", "answer": answer} for n in range(3)]
        rows += [{"question": "long " * 120, "answer": "#### 1"}] * (split == "train")
        datasets.Dataset.from_list(rows).to_parquet(folder / file)
    monkeypatch.chdir(tmp_path)
    line = [str(ROOT / "examples/gsm8k.yaml"), "--model", "Qwen/Qwen3-0.6B", "--dataset", "openai/gsm8k"]
    line += ["--rollout.prompts_per_rollout=3", "--rollout.group_size=2", "--rollout.max_new_tokens=4"]
    assert cli.main(["train", *line, "--update.steps=1", "--update.minibatches=2", "--save_rollouts"]) == 0
    said = capsys.readouterr().out
    assert "training dataset: 1 of 4 prompts are longer than data.max_prompt_tokens = 512" in said
    system = yaml.safe_load((ROOT / "examples/gsm8k.yaml").read_text())["data"]["system_prompt"]
    prompt = QWEN_PROMPT.format(system=system, question="train 0: 48 + 24?")
    assert f"the first prompt, as the model sees it:\n{prompt}" in said
    records = read_metrics(tmp_path / "runs/gsm8k/metrics.jsonl")
    assert [record["eval/greedy_reward"] for record in records] == [0.0, 0.0]
    assert records[1]["reward/last_number"] == 0.0 and "1 steps" not in said


def test_a_dry_run_loads_no_weights(tmp_path, llama, jsonl, reward_file, capsys):
    """It refuses what a run would refuse: rows, rewards and prompts that are too long."""
    (llama / "model.safetensors").unlink()
    line = ["train", *options(llama, jsonl, reward_file, tmp_path / "run"), "--dry-run"]
    assert cli.main([*line, "--data.prompt_template", "<{prompt}>"]) == 0
    said = capsys.readouterr().out
    assert "the first prompt, as the model sees it:\n<ab>" in said
    assert "are in the training dataset too" in said
    for words, wrong in (
        ("row 4: the prompt has 4 tokens", ["--rollout.max-new-tokens", "61"]),
        ("reward function sqrt cannot be called", ["--reward", "math:sqrt"]),
        ("update.minibatches must be at most", ["--update.minibatches", "9"]),
        ("data.eval_split must be null", ["--eval_dataset=null", "--data.eval_split", "train"]),
    ):
        assert cli.main([*line, *wrong]) == 1 and words in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_one_message_names_all_that_must_change(jsonl, capsys):
    line = ["train", str(ROOT / "examples/gsm8k.yaml"), "--dataset", str(jsonl), "--eval-dataset", str(jsonl)]
    assert cli.main([*line, "--reward", "null"]) == 1
    message = capsys.readouterr().err
    for words in (
        "model is missing",
        "reward is missing",
        "subset 'main'",
        "split 'test[:256]'",
        "no 'question'",
    ):
        assert words in message, words


def test_runs_of_local_models_resume_and_export(tmp_path, llama, jsonl, reward_file, capsys, recwarn):
    run, line = tmp_path / "run", options(llama, jsonl, reward_file, tmp_path / "run")
    line += ["--checkpoint.every", "1", "--lora.rank", "1"]
    assert cli.main(["train", *line]) == 0
    assert "eval reward" in capsys.readouterr().out
    assert not [each.message for each in recwarn if issubclass(each.category, FutureWarning)]
    assert cli.main(["train", *line]) == 1
    assert "--resume" in capsys.readouterr().err
    # The run resumes with its saved configuration.
    longer = ["train", "--resume", f"--output={run}", "--update.steps", "3"]
    assert cli.main([*longer, "--update.learning_rate", "1e-2", "--force"]) == 0
    assert [record["step"] for record in read_metrics(run / "metrics.jsonl")] == [0, 1, 2, 3]
    for name, flags in (("newest", []), ("first", ["--step", "2"]), ("half", ["--dtype", "bf16"])):
        assert cli.main(["export", str(run), "--to", str(tmp_path / name), *flags]) == 0
        assert str(tmp_path / name) in capsys.readouterr().out
    before, trained, newest, first, half = (
        weights(AutoModelForCausalLM.from_pretrained(path))
        for path in (llama, run / "model", *(tmp_path / name for name in ("newest", "first", "half")))
    )
    for name, weight in trained.items():
        torch.testing.assert_close(newest[name], weight, rtol=1e-6, atol=1e-7)
        assert torch.equal(newest[name].bfloat16(), half[name])
    assert not same(trained, first) and not same(before, first)
    assert {w.dtype for w in load_file(tmp_path / "half" / "model.safetensors").values()} == {torch.bfloat16}
    (run / "progress.png").unlink()
    assert cli.main(["plot", str(run)]) == 0
    assert (run / "progress.png").read_bytes().startswith(b"\x89PNG")
    for words, wrong in (
        ("exists already", ["export", str(run), "--to", str(tmp_path / "first")]),
        ("it has step_000002, step_000003", ["export", str(run), "--to", str(tmp_path / "n"), "--step", "9"]),
        ("no run in", ["plot", str(llama)]),
    ):
        assert cli.main(wrong) == 1
        assert words in capsys.readouterr().err
    assert cli.main(["train", *line, "--overwrite"]) == 0
    assert [record["step"] for record in read_metrics(run / "metrics.jsonl")] == [0, 1, 2]


def test_ask_and_eval_take_a_run_or_a_model(tmp_path, llama, jsonl, reward_file, capsys):
    """Answers and rewards are those of the trained model, with the run's prompts and rewards."""
    run, exported = str(tmp_path / "run"), str(tmp_path / "run" / "model")
    line = [*options(llama, jsonl, reward_file, run), "--data.prompt_template", "<{prompt}>", "--seed", "3"]
    assert cli.main(["train", *line, "--update.learning_rate=0.1", "--lora.rank", "1"]) == 0
    record = read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]
    config = ["--config", f"{run}/config.yaml"]
    held_out = ["--dataset", str(jsonl), "--reward", f"{reward_file}:odd", f"{reward_file}:reward"]
    for words in ([run], [exported, *config], [exported, *config, *held_out]):
        capsys.readouterr()
        assert cli.main(["eval", *words]) == 0
        greedy, sampled = (
            dict(re.findall(r"(\w+) ([\d.]+)", line)) for line in capsys.readouterr().out.splitlines()
        )
        for label, found in (("greedy", greedy), ("sampled", sampled)):
            odd = record[f"eval/{label}/odd"]
            assert float(found["odd"]) == pytest.approx(odd, rel=1e-3)
            if words[-1].endswith(":reward"):
                assert found["reward"] == "1" and float(found["mean"]) == pytest.approx(1 + odd, rel=1e-3)
    model, tokenizer = (kind.from_pretrained(exported) for kind in (AutoModelForCausalLM, AutoTokenizer))
    ids = tokenizer("<ab>", return_tensors="pt")["input_ids"]
    expected = model.generate(ids, do_sample=False, max_new_tokens=3)[0, ids.shape[1] :]
    for words in ([run, "ab"], [exported, "<ab>"], [exported, "ab", *config]):
        assert cli.main(["ask", *words, "--max_new_tokens", "3"]) == 0
        assert capsys.readouterr().out == tokenizer.decode(expected, skip_special_tokens=True) + "\n"
    for words, wrong in (
        ("no/such/run", ["ask", "no/such/run", "ab"]),
        ("got ''", ["ask", "", "ab"]),
        ("got 0", ["mismatch", exported, "--prompts", str(jsonl), "--max_new_tokens", "0"]),
        ("non-empty text", ["ask", run, ""]),
        ("temperature", ["ask", run, "ab", "--temperature", "-1"]),
        ("max_new_tokens", ["ask", run, "ab", "--max-new-tokens", "0"]),
        ("--dataset is missing", ["eval", exported]),
        ("--reward is missing", ["eval", exported, "--dataset", str(jsonl)]),
        ("--count: got 0", ["eval", run, "--count", "0"]),
    ):
        assert cli.main(wrong) == 1 and words in capsys.readouterr().err, words


def test_errors_are_one_line_that_says_what_to_change(tmp_path, tokenizer, llama, jsonl, reward_file, capsys):
    for name, file in (("adapters", "adapter_config.json"), ("gguf", "model.gguf")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
    tiny_model("qwen3", tokenizer).config.save_pretrained(tmp_path / "bare")
    for key, value, words in (
        ("--model", "no/such/model", "no/such/model' cannot be loaded"),
        ("--model", "", "model is missing"),
        ("--model", str(tmp_path / "adapters"), "the directory has adapters; expected a full model"),
        ("--model", str(tmp_path / "gguf"), "; the directory has model.gguf"),
        ("--model", str(tmp_path / "bare"), "has only special tokens: its files are missing"),
        ("--eval_dataset", "no/such/file.jsonl", "there is no dataset file no/such/file.jsonl"),
        ("--attn_implementation", "eager", "'eager'; load it with sdpa"),
    ):
        line = [*options(llama, jsonl, reward_file, tmp_path / "run"), key, value]
        assert cli.main(["train", *line]) == 1
        message = capsys.readouterr().err.splitlines()[-1]
        assert message.startswith("gspo train: error: ") and words in message, message
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_demonstration_learns(tmp_path, capsys):
    """Fewer errors remain on prompts and answers never trained on; for seeds 0 to 4, 0.18 to 0.46 of them."""
    line = ["demo", "--output", str(tmp_path / "demo"), "--steps", "25", "--seed", str(shifted_seed(0) % 5)]
    assert cli.main(line) == 0
    first, *later = read_metrics(tmp_path / "demo" / "metrics.jsonl")
    for label in ("greedy", "sampled"):
        before, after = (1 - record[f"eval/{label}_reward"] for record in (first, later[-1]))
        assert after <= 0.8 * before, (label, before, after)
    # As GSPO should: nothing is clipped before the weights move, and much afterwards.
    for record in later:
        assert record["minibatch_1/ratio/min"] == record["minibatch_1/ratio/max"] == 1.0
    kinds = ("minibatch_4/clip_fraction/low", "minibatch_4/clip_fraction/high")
    assert 0.1 < sum(record[kind] for record in later for kind in kinds) / len(later) < 0.9
    rows = [json.loads(text) for text in (tmp_path / "demo" / "held_out.jsonl").read_text().splitlines()]
    assert rows == demo.make_rows(shifted_seed(0) % 5)[1]
    capsys.readouterr()
    assert cli.main(line) == 1
    assert "already has a run" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "train.jsonl").write_text("mine")
    for flags in ([], ["--overwrite"]):
        assert cli.main(["demo", "--output", str(tmp_path / "other"), "--steps", "1", *flags]) == 1
        assert "has train.jsonl, and no run wrote that" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["train.jsonl"]
