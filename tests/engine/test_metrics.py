"""Counts: added up, written as a series, and under the names that vLLM's users know."""

import json
import os
import re

import pytest

from specjax.engine import metrics
from specjax.engine.metrics import Gauges, MetricsWriter, Totals, prometheus_text

FIRST = Totals(
    answered=1,
    prompt_tokens=10,
    tokens=30,
    row_steps=12,
    drafts=10,
    drafted=40,
    accepted=20,
    accepted_per_position=(9, 6, 5),
    finish_reasons={"stop": 1},
    steps_by_k={4: 10, 0: 2},
    seconds=2.0,
)
SECOND = Totals(
    answered=2,
    refused=1,
    tokens=10,
    row_steps=8,
    drafts=5,
    drafted=10,
    accepted=5,
    accepted_per_position=(3, 1, 0, 1),
    finish_reasons={"stop": 1, "length": 1},
    steps_by_k={4: 5, 2: 3},
    seconds=0.5,
)
GAUGES = Gauges(running=3, waiting=7, slots=4, cache_usage=0.25, k=4)


def samples(text):
    """Prometheus' text format, read strictly."""
    found, kinds = {}, {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            kinds[name] = kind
        elif not line.startswith("# HELP "):
            match = re.fullmatch(r"([a-zA-Z_:][\w:]*)\{((?:\w+=\"(?:[^\"\\\n]|\\.)*\",?)*)\} (\S+)", line)
            labels = dict(re.findall(r"(\w+)=\"((?:[^\"\\]|\\.)*)\"", match[2]))
            assert kinds[match[1]] == ("counter" if match[1].endswith("_total") else "gauge")
            assert labels.pop("engine") == "0"
            found[match[1], *(pair for pair in labels.items() if pair[0] != "model_name")] = float(match[3])
    return found


def test_totals_add_up():
    total = FIRST + SECOND
    assert total == SECOND + FIRST
    assert (total.answered, total.refused, total.tokens, total.seconds) == (3, 1, 40, 2.5)
    assert total.accepted_per_position == (12, 7, 5, 1)
    assert total.finish_reasons == {"stop": 2, "length": 1}
    assert total.steps_by_k == {4: 15, 0: 2, 2: 3}
    assert FIRST + Totals() == FIRST
    assert (total.tokens_per_second, total.tokens_per_step) == (16.0, (20 + 25) / 20)
    assert (total.acceptance_rate, total.mean_acceptance_length) == (0.5, 1 + 25 / 15)


def test_rates_of_nothing_are_numbers():
    nothing = Totals()
    assert (nothing.tokens_per_second, nothing.tokens_per_step, nothing.acceptance_rate) == (0, 0, 0)
    assert nothing.mean_acceptance_length == 1


def test_prometheus_gets_the_names_that_are_known():
    found = samples(prometheus_text(FIRST + SECOND, GAUGES, "m"))
    position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert found == {
        ("vllm:num_requests_running",): 3,
        ("vllm:num_requests_waiting",): 7,
        ("vllm:kv_cache_usage_perc",): 0.25,
        ("vllm:prompt_tokens_total",): 10,
        ("vllm:generation_tokens_total",): 40,
        ("vllm:request_success_total", ("finished_reason", "length")): 1,
        ("vllm:request_success_total", ("finished_reason", "stop")): 2,
        ("vllm:spec_decode_num_drafts_total",): 15,
        ("vllm:spec_decode_num_draft_tokens_total",): 50,
        ("vllm:spec_decode_num_accepted_tokens_total",): 25,
        (position, ("position", "0")): 12,
        (position, ("position", "1")): 7,
        (position, ("position", "2")): 5,
        (position, ("position", "3")): 1,
        ("specjax:requests_refused_total",): 1,
        ("specjax:row_steps_total",): 20,
        ("specjax:steps_total", ("k", "0")): 2,
        ("specjax:steps_total", ("k", "2")): 3,
        ("specjax:steps_total", ("k", "4")): 15,
        ("specjax:slots",): 4,
        ("specjax:num_speculative_tokens",): 4,
    }


def test_a_name_with_odd_characters_breaks_no_line():
    text = prometheus_text(FIRST, GAUGES, 'a"b\\c\nd')
    assert 'model_name="a\\"b\\\\c\\nd"' in text
    assert samples(text)["vllm:generation_tokens_total",] == 30
    assert 'model_name="caf\\\\udce9"' in prometheus_text(FIRST, GAUGES, os.fsdecode(b"caf\xe9"))


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(metrics.time, "time", lambda: now[0])
    return now


def test_a_series_has_a_point_every_so_often(tmp_path, clock):
    path = tmp_path / "run.jsonl"
    totals = Totals()
    with MetricsWriter(path, "m") as writer:
        for _ in range(40):
            clock[0] += 0.5
            totals += Totals(tokens=10, row_steps=5, seconds=0.5)
            writer.write(totals, GAUGES)
        totals += Totals(tokens=1, row_steps=1, seconds=0.5)
        writer.write(totals, GAUGES, last=True)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["tokens"] for row in rows] == [10, 110, 210, 310, 401]
    assert [row["time"] for row in rows] == [1000.5, 1005.5, 1010.5, 1015.5, 1020.0]
    assert (rows[1]["tokens_per_second"], rows[1]["recent_tokens_per_second"]) == (20.0, 20.0)
    assert rows[-1]["recent_tokens_per_second"] == round(91 / 5, 3)
    assert (rows[1]["running"], rows[1]["k"], rows[1]["slots"]) == (3, 4, 4)
    assert samples((tmp_path / "run.prom").read_text())["vllm:generation_tokens_total",] == 401
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run.jsonl", "run.prom"]


def test_a_series_goes_on_after_a_torn_line(tmp_path, clock):
    path = tmp_path / "run.jsonl"
    path.write_text('{"time": 1, "tokens": 1}\n{"ti')
    with MetricsWriter(path, "m") as writer:
        writer.write(FIRST, GAUGES)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["tokens"] for row in rows] == [1, 30]
    assert rows[1]["steps_by_k"] == {"4": 10, "0": 2}
    assert rows[1]["accepted_per_position"] == [9, 6, 5]


def test_a_file_that_is_no_series_is_left_alone(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("precious\nwithout an end")
    with pytest.raises(ValueError, match=r"notes\.txt is there already, and no time series"):
        MetricsWriter(path, "m")
    assert path.read_text() == "precious\nwithout an end"
