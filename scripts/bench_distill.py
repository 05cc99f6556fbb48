"""Measure a training step of `specjax distill` against its bare matrix products.

The real step of a head, and a program of nothing but the products of the same shapes, forward and backward,
run by turns: the ratio is what the rest of the step leaves of the machine.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from specjax.scripts import _cli, _distill_options


@dataclasses.dataclass(frozen=True)
class Config:
    """The step to measure."""

    model: str = "smollm2"
    """The target, whose sizes count: 'smollm2', or a path to a model file."""
    passes: int = 2
    """Steps ahead that the head is trained on."""
    batch: int = 8
    """Sequences of a forward."""
    capacity: int = 256
    """Tokens of a sequence."""
    scored: int = 8192
    """Tokens that the draft can say."""
    losses: tuple[str, ...] = ("forward_kl:1",)
    """Losses with their weights, as in distill."""
    runs: int = 7
    """Runs of each; medians count."""

    def __post_init__(self) -> None:
        if min(self.passes, self.batch, self.capacity, self.scored, self.runs) < 1:
            raise ValueError("the sizes and --runs must be at least 1")


class Product(NamedTuple):
    """One product of a step, forward and backward."""

    equation: str
    left: tuple[int, ...]  # states, whose gradient is always wanted
    right: tuple[int, ...]  # a weight; or states, in attention
    gradients: int = 2  # of both, of the left alone, or of none


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the medians of both, and of the ratios of neighbouring runs."""
    config = _cli.parse(Config, argv, __doc__)
    _cli.start()
    import jax
    import numpy as np

    from specjax.models.load import load_model

    with _cli.blame_input(OSError, ValueError):
        _distill_options.check_losses(_distill_options.parse_losses(config.losses))
        loaded = load_model(config.model)
        step = real_step(config, loaded)
    bare = bare_products(products_of(config, loaded.model.config))
    pairs = []
    for _ in range(config.runs + 1):  # the first one compiles
        pairs.append([seconds(run) for run in (step, bare)])
    times = np.array(pairs[1:])
    whole, products = np.median(times, axis=0)
    share = np.median(times[:, 1] / times[:, 0])
    positions = config.batch * config.capacity
    print(
        f"{positions} positions, {config.passes} passes, {jax.devices()[0].platform}: a step {whole:.3f} s, "
        f"its products alone {products:.3f} s, {share:.0%} of it (medians of {config.runs} runs by turns); "
        f"{positions / whole:.0f} positions/s"
    )


def seconds(run: Callable[[], Any]) -> float:
    """How long one run takes."""
    import jax

    begin = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - begin


def real_step(config: Config, loaded: Any) -> Callable[[], Any]:
    """What `specjax distill` runs, on random data."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from specjax.distill.fit import make_step
    from specjax.distill.train import (
        Batch,
        Objective,
        Schedule,
        init_state,
        make_optimizer,
        split_params,
    )
    from specjax.models.derive import feature_head, output_rows
    from specjax.models.unroll import HeadStudent

    size, width = loaded.model.vocab_size, loaded.model.config.width
    vocabulary = np.arange(min(config.scored, size), dtype=np.int32)
    model, params = feature_head(loaded.model, loaded.params, 1, vocabulary)
    trained, frozen = split_params(params, frozenset({"embedding", "vocabulary", "head"}))
    frozen = {**frozen, "target_head": output_rows(loaded.params)[vocabulary]}
    optimizer = make_optimizer(Schedule(1000))
    objective = Objective(_distill_options.parse_losses(config.losses))
    step = make_step(HeadStudent(model, config.passes), objective, optimizer)
    rng = np.random.default_rng(0)
    shape = (1, config.batch, config.capacity)
    ids = jnp.asarray(rng.integers(0, len(vocabulary), shape), jnp.int32)
    batch = Batch(
        tokens=ids,
        features=jnp.asarray(rng.normal(size=(*shape, width)), jnp.float16),
        log_normalizer=jnp.full(shape, 10, jnp.float32),
        labels=ids,
        best=ids,
        mask=jnp.ones(shape, bool),
        lengths=jnp.full(shape[:2], config.capacity, jnp.int32),
    )
    frozen = jax.tree.map(jnp.asarray, frozen)
    state = init_state(trained, optimizer)

    def run() -> Any:
        nonlocal state
        state, metrics = step(state, batch, frozen)
        return metrics

    return run


def products_of(config: Config, sizes: Any) -> list[Product]:
    """The products of a step of a one-layer head: its layer and the scores, in each pass."""
    rows, length = config.batch, config.capacity
    count, width, scored = rows * length, sizes.width, min(config.scored, sizes.vocab_size)
    heads, kv_heads, head_dim = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
    linear = "ni,oi->no"
    queries = (rows, kv_heads, heads // kv_heads * length, head_dim)
    keys = (rows, kv_heads, length, head_dim)
    one_pass = [
        Product(linear, (count, 2 * width), (width, 2 * width)),  # state and token become one
        Product(linear, (count, width), ((heads + 2 * kv_heads) * head_dim, width)),
        Product("bkqd,bksd->bkqs", queries, keys),
        Product("bkqs,bksd->bkqd", (*queries[:3], length), keys),
        Product(linear, (count, heads * head_dim), (width, heads * head_dim)),
        Product(linear, (count, width), (2 * sizes.mlp_width, width)),  # gate and up
        Product(linear, (count, sizes.mlp_width), (width, sizes.mlp_width)),
        Product(linear, (count, width), (scored, width), gradients=1),  # the draft's scores, by a frozen head
    ]
    target = Product(linear, (count, width), (scored, width), gradients=0)  # its scores serve all passes
    return [*one_pass * config.passes, target]


def bare_products(products: Sequence[Product]) -> Callable[[], Any]:
    """A program of nothing else."""
    import jax
    import jax.numpy as jnp

    keys = iter(jax.random.split(jax.random.key(0), 3 * len(products)))

    def program(operands: Any) -> list[Any]:
        results = []
        for product, (left, right, cotangent) in zip(products, operands, strict=True):
            wanted = (left, right)[: product.gradients]

            def multiply(*given: Any, product: Product = product, rest: Any = (left, right)) -> Any:
                return jnp.einsum(product.equation, *given, *rest[len(given) :])

            value, back = jax.vjp(multiply, *wanted)
            results += [value, *back(cotangent)]
        return results

    def random(shape: tuple[int, ...]) -> Any:
        return jax.random.normal(next(keys), shape)

    operands = []
    for product in products:
        left, right = random(product.left), random(product.right)
        value = jax.eval_shape(
            lambda a, b, equation=product.equation: jnp.einsum(equation, a, b), left, right
        )
        operands.append((left, right, random(value.shape)))
    compiled = jax.jit(program).lower(operands).compile()
    return lambda: compiled(operands)


if __name__ == "__main__":
    sys.exit(_cli.run(main))
