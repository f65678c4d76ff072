"""Three frameworks in one pipeline, each in a process of its own, over the same memory.

Nobody copies: each takes the slot's array as its own kind, by DLPack or by the array interfaces.
"""

import math

import numba
import numpy

from ipcsync_workers import Stage


def waves(stage: Stage) -> None:
    """CuPy (on the CPU: NumPy). ``stage.xp`` is the one or the other, and the slot's array is its own."""
    xp, size = stage.xp, 65536
    for number in range(stage.params["items"]):
        with stage.output.slot(meta={"number": number}) as slot:
            xp.sin(xp.arange(size, dtype=xp.float32) * (number + 1), out=slot.array)


@numba.vectorize(["float32(float32)"])
def smooth(x: float) -> float:
    return x / (1.0 + math.fabs(x))


def squash(stage: Stage) -> None:
    """numba: a kernel of one's own, compiled, from one channel's memory into another's."""
    kernel = _on_gpu() if stage.device.type == "cuda" else smooth
    for slot in stage.input.slots():
        with stage.output.slot(meta=slot.meta) as out:
            kernel(slot.array, out.array)


def _on_gpu():
    import cupy
    from numba import cuda

    @cuda.jit
    def body(x, y):
        i = cuda.grid(1)
        if i < x.size:
            y[i] = x[i] / (1.0 + math.fabs(x[i]))

    def kernel(x, y):
        # The slot's stream is CuPy's current one in its turn: the kernel goes there, in order with the turn.
        stream = cuda.external_stream(cupy.cuda.get_current_stream().ptr)
        source, target = (cuda.as_cuda_array(array, sync=False) for array in (x, y))
        body[(source.size + 255) // 256, 256, stream](source, target)

    return kernel


def total(stage: Stage) -> None:
    """JAX: reads the slot in place, and answers with one number."""
    import jax
    import jax.numpy as jnp

    # A reader's array on the host is read-only, which DLPack cannot tell JAX; device_put takes it where it lies.
    take = jax.dlpack.from_dlpack if stage.device.type == "cuda" else jax.device_put
    energy = jax.jit(lambda x: jnp.sum(x * x))
    lines = []
    for slot in stage.input.slots():
        answer = energy(take(slot.array))
        # JAX computes on streams of its own, later. It must be done before the slot's turn is over.
        lines.append(f"{slot.meta['number']} {float(answer.block_until_ready()):.1f}\n")
    with open(stage.params["file"], "w") as out:
        out.writelines(lines)


def expected(number: int) -> float:
    """What `total` should say, in NumPy."""
    x = numpy.sin(numpy.arange(65536, dtype=numpy.float32) * (number + 1))
    y = x / (1 + numpy.abs(x))
    return float((y * y).sum())
