"""Stop strings: the first in the text ends it, however its tokens came in."""

import codecs
import random

import pytest

from specjax.engine.stopping import StopWatch

# Tokens of one to five bytes; some end inside a character, and the last one, an end of text, is none.
PIECES = ["a", "b", "c", "ab", "bc", "abcab", " ", "é", "\U0001f642", "aé"]
VOCABULARY = [piece.encode() for piece in PIECES]
VOCABULARY += [b"\xc3", b"\xa9", b"\xf0\x9f", b"\x99\x82", b"\xe2\x82", b""]
END = len(VOCABULARY) - 1


class Bytes:
    """A detokenizer of the tokens above."""

    def __init__(self):
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids):
        return self.decoder.decode(b"".join(VOCABULARY[i] for i in ids))

    def finish(self):
        return self.decoder.decode(b"", final=True)


def ids_of(*pieces):
    return [VOCABULARY.index(piece if isinstance(piece, bytes) else piece.encode()) for piece in pieces]


def run(ids, stop, blocks=None, min_tokens=0):
    """Feeds ids in blocks of these sizes, one at a time by default; the ending, and what was shown before."""
    watch, shown, start = StopWatch(Bytes(), stop, min_tokens), [], 0
    for size in blocks or [1] * len(ids):
        shown.append(watch.feed(ids[start : start + size]))
        start += size
    ending = watch.finish()
    assert "".join(shown) + ending.rest == ending.text
    return ending, shown


def expected(ids, stop, min_tokens=0):
    """The text, tokens and whether it stopped, from the whole text at once."""
    text = b"".join(VOCABULARY[i] for i in ids).decode(errors="replace")
    lengths = [len(Bytes().feed(ids[: i + 1])) for i in range(len(ids))]
    floor = lengths[min_tokens - 1] if 0 < min_tokens <= len(ids) else 0
    if min_tokens > len(ids):
        return text, len(ids), False
    places = [
        place
        for one in stop
        for place in range(len(text))
        if text.startswith(one, place) and place + len(one) > floor
    ]
    if not places:
        return text, len(ids), False
    text = text[: min(places)]
    kept = next((n for n in range(len(ids) + 1) if (lengths[n - 1] if n else 0) >= len(text)), len(ids))
    return text, kept, True


def random_case(rng):
    ids = [rng.randrange(len(VOCABULARY)) for _ in range(rng.randrange(1, 14))]
    stop = ["".join(rng.choices(["a", "b", "c", "é", "\U0001f642", " ", "\ufffd"], k=rng.randint(1, 4)))]
    stop += ["".join(rng.choices("abc", k=rng.randint(1, 3))) for _ in range(rng.randrange(3))]
    return ids, stop


def random_blocks(rng, total):
    blocks = []
    while sum(blocks) < total:
        blocks.append(rng.randint(0, 4))
    return blocks


def test_any_division_into_blocks_gives_what_the_whole_text_gives():
    rng = random.Random(0)
    stopped = passed_over = 0
    for _ in range(2500):
        ids, stop = random_case(rng)
        min_tokens = rng.choice([0, 0, 1, 3, 8])
        want = expected(ids, stop, min_tokens)
        for blocks in (None, [len(ids)], random_blocks(rng, len(ids))):
            ending, _ = run(ids, stop, blocks, min_tokens)
            got = ending.text, ending.num_tokens, ending.stopped
            assert got == want, (ids, stop, blocks, min_tokens)
        stopped += want[2]
        passed_over += want != expected(ids, stop)
    assert stopped > 500  # so that the cases are worth something
    assert passed_over > 60


def test_what_is_shown_is_never_taken_back():
    rng = random.Random(1)
    held = 0
    for _ in range(2000):
        ids, stop = random_case(rng)
        watch, shown = StopWatch(Bytes(), stop), ""
        for i in range(len(ids)):
            shown += watch.feed(ids[i : i + 1])
            text = Bytes().feed(ids[: i + 1])
            assert text.startswith(shown)
            if watch.stopped:
                break
            for one in stop:  # the text may go on to each of them
                begun = max(cut for cut in range(len(one)) if text.endswith(one[:cut]))
                assert len(shown) <= len(text) - begun
                held += begun > 0
        assert watch.finish().text.startswith(shown)
    assert held > 500


def test_the_first_in_the_text_wins_even_if_another_is_whole_before_it():
    for blocks in (None, [1, 2], [3]):
        assert run(ids_of("a", "b", "c"), ["b", "abc"], blocks)[0].text == ""
    ending, shown = run(ids_of("a", "b", "a"), ["b", "abc"])  # the earlier one comes to nothing
    assert (ending.text, ending.num_tokens, ending.stopped) == ("a", 1, True)
    assert shown == ["", "", "a"]
    assert run(ids_of("a", "b"), ["b", "abc"])[0].text == "a"  # nothing more comes


def test_a_stop_and_an_end_of_text_in_one_block():
    ending, _ = run([*ids_of("a", "b"), END], ["b"], [3])
    assert (ending.text, ending.num_tokens, ending.stopped) == ("a", 1, True)
    ending, _ = run([*ids_of("a", "c"), END], ["b"], [3])
    assert (ending.text, ending.num_tokens, ending.stopped) == ("ac", 3, False)


def test_tokens_are_the_fewest_that_cover_the_text():
    smile = ids_of(b"\xf0\x9f", b"\x99\x82")
    ending, shown = run([*ids_of("a"), *smile, *ids_of("b")], ["b"])
    assert (ending.text, ending.num_tokens, ending.offsets) == ("a\U0001f642", 3, (0, 1, 1))
    assert shown == ["a", "", "\U0001f642", ""]
    ending, _ = run([*smile, *ids_of("a")], ["\U0001f642"])  # a stop that straddles two tokens
    assert (ending.text, ending.num_tokens, ending.offsets) == ("", 0, ())
    ending, _ = run(ids_of("abcab", "c"), ["ca"])  # a token is kept if only some of it is
    assert (ending.text, ending.num_tokens) == ("ab", 1)


def test_half_a_character_at_the_end_is_part_of_the_text():
    ending, _ = run(ids_of("a", b"\xe2\x82"), [])
    assert (ending.text, ending.rest, ending.num_tokens) == ("a\ufffd", "\ufffd", 2)
    ending, _ = run(ids_of("a", b"\xe2\x82"), ["\ufffd"])
    assert (ending.text, ending.num_tokens, ending.stopped) == ("a", 1, True)


def test_min_tokens_pass_over_a_stop_that_ends_within_them():
    ids = ids_of("a", "b", "c", "a", "b")
    assert run(ids, ["b"], min_tokens=2)[0].text == "abca"
    assert run(ids, ["b"], min_tokens=1)[0].text == "a"
    assert run(ids, ["bc"], min_tokens=2)[0].text == "a"  # it begins within them and ends after
    assert run(ids, ["b"], min_tokens=9)[0].stopped is False


def test_an_empty_stop_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopWatch(Bytes(), ["a", ""])


def test_nothing_is_of_effect_after_the_stop():
    watch = StopWatch(Bytes(), ["b"])
    assert watch.feed(ids_of("a", "b")) == "a"
    assert watch.stopped
    assert watch.feed(ids_of("a")) == ""
    assert watch.finish().text == "a"
