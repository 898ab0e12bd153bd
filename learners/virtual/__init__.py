"""Virtual workers: learners of several devices, through which mini-batches run in a pipeline.

The modules:

    virtual_worker.py   VirtualWorker: the pipeline, and the learner's own weights
    stages.py           one stage: its thread, its passes, its times
    stage_devices.py    devices and cores of the stages
    cutting.py          a chain of layers, cut into stages
    plan.py             the best stages for measured layers and devices, by
                        activations.py (memory), profiler.py (times), partition.py (the search)
                        and schedule.py (the pipeline in virtual time)
"""

from gadei_ps.learners.virtual.virtual_worker import VirtualWorker

__all__ = ["VirtualWorker"]
