"""A call whose head is frozen."""

from tests.cases import call


def run_with_frozen_head(case, objective, **options):
    """Only hidden needs a gradient."""
    leaves = {name: value.detach() for name, value in case.inputs.items()}
    leaves["hidden"].requires_grad_()
    output = call(case, leaves, "fused_linear_policy_loss", objective, **options)
    output.loss.backward()
    return output, leaves["hidden"].grad
