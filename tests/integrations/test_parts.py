"""The functions of docs/integrations/parts.md, over one and two ranks, against one process."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import gspo_kernels as gk
from gspo_kernels.models.layouts import to_predictions, tokens_of_rank
from tests.forks import in_processes
from tests.test_docs import run

V = 500


def ulysses(loss_of, rank, ranks):
    cu_seqlens, ids = torch.tensor([0, 13, 20, 21], dtype=torch.int32), torch.randint(V, (21,))
    hidden, weight = torch.randn(21, 32), torch.randn(V, 32) / 6
    old, advantages = -torch.rand(21) - 5, torch.tensor([1.0, -1.0, 0.5])
    mask = torch.tensor([4 < t < 12 or t > 14 for t in range(21)])  # without prompts
    each = -(-21 // ranks)
    mine = F.pad(hidden, (0, 0, 0, each * ranks - 21))[rank * each : (rank + 1) * each]
    head, alone = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    loss_of(mine, head, ids, cu_seqlens, old, advantages, mask, dist.group.WORLD).loss.backward()
    dist.all_reduce(head.grad)
    labels = to_predictions(ids, cu_seqlens=cu_seqlens, fill=-100)
    options = {"loss_mask": mask, "cu_seqlens": cu_seqlens}
    gk.fused_linear_policy_loss(hidden, alone, labels, old, advantages, **options).loss.backward()
    torch.testing.assert_close(head.grad, alone.grad)


def megatron(loss_of, shape):
    B, S = 3, 12
    tokens, old, whole_logits = torch.randint(V, (B, S)), -torch.rand(B, S) - 5, torch.randn(B, S, V)
    mask, advantages = torch.arange(S) < torch.tensor([[12], [7], [9]]), torch.tensor([1.0, -1.0, 0.5])
    labels, counted = to_predictions(tokens, fill=-100), to_predictions(mask, fill=0)
    whole = gk.fused_policy_loss(whole_logits, labels, old, advantages, loss_mask=counted)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("cp", "tp"))
    runs = tokens_of_rank(torch.tensor([0, S]), mesh.get_local_rank("cp"), shape[0]).positions
    logits = whole_logits[:, runs].chunk(shape[1], -1)[mesh.get_local_rank("tp")]
    torch.testing.assert_close(loss_of(logits, tokens, old, advantages, mask, mesh).loss, whole.loss)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", (1, 2))
def test_functions_of_the_page_equal_one_process(ranks):
    def check(rank):
        page = run("docs/integrations/parts.md")
        dist.init_process_group("gloo")
        torch.manual_seed(0)
        ulysses(page["ulysses_loss"], rank, ranks)
        for shape in sorted({(1, ranks), (ranks, 1)}):
            megatron(page["megatron_loss"], shape)

    in_processes(ranks, check)
