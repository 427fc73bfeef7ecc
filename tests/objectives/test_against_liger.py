"""The same loss and gradients from hidden states as Liger's fused linear GRPO loss, on ragged batches.

Liger computes in fp32 whatever it is given. Ours in fp64 is what it is compared to, with the error that fp32
products of these operands may have. Calls where Liger differs are skipped, and say how.
"""

import importlib.util

import pytest
import torch

import gspo_kernels as gk
from tests.draws import shifted_seed

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("liger_kernel") is None, reason="Liger is missing: pip install liger-kernel"
)

CLIP = {"clip_low": 0.2, "clip_high": 0.28}
NARROW = {"clip_low": 0.1, "clip_high": 0.15}
SEQUENCE = {"importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.15}
SETTINGS = {
    "grpo": (gk.GRPO(**CLIP), {}),
    "grpo, two-sided": (gk.GRPO(**CLIP, dual_clip=1.4), {"delta": 1.4}),
    "grpo, sequence level": (gk.GSPO(**NARROW), SEQUENCE),
    "grpo, sequence level, two-sided": (gk.GSPO(**NARROW, dual_clip=1.2), {**SEQUENCE, "delta": 1.2}),
    "bnpo": (gk.BNPO(**CLIP), {}),
    "bnpo, sequence level": (gk.GSPO(**NARROW, aggregation="token_mean"), SEQUENCE),
    "dr_grpo": (gk.DrGRPO(**CLIP, aggregation_constant=9), {"max_completion_length": 9}),
    "dr_grpo, sequence level": (
        gk.GSPO(**NARROW, aggregation="constant", aggregation_constant=9),
        {**SEQUENCE, "max_completion_length": 9},
    ),
    "dapo": (gk.DAPO(), {}),
    "dapo, sequence level": (gk.GSPO(**NARROW, aggregation="token_mean"), SEQUENCE),
    "luspo": (gk.LUSPO(**NARROW), SEQUENCE),
    "cispo": (gk.CISPO(max_ratio=1.3), {"epsilon_high": 1.3}),
    "cispo, Liger's default": (gk.CISPO(max_ratio=0.2), {"epsilon_high": 0.2}),
    "sapo": (gk.SAPO(), {}),
    "vespo": (gk.VESPO(), {}),
}
PER_SEQUENCE = ("grpo", "dr_grpo", "sapo", "luspo")
LENGTHS = (8, 3, 5, 6, 1, 0)
RAGGED = torch.arange(8) < torch.tensor(LENGTHS).unsqueeze(1)
BIAS, TEMPERATURE, VOCABULARY, HIDDEN = 0.3, 1.3, 37, 16


class Case:
    """Six sequences; ratios around those of each of the clips' branches."""

    def __init__(self, mask=RAGGED, seed=4):
        rng = torch.Generator().manual_seed(shifted_seed(seed))

        def normal(*shape):
            return torch.randn(shape, generator=rng).double()

        self.mask = mask
        # in fp64 the very numbers that fp32 has
        self.inputs = (normal(6, 8, HIDDEN), 0.3 * normal(VOCABULARY, HIDDEN), BIAS * normal(VOCABULARY))
        self.labels = torch.randint(VOCABULARY, (6, 8), generator=rng)
        hidden, weight, bias = self.inputs
        scores = (hidden @ weight.T + bias) / TEMPERATURE
        logprobs = scores.log_softmax(-1).gather(2, self.labels.unsqueeze(2)).squeeze(2)
        shift = torch.tensor([0.3, -0.3, 0.3, -0.3, 0.0, 0.1]).unsqueeze(1)
        self.old = (logprobs - shift - 0.2 * normal(6, 8)).float().double()
        self.ref = (logprobs + 0.3 * normal(6, 8)).float().double()
        self.advantages = torch.tensor([1.0, -0.5, -1.25, 0.75, 0.0, 2.0]).double()
        self.weights = (0.5 + torch.rand(6, 8, generator=rng)).double()
        # of a logit in fp32, then relative of a ratio or a probability: both enter, with room for sums
        products = (hidden.abs() @ weight.abs().T + bias.abs()).max().item()
        self.error = 4 * torch.finfo(torch.float32).eps * (HIDDEN + 2) * products / TEMPERATURE

    def ours(self, objective, old="given", **terms):
        inputs = [x.clone().requires_grad_() for x in self.inputs]
        hidden, weight, bias = inputs
        loss = gk.fused_linear_policy_loss(
            hidden, weight, self.labels, self.old if old == "given" else old, self.advantages, bias=bias,
            loss_mask=self.mask, temperature=TEMPERATURE, objective=objective, **terms,
        ).loss  # fmt: skip
        loss.backward()
        return loss.detach(), *(x.grad for x in inputs)

    def liger(self, name, old="given", *, beta=0.0, terms=None, **options):
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

        loss_type = name.split(",")[0]
        settings = {"epsilon_low": 0.2, "epsilon_high": 0.28, **options}
        function = LigerFusedLinearGRPOLoss(
            beta=beta, compiled=False, use_ref_model=beta != 0, loss_type=loss_type, temperature=TEMPERATURE,
            chunk_size=2, **settings,
        )  # fmt: skip
        inputs = [x.float().requires_grad_() for x in self.inputs]
        hidden, weight, bias = inputs
        old = self.old if old == "given" else old
        loss, _ = function(
            hidden, weight, self.labels, self.mask.float(), self.advantages.float(), bias=bias,
            ref_per_token_logps=self.ref.float() if beta else None,
            old_per_token_logps=None if old is None else old.float(),
            **{key: value.float() for key, value in (terms or {}).items()},
        )  # fmt: skip
        loss.backward()
        return loss.detach(), *(x.grad for x in inputs)

    def assert_equal(self, ours, ligers):
        assert self.error < 1e-4
        scale = max(1.0, ours[0].abs().item())
        assert abs(ours[0] - ligers[0]) <= self.error * scale
        for one, other in zip(ours[1:], ligers[1:], strict=True):
            largest = one.abs().max()
            assert largest > 1e-4
            assert (one - other).abs().max() <= self.error * max(largest, 1e-2)


def divisor(name):
    """Liger's mean over sequences counts the empty one."""
    return {"normalizer": 6.0} if name.split(",")[0] in PER_SEQUENCE else {}


@pytest.mark.parametrize("terms", ["plain", "on-policy", "kl", "weighted kl", "weights", "total"])
@pytest.mark.parametrize("name", SETTINGS)
def test_equals_liger(name, terms):
    objective, options = SETTINGS[name]
    loss_type = name.split(",")[0]
    if loss_type == "vespo" and terms == "weights":
        pytest.skip("they enter its ratio there")
    if loss_type == "vespo" and terms == "weighted kl":
        pytest.skip("there by the ratio of a token")
    if loss_type == "luspo" and "kl" in terms:
        pytest.skip("Liger counts padding there")
    case, given, theirs = Case(), divisor(name), {}
    if terms == "on-policy":
        given["old"] = theirs["old"] = None
    if "kl" in terms:
        given |= {"ref_logprobs": case.ref, "kl_beta": 0.25, "kl_ratio_weighted": terms == "weighted kl"}
        theirs |= {"beta": 0.25, "use_bias_correction_kl": terms == "weighted kl"}
    if terms == "weights":
        # LUSPO: Liger's mean of weights per token counts padding
        weights = case.weights[:, 0] if loss_type == "luspo" else case.weights
        given["rollout_weights"], theirs["terms"] = weights, {"vllm_is_ratio": weights}
    if terms == "total":
        if loss_type not in ("dapo", "cispo", "vespo"):
            pytest.skip("Liger takes a number of tokens for the others, and ignores it")
        given["normalizer"], theirs["terms"] = 31.0, {"num_items_in_batch": torch.tensor(31.0)}
    case.assert_equal(case.ours(objective, **given), case.liger(name, **options, **theirs))


@pytest.mark.parametrize("name", PER_SEQUENCE)
def test_empty_sequences_count_in_liger(name):
    objective, options = SETTINGS[name]
    case = Case()
    case.assert_equal([5 / 6 * x for x in case.ours(objective)], case.liger(name, **options))
