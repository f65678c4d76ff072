"""Programs that do work: pipelines of stages, each a process of its own. See :mod:`ipcsync_workers.stage`."""

from .stage import Stage, per_item

__all__ = ["Stage", "per_item"]
