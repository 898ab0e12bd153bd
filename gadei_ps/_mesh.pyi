from typing_extensions import Buffer

PLAN_BYTES: int
MESH_FINISHED: int
MESH_WOKEN: int
MESH_CLOSED: int
MESH_SILENT: int
MESH_ABSENT: int
MESH_FAILED: int
MESH_BAD_HEADER: int
MESH_OTHER_ROUND: int
MESH_UNEXPECTED: int
MESH_BAD_PAYLOAD: int
MESH_MEMBERS: int

def exchange(plan: Buffer, /) -> int: ...
def checksum(bytes: Buffer, /) -> int: ...
def checksum_plain(bytes: Buffer, /) -> int: ...
