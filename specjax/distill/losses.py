r"""How far a draft's law q is from the target's p, position by position, in float32.

Every loss here is a function of a few sums over the vocabulary, such as :math:`\sum_x \min(p_x, q_x)`. So
they can be taken chunk by chunk, and [B, T, V] is never held: :mod:`specjax.distill.chunked`.

A token that a law leaves out (its logit is -inf) has no part in the sums that its logarithm would make
infinite: a draft with a smaller vocabulary is compared where it can speak, with the target's true
probabilities there. Its overlap, and so acceptance, is exact. Log-probabilities below -1e5 count as that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import chex
import jax
import jax.numpy as jnp

from specjax.types import Array, pytree

__all__ = ["LOSSES", "Loss", "Sums", "add_sums", "loss_of", "mix", "position_losses", "sums_of"]

_LOWEST = -1e5


@pytree
class Sums:
    """What a position's losses are made of; each [...] float32, and additive over the vocabulary."""

    forward_kl: Array  # sum p (log p - log q)
    reverse_kl: Array  # sum q (log q - log p)
    jsd: Array  # sum b p log(p/m) + (1-b) q log(q/m), over b (1-b); m = b p + (1-b) q
    overlap: Array  # sum min(p, q)
    log_label: Array  # log q of the position's label; 0 where the label isn't among the tokens


def sums_of(log_p: Array, log_q: Array, is_label: Array | None = None, *, beta: float = 0.5) -> Sums:
    r"""The sums over some tokens, given both laws' log-probabilities of these.

    Args:
      log_p: [..., C] the target's; -inf where it forbids a token.
      log_q: [..., C] the draft's; -inf for what it can't say.
      is_label: [..., C] bool, which token the target said; None for none.
      beta: of the Jensen-Shannon divergence, in [0, 1]. It is divided by b (1-b), since it vanishes at both
        ends: its limits are the forward KL at 0 and the reverse KL at 1.

    Returns:
      The sums, and gradients that are finite whatever is -inf.
    """
    chex.assert_equal_shape([log_p, log_q])
    log_p, log_q = _widen(log_p), _widen(log_q)
    says_p, says_q = log_p > -jnp.inf, log_q > -jnp.inf
    p = jnp.where(says_p, jnp.exp(jnp.where(says_p, log_p, 0)), 0)
    q = jnp.where(says_q, jnp.exp(jnp.where(says_q, log_q, 0)), 0)
    # Finite stand-ins, chosen before any product: 0 * inf would be NaN in the gradient.
    lower_p = jnp.maximum(jnp.where(says_p, log_p, _LOWEST), _LOWEST)
    lower_q = jnp.maximum(jnp.where(says_q, log_q, _LOWEST), _LOWEST)
    gap = lower_p - lower_q
    label = jnp.zeros_like(q) if is_label is None else jnp.where(is_label & says_q, lower_q, 0)

    def total(x: Array) -> Array:
        return jnp.sum(x, axis=-1)

    return Sums(
        forward_kl=total(jnp.where(says_q, p * gap, 0)),
        reverse_kl=total(-q * gap),
        jsd=total(jnp.where(says_q, _jsd(p, q, gap, beta), 0)),
        overlap=total(jnp.minimum(p, q)),
        log_label=total(label),
    )


def _jsd(p: Array, q: Array, gap: Array, beta: float) -> Array:
    """The terms of JSD / (b (1-b)), with ``gap`` = log p - log q: log(m/q) = log1p(b expm1(gap))."""
    if not 0 <= beta <= 1:
        raise ValueError(f"beta must be in [0, 1], not {beta}")
    if beta == 0:
        return p * gap
    if beta == 1:
        return -q * gap

    def log_mixture(share: float, gap: Array) -> Array:
        # Where expm1 would overflow, the other half of the mixture is beneath rounding.
        small = jnp.minimum(gap, 30.0)
        return jnp.where(gap < 30, jnp.log1p(share * jnp.expm1(small)), gap + jnp.log(share))

    terms = -beta * p * log_mixture(1 - beta, -gap) - (1 - beta) * q * log_mixture(beta, gap)
    return terms / (beta * (1 - beta))


def add_sums(a: Sums, b: Sums) -> Sums:
    """Of two parts of the vocabulary."""
    return jax.tree.map(jnp.add, a, b)


@dataclasses.dataclass(frozen=True)
class Loss:
    """A loss on one position: a function of its sums."""

    name: str
    of: Callable[[Sums, float], Array]
    is_divergence_of_logits: bool = False  # scaled by T^2 at a temperature, so that its gradient stays


def _lk(sums: Sums, eta: float) -> Array:
    del eta
    # Acceptance 0 has no finite logarithm; its gradient there is nothing too.
    return -jnp.log(jnp.maximum(sums.overlap, 1e-30))


def _lk_hybrid(sums: Sums, eta: float) -> Array:
    weight = jnp.exp(-eta * jax.lax.stop_gradient(sums.overlap))
    return weight * sums.forward_kl + (1 - weight) * _lk(sums, eta)


LOSSES: Mapping[str, Loss] = {
    loss.name: loss
    for loss in (
        # sum p (log p - log q): covers the target's mass (Hinton et al. 2015).
        Loss("forward_kl", lambda sums, eta: sums.forward_kl, True),
        # sum q (log q - log p): seeks its modes (Gu et al. 2023).
        Loss("reverse_kl", lambda sums, eta: sums.reverse_kl, True),
        # Between the two (Agarwal et al. 2023).
        Loss("jsd", lambda sums, eta: sums.jsd, True),
        # 1 - sum min(p, q): the probability that a drafted token is rejected (Zhou et al. 2023).
        Loss("tv", lambda sums, eta: 1 - sums.overlap),
        # -log sum min(p, q): the gradient of TV over acceptance (2602.23881).
        Loss("lk", _lk),
        # w KL + (1-w) LK, w = exp(-eta acceptance) without gradient (2602.23881).
        Loss("lk_hybrid", _lk_hybrid),
        # -log q of what the target said.
        Loss("cross_entropy", lambda sums, eta: -sums.log_label),
    )
}
"""The losses by the names that jobs know them by."""


def mix(sums: Sums, weights: Mapping[str, float], *, eta: float = 3.0, temperature: float = 1.0) -> Array:
    """A weighted sum of losses, position by position.

    Args:
      sums: of each position [...], of laws taken at ``temperature``.
      weights: names in :data:`LOSSES` to their weights.
      eta: how fast ``lk_hybrid`` turns from KL to LK.
      temperature: T; the KLs and JSD carry T^2 (Hinton et al. 2015).

    Returns:
      [...] float32.

    Raises:
      ValueError: a name is unknown, or there is none.
    """
    unknown = set(weights) - set(LOSSES)
    if unknown or not weights:
        raise ValueError(f"no loss is named {min(unknown, default='')!r}; there are {', '.join(LOSSES)}")
    value = jnp.zeros_like(sums.overlap)
    for name, weight in weights.items():
        loss = LOSSES[name]
        scale = weight * (temperature**2 if loss.is_divergence_of_logits else 1.0)
        value = value + scale * loss.of(sums, eta)
    return value


def position_losses(
    target_logits: Array,
    draft_logits: Array,
    labels: Array | None = None,
    *,
    mask: Array | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
) -> Sums:
    """The sums of whole logits: what the chunked version must equal, and enough for small vocabularies.

    Args:
      target_logits: [..., V] any float dtype.
      draft_logits: [..., W]; W > V is padding and cut off, W < V is a smaller vocabulary: q = 0 beyond it.
      labels: [...] int32, what the target said.
      mask: [...] bool; elsewhere the sums are those of equal laws, and there is no gradient even if the
        logits are no numbers.
      beta: see :func:`sums_of`.
      temperature: both laws are taken at it.

    Returns:
      The sums of each position.
    """
    chex.assert_equal_rank([target_logits, draft_logits])
    size = target_logits.shape[-1]
    missing = max(size - draft_logits.shape[-1], 0)
    draft_logits = jnp.pad(
        _widen(draft_logits)[..., :size],
        [(0, 0)] * (draft_logits.ndim - 1) + [(0, missing)],
        constant_values=-jnp.inf,
    )
    target_logits = _widen(target_logits)
    if mask is not None:
        target_logits, draft_logits = (
            jnp.where(mask[..., None], x, 0) for x in (target_logits, draft_logits)
        )
    is_label = None if labels is None else jax.nn.one_hot(labels, size, dtype=bool)
    log_p, log_q = (jax.nn.log_softmax(x / temperature, axis=-1) for x in (target_logits, draft_logits))
    return sums_of(log_p, log_q, is_label, beta=beta)


def loss_of(
    name: str, target_logits: Array, draft_logits: Array, labels: Array | None = None, **options: float
) -> Array:
    """One loss of whole logits, [...] float32; ``beta``, ``eta`` and ``temperature`` as above."""
    beta, temperature = options.pop("beta", 0.5), options.get("temperature", 1.0)
    sums = position_losses(target_logits, draft_logits, labels, beta=beta, temperature=temperature)
    return mix(sums, {name: 1.0}, **options)


def _widen(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))
