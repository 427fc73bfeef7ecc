"""The evaluated formula is that of an objective's class and options."""

import copy
import dataclasses
import functools
import math
import pickle
import sys
import types
from dataclasses import InitVar, dataclass

import numpy as np
import pytest
import torch

import gspo_kernels as gk
from gspo_kernels.objectives.base import Objective, ObjectiveLoss
from gspo_kernels.objectives.clip import surrogate
from tests.objectives.sample_batches import EVERY, NO_DEFAULTS

LABELS, RNG = torch.tensor([[1, 2, 0], [3, 0, 4]]), torch.Generator().manual_seed(0)
WEIGHT, HIDDEN = (torch.randn(*size, 4, generator=RNG) for size in ((5,), (2, 3)))
LOGITS = HIDDEN @ WEIGHT.T
LOGPROBS = gk.token_logprobs(LOGITS, LABELS).logprobs
GIVEN = (LOGPROBS - 0.1, torch.tensor([1.0, -0.4]))
ENTRIES = {
    gk.policy_loss: (LOGPROBS,),
    gk.fused_policy_loss: (LOGITS, LABELS),
    gk.fused_linear_policy_loss: (HIDDEN, WEIGHT, LABELS),
}


def loss(objective, entry=gk.policy_loss):
    return entry(*ENTRIES[entry], *GIVEN, objective=objective).loss


class Scaled(Objective):
    """The loss is proportional to ``factor()``."""

    coefficient_scope = "token"

    def factor(self):
        return getattr(self, "scale", 1.0)

    def evaluate(self, batch):
        return surrogate(batch, self.factor() * batch.log_ratio.exp(), batch.log_ratio)


def factor(objective, way=loss):
    return round(float(way(objective) / way(Scaled())), 4)


def made(factor, base=Scaled):
    """Return an objective whose class has the name of all others that this function makes."""

    @dataclass(frozen=True)
    class Made(base):
        def factor(self):
            return factor

        def ratio_form(self):
            clip = super().ratio_form()
            return None if clip is None else clip._replace(divisor_scale=1 / factor)

    return Made()


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.__name__)
@pytest.mark.parametrize("base", [Scaled, gk.GRPO], ids=["evaluated", "one launch"])
def test_objectives_of_one_name(entry, base):
    """Of a notebook cell that runs twice, of one factory, while both classes are alive or after."""
    others = (10.0, 0.5)
    alive = [made(each, base) for each in others]
    want = float(loss(made(1.0, base), entry))
    for objective, each in zip((*alive, *(made(x, base) for x in others), *alive), 3 * others, strict=True):
        assert float(loss(objective, entry)) == pytest.approx(each * want)


def test_objectives_of_one_name_compiled():
    torch._dynamo.reset()
    compiled = torch.compile(lambda objective: loss(objective) * 1, fullgraph=True, backend="aot_eager")
    one, ten = made(1.0), made(10.0)
    assert [factor(each, compiled) for each in (one, ten, made(3.0), one)] == [1, 10, 3, 1]


@dataclass(frozen=True, eq=False)
class ByIdentity(Scaled):
    scale: float = 1.0
    __hash__ = None


@dataclass(frozen=True)
class AlwaysEqual(Scaled):
    scale: float = 1.0

    def __eq__(self, other):
        return True

    __hash__ = Objective.__hash__


@dataclass(frozen=True)
class OfTypeAndSign(Scaled):
    """Equal numbers of other types, and zeros of either sign, are different options."""

    option: float | bool | str | None = 1

    def factor(self):
        number = isinstance(self.option, int | float)
        return 2 + len(repr(self.option)) + 8 * (number and math.copysign(1, self.option) < 0)


EXACT = (1, True, 1.0, 0.0, -0.0, 0, False, math.inf, math.nan, "1", "", None, 0.1 + 0.2, 2**70)


def test_options_are_exact():
    for cls in (ByIdentity, AlwaysEqual):
        assert [factor(cls(scale=x)) for x in (1.0, 3.0, 2.0, 1.0)] == [1, 3, 2, 1]
    for value in 2 * EXACT:
        objective = OfTypeAndSign(option=value)
        assert factor(objective) == objective.factor()


SOURCE = """
from tests.objectives.test_definitions import *
@dataclass(frozen=True)
class Own(Scaled):
    scale: float = 1.0
    @functools.cached_property
    def table(self):
        return torch.full((2,), self.{})
    def factor(self):
        return self.table.mean().item()
"""


def test_pickled_after_use(monkeypatch):
    """Another process, or a module that is loaded again, has another class of the same name."""
    here, there = types.ModuleType("own_objectives"), types.ModuleType("own_objectives")
    for module, body in ((here, "scale"), (there, "scale * 10")):
        monkeypatch.setitem(sys.modules, "own_objectives", module)
        exec(SOURCE.format(body), vars(module))
    monkeypatch.setitem(sys.modules, "own_objectives", here)
    objective = here.Own(scale=2.0)
    assert objective.factor() == 2 and factor(objective) == 2
    sent = pickle.dumps(objective)
    assert factor(pickle.loads(sent)) == factor(copy.deepcopy(objective)) == 2
    monkeypatch.setitem(sys.modules, "own_objectives", there)
    assert factor(pickle.loads(sent)) == 20 and factor(objective) == 2


class Undecorated(gk.GSPO):
    clip_low: float = 0.1


class Constant(gk.GSPO):
    clip_low = 0.1


@dataclass(frozen=True)
class NotAnnotated(gk.GSPO):
    clip_low = 0.1


@dataclass(frozen=True)
class OfUndecorated(Undecorated):
    other: float = 0.0


@dataclass(frozen=True)
class Initialized(Scaled):
    clip_low: InitVar[float] = 1.0

    def __post_init__(self, clip_low):
        super().__post_init__()
        object.__setattr__(self, "scale", clip_low)


class OwnInit(Scaled):
    def __init__(self, clip_low=2.0):
        self.clip_low = clip_low


class HiddenInit(Scaled):
    def __init__(self, clip_low=2.0, **options):
        super().__init__(**options)
        object.__setattr__(self, "clip_low", clip_low)


@dataclass(frozen=True)
class Changed(Scaled):
    clip_low: float = 1.0

    def __post_init__(self):
        object.__setattr__(self, "clip_low", self.clip_low + 1)


@dataclass(frozen=True)
class AnyOption(Scaled):
    clip_low: object = 1.0


LOST = {cls.__name__: cls for cls in (Undecorated, Constant, NotAnnotated, OfUndecorated)}
LOST |= {cls.__name__: cls for cls in (Initialized, OwnInit, Changed)}
LOST |= {"HiddenInit": lambda: HiddenInit(clip_low=3.0), "of GSPO": lambda: gk.GSPO(torch.tensor(0.1))}
for value in (torch.ones(()), torch.ones(3), [1.0], (1.0,), abs):
    LOST[str(value)] = functools.partial(AnyOption, value)


@pytest.mark.parametrize("kind", LOST)
def test_state_that_would_be_lost_is_refused(kind):
    of_instances = kind in ("Changed", "HiddenInit")  # which may declare what their class does not
    for use in (loss,) if of_instances else (loss, gk.objectives.check):
        with pytest.raises((TypeError, dataclasses.FrozenInstanceError), match="clip_low"):
            use(LOST[kind]())


def test_attributes_cannot_be_set_later():
    loss(objective := Scaled())
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"scale: .*@dataclass"):
        objective.scale = 3.0


def wrong_values(option):
    """Return values of other types than the option's."""
    kinds = str(option.type)
    return [
        *([] if "str" in kinds else ["0.5", "false"]),
        *([] if "None" in kinds else [None]),
        *([] if "bool" in kinds else [True, np.True_]),
        *([] if "float" in kinds or "int" in kinds else [0, 1, 1.0, np.float32(1)]),
        *([0.5] if "int" in kinds else []),
        torch.tensor(0.5),
        [0.5],
    ]


@pytest.mark.parametrize("name", EVERY)
def test_types_of_options(name):
    cls = EVERY[name]
    for option in dataclasses.fields(cls):
        given = {"aggregation": "constant"} if option.name == "aggregation_constant" else {}
        given |= {"aggregation_constant": 4.0} if name in NO_DEFAULTS else {}
        for value in wrong_values(option):
            with pytest.raises((TypeError, ValueError), match=rf"^{option.name}: "):
                cls(**{**given, option.name: value})


def test_numpy_scalars_are_python_numbers():
    for numpy, plain in (
        (gk.M2PO(one_sided=np.False_, threshold=np.float32(0.5)), gk.M2PO(one_sided=False, threshold=0.5)),
        (gk.GRPO(np.float64(0.1), np.int64(2)), gk.GRPO(0.1, 2)),
        (gk.TOPR(ratio_level=np.str_("token")), gk.TOPR(ratio_level="token")),
    ):
        assert numpy == plain and loss(numpy) == loss(plain)
        assert [type(x) for x in vars(numpy).values()] == [type(x) for x in vars(plain).values()]


def test_the_result_of_evaluate_is_checked():
    class Bare(Scaled):
        def evaluate(self, batch):
            return super().evaluate(batch).loss

    class Wide(Scaled):
        def evaluate(self, batch):
            return super().evaluate(batch)._replace(loss=batch.log_ratio[..., :1])

    for use in (loss, gk.objectives.check):
        with pytest.raises(
            (TypeError, ValueError), match=r"Bare.evaluate returned Tensor, expected ObjectiveLoss\("
        ):
            use(Bare())
        with pytest.raises(
            ValueError, match=r"Wide has level='token', but its loss has shape \(\d, 1\), expected"
        ):
            use(Wide())


def test_sequence_level_takes_one_advantage_each():
    """Unless they set takes_token_advantages."""

    class PerSequence(Objective):
        level = "sequence"

        def evaluate(self, batch):
            log_ratio, advantages = batch.sequence_log_ratio(), batch.per_sequence(batch.advantages)
            return ObjectiveLoss(batch.weighted(-advantages * log_ratio.exp()), log_ratio)

    class Either(PerSequence):
        takes_token_advantages = True

    of_tokens = GIVEN[1].unsqueeze(1).expand(2, 3)
    gk.objectives.check(PerSequence())
    with pytest.raises(
        ValueError, match=r"advantages: got shape \(2, 3\), but PerSequence takes one per sequence"
    ):
        gk.policy_loss(LOGPROBS, GIVEN[0], of_tokens, objective=PerSequence())
    either = gk.policy_loss(LOGPROBS, GIVEN[0], of_tokens, objective=Either()).loss
    torch.testing.assert_close(either, loss(PerSequence()))
