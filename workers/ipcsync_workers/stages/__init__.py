"""Ready-made stages: ``call = "ipcsync_workers.stages.synthetic:source"``."""
