/*
 * What a GPU does with a gradient before it leaves, and with weights as they come.
 *
 * stage: all of a step, in one launch unless tensors or rows are many. The parts are done by blocks of
 * their own, at the same time:
 *
 *   rows   the gradient of some rows of a tensor, named in any order and repeated, after list_rows if
 *          they are many. Each row is written once, ascending, with its values added up in the order
 *          given. No atomics are used, so that the sum does not depend on chance, and the host need
 *          not wait for the number of rows.
 *   whole  gradients of whole tensors
 *   copy   weights that were pulled, to where the model has them
 *
 * Gradients go into the staging buffer, laid out and converted as the slot will hold them. In the same
 * pass the kernel does what native/ps_copy.c does on the host: sum of squares, search for values that
 * are not finite, residue of rounding, changes of buffers.
 *
 * gather: rows of the weights, read over the bus from the registered segment.
 *
 * Each kernel takes one struct by value; native/ps_cuda.c has the same structs. Apart from the qualifiers
 * and two instructions this is plain C++: the tests also compile it for the host.
 */
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

enum { FLOAT32 = 1, BFLOAT16 = 2, FLOAT16 = 3 };
enum { THREADS = 256, ITEMS = 224, AHEAD = 2, LINE = 64 };
#define SKIPPED (~0ull)
#define INFINITE 0x7f800000u
#define MAGNITUDE 0x7fffffffu

union word {
    float real;
    u32 bits;
};

/* CuPy compiles with -ftz=true: the operators of C then make zero of subnormal numbers, which the
 * host keeps. These two instructions keep them. */
#ifdef __CUDA_ARCH__
__device__ static inline float plus(float a, float b)
{
    float sum;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
    return sum;
}

__device__ static inline float minus(float a, float b)
{
    float difference;
    asm("sub.rn.f32 %0, %1, %2;" : "=f"(difference) : "f"(a), "f"(b));
    return difference;
}
#endif

/* A piece of a tensor, for one block of threads. */
struct chunk {
    u64 start;  /* of the piece, in the model's layout */
    u64 begin;  /* of the piece, in the tensor */
    u64 padded; /* count, and the gap up to the next tensor */
    u32 count;
    u32 tensor;
};

struct item {
    const float *from; /* NULL: a gradient of zero */
    u64 to;            /* bytes from the staging buffer's begin; SKIPPED: no part of the frame */
};

struct whole_args {
    const chunk *chunks;
    float *residue; /* of earlier roundings, in the model's layout, or NULL */
    char *staging;
    double *parts;  /* of the sum of squares, one for each chunk */
    u64 *rows;      /* of each tensor: how many are listed */
    u64 dense;      /* whether tensors lie as in the model, with its gaps; else in lines of 64 bytes */
    u32 wire;
    u32 first;      /* the tensor of items[0] */
    item items[ITEMS];
};

/* What a thread has seen of the values. */
struct seen {
    u32 largest; /* magnitude of a value as it is stored */
    double squares;
};

__device__ static inline u32 to_bfloat16(u32 bits, u32 *back)
{
    u32 stored = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    if ((bits & MAGNITUDE) > INFINITE)
        stored = (bits >> 16) | 0x40u;
    *back = stored << 16;
    return stored;
}

/* As native/ps_copy.c does it, to nearest even. */
__device__ static inline u32 to_float16(u32 bits, u32 *back)
{
    u32 magnitude = bits & MAGNITUDE, sign = (bits >> 16) & 0x8000u, half;
    word at;
    at.bits = magnitude;
    if (magnitude >= 0x47800000u) {
        half = magnitude > INFINITE ? 0x7e00u : 0x7c00u;
    } else if (magnitude < 0x38800000u) {
        at.real += 0.5f;
        half = at.bits - 0x3f000000u;
    } else {
        half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    }
    if (half < 0x400u) {
        at.real = (float)half * 0x1p-24f;
        *back = at.bits;
    } else {
        *back = half >= 0x7c00u ? (half << 13) | INFINITE : (half << 13) + (112u << 23);
    }
    *back |= sign << 16;
    return half | sign;
}

/* One value as it is stored: its low half for 16 bits. */
__device__ static inline u32 convert(float value, u32 wire, float *residue, seen *seen)
{
    word at, back;
    if (residue)
        value = plus(value, *residue);
    at.real = value;
    back = at;
    u32 stored = at.bits;
    if (wire == BFLOAT16)
        stored = to_bfloat16(at.bits, &back.bits);
    else if (wire == FLOAT16)
        stored = to_float16(at.bits, &back.bits);
    u32 magnitude = back.bits & MAGNITUDE;
    if (residue)
        *residue = magnitude < INFINITE ? minus(value, back.real) : 0.0f;
    if (magnitude > seen->largest)
        seen->largest = magnitude;
    return stored;
}

__device__ static inline void write(char *to, u64 i, u32 stored, u32 wire)
{
    if (wire == FLOAT32)
        ((u32 *)to)[i] = stored;
    else
        ((u16 *)to)[i] = (u16)stored;
}

__device__ static inline void one(char *to, const float *from, float *residue, u64 i, u32 wire,
                                  seen *seen)
{
    float value = from[i];
    double all = (double)value + (residue ? (double)residue[i] : 0.0);
    write(to, i, convert(value, wire, residue ? residue + i : 0, seen), wire);
    seen->squares += all * all;
}

/* Four values at 16-byte boundaries. Their squares are added as floats if the sum is finite: double
 * is slow on most devices. */
__device__ static inline void four(char *to, float4 v, u64 i, u32 wire, seen *seen)
{
    u32 a = convert(v.x, wire, 0, seen), b = convert(v.y, wire, 0, seen);
    u32 c = convert(v.z, wire, 0, seen), d = convert(v.w, wire, 0, seen);
    if (wire == FLOAT32) {
        *(float4 *)(to + 4 * i) = v; /* not the words above, which ptxas stores in three parts */
    } else {
        uint2 all = {a | b << 16, c | d << 16};
        *(uint2 *)(to + 2 * i) = all;
    }
    float squares = v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    if (squares <= 3e38f)
        seen->squares += squares;
    else
        seen->squares += (double)v.x * v.x + (double)v.y * v.y + (double)v.z * v.z + (double)v.w * v.w;
}

/* The sum over the block's threads, in a fixed order; infinite if a value was not finite. */
__device__ static inline void add_up(const seen *seen, double *part)
{
    __shared__ double sums[THREADS];
    word infinite;
    infinite.bits = INFINITE;
    sums[threadIdx.x] = seen->largest >= INFINITE ? infinite.real : seen->squares;
    __syncthreads();
    for (u32 half = THREADS / 2; half; half /= 2) {
        if (threadIdx.x < half)
            sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    if (!threadIdx.x)
        *part = sums[0];
}

__device__ static inline void stage_whole(const whole_args &a, u32 block)
{
    const chunk piece = a.chunks[block];
    const item item = a.items[piece.tensor - a.first];
    const u64 width = a.wire == FLOAT32 ? 4 : 2;
    seen seen = {0, 0.0};
    if (!piece.begin && !threadIdx.x)
        a.rows[piece.tensor] = 0;
    if (item.to != SKIPPED) {
        char *to = a.staging + item.to + piece.begin * width;
        u64 done = 0;
        if (item.from) {
            const float *from = item.from + piece.begin;
            float *residue = a.residue && a.wire != FLOAT32 ? a.residue + piece.start : 0;
            if (!residue && !((u64)from % 16) && !((u64)to % 16)) {
                done = piece.count & ~3u;
                /* Reads ahead; the compiler cannot, because it does not know that nothing overlaps. */
                for (u64 i = 4 * threadIdx.x; i < done; i += AHEAD * 4 * THREADS) {
                    float4 values[AHEAD];
#pragma unroll
                    for (u32 k = 0; k < AHEAD; k++)
                        if (i + k * 4 * THREADS < done)
                            values[k] = *(const float4 *)(from + i + k * 4 * THREADS);
#pragma unroll
                    for (u32 k = 0; k < AHEAD; k++)
                        if (i + k * 4 * THREADS < done)
                            four(to, values[k], i + k * 4 * THREADS, a.wire, &seen);
                }
            }
            for (u64 i = done + threadIdx.x; i < piece.count; i += THREADS)
                one(to, from, residue, i, a.wire, &seen);
            done = piece.count;
        }
        u64 line = (piece.count * width + LINE - 1) / LINE * LINE / width, end = piece.padded;
        if (!a.dense && end > line)
            end = line;
        for (u64 i = done + threadIdx.x; i < end; i += THREADS)
            write(to, i, 0, a.wire);
    }
    add_up(&seen, a.parts + block);
}

struct rows_args {
    const void *indices; /* `count`, in any order */
    const float *values;
    u64 count;
    u64 rows;            /* of the tensor */
    u64 width;
    u64 padding;         /* 1 + a row that counts as not named, or 0 */
    u64 *keys;           /* the least power of two from `count` on; NULL if count <= FEW, as `heads` */
    u32 *heads;          /* `count + 1`: of each row listed the begin of its keys; then their end */
    i64 *listed;         /* rows, each once, ascending; NULL if whole */
    u64 *found;          /* how many; BAD_ROW if one that is named does not exist */
    double *parts;       /* of the sum of squares */
    u64 part_count;      /* at least one for each block */
    char *to;            /* values: one row after the other, or, if whole, each in its place */
    float *residue;      /* of the tensor, or NULL */
    u32 wire;
    u32 whole;
    u64 narrow;          /* whether the indices are int32, not int64 */
};

__device__ static inline i64 index_at(const void *indices, u64 i, u64 narrow)
{
    return narrow ? ((const int *)indices)[i] : ((const i64 *)indices)[i];
}

/* A key is a row and a place where it is named, so that sorted keys have the places in the order
 * given. A tensor of 2^35 rows has no room on a device. */
enum { FEW = 2048, MANY_THREADS = 1024, PLACE_BITS = 29 };
#define NO_ROW (~0ull >> PLACE_BITS)
#define BAD_ROW (~0ull) /* PS_BAD_ROWS in native/ps_land.h */

__device__ static inline u64 row_of(u64 key)
{
    return key >> PLACE_BITS;
}

__device__ static inline u64 place_of(u64 key)
{
    return key & ((1u << PLACE_BITS) - 1);
}

/* Bitonic sort by one block: of n keys, a power of two. */
__device__ static inline void sort(u64 *keys, u32 n)
{
    for (u32 size = 2; size <= n; size *= 2) {
        for (u32 apart = size / 2; apart; apart /= 2) {
            __syncthreads();
            for (u32 i = threadIdx.x; i < n / 2; i += blockDim.x) {
                u32 low = 2 * i - (i & (apart - 1));
                u64 a = keys[low], b = keys[low + apart];
                if ((a > b) == !(low & size)) {
                    keys[low] = b;
                    keys[low + apart] = a;
                }
            }
        }
    }
    __syncthreads();
}

/* Finds the begin of each row's keys by one block, and, if `report`, lists the rows. Returns their
 * number. */
__device__ static inline u32 list(const rows_args &a, u64 *keys, u32 *heads, int report)
{
    __shared__ u32 found[MANY_THREADS], bad;
    u32 n = 1;
    bad = 0;
    __syncthreads();
    while (n < a.count)
        n *= 2;
    for (u32 i = threadIdx.x; i < n; i += blockDim.x) {
        u64 row = i < a.count ? (u64)index_at(a.indices, i, a.narrow) : NO_ROW;
        if (row >= a.rows) { /* or negative */
            row = NO_ROW;
            if (i < a.count)
                bad = 1;
        }
        keys[i] = (row + 1 == a.padding ? NO_ROW : row) << PLACE_BITS | i;
    }
    sort(keys, n);
    const u32 each = (n + blockDim.x - 1) / blockDim.x, begin = threadIdx.x * each;
    const u32 end = begin + each < n ? begin + each : n;
    u32 mine = 0, before = 0, all = 0;
    for (u32 i = begin; i < end; i++)
        mine += row_of(keys[i]) != NO_ROW && (!i || row_of(keys[i]) != row_of(keys[i - 1]));
    found[threadIdx.x] = mine;
    __syncthreads();
#pragma unroll 8
    for (u32 i = 0; i < blockDim.x && i * each < n; i++) {
        before += i < threadIdx.x ? found[i] : 0;
        all += found[i];
    }
    for (u32 i = begin; i < end; i++) {
        u64 row = row_of(keys[i]);
        if (row == NO_ROW)
            break;
        if (!i || row != row_of(keys[i - 1])) {
            if (report && a.listed)
                a.listed[before] = (i64)row;
            heads[before++] = i;
        }
        if (i + 1 == n || row_of(keys[i + 1]) == NO_ROW)
            heads[all] = i + 1;
    }
    if (report && !threadIdx.x)
        *a.found = bad ? BAD_ROW : all;
    __syncthreads();
    return all;
}

/* For more than FEW places, by one block of MANY_THREADS, before `stage`. */
extern "C" __global__ void list_rows(const rows_args a)
{
    list(a, a.keys, a.heads, 1);
}

/* A block does up to THREADS columns of a row at a time. Each one lists a few rows anew: that takes
 * less time than a launch. */
__device__ static inline void add_rows(const rows_args &a, u32 block, u32 blocks)
{
    __shared__ u64 few_keys[FEW];
    __shared__ u32 few_heads[FEW + 1];
    const int few = !a.keys;
    const u64 all = few ? list(a, few_keys, few_heads, !block) : *a.found;
    const u64 *keys = few ? few_keys : a.keys;
    const u32 *heads = few ? few_heads : a.heads;
    const u32 columns = (u32)((a.width + THREADS - 1) / THREADS);
    const u32 pieces = all == BAD_ROW ? 0 : (u32)all * columns;
    const u64 width = a.wire == FLOAT32 ? 4 : 2;
    seen seen = {0, 0.0};
    for (u32 piece = block; piece < pieces; piece += blocks) {
        u64 row = piece / columns, k = piece % columns * THREADS + threadIdx.x;
        u32 at = heads[row], end = heads[row + 1];
        u64 number = row_of(keys[at]);
        if (k >= a.width)
            continue;
        float sum = a.values[place_of(keys[at]) * a.width + k];
#pragma unroll 8
        for (at++; at < end; at++)
            sum = plus(sum, a.values[place_of(keys[at]) * a.width + k]);
        float *residue = a.residue && a.wire != FLOAT32 ? a.residue + number * a.width + k : 0;
        char *to = a.to + ((a.whole ? number : row) * a.width + k) * width;
        one(to, &sum, residue, 0, a.wire, &seen);
    }
    for (u64 i = blocks + (u64)block * THREADS + threadIdx.x; i < a.part_count; i += (u64)blocks * THREADS)
        a.parts[i] = 0.0;
    add_up(&seen, a.parts + block);
}

struct copy_args {
    const float4 *from; /* whole lines of 64 bytes */
    float4 *to;
    u64 count;
};

__device__ static inline void copy(const copy_args &a, u32 block)
{
    const u64 begin = (u64)block * AHEAD * THREADS + threadIdx.x;
    float4 values[AHEAD];
#pragma unroll
    for (u32 k = 0; k < AHEAD; k++)
        if (begin + k * THREADS < a.count)
            values[k] = a.from[begin + k * THREADS];
#pragma unroll
    for (u32 k = 0; k < AHEAD; k++)
        if (begin + k * THREADS < a.count)
            a.to[begin + k * THREADS] = values[k];
}

struct stage_args {
    const u32 *loss; /* a float, or NULL */
    u32 *loss_to;
    u32 rows_blocks, whole_blocks; /* the other blocks copy */
    rows_args rows;
    whole_args whole;
    copy_args copy;
};

/* Blocks mostly begin in the order of their numbers, and those of rows take longest. */
extern "C" __global__ void stage(const stage_args a)
{
    const u32 block = blockIdx.x, others = a.rows_blocks + a.whole_blocks;
    if (a.loss && !block && !threadIdx.x)
        *a.loss_to = *a.loss;
    if (block < a.rows_blocks)
        add_rows(a.rows, block, a.rows_blocks);
    else if (block < others)
        stage_whole(a.whole, block - a.rows_blocks);
    else
        copy(a.copy, block - others);
}

struct gather_args {
    const float *table;  /* `rows` times `width`, in the host's registered memory */
    const void *indices; /* `count`; a row that does not exist reads as zeros, and its gradient is
                            refused */
    float *to;
    u64 rows, width, count;
    u64 narrow;          /* see rows_args */
};

extern "C" __global__ void gather(const gather_args a)
{
    const u64 apart = (u64)gridDim.x * blockDim.x, end = a.count * a.width;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < end; i += apart) {
        i64 row = index_at(a.indices, i / a.width, a.narrow);
        int there = row >= 0 && (u64)row < a.rows;
        a.to[i] = there ? a.table[(u64)row * a.width + i % a.width] : 0.0f;
    }
}
