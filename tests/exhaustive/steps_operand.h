/* Instructions of x86-64 that store: the register that addresses the operand, and the length. */
#ifndef STEPS_OPERAND_H
#define STEPS_OPERAND_H

#define _GNU_SOURCE
#include <stdint.h>
#include <sys/ucontext.h>

static const int OF_NUMBER[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP,
                                  REG_RSI, REG_RDI, REG_R8,  REG_R9,  REG_R10, REG_R11,
                                  REG_R12, REG_R13, REG_R14, REG_R15};

struct operand {
    int base;   /* index in gregs of the register that can be moved, for one step, to move the
                   operand by as much; -1: none, as the instruction uses it for more than that */
    int moves;  /* whether the instruction itself moves it (stos, movs) */
    int length; /* of the instruction; 0: not known here */
};

/* Bytes of the constant at the end of an instruction that stores; -1: not known here. */
static int constant_of(int map, int opcode, int is_short)
{
    if (map == 0) {
        if (opcode == 0x80 || opcode == 0x83 || opcode == 0xc0 || opcode == 0xc1 || opcode == 0xc6)
            return 1;
        if (opcode == 0x81 || opcode == 0xc7)
            return is_short ? 2 : 4;
        int is_plain = opcode < 0x40 && (opcode & 7) < 2; /* add, or, and, sub, xor ... to memory */
        int others = (opcode >= 0x86 && opcode <= 0x89) || (opcode >= 0xd0 && opcode <= 0xd3) ||
                     opcode == 0xfe || opcode == 0xff || opcode == 0x8f;
        return is_plain || others ? 0 : -1;
    }
    if (map == 1)
        return opcode == 0xba || opcode == 0xa4 || opcode == 0xac || opcode == 0xc2 ? 1 : 0;
    return map == 2 ? 0 : 1;
}

static struct operand operand_of(const uint8_t *begin)
{
    const uint8_t *at = begin;
    struct operand found = {-1, 0, 0};
    int b = 0, x = 0, r = 0, rex = 0, is_vector = 0, is_evex = 0, is_short = 0, opcode, map = 0;
    for (; *at == 0xf0 || *at == 0xf2 || *at == 0xf3 || *at == 0x66; at++)
        is_short |= *at == 0x66;
    if (*at == 0xc5) {
        is_vector = 1, map = 1, opcode = at[2], at += 3;
    } else if (*at == 0xc4 || *at == 0x62) {
        is_vector = 1, is_evex = *at == 0x62;
        b = !(at[1] & 0x20), x = !(at[1] & 0x40), map = at[1] & 7;
        at += is_evex ? 4 : 3;
        opcode = *at++;
        if (is_evex && map == 2 && opcode >= 0xa0 && opcode <= 0xa3)
            return found; /* a scatter */
    } else {
        if ((*at & 0xf0) == 0x40)
            rex = *at++, b = rex & 1, x = rex >> 1 & 1, r = rex >> 2 & 1;
        opcode = *at++;
        if (opcode == 0xaa || opcode == 0xab || opcode == 0xa4 || opcode == 0xa5)
            return (struct operand){REG_RDI, 1, 0};
        if (opcode == 0x0f) {
            map = 1, opcode = *at++;
            if (opcode == 0x38 || opcode == 0x3a)
                map = opcode == 0x38 ? 2 : 3, opcode = *at++;
        }
    }
    int form = *at >> 6, reg = (*at >> 3 & 7) | r << 3, low = *at & 7, base = low | b << 3;
    int displacement = form == 1 ? 1 : form == 2 ? 4 : 0;
    if (form == 3 || (form == 0 && low == 5))
        return found;
    at++;
    if (low == 4) {
        int index = (*at >> 3 & 7) | x << 3;
        base = (*at & 7) | b << 3;
        if ((form == 0 && (*at & 7) == 5) || index == base)
            return found;
        at++;
    }
    int is_cmpxchg = map == 1 && (opcode & 0xfe) == 0xb0 && base == 0;
    int has_high_byte = !rex && map == 0 && opcode == 0x88 && reg >= 4;
    if (base == 4 || (!is_vector && (reg == base || is_cmpxchg || has_high_byte)))
        return found;
    found.base = OF_NUMBER[base];
    int constant = constant_of(map, opcode, is_short);
    if (constant >= 0 && map <= 3)
        found.length = (int)(at - begin) + displacement + constant;
    return found;
}

#endif
