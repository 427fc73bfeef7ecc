"""What working through rows by a schedule takes: products, bytes, and seconds by a model of the machine."""

from __future__ import annotations

from dataclasses import dataclass

ACTIVE_FRACTION = 0.85
"""What is assumed of rows whose gradient is not known to be zero: published GSPO runs clip 15% of tokens."""


@dataclass(frozen=True)
class Machine:
    """What the cost model knows of a device: rates in operations and bytes per second, seconds per step.

    Attributes:
        operations: matrix products, by bytes of an operand's element.
        bandwidth: memory.
        step: one evaluation of the policy terms, with its look at the device.
        launch: the same where a kernel of the backend does it.
    """

    operations: dict[int, float]
    bandwidth: float
    step: float
    launch: float


MACHINES = {
    # two AVX2 cores, measured; only ratios matter, and those change little with the number of cores
    "cpu": Machine({2: 1.5e11, 4: 1.5e11, 8: 7e10}, 1.6e10, 1.3e-3, 3.5e-4),
    # an H100 by its data sheet at the rates that large products reach, a step as a few hundred launches; not
    # measured yet
    "cuda": Machine({2: 7e14, 4: 4.5e13, 8: 4.5e13}, 2.8e12, 2e-3, 2e-4),
}


@dataclass(frozen=True)
class TeacherShapes:
    """The sizes of a teacher beside an objective; zeros where it is no more than log-probs of some ids.

    Attributes:
        width: of its hidden states.
        logits_itemsize, operand_itemsize: of its head, as in ``Shapes``.
    """

    width: int = 0
    logits_itemsize: int = 0
    operand_itemsize: int = 0


@dataclass(frozen=True)
class Shapes:
    """The sizes that costs depend on.

    Attributes:
        vocabulary, width: V and H.
        chunk_rows: rows of logits that fit the budget.
        logits_itemsize, rows_itemsize, accumulator_itemsize, operand_itemsize: bytes of an element of the
            logits, of the rows p - onehot, of dWeight's sum, and of what the products multiply.
        trains_hidden, trains_weight: which gradients are wanted.
        one_launch: whether a kernel of the backend evaluates the policy terms.
        one_pass: whether the rows p - onehot of a chunk are written with its log-probs, gradient or not.
        one_pass_settled: whether they are where none will be left out by what the log-probs give.
        device: "cpu", or a GPU.
        teacher: what stands beside the objective, or None.
    """

    vocabulary: int
    width: int
    chunk_rows: int
    logits_itemsize: int
    rows_itemsize: int
    accumulator_itemsize: int
    operand_itemsize: int
    trains_hidden: bool
    trains_weight: bool
    one_launch: bool
    one_pass: bool
    one_pass_settled: bool
    device: str
    teacher: TeacherShapes | None = None

    @property
    def machine(self) -> Machine:
        """The rates of the device."""
        return MACHINES.get(self.device, MACHINES["cuda"])

    @property
    def step(self) -> float:
        """Seconds of one evaluation of the policy terms."""
        return self.machine.launch if self.one_launch else self.machine.step

    @property
    def accumulator_bytes(self) -> int:
        """Bytes of the tensor that dWeight is summed in."""
        return self.vocabulary * self.width * self.accumulator_itemsize if self.trains_weight else 0

    @property
    def teacher_products(self) -> float:
        """A teacher's product of a row, in those of the student's size."""
        return self.teacher.width / self.width if self.teacher is not None and self.teacher.width else 0.0


@dataclass(frozen=True)
class Cost:
    """The model's price of one part: products in units of 2VH operations, bytes moved, seconds."""

    products: float
    moved: float
    seconds: float


def cost(strategy: str, rows: int, shapes: Shapes, active: float = ACTIVE_FRACTION) -> Cost:
    """What working through ``rows`` rows by ``strategy`` (a schedule, or "forward") takes."""
    gradients, machine, teacher = shapes.trains_hidden + shapes.trains_weight, shapes.machine, shapes.teacher
    if teacher is not None:
        active = 1.0  # it gives a gradient to rows that have none of the objective
    logits = rows * shapes.vocabulary * shapes.logits_itemsize
    scores = rows * shapes.vocabulary * shapes.rows_itemsize
    chunks = -(-rows // shapes.chunk_rows)
    adding = 2.0 * shapes.accumulator_bytes  # read and written for each chunk that reaches dWeight
    active_chunks = -(-int(rows * active) // shapes.chunk_rows) if active else 0
    products, moved = 1.0, 2.0 * logits
    together = shapes.one_pass or (shapes.one_pass_settled and strategy != "aligned")
    making = scores if together else logits + scores  # rows from logits
    filling = 2 * active * (1 - active)  # rows behind those that are kept fill the gaps in front
    if strategy == "known":
        products += gradients
        moved += making + chunks * adding
    elif strategy == "aligned":
        products += active * gradients
        moved += (1.0 if shapes.one_pass else active) * making + adding
        moved += filling * (scores if shapes.one_pass else logits)
    elif strategy == "deferred":
        products += gradients
        moved += making + (chunks + 1.5) * adding
    elif strategy == "frozen":
        products += shapes.trains_hidden
        moved += making
    elif strategy == "cached":
        products += active * gradients
        moved += making + filling * scores + active_chunks * adding
    elif strategy == "two_pass":
        products += active * (1 + gradients)
        moved += active * (2 * logits + making) + active_chunks * adding
    operations = 2.0 * shapes.vocabulary * shapes.width * rows
    seconds = operations * products / machine.operations[shapes.operand_itemsize]
    if teacher is not None and teacher.width:
        products += shapes.teacher_products
        seconds += operations * shapes.teacher_products / machine.operations[teacher.operand_itemsize]
        # written, read to be compared, and read again for the gradient
        moved += (3.0 if gradients else 2.0) * rows * shapes.vocabulary * teacher.logits_itemsize
    return Cost(products * rows, moved, seconds + moved / machine.bandwidth)
