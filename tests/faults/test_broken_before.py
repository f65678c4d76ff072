"""What a hostile world once broke: each of these is a bug that was, by its symptom."""

from __future__ import annotations

import asyncio
import os
import struct
import subprocess
import sys

import pytest
from click.testing import CliRunner

import ipcsync
from ipcsync import cli
from ipcsync.ledger import Header

from ..harness import TIMEOUT, Broker, wait_until

WHOLE_RUN = 4 * TIMEOUT  # a pipeline is a handful of processes that import much
IPCSYNC = [sys.executable, "-c", "from ipcsync.cli import main; main()"]


# -- a broker that could not start again over what its predecessor left


def _things(peer):
    session = ipcsync.connect()
    session.create_event("event", device="cpu")
    session.create_channel("channel", shape=(4,), dtype="uint8", device="cpu")
    peer.send()
    peer.recv()


def _cut(pattern, nbytes):
    def damage(runtime):
        for path in runtime.glob(pattern):
            os.truncate(path, nbytes)

    return damage


def _header(word, value):
    def damage(runtime):
        with (runtime / "ledger").open("r+b") as file:
            file.seek(8 * word)
            file.write(struct.pack("<Q", value))

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(_cut("ledger", 4096), id="the ledger ends after its header"),
        pytest.param(_cut("ledger", 100_000), id="the ledger ends in its blocks"),
        pytest.param(_cut("ctl-*", 64), id="a control file is cut short"),
        pytest.param(_cut("mem-*", 1), id="memory is cut short"),
        pytest.param(_header(Header.SESSIONS, 0), id="no sessions"),
        pytest.param(_header(Header.SESSIONS, 1 << 40), id="very many sessions"),
        pytest.param(_header(Header.EVENTS, 0), id="no events"),
        pytest.param(_header(Header.BLOCKS_AT, 0), id="blocks over the header"),
        pytest.param(_header(Header.CELLS_AT, 1 << 63), id="cells far away"),
        pytest.param(_header(Header.CELLS_USED, 1 << 63), id="more cells used than there are"),
    ],
)
def test_a_broker_starts_over_the_damaged_remains_of_another(runtime, spawn, damage):
    first = Broker(runtime)
    child = spawn(_things)
    child.recv()
    first.kill()
    child.kill()
    damage(runtime)
    second = Broker(runtime)
    with ipcsync.connect() as session:
        event = session.create_event("new", device="cpu")
        assert event.record() == 1
        event.synchronize(round=1)
    assert second.stop() == 0
    assert "Traceback" not in second.log()
    assert "of no use" in second.log() or "is lost" in second.log()


def _channel_for_all(peer):
    with ipcsync.connect() as session:
        session.create_channel("channel", shape=(4,), dtype="uint8", device="cpu", lifetime="broker")
        peer.send()
        peer.recv()


@pytest.mark.parametrize("end", ["dies with the broker", "leaves later"])
def test_the_name_of_a_channel_whose_memory_nobody_has_any_more_is_free(runtime, spawn, end):
    broker = Broker(runtime)
    child = spawn(_channel_for_all)
    child.recv()
    broker.kill()
    for path in runtime.glob("mem-*"):
        path.unlink()
    if end == "dies with the broker":
        child.kill()
    broker.start()
    with ipcsync.connect() as session:
        if end == "leaves later":
            child.send()
            child.join()

        def made():
            try:
                return session.create_channel("channel", shape=(4,), dtype="uint8", device="cpu", lifetime="broker")
            except ipcsync.errors.NameInUse:
                return None

        with wait_until(made, "the end of the channel").writer() as writer, writer.slot() as slot:
            slot.array[...] = 1
        session.unlink("channel")
    assert broker.stop() == 0


# -- pictures


@pytest.mark.watchdog(150)
def test_file_names_need_not_be_text_and_may_be_as_long_as_can_be(runtime, tmp_path):
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path / "in"
    folder.mkdir()
    names = [b"not\xffutf-8.png", b"new\nline.png", b"y" * 251 + b".png", "漢字".encode() * 40 + b".jpg"]
    for name in names:
        with open(os.path.join(os.fsencode(folder), name), "wb") as file:
            image.new("RGB", (8, 8)).save(file, format="png")
    with open(os.path.join(os.fsencode(folder), b"no\xffpicture.png"), "wb") as file:
        file.write(b"no picture")
    (tmp_path / "p.toml").write_text(
        "[channels]\nframes = { shape = [8, 8, 3], dtype = 'uint8' }\n[stages]\n"
        "read = { call = 'ipcsync_workers.stages.images:read', outputs = ['frames'], params = { folder = 'in' } }\n"
        "write = { call = 'ipcsync_workers.stages.images:write', inputs = ['frames'], params = { folder = 'out' } }\n"
    )
    done = subprocess.run([*IPCSYNC, "run", str(tmp_path / "p.toml")], capture_output=True, timeout=WHOLE_RUN)
    assert done.returncode == 0, done.stderr.decode()
    assert len(os.listdir(tmp_path / "out")) == len(names)
    assert rb"passed over no\xffpicture.png" in done.stderr + done.stdout


# -- waits


def test_a_deadline_is_a_number(session):
    event = session.create_event("event", device="cpu")
    with pytest.raises(ipcsync.InvalidArgument, match="NaN"):
        event.wait(timeout=float("nan"))


def test_a_cancellation_that_meets_an_item_is_not_lost(session):
    channel = session.create_channel("frames", shape=(1,), dtype="uint8", device="cpu")

    async def take(reader):
        async for _ in reader.slots_async():
            pass

    async def main():
        with channel.reader() as reader:
            task = asyncio.create_task(take(reader))
            while not (wishes := session.waiter._wishes):
                await asyncio.sleep(0)
            wishes[0].future.set_result(None)  # what the waiter does when an item is there
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(task, TIMEOUT)

    asyncio.run(main())


def test_a_meta_too_deep_is_refused_as_other_metas_are(session):
    channel = session.create_channel("frames", shape=(1,), dtype="uint8", device="cpu")
    deep = {}
    for _ in range(100_000):
        deep = {"in": deep}
    with channel.writer() as writer, pytest.raises(ipcsync.InvalidArgument), writer.slot(meta=deep):
        pass


# -- standard streams


_PIPELINE = """
[channels]
frames = { shape = [8], dtype = 'uint8' }
[stages]
make = { call = 'ipcsync_workers.stages.synthetic:source', outputs = ['frames'], params = { items = 3 } }
see = { call = 'ipcsync_workers.stages.synthetic:check', inputs = ['frames'] }
"""


@pytest.mark.watchdog(150)
@pytest.mark.parametrize("closed", ["<&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_pipeline_runs_with_closed_standard_streams(runtime, tmp_path, closed):
    """A memfd or a pipe took the closed stream's number, and a child's own stream its place."""
    (tmp_path / "p.toml").write_text(_PIPELINE)
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", *IPCSYNC, "run", str(tmp_path / "p.toml")]
    assert subprocess.run([*command, "--json", str(tmp_path / "j")], timeout=WHOLE_RUN).returncode == 0
    assert '"done"' in (tmp_path / "j").read_text()


@pytest.mark.watchdog(150)
def test_a_closing_table_that_does_not_fit_is_a_sentence(runtime, tmp_path):
    (tmp_path / "p.toml").write_text(_PIPELINE)
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*IPCSYNC, "run", str(tmp_path / "p.toml"), "--json", "/dev/full"],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=WHOLE_RUN,
        )
    assert done.returncode == 1
    assert b"the closing table could not be written: " in done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.watchdog(150)
def test_a_table_is_shown_where_only_ascii_can_be(runtime, tmp_path):
    (tmp_path / "p.toml").write_text(_PIPELINE)
    done = subprocess.run(
        [*IPCSYNC, "run", str(tmp_path / "p.toml")],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        timeout=WHOLE_RUN,
    )
    assert done.returncode == 0, done.stderr.decode()


def test_ctrl_c_at_any_moment_is_exit_status_130(monkeypatch):
    """It was 1, as of a stage that failed, while the command was still importing or already reporting."""

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("ipcsync_workers.cli.run_file", interrupted)
    done = CliRunner().invoke(cli.ipcsync, ["run", "pipeline.toml"])
    assert done.exit_code == 130
    assert "Aborted" not in done.output
