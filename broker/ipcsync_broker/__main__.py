"""``python -m ipcsync_broker``: the same as ``ipcsync broker``."""

from .cli import broker

broker(prog_name="ipcsync broker")
