"""Decode one prompt, speculatively.

specjax generate --chat "Name three rivers in France."
specjax generate "Once upon a time" --temperature 0.8 --top-p 0.95 --stream
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence

import tyro

from specjax.scripts import _cli, _jobs


@dataclasses.dataclass(frozen=True)
class Config(_jobs.SamplingOptions, _jobs.MeshOptions):
    """One prompt and how to decode it."""

    prompt: tyro.conf.Positional[str] = "-"
    """The text to continue; '-' reads it from standard input."""
    chat: bool = False
    """Ask the prompt as a user would, through the model's chat template."""
    max_tokens: int = 128
    """The most tokens to decode."""
    seed: int = 0
    """The only source of randomness."""
    stream: bool = False
    """Print text as it comes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the text on standard output, and one line of figures on standard error."""
    config = _cli.parse(Config, argv, __doc__)
    # Import late: a mistyped option is answered before JAX is loaded.
    from specjax.generate import generate, stream
    from specjax.models.tokenizer import Detokenizer
    from specjax.sampling import make_sampling

    with _cli.blame_input(ValueError):
        sampling = make_sampling(1, **config.values(), seed=config.seed)
        prompt = sys.stdin.read() if config.prompt == "-" else config.prompt
        if not prompt.strip():
            raise ValueError("the prompt is empty: give some text")
    decoder = _jobs.load_decoder(config)
    begin = time.perf_counter()
    with _cli.blame_input(ValueError):
        ids = (
            decoder.loaded.encode_chat([{"role": "user", "content": prompt}])
            if config.chat
            else decoder.loaded.encode(prompt)
        )
        arguments = decoder.arguments() | dict(max_tokens=config.max_tokens, sampling=sampling)
        if config.stream:
            text, shown = Detokenizer(decoder.tokenizer), 0
            for result in stream(prompt=ids, **arguments):
                print(text.feed(result.tokens[shown:]), end="", flush=True)
                shown = len(result.tokens)
            print(text.finish())
        else:
            (result,) = generate(prompts=[ids], **arguments)
            print(decoder.tokenizer.decode(result.tokens))
    print(
        f"{len(result.tokens)} tokens in {time.perf_counter() - begin:.2f} s (with compiling and prefill), "
        f"{result.mean_acceptance_length:.2f} tokens a step, {result.num_accepted_tokens} of "
        f"{result.num_draft_tokens} drafted tokens accepted",
        file=sys.stderr,
    )
    if result.failed:
        print("specjax generate: error: the model's logits stopped being numbers", file=sys.stderr)
    return 1 if result.failed else 0


if __name__ == "__main__":
    sys.exit(_cli.run(main))
