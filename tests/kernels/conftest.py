"""Makes Triton's interpreter several times faster: it patches ``triton.language`` anew at every call."""

import pytest
import torch


class Scopes:
    """The patches of one launch, one per module that its functions come from, undone together at its end."""

    def __init__(self):
        self.by_module = {}

    def restore(self):
        while self.by_module:
            self.by_module.popitem()[1].restore()


class Held:
    """What a nested patch returns: the launch undoes it."""

    def restore(self):
        pass


@pytest.fixture(scope="session", autouse=True)
def patch_once_per_launch():
    if torch.cuda.is_available():
        yield
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    patch, scopes = interpreter._patch_lang, Scopes()

    def patch_once(function):
        outermost, module = not scopes.by_module, id(function.__globals__)
        if module not in scopes.by_module:
            scopes.by_module[module] = patch(function)
        return scopes if outermost else Held()

    interpreter._patch_lang = patch_once
    yield
    interpreter._patch_lang = patch
