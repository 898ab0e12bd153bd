/* CUDA's words for the host's compiler: a block's threads are fibers of one thread of the processor,
 * which change where they wait for one another. Blocks run one after the other. */
#include <cstdio>
#include <cstdlib>
#include <ucontext.h>
#include <vector>
#ifdef __x86_64__
#include <xmmintrin.h>
#endif

#define __global__
#define __device__
#define __shared__ static thread_local

struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct index3 { unsigned x; };
static thread_local index3 threadIdx, blockIdx, blockDim, gridDim;

/* CuPy's option -ftz=true: subnormal numbers are zero, both read and computed. */
#ifdef __x86_64__
enum { FLUSH = 0x8040 };
static unsigned arithmetic() { return _mm_getcsr(); }
static void set_arithmetic(unsigned to) { _mm_setcsr(to); }
#else
enum { FLUSH = 0 };
static unsigned arithmetic() { return 0; }
static void set_arithmetic(unsigned) {}
#endif

/* The instructions that keep them. Volatile: between the two changes. */
[[maybe_unused]] static float plus(float a, float b)
{
    volatile float first = a, second = b, sum;
    const unsigned before = arithmetic();
    set_arithmetic(before & ~FLUSH);
    sum = first + second;
    set_arithmetic(before);
    return sum;
}

[[maybe_unused]] static float minus(float a, float b)
{
    return plus(a, __builtin_copysignf(b, __builtin_signbit(b) ? 1.0f : -1.0f));
}

struct fiber {
    ucontext_t context;
    std::vector<char> stack;
    bool done;
};
static thread_local std::vector<fiber> fibers;
static thread_local ucontext_t scheduler;
static thread_local unsigned running;
static thread_local void (*kernel)(const void *);
static thread_local const void *argument;

static void __syncthreads() { swapcontext(&fibers[running].context, &scheduler); }

static void body()
{
    kernel(argument);
    fibers[running].done = true;
    swapcontext(&fibers[running].context, &scheduler);
}

static void launch(unsigned blocks, unsigned threads, void (*which)(const void *), const void *with)
{
    if (fibers.size() < threads)
        fibers.resize(threads);
    const unsigned before = arithmetic();
    set_arithmetic(before | FLUSH); /* the fibers take it over */
    kernel = which;
    argument = with;
    gridDim.x = blocks;
    blockDim.x = threads;
    /* Blocks are in no order; the last ones first shows what a later one would write over, and the first
     * ones first, every second time, what an earlier one would. */
    static thread_local bool ascending;
    ascending = !ascending;
    for (unsigned left = blocks; left; left--) {
        blockIdx.x = ascending ? blocks - left : left - 1;
        for (unsigned i = 0; i < threads; i++) {
            fiber &one = fibers[i];
            one.stack.resize(1 << 14);
            one.done = false;
            getcontext(&one.context);
            one.context.uc_stack.ss_sp = one.stack.data();
            one.context.uc_stack.ss_size = one.stack.size();
            one.context.uc_link = nullptr;
            makecontext(&one.context, body, 0);
        }
        /* Threads are in no order either: every second time, the last one is the first. */
        bool upwards = left % 2;
        for (unsigned ended = 0; !ended; upwards = !upwards) {
            for (unsigned i = 0; i < threads; i++) {
                running = threadIdx.x = upwards ? i : threads - 1 - i;
                swapcontext(&scheduler, &fibers[running].context);
                ended += fibers[running].done;
            }
            if (ended && ended < threads) {
                fputs("some threads wait in __syncthreads(), others have ended\n", stderr);
                abort();
            }
        }
    }
    set_arithmetic(before);
}

#define LAUNCHER(name, args)                                                                 \
    static void call_##name(const void *with) { name(*(const args *)with); }                 \
    extern "C" unsigned long size_##name() { return sizeof(args); }                          \
    extern "C" void launch_##name(unsigned blocks, unsigned threads, const void *with)       \
    {                                                                                        \
        launch(blocks, threads, call_##name, with);                                          \
    }
