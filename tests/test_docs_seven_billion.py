"""The page on 7B: its tables are what its script computes, that agrees with tensors, commands parse."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
VLLM = {
    *("--tensor-parallel-size", "--data-parallel-size", "--gpu-memory-utilization", "--max-model-len"),
    *("--dtype", "--logprobs-mode"),
}
"""Options of `vllm serve`, from its documentation."""


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location(
        "generate_seven_billion", DOCS / "generate_seven_billion.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(script):
    assert script.PAGE.read_text() == script.page(), "run `python docs/generate_seven_billion.py`"


def test_the_model_is_counted(script):
    """Qwen2.5-7B's card: 7.61 billion parameters, 6.53 of them outside of the embeddings."""
    shape = script.shape_of(script.qwen2_5_7b())
    assert shape.parameters == 7_615_616_512
    assert shape.parameters - shape.rest == pytest.approx(6.53e9, rel=1e-3)


def test_larger_models_fit_as_the_page_says(script):
    heads = {"hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 8}
    sizes = (
        {"intermediate_size": 13824, "num_hidden_layers": 48},
        {"intermediate_size": 27648, "num_hidden_layers": 64},
    )
    shapes = [script.shape_of(script.qwen2_5_7b(**heads, **size)) for size in sizes]
    assert [round(shape.parameters / 1e9, 1) for shape in shapes] == [14.8, 32.8]
    sums = [sum(value for _, value in script.training(shape, 8).values()) for shape in shapes]
    assert sums[0] < 0.9 * script.GPU < script.GPU < sums[1]


def test_weights_gradients_and_moments_are_those_of_a_run(script, tmp_path):
    """16 bytes for each parameter, all in fp32; Adam's counters aside."""
    from gspo_kernels.trainer import GSPOTrainer, demo
    from tests.trainer.conftest import make_accelerator, small_config, tiny_qwen3

    tokenizer = demo.make_tokenizer()
    model = tiny_qwen3(tokenizer)
    config = small_config(tmp_path, update={"precision": "bf16"})
    rows = [{"prompt": prompt} for prompt in "abc"]

    def even(completion_ids, **columns):
        return [sum(i % 2 for i in ids) / len(ids) for ids in completion_ids]

    accelerator = make_accelerator("bf16")
    trainer = GSPOTrainer(model, tokenizer, even, rows, None, config, accelerator=accelerator)
    gradients = {}
    for parameter in trainer.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: gradients.update({p: p.grad.nbytes}))
    trainer.step = 1
    trainer.update(trainer.compare(trainer.rollout()))
    state = trainer.updater.optimizer.state.values()
    moments = sum(t.nbytes for each in state for t in each.values() if t.ndim > 0)
    table = script.training(script.shape_of(model.config), gpus=1)
    weights = sum(parameter.nbytes for parameter in trainer.model.parameters())
    assert table["weights"][1] == weights
    assert table["AdamW's two moments"][1] == moments
    assert table["gradients"][1] == sum(gradients.values())


def test_a_layer_keeps_what_the_formula_counts(script):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    T = 192
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = Qwen2ForCausalLM(config).bfloat16()
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    hidden = torch.randn(1, T, 256, dtype=torch.bfloat16, requires_grad=True)
    rotation = model.model.rotary_emb(hidden, torch.arange(T).unsqueeze(0))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model.layers[0](hidden, position_embeddings=rotation, attention_mask=None)
    counted = sum(storage.nbytes() for place, storage in kept.items() if place not in own)
    assert script.recomputed_layer(script.shape_of(config), T) == pytest.approx(counted, rel=0.01)


def commands():
    """Every line of the page's shell blocks, with what is continued put together."""
    blocks = re.findall(r"```bash\n(.*?)```", (DOCS / "seven_billion.md").read_text(), flags=re.S)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line) for line in lines]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_parse(words, monkeypatch):
    from accelerate.commands.launch import launch_command_parser

    from gspo_kernels import cli
    from gspo_kernels.cli import parse_arguments
    from gspo_kernels.trainer.config import load_config

    monkeypatch.chdir(ROOT)
    while "=" in words[0]:
        words = words[1:]
    if words[:2] == ["vllm", "serve"]:
        options = words[3:]
        assert set(options[::2]) <= VLLM and not any(value.startswith("--") for value in options[1::2])
        return
    if words[0] == "gspo":
        assert words[1] == "export"
        with pytest.raises(SystemExit, match="0"):
            cli.main([*words[1:], "--help"])
        return
    assert words[:2] == ["accelerate", "launch"]
    launch = launch_command_parser().parse_args(words[2:])
    assert launch.use_fsdp and str(launch.fsdp_version) == "2" and launch.num_processes in (6, 8)
    assert launch.fsdp_auto_wrap_policy == "TRANSFORMER_BASED_WRAP"
    assert launch.module and launch.training_script == "gspo_kernels.cli"
    command, *arguments = launch.training_script_args
    assert command == "train"
    if "--resume" in arguments:
        example = load_config("examples/seven_billion.yaml")
        assert arguments == ["--resume", "--output", example.output]
        return
    config, *_ = parse_arguments(arguments)
    assert config.update.gradient_checkpointing and config.update.precision == "bf16"
    assert (config.engine.url is None) == ("--engine.url" not in arguments)


def test_the_table_is_about_the_example(script):
    from gspo_kernels.trainer.config import load_config

    config = load_config(ROOT / "examples" / "seven_billion.yaml")
    assert config.update.micro_batch_tokens == script.TOKENS
    assert config.rollout.batch_size == script.AT_ONCE
    assert config.rollout.max_new_tokens <= script.LENGTH
