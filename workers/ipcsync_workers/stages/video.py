"""The frames of a film. Needs PyAV (``pip install 'ipcsync[video]'``).

::

    [stages.read]
    call = "ipcsync_workers.stages.video:read"
    outputs = ["frames"]                      # [height, width, 3] of uint8
    params = { file = "film.mp4" }

    [stages.write]
    call = "ipcsync_workers.stages.video:write"
    inputs = ["frames"]
    params = { file = "out.mp4", rate = 25 }
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from ipcsync.errors import InvalidArgument, InvalidState, Unsupported

from ..stage import Stage
from ._files import whole


def _av() -> Any:
    try:
        import av
    except ModuleNotFoundError:
        raise Unsupported("films need PyAV: pip install 'ipcsync[video]'") from None
    return av


def read(stage: Stage) -> None:
    """Every frame of ``file``, scaled to the channel's height and width, as RGB. The meta has its ``frame`` from 0 and
    its ``time`` in seconds. ``frames`` is how many at most."""
    av, file = _av(), Path(stage.params["file"]).expanduser()
    most = stage.params.get("frames")
    try:
        film = av.open(str(file))
    except (OSError, av.FFmpegError) as error:
        raise InvalidArgument(f"{file.absolute()} cannot be read as a film: {error}") from None
    with film:
        if not film.streams.video:
            raise InvalidArgument(f"{file.absolute()} has no pictures")
        track = film.streams.video[0]
        track.thread_type = "AUTO"
        total = track.frames if most is None else min(most, track.frames or most)
        if total:
            stage.expect(total)
        for number, frame in enumerate(film.decode(track)):
            if number == most:
                return
            if number < stage.resumed_at:
                continue  # published before this stage was started again
            with stage.output.slot(meta={"frame": number, "time": frame.time}) as slot:
                height, width = _size(slot.array)
                stage.put(slot.array, frame.to_ndarray(format="rgb24", width=width, height=height))


def write(stage: Stage) -> None:
    """One film of all items, at ``rate`` frames a second, by ``codec`` (libx264). It appears whole, when its input has
    ended; so it cannot be started again."""
    if stage.restarts:
        raise InvalidState("a film is written in one go: this stage needs restart = 'never'")
    av, file = _av(), Path(stage.params["file"]).expanduser()
    rate, codec = Fraction(stage.params.get("rate", 25)).limit_denominator(1001), stage.params.get("codec", "libx264")
    file.parent.mkdir(parents=True, exist_ok=True)
    with whole(file) as path, av.open(str(path), "w") as film:
        track = None
        for slot in stage.input.slots():
            picture = np.ascontiguousarray(stage.to_host(slot.array))
            if track is None:
                height, width = _size(picture)
                track = film.add_stream(codec, rate=rate)
                track.height, track.width, track.pix_fmt = height, width, "yuv420p"
            film.mux(track.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            stage.count("written")
        if track is None:
            raise InvalidState("no frame came: there is no film to be written")
        film.mux(track.encode())


def _size(picture: Any) -> tuple[int, int]:
    if picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8:
        raise InvalidArgument(
            f"a film needs a channel of shape [height, width, 3] of uint8, not {picture.shape} of {picture.dtype}"
        )
    return int(picture.shape[0]), int(picture.shape[1])
