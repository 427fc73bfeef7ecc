"""Our kernels behind other people's functions: a framework keeps its losses, its options and its names, and
what they spend their time on, log-probs and entropy of tokens, runs here.

Each module has ``install()``, which may be called at any time and any number of times, and ``remove()``. The
first call that runs here says so on stderr, once for each function, and so does the first that can't, with
the reason: such a call goes to the framework's own code.
"""
