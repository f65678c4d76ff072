"""Items made up, and checked: to try a graph, to measure a machine, to test a pipeline's plumbing.

::

    [stages.source]
    call = "ipcsync_workers.stages.synthetic:source"
    outputs = ["numbers"]
    params = { items = 10000, rate = 500.0 }
"""

from __future__ import annotations

import time
import zlib
from typing import Any

import numpy

from ipcsync.errors import InvalidArgument

from ..stage import Stage


def source(stage: Stage) -> None:
    """Writes ``items`` items of pseudo-random bytes, ``rate`` a second at most (0: as fast as they are taken).

    The meta of each has its ``index`` from 0 and the ``checksum`` (CRC-32) that :func:`check` looks at.
    """
    items, rate = int(stage.params.get("items", 100)), float(stage.params.get("rate", 0))
    stage.expect(items)
    began = time.monotonic()
    first = stage.resumed_at
    for index in range(first, items):
        if rate:
            time.sleep(max(0.0, began + (index - first) / rate - time.monotonic()))
        with stage.output.slot(meta={"index": index}) as slot:
            sums = {}
            for name in slot:
                content = _content(index, slot[name].nbytes)
                made = numpy.frombuffer(content, numpy.uint8).view(slot[name].dtype).reshape(slot[name].shape)
                stage.put(slot[name], made)
                sums[name] = zlib.crc32(content)
            slot.meta["checksum"] = sums


def _content(index: int, nbytes: int) -> bytes:
    """Bytes that differ from item to item, quickly made: a counter's words, mixed by a multiplication."""
    words = numpy.arange(index << 20, (index << 20) + (nbytes + 7) // 8, dtype=numpy.uint64)
    return (words * numpy.uint64(0x9E3779B97F4A7C15)).tobytes()[:nbytes]


def check(stage: Stage) -> None:
    """Reads to the end; fails at the first item whose content is not what its meta's ``checksum`` says, or which is out
    of order (``ordered = false`` for a channel whose items may be missed or repeated)."""
    expected = stage.input.finished  # 0, unless it was started again
    for slot in stage.input.slots():
        index = slot.meta["index"]
        if index != expected and stage.params.get("ordered", True):
            raise InvalidArgument(f"item {expected} was due, and {index} came")
        expected = index + 1
        for name, checksum in slot.meta["checksum"].items():
            found = zlib.crc32(_bytes(stage, slot[name]))
            if found != checksum:
                raise InvalidArgument(f"item {index}: {name!r} has checksum {found:#x}, its source said {checksum:#x}")
        stage.count("checked")


def _bytes(stage: Stage, array: Any) -> bytes:
    content: bytes = stage.to_host(array).tobytes()
    return content
