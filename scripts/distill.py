"""Train a draft toward a target, and prove it by the decoder.

    specjax distill --out runs/head
    specjax distill --out runs/layers --kind layers --losses lk_hybrid:1

The target writes its own prompts and answers them (or answers those of --prompts, or reads --texts), its
states are kept, the draft is trained on them, and tokens a step are measured on Spec-Bench prompts. Each
stage goes on where a run that was stopped left off.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import logging
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from specjax.scripts import _cli, _distill_data, _distill_layers, _distill_options, _jobs


@dataclasses.dataclass(frozen=True)
class Config:
    """What to train, on what, and for how long."""

    out: Path
    """Folder for checkpoints, metrics and the draft."""
    model: str = "smollm2"
    """The target: 'smollm2' (the packaged SmolLM2-135M-Instruct), or a path to a model file."""
    data: Path | None = None
    """Folder of the training data, shared between runs; OUT/data by default."""
    prompts: Path | None = None
    """JSONL with 'prompt' or 'messages' in each line, to answer; by default the target writes its own."""
    texts: Path | None = None
    """JSONL with 'text' in each line, packed into sequences and trained on whole, in place of responses."""
    on_policy: float = 0.0
    """Share of the sampled responses that the draft of --init writes, of kind layers or small."""
    num_tokens: int = 300_000
    """Tokens of responses to train on."""
    capacity: int = 256
    """Tokens of a sequence, prompt included."""
    held_out: float = 0.05
    """Share of the prompts that is held out."""
    kind: Literal["head", "layers", "small"] = "head"
    """'head' reads the target's states; 'layers' is cut from the target; 'small' starts from nothing."""
    layers: tuple[int, ...] = ()
    """Of --kind layers: which of the target's; by default a quick search chooses --num-layers of them."""
    num_layers: int | None = None
    """Of the draft: 4 of kind layers, 1 of the others."""
    width: int = 192
    """Of --kind small."""
    scored: int = 8192
    """Tokens that the draft can say: the most frequent ones of the data."""
    train_head: bool = False
    """Also train the output head; otherwise the target's rows stay, and the draft's file needs none."""
    losses: tuple[str, ...] = ("forward_kl:1",)
    """Losses with their weights: forward_kl, reverse_kl, jsd, tv, lk, lk_hybrid, cross_entropy."""
    passes: int = 2
    """Of --kind head: steps ahead that it is trained on, fed with its own guesses."""
    init: Path | None = None
    """Start from this draft's weights instead; its tokens stay only if it has a head of its own."""
    steps: int = 1000
    """Steps of the optimizer."""
    batch: int = 8
    """Sequences of a forward."""
    parts: int = 1
    """Forwards whose gradients are added up for a step."""
    learning_rate: float = 1e-3
    """At the end of the warm-up; it falls along a cosine to a tenth."""
    warmup: int = 30
    """Steps of the warm-up."""
    mesh: str = ""
    """Train on several devices, as in 'data=2,model=4': the sequences of a forward are shared out over 2, the
    draft's weights and Adam's state are spread over 4. Empty: one device."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the products in training; weights and sums are float32."""
    seed: int = 0
    """The only source of randomness."""
    evaluate_every: int = 100
    """Steps between two looks at the held-out prompts."""
    save_every: int = 50
    """Steps between two checkpoints."""
    num_speculative_tokens: int = 5
    """Drafted tokens a step, in what is predicted and measured."""
    per_task: int = 2
    """Spec-Bench prompts of each task that the decoder is measured on; 0 leaves that out."""
    max_tokens: int = 128
    """Tokens decoded for each."""

    def __post_init__(self) -> None:
        for name in ("num_tokens", "steps", "batch", "parts", "passes", "scored", "num_layers", "width"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1")
        if self.capacity < 64 or not 0 < self.held_out < 1:
            raise ValueError("--capacity must be at least 64, --held-out between 0 and 1")
        if self.on_policy and (not 0 < self.on_policy <= 1 or self.init is None or self.kind == "head"):
            raise ValueError(
                "--on-policy is a share in 0 .. 1, and needs the --init of a draft that speaks alone: no head"
            )
        if self.texts is not None and (self.prompts is not None or self.on_policy):
            raise ValueError("--texts goes without --prompts and --on-policy: nobody answers texts")
        self.weights()
        if self.mesh:
            from specjax.parallel.sharding import parse_mesh

            ways = parse_mesh(self.mesh)
            if self.batch % ways["data"]:
                raise ValueError(f"--batch must be a multiple of the mesh's data={ways['data']}")

    def weights(self) -> tuple[tuple[str, float], ...]:
        """The losses and their weights."""
        return _distill_options.parse_losses(self.losses)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs all stages; exit code 1 if it was told to stop before the last."""
    config = _cli.parse(Config, argv, __doc__)
    _distill_options.check_extra()
    from specjax.models.load import load_model

    _cli.start()
    with _cli.blame_input(OSError, ValueError):
        _distill_options.check_losses(config.weights())
        _distill_options.check_options(config)
        loaded = load_model(config.model)
        load_older(config, loaded, None)  # refused now, not after the data
        shards = _distill_data.write_data(config, loaded)
    # What Orbax's threads log of a failed write, page by page, the error below says in a line.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    try:
        draft, finished = train(config, loaded, shards)
        draw_curves(config.out)
    except BrokenPipeError:  # nobody reads on; not the disk
        raise
    except OSError as error:
        print(f"specjax distill: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    if not finished:
        print("stopped; the same command goes on", file=sys.stderr)
        return 1
    if config.per_task:
        report = measure(config, loaded, draft)
        (config.out / "measured.json").write_text(json.dumps(report, indent=1) + "\n")
    return 0


def load_older(config: Config, loaded: Any, vocabulary: Any) -> Any:
    """The draft of ``--init``, for these tokens unless it has a head of its own; None without one."""
    from specjax.models.draft_file import load_draft

    if config.init is None:
        return None
    with _cli.blame_input(ValueError):
        older = load_draft(str(config.init), loaded.model, loaded.params, vocabulary)
    if (older.kind == "head") != (config.kind == "head"):
        _cli.fail(f"{config.init} is {'a' if older.kind == 'head' else 'no'} head: give another --kind")
    return older


def make_draft(
    config: Config, loaded: Any, older: Any, vocabulary: Any, source: Any
) -> tuple[Any, Any, Any, frozenset[str]]:
    """The draft's model, its params, what trains it, and the names that stay as they are."""
    from specjax.models.derive import cut_layers, feature_head, small_model
    from specjax.models.unroll import HeadStudent, ModelStudent

    target = (loaded.model, loaded.params)
    frozen = {"embedding", "vocabulary"} if config.train_head else {"embedding", "vocabulary", "head"}
    student = partial(HeadStudent, passes=config.passes) if config.kind == "head" else ModelStudent
    model: Any
    if older is not None:
        model, params = older.model, older.params
    elif config.kind == "head":
        model, params = feature_head(*target, config.num_layers or 1, vocabulary, config.seed)
    elif config.kind == "layers":
        with _cli.blame_input(ValueError):
            layers = _distill_layers.choose_layers(config, loaded, vocabulary, source)
            model, params = cut_layers(*target, layers, vocabulary)
    else:
        model, params = small_model(
            loaded.model, config.num_layers or 1, config.width, vocabulary, config.seed
        )
    if config.kind == "small":
        frozen = {"vocabulary"}
    return model, params, student(model), frozenset(frozen)


def train(config: Config, loaded: Any, shards: Sequence[Path]) -> tuple[Any, bool]:
    """Scores the data, trains, and writes the best draft; gives it loaded, and whether training finished."""
    import numpy as np

    from specjax.distill.batches import Batches
    from specjax.distill.checkpoints import Checkpoints
    from specjax.distill.fit import Plan, fit, make_step
    from specjax.distill.predict import predict
    from specjax.distill.sequences import is_held_out, read_shards
    from specjax.distill.spread import training_shardings
    from specjax.distill.targets import ScoredSequences, score_shards
    from specjax.distill.tensorboard import event_writer
    from specjax.distill.train import Objective, Schedule, init_state, make_optimizer, split_params
    from specjax.distill.vocabulary import frequent_tokens, share_covered
    from specjax.models.derive import output_rows
    from specjax.models.draft_file import load_draft, save_draft
    from specjax.parallel.sharding import make_placement, put

    head = output_rows(loaded.params)
    folders = list(score_shards(loaded.model, loaded.params, head, shards, capacity=config.capacity))
    kept = [s for s in read_shards(shards) if not is_held_out(s, config.held_out)]
    size = loaded.model.vocab_size
    vocabulary = frequent_tokens(kept, min(config.scored, size), size)
    older = load_older(config, loaded, vocabulary)
    if older is not None:
        vocabulary = np.asarray(older.params["vocabulary"])
    print(
        f"the draft's {len(vocabulary)} tokens cover {share_covered(kept, vocabulary):.2%} of the responses"
    )
    # What users say is the target's own too, where it wrote that itself.
    by_itself = config.prompts is None and config.texts is None
    first = len(_distill_data.turns(loaded)[0]) - 1 if by_itself else None
    sources = {
        which: ScoredSequences(
            folders,
            vocabulary,
            size,
            held_out=config.held_out,
            which=which,
            first=first if which == "train" else None,
        )
        for which in ("train", "held out")
    }
    print(", ".join(f"{len(source)} sequences {which}" for which, source in sources.items()))

    model, params, student, names = make_draft(config, loaded, older, vocabulary, sources["train"])
    trained, frozen = split_params(params, names)
    frozen = {**frozen, "target_head": head[vocabulary]}
    schedule = Schedule(config.steps, config.learning_rate, config.warmup)
    optimizer = make_optimizer(schedule)
    objective = Objective(config.weights(), dtype=config.dtype)
    with _cli.blame_input(ValueError):
        batches = Batches(sources["train"], batch=config.batch, parts=config.parts, seed=config.seed)
    temperatures = sources["held out"].temperatures()
    # What a draft does K tokens ahead shows only where it is fed its own guesses.
    far = (
        dataclasses.replace(student, passes=config.num_speculative_tokens)
        if config.kind == "head"
        else student
    )

    def evaluate(state: Any) -> dict[str, float]:
        found = predict(
            state.params,
            frozen,
            sources["held out"],
            temperatures,
            student=far,
            num_draft_tokens=config.num_speculative_tokens,
        )
        figures = {}
        for temperature, prediction in found.items():
            figures[f"tokens_a_step_T{temperature:g}"] = prediction.tokens_a_step
            for place, value in enumerate(prediction.by_position):
                figures[f"acceptance_T{temperature:g}_{place + 1}"] = value
        figures["score"] = float(np.mean([p.tokens_a_step for p in found.values()])) if found else 0.0
        return figures

    _distill_options.note_options(config)
    checkpoints = Checkpoints(str(config.out / "checkpoints"))
    state = init_state(trained, optimizer)
    shardings: dict[str, Any] = {}
    spread: dict[str, Any] = {}
    with _cli.blame_input(ValueError), event_writer(config.out / "tensorboard") as events:
        if config.mesh:
            placement = make_placement(config.mesh)
            lie = training_shardings(placement, model, state, frozen, optimizer)
            state, frozen = put((state, frozen), lie)
            shardings = dict(out_shardings=(lie[0], placement.everywhere))
            spread = dict(place_batch=partial(put, shardings=placement.parts_of_rows))
        state, finished = fit(
            state,
            frozen,
            batches,
            checkpoints,
            make_step(student, objective, optimizer, **shardings),
            Plan(config.steps, 10, config.evaluate_every, config.save_every),
            evaluate=evaluate,
            log=config.out / "metrics.jsonl",
            say=lambda line: print(line, flush=True),
            also=events,
            **spread,
        )
    best = checkpoints.best()
    if best is not None:
        state, _ = checkpoints.load(best, state)
    checkpoints.close()
    path = config.out / "draft.safetensors"
    # Folders are nobody else's business.
    values = {name: x for name, x in dataclasses.asdict(config).items() if not isinstance(x, Path)}
    about = {
        **values,
        "step": best,
        "tokens_of_responses": sum(len(s.tokens) - s.prompt_length for s in kept),
    }
    kind: Literal["head", "model"] = "head" if config.kind == "head" else "model"
    save_draft(path, kind, model.config, {**state.params, "vocabulary": frozen["vocabulary"]}, about)
    return load_draft(str(path), loaded.model, loaded.params), finished


def draw_curves(out: Path) -> None:
    """OUT/metrics.jsonl as a picture, where matplotlib is installed."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    if any("acceptance" in row for row in rows) and importlib.util.find_spec("matplotlib"):
        from specjax.plot import learning_curves, save

        save(out / "curves.svg", partial(learning_curves, rows=rows))


def measure(config: Config, loaded: Any, draft: Any) -> list[dict[str, Any]]:
    """Tokens a step by the decoder on Spec-Bench prompts, at temperature 0 and 1."""
    import numpy as np

    from specjax.generate import generate
    from specjax.sampling import make_sampling

    drafter = _jobs.drafter_of(draft, config.num_speculative_tokens, loaded.model.vocab_size)
    prompts = [
        (row["task"], ids)
        for row in _jobs.spec_bench(per_task=config.per_task)
        if len(ids := loaded.encode_chat(row["messages"])) < loaded.model.context_length - config.max_tokens
    ]
    prompts.sort(key=lambda pair: len(pair[1]))
    report: list[dict[str, Any]] = []
    for temperature in (0.0, 1.0):
        rows = []
        for begin in range(0, len(prompts), 4):
            group = prompts[begin : begin + 4]
            results = generate(
                loaded.model,
                loaded.params,
                [ids for _, ids in group],
                max_tokens=config.max_tokens,
                drafter=drafter,
                draft_params=draft.params,
                sampling=make_sampling(
                    len(group), temperature=temperature, seed=range(begin, begin + len(group))
                ),
                stop_tokens=loaded.tokenizer.eos_ids,
            )
            rows += [(task, result) for (task, _), result in zip(group, results, strict=True)]
        means = np.array([r.mean_acceptance_length for _, r in rows])
        accepted = np.sum([r.accepted for _, r in rows], axis=0)
        reached = accepted[::-1].cumsum()[::-1]
        total = sum(len(r.tokens) for _, r in rows) / sum(r.num_steps for _, r in rows)
        positions = [float(b / max(a, 1)) for a, b in itertools.pairwise(reached)]
        figures: dict[str, Any] = {
            "temperature": temperature,
            "prompts": len(rows),
            "tokens_a_step": total,
            "standard_error": float(means.std(ddof=1) / np.sqrt(len(means))),
            "acceptance_by_position": positions,
            "by_task": {
                task: float(np.mean([r.mean_acceptance_length for t, r in rows if t == task]))
                for task in dict.fromkeys(task for task, _ in rows)
            },
        }
        report.append(figures)
        print(
            f"measured at T = {temperature:g}: {total:.2f} tokens a step (standard error "
            f"{figures['standard_error']:.2f}, {len(rows)} prompts), acceptance by position "
            f"{' '.join(f'{x:.2f}' for x in positions)}",
            flush=True,
        )
    return report


if __name__ == "__main__":
    sys.exit(_cli.run(main))
