"""Layer 3, shared arrays: versions, readers and their writer, in real processes."""

# ruff: noqa: F811  (a fixture is imported, and named by what uses it)
from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest

import ipcsync
from ipcsync import Field, Session
from ipcsync.errors import (
    InvalidArgument,
    InvalidState,
    MetaTooLarge,
    NameInUse,
    NotExportable,
    NotFound,
    PeerDied,
    PeerFailed,
    RecorderBusy,
    WaitTimeout,
)
from ipcsync.waiting import Deadline

from ..harness import Child, Peer
from .cases import Case, case  # noqa: F401
from .items import host, same

Spawn = Callable[..., Child]
FIELDS = {"layer.0": Field((16, 4), "float32"), "layer.1": Field((3,), "int64"), "step": Field((), "int32")}


def read_versions(peer: Peer, count: int) -> list[int]:
    """Reads until it has seen version `count`: every field of a view is of one version."""
    versions: list[int] = []
    with ipcsync.connect(name="reader") as session:
        array = session.open_array("weights")
        peer.send("open")
        while not versions or versions[-1] < count:
            with array.read() as view:
                assert all(same(view[name], view.version) for name in view), "a torn version"
                assert view.meta == {"step": view.version}
                versions.append(view.version)
    return versions


def test_readers_see_whole_versions_in_order(case: Case, session: Session, spawn: Spawn) -> None:
    array = session.create_array("weights", FIELDS, device=case.device)
    assert array.fields == FIELDS
    readers = [spawn(read_versions, 50) for _ in range(2)]
    for reader in readers:
        assert reader.recv() == "open"
    for _ in range(50):
        with array.write() as view:
            for name in view:
                view[name][...] = view.version
            view.meta["step"] = view.version
    assert array.version == 50
    for reader in readers:
        versions = reader.join()
        assert versions == sorted(versions)
        assert versions[0] >= 1
        assert versions[-1] == 50


def test_the_first_version_is_waited_for(case: Case, session: Session) -> None:
    array = session.create_array("weights", {"array": Field((4,), "int32")}, device=case.device)
    with pytest.raises(WaitTimeout, match="version 1"), array.read(timeout=0.02):
        pass
    with array.write(meta={"a": 1}) as view:
        view.array[...] = 3
    with array.read() as view:
        assert (view.version, view.meta) == (1, {"a": 1})
        assert same(view.array, 3)
        if case.device == "cpu":
            with pytest.raises(ValueError, match="read-only"):
                view.array[0] = 1
    with pytest.raises(InvalidState):
        _ = view.array


def read_shared(peer: Peer) -> None:
    with ipcsync.connect() as session:
        array = session.open_array("weights")
        with array.read() as view:
            peer.send({name: (host(view[name]).tolist(), view[name].strides) for name in view})
        peer.recv()
        with array.read() as view:
            peer.send((view.version, {name: host(view[name]).tolist() for name in view}))


def test_memory_that_one_owns_is_shared_where_it_lies(case: Case, session: Session, spawn: Spawn) -> None:
    whole = case.exportable((8, 6), "float32")
    whole[...] = case.array(numpy.arange(48).reshape(8, 6), "float32")
    other = case.exportable((2,), "int64")
    other[...] = 5
    given = {"rows": whole[2:4], "column": whole[:, 1], "turned": whole.T, "other": other}
    array = session.share("weights", given)
    child = spawn(read_shared)
    found = child.recv()
    for name, mine in given.items():
        assert found[name] == (host(mine).tolist(), mine.strides)
    with array.write() as view:
        assert view["other"] is other
        whole[...] = 1
        other[...] = 2
    child.send()
    version, values = child.recv()
    assert version == 1
    assert values == {name: host(mine).tolist() for name, mine in given.items()}
    child.join()


def test_memory_that_cannot_be_exported_is_refused_with_the_reason(case: Case, session: Session) -> None:
    if case.device == "cpu":
        with pytest.raises(NotExportable, match="create_array"):
            session.share("weights", numpy.zeros(4))
    shared = case.exportable((4,), "float32")
    with pytest.raises(NotExportable, match="backwards"):
        session.share("weights", shared[::-1])
    with pytest.raises(NotExportable, match="no elements"):
        session.share("weights", shared[:0])
    for bad in ({}, {"a b": shared}, [1, 2]):
        with pytest.raises(InvalidArgument):
            session.share("weights", bad)


# -- reading holds, writing waits


def hold_version(peer: Peer) -> None:
    with ipcsync.connect() as session, session.open_array("weights").read() as view:
        peer.send(view.version)
        peer.recv()
        assert same(view.array, view.version)


@pytest.mark.parametrize("end", ["leaves", "dies"])
def test_nobody_writes_while_a_version_is_held(case: Case, session: Session, spawn: Spawn, end: str) -> None:
    array = session.create_array("weights", {"array": Field((4,), "int32")}, device=case.device)
    with array.write() as view:
        view.array[...] = 1
    child = spawn(hold_version)
    assert child.recv() == 1
    with pytest.raises(WaitTimeout, match="still hold version 1"), array.write(timeout=0.05):
        pass
    with array.read() as view:  # a write that was given up leaves the version as it was
        assert view.version == 1
    if end == "dies":
        child.kill()
    else:
        child.send()
        child.join()
    with array.write() as view:
        view.array[...] = 2
    assert view.version == 2


def test_a_read_waits_for_the_version_being_written(case: Case, session: Session) -> None:
    array = session.create_array("weights", {"array": Field((4,), "int32")}, device=case.device)
    with array.write() as view:
        view.array[...] = 1
    seen: list[Any] = []

    def read() -> None:
        with array.read() as view:
            seen.append((view.version, same(view.array, 2)))

    with array.write() as view:
        with pytest.raises(WaitTimeout), array.read(timeout=0.02):
            pass
        thread = threading.Thread(target=read)
        thread.start()
        view.array[...] = 2
    thread.join(20)
    assert seen == [(2, True)]


def test_reads_on_several_streams_end_in_any_order(case: Case, session: Session) -> None:
    """The writer waits for each stream's read, whichever ends first, and its host for none."""
    array = session.create_array("weights", {"array": Field((4,), "int32")}, device=case.device)
    with array.write() as view:
        view.array[...] = 1
    slow, fast, writing = case.stream(), case.stream(), case.stream()
    gate = case.hold(slow)
    with array.read(slow) as view:
        copy = case.copy_later(slow, view.array)
    with array.read(fast) as view:
        case.copy_later(fast, view.array)
    fast.synchronize()
    with array.write(writing) as view:
        case.fill(writing, view.array, 2)
    with pytest.raises(WaitTimeout):
        array._timeline.wait_host(2, Deadline(0.05))
    gate.open()
    writing.synchronize()
    slow.synchronize()
    assert same(copy, 1)
    with array.read() as view:
        assert same(view.array, 2)


def test_many_reads_at_once(case: Case, session: Session) -> None:
    array = session.create_array("weights", {"array": Field((4,), "int32")}, device=case.device)
    with array.write() as view:
        view.array[...] = 1
    reached, go = threading.Barrier(13), threading.Event()
    failed: list[BaseException] = []

    def read() -> None:
        try:
            for i in range(20):
                with array.read() as view:
                    assert same(view.array, view.version)
                if i == 10:
                    reached.wait(20)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=read) for _ in range(12)]
    for thread in threads:
        thread.start()
    reached.wait(20)
    for _ in range(5):
        with array.write() as view:
            view.array[...] = view.version
    go.set()
    for thread in threads:
        thread.join(20)
    assert not failed


# -- torn versions, writers


def test_an_exception_in_write_condemns_the_version(case: Case, session: Session, spawn: Spawn) -> None:
    array = session.create_array("weights", {"array": Field((4,), "int32")}, device=case.device)
    with array.write() as view:
        view.array[...] = 1
    with pytest.raises(ZeroDivisionError), array.write() as view:
        view.array[0] = 1 // 0
    with pytest.raises(PeerFailed), array.read():
        pass
    with pytest.raises(PeerFailed), array.write():
        pass


def test_meta_that_does_not_fit_condemns_it_too(case: Case, session: Session) -> None:
    array = session.create_array("weights", {"array": Field((4,), "int32")}, device=case.device)
    with pytest.raises(MetaTooLarge), array.write(meta={"x": "y" * 5000}) as view:
        view.array[...] = 1
    with pytest.raises(PeerFailed), array.read():
        pass


def die_in_write(peer: Peer, where: str) -> None:
    session = ipcsync.connect(name="victim")
    array = session.open_array("weights")
    with array.write() as view:
        view.array[...] = 1
        view.meta["step"] = 1
    if where == "outside":
        peer.send()
        signal.pause()
    with array.write() as view:
        view.array[0] = 2
        peer.send()
        signal.pause()


def test_a_death_in_write_condemns_the_version(case: Case, session: Session, spawn: Spawn) -> None:
    array = session.create_array("weights", {"array": Field((4,), "int32")}, device=case.device)
    child = spawn(die_in_write, "inside")
    child.recv()
    killer = threading.Timer(0.1, child.kill)
    killer.start()
    with pytest.raises(PeerDied, match="victim") as caught, array.read(timeout=None):
        pass
    assert caught.value.pid == child.pid
    killer.join()


def test_a_death_outside_write_leaves_the_version(case: Case, session: Session, spawn: Spawn) -> None:
    array = session.create_array("weights", {"array": Field((4,), "int32")}, device=case.device)
    child = spawn(die_in_write, "outside")
    child.recv()
    child.kill()
    with array.read() as view:
        assert (view.version, same(view.array, 1)) == (1, True)


def write_once(peer: Peer) -> int:
    with ipcsync.connect() as session, session.open_array("weights") as array, array.write() as view:
        view.array[...] = view.version
        return view.version


def test_the_pen_is_lent(case: Case, session: Session, spawn: Spawn) -> None:
    array = session.create_array("weights", {"array": Field((4,), "int32")}, device=case.device)
    with array.write() as view:
        view.array[...] = 1
    with pytest.raises(RecorderBusy):
        spawn(write_once).join()
    array.release()
    assert spawn(write_once).join() == 2
    with array.read() as view:
        assert same(view.array, 2)


def test_names(case: Case, session: Session) -> None:
    array = session.create_array("weights", {"array": Field((4,), "int32")}, device=case.device)
    with pytest.raises(NameInUse):
        session.create_array("weights", {"array": Field((4,), "int32")}, device=case.device)
    again = session.create_array("weights", {"array": Field((4,), "int32")}, device=case.device, exist_ok=True)
    assert again.incarnation == array.incarnation
    with pytest.raises(NotFound):
        session.open_array("nothing", timeout=0.02)
    array.close()
    with pytest.raises(InvalidState), array.read():
        pass
