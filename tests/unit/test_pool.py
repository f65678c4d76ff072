"""Processes and brokers that tests share: what they keep, what they lose, and when they are given up."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

import ipcsync
from ipcsync import errors

from ..harness import Child, Peer, wait_until
from ..pool import KEEP, Pool, Shared, shares


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.clear()


@pytest.fixture
def own() -> Iterator[Shared]:
    made = Shared()
    yield made
    assert made.close() == []


def tells(peer: Peer, *names: str) -> tuple[int, list[str | None]]:
    found = os.getpid(), [os.environ.get(name) for name in names]
    os.environ["IPCSYNC_NAMESPACE"] = "left behind"
    return found


def hears(peer: Peer) -> str:
    peer.send("listening")
    said: str = peer.recv()
    return said


def fails(peer: Peer) -> None:
    raise LookupError("nothing here")


def leaves(peer: Peer) -> None:
    os._exit(3)


def connects(peer: Peer) -> None:
    session = ipcsync.connect(name="forgetful")
    peer.send(session.create_event("mine", device="cpu").record())


def test_a_process_runs_one_function_after_the_other_each_in_its_own_environment(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for name in ("one", "two"):
        monkeypatch.setenv("IPCSYNC_NAMESPACE", name)
        child = pool.run(tells, ("IPCSYNC_NAMESPACE",), cuda=False)
        found.append(child.join())
        assert child.end() is None
    (first, one), (second, two) = found
    assert first == second
    assert (one, two) == (["one"], ["two"])
    assert pool.counts["started"] == 1


def test_what_was_sent_to_one_function_does_not_reach_the_next(pool: Pool) -> None:
    first = pool.run(tells, (), cuda=False)
    pid, _ = first.join()
    first.send("too late")
    first.end()
    second = pool.run(hears, (), cuda=False)
    assert second.pid == pid
    assert second.recv() == "listening"
    second.send("hello")
    assert second.join() == "hello"
    second.end()


def _raises(child: Child) -> None:
    with pytest.raises(LookupError):
        child.join()


def _is_killed(child: Child) -> None:
    assert child.recv() == "listening"
    child.kill()


def _is_stopped(child: Child) -> None:
    assert child.recv() == "listening"
    child.kill(signal.SIGSTOP)
    child.kill(signal.SIGCONT)
    child.send("on")
    assert child.join() == "on"


def _still_runs(child: Child) -> None:
    assert child.recv() == "listening"


def _exits(child: Child) -> None:
    with pytest.raises(AssertionError, match="exit code 3"):
        child.join()


@pytest.mark.parametrize(
    ("fn", "happens"),
    [(fails, _raises), (hears, _is_killed), (hears, _is_stopped), (hears, _still_runs), (leaves, _exits)],
)
def test_a_process_is_not_used_again_to_which_something_happened(
    pool: Pool, fn: Callable[..., object], happens: Callable[[Child], None]
) -> None:
    child = pool.run(fn, (), cuda=False)
    pid = child.pid
    happens(child)
    child.end()
    assert pool.idle == []
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_error_that_nobody_asked_for_is_kept(pool: Pool) -> None:
    child = pool.run(fails, (), cuda=False)
    wait_until(child.returned, "its end")
    assert isinstance(child.end(), LookupError)


def test_one_that_ended_while_it_waited_is_replaced(pool: Pool) -> None:
    child = pool.run(tells, (), cuda=False)
    pid, _ = child.join()
    child.end()
    os.kill(pid, signal.SIGKILL)
    pool.idle[0].process.join(30)
    child = pool.run(tells, (), cuda=False)
    assert child.join()[0] != pid
    child.end()


def test_a_process_that_began_in_another_environment_is_not_taken(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    child = pool.run(tells, (), cuda=False)
    pid, _ = child.join()
    child.end()
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "3")
    child = pool.run(tells, ("CUDA_DEVICE_MAX_CONNECTIONS",), cuda=False)
    other, said = child.join()
    assert (other != pid, said) == (True, ["3"])
    child.end()


def test_no_more_than_a_few_are_kept(pool: Pool) -> None:
    children = [pool.run(tells, (), cuda=False) for _ in range(KEEP + 1)]
    for child in children:
        child.join()
    for child in children:
        child.end()
    assert len(pool.idle) == KEEP


def test_at_a_gpu_lost_ones_are_replaced_ahead(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    child = pool.run(hears, (), cuda=True)
    assert child.recv() == "listening"
    child.kill()
    child.end()
    assert [worker.process.is_alive() for worker in pool.idle] == [True, True]


def test_at_a_gpu_a_child_has_few_queues_and_says_so(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    child = pool.run(tells, ("CUDA_DEVICE_MAX_CONNECTIONS", "IPCSYNC_NAMESPACE"), cuda=True)
    assert child.join()[1] == ["8", None]
    child.end()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


def holds(peer: Peer) -> str:
    """Leaves memory of another process open, as seen in this one's backend."""
    from types import SimpleNamespace

    from ipcsync.backends import select

    made = SimpleNamespace(_memories=SimpleNamespace(_opened={(0, b"handle"): 1}), _quarantine=SimpleNamespace(held=0))
    select._made["cuda"] = made  # type: ignore[assignment]
    return "returned"


def test_a_process_that_cannot_let_go_leaves(pool: Pool) -> None:
    child = pool.run(holds, (), cuda=False)
    assert child.join() == "returned"
    assert child.end() is None
    assert pool.idle == []


# -- the broker


def test_a_broker_goes_from_test_to_test_with_names_of_their_own(own: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    pids = set()
    for _ in range(2):
        place = own.at()
        pids.add(place.broker.pid)
        monkeypatch.setenv("IPCSYNC_NAMESPACE", place.namespace())
        with ipcsync.connect(str(place.path)) as session:
            session.create_event("frame", lifetime="broker", device="cpu").close()
            session.unlink("frame")
        assert own.problems(()) == []
    assert len(pids) == 1


def test_what_only_the_brokers_end_removes_ends_it(own: Shared) -> None:
    place = own.at()
    with ipcsync.connect(str(place.path)) as session:
        session.create_channel("kept", shape=(4,), dtype="uint8", device="cpu", lifetime="broker")
    assert own.problems(()) == []
    assert own.place is None
    assert not place.path.exists()
    assert own.at().path != place.path


def test_what_even_that_leaves_is_a_leak_of_the_test(own: Shared) -> None:
    (own.at().path / "mem-planted").touch()
    assert own.problems(()) == ["file mem-planted was left in the runtime directory"]


def test_a_failed_tests_broker_is_not_used_again(own: Shared) -> None:
    own.at()
    assert own.problems((), failed=True) == []
    assert own.place is None


def test_what_a_test_leaves_on_purpose_is_not_left_to_the_next(own: Shared) -> None:
    (own.at().path / "mem-planted").touch()
    assert own.problems(("mem-planted",)) == []
    assert own.place is None


def test_a_broker_that_died_is_a_failure(own: Shared) -> None:
    own.at().broker.kill()
    assert any("died with status -9" in problem for problem in own.problems(("ledger",)))
    assert own.place is None


def test_a_function_that_leaves_its_session_open_has_it_closed(own: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPCSYNC_RUNTIME_DIR", str(own.at().path))
    child = own.pool.run(connects, (), cuda=False)
    assert child.recv() == 1
    child.join()
    assert child.end() is None
    assert own.problems(()) == []
    assert own.place is not None
    with ipcsync.connect() as session, pytest.raises(errors.NotFound):
        session.open_event("mine", timeout=0.02)


def test_a_broker_ends_with_the_tests_process(own: Shared) -> None:
    """Here: with the thread that started it, which is what the kernel looks at."""
    thread = threading.Thread(target=own.at)
    thread.start()
    thread.join()
    assert own.place is not None
    assert own.place.broker.process.wait(30) == -signal.SIGKILL
    assert own.problems(("ledger",)) != []


# -- who shares


def _plain() -> None: ...


@pytest.mark.cuda
def _at_a_gpu() -> None: ...


@pytest.mark.cuda
@pytest.mark.fresh("children")
def _new_children() -> None: ...


@pytest.mark.cuda
@pytest.mark.fresh
def _all_new() -> None: ...


@pytest.mark.parametrize(
    ("fn", "usually", "forced"),
    [
        (_plain, (False, False), (True, True)),
        (_at_a_gpu, (True, True), (True, True)),
        (_new_children, (False, True), (False, True)),
        (_all_new, (False, False), (False, False)),
    ],
)
def test_tests_share_at_a_gpu_unless_they_say_so(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    fn: Callable[[], None],
    usually: tuple[bool, bool],
    forced: tuple[bool, bool],
) -> None:
    item = pytest.Function.from_parent(request.node.parent, name=fn.__name__, callobj=fn)
    for mode, expected in ((None, usually), ("1", forced), ("0", (False, False))):
        if mode is None:
            monkeypatch.delenv("IPCSYNC_TEST_POOL", raising=False)
        else:
            monkeypatch.setenv("IPCSYNC_TEST_POOL", mode)
        assert (shares(item, "children"), shares(item, "broker")) == expected
