"""Our kernels behind frameworks' own functions: a framework keeps its losses, its options and its names. Only
log-probs and entropy of tokens, where the time goes, are computed here.

Each module has ``install()``, which may be called at any time and any number of times, and ``remove()``. If a
call can't run here, the framework's own code runs. A function's first call that runs here is reported on
stderr, and so is the first that can't, with the reason.
"""
