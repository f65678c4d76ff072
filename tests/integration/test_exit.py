"""A program ends while daemon threads of it wait: it says nothing of them, and hides nothing else."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ..harness import TIMEOUT, Broker

WAITS = {
    "get": "ring.reader().get(timeout=None)",
    "slots": "list(ring.reader().slots(timeout=None))",
    "latest": "ring.reader(policy='latest').get(timeout=None)",
    "member": "ring.reader(group='g').get(timeout=None)",
    "slot": "fill(full)",
    "select": "session.select([ring.reader(), full.reader()], timeout=None)",
    "wait": "session.open_event('e').wait(timeout=None)",
    "synchronize": "session.open_event('e').synchronize(round=1, timeout=None)",
    "open": "session.open_channel('nobody', timeout=None)",
    "watch": "session.watch('nobody.*', timeout=None).get()",
    "read": "read(session.open_array('w'))",
    "asyncio": "asyncio.run(first(ring.reader()))",
}
PROGRAM = """
import asyncio, atexit, sys, threading
threads = []
atexit.register(lambda: [thread.join() for thread in threads])  # after the sessions are closed: all have had their say
import ipcsync

session = ipcsync.connect()
ring = session.create_channel("ring", shape=(4,), depth=2, device="cpu")
full = session.create_channel("full", shape=(4,), depth=2, device="cpu")
blocker = full.reader()
session.create_event("e", device="cpu")
session.create_array("w", shape=(4,), device="cpu")

def fill(channel):
    with channel.writer() as writer:
        while True:
            with writer.slot(timeout=None) as slot:
                slot.array[...] = 1

def read(array):
    with array.read(timeout=None) as view:
        pass

async def first(reader):
    async for slot in reader.slots_async(timeout=None):
        pass

def thread(*calls, daemon=True):
    begun = threading.Event()
    def run():
        begun.set()
        for call in calls:
            call()
    made = threading.Thread(target=run, daemon=daemon)
    made.start()
    threads.append(made)
    begun.wait()
    return made
"""


def program(end: str) -> subprocess.CompletedProcess[str]:
    text = textwrap.dedent(PROGRAM) + textwrap.dedent(end)
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=2 * TIMEOUT)


@pytest.mark.parametrize("how", WAITS)
def test_a_daemon_thread_that_waits_at_the_end_is_not_spoken_of(runtime: Path, broker: Broker, how: str) -> None:
    done = program(f"""
        import time
        thread(lambda: {WAITS[how]})
        time.sleep(0.05)  # mostly it waits by then; if not, all the same
    """)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_however_the_program_ends(runtime: Path, broker: Broker) -> None:
    everything = "\n".join(f"thread(lambda: {call})" for call in WAITS.values() if "asyncio" not in call)
    done = program(everything + "\nsys.exit(3)")
    assert (done.returncode, done.stderr) == (3, "")
    done = program(everything + "\nraise KeyError('mine')")
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "Traceback (most recent call last):"
    assert done.stderr.splitlines()[-1] == "KeyError: 'mine'"
    assert "SessionClosed" not in done.stderr


def test_what_else_a_thread_raises_is_shown(runtime: Path, broker: Broker) -> None:
    done = program("""
        def fails():
            try:
                ring.reader().get(timeout=None)
            except ipcsync.errors.SessionClosed:
                raise ValueError("mine") from None
        thread(fails)
    """)
    assert done.returncode == 0
    assert "ValueError: mine" in done.stderr


def test_a_session_that_is_closed_under_a_thread_is_an_error(runtime: Path, broker: Broker) -> None:
    """The program goes on: somebody closed what another thread still used."""
    done = program("""
        used = thread(lambda: ring.reader().get(timeout=None))
        session.close()
        used.join()
    """)
    assert done.returncode == 0
    assert "SessionClosed" in done.stderr


def test_the_programs_own_hook_hears_the_rest(runtime: Path, broker: Broker) -> None:
    done = program("""
        def hook(args):
            print("heard", args.exc_type.__name__, file=sys.stderr, flush=True)
        threading.excepthook = hook
        def fails():
            try:
                ring.reader().get(timeout=None)
            except ipcsync.errors.SessionClosed:
                raise ValueError("mine")
        thread(lambda: ring.reader().get(timeout=None))
        thread(fails)
    """)
    assert done.stderr == "heard ValueError\n"
