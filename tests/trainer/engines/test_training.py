"""Runs that sample by a vLLM server, or by its stand-in: weights reach it after every change."""

import copy
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from gspo_kernels.cli import main
from gspo_kernels.trainer import GSPOTrainer
from gspo_kernels.trainer import trainer as trainer_module
from gspo_kernels.trainer.engines import weights
from gspo_kernels.trainer.engines.vllm import VLLMEngine
from gspo_kernels.trainer.input_errors import ConfigError, EngineError
from gspo_kernels.trainer.run.metrics import read_metrics
from tests.forks import in_processes
from tests.trainer.conftest import make_accelerator, small_config, tiny_qwen3
from tests.trainer.engines.stand_in import serving
from tests.trainer.run.test_processes import ENDS, ROWS, fsdp2, odd_share


@pytest.fixture
def stand_in(tokenizer):
    """It begins with other weights than the run's, so that nothing is right before the first transfer."""
    with serving(tiny_qwen3(tokenizer, seed=7)) as found:
        yield found


def train(tokenizer, output, url=None, *, accelerator=None, reward=odd_share, resume=False, **sections):
    engine = {} if url is None else {"url": url} | sections.pop("engine", {})
    update = {"steps": 3} | sections.pop("update", {})
    accelerator = accelerator or make_accelerator(update.get("precision", "fp32"))
    config = small_config(output, update=update, engine=engine, **sections)
    model = tiny_qwen3(tokenizer)
    trainer = GSPOTrainer(model, tokenizer, reward, ROWS, ROWS[:3], config, accelerator=accelerator)
    trainer.engine.end_ids = ENDS
    trainer.train(resume=resume)
    return trainer


def mismatch(output, name="mismatch/mean"):
    return [each[name] for each in read_metrics(output / "metrics.jsonl") if name in each]


def test_a_run_samples_from_the_weights_of_now(tmp_path, tokenizer, stand_in):
    """The server's log-probs are as near to the trainer's as those of the model's own generation."""
    options = {"update": {"steps": 4, "learning_rate": 1e-2}, "rollout": {"temperature": 0.8}}
    trainer = train(tokenizer, tmp_path / "served", stand_in.url, **options)
    train(tokenizer, tmp_path / "own", **options)
    assert isinstance(trainer.engine, VLLMEngine)
    served, own = (mismatch(tmp_path / name) for name in ("served", "own"))
    assert len(served) == len(own) == 4
    rounding = 2.0**-22  # of a log-prob between 4 and 8
    assert sum(served) < 2 * sum(own) + 4 * rounding
    # once before the first evaluation and once after each step, each time from a directory of its own
    assert len(set(stand_in.reloads)) == 5
    ends = {tuple(body["stop_token_ids"]) for body, _ in stand_in.completions}
    assert ends == {tuple(ENDS)}
    # what the server got last is what the run exports, in the precision that it was trained in
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "served" / "model")
    assert exported.dtype == torch.float32
    for name, weight in stand_in.model.state_dict().items():
        assert torch.equal(weight, exported.state_dict()[name]), name
    assert not list((tmp_path / "served").glob(".unfinished-*"))


def test_weights_that_the_server_did_not_load_are_noticed(tmp_path, tokenizer, stand_in, capsys):
    options = {"update": {"steps": 6, "learning_rate": 1e-2}, "log_every": 1}
    train(tokenizer, tmp_path / "right", stand_in.url, **options)
    assert "sampling and training disagree" not in capsys.readouterr().out
    stand_in.stale = True
    train(tokenizer, tmp_path / "stale", stand_in.url, **options)
    assert "sampling and training disagree" in capsys.readouterr().out
    assert min(mismatch(tmp_path / "stale")) > 100 * max(mismatch(tmp_path / "right"))


def test_a_resumed_run_gives_its_weights_to_a_new_server(tmp_path, tokenizer, stand_in):
    train(tokenizer, tmp_path, stand_in.url)
    with serving(tiny_qwen3(tokenizer, seed=8)) as another:
        train(tokenizer, tmp_path, another.url, update={"steps": 4}, resume=True)
        assert len(another.reloads) == 2
    assert max(mismatch(tmp_path)) < 1e-5


CASES = {
    "adapters": {"lora": {"rank": 2}, "update": {"learning_rate": 1e-2}},
    "drafts": {"igrpo": {"drafts": 2, "template": "{prompt}{draft}"}},
    "turns": {"turns": {"count": 2, "feedback": f"{__name__}:on"}},
    "comparisons": {"veripo": {"grpo_steps": 2, "dpo_steps": 1}},
    "off-policy weights": {"off_policy": {"level": "token"}, "rollout": {"top_k": 20, "temperature": 0.7}},
    "sampling masks": {
        "off_policy": {"level": "token"},
        "rollout": {"top_k": 20, "top_p": 0.9, "temperature": 0.7, "keep_sampling_mask": True},
    },
    "another directory": {"engine": {"weights": "{tmp_path}/elsewhere/below", "model": "policy"}},
}


def on(prompts, completions, rewards, **columns):
    return ["x"] * len(prompts)


@pytest.mark.parametrize("case", CASES)
def test_every_path_samples_by_the_server(tmp_path, tokenizer, stand_in, case):
    sections = json.loads(json.dumps(CASES[case]).replace("{tmp_path}", str(tmp_path)))
    trainer = train(tokenizer, tmp_path / "run", stand_in.url, **sections)
    steps = mismatch(tmp_path / "run")
    assert len(steps) == (2 if case == "comparisons" else 3)
    if case == "off-policy weights":
        assert min(steps) > 0.1, "the probability that top-k cut off"
    else:
        assert max(steps) < 1e-5
    folder = tmp_path / ("elsewhere/below" if case == "another directory" else "run")
    assert {str(folder)} == {path.rpartition("/")[0] for path in stand_in.reloads}
    assert not list(folder.glob(".unfinished-*"))
    assert trainer.engine.server.model == "policy"


def test_bf16_weights_go_to_the_server_in_bf16(tmp_path, tokenizer, stand_in):
    stand_in.dtype = torch.bfloat16
    train(tokenizer, tmp_path, stand_in.url, update={"precision": "bf16"})
    assert 1e-4 < max(mismatch(tmp_path)) < 0.1
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert exported.dtype == torch.float32
    rounded = {name: weight.bfloat16() for name, weight in exported.state_dict().items()}
    for name, weight in stand_in.model.state_dict().items():
        assert torch.equal(weight, rounded[name]), name


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes_share_a_server(tmp_path, tokenizer, stand_in, kind):
    """Each asks for its share, and the weights go there once for both."""
    base = copy.deepcopy(stand_in.model)
    train(tokenizer, tmp_path / "one", stand_in.url)
    stand_in.model, stand_in.reloads = base, []

    def begin(rank):
        trainer_module.whole_weights = None  # no process may hold them for the server to sample
        accelerator = make_accelerator()
        accelerator = fsdp2(accelerator) if kind == "fsdp2" else accelerator
        train(tokenizer, tmp_path / "two", stand_in.url, accelerator=accelerator)

    in_processes(2, begin)
    assert len(stand_in.reloads) == 4
    one, two = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    assert max(mismatch(tmp_path / "two")) < 1e-5
    for a, b in zip(one, two, strict=True):
        for name in a.keys() & {"reward/mean", "completions/length", "eval/sampled_accuracy"}:
            assert b[name] == pytest.approx(a[name]), (a["step"], name)


def test_a_server_that_fails_in_one_process_ends_all(tmp_path, tokenizer, stand_in):
    stand_in.developing = False

    def begin(rank):
        with pytest.raises(EngineError, match=r"/collective_rpc answered 404"):
            train(tokenizer, tmp_path, stand_in.url, accelerator=make_accelerator())

    in_processes(2, begin)


def test_weights_that_find_no_room_are_an_error(tmp_path, tokenizer, stand_in):
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match=r"engine.weights: .* cannot be written to .*file/below"):
        train(tokenizer, tmp_path / "run", stand_in.url, engine={"weights": str(tmp_path / "file/below")})


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path, tokenizer, stand_in, monkeypatch):
    def full(model, *_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights, "export_model", full)
    with pytest.raises(EngineError, match=r"cannot be written to .*: \[Errno 28\] No space left on device"):
        train(tokenizer, tmp_path, stand_in.url)
    assert not list(tmp_path.glob(".unfinished-*")) and not stand_in.reloads


def test_a_server_beside_an_engine_is_refused(tmp_path, model, tokenizer, stand_in):
    config = small_config(tmp_path, engine={"url": stand_in.url})
    engine = VLLMEngine(None, ENDS, 258)
    with pytest.raises(ConfigError, match=r"engine.url: got .* beside an engine"):
        GSPOTrainer(model, tokenizer, odd_share, ROWS, None, config, engine=engine)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"url": "localhost:8000"}, "engine.url must be an address as http://localhost:8000"),
        ({"url": "http://localhost:8000/v1"}, "without /v1"),
        ({"model": "policy"}, "engine.model must be left alone where there is no engine.url"),
        ({"weights": "shared"}, "engine.weights must be left alone where there is no engine.url"),
        ({"url": "http://localhost:8000", "timeout": 0}, "engine.timeout must be above 0"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(tmp_path, engine, message):
    with pytest.raises(ConfigError, match=message):
        small_config(tmp_path, engine=engine)


def test_the_command_line_says_that_there_is_no_server(tmp_path, tokenizer, model, jsonl, capsys):
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    capsys.readouterr()
    paths = ["--model", str(tmp_path / "model"), "--dataset", str(jsonl), "--output", str(tmp_path / "run")]
    arguments = [*paths, "--reward", "gspo_kernels.rewards:exact_match(column='letter')"]
    assert main(["train", *arguments, "--engine.url", "http://localhost:1"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("gspo train: error: http://localhost:1/v1/models cannot be reached")
    assert "Traceback" not in said and not (tmp_path / "run").exists()
