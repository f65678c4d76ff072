"""What is kept of a stream that is current."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import nullcontext

from ipcsync.backends.cuda_streams import AsCurrent, KeptStream


class Owner:
    """What destroys the stream when it goes."""


def test_a_stream_that_nobody_made_uncurrent_again_is_not_destroyed_while_its_thread_lives() -> None:
    owner = Owner()
    gone, done, ending = weakref.ref(owner), threading.Event(), threading.Event()

    def body(raw: KeptStream) -> None:
        AsCurrent(nullcontext(), nullcontext(), raw).__enter__()  # type: ignore[arg-type]
        del raw
        done.set()
        assert ending.wait(10)

    boxed = [KeptStream(1234, owner, 0)]
    del owner
    thread = threading.Thread(target=lambda: body(boxed.pop()))
    thread.start()
    assert done.wait(10)
    gc.collect()
    assert gone() is not None
    ending.set()
    thread.join(10)
    del thread
    gc.collect()
    assert gone() is None


def test_and_one_whose_block_was_left_is() -> None:
    raw = KeptStream(1234, Owner(), 0)
    gone = weakref.ref(raw.owner)
    for _ in range(2):
        with AsCurrent(nullcontext(), nullcontext(), raw), AsCurrent(nullcontext(), nullcontext(), raw):  # type: ignore[arg-type]
            pass
    del raw
    gc.collect()
    assert gone() is None
