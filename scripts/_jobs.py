"""What the jobs that decode share: the options, and turning them into models and a drafter."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from specjax.scripts import _cli

__all__ = [
    "Decoder",
    "DecoderOptions",
    "MeshOptions",
    "SamplingOptions",
    "drafter_of",
    "load_decoder",
    "spec_bench",
    "together",
]


@dataclasses.dataclass(frozen=True)
class DecoderOptions:
    """The target, and how it is speculated for."""

    model: str = "smollm2"
    """The target: 'smollm2' (the packaged SmolLM2-135M-Instruct), or a path to a model file."""
    draft: str = "lookup"
    """What proposes tokens: 'lookup' (n-grams of the row itself), a model as in --model, a draft that
    specjax distill made (.safetensors), 'smollm2-draft' (one that comes along), lookup and a model as in
    'lookup+draft.gguf' (lookup where it has a match), or 'none'."""
    num_speculative_tokens: int = 3
    """Drafted tokens a step."""
    prompt_lookup_min: int = 2
    """Shortest n-gram that --draft lookup matches."""
    prompt_lookup_max: int = 4
    """Longest n-gram that --draft lookup matches."""
    rule: Literal["token", "block", "coupled"] = "token"
    """How drafts are judged where temperature is above 0; the output's law is the target's under each."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What weights are kept and multiplied in."""
    verify_shape: Literal["fitting", "fixed"] = "fitting"
    """'fixed' feeds the target 1 + K tokens in every step, drafts or not, plain decoding included: bfloat16
    output is then the same with and without a draft."""

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 1:
            raise ValueError(
                f"--num-speculative-tokens must be at least 1, not {self.num_speculative_tokens}; "
                "plain decoding is --draft none"
            )
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ValueError("--prompt-lookup-min must be at least 1 and at most --prompt-lookup-max")


@dataclasses.dataclass(frozen=True)
class MeshOptions(DecoderOptions):
    """The same, on several devices."""

    mesh: str = ""
    """Spread over devices, as in 'data=2,model=4': the rows over 2, each model over 4. Empty: one device."""
    draft_shards: int = 0
    """Over how many devices the draft model is spread, a divisor of the mesh's model; 1 keeps a copy on each,
    0 takes all."""

    def placement(self) -> Any:
        """How batches and models lie on the mesh; None without one."""
        from specjax.parallel.sharding import make_placement

        return make_placement(self.mesh, self.draft_shards or None) if self.mesh else None


@dataclasses.dataclass(frozen=True)
class SamplingOptions:
    """How every row is sampled."""

    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the likeliest tokens that make up this mass."""
    min_p: float = 0.0
    """Keep tokens of at least this share of the likeliest one's probability."""
    presence_penalty: float = 0.0
    """Off the logits of tokens decoded before."""
    frequency_penalty: float = 0.0
    """The same for each time they were."""
    repetition_penalty: float = 1.0
    """Divides the logits of tokens in the prompt or the output."""
    min_tokens: int = 0
    """The model can't end the text before so many tokens."""

    def values(self) -> dict[str, Any]:
        """The options by name, as ``make_sampling`` takes them."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(SamplingOptions)}


@contextlib.contextmanager
def together(processes: str) -> Iterator[bool]:
    """Runs what is inside as one of several processes, of which only the first prints; see --processes.

    Yields:
      Whether this is the first.
    """
    with contextlib.ExitStack() as stack:
        first = True
        if processes:
            from specjax.parallel.processes import joined

            with _cli.blame_input(ValueError):
                first = stack.enter_context(joined(processes))
            if not first:
                stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
                stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        yield first


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A loaded target with its drafter."""

    options: DecoderOptions
    loaded: Any  # specjax.models.load.LoadedModel
    make_drafter: Callable[[int], Any]  # the drafter for a K; None for plain decoding
    draft_params: Any
    plain_drafter: Any  # what plain decoding runs with: nothing, or a silent draft for the fixed shape
    placement: Any = None  # specjax.parallel.sharding.Placement, where the models are spread over a mesh

    @property
    def tokenizer(self) -> Any:
        """The target's."""
        return self.loaded.tokenizer

    @property
    def drafter(self) -> Any:
        """What proposes --num-speculative-tokens tokens."""
        return self.make_drafter(self.options.num_speculative_tokens)

    def ladder(self, *, adaptive: bool) -> list[Any]:
        """Drafters for the K that a job may choose from, rising to --num-speculative-tokens."""
        count = self.options.num_speculative_tokens
        if self.drafter is None or self.options.draft == "none":
            return []
        if not adaptive or self.options.verify_shape == "fixed":
            return [self.drafter]
        return [self.make_drafter(count >> shift) for shift in reversed(range(count.bit_length()))]

    def arguments(self, *, speculative: bool = True) -> dict[str, Any]:
        """The arguments that ``generate`` and ``stream`` take from here."""
        return dict(
            target=self.loaded.model,
            target_params=self.loaded.params,
            placement=self.placement,
            drafter=self.drafter if speculative else self.plain_drafter,
            draft_params=self.draft_params if speculative else None,
            rule=self.options.rule,
            stop_tokens=self.tokenizer.eos_ids,
        )


def load_decoder(options: DecoderOptions) -> Decoder:
    """Loads what the options name.

    Raises:
      UsageError: a file is missing or damaged, or the draft speaks another vocabulary.
    """
    # Here, so that --help needn't wait for them.
    from specjax.drafters import EitherDrafter, LookupDrafter, ModelDrafter, SilentDrafter
    from specjax.models.draft_file import DRAFTS, LoadedDraft, load_draft
    from specjax.models.load import LoadedModel, load_model
    from specjax.models.tokenizer import check_same_vocabulary
    from specjax.parallel.sharding import Layout
    from specjax.types import Drafter

    _cli.start()
    with _cli.blame_input(OSError, ValueError):
        placement = options.placement() if isinstance(options, MeshOptions) else None

        def spread(loaded: LoadedModel | LoadedDraft, layout: Layout | None) -> Any:
            if layout is None:
                return loaded
            laid: tuple[Any, Any] = layout.lay(loaded.model, loaded.params)
            return dataclasses.replace(loaded, model=laid[0], params=laid[1])

        whole = load_model(options.model, options.dtype)
        loaded: LoadedModel = spread(whole, placement and placement.target)
        fixed = options.verify_shape == "fixed"
        plain_drafter = SilentDrafter(options.num_speculative_tokens) if fixed else None
        lookup, _, name = options.draft.rpartition("+")
        if options.draft == "lookup":
            lookup, name = "lookup", "none"
        if lookup not in ("", "lookup"):
            raise ValueError(f"--draft {options.draft}: only 'lookup' can stand before a '+'")
        if not Path(name).suffix and name not in ("none", "smollm2", *DRAFTS):
            raise ValueError(
                f"--draft {options.draft!r} names no model; give lookup, none, {', '.join(DRAFTS)}, "
                "the path of a .gguf or .safetensors file, or lookup+ one of these"
            )
        draft: Any = None
        if name in DRAFTS or name.endswith(".safetensors"):
            draft = spread(load_draft(name, whole.model, whole.params), placement and placement.draft)
        elif name != "none":
            # The target as its own draft needs no second copy of the weights.
            same = name == options.model and (placement is None or placement.draft == placement.target)
            draft = loaded if same else spread(load_model(name, options.dtype), placement and placement.draft)
            check_same_vocabulary(loaded.tokenizer, draft.tokenizer)

    def make_drafter(count: int) -> Drafter | None:
        found = LookupDrafter(count, options.prompt_lookup_min, options.prompt_lookup_max, always_full=fixed)
        if draft is None:
            return found if lookup else plain_drafter
        if isinstance(draft, LoadedDraft):
            model = drafter_of(draft, count, loaded.model.vocab_size, options.rule)
        else:
            model = ModelDrafter(draft.model, count, loaded.model.vocab_size)
        return EitherDrafter(found, model) if lookup else model

    draft_params = None if draft is None else draft.params
    return Decoder(options, loaded, make_drafter, draft_params, plain_drafter, placement)


def drafter_of(draft: Any, num_draft_tokens: int, vocab_size: int, rule: str = "token") -> Any:
    """The drafter of a :class:`specjax.models.draft_file.LoadedDraft`."""
    from specjax.drafters import FeatureDrafter, ModelDrafter

    # The coupled rule lives on noise that draft and target share, token by token.
    wide_noise = rule == "coupled"
    if draft.kind == "head":
        return FeatureDrafter(draft.model, num_draft_tokens, vocab_size, wide_noise)
    return ModelDrafter(draft.model, num_draft_tokens, vocab_size, narrow=True, wide_noise=wide_noise)


def spec_bench(tasks: Sequence[str] = (), per_task: int | None = None) -> list[dict[str, Any]]:
    """The Spec-Bench prompts of some tasks (all if none is named), the first few of each.

    Returns:
      Dicts with ``id``, ``task`` and ``messages`` (the first turn).
    """
    path = Path(__file__).parent / "data" / "spec_bench_dev.jsonl"
    counts: dict[str, int] = {}
    prompts = []
    for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        task = row["task"]
        counts[task] = counts.get(task, 0) + 1
        if (not tasks or task in tasks) and (per_task is None or counts[task] <= per_task):
            messages = [{"role": "user", "content": row["turns"][0]}]
            prompts.append({"id": f"{task}-{row['question_id']}", "task": task, "messages": messages})
    unknown = set(tasks) - counts.keys()
    if unknown:
        raise ValueError(f"no task is named {min(unknown)!r}; there are {', '.join(counts)}")
    return prompts
