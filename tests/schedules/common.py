"""What tests of schedules share."""

from tests.cases import call, make_case

ENTRY = "fused_linear_policy_loss"
V = 61
ROW = V * 4


def run_with_frozen_head(case, objective, **options):
    """Only hidden needs a gradient."""
    leaves = {name: value.detach() for name, value in case.inputs.items()}
    leaves["hidden"].requires_grad_()
    output = call(case, leaves, ENTRY, objective, **options)
    output.loss.backward()
    return output, leaves["hidden"].grad


def work_case(layout, kind="linear"):
    """Six sequences: 2 without advantage (5 tokens), one clipped (4), 3 with a gradient (12): 21 tokens."""
    return make_case(
        kind, layout, "plain", lengths=(5, 3, 4, 4, 3, 2), advantages=(1.0, 0.0, -1.0, 0.5, -0.7, 0.0),
        log_s=(1e-4, 0.0, -1e-4, 0.1, 2e-4, 0.0),
    )  # fmt: skip


TOKENS, ADVANTAGE, ACTIVE = 21, 16, 12
