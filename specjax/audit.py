"""Is it lossless here? Checks that a user can run on their own target, draft and options.

Each check compares the real jitted step with a reference that knows nothing of drafts: plain decoding,
or the target's own distribution after the warp. Seeds are fixed, so an audit gives the same answer twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decode import speculative_step, start
from specjax.generate import Decoding, lay_out
from specjax.parallel.sharding import Placement
from specjax.prefill import prefill
from specjax.sampling import make_sampling, warp
from specjax.theory import stop_probs
from specjax.types import (
    Array,
    Cache,
    Context,
    Drafter,
    Model,
    Params,
    Rule,
    SamplingParams,
    StepInfo,
    pytree,
)
from specjax.verify import RULES

__all__ = ["Audit", "Check"]

SIGNIFICANCE = 1e-4
"""A sampled check fails below this p-value: a sound decoder is blamed once in 10,000 checks."""
BINS = 20


@dataclasses.dataclass(frozen=True)
class Check:
    """One claim, and what was seen of it."""

    name: str
    passed: bool
    summary: str
    figures: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Audit:
    """What is audited, and how closely."""

    target: Model
    target_params: Params
    drafter: Drafter
    draft_params: Params
    prompts: Sequence[Sequence[int]]
    plain_drafter: Drafter | None = None  # a SilentDrafter has plain decoding make forwards of K + 1 too
    rule: str = "token"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of make_sampling, but no seed
    stop_tokens: Sequence[int] = ()
    batch_size: int = 8
    max_tokens: int = 64
    num_draws: int = 1024  # sampled sequences from each context
    num_contexts: int = 2  # the first prompts, for the sampled checks
    placement: Placement | None = None  # on many devices: where models and weights lie already

    def run(self, which: Sequence[str] = ("greedy", "law", "coupled")) -> Iterator[Check]:
        """Makes checks, one after the other; the audit passes if each of them does."""
        if "greedy" in which:
            yield self.greedy_identity()
        if "law" in which:
            yield from self.sampled_law()
        if "coupled" in which:
            yield self.coupled_identity()

    def greedy_identity(self) -> Check:
        """Greedy output is plain decoding's, token for token; each divergence is shown with its logit gap.

        In float32 there is none. In bfloat16 a forward of K + 1 tokens may round otherwise than one of a
        single token, and turn an argmax whose lead is within the rounding.
        """
        plain = self._decode("greedy", speculative=False)
        fast = self._decode("greedy", speculative=True)
        divergences = []
        for number, (prompt, left, right) in enumerate(zip(self.prompts, plain, fast, strict=True)):
            if left != right:
                same = next(
                    i for i, (a, b) in enumerate(zip([*left, -1], [*right, -1], strict=False)) if a != b
                )
                logits = self._score([*prompt, *left[:same]])
                best = np.sort(logits)[-2:]
                divergences.append(
                    {
                        "prompt": number,
                        "position": same,
                        "plain": left[same : same + 1],
                        "speculative": right[same : same + 1],
                        "top_2_gap": float(best[1] - best[0]),
                        "best_logit": float(best[1]),
                    }
                )
        tokens = sum(map(len, plain))
        summary = f"{tokens} tokens of {len(plain)} prompts, {len(divergences)} prompts diverge"
        for row in divergences:
            summary += (
                f"; prompt {row['prompt']} at token {row['position']}: {row['plain']} became "
                f"{row['speculative']}, the two best logits are {row['top_2_gap']:.2g} apart near "
                f"{row['best_logit']:.3g}"
            )
        return Check(
            "greedy identity", not divergences, summary, {"tokens": tokens, "divergences": divergences}
        )

    def coupled_identity(self) -> Check:
        """Under the coupled rule, sampled output is plain sampling's, token for token."""
        plain = self._decode("coupled", speculative=False)
        fast = self._decode("coupled", speculative=True)
        wrong = [number for number, (a, b) in enumerate(zip(plain, fast, strict=True)) if a != b]
        tokens = sum(map(len, plain))
        summary = f"{tokens} sampled tokens of {len(plain)} prompts, {len(wrong)} prompts diverge"
        return Check("coupled identity", not wrong, summary, {"tokens": tokens, "diverging_prompts": wrong})

    def sampled_law(self) -> Iterator[Check]:
        """The law of sampled tokens is the target's, and as many drafts are accepted as theory says.

        From each context many rows take two steps. The first token of each is counted against the target's
        distribution there (Pearson's chi-square, and the total variation). Every token of both steps is
        put through its conditional distribution function under the target, given the tokens before it
        (Rosenblatt 1952): if the law is the target's, these are independent uniforms. Acceptance of the
        first drafted token is held against sum_x min(p, q), and tokens a step against their expectation
        over the rule's uniforms.
        """
        samples = []
        for number, prompt in enumerate(self.prompts[: self.num_contexts]):
            sample = self._sample(prompt, first_seed=number * self.num_draws)
            yield self._first_token(number, sample)
            samples.append(sample)
        yield _every_token(samples)
        if self.rule in ("token", "block"):  # the others judge without a uniform
            yield _tokens_a_step(samples, self.rule)

    def _first_token(self, number: int, sample: _Sample) -> Check:
        probs = np.asarray(sample.target_probs[0], np.float64)
        probs /= probs.sum()
        counts = np.bincount(sample.tokens[:, 0], minlength=len(probs))
        draws = int(counts.sum())
        statistic, p_value = _chi_square(*_pool(counts, probs * draws))
        variation = 0.5 * np.abs(counts / draws - probs).sum()
        # What sampling alone gives: half the sum of the mean |count / n - p|, Gaussian.
        noise = 0.5 * np.sqrt(2 / np.pi * probs * (1 - probs) / draws).sum()
        passed = p_value > SIGNIFICANCE and not counts[probs == 0].any()
        figures = {
            "draws": draws,
            "chi_square": statistic,
            "p_value": p_value,
            "total_variation": float(variation),
            "total_variation_of_noise": float(noise),
        }
        summary = (
            f"{draws} draws, chi-square {statistic:.1f}, p = {p_value:.3g}, total variation {variation:.4f} "
            f"where noise alone gives {noise:.4f}"
        )
        if self.rule == "token" and sample.num_drafted[:, 0].all():
            # For the token rule, how often the first drafted token stands is known exactly.
            exact = float(np.minimum(probs, sample.draft_probs[0]).sum())
            seen = float((sample.num_accepted[:, 0] > 0).mean())
            error = np.sqrt(max(exact * (1 - exact), 1e-9) / draws)
            passed &= abs(seen - exact) < 4.5 * error + 1e-5
            figures |= {"first_draft_accepted": seen, "exactly": exact, "standard_error": float(error)}
            summary += f"; first drafted token accepted {seen:.4f}, exactly {exact:.4f} +- {error:.4f}"
        return Check(f"law at context {number}", bool(passed), summary, figures)

    def _decode(self, rule: str, *, speculative: bool) -> list[list[int]]:
        """The prompts' outputs, in batches; the seeds are the prompts' numbers."""
        outputs: list[list[int]] = []
        for first in range(0, len(self.prompts), self.batch_size):
            greedy = {"temperature": 0.0} if rule == "greedy" else {}
            batch = self.prompts[first : first + self.batch_size]
            seeds = np.arange(first, first + len(batch))
            decoding = Decoding(
                self.target,
                self.target_params,
                batch,
                max_tokens=self.max_tokens,
                drafter=self.drafter if speculative else self.plain_drafter,
                draft_params=self.draft_params if speculative else None,
                rule=rule,
                sampling=make_sampling(len(batch), **{**self.options, **greedy, "seed": seeds}),
                stop_tokens=self.stop_tokens,
                placement=self.placement,
            )
            decoding.advance()
            rows = decoding.rows()
            if any(row.failed for row in rows):
                raise ValueError("the target's logits stop being numbers: there is no law to audit")
            outputs += [row.tokens for row in rows]
        return outputs

    def _score(self, tokens: Sequence[int]) -> np.ndarray:
        """The target's logits [V] after ``tokens``, by a forward of one token."""
        padded = (
            jnp.zeros((1, 1 << len(tokens).bit_length()), jnp.int32)
            .at[0, : len(tokens)]
            .set(jnp.asarray(tokens))
        )
        length = jnp.asarray([len(tokens)], jnp.int32)

        def read(cache: Cache, block: Array, positions: Array) -> Cache:
            return self.target.apply(self.target_params, block, cache, positions).cache

        cache = prefill(read, self.target.init_cache(*padded.shape), padded, length)
        newest = padded[:, len(tokens) - 1 :][:, :1]
        output = self.target.apply(self.target_params, newest, cache, length[:, None] - 1)
        return np.asarray(output.logits[0, 0], np.float64)

    def _sample(self, prompt: Sequence[int], first_seed: int) -> _Sample:
        """Two steps of ``num_draws`` rows from one context."""
        num_drafted = self.drafter.num_draft_tokens
        parts = []
        for first in range(first_seed, first_seed + self.num_draws, self.batch_size):
            prompts = [prompt] * self.batch_size
            # Room for two whole blocks, and no stop tokens: a row that ended would say nothing further.
            tokens, length, limit = lay_out(self.target, prompts, 2 * num_drafted + 3, num_drafted)
            context = Context(tokens, length, length, jnp.full((self.batch_size, 1), -1, jnp.int32))
            seeds = np.arange(first, first + self.batch_size)
            sampling = make_sampling(self.batch_size, **{**self.options, "seed": seeds})
            part = _two_steps(
                (self.target_params, self.draft_params),
                context,
                limit,
                sampling,
                target=self.target,
                drafter=self.drafter,
                rule=RULES[self.rule],
            )
            parts.append(jax.device_get(part))
        sample = jax.tree.map(lambda *x: np.concatenate(x), *parts)
        if not np.isfinite(sample.target_probs).all():
            raise ValueError(
                f"the target has no law after the prompt {list(prompt)[:8]}...: its logits are no numbers"
            )
        return sample


@pytree
class _Sample:
    """What two steps from one context gave, and what the target says of it (arrays; [N] rows in all)."""

    tokens: Array  # [N, M] int32: what was emitted, then filler
    emitted: Array  # [N, M] bool
    below: Array  # [N, M]: the target's mass of the ids below each token, given the tokens before
    mass: Array  # [N, M]: and of the token itself
    target_probs: Array  # [1, V] a batch: the target's distribution of the first token
    draft_probs: Array  # [1, V] a batch: the draft's
    num_drafted: Array  # [N, 2]
    num_accepted: Array  # [N, 2]
    accept_probs: Array  # [N, 2, K]


@partial(jax.jit, static_argnames=("target", "drafter", "rule"))
def _two_steps(
    params: tuple[Params, Params],
    context: Context,
    limit: Array,
    sampling: SamplingParams,
    *,
    target: Model,
    drafter: Drafter,
    rule: Rule,
) -> _Sample:
    begin = start(*params, context, limit, sampling, target=target, drafter=drafter)
    step = partial(speculative_step, target=target, drafter=drafter, rule=rule)
    middle, first = step(begin, *params)
    end, second = step(middle, *params)

    # One forward over all that came out, in a cache that no step has touched.
    count = 2 * (drafter.num_draft_tokens + 1)
    slots = context.length[:, None] + jnp.arange(count)[None]
    fed = jnp.take_along_axis(end.context.tokens, slots - 1, axis=1)
    output = target.apply(params[0], fed, begin.target_cache, slots - 1)
    written = dataclasses.replace(context, tokens=end.context.tokens)
    probs = jax.nn.softmax(warp(output.logits, sampling, written), axis=-1)
    tokens = jnp.take_along_axis(end.context.tokens, slots, axis=1)
    ids = jax.lax.broadcasted_iota(jnp.int32, probs.shape, 2)
    if first.draft.logits is None:
        draft_probs = jax.nn.one_hot(first.draft.tokens[:1, 0], probs.shape[-1])
    else:
        draft_probs = jax.nn.softmax(first.draft.logits[:1, 0], axis=-1)

    def both(get: Callable[[StepInfo], Array]) -> Array:
        return jnp.stack([get(first), get(second)], axis=1)

    return _Sample(
        tokens=tokens,
        emitted=slots < end.context.length[:, None],
        below=jnp.sum(jnp.where(ids < tokens[:, :, None], probs, 0), axis=-1),
        mass=jnp.take_along_axis(probs, tokens[:, :, None], axis=-1)[..., 0],
        target_probs=probs[:1, 0],
        draft_probs=draft_probs,
        num_drafted=both(lambda info: info.num_drafted),
        num_accepted=both(lambda info: info.verdict.num_accepted),
        accept_probs=both(lambda info: info.verdict.accept_probs),
    )


def _every_token(samples: Sequence[_Sample]) -> Check:
    """Pearson's chi-square of every token's randomised distribution function against the uniform."""
    emitted = np.concatenate([x.emitted.ravel() for x in samples])
    below, mass = (
        np.concatenate([getattr(x, name).ravel() for x in samples])[emitted] for name in ("below", "mass")
    )
    inside = np.random.default_rng(0).random(len(mass))  # spreads each token over its own mass
    counts = np.histogram(np.clip(below + inside * mass, 0, 1 - 1e-9), BINS, (0, 1))[0]
    statistic, p_value = _chi_square(counts, np.full(BINS, len(mass) / BINS))
    impossible = int((mass == 0).sum())
    summary = (
        f"{len(mass)} tokens over two steps, chi-square in {BINS} bins {statistic:.1f}, p = {p_value:.3g}"
    )
    if impossible:
        summary += f", {impossible} tokens that the target never says"
    figures = {
        "tokens": len(mass),
        "chi_square": statistic,
        "p_value": p_value,
        "impossible_tokens": impossible,
    }
    return Check("law of every token", p_value > SIGNIFICANCE and not impossible, summary, figures)


def _tokens_a_step(samples: Sequence[_Sample], rule: str) -> Check:
    """Accepted tokens against their expectation, given each step's draft, over the rule's uniforms."""
    seen = np.concatenate([x.num_accepted.ravel() for x in samples])
    probs = np.concatenate([x.accept_probs.reshape(-1, x.accept_probs.shape[-1]) for x in samples])
    law = stop_probs(np.asarray(probs, np.float64), rule)
    values = np.arange(law.shape[1])
    mean = law @ values
    error = np.sqrt((law @ values**2 - mean**2).sum()) / len(seen)
    passed = abs(seen.mean() - mean.mean()) < 4.5 * error + 1e-5
    figures = {"measured": 1 + seen.mean(), "exactly": 1 + mean.mean(), "standard_error": error}
    summary = "{measured:.4f} tokens a step, exactly {exactly:.4f} +- {standard_error:.4f}".format(**figures)
    return Check("tokens a step", bool(passed), summary, {name: float(x) for name, x in figures.items()})


def _pool(counts: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Puts all categories that expect fewer than 5 into one."""
    rare = expected < 5
    if not rare.any():
        return counts, expected
    return np.append(counts[~rare], counts[rare].sum()), np.append(expected[~rare], expected[rare].sum())


def _chi_square(counts: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Pearson's statistic and its p-value."""
    possible = expected > 0
    if counts[~possible].any():
        return float("inf"), 0.0
    statistic = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    freedom = int(possible.sum()) - 1
    if freedom < 1:
        return statistic, 1.0
    return statistic, float(jax.scipy.special.gammaincc(freedom / 2, statistic / 2))
