"""Lossless speculative decoding in JAX: a small model drafts, a large one decides.

The algorithm is here (arrays and pure functions); the models that it runs on are in
:mod:`specjax.models` and the command line's jobs in :mod:`specjax.scripts`.
"""

__version__ = "0.1.0"
