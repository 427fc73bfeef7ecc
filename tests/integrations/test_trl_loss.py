"""One loss, gradient and set of metrics beside TRL's own ``_compute_loss``, judged by plain PyTorch in fp64.

Inputs are made by hand, so that options which need vLLM are covered and every ratio, mask and weight matters.
"""

import importlib.util
from dataclasses import dataclass, field

import pytest
import torch

from tests.draws import shifted_seed

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason='TRL is missing: pip install "gspo_kernels[trl]"'
)

EPS = torch.finfo(torch.float32).eps
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


def token(kind):
    return {"loss_type": kind, "epsilon": 0.02, "epsilon_high": 0.03}


def sequence(kind):
    levels = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}
    return {"loss_type": kind, **levels}


GSPO, GRPO, DAPO, VESPO = sequence("grpo"), token("grpo"), token("dapo"), {"loss_type": "vespo"}


@dataclass
class Case:
    """GRPOConfig's options ``like`` another case, and what this one is about: it must change the loss.

    ``changes`` are further options, ``inputs`` replace the loss's inputs, ``attributes`` the trainer's.
    """

    like: dict
    changes: dict = field(default_factory=dict)
    inputs: tuple = ("old_per_token_logps",)
    attributes: dict = field(default_factory=dict)
    matters: bool = True
    model: str = "qwen3"

    @property
    def options(self):
        return self.like | self.changes


def also(*inputs):
    return ("old_per_token_logps", *inputs)


def vllm(like, ratio, **changes):
    correcting = {"use_vllm": True, "vllm_importance_sampling_correction": True}
    return Case(like, changes, also(ratio), correcting)


BONUS = {"entropy_coef": 0.1}
HIGH_ENTROPY = {"top_entropy_quantile": 0.4}
OFF_POLICY = {"off_policy_mask_threshold": 5e-4}
KL = {"beta": 0.1}
MEASURED = {"_last_world_entropy": 5.0}
# TRL rounds these temperatures to fp32, so not 1.05
SAPO = {"loss_type": "sapo", "sapo_temperature_neg": 1.0625}
# the grouped product has no fp64
EAGER = {"router_aux_loss_coef": 0.0, "model_init_kwargs": {"experts_implementation": "eager"}}
ROUTERS = {"router_aux_loss_coef": 0.5}
EVERYTHING = KL | BONUS | HIGH_ENTROPY | OFF_POLICY

CASES = {
    **{f"{kind}, token": Case(token(kind)) for kind in CLIPPED},
    **{f"{kind}, sequence": Case(sequence(kind)) for kind in CLIPPED},
    "cispo, token": Case(token("cispo") | {"epsilon_high": 1.03}),
    "cispo, GRPOConfig's default": Case({"loss_type": "cispo"}),
    "cispo, sequence": Case(sequence("cispo") | {"epsilon_high": 1.0004}),
    "sapo, token": Case(SAPO),
    "sapo, sequence": Case(sequence("sapo") | SAPO),
    "vespo, token": Case(VESPO),
    "vespo, sequence": Case(sequence("vespo"), KL),
    "on-policy": Case(GSPO, inputs=()),
    "dual clip, token": Case(GRPO, {"delta": 1.04}),
    "dual clip, sequence": Case(GSPO, {"delta": 1.0005}),
    "epsilon of 1": Case(GRPO, {"epsilon": 1.0}),
    "epsilon above 1": Case(GRPO, {"epsilon": 1.5}),
    "KL": Case(GSPO, KL),
    "KL, unweighted": Case(GSPO | KL, {"use_bias_correction_kl": False}),
    "KL, dapo": Case(DAPO, KL),
    "KL, dr_grpo": Case(sequence("dr_grpo"), KL),
    "KL, vespo": Case(VESPO, KL),
    "tool mask": Case(GSPO, inputs=also("tool_mask")),
    "tool mask, dapo": Case(DAPO, inputs=also("tool_mask")),
    "temperature": Case(GSPO, {"temperature": 0.7}),
    "high entropy tokens": Case(GSPO, HIGH_ENTROPY),
    "high entropy tokens, luspo": Case(sequence("luspo"), HIGH_ENTROPY),
    "high entropy tokens, vespo": Case(VESPO, HIGH_ENTROPY),
    "off-policy mask": Case(GSPO, OFF_POLICY),
    "off-policy mask, vespo": Case(VESPO, OFF_POLICY),
    "off-policy mask, sampled": Case(GSPO | OFF_POLICY, inputs=also("sampling_per_token_logps")),
    "entropy bonus": Case(GSPO, BONUS),
    "entropy bonus, dr_grpo": Case(token("dr_grpo"), BONUS),
    "entropy bonus, high entropy tokens": Case(GSPO | HIGH_ENTROPY, BONUS),
    "adaptive entropy": Case(
        GSPO, BONUS | {"use_adaptive_entropy": True, "entropy_target": 6.0}, attributes=MEASURED
    ),
    "adaptive entropy, idle": Case(
        GSPO,
        BONUS | {"use_adaptive_entropy": True, "entropy_target": 4.0},
        attributes=MEASURED,
        matters=False,
    ),
    "experts": Case(GSPO | EAGER, ROUTERS, model="qwen3-moe"),
    "experts, high entropy tokens": Case(GSPO | EAGER | HIGH_ENTROPY, ROUTERS, model="qwen3-moe"),
    "vLLM, sequence weights": vllm(GSPO, "sequence_ratio"),
    "vLLM, token weights": vllm(GSPO, "token_ratio"),
    "vLLM, token weights, dapo": vllm(DAPO, "token_ratio"),
    "vLLM, token weights, vespo": vllm(VESPO, "token_ratio", **KL),
    "vLLM, everything": vllm(GSPO, "token_ratio", **EVERYTHING),
    "vLLM, everything, vespo": vllm(VESPO, "token_ratio", **EVERYTHING),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    from tests.integrations.trl_problem import save_model

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    return {
        "qwen3": save_model(tmp_path_factory.mktemp("qwen3")),
        "qwen3-moe": save_model(tmp_path_factory.mktemp("qwen3-moe"), **experts),
    }


@pytest.fixture(scope="module")
def problem(models, tmp_path_factory):
    """Inputs of the loss in fp64, all that any case asks for."""
    from tests.integrations.trl_problem import PlainTrainer, make_trainer

    rng = torch.Generator().manual_seed(shifted_seed(1))
    B, P, C = 7, 4, 8
    prompt_mask = (torch.arange(P) >= torch.tensor([0, 1, 2, 0, 3, 0, 1]).unsqueeze(1)).long()
    # the last completion was truncated, so that TRL masks all of it
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

    trainer = make_trainer(PlainTrainer, models["qwen3"], tmp_path_factory.mktemp("plain"), **GSPO)
    trainer.model.double()
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    with torch.no_grad():
        logprobs, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids, torch.cat([prompt_mask, completion_mask], 1), C
        )
    # log s on both sides of both bounds, and beyond the dual clip's
    log_s = torch.tensor([6e-4, -6e-4, 2e-4, 2e-4, 0.0, 7e-4, 5e-4], dtype=torch.float64).unsqueeze(1)
    weights = 1 + 0.3 * torch.randn((B, C), generator=rng, dtype=torch.float64)
    return inputs | {
        "old_per_token_logps": logprobs - (log_s + spread(0.05)) * completion_mask,
        "ref_per_token_logps": logprobs - spread(0.2),
        "sampling_per_token_logps": logprobs + spread(0.1) + 0.1 * completion_mask,
        "tool_mask": tool_mask,
        # what vLLM's modes make: weights, zeros where they are masked, and 1 on padding
        "token_ratio": torch.where(completion_mask == 0, 1.0, torch.where(weights < 1.4, weights, 0.0)),
        "sequence_ratio": torch.tensor([1.2, 0.7, 0.0, 1.5, 1.0, 0.9, 1.0], dtype=torch.float64).unsqueeze(1),
    }  # fmt: skip


def selected(problem, case, dtype):
    """The inputs that a case asks for, floating ones in ``dtype``."""
    always = [name for name in problem if not name.endswith(("_logps", "_ratio", "tool_mask"))]
    names = [*always, *case.inputs, *(["ref_per_token_logps"] if case.options.get("beta") else [])]
    return {
        "importance_sampling_ratio" if name.endswith("_ratio") else name: problem[name].to(dtype)
        if problem[name].is_floating_point()
        else problem[name]
        for name in names
    }


def evaluate(kind, models, folder, case, problem, dtype=torch.float32, training=True):
    """Loss, gradient over all weights, and metrics."""
    from tests.integrations.trl_problem import make_trainer

    trainer = make_trainer(kind, models[case.model], folder, **case.options)
    trainer.model.to(dtype).train(training)
    trainer.current_gradient_accumulation_steps = 2
    for name, value in case.attributes.items():
        setattr(trainer, name, value)
    loss = trainer.compute_loss(trainer.model, selected(problem, case, dtype))
    gradient = None
    if training:
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in trainer.model.parameters()]).double()
    metrics = {name: values[-1] for name, values in trainer._metrics["train" if training else "eval"].items()}
    return loss.item(), gradient, metrics


def assert_close(name, ours, theirs, truth, scale):
    """Twice the other's error, and one rounding of the largest value that enters."""
    budget = 2 * abs(theirs - truth) + EPS * scale
    assert abs(ours - truth) <= budget, (name, ours, theirs, truth)


@pytest.mark.parametrize("name", CASES)
def test_loss_gradient_and_metrics_are_those_of_trl(name, models, problem, tmp_path):
    from trl import GRPOTrainer

    from gspo_kernels.integrations.trl import FusedGRPOTrainer
    from tests.integrations.trl_problem import PlainTrainer

    case = CASES[name]
    truth, exact, expected = evaluate(PlainTrainer, models, tmp_path, case, problem, torch.float64)
    theirs, their_gradient, their_metrics = evaluate(GRPOTrainer, models, tmp_path, case, problem)
    ours, gradient, metrics = evaluate(FusedGRPOTrainer, models, tmp_path, case, problem)

    largest = problem["old_per_token_logps"].abs().max() * problem["advantages"].abs().max()
    assert_close("loss", ours, theirs, truth, largest)
    error, budget = (gradient - exact).abs().max(), (their_gradient - exact).abs().max()
    assert error <= 2 * budget + EPS * exact.abs().max()
    assert exact.abs().max() > 1e-3
    assert set(metrics) == set(their_metrics) | {"ratio/min", "ratio/max", "active_fraction"}
    for key in their_metrics:
        assert_close(key, metrics[key], their_metrics[key], expected[key], largest)
    base = Case(case.like, model=case.model)
    if case != base:
        without = evaluate(PlainTrainer, models, tmp_path, base, problem, torch.float64)[0]
        assert (without != truth) == case.matters
