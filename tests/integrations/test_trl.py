"""``FusedGRPOTrainer`` and TRL's own trainer: losses, whole runs, options, two processes, images.

A loss, its gradient and its metrics are compared in fp64 on inputs made by hand, so that options that need
vLLM are covered and every ratio, mask and weight matters. Runs begin at the same weights and see the same
rollouts. TRL and TRL with a plain log-softmax end 1e-7 apart; the bounds are far below the effect of one
wrong coefficient.
"""

import importlib
import sys
import warnings
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.integrations.errors import IntegrationError
from tests.draws import shifted_seed
from tests.forks import in_processes

pytest.importorskip("trl", reason='TRL is missing: pip install "gspo_kernels[trl]"')

from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from datasets import Dataset
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOTrainer

from gspo_kernels.integrations.trl import FusedGRPOTrainer
from tests.integrations.tiny_models import largest_allocation
from tests.integrations.trl_problem import (
    configuration,
    make_tokenizer,
    make_trainer,
    reward,
    save_model,
    whole,
)
from tests.trainer.conftest import nothing_in_single_precision

CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
OURS_ALONE = {"ratio/min", "ratio/max", "active_fraction"}
"""Metrics that TRL's trainer does not have."""
IMAGE = 250


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    saved = {name: save_model(tmp_path_factory.mktemp(name), name) for name in ("qwen3", "qwen3_moe")}
    return saved | {"gemma3": save_gemma3(tmp_path_factory.mktemp("gemma3"))}


def save_gemma3(folder):
    """Save a vision-language model: an image is four tokens, which attend to each other."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    text = sizes | {
        "vocab_size": 300, "num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 16,
        "sliding_window": 8, "initializer_range": 0.3, "max_position_embeddings": 64,
        "query_pre_attn_scalar": 16,
    }  # fmt: skip
    vision = sizes | {"num_hidden_layers": 1, "image_size": 16, "patch_size": 4}
    torch.manual_seed(shifted_seed(0))
    config = Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=IMAGE,
        boi_token_index=IMAGE + 1, eoi_token_index=IMAGE + 2,
    )  # fmt: skip
    model = Gemma3ForConditionalGeneration(config)
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight)  # zero by default
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def model_path(models):
    return models["qwen3"]


# ------------------------------------------------------ one loss


def token(kind):
    return {"loss_type": kind, "epsilon": 0.02, "epsilon_high": 0.03}


def sequence(kind):
    levels = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}
    return {"loss_type": kind, **levels}


GSPO, GRPO, DAPO, VESPO = sequence("grpo"), token("grpo"), token("dapo"), {"loss_type": "vespo"}


@dataclass
class Case:
    """Options of GRPOConfig, names of optional inputs of the loss, and attributes of the trainer."""

    options: dict
    inputs: tuple = ("old_per_token_logps",)
    attributes: dict = field(default_factory=dict)
    model: str = "qwen3"
    ours: dict = field(default_factory=dict)


def also(*inputs):
    return ("old_per_token_logps", *inputs)


def vllm(options, ratio):
    return Case(options, also(ratio), {"use_vllm": True, "vllm_importance_sampling_correction": True})


BONUS = {"entropy_coef": 0.1}
HIGH_ENTROPY = {"top_entropy_quantile": 0.4}
OFF_POLICY = {"off_policy_mask_threshold": 5e-4}
KL = {"beta": 0.1}
MEASURED = {"_last_world_entropy": 5.0}
ADAPTIVE = BONUS | {"use_adaptive_entropy": True, "entropy_target": 6.0}
# exact in fp32, unlike 1.05: TRL rounds these temperatures to fp32
SAPO = {"loss_type": "sapo", "sapo_temperature_neg": 1.0625}
# the grouped product has no fp64
EAGER = {"model_init_kwargs": {"experts_implementation": "eager"}}
EVERYTHING = KL | BONUS | HIGH_ENTROPY | OFF_POLICY

# The loss of each case differs from all others: no option is without effect.
CASES = {
    **{f"{kind}, token": Case(token(kind)) for kind in CLIPPED},
    **{f"{kind}, sequence": Case(sequence(kind)) for kind in CLIPPED},
    "cispo, token": Case(token("cispo") | {"epsilon_high": 1.03}),
    "cispo, GRPOConfig's default": Case({"loss_type": "cispo"}),
    "cispo, sequence": Case(sequence("cispo") | {"epsilon_high": 1.0004}),
    "sapo, token": Case(SAPO),
    "sapo, sequence": Case(sequence("sapo") | SAPO),
    "vespo, token": Case(VESPO),
    "vespo, sequence, KL": Case(sequence("vespo") | KL),
    "vespo, token, KL": Case(VESPO | KL),
    "dual clip, token": Case(GRPO | {"delta": 1.04}),
    "dual clip, sequence": Case(GSPO | {"delta": 1.0005}),
    "epsilon above 1": Case(GRPO | {"epsilon": 1.5}),
    "KL": Case(GSPO | KL),
    "KL, unweighted": Case(GSPO | KL | {"use_bias_correction_kl": False}),
    "tool mask": Case(GSPO, also("tool_mask")),
    "temperature": Case(GSPO | {"temperature": 0.7}),
    "high entropy tokens, luspo": Case(sequence("luspo") | HIGH_ENTROPY),
    "high entropy tokens, vespo": Case(VESPO | HIGH_ENTROPY),
    "off-policy mask": Case(GSPO | OFF_POLICY),
    "off-policy mask, vespo": Case(VESPO | OFF_POLICY),
    "off-policy mask, sampled": Case(GSPO | OFF_POLICY, also("sampling_per_token_logps")),
    "entropy bonus, dr_grpo": Case(token("dr_grpo") | BONUS),
    "adaptive entropy": Case(GSPO | ADAPTIVE, attributes=MEASURED),
    "experts": Case(GSPO | EAGER | {"router_aux_loss_coef": 0.5}, model="qwen3_moe"),
    "vLLM, sequence weights": vllm(GSPO, "sequence_ratio"),
    "vLLM, token weights": vllm(GSPO, "token_ratio"),
    "vLLM, token weights, dapo": vllm(DAPO, "token_ratio"),
    "vLLM, everything": vllm(GSPO | EVERYTHING, "token_ratio"),
    "vLLM, everything, vespo": vllm(VESPO | EVERYTHING, "token_ratio"),
}
WITHOUT_EFFECT = {
    "on-policy": Case(GSPO, inputs=()),
    "adaptive entropy above the target": Case(GSPO | ADAPTIVE | {"entropy_target": 4.0}, attributes=MEASURED),
}


@pytest.fixture(scope="module")
def problem(models, tmp_path_factory):
    """Return all inputs of the loss that a case may need, in fp64."""

    rng = torch.Generator().manual_seed(shifted_seed(1))
    B, P, C = 7, 4, 8
    prompt_mask = (torch.arange(P) >= torch.tensor([0, 1, 2, 0, 3, 0, 1]).unsqueeze(1)).long()
    # The last completion is fully masked, as TRL does with truncated ones.
    completion_mask = (torch.arange(C) < torch.tensor([8, 3, 5, 6, 1, 7, 0]).unsqueeze(1)).long()
    inputs = {
        "prompt_ids": torch.randint(200, (B, P), generator=rng),
        "prompt_mask": prompt_mask,
        "completion_ids": torch.randint(200, (B, C), generator=rng),
        "completion_mask": completion_mask,
        "advantages": torch.tensor([1.0, -1.0, 0.8, -0.5, 0.0, -1.5, 1.2], dtype=torch.float64),
        "num_items_in_batch": completion_mask.sum() * 3,
    }
    tool_mask = (torch.rand((B, C), generator=rng) > 0.3).long()

    def spread(scale):
        noise = scale * torch.randn((B, C), generator=rng, dtype=torch.float64) * completion_mask
        means = noise.sum(1, keepdim=True) / completion_mask.sum(1, keepdim=True).clamp(min=1)
        return (noise - means) * completion_mask

    trainer = make_trainer(GRPOTrainer, models["qwen3"], tmp_path_factory.mktemp("theirs"), **GSPO)
    trainer.model.double()
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    with torch.no_grad():
        logprobs, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, torch.cat([prompt_mask, completion_mask], 1), C
        )
    # log s is on both sides of both bounds, and beyond the bound of the dual clip
    log_s = torch.tensor([6e-4, -6e-4, 2e-4, 2e-4, 0.0, 7e-4, 5e-4], dtype=torch.float64).unsqueeze(1)
    weights = 1 + 0.3 * torch.randn((B, C), generator=rng, dtype=torch.float64)
    return inputs | {
        "old_per_token_logps": logprobs - (log_s + spread(0.05)) * completion_mask,
        "ref_per_token_logps": logprobs - spread(0.2),
        "sampling_per_token_logps": logprobs + spread(0.1) + 0.1 * completion_mask,
        "tool_mask": tool_mask,
        # as from the corrections for vLLM: weights, 0 where masked, and 1 on padding
        "token_ratio": torch.where(completion_mask == 0, 1.0, torch.where(weights < 1.4, weights, 0.0)),
        "sequence_ratio": torch.tensor([1.2, 0.7, 0.0, 1.5, 1.0, 0.9, 1.0], dtype=torch.float64).unsqueeze(1),
    }  # fmt: skip


def evaluate(kind, models, folder, case, *problems):
    """Return the loss and metrics of the last problem, and the gradient of all over all weights, in fp64."""
    trainer = make_trainer(kind, models[case.model], folder, ours=case.ours, **case.options)
    trainer.model.double().train()
    trainer.current_gradient_accumulation_steps = 2
    for name, value in case.attributes.items():
        setattr(trainer, name, value)
    for problem in problems:
        always = [name for name in problem if not name.endswith(("_logps", "_ratio", "tool_mask"))]
        names = [*always, *case.inputs, *(["ref_per_token_logps"] if case.options.get("beta") else [])]
        inputs = {
            "importance_sampling_ratio" if name.endswith("_ratio") else name: problem[name] for name in names
        }
        with nothing_in_single_precision():
            loss = trainer.compute_loss(trainer.model, inputs)
            loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    return loss.item(), gradient, metrics


LOSSES = {}
"""The cases that had a loss."""


@pytest.mark.parametrize("name", CASES | WITHOUT_EFFECT)
def test_loss_gradient_and_metrics_are_those_of_trl(name, models, problem, tmp_path):
    loss = assert_as_trl(models, tmp_path, (CASES | WITHOUT_EFFECT)[name], problem)
    assert name in WITHOUT_EFFECT or LOSSES.setdefault(loss, name) == name


LENGTH = {"aggregation_constant": 8}


@pytest.mark.parametrize(
    ("objective", "like"),
    [
        (gk.GSPO(), GSPO),
        (gk.DAPO(0.02, 0.03), DAPO),
        (gk.GRPO(0.02, 0.03, dual_clip=1.04), GRPO | {"delta": 1.04}),
        (gk.DrGRPO(0.02, 0.03, **LENGTH), token("dr_grpo")),
        (gk.CISPO(max_ratio=1.03), token("cispo") | {"epsilon_high": 1.03}),
        (gk.GRPO(0.02, 0.03, aggregation="sum"), None),
    ],
    ids=lambda value: "" if isinstance(value, dict) else type(value).__name__,
)
def test_an_objective_takes_the_place_of_options(objective, like, models, problem, tmp_path):
    """The step's loss and gradient are those of the options; a sum is the mean times the tokens."""
    also, near = EVERYTHING if like else {}, 1e-6 if like else 1e-9
    mine = Case(also, ours={"objective": objective})
    loss, gradient, metrics = evaluate(FusedGRPOTrainer, models, tmp_path, mine, problem)
    want, expected, _ = evaluate(GRPOTrainer, models, tmp_path, Case((like or DAPO) | also), problem)
    steps, accumulated = 4, 2
    share = 1.0 if like else problem["num_items_in_batch"].item() * accumulated / steps
    assert loss == pytest.approx(share * want, rel=near, abs=1e-7 if like else 1e-12)
    assert (gradient - share * expected).abs().max() <= near * share * expected.abs().max()
    assert "clip_fraction/tokens" in metrics and not any(name.startswith("clip_ratio") for name in metrics)
    assert ("kl/ref" in metrics) == (like is not None)


def test_images_reach_the_loss(models, problem, tmp_path):
    """Each prompt is one image."""
    case, rng = Case(GSPO, model="gemma3"), torch.Generator().manual_seed(shifted_seed(1))
    prompts = torch.full_like(problem["prompt_ids"], IMAGE)
    given = problem | {
        "prompt_ids": prompts,
        "token_type_ids": (torch.cat([prompts, problem["completion_ids"]], 1) == IMAGE).long(),
        "pixel_values": torch.rand(len(prompts), 3, 16, 16, generator=rng, dtype=torch.float64),
        "num_images": [1] * len(prompts),
    }
    seen = assert_as_trl(models, tmp_path, case, given)
    blank = given | {"pixel_values": torch.zeros_like(given["pixel_values"])}
    assert abs(evaluate(GRPOTrainer, models, tmp_path, case, blank)[0] - seen) > 1e-3


def assert_as_trl(models, tmp_path, case, problem):
    """Check that loss, gradient and metrics equal TRL's; return the loss."""
    loss, gradient, metrics = evaluate(GRPOTrainer, models, tmp_path, case, problem)
    ours, our_gradient, our_metrics = evaluate(FusedGRPOTrainer, models, tmp_path, case, problem)
    near = 1e-6 if "entropy_coef" in case.options else 1e-9  # coefficients of the bonus are fp32
    assert ours == pytest.approx(loss, rel=near, abs=1e-12)
    assert (our_gradient - gradient).abs().max() <= near * gradient.abs().max()
    assert gradient.abs().max() > 1e-3
    assert set(our_metrics) == set(metrics) | OURS_ALONE
    for key, value in metrics.items():
        assert our_metrics[key] == pytest.approx(value, rel=near, abs=1e-12), key
    return loss


# ------------------------------------------------------ whole runs

# Clip ranges of `token` and `sequence` are narrow enough to clip within a rollout's four steps.
ACCUMULATING = {"gradient_accumulation_steps": 2, "num_iterations": 2}
MASKS = {"tool_tokens": True, "mask_truncated_completions": True}
RUNS = {
    "gradient accumulation, reference model": GSPO | ACCUMULATING | KL,
    "gradient accumulation, dapo, masks": DAPO | ACCUMULATING | MASKS,
    "gradient checkpointing, adaptive entropy": GSPO | {"gradient_checkpointing": True} | ADAPTIVE,
    "LoRA, reference by disabled adapter": GSPO | {"adapter": "LoRA", "beta": 0.1, "learning_rate": 0.5},
}


def train(kind, model_path, folder, *, adapter=None, sharded=False, steps=5, **options):
    """Train under FSDP2 if ``sharded``, under DDP if there are several processes.

    Return the trained weights before and after, and the log.
    """
    if adapter is not None:
        from peft import LoraConfig

        torch.manual_seed(shifted_seed(7))
        adapter = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    trainer = make_trainer(kind, model_path, folder, peft_config=adapter, max_steps=steps, **options)
    before = whole(trainer.model.parameters())
    if sharded:
        # accelerate ignores an FSDP plugin on CPUs and runs DDP, so the plugin goes into its state here
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Qwen3DecoderLayer"],
        )
        if options.get("bf16"):
            plugin.set_mixed_precision("bf16")
        state = trainer.accelerator.state
        state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin
        trainer.is_fsdp_enabled = True
    trainer.train()
    parameters = list(trainer.model_wrapped.parameters())
    assert all(isinstance(p, DTensor) == sharded for p in parameters)
    if torch.distributed.is_initialized():
        assert sharded or isinstance(trainer.model_wrapped, DistributedDataParallel)
    return before, whole(parameters).float(), trainer.state.log_history[:-1]


@pytest.mark.parametrize("name", RUNS)
def test_a_run_ends_at_the_weights_of_trl(name, model_path, tmp_path):
    options = RUNS[name]
    before, theirs, their_log = train(GRPOTrainer, model_path, tmp_path, **options)
    same, ours, log = train(FusedGRPOTrainer, model_path, tmp_path, **options)
    assert torch.equal(same, before)
    distance = (ours - theirs).norm() / theirs.norm()
    assert distance <= 1e-5
    assert (theirs - before).norm() / theirs.norm() > 100 * distance
    for entry, their_entry in zip(log, their_log, strict=True):
        assert set(entry) == set(their_entry) | OURS_ALONE
        assert entry.get("reward") == their_entry.get("reward")
    clipped = [entry["clip_ratio/region_mean"] for entry in log]
    assert any(0 < share < 1 for share in clipped)


def assert_unchanged(entry):
    """Check ratios of equal weights. TRL shuffles rows after scoring, so the head may round them otherwise.

    Of 160 fresh minibatches on AVX2 seven differed, by 5e-7 at most.
    """
    assert entry["ratio/min"] == pytest.approx(1.0, abs=1e-6)
    assert entry["ratio/max"] == pytest.approx(1.0, abs=1e-6)
    assert entry["clip_ratio/region_mean"] == 0.0


def test_in_bf16_equal_weights_have_a_ratio_of_1(model_path, tmp_path):
    """Old and reference log-probs come from the head that the loss uses; bf16 is GRPOConfig's default."""
    options = GSPO | {"bf16": True, "beta": 0.1}
    _, _, log = train(FusedGRPOTrainer, model_path, tmp_path, **options)
    assert_unchanged(log[0])
    assert_unchanged(log[4])
    assert 0 <= log[0]["kl"] < 1e-12
    # In steps between, the optimizer has moved the weights.
    assert log[1]["ratio/min"] < log[1]["ratio/max"] - 1e-4
    assert max(moved["clip_ratio/region_mean"] for moved in log[1:4]) > 0.0


# ------------------------------------------------------ options and setups


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_liger_kernel": True}, "use_liger_kernel: got True"),
        ({"loss_type": "ppo"}, "loss_type: got 'ppo', expected one of 'grpo', 'sapo'"),
        (GSPO | {"importance_sampling_level": "turn"}, "importance_sampling_level: got 'turn'"),
        (GRPO | {"epsilon_high": 0.3, "delta": 1.2}, r"delta: got 1.2, .* above 1 \+ epsilon_high = 1.3"),
        (token("cispo") | {"epsilon_high": 0.0}, "epsilon_high: got 0.0, expected a positive number"),
        ({"epsilon": -0.1}, "epsilon: got -0.1, expected a finite number of at least 0"),
        ({"loss_type": "sapo", "sapo_temperature_neg": 0.0}, "sapo_temperature_neg: got 0.0"),
        ({"loss_type": "vespo", "vespo_k_pos": -1.0}, "vespo_k_pos: got -1.0"),
        ({"loss_type": "dr_grpo", "max_completion_length": None}, "max_completion_length: "),
        ({"temperature": 0.0}, "temperature: "),
        ({"beta": float("nan")}, "beta: got nan"),
        (KL | {"ours": {"objective": gk.GPG()}}, "use_bias_correction_kl: got True"),
        ({"ours": {"memory": "lots"}}, "memory: got 'lots'"),
        ({"ours": {"max_chunk_bytes": 0}}, "max_chunk_bytes: got 0"),
        ({"ours": {"max_chunk_bytes": 4, "memory": "least"}}, "max_chunk_bytes: got 4, expected None"),
        ({"ours": {"objective": gk.GSPO}}, "objective: got the class GSPO"),
        ({"ours": {"objective": gk.DPO()}}, "objective: DPO needs ref_logprobs and group_ids"),
        (GSPO | {"ours": {"objective": gk.GSPO()}}, "epsilon: got 0.0003, expected GRPOConfig's default"),
    ],
)
def test_options_that_are_refused(options, message, tmp_path):
    """Options are checked before the model is loaded."""
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        make_trainer(FusedGRPOTrainer, "no such model", tmp_path, **options)


CHANGED = {
    "_compute_loss": lambda self, inputs, model: None,
    "_get_per_token_logps_and_entropies": lambda self, model, input_ids, attention_mask: None,
    "get_high_entropy_mask": lambda self, entropies, threshold, mask: None,
    "get_off_policy_mask": None,
}


def test_newer_versions_of_trl(monkeypatch, models, problem, tmp_path):
    """They are served until a function changes its parameters, or the loss changes its value."""
    adapter = "gspo_kernels.integrations.trl"
    monkeypatch.setattr("gspo_kernels.integrations.errors.version", lambda name: "99.0")
    monkeypatch.delitem(sys.modules, adapter)
    newer = importlib.import_module(adapter).FusedGRPOTrainer
    for name, function in CHANGED.items():
        with monkeypatch.context() as patch:
            patch.setattr(GRPOTrainer, name, function)
            patch.delitem(sys.modules, adapter)
            with pytest.raises(IntegrationError, match=rf"^trl: GRPOTrainer\.{name} .* in version 99"):
                importlib.import_module(adapter)
    theirs = GRPOTrainer._compute_loss
    monkeypatch.setattr(GRPOTrainer, "_compute_loss", lambda *given: 1.5 * theirs(*given))
    # on-policy the loss is their mean, 0, as the last completion is masked
    values = torch.tensor([1.0, -1.0, 0.8, -0.5, 1.2, -1.5, 1.2], dtype=torch.float64)
    no_loss, no_advantages = (problem | {"advantages": each} for each in (values, 0 * values))
    on_policy = Case(GRPO, inputs=())
    evaluate(newer, models, tmp_path, on_policy, no_advantages)  # there is nothing to compare yet
    for case, steps in (
        (Case(GRPO), [problem]),
        (on_policy, [no_loss]),
        (on_policy, [no_advantages, no_loss]),
    ):
        with pytest.raises(IntegrationError, match=r"GRPOTrainer\._compute_loss has a different gradient"):
            evaluate(newer, models, tmp_path, case, *steps)
    monkeypatch.setattr(f"{adapter}._compare_gradients", lambda *given: True)
    with pytest.raises(IntegrationError, match=r"GRPOTrainer\._compute_loss returns a different loss"):
        evaluate(newer, models, tmp_path, Case(GRPO), problem)


def test_sequences_in_parts_are_refused(tmp_path, monkeypatch):
    """TRL does not check accelerate's ParallelismConfig."""
    for name in ("cp_size", "sp_size"):
        accelerator = SimpleNamespace(parallelism_config=ParallelismConfig(**{name: 2}))
        monkeypatch.setattr(GRPOTrainer, "accelerator", accelerator, raising=False)
        monkeypatch.setattr(GRPOTrainer, "__init__", lambda self, *given, **named: None)
        with pytest.raises(IntegrationError, match=f"{name}: accelerate's ParallelismConfig has 2"):
            make_trainer(FusedGRPOTrainer, "no such model", tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (GSPO, None),
        (GSPO | {"epsilon_high": 0.2}, "epsilon=3e-4, epsilon_high=4e-4"),
        ({"loss_type": "grpo"}, None),
        ({"loss_type": "cispo"}, "epsilon_high: 0.2 is"),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, None),
    ],
)
def test_ranges_that_are_rarely_meant_are_warned_about(options, message, tmp_path):
    """GRPOConfig's default caps CISPO's weights at 0.2, which trains at a fifth of the rate, in TRL too."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(OSError, match="no such model"):
            FusedGRPOTrainer("no such model", None, configuration(tmp_path, **options))
    said = [str(each.message) for each in caught if str(each.message).startswith("epsilon")]
    assert len(said) == (message is not None) and all(message in each for each in said)


@pytest.mark.parametrize("options", [{}, {"bf16": True, "cast_lm_head_to_fp32": True}], ids=str)
def test_log_probs_equal_trl(options, model_path, tmp_path):
    """Keywords and positions both work."""
    ids = torch.randint(200, (4, 9), generator=torch.Generator().manual_seed(shifted_seed(3)))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "logits_to_keep": 6}
    ours, theirs = (
        make_trainer(kind, model_path, tmp_path, **GSPO | options) for kind in (FusedGRPOTrainer, GRPOTrainer)
    )
    with torch.no_grad():
        expected = theirs._get_per_token_logps_and_entropies(
            model=theirs.model, **given, compute_entropy=True
        )
        got = ours._get_per_token_logps_and_entropies(model=ours.model, **given, compute_entropy=True)
        placed = ours._get_per_token_logps_and_entropies(ours.model, *given.values(), 2, True)
        assert ours._get_per_token_logps_and_entropies(ours.model, **given)[1] is None
    expected, got, placed = (torch.stack(each[:2]).double() for each in (expected, got, placed))
    torch.testing.assert_close(placed, got, rtol=1e-5, atol=1e-6)
    assert (expected - got).abs().max() <= 4 * torch.finfo(torch.float32).eps * got.abs().max()


def test_generation_and_evaluation_are_trls(model_path, tmp_path):
    """Without a rollout function, TRL generates with the patched model and evaluates with our loss."""

    logs = []
    prompts = Dataset.from_dict({"prompt": ["ab", "cde", "a", "b", "fg", "gf", "c", "hh"]})
    options = {"per_device_eval_batch_size": 8, "temperature": 3.0, "gradient_accumulation_steps": 2}
    for kind in (GRPOTrainer, FusedGRPOTrainer):
        trainer = kind(
            model_path,
            reward,
            configuration(tmp_path, loss_type="cispo", epsilon_high=5.0, **options),
            train_dataset=prompts,
            eval_dataset=prompts,
            processing_class=make_tokenizer(),
        )
        logs.append(trainer.evaluate())
        trainer.train()
        logs[-1] |= trainer.state.log_history[0]
    theirs, mine = logs
    both = OURS_ALONE | {f"eval_{name}" for name in OURS_ALONE}
    assert mine.keys() == theirs.keys() | both
    assert theirs["eval_loss"] != 0.0
    for key in ("eval_reward", "reward", "completions/mean_length"):
        assert mine[key] == theirs[key]
    for key in ("eval_loss", "loss"):
        assert mine[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-7)


# ------------------------------------------------------ two processes


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["DDP", "FSDP2"])
def test_two_processes_end_at_the_weights_of_trl(sharded, model_path, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")

    def run(kind, steps, **options):
        AcceleratorState._reset_state()
        return train(kind, model_path, tmp_path, sharded=sharded, steps=steps, **options)

    def work(rank):
        options = GSPO if sharded else DAPO
        (start, theirs, _), (_, ours, log) = (
            run(kind, 2, **options) for kind in (GRPOTrainer, FusedGRPOTrainer)
        )
        distance = (ours - theirs).norm() / theirs.norm()
        assert distance <= 1e-5
        assert (theirs - start).norm() / start.norm() > 100 * distance
        assert_unchanged(log[0])
        assert 0 < log[1]["clip_ratio/region_mean"] < 1 and log[1]["ratio/min"] < 1 - 1e-4
        # Weights and gathered metrics are the same in both processes.
        seen = [None, None]
        gathered = [[e[key] for e in log] for key in (*OURS_ALONE, "clip_ratio/region_mean")]
        torch.distributed.all_gather_object(seen, (ours, gathered))
        assert torch.equal(seen[0][0], seen[1][0]) and seen[0][1] == seen[1][1]
        if not sharded:
            return
        # accelerate's policy rounds inputs and outputs of model and head; this must not change ratios
        *_, rounded = run(FusedGRPOTrainer, 5, bf16=True, **GSPO)
        assert_unchanged(rounded[0])
        assert_unchanged(rounded[4])
        assert rounded[1]["ratio/min"] < 1.0 - 1e-4 and rounded[1]["ratio/max"] > 1.0
        # With unchanged weights the loss is a mean of advantages, which bf16 cannot represent.
        assert rounded[0]["loss"] == pytest.approx(log[0]["loss"], rel=1e-6)
        assert rounded[0]["loss"] != torch.tensor(rounded[0]["loss"]).bfloat16().item()

    in_processes(2, work)


@pytest.mark.parametrize("parts", (1, 4))
def test_largest_allocation_is_the_chunk_of_logits(tmp_path, parts):
    """The default chunk holds the logits of all completions; ``max_chunk_bytes`` bounds it."""
    B, T, V, H = 4, 32, 8192, 64
    logits = B * T * V * 4
    config = Qwen3Config(
        vocab_size=V, hidden_size=H, intermediate_size=H, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=H,
    )  # fmt: skip
    trainer = FusedGRPOTrainer(
        Qwen3ForCausalLM(config), reward,
        configuration(tmp_path, per_device_train_batch_size=B, num_generations=B),
        train_dataset=Dataset.from_dict({"prompt": ["a"] * B}), processing_class=make_tokenizer(),
        **({} if parts == 1 else {"max_chunk_bytes": logits // parts}),
    )  # fmt: skip
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    ids, ones = torch.randint(V, (B, 16 + T)), torch.ones(B, 16 + T, dtype=torch.int64)
    batch = {
        "prompt_ids": ids[:, :16], "prompt_mask": ones[:, :16], "completion_ids": ids[:, 16:],
        "completion_mask": ones[:, 16:], "advantages": torch.ones(B),
        "old_per_token_logps": torch.zeros(B, T), "num_items_in_batch": torch.tensor(B * T),
    }  # fmt: skip
    largest = largest_allocation(lambda: trainer.compute_loss(trainer.model, batch).backward())
    most = logits // parts + (0 if parts == 1 else 2**20)
    assert most / 2 <= largest <= most
