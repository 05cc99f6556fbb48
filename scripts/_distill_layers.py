"""Which of the target's layers make the draft of `specjax distill --kind layers`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

__all__ = ["choose_layers"]


def choose_layers(config: Any, loaded: Any, vocabulary: Any, source: Any) -> Sequence[int]:
    """The layers of --layers, or those that OUT/layers.json keeps of a search among all."""
    if config.layers:
        return config.layers
    kept = config.out / "layers.json"
    if kept.exists():
        return [int(layer) for layer in json.loads(kept.read_text())]
    layers = search(loaded, config.num_layers or 4, vocabulary, source)
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(layers) + "\n")
    return layers


def search(loaded: Any, keep: int, vocabulary: Any, source: Any) -> Sequence[int]:
    """Layers by what their absence costs in overlap, on two sequences of 128 tokens at most."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from specjax.distill.batches import stack
    from specjax.distill.chunked import Scores, chunked_sums
    from specjax.models.derive import output_rows
    from specjax.models.layer_search import search_layers

    begin = time.perf_counter()
    shortness = [-int(source[i]["lengths"]) for i in range(min(len(source), 64))]
    longest = np.argsort(shortness, kind="stable")[:2].tolist()
    batch = jax.tree.map(
        lambda x: x[:, :128] if x.ndim > 1 else x,
        stack(source, longest),
    )
    rows = output_rows(loaded.params)[vocabulary]
    live = batch.mask.reshape(-1)
    target = Scores(
        jnp.asarray(batch.features, rows.dtype).reshape(live.size, -1), rows, batch.log_normalizer.reshape(-1)
    )

    @jax.jit
    def overlaps(target: Any, states: Any) -> Any:  # all as arguments: XLA would fold constants for minutes
        return chunked_sums(target, Scores(states.reshape(live.size, -1), target.head)).overlap

    def overlap(states: Any) -> float:
        return float(np.asarray(overlaps(target, states))[live].mean())

    layers = search_layers(loaded.model, loaded.params, jnp.asarray(batch.tokens), keep, overlap)
    seconds = time.perf_counter() - begin
    print(
        f"of {loaded.model.config.num_layers} layers the draft gets {' '.join(map(str, layers))}, the most "
        f"overlap untrained ({seconds:.0f} s on {int(live.sum())} positions)",
        flush=True,
    )
    return layers
