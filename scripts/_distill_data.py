"""What `specjax distill` trains on, and where that lies."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["turns", "write_data"]

_BATCH = 64  # rows decoded at once


def write_data(config: Any, loaded: Any) -> list[Path]:
    """The shards, written as far as they aren't there.

    What isn't the target's own writing lies in a folder named after what it was made from.
    """
    from specjax.distill.packing import pack_shards
    from specjax.distill.selfwrite import fill_shards

    folder, tokenizer = config.data or config.out / "data", loaded.tokenizer
    if config.texts is not None:
        if not tokenizer.eos_ids:
            raise ValueError(f"{loaded.name} names no token that ends a text: --texts can't be packed")
        texts = read_lines(config.texts, lambda row: encode_text(row, loaded))
        return pack_shards(
            folder / f"texts-{config.capacity}-{digest(config.texts)}",
            texts,
            tokenizer.eos_ids[0],
            num_tokens=config.num_tokens,
            capacity=config.capacity,
        )
    given = (
        [] if config.prompts is None else read_lines(config.prompts, lambda row: encode_prompt(row, loaded))
    )
    opening, closing = ([], []) if given else turns(loaded)
    speaker = draft_speaker(config, loaded) if config.on_policy else None
    shards = fill_shards(
        folder,
        loaded.model,
        loaded.params,
        opening,
        closing,
        num_tokens=config.num_tokens,
        capacity=config.capacity,
        batch=_BATCH,
        seed=config.seed,
        special=[i for i in range(len(tokenizer.tokens)) if not tokenizer.token_bytes(i)],
        stop_tokens=tokenizer.eos_ids,
        given=given,
    )
    if speaker is None:
        return shards
    from specjax.distill.on_policy import rewrite_shards

    print(f"the draft writes {config.on_policy:.0%} of the sampled responses")
    return rewrite_shards(
        folder / f"on-policy-{config.on_policy:g}-{digest(config.init)}",
        shards,
        *speaker,
        rate=config.on_policy,
        capacity=config.capacity,
        batch=_BATCH,
        seed=config.seed,
        stop_tokens=tokenizer.eos_ids,
    )


def digest(path: Path) -> str:
    """Names a file by its content."""
    return hashlib.blake2b(path.read_bytes(), digest_size=6).hexdigest()


def draft_speaker(config: Any, loaded: Any) -> tuple[Any, Any]:
    """The draft of --init as a model that speaks alone, and its params."""
    from specjax.distill.on_policy import NarrowSpeaker
    from specjax.models.draft_file import load_draft
    from specjax.models.drafts import FeatureModel

    draft = load_draft(str(config.init), loaded.model, loaded.params)
    if isinstance(draft.model, FeatureModel):
        raise ValueError(
            f"{config.init} is a head, which needs the target to speak: leave --on-policy out, or give "
            "a draft of --kind layers or small"
        )
    return NarrowSpeaker(draft.model), draft.params


def read_lines(path: Path, read: Callable[[dict[str, Any]], list[int]]) -> list[list[int]]:
    """What stands in a JSONL file, as ids; an error names the line."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            found.append(read(row if isinstance(row, dict) else {}))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    if not found:
        raise ValueError(f"{path} is empty")
    return found


def encode_prompt(row: dict[str, Any], loaded: Any) -> list[int]:
    """A prompt's ids."""
    if isinstance(row.get("messages"), list):
        return loaded.encode_chat(row["messages"])
    if isinstance(row.get("prompt"), str):
        return loaded.encode(row["prompt"])
    raise ValueError("has neither 'prompt', a text, nor 'messages', a list")


def encode_text(row: dict[str, Any], loaded: Any) -> list[int]:
    """A text's ids."""
    if not isinstance(row.get("text"), str):
        raise ValueError("has no 'text'")
    return loaded.encode(row["text"])


def turns(loaded: Any) -> tuple[list[int], list[int]]:
    """The chat template before and after what a user says."""
    if loaded.chat_template is None:
        raise ValueError(f"{loaded.name} has no chat template: give --prompts")
    before, _, after = loaded.chat_template.render([{"role": "user", "content": "\0"}]).partition("\0")
    return loaded.tokenizer.encode(before), loaded.tokenizer.encode(after, add_bos=False)
