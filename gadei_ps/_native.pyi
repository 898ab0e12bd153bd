from typing import Any

import numpy.typing as npt
from typing_extensions import Buffer

PS_TIMEOUT: int
PS_STOPPED: int
PS_EVICTED: int
PS_FINISHED: int
LAND: int
LANDING_BYTES: int

def claim(ring: int, control: int, timeout_ns: int, /) -> int: ...
def publish(
    ring: int,
    control: int,
    clock: int,
    version: int,
    dtype: int,
    kind: int,
    blocks: int,
    payload_bytes: int,
    batch: int,
    samples: int,
    squares: float,
    rate_scale: float,
    loss: float,
    started: float,
    finished: float,
    /,
) -> int: ...
def push(
    ring: int,
    control: int,
    weights: int,
    dtype: int,
    spare: int,
    left: int,
    clock: int,
    version: int,
    batch: int,
    samples: int,
    rate_scale: float,
    loss: float,
    started: float,
    /,
    *gradients: int,
) -> int: ...
def prepare_landing(
    ring: int,
    control: int,
    landing: int,
    sums: int,
    tensors: int,
    parts: int,
    loss_there: int,
    clock: int,
    version: int,
    dtype: int,
    kind: int,
    blocks: int,
    payload_bytes: int,
    batch: int,
    samples: int,
    rate_scale: float,
    loss: float,
    started: float,
    /,
) -> None: ...
def copy(dtype: int, to: int, source: int, count: int, left: int, /) -> float: ...
def write_frame(
    weights: int, dtype: int, spare: int, left: int, payload: int, /, *gradients: int
) -> tuple[int, int, int, float]: ...
def nonzeros(values: int, count: int, /) -> int: ...
def sparse_product(
    to: int, factors: int, matrix: int, count: int, rows: int, width: int, /
) -> None: ...
def first_block(weights: int, /) -> int: ...
def append(
    weights: int,
    dtype: int,
    spare: int,
    left: int,
    payload: int,
    at: int,
    blocks: int,
    tensor: int,
    values: int,
    indices: int,
    count: int,
    factors: int,
    /,
) -> tuple[int, float]: ...
def sort_blocks(payload: int, blocks: int, /) -> None: ...
def wait_grant(ring: int, control: int, clock: int, timeout_ns: int, /) -> int: ...
def wait_applied(ring: int, control: int, sequence: int, timeout_ns: int, /) -> int: ...
def take_work(ring: int, control: int, timeout_ns: int, /) -> int: ...
def snapshot(control: int, shard: int, to: int, source: int, size: int, /) -> bool: ...
def lease_make(lease: int, /) -> None: ...
def lease_take(lease: int, timeout_ns: int, /) -> int: ...
def lease_release(lease: int, /) -> None: ...
def populate(address: int, size: int, /) -> None: ...
def futex_wait(word: int, expected: int, timeout_ns: int, /) -> None: ...
def futex_wake(word: int, /) -> None: ...
def bell(word: int, /) -> None: ...
def load(word: int, /) -> int: ...
def store(word: int, value: int, /) -> None: ...
def load32(word: int, /) -> int: ...
def store32(word: int, value: int, /) -> None: ...
def address(buffer: Buffer | npt.NDArray[Any], /) -> int: ...
def die_with_parent(signal: int, /) -> None: ...
def layout() -> dict[str, tuple[int, dict[str, tuple[int, int, str, str, str, str]]]]: ...
def numbers() -> dict[str, int]: ...
def codes() -> dict[str, dict[str, tuple[int, str]]]: ...
