"""ESPO: GSPO on the ELBO of a diffusion language model."""

from dataclasses import KW_ONLY, dataclass

from gspo_kernels.objectives import finite
from gspo_kernels.objectives.base import ObjectiveLoss, PolicyBatch, require_numbers
from gspo_kernels.objectives.groups import reference_log_ratio
from gspo_kernels.objectives.gspo import GSPO


@dataclass(frozen=True)
class ESPO(GSPO):
    """ELBO-based Sequence-level Policy Optimization for diffusion language models (arXiv 2512.03759).

    The sequence's likelihood is its ELBO, ``E = sum_t w_t logp_t`` over the masked tokens with ``w_t = 1 /
    p_mask`` as ``token_weights``; ``rho = exp((E - E_old) / L)`` with L as ``lengths`` (there the padded
    length); ``loss_i = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) + elbo_kl_beta (E - E_ref)^2 /
    (2 L)``; ``dloss_i/dlogp_t = (-A rho [unclipped] + elbo_kl_beta (E - E_ref)) w_t / L``. From the paper.
    The quadratic KL is part of this objective, not the losses' ``kl_beta``, and has no rollout weights.

    Args:
        clip_low, clip_high, dual_clip: as in GSPO; the default is that of ``recipes/train.yaml`` in the
            official code, whose other recipes have 4e-4 or 0. We have not read the paper's.
        elbo_kl_beta: weight of the quadratic KL; the default is from the same file, the other recipes have
            1e-3 to 1e-2. 0 disables the KL, and then no ``ref_logprobs`` are needed.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    _: KW_ONLY
    elbo_kl_beta: float = 0.01

    coefficient_scope = "sequence"
    needs = ("token_weights", "lengths", "ref_logprobs")
    needs_token_order = False
    factorizes = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_numbers(elbo_kl_beta=self.elbo_kl_beta)
        if self.elbo_kl_beta == 0:
            self._declare(
                needs=("token_weights", "lengths"), zero_advantage_is_inactive=True, ratio_only=True
            )

    def evaluate(self, batch: PolicyBatch) -> ObjectiveLoss:
        result = super().evaluate(batch)
        if self.elbo_kl_beta == 0:
            return result
        assert batch.ref_logprobs is not None and batch.token_weights is not None
        distance = batch.layout.sum(reference_log_ratio(batch))
        kl = finite.mul(0.5 * self.elbo_kl_beta * distance, distance) / batch.lengths
        return result._replace(loss=result.loss + kl)
