"""A policy loss and the reverse KL to the policy that has read feedback, from one pass over the head.

See docs/recipes.md. SDPO (arXiv 2601.20802) and OPSD learn this way.
"""

import torch

import gspo_kernels as gk


def with_self_distillation(
    hidden, weight, labels, ids, old, advantages, teacher_hidden, *, mask, coef, objective
):
    """Return the policy loss plus coef times the reverse KL to the policy that has read the feedback.

    ids: [B, T, K], the engine's most likely ids; the other ids count as one more outcome.
    teacher_hidden: hidden states of the completion after the prompt with feedback.
    """
    seen = torch.cat([labels[..., None], ids.masked_fill(ids == labels[..., None], -100)], -1)
    ours = gk.linear_selected_logprobs(hidden, weight, seen)
    with torch.no_grad():
        of_teacher = gk.linear_selected_logprobs(teacher_hidden, weight, seen)
    policy = gk.policy_loss(ours.logprobs[..., 0], old, advantages, loss_mask=mask, objective=objective)
    each = ours.logprobs.exp() * (ours.logprobs - of_teacher.logprobs)  # 0 where there is no id
    divergence = each.sum(-1) + ours.tail.exp() * (ours.tail - of_teacher.tail)
    return policy.loss + coef * (divergence * mask).sum() / mask.sum()
