"""Fused losses for sequence-level policy optimization: Triton kernels on the GPU, C++ kernels on the CPU.

Everything is imported on first use: importing torch takes seconds, and the trainer reports wrong options
without it.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # "as" tells type checkers that a name is public
    from gspo_kernels import advantages as advantages
    from gspo_kernels import objectives as objectives
    from gspo_kernels.arguments.lengths import prefetch as prefetch
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
    from gspo_kernels.logprobs import linear_token_logprobs as linear_token_logprobs
    from gspo_kernels.logprobs import token_logprobs as token_logprobs
    from gspo_kernels.losses import explain_schedule as explain_schedule
    from gspo_kernels.losses import fused_linear_policy_loss as fused_linear_policy_loss
    from gspo_kernels.losses import fused_policy_loss as fused_policy_loss
    from gspo_kernels.losses import policy_coefficients as policy_coefficients
    from gspo_kernels.losses import policy_loss as policy_loss
    from gspo_kernels.objectives import *  # noqa: F403 - one export line per objective, in its own package
    from gspo_kernels.objectives.aggregation import normalizer as normalizer
    from gspo_kernels.off_policy import off_policy_mask as off_policy_mask
    from gspo_kernels.off_policy import rollout_weights as rollout_weights
    from gspo_kernels.sampling import kept_mask as kept_mask
    from gspo_kernels.sampling import sampling_mask as sampling_mask
    from gspo_kernels.selected import linear_selected_logprobs as linear_selected_logprobs
    from gspo_kernels.selected import selected_logprobs as selected_logprobs

try:
    __version__ = version("gspo_kernels")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

_NAMES = {
    "objectives.aggregation": ["normalizer"],
    "logits.centering": ["ScoreCentering"],
    "distillation": ["distillation_loss", "fused_linear_distillation_loss"],
    "core.self_test": ["enable_tensor_maps"],
    "core.batch_invariance": ["is_batch_invariant", "set_batch_invariant"],
    "arguments.lengths": ["prefetch"],
    "logprobs": ["linear_token_logprobs", "token_logprobs"],
    "losses": [
        "explain_schedule",
        "fused_linear_policy_loss",
        "fused_policy_loss",
        "policy_coefficients",
        "policy_loss",
    ],
    "off_policy": ["off_policy_mask", "rollout_weights"],
    "distributed.groups": ["Parallel"],
    "sampling": ["kept_mask", "sampling_mask"],
    "selected": ["linear_selected_logprobs", "selected_logprobs"],
    "core.types": [
        "DistillationOutput",
        "LoRAHead",
        "LossOutput",
        "RatioWeight",
        "SelectedLogprobs",
        "TokenLogprobs",
    ],
}
"""Public names by module. The modules ``advantages``, ``objectives`` and all objectives are public, too."""

_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(
            ["advantages", "objectives", *_MODULE_OF, *import_module(f"{__name__}.objectives").__all__]
        )
    if name in _MODULE_OF:
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    elif name[:1].isupper():  # an objective
        objectives = import_module(f"{__name__}.objectives")
        if name not in objectives.__all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(objectives, name)
    else:
        try:
            value = import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    names: list[str] = __getattr__("__all__")
    return names
