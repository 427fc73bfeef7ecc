"""What scripts write into docs/: tables and sketches are up to date, and agree with classes and tensors."""

import importlib.util
from pathlib import Path

import pytest
import torch

import gspo_kernels as gk
from tests.cases import make_case, run
from tests.judging import assert_equals_oracle
from tests.test_docs import run as read
from tests.trainer.conftest import batch_of, make_trainer, odd_share, rows, small_config, tokenizer

__all__ = ["rows", "tokenizer"]

ROOT = Path(__file__).parent.parent


def script(name):
    """A script of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


OBJECTIVES, SCALING = script("generate_objectives"), script("generate_scaling")
PAGE = read("docs/objectives.md")


def test_pages_are_up_to_date():
    sketch = script("generate_architecture")
    assert sketch.SKETCH.read_text() == sketch.sketch(), "run `python docs/generate_architecture.py`"
    assert OBJECTIVES.PAGE.read_text() == OBJECTIVES.page(), "run `python docs/generate_objectives.py`"
    text = SCALING.PAGE.read_text()
    assert text == SCALING.page(text), "run `python docs/generate_scaling.py`"


def test_every_objective_and_option_is_on_the_page():
    table = [line for line in OBJECTIVES.PAGE.read_text().splitlines() if line.startswith("| [")]
    rows = dict(line.removeprefix("| [").split("]", 1) for line in table)
    assert rows.keys() == set(gk.objectives.__all__)
    for name, cls in OBJECTIVES.classes().items():
        assert all(f"{field.name}=" in rows[name] for field in OBJECTIVES.own_fields(cls)), name
        assert all(f"`{needed}`" in rows[name] for needed in cls.needs), name


def test_the_plot_shows_coefficients():
    """GRPO's push is r A where not clipped, DPO's beta sigmoid(-h) with the better level at -1."""
    push, ratios = OBJECTIVES.push, torch.tensor([0.5, 1.0, 1.5])
    assert OBJECTIVES.PLOT.exists()
    assert push(gk.GRPO(), ratios, 1.0) == pytest.approx([0.5, 1.0, 0.0])
    assert push(gk.GRPO(), ratios, -1.0) == pytest.approx([0.0, -1.0, -1.5])
    sigmoid = torch.sigmoid(-0.1 * ratios.double().log())
    assert push(gk.DPO(), ratios, -1.0) == pytest.approx((2 * 0.1 * sigmoid).tolist())
    # the first has the larger covariance at A = 1, the other one at A = -1
    assert push(gk.KLCov(), ratios, 1.0) == pytest.approx([0.5 + 1, 1.0, 1.5 - 1])
    assert push(gk.KLCov(), ratios, -1.0) == pytest.approx([-0.5, -1.0, -1.5])


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_page_s_objective_is_served_by_every_entry_and_schedule(layout):
    objective = PAGE["Damped"]()
    case = make_case("linear", layout, "holes")
    reference = run(case, "linear_token_logprobs", objective, "reference")
    for schedule in ("auto", "aligned", "deferred", "two_pass"):
        options = {"schedule": schedule, "max_chunk_bytes": 4 * 61 * 4}
        got = run(case, "fused_linear_policy_loss", objective, **options)
        torch.testing.assert_close(got.loss, reference.loss, rtol=1e-5, atol=1e-6)
        for key, grad in got.grads.items():
            assert (grad != 0).any()
            torch.testing.assert_close(grad, reference.grads[key], rtol=1e-4, atol=1e-6)
    assert_equals_oracle(run(case, "fused_linear_policy_loss", gk.GSPO()), case, gk.GSPO())


def test_the_page_s_ratio_of_turns_is_that_of_tl_grpo():
    case = make_case("logprobs", "packed", "holes")
    turns = torch.arange(case.labels.numel()) // 2
    arguments = (case.inputs["logprobs"], case.old_logprobs, case.advantages)
    options = {"cu_seqlens": case.cu_seqlens, "loss_mask": case.loss_mask, "turn_ids": turns}
    mine = gk.policy_loss(*arguments, **options, objective=PAGE["PerTurn"]()).loss
    built_in = gk.TLGRPO(clip_low=0.1, clip_high=0.2)
    assert torch.equal(mine, gk.policy_loss(*arguments, **options, objective=built_in).loss)


def test_waiting_is_what_the_page_of_scaling_says():
    step = SCALING.Step()
    one, eight, sixteen = (SCALING.loss(step, tensor=ranks) for ranks in (1, 8, 16))
    assert one.waits == 0 < eight.waits < 0.02 * eight.work and sixteen.waits > sixteen.work
    short, long = (SCALING.loss(step._replace(tokens=n), context=8).waits for n in (2**14, 2**20))
    assert short == long


def test_a_step_is_counted_as_its_products_and_the_bytes_between_them():
    """4,096 rows of width 2,048 and V = 8,192: products are bound by operations, narrow ones by bytes."""
    step = SCALING.Step(tokens=4096, width=2048, vocabulary=8192, chunk_rows=4096)
    logits, weight, bandwidth = 4096 * 8192, 8192 * 2048, SCALING.BANDWIDTH
    bare = 6 * logits * 2048 / SCALING.OPERATIONS
    assert step.over_products(True) == pytest.approx(1 + 10 * logits / bandwidth / bare)
    assert step.over_products(True, held=True) == pytest.approx(1 + 6 * logits / bandwidth / bare)
    assert step.over_products(False) == pytest.approx(1 + (10 * logits + 8 * weight) / bandwidth / bare)
    assert SCALING.Step(width=64).product(1e9) == pytest.approx(1e9 / bandwidth)


def test_models_are_counted_and_fit_as_the_page_says():
    """Qwen2.5-7B's card: 7.61 billion parameters, 6.53 of them outside of the embeddings."""
    shape = SCALING.shape_of(SCALING.qwen2_5_7b())
    assert shape.parameters == 7_615_616_512
    assert shape.parameters - shape.rest == pytest.approx(6.53e9, rel=1e-3)
    heads = {"hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 8}
    sizes = (
        {"intermediate_size": 13824, "num_hidden_layers": 48},
        {"intermediate_size": 27648, "num_hidden_layers": 64},
    )
    shapes = [SCALING.shape_of(SCALING.qwen2_5_7b(**heads, **size)) for size in sizes]
    assert [round(shape.parameters / 1e9, 1) for shape in shapes] == [14.8, 32.8]
    sums = [sum(value for _, value in SCALING.training(shape, 8).values()) for shape in shapes]
    assert sums[0] < 0.9 * SCALING.GPU < SCALING.GPU < sums[1]


def test_weights_gradients_and_moments_are_those_of_a_run(tmp_path, rows, tokenizer):
    """16 bytes for each parameter, all in fp32; Adam's counters aside."""
    trainer = make_trainer(
        tokenizer, rows, odd_share, small_config(tmp_path, update={"precision": "bf16"}), eval_dataset=None
    )
    gradients = {}
    for parameter in trainer.model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: gradients.update({p: p.grad.nbytes}))
    trainer.update(batch_of(trainer))
    state = trainer.updater.optimizer.state.values()
    moments = sum(t.nbytes for each in state for t in each.values() if t.ndim > 0)
    table = SCALING.training(SCALING.shape_of(trainer.model.config), gpus=1)
    assert table["weights"][1] == sum(parameter.nbytes for parameter in trainer.model.parameters())
    assert table["AdamW's two moments"][1] == moments
    assert table["gradients"][1] == sum(gradients.values())


def test_a_layer_keeps_what_the_formula_counts():
    from transformers import Qwen2Config, Qwen2ForCausalLM

    T = 192
    config = Qwen2Config(
        vocab_size=64, hidden_size=256, intermediate_size=640, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model, kept = Qwen2ForCausalLM(config).bfloat16(), {}
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    hidden = torch.randn(1, T, 256, dtype=torch.bfloat16, requires_grad=True)
    rotation = model.model.rotary_emb(hidden, torch.arange(T).unsqueeze(0))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model.layers[0](hidden, position_embeddings=rotation, attention_mask=None)
    counted = sum(storage.nbytes() for place, storage in kept.items() if place not in own)
    assert SCALING.recomputed_layer(SCALING.shape_of(config), T) == pytest.approx(counted, rel=0.01)


def test_the_table_is_about_the_example():
    from gspo_kernels.trainer.config import load_config

    config = load_config(ROOT / "examples" / "seven_billion.yaml")
    assert config.update.micro_batch_tokens == SCALING.TOKENS
    assert config.rollout.batch_size == SCALING.AT_ONCE
    assert config.rollout.max_new_tokens <= SCALING.LENGTH
