"""Many devices: where arrays lie, planning for accelerators that aren't here, several processes."""
