"""The same loss and gradient as TRL's own ``GRPOTrainer._compute_loss``, on ragged batches."""

import importlib.util
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

import gspo_kernels as gk
from tests.draws import shifted_seed

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("trl") is None, reason='TRL is missing: pip install "gspo_kernels[trl]"'
)

CLIP = {"clip_low": 0.2, "clip_high": 0.28}
SETTINGS = {
    "grpo": (gk.GRPO(**CLIP), {}),
    "grpo, sequence level": (gk.GSPO(**CLIP), {"importance_sampling_level": "sequence"}),
    "grpo, two-sided": (gk.GRPO(**CLIP, dual_clip=1.5), {"delta": 1.5}),
    "bnpo": (gk.BNPO(**CLIP), {}),
    "dr_grpo": (gk.DrGRPO(**CLIP, aggregation_constant=9), {}),
    "dapo": (gk.DAPO(), {}),
    "luspo": (gk.LUSPO(**CLIP), {"importance_sampling_level": "sequence"}),
    "cispo": (gk.CISPO(max_ratio=1.3), {"epsilon_high": 1.3}),
    "cispo, GRPOConfig's default": (gk.CISPO(max_ratio=0.2), {"epsilon_high": 0.2}),
    # TRL rounds the temperatures to fp32, so not 1.05
    "sapo": (gk.SAPO(tau_negative=1.0625), {}),
    "vespo": (gk.VESPO(), {}),
}


def trl_loss(loss_type, logprobs, old, advantages, mask, *, ref=None, beta=0.0, **options):
    """``_compute_loss`` of a trainer that is nothing but its settings, evaluating given log-probs."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    settings = {
        "importance_sampling_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.28, "delta": None,
        **options,
    }  # fmt: skip
    arguments = SimpleNamespace(
        delta=settings["delta"], use_bias_correction_kl=False, sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.0625, vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0,
        vespo_lambda_neg=2.0, steps_per_generation=1,
    )  # fmt: skip
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, sync_gradients=True
    )
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
        aux_loss_enabled=False, top_entropy_quantile=1.0, off_policy_mask_threshold=None, beta=beta,
        loss_type=loss_type, args=arguments, use_vllm=False, vllm_importance_sampling_correction=False,
        model=SimpleNamespace(training=True), current_gradient_accumulation_steps=1, accelerator=accelerator,
        max_completion_length=9, _entropy_bonus_enabled=False, entropy_coef=0.0,
        _metrics=defaultdict(lambda: defaultdict(list)), get_gamma_weights=GRPOTrainer.get_gamma_weights,
        importance_sampling_level=settings["importance_sampling_level"], epsilon_low=settings["epsilon_low"],
        epsilon_high=settings["epsilon_high"],
    )  # fmt: skip
    ids = torch.zeros(logprobs.shape, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1], "prompt_mask": torch.ones_like(ids[:, :1]), "completion_ids": ids,
        "completion_mask": mask.long(), "advantages": advantages, "old_per_token_logps": old,
        "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    if ref is not None:
        inputs["ref_per_token_logps"] = ref
    return GRPOTrainer._compute_loss(trainer, None, inputs)


@pytest.mark.parametrize("with_kl", [False, True])
@pytest.mark.parametrize("name", SETTINGS)
def test_equals_trl(name, with_kl):
    objective, options = SETTINGS[name]
    loss_type = name.split(",")[0]
    rng = torch.Generator().manual_seed(shifted_seed(4))
    shape = (5, 8)
    start = -torch.rand(shape, generator=rng, dtype=torch.float64) - 0.1
    shift = torch.tensor([0.3, -0.3, 0.3, -0.3, 0.0]).double().unsqueeze(1)
    old = start - shift - 0.2 * torch.randn(shape, generator=rng, dtype=torch.float64)
    mask = torch.arange(8) < torch.tensor([8, 3, 5, 6, 1]).unsqueeze(1)
    advantages = torch.tensor([1.0, -0.5, -1.2, 0.8, 0.0], dtype=torch.float64)
    ref = start + 0.1 if with_kl else None
    grads, losses = [], []
    for ours in (True, False):
        logprobs = start.clone().requires_grad_()
        if ours:
            terms = {"ref_logprobs": ref, "kl_beta": 0.04} if with_kl else {}
            arguments = (logprobs, old, advantages)
            loss = gk.policy_loss(*arguments, loss_mask=mask, objective=objective, **terms).loss
        else:
            beta = 0.04 if with_kl else 0.0
            loss = trl_loss(loss_type, logprobs, old, advantages, mask, ref=ref, beta=beta, **options)
        loss.backward()
        losses.append(loss.item())
        grads.append(logprobs.grad)
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-14)
