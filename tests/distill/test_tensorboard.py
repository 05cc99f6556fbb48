"""Event files: what metrics.jsonl says, and nothing breaks without the library."""

from __future__ import annotations

import importlib.util
import struct

import pytest

from specjax.distill.tensorboard import event_writer, scalars

LINES = [
    {"step": 10, "loss": 2.5, "acceptance": [0.25, 0.5]},
    {"step": 20, "held_out": {"score": 1.5}},
]


def test_names_of_scalars():
    assert scalars(LINES[0]) == {"loss": 2.5, "acceptance/1": 0.25, "acceptance/2": 0.5}
    assert scalars(LINES[1]) == {"held_out/score": 1.5}


def test_what_is_written_can_be_read(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    with event_writer(tmp_path) as write:
        for line in LINES:
            write(line)
    (file,) = tmp_path.iterdir()
    data, events = file.read_bytes(), []
    while data:  # length, its checksum, the record, its checksum
        (size,) = struct.unpack_from("<Q", data)
        events.append(Event.FromString(data[12 : 12 + size]))
        data = data[16 + size :]
    found = {(value.tag, e.step): value.simple_value for e in events for value in e.summary.value}
    assert found == {
        ("loss", 10): 2.5,
        ("acceptance/1", 10): 0.25,
        ("acceptance/2", 10): 0.5,
        ("held_out/score", 20): 1.5,
    }


def test_nothing_is_written_without_the_library(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with event_writer(tmp_path / "events") as write:
        write(LINES[0])
    assert not (tmp_path / "events").exists()
