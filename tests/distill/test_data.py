"""Training data: turns, shards, what is held out, and what is kept of the target's laws."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_target

from specjax.distill.batches import Batches
from specjax.distill.on_policy import NarrowSpeaker, rewrite_shards
from specjax.distill.packing import pack, pack_shards
from specjax.distill.selfwrite import fill_shards, prompts_of, row_seeds, split_turns
from specjax.distill.sequences import TokenSequence, is_held_out, read_shards, shard_path, write_shard
from specjax.distill.targets import ScoredSequences, score_shards
from specjax.distill.vocabulary import frequent_tokens, share_covered
from specjax.models.derive import output_rows

OPENING, CLOSING = [1, 9], [2, 3, 4]


@pytest.mark.parametrize(
    ("written", "prompt", "response"),
    [
        ([7, 8, 2, 3, 4, 5, 6, 2, 3], [7, 8], [5, 6, 2]),
        ([7, 8, 2, 3, 4, 5], [7, 8], [5]),  # cut by the capacity
        ([7, 8, 9], None, None),  # the user never ends
        ([7, 8, 2, 3, 4], None, None),  # nobody answers
        ([7, 8, 2, 3, 5, 6], None, None),  # another turn follows than the assistant's
        ([7, 0, 2, 3, 4, 5], None, None),  # a special token inside the turn
        ([7, 2, 3, 4, 5], None, None),  # one token is no prompt
    ],
)
def test_turns(written, prompt, response):
    found = split_turns(OPENING, CLOSING, written, special=[0, 1, 2])
    if prompt is None:
        assert found is None
        return
    assert found.tokens.tolist() == [*OPENING, *prompt, *CLOSING, *response]
    assert found.prompt_length == len(OPENING + prompt + CLOSING)


def sequence(*tokens, prompt=2, temperature=1.0):
    return TokenSequence(np.array(tokens, np.int32), prompt, temperature)


def test_shards_are_whole_in_order_and_without_repeats(tmp_path):
    first = [sequence(1, 2, 3), sequence(1, 2, 4, temperature=0.0), sequence(1, 2, 3)]
    write_shard(shard_path(tmp_path, 0), first)
    write_shard(shard_path(tmp_path, 1), [sequence(5, 6, 7), sequence(1, 2, 4)])
    found = read_shards([shard_path(tmp_path, 0), shard_path(tmp_path, 1)])
    assert [s.tokens.tolist() for s in found] == [[1, 2, 3], [1, 2, 4], [5, 6, 7]]
    assert [s.temperature for s in found] == [1, 0, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000.arrayrecord", "00001.arrayrecord"]


@pytest.mark.parametrize(
    "record", [b"", b"sjx1", b"nope" + bytes(12), b"sjx1\xff\0\0\0" + bytes(12), bytes(13)]
)
def test_a_record_that_is_no_sequence_is_refused(record):
    with pytest.raises(ValueError, match="make the shard anew"):
        TokenSequence.from_bytes(record)


def test_what_is_held_out_depends_on_the_prompt_alone():
    sides = [
        {is_held_out(sequence(i, i + 1, *rest), 0.2) for rest in ([3], [4, 5], [6])} for i in range(2000)
    ]
    assert all(len(side) == 1 for side in sides)
    assert abs(sum(True in side for side in sides) - 400) < 4.5 * np.sqrt(2000 * 0.2 * 0.8)


def test_the_most_frequent_tokens_of_responses():
    rows = [sequence(9, 9, 5, 5, 5, 3), sequence(9, 9, 3, 7)]
    assert frequent_tokens(rows, 3, 12).tolist() == [3, 5, 7]
    assert frequent_tokens(rows, 5, 12).tolist() == [0, 1, 3, 5, 7]  # filled with the lowest ids
    assert share_covered(rows, np.array([3, 5])) == 5 / 6
    with pytest.raises(ValueError, match=r"scores 1 \.\. 12 tokens, not 13"):
        frequent_tokens(rows, 13, 12)


def test_seeds_differ_by_address_and_stay():
    assert row_seeds(0, 1, 2, count=4).tolist() == row_seeds(0, 1, 2, count=4).tolist()
    assert (
        len({*row_seeds(0, 1, 2, count=4), *row_seeds(0, 2, 1, count=4), *row_seeds(1, 1, 2, count=4)}) == 12
    )


@functools.cache
def shards(folder):
    """Two shards that the tiny target filled, its end of turn the token 2."""
    said = []
    made = fill_shards(
        folder,
        *tiny_target.target(),
        [1, 9],
        [2, 3],
        num_tokens=200,
        capacity=32,
        batch=8,
        seed=0,
        special=[0],
        stop_tokens=[2],
        given=[[5, 6, i] for i in range(20)],
        say=said.append,
    )
    assert said[-1].startswith("data: ")
    return tuple(made)


def test_shards_are_filled_once_with_half_greedy_responses(tmp_path):
    made = shards(tmp_path)
    before = [path.stat().st_mtime_ns for path in made]
    rows = read_shards(made)
    assert {tuple(prompt) for prompt in prompts_of(rows)} <= {(5, 6, i) for i in range(20)}
    assert {row.temperature for row in rows} == {0.0, 1.0}
    model, params = tiny_target.target()
    row = next(row for row in rows if row.temperature == 0)
    positions = jnp.arange(len(row.tokens))[None]
    logits = model.apply(params, jnp.asarray(row.tokens)[None], model.init_cache(1, 32), positions).logits
    best = np.argmax(logits[0], axis=-1)
    np.testing.assert_array_equal(best[row.prompt_length - 1 : -1], row.tokens[row.prompt_length :])
    shards.cache_clear()
    assert shards(tmp_path) == made
    assert [path.stat().st_mtime_ns for path in made] == before


def test_the_scores_come_back_from_what_was_kept(tmp_path):
    model, params = tiny_target.target()
    made = shards(tmp_path)
    head = output_rows(params)
    folders = list(score_shards(model, params, head, made, capacity=32, batch=4))
    assert folders == list(score_shards(model, params, head, made, capacity=32))
    vocabulary = np.arange(0, 48, 2, dtype=np.int32)
    parts = {
        which: ScoredSequences(folders, vocabulary, 48, held_out=0.3, which=which)
        for which in ("train", "held out")
    }
    assert all(len(part) for part in parts.values())
    rows = read_shards(made)
    assert sum(map(len, parts.values())) == sum(len(row.tokens) - row.prompt_length > 1 for row in rows)
    one = parts["train"][0]
    length = int(one["lengths"])
    positions = jnp.arange(length)[None]
    logits = model.apply(
        params, jnp.asarray(one["tokens"][None, :length]), model.init_cache(1, 32), positions
    ).logits
    law = np.exp(one["features"][:length].astype(np.float32) @ head.T - one["log_normalizer"][:length, None])
    np.testing.assert_allclose(law, jax.nn.softmax(logits[0]), atol=2e-3)
    mask = one["mask"][: length - 1]
    assert mask.sum() == length - 3  # from the prompt's last token on
    following = one["tokens"][1:length]
    known = np.isin(following, vocabulary)
    labels = one["labels"][: length - 1]
    np.testing.assert_array_equal(vocabulary[labels[mask & known]], following[mask & known])
    assert (labels[mask & ~known] == -1).all()
    best = np.argmax(logits[0], axis=-1)[: length - 1]
    expected = np.where(mask & np.isin(best, vocabulary), best // 2, -1)
    np.testing.assert_array_equal(one["best"][: length - 1], expected)


class Numbered:
    """Ten sequences that bear their number."""

    def __len__(self):
        return 10

    def __getitem__(self, index):
        empty = np.zeros(2, np.int32)
        names = [field.name for field in dataclasses.fields(tiny_target.Batch)]
        return dict.fromkeys(names, empty) | {"tokens": np.full(2, index)}


def test_every_sequence_comes_once_a_pass_and_a_place_can_be_gone_back_to():
    batches = Batches(Numbered(), batch=1, parts=2, seed=3)
    seen = [next(batches).tokens[:, 0, 0].tolist() for _ in range(10)]
    assert sorted(np.ravel(seen[:5])) == sorted(np.ravel(seen[5:])) == list(range(10))
    assert seen[:5] != seen[5:]
    again = Batches(Numbered(), batch=1, parts=2, seed=3)
    for _ in range(3):
        next(again)
    place = again.place()
    other = Batches(Numbered(), batch=1, parts=2, seed=3)
    other.go_to(place)
    assert [next(other).tokens[:, 0, 0].tolist() for _ in range(7)] == seen[3:]
    with pytest.raises(ValueError, match="10 sequences don't fill a batch of 11"):
        Batches(Numbered(), batch=11)


def test_texts_are_packed_with_a_separator_between_them():
    texts = [[5, 6, 7], [8, 9], [5, 6, 7], [10, 11, 12, 13]]
    rows = list(pack(texts, 2, 5))
    assert [row.tokens.tolist() for row in rows] == [[5, 6, 7, 2, 8], [9, 2, 10, 11, 12], [13, 2]]
    assert {(row.prompt_length, row.temperature) for row in rows} == {(0, 1.0)}


def test_packed_sequences_are_held_out_by_their_content():
    rows = [TokenSequence(np.array([1, 1, i]), 0, 1.0) for i in range(2000)]
    assert abs(sum(is_held_out(row, 0.2) for row in rows) - 400) < 4.5 * np.sqrt(2000 * 0.2 * 0.8)


def test_packed_text_counts_whole(tmp_path):
    model, params = tiny_target.target()
    texts = np.random.default_rng(0).integers(3, 48, (20, 14)).tolist()
    made = pack_shards(tmp_path, texts, 2, num_tokens=10**6, capacity=32, say=lambda line: None)
    folders = list(score_shards(model, params, output_rows(params), made, capacity=32, batch=4))
    sides = [
        ScoredSequences(folders, np.arange(48), 48, held_out=0.3, which=which)
        for which in ("train", "held out")
    ]
    assert sum(map(len, sides)) == 10  # 20 texts of 15 tokens, in sequences of 32
    counts = [int(side[i]["mask"].sum()) for side in sides for i in range(len(side))]
    assert sorted(counts) == [11, *[31] * 9]  # each position but the last


def test_the_draft_writes_its_share_and_nothing_else_changes(tmp_path):
    made = shards(tmp_path / "target")
    _, trained, frozen, draft = tiny_target.draft("layers", np.arange(0, 48, 2))
    params = {**trained, **{name: x for name, x in frozen.items() if name != "target_head"}}
    how = dict(capacity=32, batch=8, seed=0, stop_tokens=[2])
    speaker = NarrowSpeaker(draft)
    half = rewrite_shards(tmp_path / "half", made, speaker, params, rate=0.5, **how)
    again = rewrite_shards(tmp_path / "again", made, speaker, params, rate=0.5, **how)
    assert [path.read_bytes() for path in half] == [path.read_bytes() for path in again]
    before, after = read_shards(made), read_shards(half)
    own = [row for row in after if np.isnan(row.temperature)]
    sampled = [row for row in before if row.temperature == 1]
    assert 0.2 * len(sampled) < len(own) < 0.8 * len(sampled)
    assert all((row.tokens[row.prompt_length :] % 2 == 0).all() for row in own)  # what it can say
    known = {row.tokens.tobytes() for row in before}
    assert all(row.tokens.tobytes() in known for row in after if not np.isnan(row.temperature))
    assert {tuple(prompt) for prompt in prompts_of(own)} <= {tuple(prompt) for prompt in prompts_of(sampled)}
    every = read_shards(rewrite_shards(tmp_path / "all", made, speaker, params, rate=1.0, **how))
    assert {row.temperature for row in every if not np.isnan(row.temperature)} == {0.0}
