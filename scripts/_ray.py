"""``specjax batch --ray N``: the files of a folder, shared out by Ray Data among N engines.

The output is that of the same job with one engine, file by file, and so is the way it goes on: an engine that
is lost leaves whole lines behind, and the next one takes up its file where it stopped.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import ray
import ray.data

from specjax.engine.ledger import Ledger, resume
from specjax.engine.sink import Output
from specjax.engine.source import Source
from specjax.scripts import _batch, _jobs

__all__ = ["answer", "share_of"]


class Answerer:
    """An engine in a process of its own, which answers one file after the other."""

    def __init__(self, config: Any, memory: int | None) -> None:
        self._config, self._decoder = config, _jobs.load_decoder(config)
        plan = _batch.plan_job(config, self._decoder, memory)
        self._engine = _batch.make_engine(config, self._decoder, plan.slots)
        self._engine.warm_up()

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Answers the lines of a file that its output doesn't have; counts them."""
        config = self._config
        source = Source(config.input, only=row["file"])
        with Output(config.output, source) as output:
            output.create()
            ledger = Ledger.of(output)
            job = _batch.Job(config, source, output, ledger, self._engine, self._decoder, None, "")
            job.answer()
        return row | {"answered": job.num_answered, "before": job.num_skipped, "refused": job.num_refused}


def answer(config: Any, source: Source, output: Output) -> int:
    """Answers all files, and says how far it is; gives the number of lines with an error.

    Raises:
      OSError: the output can't be opened.
      ValueError: it belongs to another job, or there are more engines than the cluster has devices for.
    """
    # Loaded to be checked, and for what an answer depends on; accelerators are the engines' alone.
    jax.config.update("jax_platforms", "cpu")
    fingerprint = _batch.fingerprint_of(config, _jobs.load_decoder(dataclasses.replace(config, mesh="")))
    with resume(output, fingerprint, overwrite=config.overwrite):
        # A cluster that runs is found by its variable; else one is started here, for this job alone.
        alone: dict[str, Any] = {} if "RAY_ADDRESS" in os.environ else dict(_node_ip_address="127.0.0.1")
        ray.init(include_dashboard=False, log_to_driver=False, **alone)
        try:
            return _share_out(config, source)
        finally:
            ray.shutdown()


def _share_out(config: Any, source: Source) -> int:
    ray.data.DataContext.get_current().enable_progress_bars = False
    files = [{"file": file.name} for file in source.files]
    options, memory = share_of(
        config.ray, ray.cluster_resources(), [node["Resources"] for node in ray.nodes()]
    )
    answerer: Any = Answerer  # a class of callables may stand for a function there
    done = ray.data.from_items(files, override_num_blocks=len(files)).map(
        answerer,
        fn_constructor_args=(config, memory),
        compute=ray.data.ActorPoolStrategy(size=config.ray, max_tasks_in_flight_per_actor=1),
        max_restarts=-1,
        max_task_retries=-1,
        **options,
    )
    totals = dict.fromkeys(("answered", "before", "refused"), 0)
    for number, row in enumerate(done.iter_rows(), start=1):
        for name in totals:
            totals[name] += row[name]
        print(f"{number} of {len(files)} files: {row['file']}", file=sys.stderr)
    print(
        f"{totals['answered']} answered, {totals['refused']} with an error, {totals['before']} done before",
        file=sys.stderr,
    )
    return totals["refused"]


def share_of(
    engines: int, cluster: Mapping[str, float], nodes: Sequence[Mapping[str, float]]
) -> tuple[dict[str, Any], int | None]:
    """What of the cluster each engine gets: accelerators if there are any, else processors and memory.

    Args:
      engines: how many.
      cluster: what Ray has in all, by its names.
      nodes: the same of each machine.

    Returns:
      Ray's options of an engine; and the bytes of memory that it may plan with, None where that is its
      accelerator's.

    Raises:
      ValueError: there are fewer devices than engines.
    """
    kind = next((kind for kind in ("TPU", "GPU") if cluster.get(kind)), "CPU")
    each = int(cluster.get(kind, 0) // engines)
    if each < 1:
        raise ValueError(f"--ray {engines}: the cluster has {cluster.get(kind, 0):g} {kind}; give no more")
    if kind == "TPU":
        return dict(resources={"TPU": each}), None
    if kind == "GPU":
        return dict(num_gpus=each), None
    # As many as fit may come to one machine; Ray says how much of its memory is for them.
    room = [(min(engines, int(node.get("CPU", 0) // each)), node.get("memory")) for node in nodes]
    shares = [int(memory // count) for count, memory in room if count and memory]
    return dict(num_cpus=each), min(shares, default=None)
