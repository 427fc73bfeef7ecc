"""Detection of out-of-bounds accesses and races under Triton's interpreter, in any order of programs."""

import contextlib

import numpy as np
import torch


@contextlib.contextmanager
def rebuilt(**methods):
    """Replace some methods of the interpreter's builder. The first argument of a replacement is the method
    that it replaces.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    plain = type(builder)

    def overriding(name, method):
        return lambda self, *args, **options: method(
            lambda *args, **options: getattr(plain, name)(self, *args, **options), *args, **options
        )

    builder.__class__ = type("Rebuilt", (plain,), {key: overriding(key, it) for key, it in methods.items()})
    try:
        yield builder
    finally:
        builder.__class__ = plain


@contextlib.contextmanager
def backwards():
    """Let the interpreter run programs from the last to the first. Yield a list: programs of each launch."""
    seen = []

    def set_grid_dim(plain, x, y, z):
        plain(x, y, z)
        seen.append(x)

    with rebuilt(
        set_grid_dim=set_grid_dim, set_grid_idx=lambda plain, x, y, z: plain(seen[-1] - 1 - x, y, z)
    ):
        yield seen


class Elements:
    """The addresses of a tensor's elements, without the memory between the elements."""

    def __init__(self, tensor):
        self.start, self.size = tensor.data_ptr(), tensor.element_size()
        steps = zip(tensor.stride(), tensor.shape, strict=True)
        self.steps = sorted(((stride, size) for stride, size in steps if stride and size > 1), reverse=True)
        self.empty = tensor.numel() == 0
        self.stop = self.start + self.size * (1 + sum(stride * (size - 1) for stride, size in self.steps))

    def hold(self, addresses, size):
        """Return the mask of addresses where ``size`` bytes are one aligned element, or several in a row."""
        if self.empty or size % self.size:
            return np.zeros(addresses.shape, bool)
        each = addresses[..., None] + np.arange(0, size, self.size)
        index, off = np.divmod(each - self.start, self.size)
        inside = (each >= self.start) & (each < self.stop) & (off == 0)
        for stride, count in self.steps:
            index = index - np.minimum(index // stride, count - 1) * stride
        return (inside & (index == 0)).all(-1) & (addresses % size == 0)


class Access:
    """The addresses of a block that its mask lets through, and the lane of each address."""

    def __init__(self, pointers, mask):
        shape = np.broadcast_shapes(pointers.data.shape, mask.data.shape)
        let = np.broadcast_to(mask.data, shape).astype(bool).ravel()
        self.addresses = np.broadcast_to(pointers.data, shape).ravel()[let].astype(np.int64)
        self.size = pointers.get_element_ty().primitive_bitwidth // 8
        # Blocks of other shapes may give lanes to other threads: their lanes never count as the same.
        self.lanes = np.flatnonzero(let) + (hash(shape) % 2**20 << 32)


def _tensors(arguments):
    """Yield the tensors of a launch, also those inside tuples and behind tensor descriptors."""
    for argument in arguments:
        if isinstance(argument, tuple):
            yield from _tensors(argument)
        elif hasattr(argument, "base"):
            yield argument.base
        elif hasattr(argument, "data_ptr"):
            yield argument


@contextlib.contextmanager
def watched(begin, access, barrier=lambda program: None, synchronize=lambda *atomic: None):
    """Call ``begin`` with the tensors and the number of programs of each launch, ``access`` for each access
    to memory (its kind is "load", "volatile load", "store" or "atomic"), ``barrier`` for each barrier, and
    ``synchronize`` with the memory order and the scope of each atomic access.
    """
    from triton.runtime.interpreter import GridExecutor

    hosts = GridExecutor._init_args_hst

    def init_args_hst(self, args, kwargs):
        found = hosts(self, args, kwargs)
        each = [*found[0], *found[1].values()]
        begin(list(_tensors(each)), self.grid[0])
        return found

    def load(plain, pointers, mask, *rest, **named):  # before Triton 3.9 there is one argument more
        is_volatile = named["is_volatile"] if named else rest[-1]
        access(builder.grid_idx[0], "volatile load" if is_volatile else "load", Access(pointers, mask))
        return plain(pointers, mask, *rest, **named)

    def store(plain, pointers, value, mask, *rest):
        access(builder.grid_idx[0], "store", Access(pointers, mask))
        return plain(pointers, value, mask, *rest)

    def atomic(plain, operation, pointers, value, mask, order, scope):
        one = Access(pointers, mask)
        access(builder.grid_idx[0], "atomic", one)
        synchronize(builder.grid_idx[0], one, order.name, scope.name)
        return plain(operation, pointers, value, mask, order, scope)

    def wait(plain):
        barrier(builder.grid_idx[0])
        return plain()

    GridExecutor._init_args_hst = init_args_hst
    hooks = {"create_masked_load": load, "create_masked_store": store, "create_atomic_rmw": atomic}
    try:
        with rebuilt(**hooks, create_barrier=wait) as builder:
            yield
    finally:
        GridExecutor._init_args_hst = hosts


@contextlib.contextmanager
def within_bounds():
    """Check that each access is to elements of one of the launch's tensors."""
    tensors = []

    def begin(given, programs):
        tensors[:] = map(Elements, given)

    def access(program, kind, to):
        if not to.addresses.size:
            return
        outside, first, last = np.ones(to.addresses.shape, bool), to.addresses.min(), to.addresses.max()
        for tensor in tensors:
            if first < tensor.stop and last >= tensor.start:
                outside &= ~tensor.hold(to.addresses, to.size)
            if not outside.any():
                return
        near = [int(to.addresses[outside][0]) - tensor.start for tensor in tensors]
        raise AssertionError(
            f"out of bounds: {kind} of {to.size} bytes by program {program} in {int(outside.sum())} lanes, "
            f"the first of them {near} bytes after the beginnings of the launch's tensors"
        )

    with watched(begin, access):
        yield


class Shadow:
    """The last writer and the last reader of each cell of a piece of memory, as (program, clock, lane)."""

    NOBODY, MANY = -1, -2

    def __init__(self, start, stop, unit):
        self.start, self.stop, self.unit = start, stop, unit
        self.writer, self.reader = np.full((2, 3, (stop - start) // unit), self.NOBODY, np.int64)


class Races:
    """Happens-before of the programs and threads of a launch, by vector clocks.

    A program's clock counts its barriers. Accesses of the same lane, and of other lanes before the last
    barrier, happen before. An atomic access is by one thread: a release publishes accesses before the
    program's last barrier; after an acquire and a barrier, the accesses published at the address happen
    before. Of two accesses to one cell, one of them a store, the first must happen before the second. Stores
    of other programs must be loaded as volatile, because a cache may hold older values.
    """

    def begin(self, tensors, programs):
        """Forget the last launch."""
        self.clock = np.zeros(programs, np.int64)
        self.seen = np.full((programs, programs), -1, np.int64)
        self.acquired = self.seen.copy()
        self.published = {}
        self.pieces = []
        extents = [(it.start, it.stop, it.size) for it in map(Elements, tensors) if not it.empty]
        for start, stop, size in sorted(extents):
            if self.pieces and start < self.pieces[-1][1]:
                last = self.pieces[-1]
                self.pieces[-1] = (last[0], max(stop, last[1]), min(size, last[2]))
            else:
                self.pieces.append((start, stop, size))
        self.pieces = [Shadow(*piece) for piece in self.pieces]

    def barrier(self, program):
        """Count a barrier, which all lanes of the program have reached."""
        self.clock[program] += 1
        self.seen[program] = np.maximum(self.seen[program], self.acquired[program])

    def synchronize(self, program, to, order, scope):
        """Release and acquire at an atomic access; all accesses to one address form one chain."""
        assert scope == "GPU", f"an atomic access of scope {scope} orders nothing between programs"
        for address in to.addresses.tolist():
            before = self.published.setdefault(address, np.full(len(self.clock), -1, np.int64))
            released = before
            if order in ("RELEASE", "ACQUIRE_RELEASE"):
                mine = self.seen[program].copy()
                mine[program] = self.clock[program] - 1
                released = np.maximum(before, mine)
            if order in ("ACQUIRE", "ACQUIRE_RELEASE"):
                self.acquired[program] = np.maximum(self.acquired[program], before)
            self.published[address] = released

    def _unordered(self, program, lanes, by):
        """Return masks of cells: is the last access ``by`` unordered with this one? Another program's?"""
        who, when, lane = by
        others = (who >= 0) & (who != program)
        unseen = others & (when > self.seen[program][np.where(others, who, 0)])
        threads = (who == program) & (when == self.clock[program]) & (lane != lanes)
        return unseen | threads | (who == Shadow.MANY), others

    def access(self, program, kind, to):
        """Check an access against the last ones to the same cells, and remember it."""
        if kind == "atomic" or not to.addresses.size:
            return
        first = int(to.addresses[0])
        piece = next(one for one in self.pieces if one.start <= first < one.stop)
        width = to.size // piece.unit
        cells = ((to.addresses - piece.start) // piece.unit)[:, None] + np.arange(width)
        cells, lanes = cells.ravel(), np.repeat(to.lanes, width)
        now = np.stack(np.broadcast_arrays(program, self.clock[program], lanes))
        races, others = self._unordered(program, lanes, piece.writer[:, cells])
        assert not races.any(), f"race: {kind} by program {program} of what may not be stored yet"
        if kind == "store":
            assert np.unique(cells).size == cells.size, f"race: lanes of program {program} store to one place"
            races, _ = self._unordered(program, lanes, piece.reader[:, cells])
            assert not races.any(), f"race: store by program {program} over what may not be loaded yet"
            piece.writer[:, cells] = now
            return
        assert kind == "volatile load" or not others.any(), (
            f"race: load by program {program} that may come from a cache, of what another program stored"
        )
        unordered, others = self._unordered(program, lanes, piece.reader[:, cells])
        now[2, unordered] = Shadow.MANY
        now[0, unordered & (others | (piece.reader[0, cells] == Shadow.MANY))] = Shadow.MANY
        piece.reader[:, cells] = now


@contextlib.contextmanager
def without_races():
    """Check that no two programs, and no two threads of one program, race for a cell."""
    races = Races()
    with watched(races.begin, races.access, races.barrier, races.synchronize):
        yield


class Traffic:
    """How often each element of some tensors is loaded and stored; see ``counted``."""

    def __init__(self, *tensors):
        self.tensors = tensors
        self.reads = [torch.zeros(tensor.numel(), dtype=torch.int64) for tensor in tensors]
        self.writes = [torch.zeros(tensor.numel(), dtype=torch.int64) for tensor in tensors]

    def access(self, program, kind, to):
        """Count an access, which may cover several elements."""
        counts = {"store": self.writes, "load": self.reads, "volatile load": self.reads}.get(kind, ())
        for tensor, count in zip(self.tensors, counts, strict=False):
            size = tensor.element_size()
            each = (to.addresses[:, None] + np.arange(0, to.size, size)).ravel() - tensor.data_ptr()
            inside = each[(each >= 0) & (each < tensor.numel() * size)] // size
            count += torch.from_numpy(np.bincount(inside, minlength=tensor.numel()))

    def per_row(self, counts, index):
        """Return one count per row; all elements of a row must have the same count."""
        rows = counts[index].view(-1, self.tensors[index].shape[-1])
        assert (rows == rows[:, :1]).all()
        return rows[:, 0].tolist()


@contextlib.contextmanager
def counted(*tensors):
    """Count accesses to contiguous tensors inside the ``with`` block, only where masks let them through."""
    traffic = Traffic(*tensors)
    with watched(lambda tensors, programs: None, traffic.access):
        yield traffic
