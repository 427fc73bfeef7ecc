"""Our kernels behind frameworks' own functions: a framework keeps its losses, its options and its names. Only
log-probs and entropy of tokens, where the time goes, are computed here.

The module of a framework has ``install()``, which may be called at any time and any number of times, and
``remove()``. Calls that we do not support run the framework's own code; errors in supported calls are raised.
A function's first call that runs here is reported on stderr, and so is the first that can't, with the reason.
"""
