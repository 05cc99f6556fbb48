"""Check on your own target, draft and options that speculation changes nothing.

    specjax audit --draft lookup --temperature 0.8 --top-p 0.95
    specjax audit --model target.gguf --draft draft.gguf --prompts prompts.jsonl --json report.json

Exit codes: 0 every check passed, 1 one failed, 2 nothing could be started.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from specjax.scripts import _cli, _jobs


@dataclasses.dataclass(frozen=True)
class Config(_jobs.SamplingOptions, _jobs.MeshOptions):
    """What to audit, and how closely."""

    prompts: Path | None = None
    """Requests to audit on, as for `specjax batch`; without it, prompts of Spec-Bench. Only the prompts are
    read from it."""
    checks: tuple[Literal["greedy", "law", "coupled"], ...] = ("greedy", "law", "coupled")
    """Greedy identity, the law of sampled tokens, the coupled rule's identity."""
    num_prompts: int = 8
    """How many prompts."""
    max_tokens: int = 48
    """Tokens decoded for each."""
    batch_size: int = 8
    """Rows decoded at a time."""
    draws: int = 512
    """Sampled rows from each of two contexts; more find smaller faults."""
    temperature: float = 1.0
    """Of the sampled checks; above 0."""
    json: Path | None = None
    """Also write the report here."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.checks:
            raise ValueError("--checks names no check")
        if self.draft == "none":
            raise ValueError("--draft none leaves nothing to audit")
        if self.temperature <= 0:
            raise ValueError("--temperature must be above 0: greedy decoding is audited in any case")
        for name in ("num_prompts", "max_tokens", "batch_size", "draws"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1")


def main(argv: Sequence[str] | None = None) -> int:
    """Prints one line a check; exit code 1 if any fails."""
    config = _cli.parse(Config, argv, __doc__)
    from specjax.audit import Audit
    from specjax.sampling import make_sampling

    options = config.values()
    with _cli.blame_input():
        make_sampling(1, **options)
        prompts = _prompts(config)
    decoder = _jobs.load_decoder(config)
    arguments = decoder.arguments()
    with _cli.blame_input(ValueError):
        ids = [
            decoder.loaded.encode(prompt) if isinstance(prompt, str) else decoder.loaded.encode_chat(prompt)
            for prompt in prompts
        ]
    begin = time.perf_counter()
    audit = Audit(
        prompts=sorted(ids, key=len),  # the shortest are the contexts of the sampled checks
        options=options,
        batch_size=config.batch_size,
        max_tokens=config.max_tokens,
        num_draws=config.draws,
        plain_drafter=decoder.plain_drafter,
        **arguments,
    )
    checks = []
    with _cli.blame_input(ValueError):
        for check in audit.run(config.checks):
            checks.append(check)
            print(f"{'pass' if check.passed else 'FAIL'}  {check.name}: {check.summary}", flush=True)
    passed = all(check.passed for check in checks)
    verdict = "lossless, as far as these checks see" if passed else "NOT LOSSLESS"
    print(f"{verdict} ({time.perf_counter() - begin:.0f} s)")
    if config.json:
        report = {
            "passed": passed,
            "config": json.loads(json.dumps(dataclasses.asdict(config), default=str)),
            "checks": [dataclasses.asdict(check) for check in checks],
        }
        with _cli.blame_input(OSError):
            config.json.write_text(json.dumps(report, indent=1))
    return 0 if passed else 1


def _prompts(config: Config) -> list:
    from specjax.engine.requests import parse_request

    if config.prompts is None:
        tasks = [row["messages"] for row in _jobs.spec_bench()]
        return tasks[:: max(1, len(tasks) // config.num_prompts)][: config.num_prompts]
    with config.prompts.open(encoding="utf-8-sig") as lines:
        requests = [parse_request(line) for line in lines if line.strip()][: config.num_prompts]
    if not requests:
        raise ValueError(f"{config.prompts} has no request")
    if any(isinstance(request.prompt, tuple) for request in requests):
        raise ValueError(f"{config.prompts} has a prompt of token ids; text is needed")
    return [request.prompt for request in requests]


if __name__ == "__main__":
    sys.exit(_cli.run(main))
