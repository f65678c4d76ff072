"""Ready-made stages: ``call = "ipcsync_workers.stages.images:read"``. All work on the CPU and on a GPU.

================================  =====================================================================================
``images:read``, ``write``        pictures of a folder; needs Pillow (``pip install 'ipcsync[images]'``)
``arrays:read``, ``write``        ``.npy`` and ``.npz`` files of a folder
``video:read``, ``write``         the frames of a film; needs PyAV (``pip install 'ipcsync[video]'``)
``synthetic:source``, ``check``   items made up, at a rate, with checksums; and a sink that checks them
``filters:resize``                another height and width
``filters:normalise``             scale, mean and deviation; channels first
``filters:edges``                 the strength of a picture's edges
``statistics:statistics``         a sink: smallest, largest, mean and deviation of everything, as JSON
================================  =====================================================================================
"""
