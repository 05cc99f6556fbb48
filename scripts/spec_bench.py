"""Write the Spec-Bench prompts as a batch file, for `specjax batch -i`.

    specjax spec-bench > prompts.jsonl
    specjax batch -i prompts.jsonl -o answers.jsonl

Without options all 240 of them.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence

from specjax.scripts import _cli, _jobs


@dataclasses.dataclass(frozen=True)
class Config:
    """What to write."""

    tasks: tuple[str, ...] = ()
    """Only these: mt_bench, translation, summarization, qa, math_reasoning, rag."""
    per_task: int | None = None
    """Only the first few of each."""
    model: str = "smollm2"
    """The model that each line asks for."""
    max_tokens: int = 128
    """The tokens that each line asks for."""
    temperature: float = 0.0
    """The temperature that each line asks for."""


def main(argv: Sequence[str] | None = None) -> None:
    """Prints one request a line."""
    config = _cli.parse(Config, argv, __doc__)
    if (
        config.max_tokens < 1
        or config.temperature < 0
        or (1 if config.per_task is None else config.per_task) < 1
    ):
        _cli.fail("--max-tokens and --per-task must be at least 1, --temperature at least 0")
    with _cli.blame_input():
        prompts = _jobs.spec_bench(config.tasks, config.per_task)
    for prompt in prompts:
        body = {
            "model": config.model,
            "messages": prompt["messages"],
            "max_tokens": config.max_tokens,
            "temperature": config.temperature,
        }
        line = {"custom_id": prompt["id"], "method": "POST", "url": "/v1/chat/completions", "body": body}
        print(json.dumps(line, ensure_ascii=False))


if __name__ == "__main__":
    sys.exit(_cli.run(main))
