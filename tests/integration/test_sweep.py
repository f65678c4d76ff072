"""What a starting broker removes: what dead brokers and sessions left, told by lock and start time; nobody else's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import ipcsync
from ipcsync import life
from ipcsync.backends import host_events
from ipcsync.shm import Region

from ..harness import Broker, Child, Peer

pytestmark = pytest.mark.fresh  # they count what their broker has, or end it


def hold(peer: Peer, runtime: Path) -> None:
    """Makes a life file and an event that needs no broker, and keeps both."""
    held = life.LifeFile(runtime)
    event = ipcsync.Event("cpu", interprocess=True)
    event.record()
    event.ipc_handle()
    peer.send(held.name)
    peer.recv()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.leaves("life-*")
def test_locks_and_start_times_say_whose_process_is_gone(runtime: Path, spawn: Callable[..., Child]) -> None:
    children: list[Child] = []
    files: list[str] = []
    events: list[str] = []
    for _ in range(3):
        children.append(spawn(hold, runtime))
        files.append(children[-1].recv())
        events += names(runtime / "l1") - set(events)
    kept, dead, reused = children
    dead.kill()
    # As if its creator had ended long ago and its pid were somebody else's now.
    region = Region.open(runtime / "l1" / events[2])
    region.words[host_events._START] += 1
    region.close()
    broker = Broker(runtime)
    try:
        assert {path.name for path in runtime.glob("life-*")} == {files[0], files[2]}, "their locks are held"
        assert names(runtime / "l1") == {events[0]}
    finally:
        assert broker.stop() == 0, broker.log()
    assert {path.name for path in runtime.glob("life-*")} == {files[0], files[2]}
    for child in (kept, reused):
        child.send()
        child.join()


def test_what_has_such_a_name_and_is_none_of_ours_stays(runtime: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (runtime / "ctl-9").mkdir()
    (runtime / "ctl-9" / "mem-1").write_text("deeper")
    (runtime / "mem-9").symlink_to(precious)
    strange = ["ctl-9x", "mem-", "smem-1", "life-1", "ledger.old", "journal.bak"]
    for name in strange:
        (runtime / name).write_text("somebody's")
    (runtime / "ctl-8").write_text("a dead broker's")
    broker = Broker(runtime)
    try:
        with ipcsync.connect() as session:
            assert session.create_event("e", device="cpu").record() == 1
    finally:
        assert broker.stop() == 0, broker.log()
    assert names(runtime) >= {"ctl-9", "mem-9", *strange}
    assert "ctl-8" not in names(runtime)
    assert precious.read_text() == "precious"
    assert (runtime / "ctl-9" / "mem-1").read_text() == "deeper"
    (runtime / "ctl-9" / "mem-1").unlink()
    (runtime / "ctl-9").rmdir()
    for name in ("mem-9", *strange):
        (runtime / name).unlink()
