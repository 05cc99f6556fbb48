"""The losses of one position in float64, token by token, and their gradients by differences."""

from __future__ import annotations

import numpy as np


def softmax(logits):
    """[V] float64; -inf is probability 0."""
    logits = np.asarray(logits, np.float64)
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def log_softmax(logits):
    """[V] float64."""
    logits = np.asarray(logits, np.float64)
    with np.errstate(divide="ignore"):
        return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


def forward_kl(p, q, log_p, log_q):
    return sum(
        p[x] * (log_p[x] - log_q[x]) for x in range(len(p)) if np.isfinite(log_p[x]) and np.isfinite(log_q[x])
    )


def reverse_kl(p, q, log_p, log_q):
    return sum(
        q[x] * (log_q[x] - log_p[x]) for x in range(len(p)) if np.isfinite(log_p[x]) and np.isfinite(log_q[x])
    )


def jsd(p, q, log_p, log_q, beta):
    """Over beta (1 - beta), with the KLs as its limits."""
    if beta == 0:
        return forward_kl(p, q, log_p, log_q)
    if beta == 1:
        return reverse_kl(p, q, log_p, log_q)
    total = 0.0
    for x in range(len(p)):
        m = beta * p[x] + (1 - beta) * q[x]
        if p[x] > 0:
            total += beta * p[x] * np.log(p[x] / m)
        if q[x] > 0:
            total += (1 - beta) * q[x] * np.log(q[x] / m)
    return total / (beta * (1 - beta))


def overlap(p, q):
    return sum(min(a, b) for a, b in zip(p, q, strict=True))


def loss(name, target_logits, draft_logits, *, label=0, beta=0.5, eta=3.0, temperature=1.0, weight_at=None):
    """One loss of one position. ``weight_at``: the acceptance that lk_hybrid's weight is held at."""
    target, draft = (np.asarray(x, np.float64) / temperature for x in (target_logits, draft_logits))
    p, q, log_p, log_q = softmax(target), softmax(draft), log_softmax(target), log_softmax(draft)
    square = temperature**2
    if name == "forward_kl":
        return square * forward_kl(p, q, log_p, log_q)
    if name == "reverse_kl":
        return square * reverse_kl(p, q, log_p, log_q)
    if name == "jsd":
        return square * jsd(p, q, log_p, log_q, beta)
    if name == "tv":
        return 1 - overlap(p, q)
    if name == "lk":
        return -np.log(overlap(p, q))
    if name == "lk_hybrid":
        weight = np.exp(-eta * (overlap(p, q) if weight_at is None else weight_at))
        return weight * square_free(p, q, log_p, log_q) + (1 - weight) * -np.log(overlap(p, q))
    if name == "cross_entropy":
        return -log_q[label]
    raise ValueError(name)


def square_free(p, q, log_p, log_q):
    return forward_kl(p, q, log_p, log_q)


def gradient(name, target_logits, draft_logits, **options):
    """By central differences in float64; lk_hybrid's weight doesn't move."""
    p, q = (softmax(np.asarray(x) / options.get("temperature", 1.0)) for x in (target_logits, draft_logits))
    options.setdefault("weight_at", overlap(p, q))
    draft = np.asarray(draft_logits, np.float64)
    out = np.zeros_like(draft)
    for x in np.flatnonzero(np.isfinite(draft)):
        step = np.zeros_like(draft)
        step[x] = 1e-6
        out[x] = (
            loss(name, target_logits, draft + step, **options)
            - loss(name, target_logits, draft - step, **options)
        ) / 2e-6
    return out
