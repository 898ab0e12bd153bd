"""PyTorch: a drop-in optimizer whose step() pushes, for a model that reads the shared weights.

    optimizer = gadei_ps.learners.torch.Optimizer(model)    # instead of torch.optim.SGD(...)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()

The job's optimizer moves the weights; its state lies in the server. LocalOptimizer is for a job
that adds updates: there the optimizer is one of torch's, in the learner.

On the CPU the model's parameters become views of the weights segment: a pull copies nothing, and
other learners' gradients show at once (Hogwild). That memory is read-only: Optimizer.assign has the
server write, as load_state_dict of the model does (model_loading.py). Writing to a parameter (model
surgery, an in-place clamp) ends the process with a segmentation fault and a traceback. With
`view=False` the learner has a copy of its own instead, which every step renews; step() assigns what
was written to it (writes.py).

On a GPU the parameters become views of a copy on the device. Newer weights reach it while the model
computes, and gradients leave while the next step computes.

Embeddings made with sparse=True push only the rows that a batch has touched. Client.push documents
what that means for optimizers with state.

The job has parameters in float32. Parameters of other types are cast at every step, also without
`view=False`.

Buffers (batch-norm statistics) are the learner's own; one learner's are the job's copy. See
buffers.py.
"""

from gadei_ps.learners.torch.local import LocalOptimizer
from gadei_ps.learners.torch.lookup import embedding
from gadei_ps.learners.torch.optimizer import Optimizer
from gadei_ps.learners.torch.products import linear

# No module here may be named like one of these: its import would replace the function.
__all__ = ["LocalOptimizer", "Optimizer", "embedding", "linear"]
