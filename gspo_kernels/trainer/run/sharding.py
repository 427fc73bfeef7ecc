"""Models of which no process holds all weights: under FSDP2 each one reads, and keeps, its shards alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.modules.module import register_module_module_registration_hook

from gspo_kernels.trainer.rows.policy import Policy
from gspo_kernels.trainer.run.processes import shard_again


@contextmanager
def sharded_weights(accelerator: Any) -> Iterator[None]:
    """Let models that are built inside without weights, on the meta device, have shards for parameters.

    transformers (since 5.20) then reads of each weight what belongs to this process, and nothing else. The
    shards are those of FSDP2: rows, along the mesh that accelerate gives it.
    """
    mesh = getattr(accelerator, "torch_device_mesh", None)
    if mesh is None:
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
    else:
        mesh = mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)]
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]

    def shard(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        for module in child.modules() if child is not None else ():
            for key, p in module._parameters.items():
                if p is not None and p.is_meta and not isinstance(p, DTensor):
                    shards = distribute_tensor(p.detach(), mesh, placements, src_data_rank=None)
                    module._parameters[key] = nn.Parameter(shards, p.requires_grad)

    hook = register_module_module_registration_hook(shard)
    try:
        yield
    finally:
        hook.remove()


def shard_policy(accelerator: Any, policy: Policy) -> Policy:
    """Give a policy's weights to FSDP2, as accelerate does it; shards that were loaded stay as they are."""
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    named = policy.named_parameters(remove_duplicate=False)
    loaded = {n: p for n, p in named if isinstance(p, DTensor) and not _is_cut(p)}
    # FSDP splits whole weights: it gets some without content, and then the shards in their place.
    whole = {
        id(p): nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), p.requires_grad)
        for p in loaded.values()
    }
    for module in policy.modules():
        module._parameters.update({n: whole.get(id(p), p) for n, p in module._parameters.items()})
    policy = fsdp2_prepare_model(accelerator, policy)
    policy.load_state_dict(loaded, strict=False, assign=True)
    return policy


def _is_cut(weight: DTensor) -> bool:
    """Whether transformers has cut a weight by the model's ``tp_plan``, which FSDP can split once more."""
    return "tp" in (weight.device_mesh.mesh_dim_names or ())


def check_policy(accelerator: Any, policy: Policy) -> None:
    """Run `Policy.check`; on shards through a second policy that shares them, without mixed precision."""
    if accelerator.is_fsdp2 and any(isinstance(p, DTensor) and not _is_cut(p) for p in policy.parameters()):
        plugin = accelerator.state.fsdp_plugin
        policy = copy.deepcopy(policy, {id(p): p for p in policy.parameters()})
        mixed, plugin.mixed_precision_policy = plugin.mixed_precision_policy, None
        policy = shard_policy(accelerator, policy)
        plugin.mixed_precision_policy = mixed
        register_fsdp_forward_method(policy, "check")
    policy.check()
    shard_again(policy)
