/* Headers of frames; see mesh.h. Machines are little-endian, as the rest of gadei-ps demands. */
#include "mesh.h"

#include <string.h>

void mesh_write_header(struct mesh_header *header, uint16_t kind, uint64_t generation,
                       uint64_t round, uint32_t sender)
{
    memset(header, 0, sizeof *header);
    header->magic = MESH_MAGIC;
    header->version = MESH_VERSION;
    header->kind = kind;
    header->generation = generation;
    header->round = round;
    header->sender = sender;
}

void mesh_seal_header(struct mesh_header *header, uint32_t payload_sum)
{
    header->payload_sum = payload_sum;
    header->header_sum = mesh_checksum(header, offsetof(struct mesh_header, header_sum));
}

int mesh_header_holds(const struct mesh_header *header)
{
    return header->magic == MESH_MAGIC && header->version == MESH_VERSION &&
           header->header_sum == mesh_checksum(header, offsetof(struct mesh_header, header_sum));
}
