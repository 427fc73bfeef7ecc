"""The public names, which ``gspo_kernels`` imports lazily."""

# "as" tells type checkers that a name is public
from gspo_kernels import advantages as advantages
from gspo_kernels import objectives as objectives
from gspo_kernels.arguments.prefetch import prefetch as prefetch
from gspo_kernels.core.batch_invariance import is_batch_invariant as is_batch_invariant
from gspo_kernels.core.batch_invariance import set_batch_invariant as set_batch_invariant
from gspo_kernels.core.self_test import enable_tensor_maps as enable_tensor_maps
from gspo_kernels.core.types import DistillationOutput as DistillationOutput
from gspo_kernels.core.types import LoRAHead as LoRAHead
from gspo_kernels.core.types import LossOutput as LossOutput
from gspo_kernels.core.types import RatioWeight as RatioWeight
from gspo_kernels.core.types import SelectedLogprobs as SelectedLogprobs
from gspo_kernels.core.types import TokenLogprobs as TokenLogprobs
from gspo_kernels.distillation import distillation_loss as distillation_loss
from gspo_kernels.distillation import fused_linear_distillation_loss as fused_linear_distillation_loss
from gspo_kernels.distributed.groups import Parallel as Parallel
from gspo_kernels.logits.centering import ScoreCentering as ScoreCentering
from gspo_kernels.logprobs import linear_selected_logprobs as linear_selected_logprobs
from gspo_kernels.logprobs import linear_token_logprobs as linear_token_logprobs
from gspo_kernels.logprobs import selected_logprobs as selected_logprobs
from gspo_kernels.logprobs import token_logprobs as token_logprobs
from gspo_kernels.losses import explain_schedule as explain_schedule
from gspo_kernels.losses import fused_linear_policy_loss as fused_linear_policy_loss
from gspo_kernels.losses import fused_policy_loss as fused_policy_loss
from gspo_kernels.losses import policy_coefficients as policy_coefficients
from gspo_kernels.losses import policy_loss as policy_loss
from gspo_kernels.objectives import *  # noqa: F403 - one export line per objective, in its own package
from gspo_kernels.objectives.aggregation import normalizer as normalizer
from gspo_kernels.off_policy import kept_mask as kept_mask
from gspo_kernels.off_policy import off_policy_mask as off_policy_mask
from gspo_kernels.off_policy import rollout_weights as rollout_weights
from gspo_kernels.off_policy import sampling_mask as sampling_mask
