"""The page of objectives is what its script makes of the classes."""

import importlib.util
from pathlib import Path

import pytest
import torch

import gspo_kernels as gk

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("generate_objectives", DOCS / "generate_objectives.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(script):
    assert script.PAGE.read_text() == script.page(), "run `python docs/generate_objectives.py`"
    assert script.PLOT.exists()


def test_every_objective_and_option_is_on_the_page(script):
    sections = dict(part.split("\n", 1) for part in script.PAGE.read_text().split("\n## ")[1:])
    assert sections.keys() == set(gk.objectives.__all__)
    for name, cls in script.classes().items():
        assert all(field.name in sections[name] for field in script.own_fields(cls)), name


def test_the_plot_shows_coefficients(script):
    """GRPO's push is r A where not clipped, DPO's beta sigmoid(-h) with the better level at -1."""
    ratios = torch.tensor([0.5, 1.0, 1.5])
    assert script.push(gk.GRPO(), ratios, 1.0) == pytest.approx([0.5, 1.0, 0.0])
    assert script.push(gk.GRPO(), ratios, -1.0) == pytest.approx([0.0, -1.0, -1.5])
    sigmoid = torch.sigmoid(-0.1 * ratios.double().log())
    assert script.push(gk.DPO(), ratios, -1.0) == pytest.approx((2 * 0.1 * sigmoid).tolist())
    # the first has the larger covariance at A = 1, the other one at A = -1
    assert script.push(gk.KLCov(), ratios, 1.0) == pytest.approx([0.5 + 1, 1.0, 1.5 - 1])
    assert script.push(gk.KLCov(), ratios, -1.0) == pytest.approx([-0.5, -1.0, -1.5])
