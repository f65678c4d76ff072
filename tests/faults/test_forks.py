"""A forked child leaves its parent's blocks as well: what it releases and closes there is not its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

import ipcsync
from ipcsync import Session
from ipcsync.errors import IpcSyncError, WaitTimeout

from ..harness import TIMEOUT, Child, Peer

Spawn = Callable[..., Child]

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def in_a_forked_child(call: Callable[[], Any]) -> None:
    """Calls it there, where it may be refused."""
    pid = os.fork()
    if pid == 0:
        try:
            call()
        except IpcSyncError:
            pass
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def read(peer: Peer, how: str) -> None:
    with ipcsync.connect() as session, session.open_channel("frames").reader(start="oldest") as reader:
        items = reader.slots()
        slot = next(items)
        array = slot.array
        calls: dict[str, Callable[[], Any]] = {
            "release": slot.release,
            "loop": items.close,
            "reader": reader.close,
            "session": session.close,
        }
        in_a_forked_child(calls[how])
        peer.send("forked")
        peer.recv()
        assert (array == 1).all(), "it was written over while it was read"
        slot.release()
        assert [reader.get(timeout=TIMEOUT).number for _ in range(2)] == [2, 3], "nothing was passed over"


@pytest.mark.parametrize("how", ["release", "loop", "reader", "session"])
def test_a_reader_keeps_what_it_holds(session: Session, spawn: Spawn, how: str) -> None:
    with session.create_channel("frames", shape=(4,), dtype="int64", depth=2, device="cpu").writer() as writer:
        for _ in range(2):
            with writer.slot() as slot:
                slot.array[...] = slot.number
        child = spawn(read, how)
        assert child.recv() == "forked"
        with pytest.raises(WaitTimeout), writer.slot(timeout=0.1) as slot:
            slot.array[...] = 99
        child.send()
        with writer.slot() as slot:
            slot.array[...] = slot.number
        child.join()


def read_array(peer: Peer) -> None:
    with ipcsync.connect() as session:
        reading = session.open_array("weights").read()
        with reading as view:
            in_a_forked_child(lambda: reading.__exit__(None, None, None))
            peer.send("forked")
            peer.recv()
            assert (view.array == 1).all(), "it was written over while it was read"


def test_a_read_of_an_array_goes_on(session: Session, spawn: Spawn) -> None:
    array = session.create_array("weights", {"w": ipcsync.Field((4,), "int64")}, device="cpu")
    with array.write() as view:
        view.array[...] = 1
    child = spawn(read_array)
    assert child.recv() == "forked"
    with pytest.raises(WaitTimeout), array.write(timeout=0.1) as view:
        view.array[...] = 2
    child.send()
    child.join()


def write(peer: Peer) -> None:
    with ipcsync.connect() as session, session.open_channel("frames").writer() as writer:
        slot = writer.slot()
        slot.__enter__().array[...] = 1
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.read(ours, 1)
                slot.__exit__(None, None, None)
            except IpcSyncError:
                pass
            finally:
                os._exit(0)
        slot.__exit__(None, None, None)
        os.write(theirs, b"!")
        os.waitpid(pid, 0)
        os.close(ours), os.close(theirs)


def test_an_item_stays_that_a_child_began_too(session: Session, spawn: Spawn) -> None:
    with session.create_channel("frames", shape=(4,), dtype="int64", device="cpu").reader() as reader:
        child = spawn(write)
        child.join()
        assert [(slot.array == slot.number).all() for slot in reader.slots()] == [True]
