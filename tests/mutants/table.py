"""The faults that the tests must find: each an edit of the library, and the tests that fail on it.

What is not here is not known to be tested. Of a fault that the code's structure rules out, the nearest edit
stands for it. An edit's old text must occur exactly once, so that the table cannot rot.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A planted fault."""

    name: str
    file: str  # in specjax/
    old: str
    new: str
    killers: tuple[str, ...]  # in tests/; each must fail


def mutant(name: str, file: str, old: str, new: str, *killers: str) -> Mutant:
    return Mutant(name, file, old, new, killers)


MUTANTS = [
    # The law.
    mutant(
        "draft noise reused for the residual",
        "verify.py",
        "jnp.full_like(address.start, offset), Role.DRAFT)",
        "jnp.full_like(address.start, offset), Role.SAMPLE)",
        "test_verify.py::test_the_residual_has_noise_of_its_own[token]",
    ),
    mutant(
        "q given before the filter that the draft was sampled with",
        "drafters/model.py",
        "return (token, output.cache, append(context, token)), (token, logits)",
        "return (token, output.cache, append(context, token)), (token, output.logits[:, -1])",
        "drafters/test_model.py::test_the_logits_are_what_the_tokens_were_drawn_from",
    ),
    mutant(
        "argmax draft given as if it had been sampled",
        "drafters/model.py",
        "return sample(keys, warped), warped",
        "return jnp.argmax(warped, axis=-1).astype(jnp.int32), warped",
        "drafters/test_model.py::test_the_logits_are_what_the_tokens_were_drawn_from",
    ),
    mutant(
        "p drawn in place of the residual",
        "verify.py",
        "rest = jnp.maximum(scale[:, None] * target - draft_probs, 0)",
        "rest = target",
        "test_verify.py::test_a_rule_equals_its_loop[token-soft]",
    ),
    mutant(
        "accepted if equal to an independent sample of the target",
        "verify.py",
        "jnp.minimum(_ratios(draft, target_logits), 1)",
        "jnp.exp(_log_prob(target_logits, jnp.pad(draft.tokens, ((0, 0), (0, 1))))[:, :-1])",
        "test_verify.py::test_a_rule_equals_its_loop[token-soft]",
    ),
    mutant(
        "temperature missing in the ratio",
        "decode.py",
        "draft.logits[:, :width] if",
        "draft.logits[:, :width] * state.sampling.temperature[:, None, None] if",
        "test_lossless.py::test_exact_law[token-soft-1]",
    ),
    mutant(
        "draft sampled in bfloat16, its ratio taken in float32",
        "drafters/model.py",
        "return sample(keys, warped), warped",
        "return sample(keys, warped.astype(jnp.bfloat16)), warped",
        "drafters/test_model.py::test_the_tokens_can_be_drawn_again_from_the_logits",
    ),
    mutant(
        "block rule stops at the first failure",
        "verify.py",
        "num_accepted, _ = lax.scan(keep_last, jnp.zeros_like(draft.lengths), (index, passed.T))",
        "num_accepted = _leading(passed)",
        "test_verify.py::test_the_block_rule_keeps_the_longest_prefix_that_passes",
    ),
    mutant(
        "<= in place of <, token rule",
        "verify.py",
        "_leading(_accept_uniforms(address, draft) < accept_probs)",
        "_leading(_accept_uniforms(address, draft) <= accept_probs)",
        "test_verify.py::test_an_impossible_token_never_passes[token-False]",
    ),
    mutant(
        "<= in place of <, block rule",
        "verify.py",
        "passed = _accept_uniforms(address, draft) < accept_probs",
        "passed = _accept_uniforms(address, draft) <= accept_probs",
        "test_verify.py::test_an_impossible_token_never_passes[block-True]",
    ),
    mutant(
        "bonus drawn from position K in place of K + 1",
        "verify.py",
        "_probs(pick(target_logits, num_accepted))",
        "_probs(pick(target_logits, jnp.minimum(num_accepted, draft.tokens.shape[1] - 1)))",
        "test_verify.py::test_a_rule_equals_its_loop[token-one-hot]",
    ),
    mutant(
        "noise of thrown-away positions used again",
        "sampling.py",
        "key = jax.random.fold_in(jax.random.key(seed), start)\n"
        "        return jax.random.fold_in(key, offset * len(Role) + role)",
        "key = jax.random.fold_in(jax.random.key(seed), start + offset)\n"
        "        return jax.random.fold_in(key, jnp.int32(role))",
        "test_sampling.py::test_another_address_is_another_key",
        "test_counted_law.py::test_what_a_step_throws_away_does_not_bend_the_next",
    ),
    mutant(
        "every step draws with the same noise",
        "decode.py",
        "rule.verify(Address(state.sampling.seed, state.context.length)",
        "rule.verify(Address(state.sampling.seed, jnp.ones_like(state.context.length))",
        "test_generate.py::test_every_step_draws_anew[plain]",
    ),
    mutant(
        "one noise for all tokens of a draft",
        "verify.py",
        "jnp.full_like(address.start, offset), Role.DRAFT)",
        "jnp.zeros_like(address.start), Role.DRAFT)",
        "test_verify.py::test_the_draws_of_a_step_have_addresses_of_their_own[token]",
    ),
    mutant(
        "coupled noise by offset, not by position",
        "verify.py",
        "Address(address.seed, address.start + offset)",
        "Address(address.seed, offset)",
        "test_verify.py::test_coupled_says_what_plain_sampling_says[False]",
    ),
    mutant(
        "bonus only after K tokens, not after a row's own draft",
        "verify.py",
        "(num_accepted == draft.lengths)",
        "(num_accepted == num_drafted)",
        "test_verify.py::test_a_rule_equals_its_loop[token-soft]",
    ),
    mutant(
        "filler judged as if it were drafted",
        "verify.py",
        "jnp.arange(accept_probs.shape[1])[None] < lengths[:, None]",
        "jnp.arange(accept_probs.shape[1])[None] < accept_probs.shape[1] + 0 * lengths[:, None]",
        "test_verify.py::test_a_rule_equals_its_loop[token-soft]",
    ),
    mutant(
        "a filter that drops the token at its threshold",
        "sampling.py",
        "jnp.where(order >= low[..., None], logits, -jnp.inf)",
        "jnp.where(order > low[..., None], logits, -jnp.inf)",
        "test_sampling.py::test_top_p_is_taken_of_what_top_k_left",
    ),
    mutant(
        "penalties blind to the drafted tokens before a position",
        "sampling.py",
        "(place > i)",
        "(place > count)",
        "test_options.py::test_every_position_of_a_block_sees_what_stands_before_it",
    ),
    mutant(
        "min_tokens counts the prompt too",
        "sampling.py",
        "jnp.arange(count)[None] - context.prompt_length[:, None]",
        "jnp.arange(count)[None] + 0 * context.prompt_length[:, None]",
        "test_options.py::test_every_position_of_a_block_sees_what_stands_before_it",
    ),
    # The cache and what is committed.
    mutant(
        "rejected tokens are left in the row",
        "decode.py",
        "count = jnp.where(failed, judged.num_sound, verdict.num_accepted + 1)",
        "count = jnp.where(failed, judged.num_sound, draft.tokens.shape[1] + 1)",
        "test_decode.py::test_a_step_reports_what_it_did",
    ),
    mutant(
        "a rejected token's key left visible",
        "cache.py",
        "(first + jnp.arange(count))[None, None, :] <= positions[:, :, None]",
        "(first + jnp.arange(count))[None, None, :] <= positions[:, -1:, None]",
        "test_cache.py::test_mask_shows_what_lies_at_or_before_the_query",
    ),
    mutant(
        "writes past the cache's end moved back",
        "rows.py",
        'set(new.astype(row.dtype), mode="drop")',
        'set(new.astype(row.dtype), mode="clip")',
        "test_decode.py::test_blocks_that_end_at_and_past_the_caches_end[0]",
    ),
    mutant(
        "a gap in the draft's cache after a whole block",
        "drafters/model.py",
        "jnp.stack([jnp.maximum(length - 2, 0), length - 1], axis=1)",
        "jnp.stack([length - 1, length - 1], axis=1)",
        "drafters/test_model.py::test_one_token_that_was_never_fed_is_caught_up_with",
    ),
    mutant(
        "the draft's tokens fed a position too far",
        "drafters/model.py",
        "token[:, None], context.length[:, None] - 1)",
        "token[:, None], context.length[:, None])",
        "drafters/test_model.py::test_greedy_tokens_are_the_models_own[3]",
    ),
    mutant(
        "last chunk of a prompt not fed",
        "prefill.py",
        "num_chunks = -(-(jnp.max(length) - 1) // chunk)",
        "num_chunks = (jnp.max(length) - 1) // chunk",
        "test_prefill.py::test_the_cache_holds_every_token_but_the_newest[64]",
    ),
    mutant(
        "a chunk that overhangs the buffer moved back",
        "prefill.py",
        "padded = jnp.pad(tokens, ((0, 0), (0, -capacity % chunk)))",
        "padded = tokens",
        "test_prefill.py::test_the_cache_holds_every_token_but_the_newest[187]",
    ),
    # Stopping, limits, records.
    mutant(
        "the stop token itself is cut off",
        "decode.py",
        "(jnp.cumsum(stops, axis=1) - stops == 0)",
        "(jnp.cumsum(stops, axis=1) == 0)",
        "test_decode.py::test_a_stop_token_anywhere_in_a_block[1-2]",
    ),
    mutant(
        "a stop inside a block is missed",
        "decode.py",
        "(jnp.cumsum(stops, axis=1) - stops == 0)",
        "(stops | ~stops)",
        "test_decode.py::test_a_stop_token_anywhere_in_a_block[1-2]",
    ),
    mutant(
        "a token more than was asked for",
        "generate.py",
        "np.minimum(length + budget, target.context_length)",
        "np.minimum(length + budget + 1, target.context_length)",
        "test_decode.py::test_every_row_has_its_own_limit",
    ),
    mutant(
        "drafts for tokens that cannot be emitted",
        "decode.py",
        "jnp.maximum(state.limit - state.context.length - 1, 0)",
        "jnp.maximum(state.limit - state.context.length, 0)",
        "test_decode.py::test_a_step_reports_what_it_did",
    ),
    mutant(
        "one row without a draft makes the step plain for all",
        "decode.py",
        "jnp.any(draft.lengths > 0)",
        "jnp.all(draft.lengths > 0)",
        "test_compilation.py::test_a_step_without_a_draft_feeds_one_token",
    ),
    mutant(
        "a row fails for what lies behind a rejected token",
        "decode.py",
        "failed = (verdict.num_accepted >= judged.num_sound)",
        "failed = (draft.tokens.shape[1] >= judged.num_sound)",
        "test_decode.py::test_what_breaks_behind_a_rejected_token_is_never_seen[greedy]",
    ),
    mutant(
        "corrected and bonus tokens confused",
        "record.py",
        "jnp.where(whole, Source.BONUS, Source.CORRECTED)",
        "jnp.where(whole, Source.CORRECTED, Source.BONUS)",
        "test_generate.py::test_records_of_rows_that_keep_0_1_3_and_all",
    ),
    # The file side of a batch job.
    mutant(
        "an id may be used twice",
        "engine/ledger.py",
        "self._met.add(first)",
        "pass",
        "engine/test_ledger.py::test_each_line_is_answered_or_refused_once",
    ),
    mutant(
        "half a line left on a full disk",
        "engine/sink.py",
        "os.ftruncate(self._fd, self._end)",
        "pass",
        "engine/test_sink.py::test_what_a_full_disk_took_of_a_line_is_cut_off[28-out.jsonl]",
    ),
    mutant(
        "a torn tail cut one byte short",
        "engine/sink.py",
        "return start + found + 1",
        "return start + found",
        "engine/test_sink.py::test_a_torn_tail_is_cut_at_every_byte[out.jsonl]",
    ),
    mutant(
        "the lines of another configuration taken over",
        "engine/ledger.py",
        "file.unlink(missing_ok=True)",
        "pass",
        "engine/test_ledger.py::test_a_line_is_overwritten_for_good",
    ),
    mutant(
        "a stop string cut where the second one stands",
        "engine/stopping.py",
        "min((place for",
        "max((place for",
        "engine/test_stopping.py::test_any_division_into_blocks_gives_what_the_whole_text_gives",
    ),
    mutant(
        "a stop string taken before an earlier one is known",
        "engine/stopping.py",
        "found is not None and found <= pending",
        "found is not None",
        "engine/test_stopping.py::test_the_first_in_the_text_wins_even_if_another_is_whole_before_it",
    ),
    # Lookup.
    mutant(
        "the oldest match in place of the newest",
        "drafters/lookup.py",
        "jnp.argmax(matched * capacity + slots, axis=1)",
        "jnp.argmax(matched * capacity - slots, axis=1)",
        "drafters/test_lookup.py::test_what_is_drafted[text1-draft1]",
    ),
    mutant(
        "matches in the filler past the text",
        "drafters/lookup.py",
        "running = slots < length[:, None] - 1",
        "running = slots + 0 * length[:, None] != length[:, None] - 1",
        "drafters/test_lookup.py::test_lookup_equals_a_search_in_a_loop[3-1-3]",
    ),
    mutant(
        "a copy that runs over the end of the text",
        "drafters/lookup.py",
        "ahead % period",
        "ahead + 0 * period",
        "drafters/test_lookup.py::test_what_is_drafted[text3-draft3]",
    ),
]
